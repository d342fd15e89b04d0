"""Traffic of regrouping: plans, amounts and simulation agree; chosen owners reduce it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.transfer.amounts import LayoutAmounts, LinkElements, StrategyAmounts
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.collective import (
    NOTHING,
    Collective,
    amounts_by_rank,
    link_elements,
)
from megatron.hydraulis.transfer.ranges import best_owner_orders, contributed_ranges, held_ranges
from megatron.hydraulis.transfer.role import Role
from tests.property.test_transfer_kinds import simulations
from tests.support.layouts import Case, cases
from tests.support.transfer_simulation import Simulation


def totals(simulation: Simulation, *, gathers: bool, rank: int) -> LinkElements[int]:
    """Of all buckets, from the plans of this rank."""
    per_node = simulation.ranks_per_node
    plans = [
        simulation.plan(bucket, gathers=gathers, rank=rank) for bucket in simulation.layout.buckets
    ]
    each = [link_elements(plan, rank, ranks_per_node=per_node) for plan in plans]
    return sum(each, NOTHING)


@given(simulations(), st.sampled_from(Collective))
def test_amounts_of_all_ranks_are_those_of_their_plans(
    drawn: tuple[Case, Simulation], collective: Collective
) -> None:
    case, simulation = drawn
    if simulation.collective is Collective.ALL_GATHER or collective is not Collective.ALL_GATHER:
        simulation.collective = collective
    per_node = simulation.ranks_per_node
    amounts = StrategyAmounts(LayoutAmounts(case.layout, per_node), case.roles)
    for gathers in (True, False):
        found = np.zeros((case.layout.num_ranks, 4), dtype=np.int64)
        for buckets in amounts.equal_buckets:
            both = amounts_by_rank(simulation.collective, amounts, buckets[0])
            of_one = vars(both[0 if gathers else 1])
            found += len(buckets) * np.stack([*of_one.values()], axis=1)
        for rank, of_rank in enumerate(found.tolist()):
            assert LinkElements(*of_rank) == totals(simulation, gathers=gathers, rank=rank)


@given(simulations())
def test_sent_and_received_elements_agree_by_link_and_with_the_simulation(
    drawn: tuple[Case, Simulation],
) -> None:
    case, simulation = drawn
    everyone = range(case.layout.num_ranks)
    by_rank = [totals(simulation, gathers=True, rank=rank) for rank in everyone]
    whole = sum(by_rank, NOTHING)
    assert whole.sent_inside == whole.received_inside
    assert whole.sent_across == whole.received_across
    if simulation.collective is Collective.ALL_GATHER:
        return  # the library chooses the route, so the plan has no links
    one_step, two_steps = StrategyAmounts(
        LayoutAmounts(case.layout, simulation.ranks_per_node), case.roles
    ).across
    is_two_step = simulation.collective is Collective.TWO_STEP
    assert whole.received_across == (two_steps if is_two_step else one_step)
    for bucket in case.layout.buckets:
        simulation.gather(bucket, np.zeros(bucket.num_elements))
    assert simulation.network.received == {
        r: t.received for r, t in enumerate(by_rank) if t.received
    }
    assert simulation.network.sent == {r: t.sent for r, t in enumerate(by_rank) if t.sent}


@given(simulations(), st.integers(0, 8))
def test_the_traffic_does_not_depend_on_the_previous_strategy(
    drawn: tuple[Case, Simulation], turn: int
) -> None:
    """Shards are the only state between iterations; another or the same strategy may run before."""
    case, simulation = drawn
    strategy = case.strategy
    turned = replace(
        strategy,
        replicas=tuple(
            replace(
                replica, ranks=tuple((rank + turn) % strategy.num_ranks for rank in replica.ranks)
            )
            for replica in strategy.replicas
        ),
    )
    other = replace(simulation, roles=replace(case, strategy=turned).roles)
    counted = []
    for before in (simulation, other):
        after = replace(simulation)
        for bucket in case.layout.buckets:
            values = np.arange(bucket.num_elements, dtype=np.float64)
            # The state after an iteration: shards, here plus the scattered gradients.
            before.gather(bucket, values)
            contributions = [
                np.zeros(
                    sum(
                        r.num_elements
                        for r in contributed_ranges(case.layout, bucket, before.roles[rank])
                    )
                )
                for rank in range(case.layout.num_ranks)
            ]
            shards = before.scatter(bucket, contributions)
            for rank, shard in enumerate(shards):
                values[slice(*bucket.shard_range(rank))] += shard
            for held, role in zip(after.gather(bucket, values), case.roles, strict=True):
                runs = [np.arange(r.start, r.stop) for r in held_ranges(case.layout, bucket, role)]
                np.testing.assert_array_equal(held, np.concatenate([np.zeros(0), *runs]))
        counted.append((after.network.received, after.network.sent, after.network.crossings))
    assert counted[0] == counted[1]


@given(cases())
def test_chosen_owners_hold_at_least_as_much_and_own_as_much_of_every_bucket(case: Case) -> None:
    orders = best_owner_orders(case.layout, case.roles)
    permuted = case.layout.with_owner_orders(orders)
    assert best_owner_orders(permuted, case.roles) == orders
    # What a rank holds and does not own it receives.
    assert _received(permuted, case.roles) <= _received(case.layout, case.roles)
    for old, new in zip(case.layout.buckets, permuted.buckets, strict=True):
        sizes = [
            sorted(stop - start for start, stop in map(b.shard_range, range(permuted.num_ranks)))
            for b in (old, new)
        ]
        assert sizes[0] == sizes[1]


def _received(layout: CanonicalLayout, roles: Sequence[Role | None]) -> int:
    """Elements of a gather in one step, of all ranks."""
    amounts = StrategyAmounts(LayoutAmounts(layout, None), roles)
    return sum(int(amounts.one_step(bucket, False).received.sum()) for bucket in layout.buckets)


@given(cases().filter(lambda case: case.layout.num_ranks <= 5))
def test_no_other_order_is_better(case: Case) -> None:
    """Against all permutations; of the best ones, none leaves more ranks with their own share."""
    orders = best_owner_orders(case.layout, case.roles)
    identity = tuple(range(case.layout.num_ranks))
    for bucket, order in zip(case.layout.buckets, orders, strict=True):
        chosen = identity if order is None else order
        assert (order is None) == (chosen == identity)
        best = max(
            _worth(case.layout, bucket.index, case.roles, candidate)
            for candidate in itertools.permutations(identity)
        )
        assert _worth(case.layout, bucket.index, case.roles, chosen) == best


def _worth(
    layout: CanonicalLayout, index: int, roles: Sequence[Role | None], order: tuple[int, ...]
) -> tuple[int, int]:
    """(elements both owned and held, ranks that keep their share)."""
    bucket = layout.buckets[index]
    both = 0
    for share, owner in enumerate(order):
        start, stop = bucket.shard_borders[share], bucket.shard_borders[share + 1]
        for r in held_ranges(layout, bucket, roles[owner]):
            both += max(0, min(stop, r.stop) - max(start, r.start))
    return both, sum(share == owner for share, owner in enumerate(order))
