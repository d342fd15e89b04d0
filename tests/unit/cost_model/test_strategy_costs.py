"""A strategy's own limits and overhead, and what planning makes of them."""

import pytest

from megatron.hydraulis.cost_model import StrategyCosts
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.strategy import Pool, Scheme
from tests.support.planning import TableCostModel

MODEL = TableCostModel(limits={(1, 1, 1): 1000, (2, 1, 1): 4000})


def pool(**max_tokens: int) -> Pool:
    return Pool.from_json(
        {
            "num_ranks": 4,
            "ranks_per_node": 4,
            "strategies": [
                {"name": "own", "replicas": "tp2+2*tp1", "max_tokens": max_tokens},
                {"name": "plain", "replicas": "4*tp1"},
            ],
        }
    )


def test_own_limits_come_before_the_cost_model() -> None:
    own, plain = (StrategyCosts(MODEL, strategy) for strategy in pool(tp1=700).strategies)
    assert (own.max_tokens(Scheme()), own.max_tokens(Scheme(tp=2))) == (700, 4000)
    assert plain.max_tokens(Scheme()) == 1000
    assert own.coefficients(Scheme()) == MODEL.coefficients(Scheme())


def test_groups_of_cp_ranks_hold_their_part_of_an_own_limit() -> None:
    entry = {"name": "own", "replicas": "tp2cp4~", "max_tokens": {"tp2cp4~": 1001}}
    (strategy,) = Pool.from_json(
        {"num_ranks": 8, "ranks_per_node": 8, "strategies": [entry]}
    ).strategies
    costs = StrategyCosts(MODEL, strategy)
    limits = [costs.max_tokens(Scheme(tp=2, cp=cp)) for cp in (1, 2, 4)]
    # Rounded down to what tp and cp ranks share evenly.
    assert limits == [250, 496, 992]
    assert costs.max_tokens(Scheme()) == 1000


def test_the_planner_keeps_to_own_limits() -> None:
    lengths = [600] * 12
    assert GreedyPlanner(pool(tp1=1200), MODEL).plan(lengths).strategy == "own"
    plan = GreedyPlanner(Pool.of(pool(tp1=600).strategy("own")), MODEL).plan(lengths)
    small = [b.num_tokens for r in plan.replicas if r.scheme.tp == 1 for b in r.micro_batches]
    assert set(small) == {600}
    with pytest.raises(PlanError, match="strategy 'own', is 2000"):
        GreedyPlanner(pool(tp2=2000), MODEL).plan([2001])


def test_overhead_counts_in_the_choice_and_in_the_predicted_time() -> None:
    lengths = [600] * 12
    assert GreedyPlanner(pool(), MODEL).plan(lengths).strategy == "own"
    slow = TableCostModel(limits=MODEL.limits, overheads={"own": 1e4, "plain": 7.0})
    plan = GreedyPlanner(pool(), slow).plan(lengths)
    assert plan.strategy == "plain"
    assert plan.predicted_time_s == pytest.approx(plan.makespan_s + 7e-3)
    assert plan.dispatch is not None
    assert plan.dispatch.objective_s == plan.makespan_s
