"""Can any dispatch and packing finish within a given time? A linear program that can say no.

For a time T each class of equal replicas can run in several modes. A replica that has to finish by
T with v micro-batches does at most ``X_v(T) - v·c`` of work: X_v(T) is T for one stage and follows
from the best shape of the pipeline for more (bounds.py). It holds at most ``v·limit``
tokens. Both together are a **mode**; costs of several views limit the work in each. The program
spreads the tokens of buckets over modes and minimises the tokens left over. If some are left over
at the optimum, no plan finishes within T. Its answer says how much of each bucket each class should
get. It takes milliseconds.

Fractions would make large sequences too easy. Dual feasible functions of the share of a replica's
work, or of a micro-batch's tokens, that a sequence takes restore what they cost.

All lengths are rounded down: the tokens of a bucket count as they are, ``s²`` as ``low·s``, and
there are as few sequences as if all were the longest of the bucket. A batch of shorter sequences
takes no longer, so a bound remains a bound.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.bounds import (
    MAX_SHAPED,
    choose_long_micro_batches,
    dual_feasible,
    long_micro_batch_orders,
    most_work_ms,
    ranges_of_numbers,
)
from megatron.hydraulis.planner.costs import ReplicaClass, SchemeCost, undominated
from megatron.hydraulis.planner.solver import (
    LinearModel,
    Outcome,
    ProgramBuilder,
    Solver,
)

_NUM_BUCKETS = 32
_DUAL_FEASIBLE_FUNCTIONS = np.arange(1, 5)[:, None, None]
# The answer is no if more than this share of the tokens is left over: HiGHS is exact to 1e-7.
_LEFT_OVER_FRACTION = 1e-6
# Cost of a token in a pipeline, in tokens left over, for programs that make dispatches.
_PIPELINE_COST = 1e-3
# A pipeline has separate tiers for sequences with which it does less work than this share of the
# time, and at most so many tiers.
_SPOILED = 0.9
_MAX_TIERS = 10
# Long sequences that a pipeline can hold within the time are counted up to this number.
_MAX_COUNTED_LONG = 4
# Instead of no work at all, so that shares of it are finite.
_LEAST_WORK_MS = 1e-9
# Numbers of micro-batches with room for all tokens that have a mode each; the next one stands for
# all larger ones.
_NUM_COUNTED = 2
# The dynamic program for buckets takes time with the square of the number of different lengths.
# Above this number, lengths that agree in their leading bits (at most 1/32 apart) are one group.
_MAX_GROUPS = 256
_KEPT_BITS = 6
# Strategies of a pool share the buckets of a batch if the same limits divide it.
_MAX_CACHED = 16

FloatArray = NDArray[np.float64]


class Relaxation:
    """The programs of one batch on one strategy, for any time."""

    def __init__(
        self,
        classes: Sequence[ReplicaClass],
        lengths: Sequence[int],
        *,
        solver: Solver,
        num_buckets: int = _NUM_BUCKETS,
    ) -> None:
        """lengths: of the batch, rising; each fits some class."""
        self.classes = tuple(classes)
        self.lengths = lengths
        self.buckets = make_buckets(
            lengths, num_buckets, borders={c.cost.max_tokens for c in classes}
        )
        self.solver = solver
        self._num_tokens = sum(lengths)
        self._low = np.array([bucket.low for bucket in self.buckets], dtype=np.float64)
        self._high = np.array([bucket.high for bucket in self.buckets], dtype=np.float64)
        self._works_ms = [
            np.array([view.coefficients.sequence_time_ms(self._low) for view in each.cost.views])
            for each in classes
        ]

    def is_impossible(self, time_ms: float) -> bool:
        """True if it is proved that every plan takes longer than time_ms."""
        program = self._program(time_ms)
        if program is None:
            return True
        solution = self.solver.solve(program[0])
        is_left_over = solution.bound > _LEFT_OVER_FRACTION * self._num_tokens
        return solution.outcome is Outcome.OPTIMAL and is_left_over

    def owed(self, time_ms: float, *, longest_fill: float) -> FloatArray | None:
        """Tokens of each bucket for each class, shape (num_buckets, num_classes).

        None if the solver fails or a sequence does not fit within the time. longest_fill: share of
        the time that a sequence may take in a pipeline if it could go elsewhere. Below infinity the
        program bounds nothing, but makes better dispatches: it keeps long sequences that spoil the
        shape out of pipelines, and assigns them no more than necessary, as it overestimates their
        capacity.
        """
        program = self._program(time_ms, longest_fill=longest_fill)
        if program is None:
            return None
        model, modes = program
        solution = self.solver.solve(model)
        if solution.values is None:
            return None
        num_buckets, num_modes = len(self.buckets), len(modes)
        spread = solution.values[: num_buckets * num_modes].reshape(num_buckets, num_modes)
        owed = np.zeros((num_buckets, len(self.classes)))
        np.add.at(owed.T, [mode.replica_class for mode in modes], spread.T)
        return owed

    def _program(
        self, time_ms: float, *, longest_fill: float = math.inf
    ) -> tuple[LinearModel, list[Mode]] | None:
        """The program for a time and its modes; None if a sequence does not fit within it.

        Columns: tokens of each bucket in each mode (bucket by bucket), replicas in each mode,
        tokens of each bucket that are left over.
        """
        longest_within = [self._longest_within(c.cost, time_ms) for c in self.classes]
        if self.lengths[-1] > max(longest_within):
            return None
        modes: list[Mode] = []
        for index, replica_class in enumerate(self.classes):
            others = longest_within[:index] + longest_within[index + 1 :]
            for tier in self._tiers(
                replica_class, longest_within[index], max(others, default=0), time_ms
            ):
                modes += class_modes(
                    index,
                    replica_class.cost,
                    tier,
                    time_ms,
                    lengths=self.lengths,
                    num_tokens=self._num_tokens,
                )
        able = np.array(
            [[bucket.low <= mode.tier.longest for mode in modes] for bucket in self.buckets]
        )
        if not able.any(axis=1).all():
            return None
        if longest_fill == math.inf:
            return self._model(modes, able), modes
        costs = [self.classes[mode.replica_class].cost for mode in modes]
        is_pipeline = np.array([cost.num_stages > 1 for cost in costs])
        most_ms = longest_fill * time_ms
        is_short = np.array(
            [
                [cost.sequence_time_ms(bucket.high) <= most_ms for cost in costs]
                for bucket in self.buckets
            ]
        )
        must_fill = ~(able & ~is_pipeline).any(axis=1)[:, None]
        model = self._model(modes, able & (~is_pipeline | is_short | must_fill))
        model.cost[: able.size].reshape(able.shape)[:, is_pipeline] = _PIPELINE_COST
        return model, modes

    def _longest_within(self, cost: SchemeCost, time_ms: float) -> int:
        """The longest sequence of the batch that fits a class and passes all its stages in time."""
        fitting = (length for length in reversed(self.lengths) if length <= cost.max_tokens)
        return next(
            (s for s in fitting if cost.num_stages * cost.coefficients.time_ms((s,)) <= time_ms), 0
        )

    def _tiers(
        self, replica_class: ReplicaClass, longest: int, longest_elsewhere: int, time_ms: float
    ) -> list[Tier]:
        """The tiers of a class: a sequence goes to the tier of its length or of longer ones.

        longest, longest_elsewhere: longest sequence that this and any other class can hold within
        the time.
        """
        cost = replica_class.cost
        if longest == 0:
            return []
        if cost.num_stages == 1:
            return [Tier(longest)]
        only_here = self._only_here(cost, longest, longest_elsewhere)
        if only_here and replica_class.num_replicas == 1:
            return [Tier(longest, only_here, num_least=1)]
        # A tier for each bucket from the first whose sequences slow a pipeline down; several
        # buckets share one if there are many.
        num_able = bisect_right(self.buckets, longest, key=lambda bucket: bucket.low)
        first = bisect_left(
            self.buckets[:num_able],
            True,
            key=lambda bucket: self._spoils(cost, bucket.low, time_ms),
        )
        firsts = range(first, num_able, -(-(num_able - first) // _MAX_TIERS) or 1)
        tiers = []
        for start, end in pairwise([0, *firsts, num_able]):
            if end > start:
                low, high = self.buckets[start].low, self.buckets[end - 1].high
                tiers.append(
                    _tier_with_long(cost, low, high, time_ms) if start in firsts else Tier(high)
                )
        if only_here:
            tiers[-1] = replace(tiers[-1], num_least=1)
        return tiers

    def _spoils(self, cost: SchemeCost, length: int, time_ms: float) -> bool:
        """True if a pipeline that holds a sequence can do noticeably less work within a time."""
        most_ms = long_micro_batch_orders((length,), cost).most_works_ms(time_ms)[-1]
        return most_ms < _SPOILED * time_ms

    def _only_here(self, cost: SchemeCost, longest: int, longest_elsewhere: int) -> tuple[int, ...]:
        """Lengths, falling, of long micro-batches that only this class can hold."""
        lengths = self.lengths[bisect_right(self.lengths, longest_elsewhere) :]
        if not lengths or lengths[-1] > longest:
            return ()
        return choose_long_micro_batches(lengths[::-1], cost.max_tokens)

    def _model(self, modes: Sequence[Mode], able: NDArray[np.bool_]) -> LinearModel:
        program = ProgramBuilder()
        spread = program.columns(np.where(able, math.inf, 0.0).ravel())
        num_modes = len(modes)
        replicas = program.columns([math.inf] * num_modes)
        for place, bucket in enumerate(self.buckets):
            of_bucket = spread[place * num_modes : (place + 1) * num_modes]
            left_over = program.column(cost=1.0)
            entries = dict.fromkeys((*of_bucket, left_over), 1.0)
            program.row(entries, bucket.num_tokens, bucket.num_tokens)
        for place, mode in enumerate(modes):
            uses, rooms = self._uses(mode)
            columns = (*spread[place::num_modes], replicas[place])
            program.rows(columns, np.column_stack((uses, -rooms)), -math.inf, 0.0)
        for index, replica_class in enumerate(self.classes):
            of_class = [
                (mode.tier.num_least, column)
                for mode, column in zip(modes, replicas, strict=True)
                if mode.replica_class == index
            ]
            entries = {column: 1.0 for _, column in of_class}
            program.row(entries, -math.inf, replica_class.num_replicas)
            # Of all modes with a least number, which are of one tier.
            entries = {column: 1.0 for num_least, column in of_class if num_least}
            num_least = max((num for num, _ in of_class), default=0)
            program.row(entries, num_least or -math.inf, math.inf)
        return program.model()

    def _uses(self, mode: Mode) -> tuple[FloatArray, FloatArray]:
        """What a token of each bucket uses of the resources of a mode, and what a replica has.

        Shapes (num_resources, num_buckets) and (num_resources,).
        """
        cost = self.classes[mode.replica_class].cost
        most_ms = np.maximum(mode.works_ms, _LEAST_WORK_MS)[:, None]
        # A row that asks for no more of any bucket than another one is not needed.
        shares = undominated(
            self._works_ms[mode.replica_class] / most_ms,
            lambda share, other: bool((share >= other).all()),
        )
        rooms = [1.0] * len(shares)
        token_share = self._low / cost.max_tokens
        # A sequence has at least and at most so many tokens.
        shortest, longest = self._low, self._high
        tier = mode.tier
        num_micro_batches = float(mode.num_micro_batches)
        uses = [np.array([*shares, token_share]) / shortest]
        has = [*rooms, num_micro_batches]
        if tier.most_long:
            uses.append(((self._low >= tier.shortest_long) / longest)[None])
            has.append(float(tier.most_long))
        if not mode.packs_all:
            shares.append(token_share)
            rooms.append(num_micro_batches)
        counted = dual_feasible(np.array(shares), _DUAL_FEASIBLE_FUNCTIONS) / longest
        counts = counted.any(axis=2)
        uses.append(counted[counts])
        rooms_of_counted = np.broadcast_to(rooms, counts.shape)[counts]
        return np.concatenate(uses), np.concatenate((has, rooms_of_counted))


def _tier_with_long(cost: SchemeCost, shortest: int, longest: int, time_ms: float) -> Tier:
    """The tier of replicas that hold a sequence between these lengths and none above."""
    most_long = 0
    if 2 * shortest > cost.max_tokens:
        # No two fit in one micro-batch. The time is least with no other work.
        for num in range(1, _MAX_COUNTED_LONG + 1):
            if any(_least_of_long_ms(view, shortest, num) > time_ms for view in cost.views):
                most_long = max(num - 1, 1)
                break
    return Tier(longest, (shortest,), shortest if most_long else 0, most_long)


def _least_of_long_ms(cost: SchemeCost, length: int, num: int) -> float:
    """Lower bound of the time of a view with so many sequences of a length, of which no two fit in
    one micro-batch."""
    if cost.num_stages == 1:
        return num * cost.coefficients.time_ms((length,))
    orders = long_micro_batch_orders((length,) * num, cost)
    return orders.least_time_ms(MAX_SHAPED, num * cost.coefficients.time_ms((length,)))


@dataclass(frozen=True, slots=True)
class Mode:
    """Capacity of a replica of a class within a time, with num_micro_batches micro-batches."""

    replica_class: int
    """Index of the class."""
    num_micro_batches: int
    works_ms: tuple[float, ...]
    """Upper limit of ``Σ a·s² + b·s`` in each view of the cost."""
    num_tokens: int
    """Upper limit of the tokens: those that fit, or those that the work allows."""
    packs_all: bool
    """Whether sequences are not counted per micro-batch: with half the room to spare any lengths
    can be packed. Such a mode also stands for larger numbers of micro-batches."""
    tier: Tier


@dataclass(frozen=True, slots=True)
class Tier:
    """Replicas of a class by the long sequences that they hold."""

    longest: int
    """Longest sequence of the tier."""
    long_lengths: tuple[int, ...] = ()
    """Lengths of sequences that each replica holds at least, falling."""
    shortest_long: int = 0
    """Shortest sequence that counts as long, if these are counted; otherwise 0."""
    most_long: int = 0
    """Maximum number of them that a replica can hold within the time."""
    num_least: int = 0
    """Minimum number of replicas in the tier."""


def class_modes(
    index: int,
    cost: SchemeCost,
    tier: Tier,
    time_ms: float,
    *,
    lengths: Sequence[int],
    num_tokens: int,
) -> list[Mode]:
    """The modes of a class's tier for a time, without those that another one dominates.

    lengths: of the batch, rising; num_tokens: their sum. No other number of micro-batches does
    more.
    """
    views = [_Capacity(view, tier, time_ms, lengths[0]) for view in cost.views]
    found: list[Mode] = []
    roomiest_ms = (0.0,) * len(views)
    num_roomy = 0
    for first, num in ranges_of_numbers():
        limits_ms = [view.limit_ms(first) for view in views]
        if first > len(lengths) or all(map(operator.lt, limits_ms, roomiest_ms)):
            break
        mosts_ms = [view.most_ms(num) for view in views]
        works_ms = tuple(
            most_ms - first * view.c_ms for view, most_ms in zip(views, mosts_ms, strict=True)
        )
        if min(works_ms) < 0.0:
            continue
        # No more tokens than there are, or than the work allows.
        of_views = (view.most_tokens(work) for view, work in zip(views, works_ms, strict=True))
        useful = min(num_tokens, *of_views)
        room = num * cost.max_tokens
        # Work of nothing but full micro-batches is limited by the room, not by the time.
        num_roomy += room >= useful and any(
            most_ms < num * view.largest_ms for view, most_ms in zip(views, mosts_ms, strict=True)
        )
        # First fit fails only if any two micro-batches together hold more than the limit.
        packs_all = room >= 2 * useful or num_roomy > _NUM_COUNTED
        found.append(Mode(index, num, works_ms, min(room, useful), packs_all, tier))
        if packs_all:
            if all(map(operator.ge, works_ms, roomiest_ms)):
                roomiest_ms = works_ms
            if cost.num_stages == 1 or num > MAX_SHAPED:
                break
    return undominated(found, _does_all_of)


class _Capacity:
    """What a view of a cost does within a time in a tier."""

    def __init__(self, view: SchemeCost, tier: Tier, time_ms: float, shortest: int) -> None:
        """shortest: length of the shortest sequence."""
        self._view = view
        self._time_ms = time_ms
        self.c_ms = view.coefficients.c_ms
        self.largest_ms = view.largest_time_ms(tier.longest)
        self._least_per_token_ms = view.sequence_time_ms(shortest) / shortest
        self._around_long_ms = [math.inf]
        if tier.long_lengths and view.num_stages > 1:
            orders = long_micro_batch_orders(tier.long_lengths, view)
            self._around_long_ms = orders.most_works_ms(time_ms)

    def limit_ms(self, num: int) -> float:
        """An upper limit of the work of num micro-batches and of more: a pipeline fills and drains
        with at least the constant cost."""
        return self._time_ms - (self._view.num_stages - 1 + num) * self.c_ms

    def most_ms(self, num: int) -> float:
        """Upper limit of the work of num micro-batches, constant costs included."""
        most_ms = most_work_ms(self._view.pipeline, num, self._time_ms, self.largest_ms)
        return min(most_ms, self._around_long_ms[: num + 1][-1])

    def most_tokens(self, work_ms: float) -> int:
        """Most tokens that a work allows."""
        least_ms = self._least_per_token_ms
        return math.ceil(work_ms / least_ms) if least_ms > 0.0 else sys.maxsize


def _does_all_of(mode: Mode, other: Mode) -> bool:
    packs_all_of = mode.packs_all or (
        not other.packs_all and mode.num_micro_batches >= other.num_micro_batches
    )
    return (
        packs_all_of
        and all(map(operator.ge, mode.works_ms, other.works_ms))
        and mode.num_tokens >= other.num_tokens
    )


@dataclass(frozen=True, slots=True)
class LengthBucket:
    """Sequences of similar lengths."""

    low: int
    """The shortest, in tokens: the length that each counts as."""
    high: int
    """The longest."""
    num_sequences: int
    num_tokens: int
    """Sum of the real lengths."""


def make_buckets(
    lengths: Sequence[int], num_buckets: int, *, borders: Iterable[int] = ()
) -> tuple[LengthBucket, ...]:
    """Divide lengths into buckets of least total rounding, by dynamic programming.

    lengths: shape (num_sequences,), in tokens; borders: lengths (limits of schemes) that no bucket
    may straddle. Returns at most num_buckets buckets, and one more per border, by rising length.
    """
    longest = max(lengths)
    fixed = sorted({border for border in borders if border < longest})
    return _buckets(tuple(lengths), num_buckets, tuple(fixed))


@functools.lru_cache(maxsize=_MAX_CACHED)
def _buckets(
    lengths: tuple[int, ...], num_buckets: int, fixed: tuple[int, ...]
) -> tuple[LengthBucket, ...]:
    groups = _groups(lengths, fixed)
    num_groups = len(groups)
    values = np.array([group.low for group in groups], dtype=np.int64)
    # Sums over all groups before each one.
    num_before = np.cumsum([0, *(group.num_sequences for group in groups)])
    tokens_before = np.cumsum([0, *(group.num_tokens for group in groups)])
    cuts = {int(np.searchsorted(values, border, side="right")) for border in fixed}
    cuts -= {0, num_groups}
    wanted = min(num_groups, num_buckets + len(cuts))
    edges = _best_edges(values, num_before, tokens_before, sorted(cuts), wanted)
    return tuple(
        LengthBucket(
            low=groups[first].low,
            high=groups[end - 1].high,
            num_sequences=int(num_before[end] - num_before[first]),
            num_tokens=int(tokens_before[end] - tokens_before[first]),
        )
        for first, end in pairwise(edges)
    )


def _groups(lengths: Sequence[int], borders: Sequence[int]) -> list[LengthBucket]:
    """Groups of equal lengths or, if there are very many, of almost equal ones."""
    counts = Counter(lengths)
    is_exact = len(counts) <= _MAX_GROUPS

    def leading_bits(length: int) -> tuple[int, int]:
        quantum_bits = 0 if is_exact else max(0, length.bit_length() - _KEPT_BITS)
        return length >> quantum_bits << quantum_bits, bisect_left(borders, length)

    groups = []
    for _, members in groupby(sorted(counts), leading_bits):
        group = list(members)
        num_tokens = sum(length * counts[length] for length in group)
        num_sequences = sum(counts[length] for length in group)
        groups.append(LengthBucket(group[0], group[-1], num_sequences, num_tokens))
    return groups


def _best_edges(
    values: NDArray[np.int64],
    num_before: NDArray[np.int64],
    tokens_before: NDArray[np.int64],
    cuts: Sequence[int],
    num_buckets: int,
) -> list[int]:
    """First group of each bucket and, at the end, the number of groups."""
    num_groups = len(values)
    if num_buckets >= num_groups:
        return list(range(num_groups + 1))
    # rounding[j, i]: of a bucket of the groups i to j - 1; infinite across a cut.
    num_inside = num_before[:, None] - num_before[:num_groups]
    tokens_inside = tokens_before[:, None] - tokens_before[:num_groups]
    rounding = (tokens_inside - values * num_inside).astype(np.float64)
    rounding[np.triu_indices(num_groups + 1, 0, num_groups)] = np.inf
    for cut in cuts:
        rounding[cut + 1 :, :cut] = np.inf
    # best[j]: least rounding of the first j groups, with one more bucket in each round.
    best = rounding[:, 0]
    rows = np.arange(num_groups + 1)
    choices = []
    for _ in range(num_buckets - 1):
        totals = best[:num_groups] + rounding
        choice = np.argmin(totals, axis=1)
        best = totals[rows, choice]
        choices.append(choice)
    edges = [num_groups]
    for choice in reversed(choices):
        edges.append(int(choice[edges[-1]]))
    return [0, *reversed(edges)]
