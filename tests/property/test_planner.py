"""The greedy planner on any batch: valid, deterministic, not below its bounds."""

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.planning import TableCostModel

LONGEST = 400
LENGTHS = st.lists(st.integers(1, LONGEST), min_size=1, max_size=60)
STRATEGIES = st.sampled_from(
    [
        ("4*tp1",),
        ("tp2+2*tp1",),
        ("pp2+tp2", "4*tp1"),
        ("pp4", "tp2pp2"),
        ("tp2@3,0+cp2",),
        ("tp2+2*idle", "pp3+tp1"),
    ]
)


@st.composite
def cost_models(draw: st.DrawFn) -> TableCostModel:
    """Costs in which any term may be 0, and limits that some replicas just reach."""
    a, b, c = (
        draw(st.sampled_from(values))
        for values in ((0.0, 1e-4, 0.01), (0.0, 0.1, 2.0), (0.0, 1.0, 50.0))
    )
    limits = {
        degrees: draw(st.integers(LONGEST, 1500))
        for degrees in ((2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 1, 3), (1, 1, 4), (2, 1, 2))
    }
    limits[1, 1, 1] = draw(st.integers(LONGEST if draw(st.booleans()) else 40, 600))
    return TableCostModel(
        limits=limits,
        times=lambda scheme: Coefficients(a / scheme.num_ranks, b / scheme.num_ranks, c),
    )


def make_pool(texts: tuple[str, ...]) -> Pool:
    return Pool.of(*(Strategy.parse(text, 4) for text in texts))


@st.composite
def planned(draw: st.DrawFn) -> tuple[list[int], Pool, TableCostModel, IterationPlan]:
    pool, model = make_pool(draw(STRATEGIES)), draw(cost_models())
    longest = max(max(map(model.max_tokens, strategy.schemes)) for strategy in pool.strategies)
    lengths = [min(length, longest) for length in draw(LENGTHS)]
    return lengths, pool, model, GreedyPlanner(pool, model).plan(lengths, iteration=5)


@given(planned())
def test_every_sequence_once_and_limits_hold(
    case: tuple[list[int], Pool, TableCostModel, IterationPlan],
) -> None:
    lengths, pool, model, plan = case
    # Checked here and not by plan.validate(), which the planner has called.
    micro_batches = [batch for replica in plan.replicas for batch in replica.micro_batches]
    seen = [sequence for batch in micro_batches for sequence in batch.sequences]
    assert sorted(seen) == list(range(len(lengths)))
    for replica, wanted in zip(plan.replicas, pool.strategy(plan.strategy).replicas, strict=True):
        assert replica.replica == wanted
        for batch in replica.micro_batches:
            assert batch.lengths == tuple(lengths[sequence] for sequence in batch.sequences)
            assert sum(batch.lengths) <= model.max_tokens(replica.scheme)


@given(planned())
def test_json_and_digest_round_trip(
    case: tuple[list[int], Pool, TableCostModel, IterationPlan],
) -> None:
    plan = case[3]
    again = IterationPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert again == plan
    assert again.digest == plan.digest


@given(planned())
def test_planning_again_gives_the_same_digest_and_planning_time_is_no_part_of_it(
    case: tuple[list[int], Pool, TableCostModel, IterationPlan],
) -> None:
    lengths, pool, model, plan = case
    again = GreedyPlanner(pool, model).plan(lengths, iteration=5)
    assert again.digest == plan.digest
    assert replace(plan, plan_time_s=plan.plan_time_s + 1.0).digest == plan.digest
    assert replace(plan, iteration=6).digest != plan.digest


@given(planned())
def test_nothing_is_below_the_bounds(
    case: tuple[list[int], Pool, TableCostModel, IterationPlan],
) -> None:
    plan = case[3]
    for report in (plan.dispatch, plan.packing):
        assert report is not None
        assert report.status == "greedy"
        assert report.bound_s <= report.objective_s * (1 + 1e-9)
        assert report.objective_s == plan.predicted_time_s
    assert plan.imbalance >= 1.0 - 1e-9


@given(st.permutations(range(12)), cost_models())
def test_the_order_of_the_batch_does_not_change_the_time(
    order: list[int], model: TableCostModel
) -> None:
    # Distinct lengths, because among equal ones the index decides.
    lengths = [3 * index + 1 for index in range(12)]
    planner = GreedyPlanner(make_pool(("pp2+tp2",)), model)
    shuffled = planner.plan([lengths[index] for index in order])
    assert shuffled.predicted_time_s == planner.plan(lengths).predicted_time_s


@settings(max_examples=10, deadline=None)
@given(
    st.sampled_from(["pp8", "2*pp4", "pp4+tp2+2*tp1"]),
    st.sampled_from([1, 64, 256]),
    st.lists(st.integers(1, 200), min_size=15, max_size=25),
)
def test_a_certified_plan_is_never_slower_than_the_greedy_one(
    text: str, row_quantum: int, lengths: list[int]
) -> None:
    pool = Pool.of(Strategy.parse(text, 8))
    model = TableCostModel(default_limit=400, times=lambda _: Coefficients(1e-4, 0.03, 3.0))
    limits = Limits(model, row_quantum=row_quantum)
    certified, greedy = (
        planner(pool, model, limits).plan(lengths) for planner in (CertifiedPlanner, GreedyPlanner)
    )
    assert certified.predicted_time_s <= greedy.predicted_time_s * (1 + 1e-9)
