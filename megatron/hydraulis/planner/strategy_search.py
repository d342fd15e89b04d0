"""Bound and best plan of one strategy for one batch, each made better on demand."""

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence

from megatron.hydraulis.planner.bounds import dispatch_bound_ms
from megatron.hydraulis.planner.candidate import Candidate, StageResult
from megatron.hydraulis.planner.class_dispatch import (
    dispatch_by_program,
    dispatch_long,
    without_short,
)
from megatron.hydraulis.planner.dispatch import dispatch
from megatron.hydraulis.planner.improve import Assignment, improve
from megatron.hydraulis.planner.long_search import search_long
from megatron.hydraulis.planner.long_sequences import LongSequences, long_sequences
from megatron.hydraulis.planner.modes import ReplicaClass
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.packing_milp import largest_tokens, shortest_pipeline
from megatron.hydraulis.planner.polish import Effort
from megatron.hydraulis.planner.relaxation import Relaxation
from megatron.hydraulis.planner.replica_bounds import fewest_micro_batches, replica_bound_ms
from megatron.hydraulis.planner.replica_packing import Packed, ReplicaPacker
from megatron.hydraulis.planner.solver import Solver
from megatron.hydraulis.planner.wave_packer import WavePacker
from megatron.hydraulis.strategy import Strategy

__all__ = ["TARGET_GAP", "StrategySearch"]

TARGET_GAP = 1e-3
"""A plan this close to its bound is not improved any further."""

# Buckets of the programs: fewer round more, more take longer.
_NUM_BUCKETS = 32
# Of one strategy's search, in the unit of Effort: about 0.5 s on one core.
_EFFORT = 4.5e7
# Added at the end, to pack the slowest replicas of the best plan.
_FINISHING_EFFORT = 4e6
# Moves and swaps from one dispatch; the search rarely gets that far.
_NUM_STEPS = 200
# Starts from the program of a time between bound and best plan, as shares of that stretch.
_SINGLE_STAGE_TIMES = (0.05, 0.25, 0.5)
_PIPELINE_STEP = 0.4
_NUM_PIPELINE_TIMES = 4
# Longest sequences, as shares of the time, that may fill up pipelines: see Relaxation.program.
_LONGEST_FILLS = (0.06, 0.12)
# Of these, the ones with the best plans are improved by moves and swaps.
_NUM_IMPROVED = 3
# Times of the programs of long sequences, as shares of the stretch between bound and best plan.
_LONG_TIMES = (0.05,)
# Gaps below which the dearer searches are not worth their time.
_PIPELINE_GAP = 2e-3
_LONG_GAP = 3e-3
# To improve a dispatch of the long sequences.
_LONG_EFFORT = 6e6
# Sequences times micro-batches up to which packing as an integer program takes a moment only, for
# one stage and for a pipeline, whose schedule makes the program larger.
_MAX_PACKING_SIZE = 64
_MAX_PIPELINE_SIZE = 24
_ROUNDING = 1e-9


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
        """costs: shape (num_replicas,); batch: shape (num_sequences,), some replica holds each."""
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
        self._relaxation: Relaxation | None = None
        self._dispatch_s = 0.0
        self._packing_s = 0.0
        self.bound_ms = dispatch_bound_ms(batch, costs)
        """No plan of this strategy has a smaller makespan."""
        self.best: Assignment | None = None

    @property
    def found_ms(self) -> float:
        """Makespan of the best plan, infinite before start."""
        return math.inf if self.best is None else self.best.makespan_ms

    @property
    def gap(self) -> float:
        """(found - bound) / found."""
        return 1.0 - self.bound_ms / self.found_ms if self.found_ms > 0.0 else 0.0

    def start(self) -> None:
        """The first plan: longest processing time first."""
        begin_s = time.perf_counter()
        order = sorted(range(len(self._batch)), key=lambda i: (-self._batch[i], i))
        costs = [packer.cost for packer in self._packers]
        shares = dispatch(order, self._batch, costs)
        middle_s = time.perf_counter()
        self._take(Assignment(self._packers, shares, self._effort))
        self._dispatch_s += middle_s - begin_s
        self._packing_s += time.perf_counter() - middle_s

    def excludes(self, time_ms: float) -> bool:
        """Whether no plan takes time_ms or less; the bound then rises to it."""
        if time_ms < self.bound_ms:
            return True
        begin_s = time.perf_counter()
        is_excluded = self._program().is_impossible(time_ms)
        self._dispatch_s += time.perf_counter() - begin_s
        if is_excluded:
            self.bound_ms = max(self.bound_ms, time_ms)
        return is_excluded

    def raise_bound(self, *, gap: float = TARGET_GAP) -> None:
        """Halve the stretch between bound and best plan until it is a small share of the time."""
        if self._waves_alone is not None:
            self._raise_bound_by_waves(self._waves_alone, with_integers=False)
            return
        if self.excludes(self.found_ms * (1.0 - gap)):
            return
        high_ms = self.found_ms * (1.0 - gap)
        while high_ms - self.bound_ms > gap * high_ms and not self._solver.deadline.is_over:
            middle_ms = (self.bound_ms + high_ms) / 2.0
            if not self.excludes(middle_ms):
                high_ms = middle_ms

    def search(self) -> None:
        """Improve the best plan and the bound until they meet or nothing more is known to help."""
        begin_s = time.perf_counter()
        assert self.best is not None  # start comes first
        if self._waves_alone is not None:
            # Nothing is to be dispatched.
            self._improve(self.best)
            self._raise_bound_by_waves(self._waves_alone, with_integers=True)
            self._dispatch_s += time.perf_counter() - begin_s
            return
        if self._has_pipelines:
            self.raise_bound()
            starts = [self.best, *self._pipeline_starts()]
            starts.sort(key=lambda start: start.makespan_ms)
            for start in starts[:_NUM_IMPROVED]:
                self._take(start)
                self._improve(start)
            self._search_long_sequences()
        else:
            self._improve(self.best)
            self.raise_bound()
            for start in self._single_stage_starts():
                self._improve(start)
        self._finish()
        self._dispatch_s += time.perf_counter() - begin_s

    def candidate(self) -> Candidate:
        """The best plan with its reports."""
        assert self.best is not None  # start comes first
        begin_s = time.perf_counter()
        packing_bound_ms = self._packing_bound_ms()
        packings = [
            packer.to_packing(packed)
            for packer, packed in zip(self._packers, self.best.packed, strict=True)
        ]
        self._packing_s += time.perf_counter() - begin_s
        makespan_ms = self.found_ms
        packing_bound_ms = min(packing_bound_ms, makespan_ms)
        return Candidate(
            strategy=self.strategy,
            packings=packings,
            overhead_ms=self.overhead_ms,
            dispatch=StageResult(
                bound_ms=min(self.bound_ms, makespan_ms),
                seconds=self._dispatch_s,
                status=self._status(self.bound_ms),
            ),
            packing=StageResult(
                bound_ms=packing_bound_ms,
                seconds=self._packing_s,
                status=self._status(packing_bound_ms),
            ),
        )

    def _packing_bound_ms(self) -> float:
        """No packing of the best plan's dispatch has a smaller makespan."""
        assert self.best is not None  # start comes first
        bounds_ms = [
            replica_bound_ms([self._batch[sequence] for sequence in share], packer.cost)
            for share, packer in zip(self.best.shares, self._packers, strict=True)
        ]
        times_ms = self.best.times_ms
        slowest = times_ms.index(max(times_ms))
        packer = self._packers[slowest]
        if len(self._packers) == 1:
            bounds_ms.append(self.bound_ms)
        elif isinstance(packer, WavePacker) and max(bounds_ms) < (1.0 - TARGET_GAP) * self.found_ms:
            bounds_ms.append(
                packer.bound_ms(self.best.shares[slowest], self.found_ms, with_integers=True)
            )
        return max(bounds_ms)

    def _raise_bound_by_waves(self, packer: WavePacker, *, with_integers: bool) -> None:
        """Where one replica has the whole batch, the bound of its waves is the strategy's."""
        if self.gap > TARGET_GAP:
            everything = range(len(self._batch))
            bound_ms = packer.bound_ms(everything, self.found_ms, with_integers=with_integers)
            # The other one knows how a pipeline fills.
            self.bound_ms = max(
                self.bound_ms, bound_ms, replica_bound_ms(self._rising, packer.cost)
            )

    def _program(self) -> Relaxation:
        if self._relaxation is None:
            self._relaxation = Relaxation(
                self._classes, self._rising, num_buckets=_NUM_BUCKETS, solver=self._solver
            )
        return self._relaxation

    def _is_done(self, gap: float = TARGET_GAP) -> bool:
        return self.gap <= gap or self._effort.is_spent or self._solver.deadline.is_over

    def _take(self, assignment: Assignment) -> None:
        if assignment.makespan_ms < self.found_ms:
            self.best = assignment

    def _improve(self, assignment: Assignment) -> None:
        improve(
            assignment,
            self.bound_ms / (1.0 - TARGET_GAP),
            _NUM_STEPS,
            is_over=lambda: self._solver.deadline.is_over,
        )
        self._take(assignment)

    def _single_stage_starts(self) -> Iterator[Assignment]:
        """Plans from the program of times between the bound and the best plan."""
        for share in _SINGLE_STAGE_TIMES:
            if self._is_done():
                return
            time_ms = self.bound_ms + share * (self.found_ms - self.bound_ms)
            shares = dispatch_by_program(self._program(), time_ms, self._batch, self._packers)
            if shares is not None:
                yield Assignment(self._packers, shares, self._effort)

    def _pipeline_starts(self) -> Iterator[Assignment]:
        """Plans from the program of times between the bound and the best plan.

        The program takes a pipeline's capacity for larger than it is. So the time is searched at
        which pipelines, given no more than the program must give them, take as long as the other
        replicas.
        """
        for longest_fill in _LONGEST_FILLS:
            low_ms, high_ms = self.bound_ms, self.found_ms
            for _ in range(_NUM_PIPELINE_TIMES):
                if self._is_done(_PIPELINE_GAP):
                    return
                time_ms = low_ms + _PIPELINE_STEP * (high_ms - low_ms)
                shares = dispatch_by_program(
                    self._program(), time_ms, self._batch, self._packers, longest_fill=longest_fill
                )
                if shares is None:
                    return
                assignment = Assignment(self._packers, shares, self._effort)
                assignment.polish_slowest()
                times_ms = assignment.times_ms
                slowest = self._packers[times_ms.index(max(times_ms))]
                if slowest.cost.num_stages > 1:
                    low_ms = time_ms
                else:
                    high_ms = time_ms
                yield assignment

    def _search_long_sequences(self) -> None:
        """Raise the bound by the long sequences alone, and dispatch these anew."""
        if self.gap <= _LONG_GAP:
            return
        for program in long_sequences(self._classes, self._rising, self._solver):
            self._raise_bound_by(program)
            for share in _LONG_TIMES:
                if self.gap <= _LONG_GAP or self._solver.deadline.is_over:
                    return
                assert self.best is not None  # start comes first
                time_ms = self.bound_ms + share * (self.found_ms - self.bound_ms)
                shares = dispatch_long(
                    program, time_ms, self._batch, self._packers, self.best.shares
                )
                if shares is not None:
                    self._improve(Assignment(self._packers, shares, Effort(_LONG_EFFORT)))
                    self._anneal_long_sequences(program, shares)

    def _anneal_long_sequences(self, program: LongSequences, shares: list[list[int]]) -> None:
        """Search on from a dispatch of the long sequences; the others leave their replicas."""
        replicas = [r for replica_class in program.classes for r in replica_class.replicas]
        shortest = program.lengths[0]
        long = sorted(
            (s for r in replicas for s in shares[r] if self._batch[s] >= shortest),
            key=lambda s: (-self._batch[s], s),
        )
        if len(replicas) < 2:
            return
        place = {sequence: i for i, sequence in enumerate(long)}
        found = search_long(
            [self._batch[s] for s in long],
            [self._packers[r].cost for r in replicas],
            [[place[s] for s in shares[r] if s in place] for r in replicas],
        )
        if found is None or found.makespan_ms >= self.found_ms:
            return
        moved = without_short(shares, replicas, shortest, self._batch, self._packers)
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

    def _raise_bound_by(self, program: LongSequences) -> None:
        high_ms = self.found_ms
        while high_ms - self.bound_ms > _LONG_GAP * high_ms and not self._solver.deadline.is_over:
            middle_ms = (self.bound_ms + high_ms) / 2.0
            if program.is_impossible(middle_ms):
                self.bound_ms = middle_ms
            else:
                high_ms = middle_ms

    def _finish(self) -> None:
        """Pack the slowest replicas thoroughly, also when the search has spent its effort."""
        assert self.best is not None  # start comes first
        self._effort.spend(-_FINISHING_EFFORT)
        self._improve(self.best)
        self._solve_packing()

    def _solve_packing(self) -> None:
        """Pack the slowest replica by an integer program as long as that makes it faster."""
        assert self.best is not None  # start comes first
        for _ in range(len(self._packers)):
            if self._is_done():
                return
            times_ms = self.best.times_ms
            slowest = times_ms.index(max(times_ms))
            better = self._packed_by_program(slowest)
            if better is None or better.time_ms >= times_ms[slowest]:
                return
            self.best.replace_packing(slowest, better)
            self._improve(self.best)

    def _packed_by_program(self, replica: int) -> Packed | None:
        assert self.best is not None  # start comes first
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

    def _status(self, bound_ms: float) -> str:
        if self._solver.deadline.is_over:
            return "time limit"
        if self._solver.trouble is not None:
            return f"solver {self._solver.trouble.value}"
        is_certified = self.found_ms <= bound_ms / (1.0 - TARGET_GAP) * (1.0 + _ROUNDING)
        return "certified" if is_certified else "search ended"


def _dealt_by_tokens(lengths: Sequence[int], num: int) -> list[list[int]]:
    """Places in lengths, longest first to the micro-batch with the fewest tokens."""
    loads = [(0, k) for k in range(num)]
    dealt: list[list[int]] = [[] for _ in range(num)]
    for i, length in enumerate(lengths):
        tokens, k = loads[0]
        heapq.heapreplace(loads, (tokens + length, k))
        dealt[k].append(i)
    return dealt
