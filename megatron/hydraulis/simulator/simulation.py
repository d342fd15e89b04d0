"""Iterations simulated as events, one after the other.

An iteration begins when the previous one has ended and its plan is ready. Its replicas run 1F1B.
What follows depends on what is known:

- The cost model has its own time for what follows the makespan of the strategy (``regroup_ms`` and
  ``optimizer_ms`` of a cost profile): it starts after the slowest replica.
- Bytes and links are known (`RegroupCosts`): every call of the strategy is a gather and a scatter
  of its buckets. All collectives share one queue of all ranks. A call is scattered when every rank
  has issued that, in the reverse order of gathers. When all gradients have arrived (clipping needs
  their norm), buckets are updated in the order of the next iteration's calls, and each of these is
  gathered as soon as it is updated and the next plan is ready. What overlaps is given by `Hiding`.
  ONE_QUEUE: the first forward begins when all parameters have arrived; a first stage issues the
  scatter of a call when its last backward has completed the buckets, and other stages after their
  last backward. MANY_QUEUES: the same, but the first forward enters a layer when the
  layer's parameters have arrived. THREADS: so it does, and every stage issues scatters during its
  last backward. NOTHING: regrouping and compute alternate.
- Neither: regrouping and update take no time.

The planner makes one plan after the other. Each is requested when the iteration `plan_ahead` before
it begins. Time 0 is when the first plan is ready.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from megatron.hydraulis.cost_model.pipeline import StageCosts, last_backward_end_ms, stage_parts
from megatron.hydraulis.cost_model.regrouping import (
    CallTimes,
    Hiding,
    RegroupCosts,
    RegroupTimes,
)
from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.simulator.work import IterationWork, MicroBatchWork
from megatron.hydraulis.strategy import Replica, Strategy
from megatron.hydraulis.transfer.canonical import Unit

_MS_PER_S = 1e3
_ITERATION, _REGROUP, _UPDATE, _PLANNER = "iteration", "regroup", "update", "planner"
"""Lanes that all ranks have in common."""


@dataclass(frozen=True, slots=True, eq=False)
class CallTasks:
    """Tasks of one call in one iteration."""

    buckets: tuple[int, ...]
    gather: Task
    scatter: Task


@dataclass(frozen=True, slots=True, eq=False)
class IterationTasks:
    """The tasks of one iteration; times in ms since the first plan was ready."""

    number: int
    """Number of the iteration, counted from 1."""
    work: IterationWork
    begin: Task
    end: Task
    replicas: tuple[ReplicaTasks, ...]
    calls: tuple[CallTasks, ...]
    """Calls in the order of gathers; empty if regrouping is not simulated."""
    updates: tuple[Task, ...]
    """The update of the buckets of each call of the next iteration, or of this one if it is the
    last; empty if regrouping is not simulated."""
    overhead: Task | None
    """Time that the cost model adds to the makespan."""

    @property
    def begin_ms(self) -> float:
        """Time when the plan was ready and the previous iteration had ended."""
        return self.begin.end_ms

    @property
    def end_ms(self) -> float:
        """Time when the update ended."""
        return self.end.end_ms

    @property
    def replica_ends_ms(self) -> tuple[float, ...]:
        """Time when each replica finished its last backward; begin_ms for one without work."""
        return tuple(
            max((task.end_ms for task in replica.ends), default=self.begin_ms)
            for replica in self.replicas
        )


class Simulator:
    """Simulates iterations.

    Args:
        costs: of micro-batches on stages.
        regroup: times of regrouping; None if model or links are unknown.
        plan_ahead: number of iterations planned ahead; 0 plans between iterations.

    Raises ConfigurationError for regrouping without the model's shape in costs.
    """

    def __init__(
        self,
        costs: StageCosts,
        *,
        regroup: RegroupCosts | None = None,
        plan_ahead: int = 2,
    ) -> None:
        if regroup is not None and costs.shape is None:
            raise ConfigurationError(
                "simulation: buckets of regrouping follow the model's layers but the costs of "
                "stages have 0 of them; give StageCosts the model's shape"
            )
        self._costs = costs
        self._regroup = regroup
        self._plan_ahead = plan_ahead
        self._hiding = Hiding.NOTHING if regroup is None else regroup.hiding
        self._times: dict[tuple[Strategy, Strategy | None], RegroupTimes | None] = {}

    def regroup_times(
        self, strategy: Strategy, after: Strategy | None = None
    ) -> RegroupTimes | None:
        """Times of a strategy's calls; None if the cost model has its own time or none is
        known. after: see `RegroupCosts.times`."""
        key = strategy, after
        if key not in self._times:
            times = None
            if self._regroup is not None and not self._costs.cost_model.overhead_ms(strategy):
                times = self._regroup.times(strategy, after)
            self._times[key] = times
        return self._times[key]

    def run(self, works: Sequence[IterationWork]) -> list[IterationTasks]:
        """Simulates iterations in their order; the result is deterministic.

        Raises StrategyError for a scheme that the cost model does not know.
        """
        if self._regroup is not None:
            self._hiding = self._regroup.for_pool(work.strategy for work in works).hiding
        loop = EventLoop()
        iterations: list[IterationTasks] = []
        for work, following in zip_longest(works, works[1:]):
            iterations.append(self._add(loop, work, following, iterations))
        loop.run()
        return iterations

    def _add(
        self,
        loop: EventLoop,
        work: IterationWork,
        following: IterationWork | None,
        before: Sequence[IterationTasks],
    ) -> IterationTasks:
        index = len(before)
        requested = None
        if index and self._plan_ahead:
            requested = before[max(0, index - self._plan_ahead)].begin
        elif index:
            requested = before[-1].end
        plan = loop.add(_PLANNER, _MS_PER_S * work.plan_time_s if index else 0.0, [requested])
        begin = loop.add(_ITERATION, 0.0, [plan])
        times = self.regroup_times(work.strategy, before[-1].work.strategy if before else None)
        gathers: list[Task] = []
        gathered: dict[Unit, Task] = {}
        if times is not None:
            ended = before[-1].end if before else None
            updates = (before[-1].updates if before else ()) or [ended] * len(times.calls)
            for call, update in zip(times.calls, updates, strict=True):
                is_free = self._hiding is not Hiding.NOTHING
                when = [plan, update] if is_free else [begin]
                gathers.append(loop.add(_REGROUP, call.gather_ms, when))
                gathered.update(dict.fromkeys(call.units, gathers[-1]))
        started = begin
        if gathers and not self._hiding.hides_gathers:
            started, gathered = loop.add(_ITERATION, 0.0, [begin, gathers[-1]]), {}
        replicas = tuple(
            ReplicaTasks(
                loop,
                replica,
                micro_batches,
                self._costs,
                lane=f"iteration {index + 1}, replica {number}",
                begin=started,
                gathered=gathered,
                splits_last_backward=times is not None and self._hiding is not Hiding.NOTHING,
            )
            for number, (replica, micro_batches) in enumerate(
                zip(work.strategy.replicas, work.replicas, strict=True)
            )
        )
        ends = [task for replica in replicas for task in replica.ends]
        calls: tuple[CallTasks, ...] = ()
        updates = ()
        overhead = None
        if times is not None:
            calls = self._add_calls(loop, times.calls, gathers, replicas, ends)
            upcoming = times
            if following is not None:
                upcoming = self.regroup_times(following.strategy, work.strategy) or times
            updates = tuple(
                loop.add(_UPDATE, call.update_ms, [calls[0].scatter, *ends])
                for call in upcoming.calls
            )
            ends += updates
        else:
            overhead_ms = self._costs.cost_model.overhead_ms(work.strategy)
            if overhead_ms:
                overhead = loop.add(_UPDATE, overhead_ms, [begin, *ends])
                ends.append(overhead)
        end = loop.add(_ITERATION, 0.0, ends)
        return IterationTasks(index + 1, work, begin, end, replicas, calls, updates, overhead)

    def _add_calls(
        self,
        loop: EventLoop,
        times: Sequence[CallTimes],
        gathers: Sequence[Task],
        replicas: Sequence[ReplicaTasks],
        ends: Sequence[Task],
    ) -> tuple[CallTasks, ...]:
        complete: dict[Unit, list[Task]] = {}
        posted: list[Task] = list(ends)
        if self._hiding is not Hiding.NOTHING:
            posted = []
            for replica in replicas:
                has_threads = self._hiding is Hiding.THREADS
                num_stages = replica.replica.scheme.pp if has_threads else 1
                posted += replica.before_scatters(num_stages, have_received=not has_threads)
                for unit, task in replica.gradients_done(num_stages):
                    complete.setdefault(unit, []).append(task)
        scatters: list[Task] = []
        for call in reversed(times):
            done = [task for unit in dict.fromkeys(call.units) for task in complete.get(unit, [])]
            scatters.append(loop.add(_REGROUP, call.scatter_ms, [gathers[-1], *posted, *done]))
        return tuple(
            CallTasks(call.buckets, gather, scatter)
            for call, gather, scatter in zip(times, gathers, reversed(scatters), strict=True)
        )


def stage_program(
    stage: int, num_stages: int, num_micro_batches: int
) -> Iterator[tuple[bool, int]]:
    """Yields (is_forward, micro-batch) of every operation of a stage in the order of 1F1B.

    First ``num_stages - 1 - stage`` forwards, then a forward and a backward alternately, then the
    remaining backwards (arXiv 2006.09503; 2104.04473, §2.2).
    """
    num_ahead = min(num_stages - 1 - stage, num_micro_batches)
    for micro_batch in range(num_ahead):
        yield True, micro_batch
    for micro_batch in range(num_micro_batches):
        if num_ahead + micro_batch < num_micro_batches:
            yield True, num_ahead + micro_batch
        yield False, micro_batch


@dataclass(frozen=True, slots=True, eq=False)
class OperationTasks:
    """Forward or backward of one micro-batch on one stage."""

    is_forward: bool
    stage: int
    micro_batch: int
    num_tokens: int
    tasks: tuple[Task, ...]
    """One, or one per part if parameters arrive or gradients leave in between."""

    @property
    def start_ms(self) -> float:
        return self.tasks[0].start_ms

    @property
    def end_ms(self) -> float:
        return self.tasks[-1].end_ms

    @property
    def work_ms(self) -> float:
        """Time without waits between its tasks."""
        return sum(task.duration_ms for task in self.tasks)


class ReplicaTasks:
    """All operations of a replica in one iteration, added to an event loop.

    A lane per stage, in the order of 1F1B.

    Args:
        lane: name of the replica, unique over all iterations.
        begin: the task that ends when the iteration begins.
        gathered: by unit, the gather that the first forward waits for; empty if gathers do not
            overlap with it.
        splits_last_backward: whether the last backward is split into parts, for
            `gradients_done`.
    """

    def __init__(
        self,
        loop: EventLoop,
        replica: Replica,
        micro_batches: Sequence[MicroBatchWork],
        costs: StageCosts,
        *,
        lane: str,
        begin: Task,
        gathered: Mapping[Unit, Task],
        splits_last_backward: bool,
    ) -> None:
        self.replica = replica
        scheme = replica.scheme
        self._num_stages, self._num_micro_batches = scheme.pp, len(micro_batches)
        self._parts: tuple[tuple[tuple[Unit, float], ...], ...] = ()
        if (gathered or splits_last_backward) and costs.shape is not None:
            self._parts = stage_parts(costs.shape, scheme)
        self.by_stage: list[list[OperationTasks]] = []
        """Operations of every stage in their order."""
        self._found: dict[tuple[bool, int, int], OperationTasks] = {}
        forward_share = costs.coefficients(scheme)[0].forward_share
        stage_times_ms = [batch.times_ms(scheme, costs.coefficients) for batch in micro_batches]
        for stage in range(scheme.pp):
            operations = []
            for is_forward, number in stage_program(stage, scheme.pp, len(micro_batches)):
                time_ms = stage_times_ms[number][stage]
                forward_ms = time_ms * forward_share
                tasks = self._add(
                    loop,
                    (lane, stage),
                    (is_forward, stage, number),
                    forward_ms if is_forward else time_ms - forward_ms,
                    gathered,
                    splits_last_backward,
                )
                num_tokens = micro_batches[number].num_tokens
                operation = OperationTasks(is_forward, stage, number, num_tokens, tasks)
                operations.append(operation)
                self._found[is_forward, stage, number] = operation
            self.by_stage.append(operations)
            if operations:
                loop.wait(operations[0].tasks[0], [begin])
        host_ms = max(each.host_ms for each in costs.coefficients(scheme)) * len(micro_batches)
        self._host = loop.add((lane, "host"), host_ms, [begin]) if host_ms else None
        for (is_forward, stage, number), operation in self._found.items():
            loop.wait(operation.tasks[0], [self._input_of(is_forward, stage, number)])

    def _add(
        self,
        loop: EventLoop,
        lane: tuple[str, int],
        operation: tuple[bool, int, int],
        duration_ms: float,
        gathered: Mapping[Unit, Task],
        splits_last_backward: bool,
    ) -> tuple[Task, ...]:
        is_forward, stage, number = operation
        if is_forward and number == 0 and gathered:
            return tuple(
                loop.add(lane, share * duration_ms, [gathered.get(unit)])
                for unit, share in self._parts[stage]
            )
        if not is_forward and number == self._num_micro_batches - 1 and splits_last_backward:
            parts = reversed(self._parts[stage])
            return tuple(loop.add(lane, share * duration_ms) for _, share in parts)
        return (loop.add(lane, duration_ms),)

    def _input_of(self, is_forward: bool, stage: int, number: int) -> Task | None:
        """The task that an operation gets its input from: on the previous stage, or on the next one
        for a backward."""
        neighbour = stage - 1 if is_forward else stage + 1
        found = self._found.get((is_forward, neighbour, number))
        return None if found is None else found.tasks[-1]

    @property
    def ends(self) -> list[Task]:
        """The last task of every stage, and of the host, which issues kernels ahead of them."""
        ends = [operations[-1].tasks[-1] for operations in self.by_stage if operations]
        return ends if self._host is None else [*ends, self._host]

    @property
    def time_without_waits_ms(self) -> float:
        """Time of the replica if all parameters were there from the beginning."""
        num = self._num_micro_batches
        halves_ms = [([0.0] * num, [0.0] * num) for _ in range(self._num_stages)]
        for operation in self._found.values():
            half = halves_ms[operation.stage][0 if operation.is_forward else 1]
            half[operation.micro_batch] = operation.work_ms
        host_ms = 0.0 if self._host is None else self._host.duration_ms
        return max(host_ms, last_backward_end_ms(halves_ms))

    def before_scatters(self, num_stages: int, *, have_received: bool) -> list[Task]:
        """Tasks that each stage ends before it issues scatters: those before its last backward on
        the first num_stages stages, whose input has arrived if have_received, the last backward
        itself on others."""
        found: list[Task] = []
        for stage, operations in enumerate(self.by_stage):
            if operations and stage >= num_stages:
                found.append(operations[-1].tasks[-1])
            elif operations:
                found.append(operations[-2].tasks[-1])
                gradient = self._input_of(False, stage, self._num_micro_batches - 1)
                if have_received and gradient is not None:
                    found.append(gradient)
        return found

    def gradients_done(self, num_stages: int) -> Iterator[tuple[Unit, Task]]:
        """Yields each unit of the first num_stages stages with the part of the last backward that
        completes its gradients."""
        for stage, operations in enumerate(self.by_stage[:num_stages]):
            if operations:
                parts = reversed(self._parts[stage])
                for (unit, _), task in zip(parts, operations[-1].tasks, strict=True):
                    yield unit, task


@dataclass(slots=True, eq=False)
class Task:
    """A task that occupies its lane for a time."""

    lane: Hashable
    duration_ms: float
    num_awaited: int = 0
    """Number of unfinished tasks that it waits for."""
    dependents: list[Task] = field(default_factory=list)
    """Tasks that wait for this one."""
    start_ms: float = math.nan
    """NaN until it starts."""
    end_ms: float = math.nan
    """NaN until it starts."""


class EventLoop:
    """Discrete events: each lane runs one task at a time, in the order in which they were added.

    A lane is, for example, a pipeline stage, the collectives of all ranks, or the planner. A task
    starts when its lane is free and all tasks that it waits for have ended. Time begins at 0.
    """

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[Task]] = {}
        self._num_waiting = 0

    def add(self, lane: Hashable, duration_ms: float, after: Iterable[Task | None] = ()) -> Task:
        """Appends a task to a lane; None in `after` is ignored.

        Raises ValueError for a duration that is negative or not finite.
        """
        if not 0.0 <= duration_ms < math.inf:
            raise ValueError(f"a task takes a finite time from 0 on, not {duration_ms} ms")
        task = Task(lane, duration_ms)
        self.wait(task, after)
        self._lanes.setdefault(lane, deque()).append(task)
        self._num_waiting += 1
        return task

    def wait(self, task: Task, others: Iterable[Task | None]) -> None:
        """Makes a task wait for more tasks, which may have been added after it."""
        for other in others:
            if other is not None:
                other.dependents.append(task)
                task.num_awaited += 1

    def run(self) -> None:
        """Runs every task.

        Raises HydraulisError if tasks wait for each other in a cycle.
        """
        # (end, number of the start, task): equal ends in the order of their starts.
        running: list[tuple[float, int, Task]] = []
        busy: set[Hashable] = set()
        may_start = deque(self._lanes)
        now_ms, num_started = 0.0, 0
        while True:
            while may_start:
                lane = may_start.popleft()
                queue = self._lanes[lane]
                if lane in busy or not queue or queue[0].num_awaited:
                    continue
                task = queue.popleft()
                task.start_ms, task.end_ms = now_ms, now_ms + task.duration_ms
                busy.add(lane)
                heapq.heappush(running, (task.end_ms, num_started, task))
                num_started += 1
            if not running:
                break
            now_ms, _, ended = heapq.heappop(running)
            self._num_waiting -= 1
            busy.remove(ended.lane)
            may_start.append(ended.lane)
            for dependent in ended.dependents:
                dependent.num_awaited -= 1
                if not dependent.num_awaited:
                    may_start.append(dependent.lane)
            # A kept task must not keep all later ones alive.
            ended.dependents = []
        if self._num_waiting:
            stuck = [str(lane) for lane, queue in self._lanes.items() if queue]
            raise HydraulisError(
                f"simulation: tasks must not wait for each other in a cycle but "
                f"{self._num_waiting} never start, on {len(stuck)} lanes, the first of them "
                f"{stuck[0]}; correct the order in which they were added"
            )
