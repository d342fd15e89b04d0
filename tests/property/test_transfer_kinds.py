"""All three kinds of transfer, run on numpy arrays, move every element to its place.

Over random layouts, strategies (tp, cp, ep, pp, uneven layers, idle and permuted ranks, tied
embeddings), nodes and owners. The elements that a rank must hold and the sums that its
shard must get are from `tests.support.layouts`, which is independent of transfers.
"""

from collections import Counter
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.transfer.amounts import LayoutAmounts, StrategyAmounts
from megatron.hydraulis.transfer.collective import (
    Collective,
    EqualShares,
    bucket_plans,
    collective_of,
    strategy_plans,
)
from megatron.hydraulis.transfer.plan import (
    Segment,
    TransferPlan,
    TwoStepPlan,
    arrival_segments,
    departure_segments,
    gather_plan,
)
from megatron.hydraulis.transfer.ranges import contributed_ranges, held_ranges, num_elements
from tests.support.layouts import Case, bucket_ids, cases, expected_counts
from tests.support.transfer_simulation import Simulation, Values


@st.composite
def simulations(draw: st.DrawFn) -> tuple[Case, Simulation]:
    """A case, its owners permuted or not, a number of nodes, and a kind that its roles allow."""
    case = draw(cases())
    num_ranks = case.layout.num_ranks
    if draw(st.booleans(), label="permuted owners"):
        orders = st.permutations(range(num_ranks)).map(tuple)
        layout = case.layout.with_owner_orders([draw(orders) for _ in case.layout.buckets])
        case = replace(case, layout=layout)
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    ranks_per_node = draw(st.sampled_from(sizes), label="ranks per node")
    kinds = [Collective.ALL_TO_ALL, Collective.TWO_STEP]
    if (
        collective_of(StrategyAmounts(LayoutAmounts(case.layout, None), case.roles))
        is Collective.ALL_GATHER
    ):
        kinds.append(Collective.ALL_GATHER)
    kind = draw(st.sampled_from(kinds), label="kind")
    return case, Simulation(case.layout, case.roles, kind, ranks_per_node)


@given(simulations())
def test_a_gather_gives_every_rank_what_its_role_holds_in_canonical_order(
    drawn: tuple[Case, Simulation],
) -> None:
    case, simulation = drawn
    for bucket in case.layout.buckets:
        ids = bucket_ids(case, bucket).astype(np.float64)
        for role, found in zip(case.roles, simulation.gather(bucket, ids), strict=True):
            runs = [ids[r.start : r.stop] for r in held_ranges(case.layout, bucket, role)]
            np.testing.assert_array_equal(found, np.concatenate([np.zeros(0), *runs]))


@given(simulations())
def test_a_scatter_gives_every_owner_the_sum_of_all_contributions(
    drawn: tuple[Case, Simulation],
) -> None:
    """Gradients of rank r are powers of its own base: a sum shows who added, and how often."""
    case, simulation = drawn
    base = 4.0
    counts = np.zeros(case.layout.num_elements)
    for bucket in case.layout.buckets:
        expected = np.zeros(bucket.num_elements)
        contributions: list[Values] = []
        for rank, role in enumerate(case.roles):
            parts: list[Values] = [np.zeros(0)]
            for r in contributed_ranges(case.layout, bucket, role):
                # The value encodes both the position in the bucket and the rank.
                values = np.array([base**rank * (1 + at % 3) for at in range(r.start, r.stop)])
                expected[r.start : r.stop] += values
                counts[bucket_ids(case, bucket)[r.start : r.stop]] += 1
                parts.append(values)
            contributions.append(np.concatenate(parts))
        shards = simulation.scatter(bucket, contributions)
        for rank, shard in enumerate(shards):
            np.testing.assert_array_equal(shard, expected[slice(*bucket.shard_range(rank))])
    np.testing.assert_array_equal(counts, expected_counts(case))


@given(simulations(), st.booleans())
def test_in_two_steps_every_element_crosses_each_node_border_once(
    drawn: tuple[Case, Simulation], gathers: bool
) -> None:
    case, simulation = drawn
    simulation.collective = Collective.TWO_STEP
    per_node = simulation.ranks_per_node
    needed: Counter[tuple[int, int, int]] = Counter()
    find = held_ranges if gathers else contributed_ranges
    for bucket in case.layout.buckets:
        ranges = [find(case.layout, bucket, role) for role in case.roles]
        if gathers:
            simulation.gather(bucket, np.zeros(bucket.num_elements))
        else:
            simulation.scatter(bucket, [np.ones(num_elements(runs)) for runs in ranges])
        for rank, runs in enumerate(ranges):
            for r in runs:
                for element in range(r.start, r.stop):
                    needed[bucket.index, element, rank // per_node] = 1
        for owner in range(case.layout.num_ranks):
            for element in range(*bucket.shard_range(owner)):
                del needed[bucket.index, element, owner // per_node]
    assert simulation.network.crossings == needed
    if gathers:
        _, two_steps = StrategyAmounts(LayoutAmounts(case.layout, per_node), case.roles).across
        assert two_steps == needed.total()


@given(simulations())
def test_partners_are_fixed_across_nodes_and_neighbours_inside(
    drawn: tuple[Case, Simulation],
) -> None:
    case, simulation = drawn
    simulation.collective = Collective.TWO_STEP
    per_node = simulation.ranks_per_node
    for bucket in case.layout.buckets:
        for plan in simulation.plans(bucket, gathers=True):
            assert isinstance(plan, TwoStepPlan)
            assert all(
                t.source % per_node == t.destination % per_node for t in plan.across.transfers
            )
            assert all(
                t.source // per_node == t.destination // per_node for t in plan.inside.transfers
            )


@given(simulations())
def test_the_inverse_of_the_inverse_is_the_plan(drawn: tuple[Case, Simulation]) -> None:
    case, simulation = drawn
    for bucket in case.layout.buckets:
        for gathers in (True, False):
            whole = simulation.plan(bucket, gathers=gathers)
            if isinstance(whole, EqualShares):
                continue  # the same in both directions
            turned = whole.inverse()
            assert turned.inverse() == whole
            assert {
                (t.source, t.destination, t.ranges) for s in _steps(turned) for t in s.transfers
            } == {(t.destination, t.source, t.ranges) for s in _steps(whole) for t in s.transfers}
            if isinstance(whole, TwoStepPlan) and isinstance(turned, TwoStepPlan):
                assert turned.steps == tuple(step.inverse() for step in reversed(whole.steps))
                for rank in range(case.layout.num_ranks):
                    assert turned.relay_copies(rank) == whole.relay_copies(rank)


@given(simulations())
def test_a_rank_s_own_plan_is_its_part_of_the_whole(drawn: tuple[Case, Simulation]) -> None:
    case, simulation = drawn
    for bucket in case.layout.buckets:
        for gathers in (True, False):
            own_plans = simulation.plans(bucket, gathers=gathers)
            whole = simulation.plan(bucket, gathers=gathers)
            for rank, own in enumerate(own_plans):
                for own_step, step in zip(_steps(own), _steps(whole), strict=True):
                    assert own_step.transfers == tuple(
                        t for t in step.transfers if rank in (t.source, t.destination)
                    )
                if isinstance(whole, EqualShares):
                    assert own == whole


@given(simulations())
def test_buckets_with_equal_plans_get_the_plans_that_each_would_get(
    drawn: tuple[Case, Simulation],
) -> None:
    case, simulation = drawn
    kind, per_node = simulation.collective, simulation.ranks_per_node
    for rank in (None, *range(case.layout.num_ranks)):
        assert strategy_plans(
            kind, case.layout, case.roles, ranks_per_node=per_node, rank=rank
        ) == tuple(
            bucket_plans(kind, case.layout, bucket, case.roles, ranks_per_node=per_node, rank=rank)
            for bucket in case.layout.buckets
        )


@given(cases())
def test_unpermuted_one_step_arrivals_are_in_canonical_order(case: Case) -> None:
    for bucket in case.layout.buckets:
        plan = gather_plan(case.layout, bucket, case.roles)
        for rank in range(case.layout.num_ranks):
            size = sum(t.num_elements for t in plan.received_by(rank))
            expected = (Segment(0, 0, size),) if size else ()
            assert arrival_segments(plan, rank) == expected
            assert departure_segments(plan.inverse(), rank) == expected


@given(simulations())
def test_two_steps_never_cross_nodes_more_than_one(drawn: tuple[Case, Simulation]) -> None:
    case, simulation = drawn
    per_node = simulation.ranks_per_node
    one_step, two_steps = StrategyAmounts(LayoutAmounts(case.layout, per_node), case.roles).across
    assert two_steps <= one_step
    simulation.collective = Collective.ALL_TO_ALL
    for bucket in case.layout.buckets:
        simulation.gather(bucket, np.zeros(bucket.num_elements))
    assert simulation.network.crossings.total() == one_step
    assert simulation.network.sent.total() == simulation.network.received.total()
    if per_node == case.layout.num_ranks:
        assert one_step == 0


def _steps(plan: object) -> tuple[TransferPlan, ...]:
    if isinstance(plan, TwoStepPlan):
        return plan.steps
    return (plan,) if isinstance(plan, TransferPlan) else ()
