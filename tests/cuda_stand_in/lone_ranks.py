"""Runs many lone ranks: forks of the host process on the stand-in, two at a time."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from torch.distributed import distributed_c10d

from tests.cuda_stand_in.pool import in_host
from tests.support.gloo_pool import WorkerFailure

NUM_AT_A_TIME = 2
DEFAULT_TIMEOUT_S = 60.0
"""Time limit of one rank."""


@dataclass(frozen=True)
class _Request:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    num_ranks: int
    ranks: tuple[int, ...]
    logs: Path | None
    settings: dict[str, str]
    timeout_s: float


def run_alone(
    function: Callable[..., Any],
    *arguments: Any,
    num_ranks: int,
    ranks: Sequence[int] | None = None,
    logs: Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    **settings: object,
) -> list[Any]:
    """``function(*arguments)`` in one process per rank, in `lone_rank.alone`; the results.

    Args:
        function: importable by name; what it returns must be picklable.
        num_ranks: of the job.
        ranks: to run; all if None.
        logs: a folder that gets the log of each, `log_of`.
        timeout_s: for each rank.
        settings: of the stand-in, such as ``STAND_IN_MEMORY_BYTES``.

    Raises:
        WorkerFailure: with the traceback of the first rank that failed.
    """
    request = _Request(
        function,
        arguments,
        num_ranks,
        tuple(range(num_ranks) if ranks is None else ranks),
        logs,
        {name: str(value) for name, value in settings.items()},
        timeout_s,
    )
    results: list[Any] = in_host(_run_all, request)
    return results


def log_of(logs: Path, rank: int) -> Path:
    """The log of one rank in the folder of all."""
    return logs / f"rank{rank}.log"


def _run_all(request: _Request) -> list[Any]:
    """Run in the host."""
    # Every fork has them. Torch's kernel of attention imports its compiler, which takes seconds.
    import torch.nn.attention.varlen  # noqa: F401

    import tests.cuda_stand_in.lone_rank
    import tests.support.models  # noqa: F401

    context = multiprocessing.get_context("fork")
    waiting = deque(request.ranks)
    running: dict[Connection, tuple[int, ForkProcess, float]] = {}
    results: dict[int, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < NUM_AT_A_TIME:
                rank = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run_one, args=(request, rank, theirs))
                process.start()
                theirs.close()
                running[ours] = (rank, process, time.monotonic() + request.timeout_s)
            first_end = min(deadline for _, _, deadline in running.values())
            for ready in wait(list(running), timeout=max(0.0, first_end - time.monotonic())):
                assert isinstance(ready, Connection)
                rank, process, _ = running.pop(ready)
                results[rank] = _result(rank, ready)
                process.join()
            for rank, _, deadline in running.values():
                if time.monotonic() > deadline:
                    raise WorkerFailure(f"rank {rank} took more than {request.timeout_s} s")
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()
    return [results[rank] for rank in request.ranks]


def _result(rank: int, connection: Connection) -> Any:
    try:
        is_fine, answer = pickle.loads(connection.recv_bytes())
    except EOFError:
        is_fine, answer = False, "the process died"
    connection.close()
    if not is_fine:
        raise WorkerFailure(f"rank {rank} failed:\n{answer}")
    return answer


def _run_one(request: _Request, rank: int, connection: Connection) -> None:
    """Run in a fork, where torch's CUDA is used first."""
    from tests.cuda_stand_in.device import flush_log, log_to
    from tests.cuda_stand_in.lone_rank import alone

    logging.disable(logging.WARNING)
    _use_older_backend()
    os.environ.update(request.settings)
    status = 1
    with suppress(BaseException):
        try:
            if request.logs is not None:
                log_to(log_of(request.logs, rank))
            with alone(rank, request.num_ranks):
                answer = (True, request.function(*request.arguments))
            flush_log()
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))
        status = 0
    os._exit(status)  # NCCL's threads would wait for peers


def _use_older_backend() -> None:
    """Replaces the backend of torch 2.15, which splits communicators and so requires other ranks,
    by the older one, which gets each communicator through the store."""
    os.environ["TORCH_DIST_USE_NCCL2"] = "0"
    register = getattr(distributed_c10d, "_register_builtin_nccl_backend", None)
    if register is not None:
        register()
