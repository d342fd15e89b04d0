"""Long sequences in a pipeline: what they leave room for, and where they belong.

Let **lumps** l_1 >= l_2 >= … be the works of micro-batches of one replica that hold a long sequence
each. Write X for the total work, S for what runs before a micro-batch t, R for what runs after it,
φ for the forward's share and p for the stages. The path that goes through all stages forward at
one micro-batch and back through all stages at a later one gives ``T >= X + F + B`` for every

    F = (p-1)·φ·t - (1-φ)·S     of a micro-batch up to the largest lump,
    B = (p-1)·(1-φ)·t - φ·R     of a micro-batch from the largest lump on.

So a lump may not come before enough other work, nor before too little: it has a release and a due
date, and the larger it is the tighter they are. Each lump is before or after the largest. Before
it, rising order is best, after it falling order. Of the n other micro-batches before the first
lump, each can be only so much larger than those before it, which makes ``F >= (p-1)·φ·l / ρ^n``
with ``ρ = 1 + (1-φ)/((p-1)·φ)``; at the end alike. Everything else may be cut at will: what follows
is a lower bound, and the sizes at which it is met are a good shape.

Two long sequences may share a micro-batch if they fit. What holds for that micro-batch holds for
the two side by side, if neither counts the constant cost: so besides all lumps apart, there is a
case for each pair that fits, with the pair as one lump and no constant cost in the others, which
stands for every packing in which these two are together.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.cost_model.pipeline import FORWARD_SHARE
from megatron.hydraulis.planner.packing import SchemeCost

__all__ = [
    "LumpOrder",
    "LumpOrders",
    "choose_lumps",
    "lump_lines",
    "lump_orders",
]

FloatArray = NDArray[np.float64]

# What a piece of work adds, at least, to the time of a lump that it runs beside.
_LEAST_ALONGSIDE = min(FORWARD_SHARE, 1.0 - FORWARD_SHARE)
_MOST_ALONGSIDE = 1.0 - _LEAST_ALONGSIDE

# There are 2^(n-1) choices of sides for n lumps, and that many again for each pair that fits. Other
# long sequences count like any others.
_MAX_LUMPS = 7
_MAX_LUMPS_THAT_FIT = 5
# With as many small micro-batches as this at an end, it is taken to cost nothing.
_MAX_BEFORE = 5
_MAX_AFTER = 10
# Sets of lumps whose orders are kept: those of a batch are asked for again and again.
_MAX_CACHED = 256


@dataclass(frozen=True, slots=True)
class LumpOrder:
    """A choice of sides, and of how many other micro-batches come before and after all lumps."""

    before: tuple[int, ...]
    """Indices of the lumps before the largest, by rising work."""
    after: tuple[int, ...]
    """Indices of those after it, by falling work."""
    num_before: int
    num_after: int


@dataclass(frozen=True, slots=True)
class _Line:
    """The bound of one order: ``X + ends + what is missing of the wanted work``."""

    num_micro_batches: int
    """At least; an order needs that many."""
    ends_ms: float
    """F + B with any amount of other work."""
    wanted_ms: float
    """Total work from which on F + B are that small."""
    spared_ms: float
    """How much less costs just _LEAST_ALONGSIDE of itself, being spared where that is less."""


class LumpOrders:
    """All orders of a set of lumps, and the bound that they make."""

    def __init__(self, apart: Sequence[tuple[LumpOrder, _Line]], lines: Sequence[_Line]) -> None:
        """apart: orders with all lumps apart; lines: of these and of all other cases."""
        self.apart = tuple(order for order, _ in apart)
        """The orders in which no two lumps share a micro-batch."""
        self._apart_lines = _Lines([line for _, line in apart])
        self._lines = _Lines(lines)

    def times_apart_ms(self, total_ms: float) -> FloatArray:
        """The bound of each order of apart, shape (num_orders,)."""
        return self._apart_lines.times_ms(total_ms)

    def least_time_ms(self, num_micro_batches: int, total_ms: float) -> float:
        """Least time of a total work in num_micro_batches; infinite if these are too few."""
        times_ms = self._lines.times_ms(total_ms)[self._lines.num <= num_micro_batches]
        return float(times_ms.min()) if times_ms.size else math.inf

    def most_work_ms(self, num_micro_batches: int, time_ms: float) -> float:
        """Most total work within a time; minus infinity if the micro-batches are too few."""
        works_ms = self._lines.works_ms(time_ms)[self._lines.num <= num_micro_batches]
        return float(works_ms.max()) if works_ms.size else -math.inf


class _Lines:
    """Many lines at once."""

    def __init__(self, lines: Sequence[_Line]) -> None:
        self.num = np.array([line.num_micro_batches for line in lines])
        self._ends = np.array([line.ends_ms for line in lines])
        self._wanted = np.array([line.wanted_ms for line in lines])
        self._spared = np.array([line.spared_ms for line in lines])

    def times_ms(self, total_ms: float) -> FloatArray:
        missing = np.maximum(0.0, self._wanted - total_ms)
        dear = np.maximum(0.0, missing - self._spared)
        waiting = _LEAST_ALONGSIDE * (missing - dear) + _MOST_ALONGSIDE * dear
        times: FloatArray = total_ms + self._ends + waiting
        return times

    def works_ms(self, time_ms: float) -> FloatArray:
        """times_ms solved for the work: the least over its three pieces."""
        enough = time_ms - self._ends
        spared = (enough - _LEAST_ALONGSIDE * self._wanted) / (1.0 - _LEAST_ALONGSIDE)
        dear = enough - _MOST_ALONGSIDE * self._wanted
        dear = (dear + (_MOST_ALONGSIDE - _LEAST_ALONGSIDE) * self._spared) / (
            1.0 - _MOST_ALONGSIDE
        )
        works: FloatArray = np.minimum(enough, np.minimum(spared, dear))
        return works


def lump_lines(num_stages: int) -> tuple[tuple[float, float], ...]:
    """The bound for one lump l among any number of micro-batches of total work X.

    It is the largest of ``by_total·X + by_lump·l`` over these pairs: a lump wants work before and
    after it in proportion to itself; see _Line for what is missing.
    """
    fill, drain = (num_stages - 1) * FORWARD_SHARE, (num_stages - 1) * (1.0 - FORWARD_SHARE)
    before, after = fill / (1.0 - FORWARD_SHARE), drain / FORWARD_SHARE
    wanted, spared = 1.0 + before + after, after if FORWARD_SHARE <= _LEAST_ALONGSIDE else before
    dear = _MOST_ALONGSIDE * wanted - (_MOST_ALONGSIDE - _LEAST_ALONGSIDE) * spared
    return (
        (1.0, 0.0),
        (1.0 - _LEAST_ALONGSIDE, _LEAST_ALONGSIDE * wanted),
        (1.0 - _MOST_ALONGSIDE, dear),
    )


def choose_lumps(lengths: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The sequences of a share that are worth being counted as lumps.

    lengths: of the share, by falling length. The longest, as many as can be handled; those that
    are less than half of it shape a pipeline little.
    """
    chosen: list[int] = []
    for length in lengths[:_MAX_LUMPS]:
        if chosen and 2 * length < chosen[0]:
            break
        if len(chosen) >= _MAX_LUMPS_THAT_FIT and chosen[-1] + length <= max_tokens:
            break
        chosen.append(length)
    return tuple(chosen)


@functools.lru_cache(maxsize=_MAX_CACHED)
def lump_orders(lengths: tuple[int, ...], cost: SchemeCost) -> LumpOrders:
    """All orders of lumps of these lengths, at least one, by falling length, in a pipeline."""
    c_ms, num_stages = cost.coefficients.c_ms, cost.num_stages
    works_ms = [cost.sequence_time_ms(length) for length in lengths]
    num_fewest = -(-sum(lengths) // cost.max_tokens)
    apart = list(_orders([work_ms + c_ms for work_ms in works_ms], num_stages, len(lengths)))
    lines = [line for _, line in apart]
    for one, other in itertools.combinations(range(len(lengths)), 2):
        if lengths[one] + lengths[other] <= cost.max_tokens:
            rest = [works_ms[i] for i in range(len(lengths)) if i not in (one, other)]
            together_ms = works_ms[one] + works_ms[other] + c_ms
            merged = sorted([together_ms, *rest], reverse=True)
            lines += [line for _, line in _orders(merged, num_stages, num_fewest)]
    return LumpOrders(apart, lines)


def _orders(
    lumps: Sequence[float], num_stages: int, num_fewest: int
) -> Iterator[tuple[LumpOrder, _Line]]:
    """Orders of lumps by falling work that are at least num_fewest micro-batches."""
    fill, fill_rest = (num_stages - 1) * FORWARD_SHARE, 1.0 - FORWARD_SHARE
    drain, drain_rest = (num_stages - 1) * (1.0 - FORWARD_SHARE), FORWARD_SHARE
    smaller = range(len(lumps) - 1, 0, -1)
    for sides in itertools.product((True, False), repeat=len(lumps) - 1):
        before = tuple(i for i, is_before in zip(smaller, sides, strict=True) if is_before)
        after = tuple(i for i, is_before in zip(smaller, sides, strict=True) if not is_before)[::-1]
        before_ms = _room_ms([lumps[i] for i in (*before, 0)], fill / fill_rest)
        after_ms = _room_ms([lumps[i] for i in (*after[::-1], 0)], drain / drain_rest)
        held_before_ms = sum(lumps[i] for i in before)
        held_after_ms = sum(lumps[i] for i in after)
        first_ms, last_ms = lumps[(*before, 0)[0]], lumps[(0, *after)[-1]]
        for num_before in range(_MAX_BEFORE + 1):
            first_end_ms = _end_ms(first_ms, fill, fill_rest, num_before, _MAX_BEFORE)
            wanted_before_ms = max(before_ms - first_end_ms / fill_rest, held_before_ms)
            for num_after in range(_MAX_AFTER + 1):
                last_end_ms = _end_ms(last_ms, drain, drain_rest, num_after, _MAX_AFTER)
                wanted_after_ms = max(after_ms - last_end_ms / drain_rest, held_after_ms)
                # Work missing before a lump costs its backward, work missing after it its forward.
                is_after_spared = drain_rest <= fill_rest
                yield (
                    LumpOrder(before, after, num_before, num_after),
                    _Line(
                        num_fewest + num_before + num_after,
                        first_end_ms + last_end_ms,
                        lumps[0] + wanted_before_ms + wanted_after_ms,
                        wanted_after_ms - held_after_ms
                        if is_after_spared
                        else wanted_before_ms - held_before_ms,
                    ),
                )


def _end_ms(lump_ms: float, pass_share: float, rest_share: float, num: int, most: int) -> float:
    """F or B for num micro-batches that grow as fast as they can towards a lump."""
    if num == most:
        return 0.0
    return pass_share * lump_ms / (1.0 + rest_share / pass_share) ** num


def _room_ms(rising_ms: Sequence[float], factor: float) -> float:
    """Work before the last of these that lets F be 0: releases at factor·l, one after another."""
    return max(
        factor * lump_ms + sum(rising_ms[place:-1]) for place, lump_ms in enumerate(rising_ms)
    )
