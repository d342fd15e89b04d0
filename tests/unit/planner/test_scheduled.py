"""A forced cycle of strategies, and the statuses by which plans are counted."""

import pickle
from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model import ProfileCostModel
from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.planner import planners
from megatron.hydraulis.planner.plan import StageReport, is_marked, plan_status
from megatron.hydraulis.planner.planners import CertifiedPlanner, ScheduledPlanner
from megatron.hydraulis.strategy import Pool, Strategy

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
    return ScheduledPlanner(pool, model, names, lambda one: CertifiedPlanner(one, model))


def test_strategies_come_in_turn_and_each_is_planned_alone(
    pool: Pool, model: ProfileCostModel
) -> None:
    planner = _planner(pool, model, "long", "short", "long")
    planner = pickle.loads(pickle.dumps(planner))  # as it goes to the planner process
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
    with pytest.raises(PlanError) as caught:
        planner.plan(LENGTHS, iteration=3)
    for words in ("iteration 4", "'short'", "at most 50 tokens", "sequence 0", "has 60", "; "):
        assert words in str(caught.value)


def test_a_strategy_has_to_be_in_the_pool(pool: Pool, model: ProfileCostModel) -> None:
    with pytest.raises(StrategyError, match="'wide'"):
        _planner(pool, model, "long", "wide")


def test_a_plan_that_fell_back_is_told_by_its_status(
    pool: Pool, model: ProfileCostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = CertifiedPlanner(pool, model)
    good = plan_status(planner.plan(LENGTHS))
    assert not is_marked(good)
    late = CertifiedPlanner(pool, model, time_limit_s=1e-9).plan(LENGTHS)
    assert plan_status(late) == "time limit"

    def fail(*args: object) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(planners, "_search_all", fail)
    assert plan_status(planner.plan(LENGTHS)) == "greedy: RuntimeError"


def test_the_worse_status_counts(pool: Pool, model: ProfileCostModel) -> None:
    plan = CertifiedPlanner(pool, model).plan(LENGTHS)

    def report(status: str) -> StageReport:
        return StageReport.of(objective_s=1.0, bound_s=1.0, seconds=0.0, status=status)

    ranked = ["certified", "search ended", "time limit", "solver error", "greedy: KeyError"]
    for index, worse in enumerate(ranked):
        for better in ranked[: index + 1]:
            for stages in ((worse, better), (better, worse)):
                dispatch, packing = map(report, stages)
                assert plan_status(replace(plan, dispatch=dispatch, packing=packing)) == worse
        assert is_marked(worse) == (index >= 2)
    assert not is_marked(plan_status(replace(plan, dispatch=None, packing=None)))
