"""Context groups of a micro-batch: errors, shares of ranks, limits and JSON."""

import json

import pytest

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import ContextGroup, MicroBatch, ReplicaPlan
from megatron.hydraulis.strategy import Scheme, Strategy

WAVE = MicroBatch(
    (3, 1, 0, 2),
    (10, 1, 4, 5),
    (ContextGroup(0, 2, 1), ContextGroup(2, 1, 0), ContextGroup(3, 1, 3)),
)
LENGTHS = (4, 1, 5, 10)


def replica_plan(
    micro_batch: MicroBatch = WAVE, scheme: Scheme | None = None, tp: int = 1
) -> ReplicaPlan:
    scheme = Scheme(tp=tp, cp=4, splits_cp=True) if scheme is None else scheme
    return ReplicaPlan(scheme, tuple(range(scheme.num_ranks)), (micro_batch,), 1.0)


def test_every_column_runs_its_groups_share() -> None:
    shares = [WAVE.share_of(column, 4) for column in range(4)]
    assert [share.sequences for share in shares] == [(3,), (3,), (), (1, 0, 2)]
    assert [share.lengths for share in shares] == [(10,), (10,), (), (1, 4, 5)]
    assert [share.group.offset for share in shares] == [0, 0, 2, 3]
    with pytest.raises(IndexError, match="cp coordinate 4"):
        WAVE.share_of(4, 4)


def test_without_groups_all_columns_share_all() -> None:
    plain = MicroBatch((0, 1), (4, 1))
    (share,) = plain.shares(3)
    assert (share.group, share.sequences, share.lengths) == (ContextGroup(0, 3, 2), (0, 1), (4, 1))


def test_a_group_costs_what_the_scheme_of_its_size_does() -> None:
    scheme = Scheme(tp=2, cp=4, pp=2, layers=(1, 3), splits_cp=True)
    schemes = [scheme for scheme, _ in replica_plan(scheme=scheme).shares(WAVE)]
    assert schemes == [Scheme(2, 2, 2, (1, 3)), Scheme(2, 1, 2, (1, 3)), Scheme(2, 1, 2, (1, 3))]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([(0, 3, 4), (3, 1, 0)], "power of two"),
        ([(0, 1, 4), (1, 2, 0), (3, 1, 0)], "a multiple of it"),
        ([(0, 1, 2), (2, 2, 2)], "follow on one another"),
        ([(2, 2, 4)], "follow on one another"),
        ([(0, 2, 4), (0, 2, 0)], "follow on one another"),
        ([(0, 2, 3), (2, 2, 0)], "share all 4 sequences"),
        ([(0, 2, 3), (2, 2, 2)], "share all 4 sequences"),
    ],
)
def test_groups_that_do_not_tile_are_refused(
    groups: list[tuple[int, int, int]], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        MicroBatch(WAVE.sequences, WAVE.lengths, tuple(ContextGroup(*group) for group in groups))


@pytest.mark.parametrize("numbers", [(0, 0, 1), (-1, 1, 1), (0, 1, -1)])
def test_impossible_groups_are_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(PlanError, match="at least 1 rank, from rank 0 on"):
        ContextGroup(*numbers)


def test_groups_need_a_scheme_that_splits_and_its_width() -> None:
    with pytest.raises(PlanError, match="only a scheme like cp8~"):
        replica_plan(scheme=Scheme(cp=4))
    with pytest.raises(PlanError, match="all 8 cp ranks"):
        replica_plan(scheme=Scheme(cp=8, splits_cp=True))


def test_json_has_groups_only_if_there_are_any() -> None:
    replica = replica_plan()
    content = json.loads(json.dumps(replica.to_json()))
    assert content["micro_batches"][0]["groups"] == [[0, 2, 1], [2, 1, 0], [3, 1, 3]]
    assert ReplicaPlan.from_json(JsonObject(content, "replica", PlanError)) == replica
    assert "groups" not in MicroBatch((0,), (1,)).to_json()


@pytest.mark.parametrize("entry", [[0, 4], [0, 4, 4.0], [0, 4, True], "0,4,4", [0, 4, 4, 4]])
def test_groups_of_another_form_are_refused(entry: object) -> None:
    content = {**WAVE.to_json(), "groups": [entry]}
    with pytest.raises(PlanError, match="three whole numbers"):
        MicroBatch.from_json(JsonObject(content, "micro-batch", PlanError))


def test_the_digest_depends_on_the_groups() -> None:
    other = MicroBatch(WAVE.sequences, WAVE.lengths, (ContextGroup(0, 4, 4),))
    digests = {
        IterationPlan(
            iteration=0,
            strategy="cp4~",
            replicas=(replica_plan(micro_batch),),
            predicted_time_s=1.0,
        ).digest
        for micro_batch in (WAVE, other, MicroBatch(WAVE.sequences, WAVE.lengths))
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({1: 10, 2: 12}, None),
        # 10 tokens on two ranks are padded to a multiple of 4.
        ({1: 10, 2: 11}, "12 tokens with padding on cp ranks 0 to 1 but the limit is 11"),
        ({1: 9, 2: 12}, "10 tokens but the limit is 9"),
    ],
)
def test_limits_hold_for_every_group(limits: dict[int, int], message: str | None) -> None:
    strategy = Strategy.parse("cp4~", 4)
    plan = IterationPlan(
        iteration=0, strategy=strategy.name, replicas=(replica_plan(),), predicted_time_s=1.0
    )
    if message is None:
        plan.validate(LENGTHS, strategy, lambda scheme: limits[scheme.cp])
    else:
        with pytest.raises(PlanError, match=message):
            plan.validate(LENGTHS, strategy, lambda scheme: limits[scheme.cp])


@pytest.mark.parametrize(
    ("scheme", "lengths", "num_tokens"),
    [
        (Scheme(tp=2), (3, 4), 8),
        (Scheme(cp=2), (3, 5), 4 + 8),
        (Scheme(tp=2, cp=2), (3,), 8),
        (Scheme(tp=2, cp=4), (1, 9), 32),
        (Scheme(tp=3, cp=2), (), 12),
        (Scheme(), (), 1),
    ],
)
def test_rows_are_padded_for_chunks_and_for_tp(
    scheme: Scheme, lengths: tuple[int, ...], num_tokens: int
) -> None:
    assert scheme.row_tokens(lengths) == num_tokens
