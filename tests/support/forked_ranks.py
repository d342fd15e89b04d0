"""Processes forked as the ranks of one job, each at the end of a pipe."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
"""A folder for files that processes share."""
DIED = "the worker died"
_PR_SET_PDEATHSIG = 1
"""Of Linux's ``prctl``: the signal that a process gets when its parent's thread ends."""
LATE_FAILURES_S = 0.2
"""How long to collect failures of other ranks after the first one: a rank that waited for the one
at fault may fail before it."""


@dataclass
class Answers:
    """The ranks' answers to one call."""

    results: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    """Ranks that had not answered when time ran out, or soon after the first failure."""


class ForkedRanks:
    """``num_ranks`` forks of this process that run ``serve``; they die with the thread that made
    them.

    Args:
        num_ranks: of the job.
        serve: called on each rank with ``join``, which makes it a member of the job, and its end
            of the pipe; ends the process itself, or by returning. Need not be picklable.
        timeout_s: for each collective.
        backend: of the job's process groups.
        enter: called on each rank before it joins, with the rank and the job's folder, which is in
            memory if the machine has a folder there.
    """

    def __init__(
        self,
        num_ranks: int,
        serve: Callable[[Callable[[], None], Connection], None],
        *,
        timeout_s: float,
        backend: str = "gloo",
        enter: Callable[[int, Path], None] | None = None,
    ) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="forked_ranks_", dir=IN_MEMORY))
        self.connections: list[Connection] = []
        """Our ends of the pipes, by rank."""
        self._processes = []
        context = multiprocessing.get_context("fork")
        store_path = str(self.directory / "store")
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()

            def join(rank: int = rank) -> None:
                if enter is not None:
                    enter(rank, self.directory)
                dist.init_process_group(
                    backend,
                    store=dist.FileStore(store_path, num_ranks),
                    rank=rank,
                    world_size=num_ranks,
                    timeout=timedelta(seconds=timeout_s),
                )

            process = context.Process(target=_served, args=(serve, join, theirs), daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self._processes.append(process)

    @property
    def all_live(self) -> bool:
        """True if no rank has ended."""
        return all(process.is_alive() for process in self._processes)

    def answers(self, timeout_s: float) -> Answers:
        """One answer ``(succeeded, value)`` of every rank; `value` of a failure is its report."""
        found = Answers()
        deadline_s = time.monotonic() + timeout_s
        waiting = {connection: rank for rank, connection in enumerate(self.connections)}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, OSError):  # a reset, if the rank left our message unread
                    succeeded, value = False, DIED
                (found.results if succeeded else found.failures)[rank] = value
            if found.failures:
                deadline_s = min(deadline_s, time.monotonic() + LATE_FAILURES_S)
        found.missing = sorted(waiting.values())
        return found

    def close(self) -> None:
        """Kill the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)


def _served(
    serve: Callable[[Callable[[], None], Connection], None],
    join: Callable[[], None],
    connection: Connection,
) -> None:
    """Serves calls in a rank. The ends of others' pipes are inherited: a killed parent is no end of
    file."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    serve(join, connection)
