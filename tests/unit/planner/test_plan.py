"""Plan types: invalid values, JSON, digest, validation against a batch."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.plan import IterationPlan, StageReport
from megatron.hydraulis.planner.replica_plan import MicroBatch, ReplicaPlan
from megatron.hydraulis.strategy import Scheme, Strategy

LENGTHS = [30, 10, 20, 40]
STRATEGY = Strategy.parse("tp2+pp2:1,2+tp1+idle", 6, name="mixed")


def make_plan() -> IterationPlan:
    tp2, pp2, tp1 = STRATEGY.replicas
    return IterationPlan(
        iteration=7,
        strategy="mixed",
        replicas=(
            ReplicaPlan(
                tp2.scheme,
                tp2.ranks,
                (MicroBatch((3,), (40,)), MicroBatch((1, 2), (10, 20))),
                0.5,
            ),
            ReplicaPlan(pp2.scheme, pp2.ranks, (MicroBatch((0,), (30,)),), 0.25),
            ReplicaPlan(tp1.scheme, tp1.ranks, (), 0.0),
        ),
        predicted_time_s=0.5,
        dispatch=StageReport(objective_s=0.5, bound_s=0.4, seconds=0.01, status="greedy"),
        plan_time_s=0.02,
    )


def limit(scheme: Scheme) -> int:
    return 40


def test_counts() -> None:
    plan = make_plan()
    assert plan.num_sequences == 4
    assert plan.num_tokens == 100
    assert plan.replica_times_s == (0.5, 0.25, 0.0)
    owner = plan.replica_of(3)
    assert owner is not None
    assert owner.replica.pp_ranks(0, 0) == (2, 3)
    assert plan.replica_of(5) is None


def test_imbalance_weighs_replicas_by_their_ranks() -> None:
    assert make_plan().imbalance == pytest.approx(0.5 * 5 / (0.5 * 2 + 0.25 * 2 + 0.0))


def test_imbalance_of_a_plan_without_work_is_one() -> None:
    idle = ReplicaPlan(Scheme(), (0,), (), 0.0)
    plan = IterationPlan(iteration=0, strategy="tp1", replicas=(idle,), predicted_time_s=0.0)
    assert plan.imbalance == 1.0


def test_a_valid_plan_passes() -> None:
    make_plan().validate(LENGTHS, STRATEGY, limit)


@pytest.mark.parametrize(
    ("lengths", "strategy", "max_tokens", "message"),
    [
        ([*LENGTHS, 5], STRATEGY, 40, "1 of 5 are in no micro-batch, the first of them 4"),
        (LENGTHS[:3], STRATEGY, 40, "names sequence 3 but the batch has 3 sequences"),
        ([30, 10, 21, 40], STRATEGY, 40, "sequence 2 is planned with 20 tokens but has 21"),
        (LENGTHS, STRATEGY, 39, r"micro-batch 0 of replica 0 \(tp2\) has 40 tokens but the limit"),
        (LENGTHS, Strategy.parse("6*tp1", 6, name="other"), 40, "'mixed' but .* 'other'"),
        (LENGTHS, Strategy.parse("2*tp2+2*idle", 6, name="mixed"), 40, "3 replicas but .* has 2"),
        (
            LENGTHS,
            Strategy.parse("tp2@1,0+pp2:1,2@2,3+tp1@4+idle", 6, name="mixed"),
            40,
            r"replica 0 is tp2 on ranks \[0, 1\] but .* on ranks \[1, 0\]",
        ),
    ],
)
def test_plans_for_another_batch_or_strategy(
    lengths: list[int], strategy: Strategy, max_tokens: int, message: str
) -> None:
    with pytest.raises(PlanError, match=f"plan of iteration 8: .*{message}"):
        make_plan().validate(lengths, strategy, lambda scheme: max_tokens)


@pytest.mark.parametrize(
    ("sequences", "lengths", "message"),
    [
        ((), (), "at least 1 sequence"),
        ((1, 2), (5,), "2 sequences and 1 lengths"),
        ((1, 1), (5, 5), "distinct sequences"),
        ((-1,), (5,), "distinct sequences counted from 0"),
        ((1,), (0,), "a length is 0"),
    ],
)
def test_impossible_micro_batches(
    sequences: tuple[int, ...], lengths: tuple[int, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        MicroBatch(sequences, lengths)


def test_impossible_shares() -> None:
    with pytest.raises(PlanError, match=r"predicted_time_s of a replica .* nan"):
        ReplicaPlan(Scheme(), (0,), (), float("nan"))
    with pytest.raises(PlanError, match="tp2 needs 2 ranks but 1 are listed"):
        ReplicaPlan(Scheme(tp=2), (0,), (), 0.0)


def test_impossible_reports() -> None:
    with pytest.raises(PlanError, match=r"objective 0\.4 s is below the bound 0\.5 s"):
        StageReport(objective_s=0.4, bound_s=0.5, seconds=0.0, status="greedy")


def test_impossible_plans() -> None:
    plan = make_plan()
    with pytest.raises(PlanError, match="sequence 3 is in two micro-batches"):
        replace(
            plan,
            replicas=(
                plan.replicas[0],
                replace(plan.replicas[1], micro_batches=plan.replicas[0].micro_batches[:1]),
            ),
        )
    with pytest.raises(PlanError, match="rank 0 is in two"):
        replace(plan, replicas=(plan.replicas[0], ReplicaPlan(Scheme(), (0,), (), 0.0)))
    with pytest.raises(PlanError, match=r"0\.1 s are predicted and 0\.5 s for the slowest"):
        replace(plan, predicted_time_s=0.1)
    with pytest.raises(PlanError, match="at least 1 replica"):
        replace(plan, replicas=())


def test_json_round_trip_through_text() -> None:
    plan = make_plan()
    assert IterationPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_json_as_documented() -> None:
    content = make_plan().to_json()
    assert content["replicas"][1] == {
        "scheme": {"tp": 1, "cp": 1, "pp": 2, "layers": [1, 2]},
        "ranks": [2, 3],
        "predicted_time_s": 0.25,
        "micro_batches": [{"sequences": [0], "lengths": [30]}],
    }
    assert content["packing"] is None


def damaged(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    content = make_plan().to_json()
    here: Any = content
    for key in path[:-1]:
        here = here[key]
    here[path[-1]] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("iteration",), "7", "plan: iteration must be a whole number but is '7'"),
        (("iteration",), True, "plan: iteration must be a whole number but is True"),
        (("colour",), 1, "plan: has the unknown keys 'colour'"),
        (("replicas",), {}, "plan: replicas must be a list"),
        (("replicas", 0), 3, "replica 0 of the plan: must be an object but is 3"),
        (("replicas", 1, "ranks"), [2], "pp2:1,2 needs 2 ranks but 1 are listed"),
        (("replicas", 1, "scheme", "tp"), 0, "scheme of replica 1 of the plan: .* tp is 0"),
        (("replicas", 1, "scheme", "splits_cp"), 1, "splits_cp must be true or false but is 1"),
        (
            ("replicas", 0, "micro_batches", 1),
            {"sequences": [1]},
            "micro-batch 1 of replica 0 of the plan: needs 'lengths'",
        ),
        (("dispatch", "gap"), "small", "dispatch of the plan: gap must be a number"),
        (("predicted_time_s",), float("inf"), "predicted_time_s of the iteration must be finite"),
    ],
)
def test_damaged_json(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        IterationPlan.from_json(damaged(path, value))


def test_a_missing_key_is_named() -> None:
    content = make_plan().to_json()
    del content["packing"]
    with pytest.raises(PlanError, match="plan: needs 'packing' but lacks it"):
        IterationPlan.from_json(content)


def test_the_digest_ignores_seconds_and_nothing_else() -> None:
    plan = make_plan()
    assert plan.dispatch is not None
    slower = replace(plan, plan_time_s=9.0, dispatch=replace(plan.dispatch, seconds=8.0))
    assert slower.digest == plan.digest
    first, *others = plan.replicas
    reversed_order = replace(first, micro_batches=first.micro_batches[::-1])
    changed = [
        replace(plan, iteration=8),
        replace(plan, strategy="other"),
        replace(plan, predicted_time_s=0.6),
        replace(plan, dispatch=None),
        replace(plan, dispatch=replace(plan.dispatch, bound_s=0.45)),
        replace(plan, replicas=(reversed_order, *others)),
    ]
    assert len({plan.digest, *(other.digest for other in changed)}) == 7


def test_the_digest_is_the_same_everywhere() -> None:
    # Ranks of different processes compare digests: neither hash seeds nor versions may matter.
    plan = IterationPlan(
        iteration=0,
        strategy="tp1",
        replicas=(ReplicaPlan(Scheme(), (0,), (MicroBatch((0,), (5,)),), 0.125),),
        predicted_time_s=0.125,
    )
    text = (
        '{"dispatch":null,"iteration":0,"packing":null,"predicted_time_s":0.125,"replicas":'
        '[{"micro_batches":[{"lengths":[5],"sequences":[0]}],"predicted_time_s":0.125,'
        '"ranks":[0],"scheme":{"cp":1,"pp":1,"tp":1}}],"strategy":"tp1"}'
    )
    assert plan.digest == hashlib.sha256(text.encode()).hexdigest()
