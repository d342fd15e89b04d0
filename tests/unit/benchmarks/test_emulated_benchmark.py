"""The emulated cluster's batches, baselines and figures, on data with known answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.emulated_cluster import (
    BALANCED,
    DYNAMIC,
    FIXED,
    Iteration,
    SideRun,
    fixed_length_plan,
    padded_time_s,
    plan_sides,
    static_strategies,
)
from benchmarks.emulated_device import EmulationCount
from benchmarks.inputs import COST_PROFILE, DATA, WIKIPEDIA
from benchmarks.paired_statistics import ratio_of_totals
from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.lengths.batches import sample_batches
from megatron.hydraulis.lengths.counts import LengthCounts, read_length_counts
from megatron.hydraulis.simulator.work import equal_rows, first_fit_decreasing
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.planning import TableCostModel

WINDOW = 100
COST = TableCostModel(default_limit=WINDOW, times=lambda _: Coefficients(0.0, 2.0, 10.0))
POOLS = sorted(DATA.glob("pool_*_ranks.json"))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, WINDOW), min_size=1, max_size=40),
    num_replicas=st.integers(1, 4),
)
def test_rows_hold_every_sequence_once_and_divide_over_the_replicas(
    lengths: list[int], num_replicas: int
) -> None:
    rows = equal_rows(lengths, WINDOW, num_replicas)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in row) for row in rows) <= WINDOW
    needed = len(first_fit_decreasing(lengths, WINDOW))
    assert len(rows) % num_replicas == 0
    assert needed <= len(rows) < needed + num_replicas


def test_rows_get_equal_tokens_if_possible() -> None:
    # First-fit decreasing fills the first row to 100 and leaves 20 to the second.
    lengths = [30, 30, 20, 20, 20]
    assert [len(row) for row in first_fit_decreasing(lengths, WINDOW)] == [4, 1]
    assert [sum(lengths[i] for i in row) for row in equal_rows(lengths, WINDOW, 1)] == [70, 50]


def test_first_fit_decreasing_is_kept_if_equal_tokens_do_not_fit() -> None:
    # With equal tokens 60 and 25 leave no room for the last 25; first fit puts it next to 50.
    lengths = [60, 50, 40, 25, 25]
    rows = equal_rows(lengths, WINDOW, 1)
    assert sorted(sum(lengths[i] for i in row) for row in rows) == [100, 100]


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 100 tokens cannot hold one of 101"):
        first_fit_decreasing([101], WINDOW)


def test_replicas_run_equally_many_rows_and_the_slowest_determines_the_time() -> None:
    strategy = Strategy.parse("2*tp1", 2, name="S")
    lengths = [90, 80, 70, 60]
    plan = fixed_length_plan(lengths, strategy, COST, window_tokens=WINDOW)
    plan.validate(lengths, strategy, COST.max_tokens)
    shares = [sorted(m.num_tokens for m in replica.micro_batches) for replica in plan.replicas]
    assert shares == [[60, 90], [70, 80]]
    assert plan.predicted_time_s == pytest.approx((2 * 150 + 2 * 10) / 1e3)
    padded_s = padded_time_s(plan, COST, window_tokens=WINDOW)
    assert padded_s == pytest.approx((2 * 200 + 2 * 10) / 1e3)


def test_a_pipeline_runs_its_rows_in_sequence() -> None:
    strategy = Strategy.parse("pp2", 2, name="S")
    plan = fixed_length_plan([90, 90, 90], strategy, COST, window_tokens=WINDOW)
    assert plan.predicted_time_s == pytest.approx((3 + 1) * 190 / 1e3)


@pytest.mark.parametrize("text", ["tp2+2*tp1", "tp2+2*idle"])
def test_rows_are_for_equal_replicas_only(text: str) -> None:
    with pytest.raises(ValueError, match="equal replicas"):
        fixed_length_plan([5], Strategy.parse(text, 4), COST, window_tokens=WINDOW)


def test_a_strategy_that_does_not_hold_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 100 tokens but a row has 101"):
        fixed_length_plan([5], Strategy.parse("tp1", 1), COST, window_tokens=101)


def test_batches_are_cut_filled_and_repeatable() -> None:
    lengths = LengthCounts.of([10, 200], [50, 5]).cut(60, "truncate").sequences
    sizes = BatchSizes.constant(num_tokens=200)
    batches = sample_batches(lengths, sizes=sizes, num_batches=3, seed=1)
    assert batches == sample_batches(lengths, sizes=sizes, num_batches=3, seed=1)
    assert {length for batch in batches for length in batch} == {10, 60}
    assert all(150 < sum(batch) <= 200 for batch in batches)


def test_the_lengths_match_their_description() -> None:
    lengths = read_length_counts(WIKIPEDIA).sequences
    assert len(lengths) == 1_000_000
    assert round(lengths.mean()) == 1014
    assert lengths.max() == 1_823_777


@pytest.mark.parametrize("path", POOLS, ids=lambda path: path.stem)
def test_the_pools_use_measured_schemes_and_one_strategy_holds_the_longest(path: Path) -> None:
    pool, cost_model = Pool.read(path), ProfileCostModel.read(COST_PROFILE)
    for strategy in pool.strategies:
        for scheme in strategy.schemes:
            assert cost_model.max_tokens(scheme) > 0
    longest = max(cost_model.max_tokens(s.schemes[0]) for s in pool.strategies)
    assert static_strategies(pool, cost_model, longest)


def test_every_side_trains_the_same_batches_and_dynamic_plans_are_no_slower() -> None:
    pool, cost_model = Pool.read(DATA / "pool_8_ranks.json"), ProfileCostModel.read(COST_PROFILE)
    batches = [(3000, 2000, 900, 900, 500, 100), (9000, 400, 300, 200)]
    plans = plan_sides(pool, cost_model, batches, window_tokens=20_000)
    assert list(plans) == [DYNAMIC, BALANCED, FIXED]
    for side in plans.values():
        for plan, lengths in zip(side, batches, strict=True):
            plan.validate(lengths, pool.strategy(plan.strategy), cost_model.max_tokens)
    assert {plan.strategy for plan in plans[BALANCED] + plans[FIXED]} == {"S0"}
    for dynamic, balanced, fixed in zip(*plans.values(), strict=True):
        # Up to gaps of the searches.
        assert dynamic.predicted_time_s <= 1.01 * balanced.predicted_time_s
        assert balanced.predicted_time_s <= 1.01 * fixed.predicted_time_s


def test_a_ratio_of_totals_weighs_long_iterations_more() -> None:
    estimate = ratio_of_totals([10.0, 2.0], [5.0, 2.0])
    assert estimate.value == pytest.approx(12 / 7)
    assert (estimate.low, estimate.high) == (1.0, 2.0)
    with pytest.raises(ValueError, match="pairs need equally many"):
        ratio_of_totals([1.0], [])


def test_prediction_errors_of_a_side() -> None:
    def iteration(predicted_s: float, measured_s: float) -> Iteration:
        return Iteration("S", predicted_s, measured_s, 0.5, EmulationCount(4, 1, 0.01))

    side = SideRun("s", "what", (iteration(1.0, 1.04), iteration(2.0, 2.2)))
    assert side.prediction.value == pytest.approx(3.24 / 3.0)
    assert side.prediction_errors == pytest.approx([0.04, 0.1])
    assert (side.count.num_overruns, side.count.num_operations) == (2, 8)
    assert side.to_json()["mean_measured_s"] == pytest.approx(1.62)
