"""The long sequences alone: a program that bounds them, and a search that dispatches them.

Where most replicas hold short sequences only, the few others decide the time, and for these the
long sequences do. So the batch is reduced to the sequences above the limit of some class, on the
classes that hold them: leaving sequences out makes no plan slower, so a time that is impossible for
the rest is impossible for all.

**Program.** For a single stage it has modes as in relaxation.py. For a pipeline it has one mode for
each number k of long sequences, here those of more than half the limit, each in its own
micro-batch. In such a mode each has a position in the order; t_1 … t_k being their works, S_q what
runs before position q, R_q what runs after it, φ the share of the forward, p the number of stages,

    T >= Σ t + (p-1)·φ·t_q - (1-φ)·S_q + (p-1)·(1-φ)·t_r - φ·R_r     for all q <= r,

the path forward through all stages at one and back through all stages at another (see
bounds.py). Other micro-batches only add to it. The inequalities are linear, so they hold
for the means over the replicas in a mode too, which is what the program contains.

**Search.** With few long sequences on few replicas no single move or swap makes the slowest replica
faster, long before the best dispatch is found. Threshold accepting (Dueck and Scheuer, Journal of
Computational Physics 90, 1990) also takes moves and swaps that are worse by less than a threshold,
which falls to zero. Times are those of the long sequences alone, in a pipeline each in its own
micro-batch, in the best order that rises to the longest and falls from it. The bound of
bounds.py is quicker than 1F1B: a step with too large a bound is rejected at once, and
only the orders with the least bounds are timed.

If a cost has several forms, the program takes the view with the most work for these sequences, as a
bound of any view is a bound. The search takes the largest form of each micro-batch.
"""

import functools
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.bounds import dual_feasible
from megatron.hydraulis.planner.costs import Pipeline, ReplicaClass, SchemeCost
from megatron.hydraulis.planner.greedy import best_fit
from megatron.hydraulis.planner.pipeline_packing import pipeline_times_ms
from megatron.hydraulis.planner.relaxation import make_buckets
from megatron.hydraulis.planner.solver import (
    LinearModel,
    Outcome,
    ProgramBuilder,
    Solver,
)

FloatArray = NDArray[np.float64]

# The program.
_DUAL_FEASIBLE_FUNCTIONS = (1, 2, 3, 4, 5, 6, 7, 8)
_LEFT_OVER_FRACTION = 1e-6
# Instead of no work at all, so that shares of it are finite.
_LEAST_WORK_MS = 1e-9
_ROUNDING = 1e-9
_NUM_BUCKETS = 32
# With more sequences the program is not used.
_MAX_SEQUENCES = 128
# Most long sequences in a pipeline and most modes of a single stage: with more, fill and rounding
# are small.
_MAX_LONG = 16
_MAX_MODES = 32

# The search.
_NUM_STEPS = 10_000
# Threshold of the first step, as a share of the makespan.
_FIRST_THRESHOLD = 0.02
# Weight of the sum of all times against the slowest: room on any replica is worth something.
_SUM_WEIGHT = 0.02
_SWAP_SHARE = 0.7
# k sequences have 2^(k-1) orders.
_MAX_IN_PIPELINE = 10
# Number of orders that are timed.
_NUM_TIMED = 64
_SEED = 0


def long_sequences(
    classes: Sequence[ReplicaClass], lengths: Sequence[int], solver: Solver
) -> list["LongSequences"]:
    """The useful programs: one for each limit that leaves few sequences and some pipeline.

    lengths: of the batch, rising.
    """
    programs = []
    for border in sorted({c.cost.max_tokens for c in classes}):
        above = lengths[bisect_right(lengths, border) :]
        holding = [c for c in classes if c.cost.max_tokens > border]
        if 0 < len(above) <= _MAX_SEQUENCES and any(c.cost.num_stages > 1 for c in holding):
            programs.append(LongSequences(holding, above, solver))
    return programs


class LongSequences:
    """The programs of a few long sequences, for any time.

    classes: those that hold them; lengths: rising, each above the limits of all other classes.
    """

    def __init__(
        self, classes: Sequence[ReplicaClass], lengths: Sequence[int], solver: Solver
    ) -> None:
        self.classes = tuple(classes)
        self._viewed = [replace(each, cost=_decisive(each.cost, lengths)) for each in classes]
        self.lengths = tuple(lengths)
        self.buckets = make_buckets(
            lengths,
            _NUM_BUCKETS,
            borders={b for c in classes for b in (c.cost.max_tokens, c.cost.max_tokens // 2)},
        )
        self._low = np.array([bucket.low for bucket in self.buckets], dtype=np.float64)
        self._solver = solver

    def is_impossible(self, time_ms: float) -> bool:
        """True if it is proved that every plan takes longer than time_ms."""
        model, _ = self._program(time_ms)
        solution = self._solver.solve(model)
        return solution.outcome is Outcome.OPTIMAL and self._leaves_tokens(solution.bound)

    def owed(self, time_ms: float) -> FloatArray | None:
        """Sequences, in fractions, of each bucket for each class: (num_buckets, num_classes).

        None if the time is impossible or the solver fails.
        """
        model, places = self._program(time_ms)
        solution = self._solver.solve(model)
        if solution.values is None:
            return None
        if self._leaves_tokens(solution.objective):
            return None
        owed = np.zeros((len(self.buckets), len(self.classes)))
        for bucket, column, index in places:
            owed[bucket, index] += solution.values[column]
        return owed

    def _leaves_tokens(self, num_tokens: float) -> bool:
        return num_tokens > _LEFT_OVER_FRACTION * sum(self.lengths)

    def _program(self, time_ms: float) -> tuple[LinearModel, list[tuple[int, int, int]]]:
        """The program, and (bucket, column, class) of all columns with sequences."""
        program = ProgramBuilder()
        places: list[tuple[int, int, int]] = []
        for index, replica_class in enumerate(self._viewed):
            able = self._able(self.classes[index].cost, time_ms)
            if replica_class.cost.num_stages == 1:
                found = self._single_stage(program, replica_class, able, time_ms)
            else:
                found = self._pipeline(program, replica_class, able, time_ms)
            places += [(bucket, column, index) for bucket, column in found]
        for place, bucket in enumerate(self.buckets):
            entries = {column: 1.0 for other, column, _ in places if other == place}
            entries[program.column(cost=float(bucket.low))] = 1.0
            program.row(entries, bucket.num_sequences, bucket.num_sequences)
        return program.model(), places

    def _able(self, cost: SchemeCost, time_ms: float) -> NDArray[np.bool_]:
        """The buckets that fit and pass all stages in time."""
        forms_ms = (
            form.sequence_time_ms(self._low) + form.c_ms for form in cost.coefficients.forms
        )
        alone_ms = cost.num_stages * functools.reduce(np.maximum, forms_ms)
        able: NDArray[np.bool_] = (self._low <= cost.max_tokens) & (alone_ms <= time_ms)
        return able

    def _single_stage(
        self,
        program: ProgramBuilder,
        replica_class: ReplicaClass,
        fits: NDArray[np.bool_],
        time_ms: float,
    ) -> list[tuple[int, int]]:
        cost = replica_class.cost
        works_ms = self._works_ms(replica_class)
        found: list[tuple[int, int]] = []
        modes: dict[int, float] = {}
        for num in range(1, _MAX_MODES + 1):
            room_ms = time_ms - num * cost.coefficients.c_ms
            # The last mode stands for all larger numbers, so nothing is counted per micro-batch.
            is_last = num == _MAX_MODES
            able = fits & (works_ms <= room_ms)
            if not able.any():
                break
            mode = program.column(upper=replica_class.num_replicas)
            modes[mode] = 1.0
            columns = [(int(bucket), program.column()) for bucket in np.nonzero(able)[0]]
            found += columns
            shares = [(works_ms / max(room_ms, _LEAST_WORK_MS), 1.0)]
            if not is_last:
                shares.append((self._low / cost.max_tokens, float(num)))
            for share, room in shares:
                for counted in (
                    share,
                    *(dual_feasible(share, m) for m in _DUAL_FEASIBLE_FUNCTIONS),
                ):
                    entries = {column: float(counted[bucket]) for bucket, column in columns}
                    program.row({**entries, mode: -room}, -np.inf, 0.0)
            # With half the room to spare, first fit packs whatever the work allows: everything if
            # nothing takes time.
            if works_ms[able].min() > 0.0:
                densest = float((self._low[able] / works_ms[able]).max())
                if num * cost.max_tokens >= 2.0 * room_ms * densest:
                    break
        program.row(modes, 0.0, replica_class.num_replicas)
        return found

    def _pipeline(
        self,
        program: ProgramBuilder,
        replica_class: ReplicaClass,
        able: NDArray[np.bool_],
        time_ms: float,
    ) -> list[tuple[int, int]]:
        cost = replica_class.cost
        works_ms = self._works_ms(replica_class)
        times_ms = works_ms + cost.coefficients.c_ms
        is_long = able & (2 * self._low > cost.max_tokens)
        long = [int(bucket) for bucket in np.nonzero(is_long)[0]]
        found = [(int(bucket), program.column()) for bucket in np.nonzero(able & ~is_long)[0]]
        # All replicas of the class together, in any mode.
        total = {column: float(works_ms[bucket]) for bucket, column in found}
        modes: dict[int, float] = {}
        most = 0
        if long:
            most = len(self.lengths)
            shortest_ms = float(times_ms[long].min())
            if shortest_ms > _LEAST_WORK_MS:
                # So many of the shortest fill the time; one long sequence fits at least.
                num_full = int(time_ms / shortest_ms * (1.0 + _ROUNDING))
                most = min(most, max(num_full - cost.num_stages + 1, 1))
        for num in range(1, most + 1):
            if num > _MAX_LONG:
                # Without positions.
                loose = [(bucket, program.column()) for bucket in long]
                found += loose
                total |= {column: float(times_ms[bucket]) for bucket, column in loose}
                break
            mode = program.column(upper=replica_class.num_replicas)
            modes[mode] = 1.0
            positions = []
            for _ in range(num):
                columns = [(bucket, program.column()) for bucket in long]
                found += columns
                position = program.column()
                positions.append(position)
                program.row({**{column: 1.0 for _, column in columns}, mode: -1.0}, 0.0, 0.0)
                of_long = {column: float(times_ms[bucket]) for bucket, column in columns}
                program.row({**of_long, position: -1.0}, 0.0, 0.0)
            total |= dict.fromkeys(positions, 1.0)
            _add_passes(program, positions, mode, cost.pipeline, time_ms)
        program.row(modes, 0.0, replica_class.num_replicas)
        program.row(total, 0.0, replica_class.num_replicas * time_ms)
        return found

    def _works_ms(self, replica_class: ReplicaClass) -> FloatArray:
        works_ms: FloatArray = replica_class.cost.coefficients.sequence_time_ms(self._low)
        return works_ms


def _decisive(cost: SchemeCost, lengths: Sequence[int]) -> SchemeCost:
    """The view with the most work for sequences that each have a micro-batch."""

    def total_ms(view: SchemeCost) -> float:
        work_ms = sum(map(view.sequence_time_ms, lengths))
        return view.num_stages * (work_ms + len(lengths) * view.coefficients.c_ms)

    return max(cost.views, key=total_ms)


def _add_passes(
    program: ProgramBuilder, positions: Sequence[int], mode: int, pipeline: Pipeline, time_ms: float
) -> None:
    """The inequalities of one mode: the longest path forward to each position, and back from it."""
    num_stages, forward = pipeline
    backward = 1.0 - forward
    paths_forward = [program.column() for _ in positions]
    paths_back = [program.column() for _ in positions]
    for place, position in enumerate(positions):
        before, after = positions[:place], positions[place + 1 :]
        entries = {paths_forward[place]: 1.0, position: -(num_stages - 1) * forward}
        program.row(entries | dict.fromkeys(before, backward), 0.0, np.inf)
        if place:
            program.row({paths_forward[place]: 1.0, paths_forward[place - 1]: -1.0}, 0.0, np.inf)
        entries = {paths_back[place]: 1.0, position: -(num_stages - 1) * backward}
        program.row(entries | dict.fromkeys(after, forward), 0.0, np.inf)
        if after:
            program.row({paths_back[place]: 1.0, paths_back[place + 1]: -1.0}, 0.0, np.inf)
        entries = dict.fromkeys(positions, -1.0) | {mode: time_ms}
        entries |= {paths_forward[place]: -1.0, paths_back[place]: -1.0}
        program.row(entries, 0.0, np.inf)


@dataclass(frozen=True, slots=True)
class LongDispatch:
    """Micro-batches of the long sequences on every replica, in their order."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    makespan_ms: float


class _Times:
    """Times of shares on replicas of one cost; a share has rising indices: falling lengths."""

    def __init__(self, lengths: Sequence[int], cost: SchemeCost) -> None:
        self._lengths = lengths
        self._cost = cost
        self._alone_ms = [
            max(form.sequence_time_ms(length) + form.c_ms for form in cost.coefficients.forms)
            for length in lengths
        ]
        self._bounds_ms: dict[tuple[int, ...], float] = {}
        self._times_ms: dict[tuple[int, ...], float] = {}

    def bound_ms(self, share: tuple[int, ...]) -> float:
        """A lower bound on time_ms."""
        if share not in self._bounds_ms:
            self._bounds_ms[share] = self._computed_bound_ms(share)
        return self._bounds_ms[share]

    def time_ms(self, share: tuple[int, ...]) -> float:
        """Infinite if it does not fit."""
        bound_ms = self.bound_ms(share)
        if self._cost.num_stages == 1 or not share or bound_ms == np.inf:
            return bound_ms
        if share not in self._times_ms:
            self._times_ms[share] = self._best_order(share)[1]
        return self._times_ms[share]

    def micro_batches(self, share: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The packing with time_ms."""
        if not share:
            return ()
        if self._cost.num_stages == 1:
            return tuple(map(tuple, best_fit(share, self._lengths, self._cost.max_tokens)))
        return tuple((i,) for i in self._best_order(share)[0])

    def _computed_bound_ms(self, share: tuple[int, ...]) -> float:
        cost = self._cost
        if not share:
            return 0.0
        if self._lengths[share[0]] > cost.max_tokens:
            return np.inf
        if cost.num_stages == 1:
            packed = best_fit(share, self._lengths, cost.max_tokens)
            return cost.replica_time_ms(
                [cost.time_ms([self._lengths[i] for i in members]) for members in packed]
            )
        if len(share) > _MAX_IN_PIPELINE:
            return np.inf
        bound_ms = float(_bounds_of_orders_ms(self._rising_ms(share), cost.pipeline).min())
        return max(bound_ms, len(share) * cost.coefficients.host_ms)

    def _best_order(self, share: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
        """The fastest of the orders with the least bounds, and its time."""
        pipeline = self._cost.pipeline
        rising = np.array(share[::-1])
        rising_ms = self._rising_ms(share)
        bounds_ms = _bounds_of_orders_ms(rising_ms, pipeline)
        some = np.argsort(bounds_ms, kind="stable")[:_NUM_TIMED]
        # Before the longest in rising order, after it in falling order.
        is_before = np.column_stack((_sides(len(share) - 1)[some], np.ones(len(some))))
        rank = np.arange(len(share))
        places = np.argsort(np.where(is_before > 0.0, rank, 2 * len(share) - rank), axis=1)
        times_ms = pipeline_times_ms(rising_ms[places], pipeline)
        best = int(np.argmin(times_ms))
        time_ms = max(float(times_ms[best]), len(share) * self._cost.coefficients.host_ms)
        return tuple(int(i) for i in rising[places[best]]), time_ms

    def _rising_ms(self, share: tuple[int, ...]) -> FloatArray:
        return np.array([self._alone_ms[i] for i in reversed(share)])


def anneal_long(
    lengths: Sequence[int], costs: Sequence[SchemeCost], shares: Sequence[Sequence[int]]
) -> LongDispatch | None:
    """A better dispatch of long sequences to at least two replicas; None if the start is too large.

    lengths: falling; costs: shape (num_replicas,), of the replicas that hold them; shares: the
    dispatch to start from, as indices into lengths.
    """
    times_of = {cost: _Times(lengths, cost) for cost in set(costs)}
    times = [times_of[cost] for cost in costs]
    held = [tuple(sorted(share)) for share in shares]
    held_ms = [each.time_ms(share) for each, share in zip(times, held, strict=True)]
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
        new_ms[giver] = times[giver].bound_ms(new_giver)
        new_ms[taker] = times[taker].bound_ms(new_taker)
        if _objective_ms(new_ms) >= limit_ms:
            continue
        new_ms[giver] = times[giver].time_ms(new_giver)
        new_ms[taker] = times[taker].time_ms(new_taker)
        then_ms = _objective_ms(new_ms)
        if then_ms < limit_ms:
            held[giver], held[taker] = new_giver, new_taker
            held_ms, now_ms = new_ms, then_ms
            if max(held_ms) < best_ms:
                best, best_ms = tuple(held), max(held_ms)
    return LongDispatch(
        tuple(each.micro_batches(share) for each, share in zip(times, best, strict=True)),
        best_ms,
    )


def _objective_ms(times_ms: Sequence[float]) -> float:
    return max(times_ms) + _SUM_WEIGHT * sum(times_ms)


@functools.lru_cache(maxsize=_MAX_IN_PIPELINE)
def _sides(num: int) -> FloatArray:
    """Rows of 0 and 1, one per order of num micro-batches around the longest: 1 is before it."""
    return ((np.arange(1 << num)[:, None] >> np.arange(num)[None, :]) & 1).astype(np.float64)


def _bounds_of_orders_ms(rising_ms: FloatArray, pipeline: Pipeline) -> FloatArray:
    """``X + F + B`` of bounds.py for each of the orders of _sides."""
    num_stages, forward = pipeline
    fill, drain = (num_stages - 1) * forward, (num_stages - 1) * (1.0 - forward)
    others_ms, longest_ms = rising_ms[:-1], float(rising_ms[-1])
    is_before = _sides(len(others_ms))
    before_ms = is_before * others_ms
    after_ms = others_ms - before_ms
    # What runs before, or after, each one if it is on that side.
    sum_before_ms, sum_after_ms = np.cumsum(before_ms, axis=1), np.cumsum(after_ms, axis=1)
    forward_ms = fill * others_ms - (1.0 - forward) * (sum_before_ms - before_ms)
    back_ms = drain * others_ms - forward * (sum_after_ms - after_ms)
    forward_ms = (is_before * forward_ms).max(axis=1, initial=0.0)
    back_ms = ((1.0 - is_before) * back_ms).max(axis=1, initial=0.0)
    all_before_ms, all_after_ms = before_ms.sum(axis=1), after_ms.sum(axis=1)
    forward_ms = np.maximum(forward_ms, fill * longest_ms - (1.0 - forward) * all_before_ms)
    back_ms = np.maximum(back_ms, drain * longest_ms - forward * all_after_ms)
    times_ms: FloatArray = rising_ms.sum() + forward_ms + back_ms
    return times_ms
