"""A discrete-event loop: tasks in lanes, each lane one task at a time and in its order.

A lane is whatever does one thing after the other: a pipeline stage, the collectives of all ranks,
the planner. A task starts at the moment when its lane is free and everything that it waits for has
ended. Tasks know nothing of what they stand for, so this is no model of training yet.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from megatron.hydraulis.errors import HydraulisError

__all__ = ["EventLoop", "Task"]


@dataclass(slots=True, eq=False)
class Task:
    """Something that occupies its lane for a time."""

    lane: Hashable
    duration_ms: float
    num_awaited: int = 0
    """Tasks that have to end first and have not."""
    dependents: list[Task] = field(default_factory=list)
    """Tasks that wait for this one."""
    start_ms: float = math.nan
    """NaN until it starts."""
    end_ms: float = math.nan
    """NaN until it starts."""


class EventLoop:
    """Tasks are added first and run together; time begins at 0 and only moves forward."""

    def __init__(self) -> None:
        self._lanes: dict[Hashable, deque[Task]] = {}
        self._num_waiting = 0

    def add(self, lane: Hashable, duration_ms: float, after: Iterable[Task | None] = ()) -> Task:
        """Append a task to a lane; None among what it waits for stands for nothing.

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
        """Let a task wait for others too, for those that were added after it."""
        for other in others:
            if other is not None:
                other.dependents.append(task)
                task.num_awaited += 1

    def run(self) -> None:
        """Run every task.

        Raises HydraulisError where tasks wait for one another in a circle.
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
            # Whoever keeps a task is not to keep all that came after it.
            ended.dependents = []
        if self._num_waiting:
            stuck = [str(lane) for lane, queue in self._lanes.items() if queue]
            raise HydraulisError(
                f"simulation: tasks must not wait for one another in a circle but "
                f"{self._num_waiting} never start, on {len(stuck)} lanes, the first of them "
                f"{stuck[0]}; correct the order in which they were added"
            )
