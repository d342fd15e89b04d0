"""Ranks of one gloo job, forked from this process, that work when they are called.

Several sets can exist at the same time: while one works, the others block on their pipes and take
no CPU.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from tests.support.forked_ranks import ForkedRanks

CALL_TIMEOUT_S = 180.0
"""For one call on all ranks; a hang ends the benchmark."""

Worker = Callable[[Any], Any]
"""What a rank holds between calls; a call is collective over the ranks of the set."""


class RankFailure(RuntimeError):
    """A rank raised, died or hung."""


class RankSet:
    """``num_ranks`` forked processes, each holding the result of its ``make_worker()``.

    Args:
        name: for messages.
        num_ranks: of the gloo job.
        make_worker: called once on each rank, inside the job; need not be picklable.
    """

    def __init__(self, name: str, num_ranks: int, make_worker: Callable[[], Worker]) -> None:
        self._name = name

        def serve(join: Callable[[], None], connection: Connection) -> None:
            try:
                join()
                worker = make_worker()
                connection.send((True, None))
                while True:
                    connection.send((True, worker(connection.recv())))
            except EOFError:
                os._exit(0)
            except BaseException:  # the parent shows it
                connection.send((False, traceback.format_exc()))
                os._exit(1)

        self._ranks = ForkedRanks(num_ranks, serve, timeout_s=CALL_TIMEOUT_S)
        self._answers()  # every worker is made

    def __enter__(self) -> RankSet:
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.close()

    def call(self, argument: Any) -> list[Any]:
        """``worker(argument)`` on every rank; the results by rank.

        Raises RankFailure with the report of the first rank that failed.
        """
        for connection in self._ranks.connections:
            connection.send(argument)
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = self._ranks.answers(CALL_TIMEOUT_S)
        if not answers.failures and not answers.missing:
            return [answers.results[rank] for rank in sorted(answers.results)]
        self._ranks.close()
        for rank, report in answers.failures.items():
            raise RankFailure(f"{self._name}: rank {rank} failed:\n{report}")
        raise RankFailure(
            f"{self._name}: ranks {answers.missing} did not answer within {CALL_TIMEOUT_S:.0f} s"
        )
