"""Bound and best plan of one strategy for one batch, each improved on demand."""

import functools
import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.bounds import (
    dispatch_bound_ms,
    fewest_micro_batches,
    replica_bound_ms,
)
from megatron.hydraulis.planner.costs import ReplicaClass, SchemeCost
from megatron.hydraulis.planner.greedy import dispatch, longest_first
from megatron.hydraulis.planner.improve import (
    Assignment,
    dispatch_by_program,
    dispatch_long,
    improve_dispatch,
    without_short,
)
from megatron.hydraulis.planner.long_sequences import LongSequences, anneal_long, long_sequences
from megatron.hydraulis.planner.pipeline_bounds import PipelineColumns
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.plan import MS_PER_S, Candidate, Packing, StageReport
from megatron.hydraulis.planner.relaxation import Relaxation
from megatron.hydraulis.planner.solver import ProgramBuilder, Solution, Solver, SolverLimits
from megatron.hydraulis.planner.wave_packing import WavePacker
from megatron.hydraulis.strategy import Strategy

TARGET_GAP = 1e-3
"""A plan this close to its bound is not improved any further."""
_ROUNDING = 1e-9

# Work that one strategy's search may take, in the unit of Effort: about 0.5 s on one core.
_EFFORT = 4.5e7
# Added at the end, to pack the slowest replicas of the best plan.
_FINISHING_EFFORT = 4e6
# To improve a dispatch of the long sequences.
_LONG_EFFORT = 6e6
# Number of moves and swaps from one dispatch, which is rarely reached.
_NUM_STEPS = 200
# The programs are asked for dispatches at times between bound and best plan, given as shares of
# that interval: for single stages, pipelines (bisection with this step) and long sequences.
_SINGLE_STAGE_TIMES = (0.05, 0.25, 0.5)
_PIPELINE_STEP = 0.4
_NUM_PIPELINE_TIMES = 4
_LONG_TIME = 0.05
# See Relaxation.owed.
_LONGEST_FILLS = (0.06, 0.12)
# Number of dispatches, the best ones, that are improved by moves and swaps.
_NUM_IMPROVED = 3
# The slower searches are skipped below these gaps.
_PIPELINE_GAP = 2e-3
_LONG_GAP = 3e-3
# Sequences times micro-batches up to which the integer program of packing is quick, for one stage
# and for a pipeline, whose schedule makes the program larger.
_MAX_PACKING_SIZE = 64
_MAX_PIPELINE_SIZE = 24
_PACKING_LIMITS = SolverLimits(num_nodes=200, relative_gap=1e-4)


class StrategySearch:
    """One strategy and one batch. Times are makespans, without the strategy's overhead."""

    def __init__(
        self,
        strategy: Strategy,
        costs: Sequence[SchemeCost],
        batch: Sequence[int],
        packer_of: Callable[[SchemeCost], ReplicaPacker],
        solver: Solver,
        *,
        overhead_ms: float,
    ) -> None:
        """costs: shape (num_replicas,); batch: lengths, shape (num_sequences,), that fit."""
        self.strategy = strategy
        self.overhead_ms = overhead_ms
        self._batch = batch
        self._rising = sorted(batch)
        self._packers = [packer_of(cost) for cost in costs]
        self._classes = ReplicaClass.of(costs)
        self._has_pipelines = any(cost.num_stages > 1 for cost in costs)
        first = self._packers[0]
        # The only replica, if it splits its width.
        self._waves_alone = (
            first if len(self._packers) == 1 and isinstance(first, WavePacker) else None
        )
        self._solver = solver
        self._effort = Effort(_EFFORT)
        self._dispatch_s = 0.0
        self._packing_s = 0.0
        self.bound_ms = dispatch_bound_ms(batch, costs)
        """No plan of this strategy has a smaller makespan."""
        self._best: Assignment | None = None

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

    def start(self) -> None:
        """The first plan: longest processing time first."""
        begin_s = time.perf_counter()
        costs = [packer.cost for packer in self._packers]
        shares = dispatch(longest_first(self._batch), self._batch, costs)
        middle_s = time.perf_counter()
        self._take(Assignment(self._packers, shares, self._effort))
        self._dispatch_s += middle_s - begin_s
        self._packing_s += time.perf_counter() - middle_s

    def excludes(self, time_ms: float) -> bool:
        """Whether every plan is proved to take longer; the bound is then raised to time_ms."""
        with self._dispatch_timed():
            return self._excludes(time_ms)

    def raise_bound(self) -> None:
        """Raise the bound until nothing is left to prove, down to `TARGET_GAP`."""
        with self._dispatch_timed():
            self._raise_bound()

    def search(self) -> None:
        """Improve the best plan and the bound until they meet or there is nothing left to try."""
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
            self._raise_bound_by_waves(self._waves_alone, with_integers=False)
            return
        most_ms = self.found_ms * (1.0 - TARGET_GAP)
        if not self._excludes(most_ms):
            self._bisect(most_ms, TARGET_GAP, self._excludes)

    def _search(self) -> None:
        if self._waves_alone is not None:
            # There is nothing to dispatch.
            self._improve(self.best)
            self._raise_bound_by_waves(self._waves_alone, with_integers=True)
            return
        if self._has_pipelines:
            self._raise_bound()
            starts = [self.best, *self._pipeline_starts()]
            starts.sort(key=lambda start: start.makespan_ms)
            for start in starts[:_NUM_IMPROVED]:
                self._take(start)
                self._improve(start)
            self._search_long_sequences()
        else:
            self._improve(self.best)
            self._raise_bound()
            for start in self._single_stage_starts():
                self._improve(start)
        self._finish()

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
        """No packing of the best plan's dispatch has a smaller makespan."""
        bounds_ms = [
            replica_bound_ms([self._batch[sequence] for sequence in share], packer.cost)
            for share, packer in zip(self.best.shares, self._packers, strict=True)
        ]
        slowest = self.best.slowest
        packer = self._packers[slowest]
        if len(self._packers) == 1:
            bounds_ms.append(self.bound_ms)
        elif isinstance(packer, WavePacker) and max(bounds_ms) < (1.0 - TARGET_GAP) * self.found_ms:
            bounds_ms.append(
                packer.bound_ms(self.best.shares[slowest], self.found_ms, with_integers=True)
            )
        return max(bounds_ms)

    def _raise_bound_by_waves(self, packer: WavePacker, *, with_integers: bool) -> None:
        """With a single replica, the bound of its waves is that of the strategy."""
        if self.gap > TARGET_GAP:
            everything = range(len(self._batch))
            bound_ms = packer.bound_ms(everything, self.found_ms, with_integers=with_integers)
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

    def _is_done(self, gap: float = TARGET_GAP) -> bool:
        return self.gap <= gap or self._effort.is_spent or self._solver.deadline.is_over

    def _take(self, assignment: Assignment) -> None:
        if assignment.makespan_ms < self.found_ms:
            self._best = assignment

    def _improve(self, assignment: Assignment) -> None:
        improve_dispatch(
            assignment,
            self.bound_ms / (1.0 - TARGET_GAP),
            _NUM_STEPS,
            is_over=lambda: self._solver.deadline.is_over,
        )
        self._take(assignment)

    def _single_stage_starts(self) -> Iterator[Assignment]:
        for share in _SINGLE_STAGE_TIMES:
            if self._is_done():
                return
            time_ms = self.bound_ms + share * (self.found_ms - self.bound_ms)
            shares = dispatch_by_program(self._relaxation, time_ms, self._packers)
            if shares is not None:
                yield Assignment(self._packers, shares, self._effort)

    def _pipeline_starts(self) -> Iterator[Assignment]:
        """Dispatches for times at which pipelines and other replicas take equally long.

        The program overestimates the capacity of pipelines, so bisection looks for the time at
        which pipelines, assigned no more than necessary, are as slow as the other replicas.
        """
        for longest_fill in _LONGEST_FILLS:
            low_ms, high_ms = self.bound_ms, self.found_ms
            for _ in range(_NUM_PIPELINE_TIMES):
                if self._is_done(_PIPELINE_GAP):
                    return
                time_ms = low_ms + _PIPELINE_STEP * (high_ms - low_ms)
                shares = dispatch_by_program(
                    self._relaxation, time_ms, self._packers, longest_fill=longest_fill
                )
                if shares is None:
                    return
                assignment = Assignment(self._packers, shares, self._effort)
                assignment.repack_slowest()
                if self._packers[assignment.slowest].cost.num_stages > 1:
                    low_ms = time_ms
                else:
                    high_ms = time_ms
                yield assignment

    def _search_long_sequences(self) -> None:
        """Raise the bound by the long sequences alone, and improve their dispatch."""
        if self.gap <= _LONG_GAP:
            return
        for program in long_sequences(self._classes, self._rising, self._solver):
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
            packed = self._packers[replica].packed(packing)
            if packed.time_ms < assignment.times_ms[replica]:
                assignment.replace_packing(replica, packed)
        self._improve(assignment)

    def _finish(self) -> None:
        """Pack the slowest replicas thoroughly, even if the search has spent its effort."""
        self._effort.spend(-_FINISHING_EFFORT)
        self._improve(self.best)
        self._solve_packing()

    def _solve_packing(self) -> None:
        """Pack the slowest replica by an integer program as long as that makes it faster."""
        for _ in range(len(self._packers)):
            if self._is_done():
                return
            slowest = self.best.slowest
            better = self._packed_by_program(slowest)
            if better is None or better.time_ms >= self.best.makespan_ms:
                return
            self.best.replace_packing(slowest, better)
            self._improve(self.best)

    def _packed_by_program(self, replica: int) -> Packing | None:
        packer, share = self._packers[replica], self.best.shares[replica]
        packed = self.best.packed[replica]
        lengths = [self._batch[sequence] for sequence in share]
        num = len(packed.micro_batches)
        most = _MAX_PACKING_SIZE if packer.cost.num_stages == 1 else _MAX_PIPELINE_SIZE
        if len(share) * num > most or packer.cost.waves is not None or packer.cost.multiple > 1:
            return None
        if packed.time_ms <= replica_bound_ms(lengths, packer.cost) * (1.0 + TARGET_GAP):
            return None
        if packer.cost.num_stages > 1:
            place = {sequence: i for i, sequence in enumerate(share)}
            start = [[place[s] for s in micro_batch] for micro_batch in packed.micro_batches]
            answer = shortest_pipeline(lengths, packer.cost, start, self._solver)
        elif num > fewest_micro_batches(lengths, packer.cost.max_tokens):
            start = _dealt_by_tokens(lengths, num - 1)
            answer = largest_tokens(lengths, num - 1, start, self._solver)
        else:
            return None
        if answer.micro_batches is None:
            return None
        micro_batches = [[share[i] for i in places] for places in answer.micro_batches]
        largest = max(sum(self._batch[s] for s in members) for members in micro_batches)
        return packer.packed(micro_batches) if largest <= packer.cost.max_tokens else None


def _dealt_by_tokens(lengths: Sequence[int], num: int) -> list[list[int]]:
    """Indices into lengths, longest first to the micro-batch with the fewest tokens."""
    loads = [(0, k) for k in range(num)]
    dealt: list[list[int]] = [[] for _ in range(num)]
    for i, length in enumerate(lengths):
        tokens, k = loads[0]
        heapq.heapreplace(loads, (tokens + length, k))
        dealt[k].append(i)
    return dealt


# ---------------------------------------------------------------- packing as an integer program


@dataclass(frozen=True, slots=True)
class PackingAnswer:
    """Best packing and bound for a number of micro-batches."""

    micro_batches: list[list[int]] | None
    """In their order, as indices into the given lengths; None without an answer."""
    bound: float
    """Lower limit for tokens of the largest micro-batch, or for the time in ms."""


def largest_tokens(
    lengths: Sequence[int], num_micro_batches: int, start: Sequence[Sequence[int]], solver: Solver
) -> PackingAnswer:
    """Pack a single stage so that the largest of num_micro_batches has the fewest tokens.

    That tells whether one micro-batch less is enough. lengths: of the share, by falling length;
    start: a packing into at most as many micro-batches, as indices into lengths.
    """
    n, v = len(lengths), num_micro_batches
    program = ProgramBuilder()
    # Micro-batches are interchangeable: the i-th longest sequence need not go beyond the i-th.
    for i in range(n):
        for k in range(v):
            program.column(upper=float(k <= i), is_integral=True)
    largest = program.column(cost=1.0)
    for i in range(n):
        program.row({i * v + k: 1.0 for k in range(v)}, 1.0, 1.0)
    for k in range(v):
        held = {i * v + k: float(length) for i, length in enumerate(lengths)}
        program.row({**held, largest: -1.0}, -math.inf, 0.0)
    by_longest = sorted(start, key=min)
    first = _places(by_longest, n, v)
    first = np.append(first, max(sum(lengths[i] for i in share) for share in start))
    return _answer(solver.solve(program.model(), _PACKING_LIMITS, start=first), n, v)


def shortest_pipeline(
    lengths: Sequence[int],
    cost: SchemeCost,
    start: Sequence[Sequence[int]],
    solver: Solver,
) -> PackingAnswer:
    """Pack a pipeline for the least time with as many micro-batches as the start has.

    The program contains starts and ends of 1F1B, so the order is part of the answer. lengths: of
    the share; start: its packing so far, in order, as indices into lengths.
    """
    n, v = len(lengths), len(start)
    columns = PipelineColumns(cost.num_stages, v)
    program = ProgramBuilder()
    columns.add_to(program, [(0.0, math.inf)] * v)
    place = [[program.column(upper=1.0, is_integral=True) for _ in range(v)] for _ in range(n)]
    c_ms = cost.coefficients.c_ms
    for k in range(v):
        works = {place[i][k]: -cost.sequence_time_ms(length) for i, length in enumerate(lengths)}
        program.row({k: 1.0, **works}, c_ms, c_ms)
        held = {place[i][k]: float(length) for i, length in enumerate(lengths)}
        program.row(held, -math.inf, float(cost.max_tokens))
    for of_sequence in place:
        program.row(dict.fromkeys(of_sequence, 1.0), 1.0, 1.0)
    times_ms = [cost.coefficients.time_ms(lengths[i] for i in share) for share in start]
    first = np.concatenate((columns.ends_ms(times_ms), _places(start, n, v)))
    solution = solver.solve(program.model(), _PACKING_LIMITS, start=first)
    return _answer(solution, n, v, offset=columns.num)


def _places(start: Sequence[Sequence[int]], n: int, v: int) -> NDArray[np.float64]:
    values = np.zeros((n, v))
    for k, share in enumerate(start):
        values[list(share), k] = 1.0
    return values.ravel()


def _answer(solution: Solution, n: int, v: int, *, offset: int = 0) -> PackingAnswer:
    if not solution.is_usable or solution.values is None:
        return PackingAnswer(None, solution.bound)
    places = np.rint(solution.values[offset : offset + n * v]).reshape(n, v)
    packed = [[int(i) for i in np.nonzero(places[:, k])[0]] for k in range(v)]
    return PackingAnswer([share for share in packed if share], solution.bound)
