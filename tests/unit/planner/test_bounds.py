"""Lower bounds against every dispatch of a few sequences, packed in every way."""

import itertools
import random

import pytest

from megatron.hydraulis.cost_model import Coefficients, pipeline_time_ms
from megatron.hydraulis.planner.bounds import dispatch_bound_ms, packing_bound_ms
from megatron.hydraulis.planner.costs import SchemeCost
from megatron.hydraulis.planner.greedy import pack

FAST = SchemeCost(Coefficients(0.01, 1.0, 2.0), 40, 1)
SLOW = SchemeCost(Coefficients(0.03, 2.5, 1.0), 15, 1)
PIPE = SchemeCost(Coefficients(0.01, 0.8, 2.0), 25, 3)


def partitions(items: tuple[int, ...]) -> list[list[list[int]]]:
    """All partitions of the items into sets."""
    if not items:
        return [[]]
    result = []
    for smaller in partitions(items[1:]):
        result.append([[items[0]], *smaller])
        for place, part in enumerate(smaller):
            result.append([*smaller[:place], [items[0], *part], *smaller[place + 1 :]])
    return result


def best_time_ms(lengths: tuple[int, ...], cost: SchemeCost) -> float:
    """Least time of a replica over all packings and orders, infinite without a packing."""
    if not lengths:
        return 0.0
    best_ms = float("inf")
    for parts in partitions(lengths):
        if max(map(sum, parts)) <= cost.max_tokens:
            times_ms = [cost.coefficients.time_ms(part) for part in parts]
            for order in itertools.permutations(times_ms):
                best_ms = min(best_ms, pipeline_time_ms(order, cost.num_stages))
    return best_ms


@pytest.mark.parametrize("seed", range(12))
def test_no_packing_is_below_its_bound_and_greedy_is_near_the_best(seed: int) -> None:
    generator = random.Random(seed)
    for cost in (FAST, SLOW, PIPE):
        lengths = tuple(generator.randrange(1, 16) for _ in range(5))
        best_ms = best_time_ms(lengths, cost)
        assert packing_bound_ms(lengths, cost) <= best_ms * (1 + 1e-12)
        order = sorted(range(5), key=lambda sequence: -lengths[sequence])
        greedy_ms = pack(order, lengths, cost).time_ms
        assert best_ms <= greedy_ms * (1 + 1e-12)
        assert greedy_ms <= 1.25 * best_ms


@pytest.mark.parametrize("costs", [(FAST, SLOW), (SLOW, SLOW), (FAST, PIPE), (FAST, SLOW, PIPE)])
@pytest.mark.parametrize("seed", range(3))
def test_no_dispatch_is_below_its_bound(costs: tuple[SchemeCost, ...], seed: int) -> None:
    generator = random.Random(seed)
    lengths = tuple(generator.randrange(1, 16) for _ in range(5))
    best_ms = min(
        max(
            best_time_ms(
                tuple(s for s, owner in zip(lengths, owners, strict=True) if owner == replica), cost
            )
            for replica, cost in enumerate(costs)
        )
        for owners in itertools.product(range(len(costs)), repeat=len(lengths))
    )
    bound_ms = dispatch_bound_ms(lengths, costs)
    assert 0.0 < bound_ms <= best_ms * (1 + 1e-12)


def test_the_bound_is_tight_when_work_divides_evenly() -> None:
    cost = SchemeCost(Coefficients(0.0, 1.0, 0.0), 100, 1)
    assert dispatch_bound_ms([10] * 8, [cost] * 4) == pytest.approx(20.0)


def test_the_bound_of_work_without_cost_is_zero() -> None:
    free = SchemeCost(Coefficients(0.0, 0.0, 0.0), 100, 1)
    assert dispatch_bound_ms([10], [free]) == 0.0
    assert packing_bound_ms([], FAST) == 0.0
