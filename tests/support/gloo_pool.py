"""Pools of forked gloo workers: a multi-process test costs its own time, not an import of torch.

The parent imports torch and Megatron once and applies the CPU backend; workers are forks of it.
A worker that hangs or dies fails the test within its timeout, and the next test gets a new pool.
"""

from __future__ import annotations

import os
import pickle
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from hydraulis_patches.cpu_backend import apply_cpu_backend
from megatron.hydraulis.runtime.process_groups import GroupRegistry
from tests.support.forked_ranks import ForkedRanks

DEFAULT_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 60.0
ORPHAN_CHECK_S = 1.0
"""How often an idle worker looks whether its parent still lives."""

CULPRIT_WAIT_S = 0.2
"""After a failure, how long the other ranks may still tell of theirs."""
DIED = "the worker died"


class WorkerFailure(AssertionError):
    """A worker raised, died or hung."""


class GlooPool:
    """``world_size`` forked processes in one gloo job, reused from test to test."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._start()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """``function(*args)`` on every rank; the results by rank.

        Args:
            function: importable by name; sees an initialised `torch.distributed`.
            timeout_s: for all ranks together.

        Raises:
            WorkerFailure: with the first traceback, or the ranks that did not answer.
        """
        if not self._ranks.all_live:
            self._restart()
        message = pickle.dumps((function, args))
        for connection in self._ranks.connections:
            with suppress(OSError):  # its death is found below, like any other
                connection.send_bytes(message)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        waiting = dict(zip(self._ranks.connections, range(self.world_size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for answered in ready:
                assert isinstance(answered, Connection)
                rank = waiting.pop(answered)
                try:
                    ok, value = pickle.loads(answered.recv_bytes())
                except (EOFError, OSError):  # a reset, where it left our message unread
                    ok, value = False, DIED
                (results if ok else failures)[rank] = value
            if failures:
                # Those who waited for the culprit may have failed before it: see who else comes.
                deadline = min(deadline, time.monotonic() + CULPRIT_WAIT_S)
        if failures:
            self._restart()
            first_dead = sorted(failures, key=lambda rank: failures[rank] != DIED)
            reports = [
                f"rank {rank} of {self.world_size} failed:\n{failures[rank]}" for rank in first_dead
            ]
            raise WorkerFailure("\n".join(reports))
        if waiting:
            self._restart()
            raise WorkerFailure(
                f"ranks {sorted(waiting.values())} of {self.world_size} did not finish within "
                f"{timeout_s} s: a hang"
            )
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """Kill the workers."""
        self._ranks.close()

    def _restart(self) -> None:
        self.close()
        self._start()

    def _start(self) -> None:
        prepare_parent()
        self._ranks = ForkedRanks(self.world_size, _serve, timeout_s=COLLECTIVE_TIMEOUT_S)


@cache
def prepare_parent() -> None:
    """What the forks inherit: one thread, the CPU backend."""
    torch.set_num_threads(1)
    apply_cpu_backend()


@cache
def worker_groups() -> GroupRegistry:
    """In a worker: process groups kept from test to test, by rank tuple."""
    return GroupRegistry([])


class _Pools(dict[int, GlooPool]):
    """Pools by number of ranks, started when first asked for."""

    def __missing__(self, world_size: int) -> GlooPool:
        self[world_size] = GlooPool(world_size)
        return self[world_size]


@cache
def _pools() -> _Pools:
    return _Pools()


def pool_of(world_size: int) -> GlooPool:
    """In the parent: the pool of this size."""
    return _pools()[world_size]


def close_pools() -> None:
    """In the parent: end all workers."""
    while _pools():
        _pools().popitem()[1].close()


def _serve(join: Callable[[], None], connection: Connection) -> None:
    join()
    parent = os.getppid()
    while True:
        # The ends of other workers' pipes are inherited, so a killed parent is no end of file.
        while not connection.poll(ORPHAN_CHECK_S):
            if os.getppid() != parent:
                os._exit(1)
        try:
            message = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            function, args = pickle.loads(message)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:  # the parent reports it with the whole traceback
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
