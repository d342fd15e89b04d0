"""Certified plans of many batches, by several processes where there are many batches."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from types import TracebackType
from typing import Self

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.errors import ConfigurationError, PlanError
from megatron.hydraulis.planner.plan import IterationPlan, Planner
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.strategy import Pool

__all__ = ["BatchPlanning", "TimedPlan", "default_num_processes"]

NUM_SHORTLISTED = 2
"""Strategies of a batch that the certified planner looks at, where greedy plans choose them."""
MAX_DEFAULT_PROCESSES = 8
"""Of a login node that others use too."""
FEWEST_BATCHES_PER_PROCESS = 10
"""A process starts in about a second; fewer batches would not be worth it."""
CHUNKS_PER_PROCESS = 4
"""So that no process waits long for the last one."""


def default_num_processes() -> int:
    """The cores that this process may use, up to a number that others do not mind."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_PROCESSES)


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """A plan and the CPU time that it took."""

    plan: IterationPlan
    cpu_s: float


class BatchPlanning:
    """Plans batches; a context manager that ends its processes.

    Plans do not depend on the number of processes: a plan depends on its batch alone.
    ConfigurationError for less than one process.
    """

    def __init__(self, num_processes: int = 1) -> None:
        if num_processes < 1:
            raise ConfigurationError(
                f"simulation: at least 1 process plans but {num_processes} are asked for; raise it"
            )
        self._num_processes = num_processes
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=error is None, cancel_futures=True)
            self._executor = None

    def plans(
        self,
        pool: Pool,
        cost_model: CostModel,
        batches: Sequence[Sequence[int]],
        *,
        shortlists: bool = False,
    ) -> Iterator[TimedPlan]:
        """In the order of the batches, which are iterations 0, 1, …

        With `shortlists` the certified planner looks at the strategies of which greedy plans are
        best. Raises PlanError as the planners do, and where a process is killed.
        """
        num_processes = min(self._num_processes, len(batches) // FEWEST_BATCHES_PER_PROCESS)
        if num_processes < 2:
            yield from _plans(pool, cost_model, batches, 0, shortlists)
            return
        if self._executor is None:
            # Forks of a process with threads, such as that of a progress bar, may hang.
            self._executor = ProcessPoolExecutor(
                self._num_processes, mp_context=get_context("spawn"), initializer=_leave_interrupts
            )
        size = math.ceil(len(batches) / (num_processes * CHUNKS_PER_PROCESS))
        parts = [
            self._executor.submit(
                _planned, pool, cost_model, batches[first : first + size], first, shortlists
            )
            for first in range(0, len(batches), size)
        ]
        try:
            for part in parts:
                yield from part.result()
        except BrokenProcessPool as error:
            raise PlanError(
                f"{self._num_processes} processes plan but one of them was killed, by lack of "
                "memory it may be; plan with fewer"
            ) from error


def _leave_interrupts() -> None:
    """To the process that started this one, which ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _planned(
    pool: Pool,
    cost_model: CostModel,
    batches: Sequence[Sequence[int]],
    first: int,
    shortlists: bool,
) -> list[TimedPlan]:
    return list(_plans(pool, cost_model, batches, first, shortlists))


def _plans(
    pool: Pool,
    cost_model: CostModel,
    batches: Sequence[Sequence[int]],
    first: int,
    shortlists: bool,
) -> Iterator[TimedPlan]:
    planner: Planner = (
        _ShortlistPlanner(pool, cost_model) if shortlists else CertifiedPlanner(pool, cost_model)
    )
    for iteration, batch in enumerate(batches, start=first):
        start_s = time.process_time()
        plan = planner.plan(batch, iteration=iteration)
        yield TimedPlan(plan, time.process_time() - start_s)


class _ShortlistPlanner:
    """The certified planner on the strategies of which greedy plans are best."""

    def __init__(self, pool: Pool, cost_model: CostModel) -> None:
        self._pool = pool
        self._cost_model = cost_model
        self._greedy = GreedyPlanner(pool, cost_model)
        self._certified: dict[tuple[str, ...], CertifiedPlanner] = {}

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """See Planner."""
        outcomes = self._greedy.explain(lengths, iteration=iteration).strategies
        found_s = {each.name: each.found_s for each in outcomes if each.found_s is not None}
        # By name too: the same strategies make the same planner.
        best = sorted(sorted(found_s, key=lambda name: found_s[name])[:NUM_SHORTLISTED])
        if tuple(best) not in self._certified:
            pool = Pool.of(*(self._pool.strategy(name) for name in best))
            self._certified[tuple(best)] = CertifiedPlanner(pool, self._cost_model)
        return self._certified[tuple(best)].plan(lengths, iteration=iteration)
