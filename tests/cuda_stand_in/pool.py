"""Pools of workers on the stand-in: one NCCL job each, with values, for the tests of several ranks;
and whole jobs of the training program.

The libraries are preloaded, so ranks cannot be forks of the test run. They are forks of one host
process, started on the stand-in, which imports torch and Megatron once and keeps the pools.
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
"""A call of NCCL that waits longer ends its process, before the pool loses its patience."""
SEED = 1


class StandInPool:
    """``world_size`` workers on the stand-in; used as `RankPool`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """As `RankPool.run`; workers see ``cuda:RANK`` as their device."""
        found: list[Any] = in_host(_run_in_pool, self.world_size, function, args, timeout_s)
        return found

    def close(self) -> None:
        """Kill the workers of this and of every other pool on the stand-in."""
        _host().close()


def in_host(function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` in the host process, whose forks are on the stand-in.

    Raises:
        WorkerFailure: whatever it raised, or that the host died.
    """
    return _host().run(function, args)


class _Host:
    """The test run's end of the host process, which is started when it is needed."""

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
    """In the host: runs what the test run asks for, until it asks for no more."""
    import torch

    torch.set_num_threads(1)
    # What upstream says at every import and model would hide a worker's last words.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)
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
    """In the host."""
    return {}


def _run_in_pool(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> list[Any]:
    if world_size not in _pools():
        _pools()[world_size] = RankPool(world_size, backend="nccl", enter=enter_worker)
    return _pools()[world_size].run(function, *args, timeout_s=timeout_s)


def enter_worker(rank: int, folder: Path) -> None:
    """In a worker, before it joins its job: its device, values, and where NCCL moves data."""
    import torch
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.cuda_stand_in.values import compute_everywhere

    stderr = os.open(folder / f"rank{rank}.stderr", os.O_WRONLY | os.O_CREAT)
    os.dup2(stderr, sys.stderr.fileno())
    faulthandler.enable()
    os.environ["STAND_IN_EXCHANGE"] = str(folder)
    torch.cuda.set_device(rank)
    compute_everywhere()
    # What our engine has for no rank: upstream asks its tracker of random numbers nevertheless.
    model_parallel_cuda_manual_seed(SEED, tp_rank=0, ep_rank=0, etp_rank=0)


def run_logged(folder: Path, function: Callable[..., Any], *args: Any) -> Any:
    """In a worker: ``function(*args)``, its calls in ``folder/rankN.log``."""
    import torch.distributed as dist

    from tests.cuda_stand_in import device

    device.log_to(folder / f"rank{dist.get_rank()}.log")
    try:
        return function(*args)
    finally:
        device.log_to(None)


if __name__ == "__main__":
    # Under its own name, so that what workers unpickle is what they were sent.
    from tests.cuda_stand_in import pool

    pool.serve(Connection(int(sys.argv[1])))
