"""A search among the few replicas that hold the long sequences, uphill steps included.

Few long sequences on few replicas are a puzzle in which no single move or swap makes the slowest
replica faster, long before the best dispatch is found. Threshold accepting (Dueck and Scheuer,
Journal of Computational Physics 90, 1990) also takes moves and swaps that make things worse by
less than a threshold, which falls to nothing. The times are those of the long sequences alone,
each in a micro-batch of its own in a pipeline, in the best of the orders that rise to the longest
and fall from it. The bound of lumps.py is quicker than 1F1B: a step that is too bad by the bound is
left at once, and only the orders that it finds best are timed.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.cost_model.pipeline import FORWARD_SHARE
from megatron.hydraulis.planner.packing import SchemeCost, best_fit
from megatron.hydraulis.planner.polish import pipeline_times_ms

__all__ = ["LongDispatch", "search_long"]

FloatArray = NDArray[np.float64]

_NUM_STEPS = 10_000
# Threshold of the first step, as a share of the makespan.
_FIRST_THRESHOLD = 0.02
# Weight of the sum of all times against the slowest: room anywhere is worth something.
_SUM_WEIGHT = 0.02
_SWAP_SHARE = 0.7
# There are 2^(k-1) orders of k sequences.
_MAX_IN_PIPELINE = 10
# Orders that are timed.
_NUM_TIMED = 64
_SEED = 0


@dataclass(frozen=True, slots=True)
class LongDispatch:
    """Micro-batches of the long sequences on every replica asked about, in their order."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    makespan_ms: float


class _Times:
    """Times of shares, each computed once for all replicas of equal cost."""

    def __init__(self, lengths: Sequence[int], costs: Sequence[SchemeCost]) -> None:
        self._lengths = lengths
        self._works_ms = {
            cost: [cost.sequence_time_ms(length) for length in lengths] for cost in set(costs)
        }
        self._bounds: dict[tuple[SchemeCost, tuple[int, ...]], float] = {}
        self._exact: dict[tuple[SchemeCost, tuple[int, ...]], float] = {}

    def bound_ms(self, cost: SchemeCost, share: tuple[int, ...]) -> float:
        """At most time_ms."""
        key = cost, share
        if key not in self._bounds:
            self._bounds[key] = self._computed_ms(cost, share)
        return self._bounds[key]

    def time_ms(self, cost: SchemeCost, share: tuple[int, ...]) -> float:
        """share: rising indices, that is by falling length. Infinite when it does not fit."""
        bound_ms = self.bound_ms(cost, share)
        if cost.num_stages == 1 or not share or bound_ms == np.inf:
            return bound_ms
        key = cost, share
        if key not in self._exact:
            self._exact[key] = self._best_order(cost, share)[1]
        return self._exact[key]

    def _best_order(
        self, cost: SchemeCost, share: tuple[int, ...]
    ) -> tuple[tuple[int, ...], float]:
        """Of those with the least bounds the one of least time, and that time."""
        rising = np.array(share[::-1])
        rising_ms = self._rising_ms(cost, share)
        bounds_ms = _bounds_of_orders_ms(rising_ms, cost.num_stages)
        some = np.argsort(bounds_ms, kind="stable")[:_NUM_TIMED]
        # Before the longest in rising order, after it in falling order.
        is_before = np.column_stack((_sides(len(share) - 1)[some], np.ones(len(some))))
        rank = np.arange(len(share))
        places = np.argsort(np.where(is_before > 0.0, rank, 2 * len(share) - rank), axis=1)
        times_ms = pipeline_times_ms(rising_ms[places], cost.num_stages)
        best = int(np.argmin(times_ms))
        return tuple(int(i) for i in rising[places[best]]), float(times_ms[best])

    def _rising_ms(self, cost: SchemeCost, share: tuple[int, ...]) -> FloatArray:
        works_ms = self._works_ms[cost]
        return np.array([works_ms[i] + cost.coefficients.c_ms for i in reversed(share)])

    def _computed_ms(self, cost: SchemeCost, share: tuple[int, ...]) -> float:
        if not share:
            return 0.0
        if self._lengths[share[0]] > cost.max_tokens:
            return np.inf
        c_ms, works_ms = cost.coefficients.c_ms, self._works_ms[cost]
        if cost.num_stages == 1:
            num = len(best_fit(share, self._lengths, cost.max_tokens))
            return sum(works_ms[i] for i in share) + num * c_ms
        if len(share) > _MAX_IN_PIPELINE:
            return np.inf
        return float(_bounds_of_orders_ms(self._rising_ms(cost, share), cost.num_stages).min())

    def micro_batches(
        self, cost: SchemeCost, share: tuple[int, ...]
    ) -> tuple[tuple[int, ...], ...]:
        """The packing that has the time."""
        if not share:
            return ()
        if cost.num_stages == 1:
            return tuple(map(tuple, best_fit(share, self._lengths, cost.max_tokens)))
        return tuple((i,) for i in self._best_order(cost, share)[0])


def search_long(
    lengths: Sequence[int], costs: Sequence[SchemeCost], shares: Sequence[Sequence[int]]
) -> LongDispatch | None:
    """A better dispatch of long sequences to at least two replicas; None if a start has no time.

    lengths: falling; costs: shape (num_replicas,), of the replicas that hold them; shares: the
    dispatch to start from, as indices into lengths.
    """
    times = _Times(lengths, costs)
    held = [tuple(sorted(share)) for share in shares]
    held_ms = [times.time_ms(cost, share) for cost, share in zip(costs, held, strict=True)]
    now_ms = _objective_ms(held_ms)
    if not np.isfinite(now_ms):
        return None
    best, best_ms = tuple(held), max(held_ms)
    threshold_ms = _FIRST_THRESHOLD * best_ms
    generator = random.Random(_SEED)
    for step in range(_NUM_STEPS):
        giver, taker = generator.sample(range(len(costs)), 2)
        if not held[giver]:
            continue
        given = generator.choice(held[giver])
        less, more = [i for i in held[giver] if i != given], [*held[taker], given]
        if held[taker] and generator.random() < _SWAP_SHARE:
            back = generator.choice(held[taker])
            less.append(back)
            more.remove(back)
        new_giver, new_taker = tuple(sorted(less)), tuple(sorted(more))
        limit_ms = now_ms + threshold_ms * (1.0 - step / _NUM_STEPS) ** 2
        new_ms = held_ms.copy()
        new_ms[giver] = times.bound_ms(costs[giver], new_giver)
        new_ms[taker] = times.bound_ms(costs[taker], new_taker)
        if _objective_ms(new_ms) >= limit_ms:
            continue
        new_ms[giver] = times.time_ms(costs[giver], new_giver)
        new_ms[taker] = times.time_ms(costs[taker], new_taker)
        then_ms = _objective_ms(new_ms)
        if then_ms < limit_ms:
            held[giver], held[taker] = new_giver, new_taker
            held_ms, now_ms = new_ms, then_ms
            if max(held_ms) < best_ms:
                best, best_ms = tuple(held), max(held_ms)
    return LongDispatch(
        tuple(times.micro_batches(cost, share) for cost, share in zip(costs, best, strict=True)),
        best_ms,
    )


def _objective_ms(times_ms: Sequence[float]) -> float:
    return max(times_ms) + _SUM_WEIGHT * sum(times_ms)


@functools.lru_cache(maxsize=_MAX_IN_PIPELINE)
def _sides(num: int) -> FloatArray:
    """For each order of num micro-batches around the longest one, which come before it (1)."""
    return ((np.arange(1 << num)[:, None] >> np.arange(num)[None, :]) & 1).astype(np.float64)


def _bounds_of_orders_ms(rising_ms: FloatArray, num_stages: int) -> FloatArray:
    """``X + F + B`` of lumps.py for each of the orders of _sides."""
    fill, drain = (num_stages - 1) * FORWARD_SHARE, (num_stages - 1) * (1.0 - FORWARD_SHARE)
    others_ms, longest_ms = rising_ms[:-1], float(rising_ms[-1])
    is_before = _sides(len(others_ms))
    before_ms = is_before * others_ms
    after_ms = others_ms - before_ms
    # What runs before each, or after it, were it on that side.
    sum_before_ms, sum_after_ms = np.cumsum(before_ms, axis=1), np.cumsum(after_ms, axis=1)
    forward_ms = fill * others_ms - (1.0 - FORWARD_SHARE) * (sum_before_ms - before_ms)
    back_ms = drain * others_ms - FORWARD_SHARE * (sum_after_ms - after_ms)
    forward_ms = (is_before * forward_ms).max(axis=1, initial=0.0)
    back_ms = ((1.0 - is_before) * back_ms).max(axis=1, initial=0.0)
    all_before_ms, all_after_ms = before_ms.sum(axis=1), after_ms.sum(axis=1)
    forward_ms = np.maximum(forward_ms, fill * longest_ms - (1.0 - FORWARD_SHARE) * all_before_ms)
    back_ms = np.maximum(back_ms, drain * longest_ms - FORWARD_SHARE * all_after_ms)
    times_ms: FloatArray = rising_ms.sum() + forward_ms + back_ms
    return times_ms
