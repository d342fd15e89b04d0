"""Greedy dispatch, packing and planner: ordinary cases, the hard limit, choices, refusals."""

import math
import random
from typing import Any

import numpy as np
import pytest

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.bounds import dispatch_bound_ms
from megatron.hydraulis.planner.costs import SchemeCost
from megatron.hydraulis.planner.greedy import (
    dispatch,
    longest_first,
    pack,
    slowness_of,
    useful_num_micro_batches,
)
from megatron.hydraulis.planner.plan import IterationPlan, Planner
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.planning import TableCostModel


def cost(b: float, c: float = 0.0, *, max_tokens: int = 100, num_stages: int = 1) -> SchemeCost:
    return SchemeCost(Coefficients(0.0, b, c), max_tokens, num_stages)


def test_longest_processing_time_first() -> None:
    lengths = [50, 40, 30, 30, 20, 10]
    assert dispatch(range(6), lengths, [cost(1.0)] * 2) == [[0, 3, 5], [1, 2, 4]]


def test_a_sequence_goes_where_it_ends_first_not_where_least_has_been_done() -> None:
    slow, fast = cost(3.0), cost(1.0)
    assert dispatch(range(3), [20, 20, 20], [slow, fast]) == [[2], [0, 1]]


def test_only_replicas_that_hold_a_sequence_are_considered() -> None:
    narrow, wide = cost(1.0, max_tokens=30), cost(5.0, max_tokens=60)
    shares = dispatch(range(4), [60, 31, 30, 29], [narrow, wide, narrow])
    assert shares == [[2], [0, 1], [3]]


def test_another_micro_batch_counts_before_it_is_packed() -> None:
    """Its constant cost comes with the token that no longer fits."""
    near_full, roomy = cost(1.0, 50.0, max_tokens=40), cost(1.2, 50.0, max_tokens=90)
    shares = dispatch(range(3), [40, 40, 5], [near_full, roomy])
    assert shares == [[0], [1, 2]]


def test_replicas_slower_than_their_estimate_get_less() -> None:
    costs, lengths = [cost(1.0, max_tokens=50), cost(1.0, max_tokens=60)], [10] * 9
    shares = dispatch(range(9), lengths, costs)
    assert sorted(map(len, shares)) == [4, 5]
    slowness = slowness_of(costs, shares, lengths, {0: 2.0 * 10 * len(shares[0])})
    assert slowness == {costs[0]: pytest.approx(2.0)}
    assert list(map(len, dispatch(range(9), lengths, costs, slowness=slowness))) == [3, 6]


def test_a_long_sequence_fills_a_pipeline() -> None:
    """On three stages it takes three times its work, so a slower single stage ends first."""
    pipeline, single = cost(1.0, num_stages=3), cost(2.0)
    assert dispatch([0], [60], [pipeline, single]) == [[], [0]]


@pytest.mark.parametrize("num_sequences", [4_000, 16_000])
def test_many_sequences_on_many_replicas_end_near_the_bound(num_sequences: int) -> None:
    costs = [cost(1.0, max_tokens=16_384)] * 256
    drawn = np.random.default_rng(0).lognormal(6.5, 1.2, num_sequences)
    lengths = np.clip(drawn, 1, 16_384).astype(int).tolist()
    shares = dispatch(longest_first(lengths), lengths, costs)
    assert sorted(sequence for share in shares for sequence in share) == list(range(num_sequences))
    makespan_ms = max(sum(lengths[sequence] for sequence in share) for share in shares)
    assert makespan_ms < 1.01 * dispatch_bound_ms(lengths, costs)


def test_fewer_sequences_than_replicas() -> None:
    assert dispatch([0], [7], [cost(1.0)] * 3) == [[0], [], []]
    assert dispatch([], [], [cost(1.0)] * 2) == [[], []]


def test_a_sequence_that_fits_nowhere_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="sequence 1 of 101 tokens fits no replica"):
        dispatch([1, 0], [5, 101], [cost(1.0)])


def test_the_limit_holds_where_the_least_work_has_the_most_tokens() -> None:
    # Attention alone costs time: forty short sequences are less work than one long one and would
    # all go to the other micro-batches if tokens were not counted.
    lengths = [100] * 2 + [10] * 40
    cost = SchemeCost(Coefficients(1.0, 0.0, 1.0), 120, 2)
    packing = pack(range(len(lengths)), lengths, cost)
    assert max(batch.num_tokens for batch in packing.with_lengths(lengths)) <= 120
    assert sum(batch.num_tokens for batch in packing.with_lengths(lengths)) == 600


def test_micro_batches_run_in_falling_order_of_work() -> None:
    # Dealt longest first, 9 | 8 | 7 become 9 | 8+2 | 7+6: the first is now the shortest.
    lengths = [9, 8, 7, 6, 2]
    cost = SchemeCost(Coefficients(0.0, 1.0, 4.0), 13, 2)
    packing = pack(range(5), lengths, cost)
    work = [batch.num_tokens for batch in packing.with_lengths(lengths)]
    assert work == sorted(work, reverse=True)
    assert len(work) > 1


def test_a_high_constant_cost_packs_to_the_last_token() -> None:
    lengths = [6, 5, 5, 4]
    cost = SchemeCost(Coefficients(0.0, 1.0, 100.0), 10, 2)
    packing = pack(range(4), lengths, cost)
    assert sorted(batch.num_tokens for batch in packing.with_lengths(lengths)) == [10, 10]


def test_packing_looks_at_the_replicas_sequences_only() -> None:
    """Otherwise hundreds of replicas would each go through the whole batch."""
    lengths: list[Any] = [None, 3, None, 6, 5, None]
    packing = pack([3, 4, 1], lengths, SchemeCost(Coefficients(0.0, 1.0, 0.1), 12, 2, multiple=2))
    assert packing.micro_batches == ((3,), (4,), (1,))


def test_nothing_to_pack_takes_no_time() -> None:
    packing = pack([], [5], SchemeCost(Coefficients(0.0, 1.0, 1.0), 10, 2))
    assert packing.micro_batches == ()
    assert packing.time_ms == 0.0


@pytest.mark.parametrize("c_ms", [0.5, 2.0, 8.0])
def test_the_useful_number_minimises_the_time_of_equal_micro_batches(c_ms: float) -> None:
    work_ms, num_stages = 100.0, 5
    useful = useful_num_micro_batches(
        work_ms, SchemeCost(Coefficients(0.0, 1.0, c_ms), 10, num_stages)
    )

    def time_ms(v: float) -> float:
        return (v + num_stages - 1) * (work_ms / v + c_ms)

    assert time_ms(useful) < min(time_ms(useful * 0.9), time_ms(useful * 1.1))


def test_useful_numbers_at_the_ends() -> None:
    assert useful_num_micro_batches(9.0, SchemeCost(Coefficients(0.0, 1.0, 1.0), 10, 1)) == 1.0
    free = SchemeCost(Coefficients(0.0, 1.0, 0.0), 10, 2)
    assert useful_num_micro_batches(9.0, free) == math.inf


MODEL = TableCostModel(limits={(1, 1, 1): 1000, (2, 1, 1): 4000, (1, 1, 2): 2000})


def planner(*texts: str, num_ranks: int = 4, model: TableCostModel = MODEL) -> Planner:
    pool = Pool.of(*(Strategy.parse(text, num_ranks) for text in texts))
    return GreedyPlanner(pool, model)


def check(plan: IterationPlan, lengths: list[int], num_ranks: int = 4) -> None:
    plan.validate(lengths, Strategy.parse(plan.strategy, num_ranks), MODEL.max_tokens)


def test_long_sequences_go_where_they_fit() -> None:
    lengths = [3900] + [200] * 40
    plan = planner("tp2+2*tp1").plan(lengths)
    check(plan, lengths)
    long_replica = plan.replicas[0]
    assert 0 in {s for batch in long_replica.micro_batches for s in batch.sequences}
    assert all(replica.num_sequences > 0 for replica in plan.replicas[1:])


def test_only_strategies_that_hold_the_longest_sequence_are_used() -> None:
    slow_tp = TableCostModel(limits=MODEL.limits, times=lambda scheme: Coefficients(0.0, 0.2, 1.0))
    pool_planner = planner("4*tp1", "2*tp2", model=slow_tp)
    assert pool_planner.plan([100] * 8).strategy == "4*tp1"
    assert pool_planner.plan([1001] + [100] * 8).strategy == "2*tp2"


def test_the_best_strategy_of_the_pool_wins_and_ties_go_to_the_first() -> None:
    lengths = [50] * 40
    alone = [planner(text).plan(lengths).predicted_time_s for text in ("pp2+tp2", "2*tp2")]
    both = planner("pp2+tp2", "2*tp2").plan(lengths)
    assert both.predicted_time_s == min(alone)
    first, second = "tp2@0,1+tp2@3,2", "tp2@1,0+tp2@2,3"
    assert planner(first, second).plan(lengths).strategy == "2*tp2@0,1,3,2"


def test_a_limit_is_exact() -> None:
    plan = planner("4*tp1").plan([1000])
    check(plan, [1000])
    # 600 + 400 fill a micro-batch to the last token, 601 + 400 do not.
    single = planner("tp1", num_ranks=1, model=TableCostModel(default_limit=1000))
    for lengths, number in (([600, 400], 1), ([601, 400], 2)):
        assert len(single.plan(lengths).replicas[0].micro_batches) == number


def test_one_stage_pays_for_as_few_micro_batches_as_possible() -> None:
    lengths = [900, 800, 700, 300, 200, 100]
    model = TableCostModel(default_limit=1000)
    plan = planner("tp1", num_ranks=1, model=model).plan(lengths)
    assert len(plan.replicas[0].micro_batches) == 3


def test_a_pipeline_gets_more_micro_batches_than_memory_requires() -> None:
    model = TableCostModel(default_limit=100_000, times=lambda scheme: Coefficients(0.0, 1.0, 1.0))
    plan = planner("pp4", model=model).plan([100] * 32)
    (replica,) = plan.replicas
    assert len(replica.micro_batches) > 8
    everything_at_once_s = 4 * (3200 + 1) / 1e3
    assert replica.predicted_time_s < everything_at_once_s / 2


def test_heterogeneous_beats_homogeneous_on_a_long_tail() -> None:
    # The purpose of the project: one long sequence must not force tp on every short one.
    def times(scheme: Scheme) -> Coefficients:
        # Tensor parallelism loses a fifth of the rate.
        slowdown = 1.0 if scheme.tp == 1 else 1.25
        return Coefficients(0.0, slowdown * 0.2 / scheme.tp, 1.0)

    model = TableCostModel(limits={(1, 1, 1): 1000, (4, 1, 1): 8000}, times=times)
    lengths = [8000] + [300] * 100
    static = planner("2*tp4", num_ranks=8, model=model).plan(lengths)
    mixed = planner("tp4+4*tp1", num_ranks=8, model=model).plan(lengths)
    assert mixed.predicted_time_s < 0.95 * static.predicted_time_s


def test_thousands_of_sequences_on_hundreds_of_replicas() -> None:
    lengths = [max(1, int(random.Random(i).expovariate(1 / 300))) for i in range(3000)]
    lengths = [min(length, 4000) for length in lengths]
    plan = planner("8*tp2+40*pp2+160*tp1", num_ranks=256).plan(lengths)
    check(plan, lengths, num_ranks=256)
    assert plan.imbalance < 1.3


def test_a_strategy_with_a_replica_without_room_for_the_weights_is_not_used() -> None:
    model = TableCostModel(limits={(1, 1, 1): 0}, default_limit=100)
    assert planner("tp2+2*tp1", "2*tp2", model=model).plan([5]).strategy == "2*tp2"
    with pytest.raises(PlanError, match=r"room for its weights .* in '4\*tp1' tp1; use larger"):
        planner("4*tp1", model=model).plan([5])
