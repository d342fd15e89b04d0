"""Plans of many batches, made by several processes."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Self

from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import ConfigurationError, PlanError
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.strategy import Pool

MAX_DEFAULT_PROCESSES = 8
"""A login node has other users too."""
FEWEST_BATCHES_PER_PROCESS = 10
"""A process starts in about a second, which fewer batches would not justify."""
CHUNKS_PER_PROCESS = 4
"""Several, so that no process waits long for the last one."""


def default_num_processes() -> int:
    """Number of cores that this process may use, up to `MAX_DEFAULT_PROCESSES`."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_PROCESSES)


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """A plan and its CPU time."""

    plan: IterationPlan
    cpu_s: float


class BatchPlanning:
    """Plans batches, in several processes if there are many; a context manager that ends them.

    Plans depend on their batch alone, not on the number of processes.
    ConfigurationError for less than one process.
    """

    def __init__(self, num_processes: int = 1) -> None:
        if num_processes < 1:
            raise ConfigurationError(
                f"simulation: planning needs at least 1 process but has {num_processes}; raise it"
            )
        self._num_processes = num_processes
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=error is None, cancel_futures=True)
            self._executor = None

    def plans(
        self, pool: Pool, limits: Limits, batches: Sequence[Sequence[int]]
    ) -> Iterator[TimedPlan]:
        """Yields plans in the order of the batches, which are iterations 0, 1, …

        limits: of micro-batches, by the cost model to plan with.

        Raises PlanError as the planner does, and if a process is killed.
        """
        num_processes = min(self._num_processes, len(batches) // FEWEST_BATCHES_PER_PROCESS)
        if num_processes < 2:
            yield from _plans(pool, limits, batches, 0)
            return
        if self._executor is None:
            # A fork of a process with threads, for example of a progress bar, may hang.
            self._executor = ProcessPoolExecutor(
                self._num_processes, mp_context=get_context("spawn")
            )
        size = math.ceil(len(batches) / (num_processes * CHUNKS_PER_PROCESS))
        with _interrupts_blocked():
            parts = [
                self._executor.submit(_planned, pool, limits, batches[first : first + size], first)
                for first in range(0, len(batches), size)
            ]
        try:
            for part in parts:
                yield from part.result()
        except BrokenProcessPool as error:
            raise PlanError(
                f"one of {self._num_processes} planning processes was killed, possibly for lack of "
                "memory; plan with fewer"
            ) from error


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that start meanwhile never get any: their parent does, and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _planned(
    pool: Pool, limits: Limits, batches: Sequence[Sequence[int]], first: int
) -> list[TimedPlan]:
    return list(_plans(pool, limits, batches, first))


def _plans(
    pool: Pool, limits: Limits, batches: Sequence[Sequence[int]], first: int
) -> Iterator[TimedPlan]:
    planner = CertifiedPlanner(pool, limits.cost_model, limits)
    for iteration, batch in enumerate(batches, start=first):
        start_s = time.process_time()
        plan = planner.plan(batch, iteration=iteration)
        yield TimedPlan(plan, time.process_time() - start_s)
