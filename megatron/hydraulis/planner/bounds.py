"""Lower bounds: times that no dispatch and no packing can be below, and the shape of a packing that
comes close to them.

Sums are exactly rounded (math.fsum), so that bounds are the same on every machine. The rest is
about pipelines.

**Shape.** With equal micro-batches a replica of p stages and v micro-batches of total work X takes
``X·(1 + (p-1)/v)``. It takes less if the first and the last micro-batches are smaller than the
others: a small first one fills the pipeline sooner, a small last one drains it sooner. Start and
end times of 1F1B follow from the works t_k by additions and maxima, so the least time over all
shapes, given ``Σ t_k = X`` and ``t_k <= t_max``, is a linear program. Its answer is the shape to
pack to, and its dual gives lines

    T >= slope·X - relief·t_max

that hold for every packing into v micro-batches in every order. A line is computed for X = 1 and
holds for all X, as time scales with work. Lines differ by the largest share that the program allows
a micro-batch.

The more micro-batches, the less the time depends on their number, so above MAX_EXACT a line is for
a range of numbers. Take v micro-batches and put d without work before them. On every stage the
order of the operations with work is that of 1F1B over v. The others wait for nothing with work,
but for the backwards of the d on other stages. So the program of v + d micro-batches in which the
backwards of the first d do not wait for another stage bounds v to v + d micro-batches.

In the programs of shapes operations wait for their stage on the first, the middle and the last one
only, which takes a quarter of the time of 8 stages. With 4 to 8 stages and up to 20 micro-batches
bounds are up to 0.9 % lower, and shapes take up to 0.9 % longer, than with all stages.

**Long micro-batches** contain a long sequence each. Let l_1 >= l_2 >= … be their works, X the total
work, S what runs before a micro-batch t and R what runs after it, φ the share of the forward and p
the number of stages. The path that goes forward through all stages at one micro-batch and back at
a later one gives ``T >= X + F + B`` for every

    F = (p-1)·φ·t - (1-φ)·S     of a micro-batch up to the largest one,
    B = (p-1)·(1-φ)·t - φ·R     of a micro-batch from the largest one on.

So a long micro-batch should have enough other work before and after it: it has a release and a due
date, which are tighter the larger it is. Each one is before the largest, where rising order is
best, or after it, where falling order is best. Of n other micro-batches before the first long one
each can only be so much larger than those before it, hence ``F >= (p-1)·φ·l / ρ^n`` with ``ρ = 1 +
(1-φ)/((p-1)·φ)``; likewise at the end. Everything else may be divided at will, so the result is a
lower bound, and the sizes at which it is met are a good shape.

Two long sequences may share a micro-batch if they fit. What holds for that micro-batch also holds
for two adjacent ones if neither counts the constant cost. So besides the case in which all are
apart there is one for each pair that fits, with the pair as one micro-batch and no constant cost in
the others, which covers every packing in which these two are together.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.costs import Pipeline, SchemeCost
from megatron.hydraulis.planner.solver import (
    LinearModel,
    Outcome,
    ProgramBuilder,
    Solution,
    Solver,
    SolverError,
    solve_series,
)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


MAX_EXACT = 24
"""Largest number of micro-batches that has separate lines."""
# Ranges that have lines together: numbers of micro-batches (first, last).
_RANGES = (
    *((last - 1, last) for last in range(MAX_EXACT + 2, 33, 2)),
    *((last - 3, last) for last in range(36, 65, 4)),
)
MAX_SHAPED = _RANGES[-1][1]
"""The fill of more micro-batches is at most a few percent of the time and counts as nothing."""
# Lines are computed for these ratios of the largest micro-batch to the mean. From about 1.6 on a
# larger ratio gains nothing in any pipeline.
_LARGEST_OVER_MEAN = (math.inf, 1.25, 1.1, 1.02)
# Subtracted from bounds: HiGHS's tolerances are 1e-7 on numbers around 1.
_SAFETY = 1e-6
_MAX_CACHED_SHAPES = 1024

# Numbers of long micro-batches considered: n have 2^(n-1) choices of sides, and that many again for
# each pair that fits.
_MAX_LONG = 7
_MAX_LONG_THAT_FIT = 5
# With so many small micro-batches at an end, fill or drain are counted as nothing.
_MAX_BEFORE = 5
_MAX_AFTER = 10
# Batches differ, so an entry serves only the plan that made it. Few are above 10 KB.
_MAX_CACHED_ORDERS = 40
# A rounding error must not make a share larger than the fraction that it is.
_SHARE_SAFETY = 1e-9


@dataclass(frozen=True, slots=True)
class Shape:
    """Shares of the work, and the bound that belongs to them.

    For every packing with total work X and largest micro-batch t_max (ms, constant cost
    included): ``T >= slope·X - relief·t_max``.
    """

    shares: tuple[float, ...]
    """The share of each micro-batch in its order; they add up to 1."""
    slope: float
    relief: float

    @property
    def largest(self) -> float:
        """The largest share."""
        return max(self.shares)

    def bound_ms[T: (float, NDArray[np.float64])](self, total_ms: T, largest_ms: float) -> T:
        """The line at one total work or an array of them."""
        return self.slope * total_ms - self.relief * largest_ms


def shapes(pipeline: Pipeline, num_micro_batches: int) -> tuple[Shape, ...]:
    """Shapes from quite unequal to equal micro-batches, of at most MAX_EXACT of them.

    Raises SolverError, and caches nothing, when a linear program has no answer.
    """
    equal = Shape((1.0 / num_micro_batches,) * num_micro_batches, slope=1.0, relief=0.0)
    lines = _lines(pipeline, num_micro_batches)
    return (*lines[:2], equal) if num_micro_batches > 1 else tuple(lines)


def ranges_of_numbers() -> Iterator[tuple[int, int]]:
    """Numbers of micro-batches that bounds take together, as (first, last), rising without end."""
    yield from ((num, num) for num in range(1, MAX_EXACT + 1))
    yield from _RANGES
    last = MAX_SHAPED
    while True:
        first, last = last + 1, last + 1 + last // 16
        yield first, last


def fill_bound_ms(
    pipeline: Pipeline, num_micro_batches: int, total_ms: float, largest_ms: float
) -> float:
    """Lower bound for num_micro_batches with this total work, none above largest_ms."""
    bound_ms = total_ms
    for shape in _lines(pipeline, num_micro_batches):
        bound_ms = max(bound_ms, shape.bound_ms(total_ms, largest_ms))
        if shape.largest * total_ms <= largest_ms:
            break
    return bound_ms


def most_work_ms(
    pipeline: Pipeline, num_micro_batches: int, time_ms: float, largest_ms: float
) -> float:
    """Upper limit of the work that num_micro_batches, none above largest_ms, do in a time."""
    if (num_micro_batches + pipeline.num_stages - 1) * largest_ms <= time_ms:
        return num_micro_batches * largest_ms  # There is time for as many of the largest.
    work_ms = time_ms
    for shape in _lines(pipeline, num_micro_batches):
        work_ms = min(work_ms, (time_ms + shape.relief * largest_ms) / shape.slope)
        if shape.largest * work_ms <= largest_ms:
            break
    return work_ms


def _lines(pipeline: Pipeline, num_micro_batches: int) -> Sequence[Shape]:
    """Lines for falling limits of t_max."""
    num, num_idle = num_micro_batches, 0
    if pipeline.num_stages == 1 or num > MAX_SHAPED:
        return ()
    if num == 1:
        return (Shape((1.0,), slope=float(pipeline.num_stages), relief=0.0),)
    if num > MAX_EXACT:
        first, num = next(each for each in _RANGES if each[1] >= num)
        num_idle = num - first
    return _best_shapes(pipeline, num, num_idle)


@functools.lru_cache(maxsize=_MAX_CACHED_SHAPES)
def _best_shapes(pipeline: Pipeline, num: int, num_idle: int) -> tuple[Shape, ...]:
    """The best shapes of num - num_idle to num micro-batches, for falling limits of t_max.

    The tightest limit is solved first, as the number of iterations is then least.
    """
    columns = PipelineColumns(pipeline, num, num_idle=num_idle)
    model = _model(columns, [0.0] * num, 1.0)
    limits = [min(1.0, ratio / num) for ratio in _LARGEST_OVER_MEAN[::-1]]
    uppers = [np.concatenate((np.full(num, limit), model.upper[num:])) for limit in limits]
    solutions = solve_series(model, uppers)
    if any(solution.outcome is not Outcome.OPTIMAL for solution in solutions):
        raise SolverError(f"no shape of {num} micro-batches on {pipeline.num_stages} stages")
    found = [_shape(*each, num) for each in zip(solutions, limits, strict=True)]
    return tuple(found[::-1])


def _shape(solution: Solution, largest: float, num: int) -> Shape:
    """The shape and line of an answer with no share above largest."""
    assert solution.values is not None  # an optimal linear program has both
    assert solution.column_duals is not None
    shares = np.maximum(solution.values[:num], 0.0)
    # A share at its largest costs -dual per unit of t_max; other reduced costs are not negative.
    relief = -float(np.minimum(solution.column_duals[:num], 0.0).sum())
    return Shape(
        tuple(float(share) for share in shares / shares.sum()),
        slope=max(1.0, solution.objective + relief * largest - _SAFETY),
        relief=relief,
    )


def best_works_ms(
    pipeline: Pipeline,
    least_ms: Sequence[float],
    total_ms: float,
    largest_ms: float,
    solver: Solver,
) -> list[float] | None:
    """Works of micro-batches, in their order, with the least 1F1B time for a total work.

    least_ms: shape (num_micro_batches,), minimum of each, in sum at most total_ms; largest_ms:
    maximum of each. None if the solver has no answer, which it remembers.
    """
    scale = 1.0 / total_ms
    # Without a stage the works of 4 took up to 10 % longer, as they vary more than in a shape.
    columns = PipelineColumns(pipeline, len(least_ms), stages=range(pipeline.num_stages))
    model = _model(columns, [each_ms * scale for each_ms in least_ms], largest_ms * scale)
    solution = solver.solve(model)
    if solution.values is None:
        return None
    return [float(share) * total_ms for share in solution.values[: len(least_ms)]]


def _model(columns: "PipelineColumns", least: Sequence[float], largest: float) -> LinearModel:
    """The program of the least 1F1B time over works between least and largest, in sum 1."""
    program = ProgramBuilder()
    columns.add_to(program, [(each, max(each, largest)) for each in least])
    program.row(dict.fromkeys(range(len(least)), 1.0), 1.0, 1.0)
    return program.model()


class PipelineColumns:
    """1F1B as a linear program: columns of works, ends of forwards and ends of backwards.

    The recurrence is that of cost_model.pipeline: an operation ends no earlier than its input and
    the operation before it on its stage allow. The backwards of the first num_idle micro-batches
    do not wait for their input. On stages that are left out operations wait for their input only.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        num_micro_batches: int,
        *,
        num_idle: int = 0,
        stages: Sequence[int] | None = None,
    ) -> None:
        """stages: rising, with the first and the last one; None for these and the middle one."""
        self._p, self._forward_share = pipeline
        self._v = num_micro_batches
        self._num_idle = num_idle
        last = self._p - 1
        self._stages = stages or sorted({0, last // 2, last})
        self.num = num_micro_batches * (1 + 2 * len(self._stages))
        """Number of columns; the works are the first."""

    def _forward(self, place: int, k: int) -> int:
        """Column of the end of a forward, in ms; place: of the stage in stages."""
        return self._v * (1 + place) + k

    def _backward(self, place: int, k: int) -> int:
        return self._v * (1 + len(self._stages) + place) + k

    def add_to(self, program: ProgramBuilder, works: Sequence[tuple[float, float]]) -> None:
        """Add the columns and rows ``end - end of the operation before it - its work >= 0``.

        works: least and most of each. The cost of the program is the end of the last backward.
        """
        for least, most in works:
            program.column(lower=least, upper=most)
        for column in range(self._v, self.num):
            program.column(cost=float(column == self._backward(0, self._v - 1)))
        for end, before, k, share in self._precedences():
            entries = {end: 1.0, k: -share}
            if before is not None:
                entries[before] = -1.0
            program.row(entries, 0.0, math.inf)

    def _precedences(self) -> Iterator[tuple[int, int | None, int, float]]:
        """Yields (end of an operation, end of one before it, micro-batch, share of its work).

        From one of the stages to the next, the share counts those in between.
        """
        forward, backward = self._forward, self._backward
        share, back_share = self._forward_share, 1.0 - self._forward_share
        for (place, stage), k in itertools.product(enumerate(self._stages), range(self._v)):
            num_ahead = self._p - 1 - stage
            if place > 0:
                num_passed = stage - self._stages[place - 1]
                yield forward(place, k), forward(place - 1, k), k, num_passed * share
                if k >= self._num_idle:
                    yield backward(place - 1, k), backward(place, k), k, num_passed * back_share
            if k > num_ahead:
                yield forward(place, k), backward(place, k - num_ahead - 1), k, share
            elif k > 0:
                yield forward(place, k), forward(place, k - 1), k, share
            elif stage == 0:
                yield forward(place, k), None, k, share
            if k + num_ahead < self._v:
                before = forward(place, k + num_ahead)
            else:
                before = backward(place, k - 1) if k > 0 else forward(place, self._v - 1)
            yield backward(place, k), before, k, back_share


@dataclass(frozen=True, slots=True)
class LongOrder:
    """Order of long micro-batches before and after the largest one."""

    before: tuple[int, ...]
    """Indices of those before it, by rising work."""
    after: tuple[int, ...]
    """Indices of those after it, by falling work."""
    num_before: int
    """Number of other micro-batches before all long ones."""
    num_after: int


_Sides = tuple[tuple[int, ...], tuple[int, ...]]
"""`before` and `after` of a LongOrder."""


class _Lines(NamedTuple):
    """Bounds of several orders: ``X + ends + cost of the work that is missing``."""

    num_micro_batches: IntArray
    """Minimum that the order needs."""
    ends_ms: FloatArray
    """F + B with any amount of other work."""
    wanted_ms: FloatArray
    """Total work from which on F + B is that small."""
    cheap_ms: FloatArray
    """Amount up to which missing work costs its least share, the rest the most."""


class LongOrders:
    """All orders of a set of long micro-batches, and their bound."""

    def __init__(
        self, sides: Sequence[_Sides], lines: Sequence[_Lines], pipeline: Pipeline
    ) -> None:
        """sides: of apart; lines: of apart, then of all other cases."""
        self._sides = sides
        self._least, self._most = _alongside(pipeline)
        self._num, self._ends, self._wanted, self._cheap = map(
            np.concatenate, zip(*lines, strict=True)
        )

    @functools.cached_property
    def apart(self) -> tuple[LongOrder, ...]:
        """The orders in which no two long sequences share a micro-batch."""
        ends = itertools.product(range(_MAX_BEFORE + 1), range(_MAX_AFTER + 1))
        every = itertools.product(self._sides, ends)
        return tuple(LongOrder(*sides, *nums) for sides, nums in every)

    def times_apart_ms(self, total_ms: float) -> FloatArray:
        """The bound of each order of apart, shape (num_orders,)."""
        return self._times_ms(total_ms)[: len(self.apart)]

    def least_time_ms(self, num_micro_batches: int, total_ms: float) -> float:
        """Lower bound for a total work; infinite if the micro-batches are too few."""
        times_ms = self._times_ms(total_ms)[self._num <= num_micro_batches]
        return float(times_ms.min(initial=math.inf))

    def most_works_ms(self, time_ms: float) -> list[float]:
        """Upper limit of the work within a time for at most 0, 1, 2, … micro-batches.

        The last one is for any number; -inf if the micro-batches are too few.
        """
        works_ms = np.full(self._num.max() + 1, -math.inf)
        np.maximum.at(works_ms, self._num, self._works_ms(time_ms))
        most_ms: list[float] = np.maximum.accumulate(works_ms).tolist()
        return most_ms

    def _times_ms(self, total_ms: float) -> FloatArray:
        missing = np.maximum(0.0, self._wanted - total_ms)
        costly = np.maximum(0.0, missing - self._cheap)
        waiting = self._least * (missing - costly) + self._most * costly
        times: FloatArray = total_ms + self._ends + waiting
        return times

    def _works_ms(self, time_ms: float) -> FloatArray:
        """_times_ms solved for the work: the minimum of its three pieces."""
        least, most = self._least, self._most
        enough = time_ms - self._ends
        cheap = (enough - least * self._wanted) / (1.0 - least)
        costly = enough - most * self._wanted + (most - least) * self._cheap
        costly /= 1.0 - most
        works: FloatArray = np.minimum(enough, np.minimum(cheap, costly))
        return works


def _alongside(pipeline: Pipeline) -> tuple[float, float]:
    """Least and most that work in parallel with a long micro-batch adds to its time."""
    share = min(pipeline.forward_share, 1.0 - pipeline.forward_share)
    return share, 1.0 - share


def long_micro_batch_lines(pipeline: Pipeline) -> tuple[tuple[float, float], ...]:
    """The bound for one long micro-batch l among any number with total work X.

    It is the maximum of ``by_total·X + by_long·l`` over these pairs (by_total, by_long). The work
    wanted before and after l is proportional to l; _Lines says what missing work costs.
    """
    num_others, forward = pipeline.num_stages - 1, pipeline.forward_share
    least, most = _alongside(pipeline)
    before, after = num_others * forward / (1.0 - forward), num_others * (1.0 - forward) / forward
    wanted, cheap = 1.0 + before + after, after if forward <= least else before
    costly = most * wanted - (most - least) * cheap
    return ((1.0, 0.0), (1.0 - least, least * wanted), (1.0 - most, costly))


def choose_long_micro_batches(lengths: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The sequences of a share, given by falling length, whose micro-batches count as long.

    These are the longest ones, as many as can be handled, down to half of the longest: shorter
    ones have little influence on the shape.
    """
    chosen: list[int] = []
    for length in lengths[:_MAX_LONG]:
        if chosen and 2 * length < chosen[0]:
            break
        if len(chosen) >= _MAX_LONG_THAT_FIT and chosen[-1] + length <= max_tokens:
            break
        chosen.append(length)
    return tuple(chosen)


@functools.lru_cache(maxsize=_MAX_CACHED_ORDERS)
def long_micro_batch_orders(lengths: tuple[int, ...], cost: SchemeCost) -> LongOrders:
    """All orders of long micro-batches with these lengths, at least one, by falling length."""
    c_ms, pipeline = cost.coefficients.c_ms, cost.pipeline
    works_ms = [cost.sequence_time_ms(length) for length in lengths]
    num_fewest = -(-sum(lengths) // cost.max_tokens)
    with_constant_ms = [work_ms + c_ms for work_ms in works_ms]
    apart = list(_orders(with_constant_ms, pipeline, len(lengths)))
    lines = [of_sides for _, of_sides in apart]
    for one, other in itertools.combinations(range(len(lengths)), 2):
        if lengths[one] + lengths[other] <= cost.max_tokens:
            rest = [works_ms[i] for i in range(len(lengths)) if i not in (one, other)]
            together_ms = works_ms[one] + works_ms[other] + c_ms
            merged = sorted([together_ms, *rest], reverse=True)
            lines += [of_sides for _, of_sides in _orders(merged, pipeline, num_fewest)]
    return LongOrders([sides for sides, _ in apart], lines, pipeline)


def _orders(
    long: Sequence[float], pipeline: Pipeline, num_fewest: int
) -> Iterator[tuple[_Sides, _Lines]]:
    """Long micro-batches before and after the largest, and the lines of all numbers of others.

    long: works by falling size; num_fewest: micro-batches that they need in all.
    """
    drain_rest = pipeline.forward_share
    fill_rest = 1.0 - drain_rest
    fill, drain = (pipeline.num_stages - 1) * drain_rest, (pipeline.num_stages - 1) * fill_rest
    ends_before, ends_after = (
        _ends(fill, fill_rest, _MAX_BEFORE),
        _ends(drain, drain_rest, _MAX_AFTER),
    )
    nums = num_fewest + np.add.outer(np.arange(_MAX_BEFORE + 1), np.arange(_MAX_AFTER + 1)).ravel()
    smaller = range(len(long) - 1, 0, -1)
    for sides in itertools.product((True, False), repeat=len(long) - 1):
        before = tuple(i for i, is_before in zip(smaller, sides, strict=True) if is_before)
        after = tuple(i for i, is_before in zip(smaller, sides, strict=True) if not is_before)[::-1]
        before_ms = _room_ms([long[i] for i in (*before, 0)], fill / fill_rest)
        after_ms = _room_ms([long[i] for i in (*after[::-1], 0)], drain / drain_rest)
        held_before_ms = sum(long[i] for i in before)
        held_after_ms = sum(long[i] for i in after)
        first_end_ms = long[(*before, 0)[0]] * ends_before[:, None]
        last_end_ms = long[(0, *after)[-1]] * ends_after[None, :]
        wanted_before_ms = np.maximum(before_ms - first_end_ms / fill_rest, held_before_ms)
        wanted_after_ms = np.maximum(after_ms - last_end_ms / drain_rest, held_after_ms)
        # Work missing before costs its backward, work missing after costs its forward.
        cheap_ms = (
            wanted_after_ms - held_after_ms
            if drain_rest <= fill_rest
            else wanted_before_ms - held_before_ms
        )
        ends_ms = first_end_ms + last_end_ms
        wanted_ms = long[0] + wanted_before_ms + wanted_after_ms
        yield (
            (before, after),
            _Lines(
                nums,
                ends_ms.ravel(),
                wanted_ms.ravel(),
                np.broadcast_to(cheap_ms, ends_ms.shape).ravel(),
            ),
        )


def _ends(pass_share: float, rest_share: float, most: int) -> FloatArray:
    """F or B, as shares of a long micro-batch, for 0 to most others that grow to it as fast as
    they can; 0 for the most."""
    ends: FloatArray = pass_share / (1.0 + rest_share / pass_share) ** np.arange(most + 1.0)
    ends[most] = 0.0
    return ends


def _room_ms(rising_ms: Sequence[float], factor: float) -> float:
    """Work before the last of these with which F is 0: releases at factor·l, one by one."""
    return max(
        factor * long_ms + sum(rising_ms[place:-1]) for place, long_ms in enumerate(rising_ms)
    )


# ---------------------------------------------------------------- dispatch and replica


def dispatch_bound_ms(lengths: Sequence[int], costs: Sequence[SchemeCost]) -> float:
    """A lower bound on the makespan of any dispatch of lengths to replicas with these costs.

    A replica r with tokens S_r needs at least S_r / limit_r micro-batches, so it takes at least
    the sum over its sequences of ``e_r(s) = a·s² + b·s + c·s/limit_r``. Hence for any weights
    λ_r ≥ 0 with Σ λ_r = 1 the makespan is at least ``Σ_r λ_r·Σ_{i in r} e_r(s_i)``, and so at
    least ``Σ_i min_r λ_r·e_r(s_i)`` over the replicas that can hold s_i (weak duality). The
    weights here balance the work of replicas that could hold everything. Also, a sequence has to
    pass all stages of some replica: ``min_r pp_r·(a·s² + b·s + c)``. A cost of several
    views counts in the one with the most work for all lengths.
    """
    distinct, counts = np.unique(np.array(lengths, dtype=np.int64), return_counts=True)
    num_replicas = Counter(costs)
    effective_ms, whole_batch_ms = {}, {}
    for cost in num_replicas:
        of_views_ms = [_effective_ms(view, distinct.astype(np.float64)) for view in cost.views]
        sums_ms = [math.fsum(of_view_ms * counts) for of_view_ms in of_views_ms]
        whole_batch_ms[cost] = max(sums_ms)
        effective_ms[cost] = of_views_ms[sums_ms.index(whole_batch_ms[cost])]
    if min(whole_batch_ms.values()) == 0.0:
        return 0.0
    norm = math.fsum(num / whole_batch_ms[cost] for cost, num in num_replicas.items())
    weighted_ms = [
        np.where(distinct <= cost.max_tokens, of_cost_ms / (norm * whole_batch_ms[cost]), np.inf)
        for cost, of_cost_ms in effective_ms.items()
    ]
    shared_ms = math.fsum(counts * np.min(weighted_ms, axis=0))
    # Shorter sequences take less: each replica is faster with them, and no fewer can hold them.
    longest = max(lengths)
    single_ms = min(
        cost.num_stages * cost.coefficients.time_ms((longest,))
        for cost in num_replicas
        if longest <= cost.max_tokens
    )
    return max(shared_ms, single_ms)


def packing_bound_ms(lengths: Sequence[int], cost: SchemeCost) -> float:
    """A lower bound on the time of a replica with these sequences, whatever the packing.

    ``Σ t + (pp-1)·min t`` with at least ⌈tokens/limit⌉ micro-batches, and the pass of the longest
    sequence through all stages.
    """
    if not lengths:
        return 0.0
    if len(cost.views) > 1:
        return max(packing_bound_ms(lengths, view) for view in cost.views)
    c_ms = cost.coefficients.c_ms
    num_fewest = -(-sum(lengths) // cost.max_tokens)
    work_ms = math.fsum(cost.sequence_time_ms(s) for s in lengths)
    fill_ms = (cost.num_stages - 1) * (cost.sequence_time_ms(min(lengths)) + c_ms)
    longest_ms = cost.num_stages * (cost.sequence_time_ms(max(lengths)) + c_ms)
    return max(work_ms + num_fewest * c_ms + fill_ms, longest_ms)


def _effective_ms(cost: SchemeCost, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    work_ms: NDArray[np.float64] = cost.coefficients.sequence_time_ms(lengths)
    return work_ms + cost.coefficients.c_ms * lengths / cost.max_tokens


def fewest_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """A lower bound on the number of micro-batches: L2 of Martello and Toth (1990).

    For a threshold up to half the limit: sequences above limit - threshold leave no room for any
    from the threshold on, no two above half the limit fit together, and the room that the latter
    leave holds only a part of the rest down to the threshold.
    """
    rising = np.sort(np.array(lengths, dtype=np.int64))
    tokens_below = np.concatenate(([0], np.cumsum(rising)))
    half = int(np.searchsorted(rising, max_tokens // 2, side="right"))
    thresholds = np.concatenate(([0], np.unique(rising[:half])))
    # Places in rising: from the threshold on, and of the sequences that leave less room than it.
    small = np.searchsorted(rising, thresholds)
    alone = np.searchsorted(rising, max_tokens - thresholds, side="right")
    room = (alone - half) * max_tokens - (tokens_below[alone] - tokens_below[half])
    beyond = tokens_below[half] - tokens_below[small] - room
    fewest = len(rising) - half + np.maximum(0, -(-beyond // max_tokens))
    return max(-(-sum(lengths) // max_tokens), int(fewest.max()))


def replica_bound_ms(lengths: Sequence[int], cost: SchemeCost) -> float:
    """A tighter lower bound on the time of a replica, whatever the packing.

    The minimum over numbers of micro-batches of the bounds for that number: total work with the
    best shape, and the path of the long sequences through the pipeline.
    """
    if not lengths:
        return 0.0
    if len(cost.views) > 1:
        return max(replica_bound_ms(lengths, view) for view in cost.views)
    c_ms, num_stages = cost.coefficients.c_ms, cost.num_stages
    work_ms = math.fsum(cost.sequence_time_ms(length) for length in lengths)
    fewest = fewest_micro_batches(lengths, cost.max_tokens)
    if num_stages == 1:
        return work_ms + fewest * c_ms
    falling = sorted(lengths, reverse=True)
    orders = long_micro_batch_orders(choose_long_micro_batches(falling, cost.max_tokens), cost)
    largest_ms = cost.largest_time_ms(falling[0])
    best_ms = math.inf
    for first, last in ranges_of_numbers():
        num = max(first, fewest)
        if num > last:
            continue
        total_ms = work_ms + num * c_ms
        # A lower bound for larger numbers too: more micro-batches only add constant costs.
        least_ms = max(
            total_ms + (num_stages - 1) * c_ms,
            orders.least_time_ms(len(lengths), total_ms),
        )
        if num > MAX_SHAPED or num > len(lengths) or least_ms >= best_ms:
            break
        best_ms = min(
            best_ms,
            max(
                fill_bound_ms(cost.pipeline, num, total_ms, largest_ms),
                orders.least_time_ms(last, total_ms),
            ),
        )
    return best_ms if num > len(lengths) else min(best_ms, least_ms)


def dual_feasible(shares: FloatArray, m: int | IntArray) -> FloatArray:
    """Counts what items leave unused because they cannot be divided, in numbers that can be summed.

    Dual feasible functions (Fekete and Schepers, Mathematical Programming 91, 2001): with x the
    share of a room that an item takes and ``u_m(x) = x`` where ``(m+1)·x`` is whole, otherwise
    ``⌊(m+1)·x⌋ / m``, items that fit one room together have ``Σ u_m(x) <= 1``. A share in [0, 1]
    within rounding of a whole fraction counts as that fraction. m may have a shape that extends
    the shares.
    """
    scaled = (m + 1) * shares
    whole = np.rint(scaled)
    is_whole = np.abs(scaled - whole) <= _SHARE_SAFETY * (m + 1)
    return np.where(is_whole, whole / (m + 1), np.floor(scaled) / m)
