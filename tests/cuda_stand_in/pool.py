"""Pools of workers on the stand-in, one NCCL job with values each, for tests of several ranks, and
complete training jobs.

The libraries are preloaded, so ranks cannot be forks of the test run. They are forks of a host
process on the stand-in, which imports torch and Megatron once and keeps the pools.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.cuda_stand_in.launch import environment
from tests.support.gloo_pool import DEFAULT_TIMEOUT_S, RankPool, WorkerFailure

HANG_S = 30.0
"""An NCCL call that waits longer ends its process, before the pool's own time limit."""
SEED = 1


class StandInPool:
    """``world_size`` workers on the stand-in; used as `RankPool`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """`RankPool.run`; workers see ``cuda:RANK`` as their device."""
        found: list[Any] = in_host(_run_in_pool, self.world_size, function, args, timeout_s)
        return found

    def close(self) -> None:
        """Kill the workers of all pools on the stand-in."""
        _host().close()


def in_host(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in the host process, whose forks are on the stand-in.

    Raises:
        WorkerFailure: it raised, or the host died.
    """
    return _host().run(function, args)


class _Host:
    """The connection of the test run to the host process, which is started when needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self._process is None:
            self._start()
        try:
            self._connection.send_bytes(pickle.dumps((function, args)))
            result, failure = self._connection.recv()
        except (EOFError, OSError) as error:
            self.close()
            raise WorkerFailure("the host of the workers on the stand-in died") from error
        if failure is not None:
            raise WorkerFailure(failure)
        return result

    def close(self) -> None:
        if self._process is not None:
            with suppress(OSError):  # dead already
                self._connection.send_bytes(b"")
            self._connection.close()
            self._process.wait()
            self._process = None

    def _start(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            env=environment(timeout_s=HANG_S),
            pass_fds=[theirs.fileno()],
        )
        theirs.close()


@cache
def _host() -> _Host:
    return _Host()


def serve(connection: Connection) -> None:
    """Run in the host what the test run requests, until it closes the connection."""
    import torch

    torch.set_num_threads(1)
    # Upstream's messages would hide the output of a worker that fails.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
    if "STAND_IN_TE" in os.environ:
        from tests.cuda_stand_in.te.kernels import replace

        replace()
    with suppress(EOFError):
        while message := connection.recv_bytes():
            result, failure = None, None
            try:
                function, args = pickle.loads(message)
                result = function(*args)
            except WorkerFailure as error:
                failure = str(error)
            except Exception:
                failure = traceback.format_exc()
            connection.send((result, failure))
    for pool in _pools().values():
        pool.close()


@cache
def _pools() -> dict[int, RankPool]:
    """Runs in the host."""
    return {}


def _run_in_pool(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> list[Any]:
    if world_size not in _pools():
        _pools()[world_size] = RankPool(world_size, backend="nccl", enter=enter_worker)
    return _pools()[world_size].run(function, *args, timeout_s=timeout_s)


def enter_worker(rank: int, folder: Path) -> None:
    """Set up a worker before it joins its job: its device, values, and where NCCL moves data."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.cuda_stand_in.values import compute_everywhere

    stderr = os.open(folder / f"rank{rank}.stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, sys.stderr.fileno())
    faulthandler.enable()
    os.environ["STAND_IN_EXCHANGE"] = str(folder)
    torch.cuda.set_device(rank)
    compute_everywhere()
    # Our engine does not need it, but upstream uses its random-number tracker.
    model_parallel_cuda_manual_seed(SEED, tp_rank=0, ep_rank=0, etp_rank=0)


def run_logged(folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` in a worker, with its calls in ``folder/rankN.log``."""
    import torch.distributed as dist

    from tests.cuda_stand_in import device

    device.log_to(folder / f"rank{dist.get_rank()}.log")
    try:
        return function(*args)
    finally:
        device.log_to(None)


if __name__ == "__main__":
    # Imported by name, so that workers unpickle the same class.
    from tests.cuda_stand_in import pool

    pool.serve(Connection(int(sys.argv[1])))
