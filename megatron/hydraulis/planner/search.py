"""Bound and best plan of one strategy for one batch, each improved on demand."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from megatron.hydraulis.planner.bounds import dispatch_bound_ms, replica_bound_ms
from megatron.hydraulis.planner.costs import ReplicaClass, SchemeCost
from megatron.hydraulis.planner.greedy import dispatch, longest_first, pack, slowness_of
from megatron.hydraulis.planner.improve import (
    Assignment,
    dispatch_by_program,
    dispatch_long,
    improve_dispatch,
    without_short,
)
from megatron.hydraulis.planner.long_sequences import LongSequences, anneal_long, long_sequences
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.plan import MS_PER_S, Candidate, Packing, StageReport
from megatron.hydraulis.planner.relaxation import Relaxation
from megatron.hydraulis.planner.solver import Solver
from megatron.hydraulis.planner.wave_packing import WavePacker, pack_waves
from megatron.hydraulis.strategy import Strategy

TARGET_GAP = 1e-3
"""A plan this close to its bound is not improved any further."""
_ROUNDING = 1e-9

# To improve a dispatch of the long sequences.
_LONG_EFFORT = 6e6
# Number of moves and swaps from one dispatch, which is rarely reached.
_NUM_STEPS = 200
# The program is asked for dispatches at a time between bound and best plan: share of that interval.
_START_TIME = 0.3
# Likewise the program of the long sequences, which is not asked below this gap.
_LONG_TIME = 0.05
_LONG_GAP = 3e-3
# See Relaxation.owed: no single one is good for all strategies.
_LONGEST_FILLS = (0.06, 0.12, 0.25)
# Number of dispatches that are improved by moves and swaps: the greedy one and the best others.
_NUM_IMPROVED = 3


class StrategySearch:
    """One strategy and one batch. Times are makespans, without the strategy's overhead."""

    def __init__(
        self,
        strategy: Strategy,
        costs: Sequence[SchemeCost],
        batch: Sequence[int],
        order: Sequence[int],
        packer_of: Callable[[SchemeCost], ReplicaPacker],
        solver: Solver,
        *,
        overhead_ms: float,
        target_gap: float = TARGET_GAP,
    ) -> None:
        """costs: shape (num_replicas,); batch: lengths, shape (num_sequences,), that fit; order:
        `longest_first` of them; target_gap: at which the search ends."""
        self.strategy = strategy
        self.overhead_ms = overhead_ms
        self._target_gap = target_gap
        self._batch = batch
        self._order = order
        self._packers = [packer_of(cost) for cost in costs]
        self._classes = ReplicaClass.of(costs)
        self._has_pipelines = any(cost.num_stages > 1 for cost in costs)
        first = self._packers[0]
        # The only replica, if it splits its width.
        self._waves_alone = (
            first if len(self._packers) == 1 and isinstance(first, WavePacker) else None
        )
        self._solver = solver
        self._effort = Effort(math.inf)
        self._dispatch_s = 0.0
        self._packing_s = 0.0
        self.bound_ms = dispatch_bound_ms(batch, costs)
        """Lower bound of the makespan of any plan of this strategy."""
        self._best: Assignment | None = None

    @functools.cached_property
    def _rising(self) -> list[int]:
        return [self._batch[sequence] for sequence in reversed(self._order)]

    @functools.cached_property
    def _relaxation(self) -> Relaxation:
        return Relaxation(self._classes, self._rising, solver=self._solver)

    @property
    def best(self) -> Assignment:
        """The best plan so far; `start` makes the first one."""
        assert self._best is not None
        return self._best

    @property
    def found_ms(self) -> float:
        """Makespan of the best plan, infinite before `start`."""
        return math.inf if self._best is None else self._best.makespan_ms

    @property
    def gap(self) -> float:
        """(found - bound) / found."""
        return 1.0 - self.bound_ms / self.found_ms if self.found_ms > 0.0 else 0.0

    @property
    def is_started(self) -> bool:
        """True if there is a plan."""
        return self._best is not None

    def start(self) -> None:
        """The first plan: longest processing time first."""
        begin_s = time.perf_counter()
        costs = [packer.cost for packer in self._packers]
        packings: list[Packing] = []
        if any(cost.waves for cost in costs):
            shares, packings, middle_s = greedy_plan(self._order, self._batch, costs)
        else:
            shares, middle_s = dispatch(self._order, self._batch, costs), time.perf_counter()
        first = Assignment(self._packers, shares, self._effort, is_quick=True)
        for replica, packed in enumerate(packings):
            first.take_packing(replica, packed)
        while not packings:
            # No slower than the greedy plan: each replica that is slowest takes its packing.
            slowest, before_ms = first.slowest, first.makespan_ms
            first.take_packing(slowest, pack(shares[slowest], self._batch, costs[slowest]))
            if first.times_ms[slowest] >= before_ms:
                break
        self._take(first)
        self._dispatch_s += middle_s - begin_s
        self._packing_s += time.perf_counter() - middle_s

    def excludes(self, time_ms: float) -> bool:
        """True if every plan is proved to take longer; the bound is then raised to time_ms."""
        with self._dispatch_timed():
            return self._excludes(time_ms)

    def raise_bound(self) -> None:
        """Raise the bound until nothing is left to prove, down to the target gap."""
        with self._dispatch_timed():
            self._raise_bound()

    def search(self, effort: Effort) -> None:
        """Improve the best plan and the bound until they meet or there is nothing left to try."""
        if self.gap <= self._target_gap:
            return
        self._effort = effort
        self.best.effort = effort
        with self._dispatch_timed():
            self._search()

    @contextmanager
    def _dispatch_timed(self) -> Iterator[None]:
        """Counts what is done within as time of the dispatch; not to be nested."""
        begin_s = time.perf_counter()
        yield
        self._dispatch_s += time.perf_counter() - begin_s

    def _excludes(self, time_ms: float) -> bool:
        if time_ms < self.bound_ms:
            return True
        is_excluded = self._relaxation.is_impossible(time_ms)
        if is_excluded:
            self.bound_ms = max(self.bound_ms, time_ms)
        return is_excluded

    def _raise_bound(self) -> None:
        if self._waves_alone is not None:
            self._raise_bound_by_waves(self._waves_alone, is_thorough=False)
            return
        most_ms = self.found_ms * (1.0 - self._target_gap)
        if not self._excludes(most_ms):
            self._bisect(most_ms, self._target_gap, self._excludes)

    def _search(self) -> None:
        if self._waves_alone is not None:
            # There is nothing to dispatch.
            self._improve(self.best)
            self._raise_bound_by_waves(self._waves_alone, is_thorough=True)
            return
        starts = []
        if self._has_pipelines:
            # The first plan's packings are quick ones.
            starts.append(Assignment(self._packers, self.best.shares, self._effort))
        else:
            self._improve(self.best)
        self._raise_bound()
        by_program = sorted(self._starts(), key=lambda start: start.makespan_ms)
        starts += by_program[: _NUM_IMPROVED - 1]
        for start in sorted(starts, key=lambda start: start.makespan_ms):
            self._take(start)
            self._improve(start)
        if self._has_pipelines:
            self._search_long_sequences()

    def candidate(self) -> Candidate:
        """The best plan with its reports."""
        begin_s = time.perf_counter()
        packing_bound_ms = self._packing_bound_ms()
        self._packing_s += time.perf_counter() - begin_s
        return Candidate(
            strategy=self.strategy,
            packings=self.best.packed,
            overhead_ms=self.overhead_ms,
            dispatch=self._report(self.bound_ms, self._dispatch_s),
            packing=self._report(packing_bound_ms, self._packing_s),
        )

    def _report(self, bound_ms: float, seconds: float) -> StageReport:
        if self._solver.deadline.is_over:
            status = "time limit"
        elif self._solver.trouble is not None:
            status = f"solver {self._solver.trouble.value}"
        else:
            is_certified = self.found_ms <= bound_ms / (1.0 - TARGET_GAP) * (1.0 + _ROUNDING)
            status = "certified" if is_certified else "search ended"
        objective_s, bound_s = self.found_ms / MS_PER_S, min(bound_ms, self.found_ms) / MS_PER_S
        return StageReport(objective_s=objective_s, bound_s=bound_s, seconds=seconds, status=status)

    def _packing_bound_ms(self) -> float:
        """Lower bound of the makespan of any packing of the best plan's dispatch."""
        bounds_ms = [0.0]
        times_ms, shares = self.best.times_ms, self.best.shares
        for replica in sorted(range(len(shares)), key=times_ms.__getitem__, reverse=True):
            if times_ms[replica] <= max(bounds_ms):
                break  # Its bound is no larger than its time.
            lengths = [self._batch[sequence] for sequence in shares[replica]]
            bounds_ms.append(replica_bound_ms(lengths, self._packers[replica].cost))
        slowest = self.best.slowest
        packer = self._packers[slowest]
        if len(self._packers) == 1:
            bounds_ms.append(self.bound_ms)
        elif isinstance(packer, WavePacker) and max(bounds_ms) < (1.0 - TARGET_GAP) * self.found_ms:
            bounds_ms.append(packer.bound_ms(shares[slowest], self.found_ms, is_thorough=True))
        return max(bounds_ms)

    def _raise_bound_by_waves(self, packer: WavePacker, *, is_thorough: bool) -> None:
        """Raise the bound to that of the waves of the single replica."""
        if self.gap > self._target_gap:
            everything = range(len(self._batch))
            bound_ms = packer.bound_ms(everything, self.found_ms, is_thorough=is_thorough)
            # The second one takes the fill of a pipeline into account.
            self.bound_ms = max(
                self.bound_ms, bound_ms, replica_bound_ms(self._rising, packer.cost)
            )

    def _bisect(self, high_ms: float, gap: float, is_impossible: Callable[[float], bool]) -> None:
        """Raise the bound by what is proved impossible between it and a time."""
        while high_ms - self.bound_ms > gap * high_ms and not self._solver.deadline.is_over:
            middle_ms = (self.bound_ms + high_ms) / 2.0
            if is_impossible(middle_ms):
                self.bound_ms = max(self.bound_ms, middle_ms)
            else:
                high_ms = middle_ms

    def _is_done(self) -> bool:
        return (
            self.gap <= self._target_gap or self._effort.is_spent or self._solver.deadline.is_over
        )

    def _take(self, assignment: Assignment) -> None:
        if assignment.makespan_ms < self.found_ms:
            self._best = assignment

    def _improve(self, assignment: Assignment) -> None:
        improve_dispatch(
            assignment,
            self.bound_ms / (1.0 - self._target_gap),
            _NUM_STEPS,
            is_over=lambda: self._solver.deadline.is_over,
        )
        self._take(assignment)

    def _starts(self) -> Iterator[Assignment]:
        """Dispatches of the program, which assigns pipelines no more than necessary."""
        fills = _LONGEST_FILLS if self._has_pipelines else _LONGEST_FILLS[:1]
        for longest_fill in fills:
            if self._is_done():
                return
            time_ms = self.bound_ms + _START_TIME * (self.found_ms - self.bound_ms)
            shares = dispatch_by_program(
                self._relaxation, time_ms, self._packers, longest_fill=longest_fill
            )
            if shares is None:
                return
            assignment = Assignment(self._packers, shares, self._effort)
            assignment.repack_slowest()
            yield assignment

    def _search_long_sequences(self) -> None:
        """Raise the bound by the long sequences alone, and improve their dispatch."""
        if self.gap <= max(_LONG_GAP, self._target_gap):
            return
        for program in long_sequences(self._classes, self._rising, self._solver):
            if not program.is_impossible(self.bound_ms * (1.0 + _LONG_GAP)):
                continue  # These sequences do not decide the time.
            self._bisect(self.found_ms, _LONG_GAP, program.is_impossible)
            if self.gap <= _LONG_GAP or self._solver.deadline.is_over:
                return
            time_ms = self.bound_ms + _LONG_TIME * (self.found_ms - self.bound_ms)
            shares = dispatch_long(program, time_ms, self._packers, self.best.shares)
            if shares is not None:
                self._improve(Assignment(self._packers, shares, Effort(_LONG_EFFORT)))
                self._anneal_long_sequences(program, shares)

    def _anneal_long_sequences(self, program: LongSequences, shares: list[list[int]]) -> None:
        """Anneal a dispatch of the long sequences; the others move to other replicas."""
        replicas = [r for replica_class in program.classes for r in replica_class.replicas]
        shortest = program.lengths[0]
        long = longest_first(
            self._batch, (s for r in replicas for s in shares[r] if self._batch[s] >= shortest)
        )
        if len(replicas) < 2:
            return
        place = {sequence: i for i, sequence in enumerate(long)}
        found = anneal_long(
            [self._batch[s] for s in long],
            [self._packers[r].cost for r in replicas],
            [[place[s] for s in shares[r] if s in place] for r in replicas],
        )
        if found is None or found.makespan_ms >= self.found_ms:
            return
        moved = without_short(shares, replicas, shortest, self._packers)
        packings = {}
        for replica, micro_batches in zip(replicas, found.micro_batches, strict=True):
            moved[replica] = [long[i] for members in micro_batches for i in members]
            packings[replica] = [[long[i] for i in members] for members in micro_batches]
        assignment = Assignment(self._packers, moved, Effort(_LONG_EFFORT))
        for replica, packing in packings.items():
            assignment.take_packing(replica, self._packers[replica].packed(packing))
        self._improve(assignment)


def greedy_plan(
    order: Sequence[int], batch: Sequence[int], costs: Sequence[SchemeCost]
) -> tuple[list[list[int]], list[Packing], float]:
    """Shares of replicas with these costs, and their packings, without a solver.

    order: `longest_first` of the batch; costs: shape (num_replicas,). The last value is the time
    at which the first dispatch was done, in seconds of `time.perf_counter`.
    """
    shares = dispatch(order, batch, costs)
    dispatched_s = time.perf_counter()
    # A wave's estimate is a bound: how far off shows in a quick packing.
    differ = any(cost != costs[0] for cost in costs)
    times_ms = {
        replica: pack_waves(share, batch, cost, is_thorough=False).time_ms
        for replica, (share, cost) in enumerate(zip(shares, costs, strict=True))
        if cost.waves and differ
    }
    first = shares
    if times_ms:
        slowness = slowness_of(costs, first, batch, times_ms)
        shares = dispatch(order, batch, costs, slowness=slowness)
    packings = _packings(shares, batch, costs)
    if times_ms and max(times_ms.values()) < _makespan_ms(packings):
        uncorrected = _packings(first, batch, costs)
        if _makespan_ms(uncorrected) < _makespan_ms(packings):
            return first, uncorrected, dispatched_s
    return shares, packings, dispatched_s


def _packings(
    shares: Sequence[Sequence[int]], batch: Sequence[int], costs: Sequence[SchemeCost]
) -> list[Packing]:
    packings = [Packing((), 0.0)] * len(costs)
    # Waves last: they need not be faster than the slowest of the others.
    for replica in sorted(range(len(costs)), key=lambda index: costs[index].waves is not None):
        share, cost = shares[replica], costs[replica]
        if cost.waves is None:
            packings[replica] = pack(share, batch, cost)
        else:
            target_ms = _makespan_ms(packings)
            packings[replica] = pack_waves(share, batch, cost, target_ms=target_ms)
    return packings


def _makespan_ms(packings: Sequence[Packing]) -> float:
    return max(packing.time_ms for packing in packings)
