"""Pools of forked workers, so that a multi-process test does not import torch again.

The parent imports torch and Megatron once and applies the CPU backend; workers are forks of it that
form a gloo job. Workers on the CUDA stand-in are forks of a process that was started on it. A
worker that hangs or dies fails the test within its timeout, and the next test gets a new pool.
"""

from __future__ import annotations

import importlib
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from hydraulis_patches.cpu_backend import apply_cpu_backend
from megatron.hydraulis.runtime.process_groups import GroupRegistry
from tests.support.forked_ranks import DIED, ForkedRanks
from tests.support.gloo_device import share_gloo_device

DEFAULT_TIMEOUT_S = 60.0
COLLECTIVE_TIMEOUT_S = 60.0

QUOTED_CHARACTERS = 2000
"""Of a worker's standard error, in the message of a failure."""

Device = Literal["cpu", "cuda"]


class WorkerFailure(AssertionError):
    """A worker raised, died or hung."""


class Pool(Protocol):
    """A pool of workers, see `pool_of`."""

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """See `RankPool.run`."""

    def close(self) -> None:
        """Kill the workers."""


class RankPool:
    """``world_size`` forked processes in one job, reused from test to test.

    Args:
        world_size: number of processes.
        backend: of their process groups.
        enter: called in each before it joins the job, with its rank and the job's folder; may leave
            what the worker writes to its standard error there, in ``*.stderr``.
    """

    def __init__(
        self,
        world_size: int,
        *,
        backend: str = "gloo",
        enter: Callable[[int, Path], None] | None = None,
    ) -> None:
        self.world_size = world_size
        self._backend, self._enter = backend, enter
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
        answers = self._ranks.answers(timeout_s)
        failures, missing = answers.failures, answers.missing
        if not failures and not missing:
            return [answers.results[rank] for rank in range(self.world_size)]
        stderr = self._stderr()
        self._restart()
        if failures:
            dead_first = sorted(failures, key=lambda rank: failures[rank] != DIED)
            reports = [
                f"rank {rank} of {self.world_size} failed:\n{failures[rank]}" for rank in dead_first
            ]
            raise WorkerFailure("\n".join(reports) + stderr)
        raise WorkerFailure(
            f"ranks {missing} of {self.world_size} did not finish within {timeout_s} s: a "
            f"hang{stderr}"
        )

    def close(self) -> None:
        """Kill the workers."""
        self._ranks.close()

    def _restart(self) -> None:
        self.close()
        self._start()

    def _start(self) -> None:
        if self._backend == "gloo":
            prepare_parent()
        self._ranks = ForkedRanks(
            self.world_size,
            _serve,
            timeout_s=COLLECTIVE_TIMEOUT_S,
            backend=self._backend,
            enter=self._enter,
        )

    def _stderr(self) -> str:
        """The end of what each worker wrote to its standard error."""
        text = ""
        for path in sorted(self._ranks.directory.glob("*.stderr")):
            lines = path.read_text(errors="replace").splitlines()
            kept = "\n".join(line for line in lines if not line.startswith("Extension modules"))
            kept = kept[-QUOTED_CHARACTERS:]
            text += f"\n{path.stem} wrote:\n{kept}" if kept else ""
        return text


@cache
def prepare_parent() -> None:
    """Prepares what the forks inherit: one thread, the CPU backend, torch's compiler.

    Torch's optimizers and `Embedding` on meta import the compiler, which takes a rank a second.
    """
    importlib.import_module("torch._dynamo")
    torch.set_num_threads(1)
    share_gloo_device()
    apply_cpu_backend()


@cache
def worker_groups() -> GroupRegistry:
    """Process groups that a worker keeps from test to test, by rank tuple."""
    return GroupRegistry([])


@cache
def _pools() -> dict[tuple[int, Device], Pool]:
    """The pools by number of ranks and device."""
    return {}


def pool_of(world_size: int, device: Device = "cpu") -> Pool:
    """The parent's pool of this size, started when first asked for."""
    key = (world_size, device)
    if key not in _pools():
        if device == "cuda":
            from tests.cuda_stand_in.pool import StandInPool

            _pools()[key] = StandInPool(world_size)
        else:
            _pools()[key] = RankPool(world_size)
    return _pools()[key]


def close_pools() -> None:
    """Ends all workers of the parent."""
    while _pools():
        _pools().popitem()[1].close()


def _serve(join: Callable[[], None], connection: Connection) -> None:
    join()
    while True:
        message = connection.recv_bytes()
        try:
            function, args = pickle.loads(message)
            answer = pickle.dumps((True, function(*args)))
        except BaseException:  # the parent reports it with the whole traceback
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
