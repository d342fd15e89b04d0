"""Ranks of one gloo job, forked from this process, that do something when told and else wait.

Several sets live side by side: while one works, the others block on their pipes and take no CPU.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol

from tests.support.forked_ranks import ForkedRanks

CALL_TIMEOUT_S = 180.0
"""For one call on all ranks; a hang ends the benchmark."""


class RankFailure(RuntimeError):
    """A rank raised, died or hung."""


class Worker(Protocol):
    """What a rank holds between calls."""

    def __call__(self, argument: Any, /) -> Any:
        """One piece of work; collective over the ranks of the set."""


class RankSet:
    """``num_ranks`` forked processes, each holding what ``make_worker()`` gave it.

    Args:
        name: for messages.
        num_ranks: of the gloo job.
        make_worker: called once on each rank, inside the job; need not be picklable.
    """

    def __init__(self, name: str, num_ranks: int, make_worker: Callable[[], Worker]) -> None:
        self._name = name

        def serve(join: Callable[[], None], connection: Connection) -> None:
            _serve(join, connection, make_worker)

        self._ranks = ForkedRanks(num_ranks, serve, timeout_s=CALL_TIMEOUT_S)
        self._answers()  # every worker is made

    def __enter__(self) -> RankSet:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def call(self, argument: Any) -> list[Any]:
        """``worker(argument)`` on every rank; the results by rank.

        Raises:
            RankFailure: with the traceback of the first rank that failed.
        """
        for connection in self._ranks.connections:
            connection.send(argument)
        return self._answers()

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _answers(self) -> list[Any]:
        deadline_s = time.monotonic() + CALL_TIMEOUT_S
        waiting = {connection: rank for rank, connection in enumerate(self._ranks.connections)}
        results: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                self.close()
                raise RankFailure(
                    f"{self._name}: ranks {sorted(waiting.values())} did not answer within "
                    f"{CALL_TIMEOUT_S:.0f} s"
                )
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except EOFError:
                    succeeded, value = False, "the process died"
                if not succeeded:
                    self.close()
                    raise RankFailure(f"{self._name}: rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in sorted(results)]


def _serve(
    join: Callable[[], None], connection: Connection, make_worker: Callable[[], Worker]
) -> None:
    try:
        join()
        worker = make_worker()
        connection.send((True, None))
        while True:
            argument = connection.recv()
            connection.send((True, worker(argument)))
    except EOFError:
        os._exit(0)
    except BaseException:  # the parent shows it
        connection.send((False, traceback.format_exc()))
        os._exit(1)
