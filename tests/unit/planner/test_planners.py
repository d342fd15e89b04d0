"""The planners on special batches: plans, marks, statuses, determinism."""

import inspect
import json
import logging
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import inputs
from megatron.hydraulis.cost_model import Coefficients, ProfileCostModel, pipeline_time_ms
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.planner import planners, search
from megatron.hydraulis.planner.costs import SchemeCost
from megatron.hydraulis.planner.plan import (
    IterationPlan,
    Planner,
    StageReport,
    is_marked,
    plan_status,
)
from megatron.hydraulis.planner.planners import (
    CertifiedPlanner,
    GreedyPlanner,
    RecordedPlans,
    ScheduledPlanner,
)
from megatron.hydraulis.planner.relaxation import Relaxation
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.brute_force import ReplicaFigures, best_makespan_ms
from tests.support.planning import TableCostModel

MODEL = TableCostModel(
    limits={(1, 1, 1): 1000, (2, 1, 1): 4000, (1, 1, 2): 2000, (1, 1, 4): 3000},
    times=lambda scheme: Coefficients(2e-5 / scheme.num_ranks, 0.2 / scheme.num_ranks, 3.0),
)


def pool_of(*texts: str, num_ranks: int = 4) -> Pool:
    return Pool.of(*(Strategy.parse(text, num_ranks) for text in texts))


@pytest.mark.parametrize(
    "planner", [CertifiedPlanner, GreedyPlanner, RecordedPlans, ScheduledPlanner]
)
def test_every_planner_has_the_same_signature(planner: type[Planner]) -> None:
    expected, found = (inspect.signature(kind.plan).parameters for kind in (Planner, planner))
    assert [(p.name, p.kind, p.default) for p in found.values()] == [
        (p.name, p.kind, p.default) for p in expected.values()
    ]


PLANNERS = pytest.mark.parametrize("planner", [CertifiedPlanner, GreedyPlanner])


def planned(
    lengths: list[int],
    *texts: str,
    model: TableCostModel = MODEL,
    planner: type[CertifiedPlanner] | type[GreedyPlanner] = CertifiedPlanner,
) -> IterationPlan:
    """A plan that has been checked against what it was made for."""
    pool = pool_of(*texts)
    plan = planner(pool, model).plan(lengths)
    plan.validate(lengths, pool.strategy(plan.strategy), model.max_tokens)
    rounding = 0.0 if planner is CertifiedPlanner else 1e-9
    for report in (plan.dispatch, plan.packing):
        assert report is not None
        assert report.bound_s * (1 - rounding) <= report.objective_s == plan.makespan_s
    return plan


def test_coefficients_may_be_whole_numbers() -> None:
    # A user's cost model may return ints.
    model = TableCostModel(default_limit=60, times=lambda _: Coefficients(0, 0, 5))
    plan = planned([20], "pp4", "4*tp1", model=model)
    assert plan.dispatch is not None
    assert (plan.dispatch.objective_s, plan.dispatch.status) == (0.005, "certified")


def test_time_of_the_bound_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock_s = [0.0]
    is_impossible = Relaxation.is_impossible

    def takes_a_second(relaxation: Relaxation, time_ms: float) -> bool:
        clock_s[0] += 1.0
        return is_impossible(relaxation, time_ms)

    monkeypatch.setattr(search, "time", SimpleNamespace(perf_counter=lambda: clock_s[0]))
    monkeypatch.setattr(Relaxation, "is_impossible", takes_a_second)
    plan = planned([900, 700, 400, 300, 200, 100, 60, 40], "2*pp2")
    assert plan.dispatch is not None
    assert plan.dispatch.seconds == clock_s[0] > 1.0


def test_it_is_a_planner() -> None:
    planner: Planner = CertifiedPlanner(pool_of("4*tp1"), MODEL)
    assert planner.plan([5], iteration=3).iteration == 3


@PLANNERS
def test_one_sequence_goes_to_the_replica_that_is_fastest_with_it(planner: Any) -> None:
    plan = planned([900], "4*tp1", "tp2+2*tp1", "pp4", planner=planner)
    assert plan.strategy == "tp2+2*tp1"
    assert [replica.num_sequences for replica in plan.replicas] == [1, 0, 0]
    assert plan.dispatch is not None
    if planner is CertifiedPlanner:
        assert (plan.dispatch.gap, plan.dispatch.status) == (0.0, "certified")


@PLANNERS
@pytest.mark.parametrize("num", [8, 64])
def test_equal_sequences_spread_evenly(num: int, planner: Any) -> None:
    plan = planned([100] * num, "4*tp1", planner=planner)
    assert [replica.num_sequences for replica in plan.replicas] == [num // 4] * 4
    assert plan.imbalance == pytest.approx(1.0)
    assert plan.dispatch is not None
    assert planner is GreedyPlanner or plan.dispatch.status == "certified"


@PLANNERS
@pytest.mark.parametrize("text", ["4*tp1", "tp2+2*tp1", "2*pp2"])
def test_fewer_sequences_than_replicas(text: str, planner: Any) -> None:
    plan = planned([700], text, planner=planner)
    assert sorted(replica.num_sequences for replica in plan.replicas)[-2:] == [0, 1]
    assert min(plan.replica_times_s) == 0.0


def test_one_long_sequence_among_thousands() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(5, 60) for _ in range(2000)]
    lengths.insert(700, 3900)
    plan = planned(lengths, "tp2+2*tp1", "4*tp1")
    # Only tp2 holds it, and 4*tp1 no plan at all.
    assert plan.strategy == "tp2+2*tp1"
    assert 700 in {s for batch in plan.replicas[0].micro_batches for s in batch.sequences}
    assert plan.dispatch is not None
    assert plan.dispatch.gap <= 0.02


# With searches that fewer starts, estimates and packings fed these gaps were 3.2, 4.4 and 3.2 %.
@pytest.mark.parametrize(
    ("seed", "name", "strategy", "most_gap"),
    [
        (5, "7B A800, 32 ranks, 32K, 2048 a rank", "tp8pp2+2*tp4+pp2+3*tp2", 0.012),
        (8, "7B A800, 16 ranks, 16K, 8192 a rank", "tp4+3*pp2+3*tp2", 0.03),
        (4, "13B a100-80g, 64 ranks, 32K, 8192 a rank", "tp8pp2+4*tp2pp2+8*tp4", 0.02),
    ],
)
def test_pipelines_and_other_replicas_share_the_work_well(
    seed: int, name: str, strategy: str, most_gap: float
) -> None:
    case = next(case for case in inputs.pool_cases(seed) if case.name == name)
    planner = CertifiedPlanner(Pool.of(case.pool.strategy(strategy)), case.profile)
    plan = planner.plan(case.batch)
    assert plan.dispatch is not None
    assert plan.dispatch.gap < most_gap


def test_in_line_with_a_step_pipelines_are_planned_nearly_as_well() -> None:
    pool = Pool.of(inputs.pool().strategy("S6"))
    batch = inputs.LengthDistribution().batch(0, inputs.BATCH_TOKENS, 12_416)
    model = inputs.cost_model()
    planners = (
        CertifiedPlanner(pool, model, is_in_line=True),
        CertifiedPlanner(pool, model),
        GreedyPlanner(pool, model),
    )
    in_line, certified, greedy = (planner.plan(batch) for planner in planners)
    assert in_line.predicted_time_s < 1.01 * certified.predicted_time_s
    assert in_line.predicted_time_s < 0.92 * greedy.predicted_time_s
    assert in_line.digest == planners[0].plan(batch).digest


def test_in_line_with_a_step_a_good_first_plan_is_not_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def search_(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(search.StrategySearch, "_search", search_)
    pool = pool_of("4*tp1", "2*tp2", "tp2+2*tp1")
    plan = CertifiedPlanner(pool, MODEL, is_in_line=True).plan([*range(60, 140)] * 5)
    assert not is_marked(plan_status(plan))


def test_a_useless_class_gets_nothing() -> None:
    slow = TableCostModel(
        times=lambda scheme: Coefficients(0.0, 100.0 if scheme.pp > 1 else 0.1, 1.0)
    )
    for lengths in ([50, 60, 70], [50 + i for i in range(20)]):
        plan = planned(lengths, "pp2+2*tp1", model=slow)
        (pipeline,) = (replica for replica in plan.replicas if replica.scheme.pp == 2)
        assert pipeline.num_sequences == 0


def test_a_class_that_holds_no_sequence_gets_nothing() -> None:
    small = TableCostModel(limits={(1, 1, 1): 10})
    plan = planned([50, 60, 70, 11, 12, 13, 14, 15, 16, 17], "tp2+2*tp1", model=small)
    assert [replica.num_sequences for replica in plan.replicas] == [10, 0, 0]


def test_idle_ranks_get_nothing() -> None:
    plan = planned([500, 400, 300], "tp2+2*idle")
    assert [replica.ranks for replica in plan.replicas] == [(0, 1)]
    assert plan.replica_of(3) is None


@PLANNERS
def test_lengths_may_be_of_numpy(planner: Any) -> None:
    lengths = [7, 900, 30]
    plan = planner(pool_of("4*tp1"), MODEL).plan(np.array(lengths))
    assert plan.digest == planner(pool_of("4*tp1"), MODEL).plan(lengths).digest
    assert IterationPlan.from_json(json.loads(json.dumps(plan.to_json()))).digest == plan.digest


@PLANNERS
def test_overhead_counts_in_the_choice_and_in_the_predicted_time(planner: Any) -> None:
    lengths, texts = [100, 200, 300, 400], ("4*tp1", "2*pp2")
    assert planned(lengths, *texts, planner=planner).strategy == "4*tp1"
    plan = planned(
        lengths,
        *texts,
        model=replace(MODEL, overheads={"4*tp1": 1e4, "2*pp2": 7.0}),
        planner=planner,
    )
    assert plan.strategy == "2*pp2"
    assert plan.predicted_time_s == pytest.approx(plan.makespan_s + 7e-3)


def test_every_strategy_is_accounted_for() -> None:
    lengths = [3500, *([50] * 20)]
    explanation = CertifiedPlanner(pool_of("tp2+2*tp1", "4*tp1", "pp4"), MODEL).explain(lengths)
    outcomes = {outcome.name: outcome for outcome in explanation.strategies}
    assert list(outcomes) == ["tp2+2*tp1", "4*tp1", "pp4"]
    assert explanation.plan.strategy == "tp2+2*tp1"
    assert outcomes["tp2+2*tp1"].is_chosen
    # The longest sequence is above the limits of both: 1,000 and 3,000 tokens.
    for name in ("4*tp1", "pp4"):
        assert outcomes[name].bound_s is None
        assert "can hold the longest sequence" in outcomes[name].why_not_chosen


def test_a_strategy_that_cannot_win_is_proved_worse() -> None:
    explanation = CertifiedPlanner(pool_of("4*tp1", "pp4"), MODEL).explain([100] * 40)
    beaten = next(outcome for outcome in explanation.strategies if not outcome.is_chosen)
    assert beaten.why_not_chosen == "proved to be no faster than the plan for '4*tp1'"
    assert beaten.bound_s is not None
    assert beaten.bound_s >= explanation.plan.predicted_time_s * (1 - 1e-8)


def test_a_plan_has_the_times_of_every_strategy_that_holds_the_batch() -> None:
    explanation = CertifiedPlanner(pool_of("4*tp1", "2*pp2", "pp4"), MODEL).explain([900] * 9)
    plan = explanation.plan
    found = {time.name: time for time in plan.strategy_times_s}
    assert set(found) == {"4*tp1", "2*pp2", "pp4"}
    for outcome in explanation.strategies:
        assert found[outcome.name].found_s == pytest.approx(outcome.found_s, abs=1e-6)
        assert found[outcome.name].bound_s == pytest.approx(outcome.bound_s, abs=1e-6)
    assert found[plan.strategy].found_s == min(time.found_s for time in found.values())
    # They say nothing of what is run.
    without = replace(plan, strategy_times_s=())
    assert without.digest == plan.digest
    assert IterationPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    (time,) = planned([3500, *([50] * 20)], "tp2+2*tp1", "4*tp1").strategy_times_s
    assert time.name == "tp2+2*tp1"
    assert not planned([100] * 4, "4*tp1").strategy_times_s


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "iteration 5: a batch holds at least 1 sequence but has 0"),
        ([5, 0], "at least 1 token but sequence 1 has 0"),
        ([5, 4001], r"sequence 1 has 4001 tokens and the largest limit, .*'2\*tp2', is 4000"),
    ],
)
@PLANNERS
def test_what_no_plan_can_hold_is_refused(planner: Any, lengths: list[int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planner(pool_of("4*tp1", "2*tp2"), MODEL).plan(lengths, iteration=4)


def test_without_time_the_current_plan_is_used_and_marked() -> None:
    generator = random.Random(1)
    lengths = [generator.randint(5, 900) for _ in range(60)]
    plan = CertifiedPlanner(pool_of("pp2+2*tp1", "4*tp1"), MODEL, time_limit_s=0.0).plan(lengths)
    assert plan.dispatch is not None
    assert plan.packing is not None
    assert plan.dispatch.status == plan.packing.status == "time limit"
    plan.validate(lengths, Strategy.parse(plan.strategy, 4), MODEL.max_tokens)


def test_a_search_that_fails_leaves_the_greedy_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("as if")

    monkeypatch.setattr(search.StrategySearch, "start", fail)
    lengths = [300, 200, 100] * 5
    pool = pool_of("4*tp1", "2*pp2")
    with caplog.at_level(logging.WARNING):
        planner = CertifiedPlanner(pool, MODEL)
        plan = planner.plan(lengths, iteration=7)
    greedy = GreedyPlanner(pool, MODEL).plan(lengths, iteration=7)
    assert plan.replicas == greedy.replicas
    assert plan.dispatch is not None
    assert plan.dispatch.status == "greedy: ZeroDivisionError"
    assert "plan of iteration 8" in caplog.text
    assert planner.explain(lengths).plan.replicas == greedy.replicas


PROGRAM = """
import random
from megatron.hydraulis.planner.planners import CertifiedPlanner
from tests.unit.planner.test_planners import MODEL, pool_of

generator = random.Random(5)
planner = CertifiedPlanner(pool_of("pp2+2*tp1", "tp2+2*tp1", "4*tp1"), MODEL, seed=2)
for num in (6, 30):
    print(planner.plan([generator.randint(5, 900) for _ in range(num)]).digest)
"""


def test_another_process_with_other_hashes_makes_the_same_plans() -> None:
    answers = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            check=True,
            text=True,
            timeout=600,
        ).stdout
        for hash_seed in ("0", "1")
    }
    generator = random.Random(5)
    planner = CertifiedPlanner(pool_of("pp2+2*tp1", "tp2+2*tp1", "4*tp1"), MODEL, seed=2)
    here = [planner.plan([generator.randint(5, 900) for _ in range(num)]).digest for num in (6, 30)]
    assert answers == {"".join(f"{digest}\n" for digest in here)}


FIGURES = {
    "pp4": ReplicaFigures(1e-3, 0.3, 5.0, 120, num_stages=4),
    "tp2": ReplicaFigures(2e-3, 0.4, 8.0, 60),
    "tp1": ReplicaFigures(4e-3, 0.9, 4.0, 30),
}


def coefficients(scheme: Scheme) -> Coefficients:
    figures = FIGURES[str(scheme)]
    return Coefficients(figures.a_ms_per_token2, figures.b_ms_per_token, figures.c_ms)


TINY_MODEL = TableCostModel(
    limits={(1, 1, 4): 120, (2, 1, 1): 60, (1, 1, 1): 30}, times=coefficients
)


@pytest.mark.parametrize(
    ("lengths", "text", "num_ranks"),
    [
        ([25], "pp4+tp2+tp1", 7),
        ([60, 59, 58, 7, 1], "pp4", 4),
        ([60, 30, 30, 20, 20, 10, 5], "pp4+tp2+tp1", 7),
        ([20] * 8, "3*tp2", 6),
        # Only the pipeline holds the first.
        ([100, 30, 30, 30, 12, 3], "pp4+2*tp1", 6),
        # Far more replicas than sequences.
        ([20, 20, 20], "tp2+500*tp1", 502),
    ],
)
def test_the_best_plan_of_a_tiny_batch_is_found(
    lengths: list[int], text: str, num_ranks: int
) -> None:
    plan = CertifiedPlanner(Pool.of(Strategy.parse(text, num_ranks)), TINY_MODEL).plan(lengths)
    replicas = [FIGURES[str(replica.scheme)] for replica in plan.replicas]
    # More replicas of a class than sequences make no difference.
    best_ms = best_makespan_ms(lengths, replicas[:4])
    times_ms = [
        pipeline_time_ms(replica.times_ms(coefficients), replica.scheme.pp)
        for replica in plan.replicas
    ]
    assert max(times_ms) == pytest.approx(best_ms)
    assert plan.dispatch is not None
    assert 1e3 * plan.dispatch.bound_s <= best_ms * (1 + 1e-9)


LIMIT = 96
PADDED_MODEL = TableCostModel(
    limits={(tp, cp, pp): LIMIT for tp in (1, 2) for cp in (1, 2, 4) for pp in (1, 2)}
)


@PLANNERS
@pytest.mark.parametrize("text", ["cp4pp2", "tp2cp2+cp2+2*tp1", "2*cp2pp2", "cp4~+cp4"])
def test_rows_with_padding_keep_the_limit(planner: Any, text: str) -> None:
    num_ranks = 8
    strategy = Strategy.parse(text, num_ranks)
    rng = np.random.default_rng(3)
    lengths = [*rng.integers(1, 20, size=40).tolist(), 96, 95, 1, 1, 1]
    plan = planner(Pool.of(strategy), PADDED_MODEL).plan(lengths)
    plan.validate(lengths, strategy, PADDED_MODEL.max_tokens)
    rows = [
        (scheme.row_tokens(share.lengths), share.num_tokens)
        for replica in plan.replicas
        for micro_batch in replica.micro_batches
        for scheme, share in replica.shares(micro_batch)
        if scheme.cp > 1
    ]
    assert max(padded for padded, _ in rows) <= LIMIT
    # Rows are not half empty because of it.
    assert sum(padded for padded, _ in rows) > 0.6 * LIMIT * len(rows)
    for report in (plan.dispatch, plan.packing):
        assert report is not None
        assert report.objective_s == pytest.approx(plan.makespan_s)
        assert "Error" not in report.status


def makespan_ms(plan: IterationPlan, strategy: Strategy, limits: Limits) -> float:
    """The makespan with rows as these limits round them up."""
    return max(
        pipeline_time_ms(
            [
                MODEL.coefficients(replica.scheme).time_ms(
                    each.lengths, limits.row_tokens(strategy, replica.scheme, each.lengths)
                )
                for each in replica.micro_batches
            ],
            replica.scheme.pp,
        )
        for replica in plan.replicas
    )


@pytest.mark.parametrize("text", ["pp4", "2*pp2"])
def test_the_search_counts_the_padding_of_rows_that_are_rounded_up(text: str) -> None:
    (strategy,) = pool_of(text).strategies
    limits = Limits(MODEL, row_quantum=128)
    gains = []
    for seed in range(3):
        lengths = np.random.default_rng(seed).integers(5, 200, size=40).tolist()
        aware = CertifiedPlanner(Pool.of(strategy), MODEL, limits).plan(lengths)
        unaware = CertifiedPlanner(Pool.of(strategy), MODEL).plan(lengths)
        assert 1e3 * aware.makespan_s == pytest.approx(makespan_ms(aware, strategy, limits))
        gains.append(1.0 - 1e3 * aware.makespan_s / makespan_ms(unaware, strategy, limits))
        assert aware.dispatch is not None
        assert aware.dispatch.bound_s <= aware.makespan_s
    assert sum(gains) > 0.03


def test_a_limit_that_rows_cannot_fill_holds_less() -> None:
    """14 tokens on cp4 would be padded to 16."""
    model = TableCostModel(limits={(1, 4, 1): 15})
    strategy = Strategy.parse("cp4", 4)
    assert model.max_tokens(Scheme(cp=4)) == 15
    with pytest.raises(Exception, match="limit, in strategy 'cp4', is 8"):
        GreedyPlanner(Pool.of(strategy), model).plan([14])
    GreedyPlanner(Pool.of(strategy), model).plan([8, 7, 1])


LENGTHS = [60, 10, 20, 5]


def _row(tp: int, max_tokens: int) -> dict[str, float]:
    times = {"a_ms_per_token2": 1e-4, "b_ms_per_token": 0.1, "c_ms": 1.0}
    return {"tp": tp, "cp": 1, "pp": 1, "max_tokens": max_tokens, **times}


@pytest.fixture
def model() -> ProfileCostModel:
    rows = [_row(1, 50), _row(2, 100)]
    head = {"device": "d", "source": "s", "date": "2026-01-01", "schemes": rows}
    return ProfileCostModel.from_json(head, what="profile")


@pytest.fixture
def pool() -> Pool:
    texts = {"short": "2*tp1", "long": "tp2"}
    return Pool.of(*(Strategy.parse(text, 2, name=name) for name, text in texts.items()))


def _planner(pool: Pool, model: ProfileCostModel, *names: str) -> ScheduledPlanner:
    return ScheduledPlanner(pool, Limits(model), names, lambda one: CertifiedPlanner(one, model))


def test_strategies_come_in_turn_and_each_is_planned_alone(
    pool: Pool, model: ProfileCostModel
) -> None:
    planner = _planner(pool, model, "long", "short", "long")
    planner = pickle.loads(pickle.dumps(planner))  # as when it is sent to the planner process
    lengths = LENGTHS[1:]
    plans = [planner.plan(lengths, iteration=iteration) for iteration in range(5)]
    assert [plan.strategy for plan in plans] == ["long", "short", "long", "long", "short"]
    alone = CertifiedPlanner(Pool.of(pool.strategy("short")), model).plan(lengths, iteration=4)
    assert plans[4].digest == alone.digest


def test_a_sequence_that_the_forced_strategy_cannot_hold_is_named(
    pool: Pool, model: ProfileCostModel
) -> None:
    planner = _planner(pool, model, "long", "short")
    assert planner.plan(LENGTHS, iteration=2).strategy == "long"
    message = "iteration 4.*'short'.* at most 50 tokens.* sequence 0 .* has 60; "
    with pytest.raises(PlanError, match=message):
        planner.plan(LENGTHS, iteration=3)


def test_a_strategy_has_to_be_in_the_pool(pool: Pool, model: ProfileCostModel) -> None:
    with pytest.raises(StrategyError, match="'wide'"):
        _planner(pool, model, "long", "wide")


def test_the_status_of_a_fallback_plan(
    pool: Pool, model: ProfileCostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = CertifiedPlanner(pool, model)
    good = plan_status(planner.plan(LENGTHS))
    assert not is_marked(good)
    late = CertifiedPlanner(pool, model, time_limit_s=1e-9).plan(LENGTHS)
    assert plan_status(late) == "time limit"

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(planners, "_search_all", fail)
    assert plan_status(planner.plan(LENGTHS)) == "greedy: RuntimeError"


def test_the_worse_status_counts(pool: Pool, model: ProfileCostModel) -> None:
    plan = CertifiedPlanner(pool, model).plan(LENGTHS)

    def report(status: str) -> StageReport:
        return StageReport(objective_s=1.0, bound_s=1.0, seconds=0.0, status=status)

    ranked = ["certified", "search ended", "time limit", "solver error", "greedy: KeyError"]
    for index, worse in enumerate(ranked):
        for better in ranked[: index + 1]:
            for stages in ((worse, better), (better, worse)):
                dispatch, packing = map(report, stages)
                assert plan_status(replace(plan, dispatch=dispatch, packing=packing)) == worse
        assert is_marked(worse) == (index >= 2)
    assert not is_marked(plan_status(replace(plan, dispatch=None, packing=None)))


@PLANNERS
def test_on_one_stage_the_largest_micro_batch_runs_last(planner: Any) -> None:
    """Its backward hides scatters, and the order costs nothing."""
    pool = Pool.of(Strategy.parse("tp1", 1))
    plan = planner(pool, TableCostModel(default_limit=100)).plan([60, 50, 40, 30, 5])
    sums = [sum(micro_batch.lengths) for micro_batch in plan.replicas[0].micro_batches]
    assert sums == sorted(sums)
    assert len(set(sums)) > 1


@pytest.mark.parametrize(("text", "num_corrected"), [("cp4~+4*cp1", 1), ("2*cp4~", 0)])
def test_a_correction_of_waves_is_used_only_where_it_gains(
    text: str, num_corrected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = TableCostModel(
        limits={(1, 1, 1): 1000, (1, 2, 1): 2000, (1, 4, 1): 4000},
        times=lambda scheme: Coefficients(2e-5 / scheme.num_ranks, 0.2 / scheme.num_ranks, 3.0),
    )
    pool = pool_of(text, num_ranks=8)
    factors: list[float] = []

    def slowness(factor: float, costs: Sequence[SchemeCost], *_: object) -> dict[SchemeCost, float]:
        factors.append(factor)
        return {cost: factor for cost in costs if cost.waves}

    times_s = []
    for factor in (1.0, 1e3):
        monkeypatch.setattr(search, "slowness_of", partial(slowness, factor))
        plan = GreedyPlanner(pool, costs).plan([900, 800, 700, *[300] * 40])
        times_s.append(plan.predicted_time_s)
    assert factors == [1.0, 1e3] * num_corrected
    assert times_s[0] == times_s[1]
