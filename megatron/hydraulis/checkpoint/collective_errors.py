"""Steps of all ranks: if one rank fails, all raise its error instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron.hydraulis.errors import Failure, HydraulisError, failure_of, raise_first
from megatron.hydraulis.runtime.process_groups import of_all_ranks


def on_all_ranks[T](action: Callable[[], T], what: str) -> T:
    """Collective: run it on every rank; if it fails on any, raise on all.

    Args:
        action: must not contain collectives.
        what: start of the error's message, such as "iteration 4 cannot be saved to DIR".

    Raises:
        HydraulisError: with the class of the first failing rank's error if it is one of ours,
            else CheckpointError. On the failing rank that error is its cause.
    """
    result: T | None = None
    failure: Failure | None = None
    cause: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure, cause = failure_of(error, what), error
    try:
        raise_first(of_all_ranks(failure), what)
    except HydraulisError as error:
        raise error from cause
    return result  # type: ignore[return-value]


def on_rank_0[T](action: Callable[[], T], what: str) -> T:
    """Collective: run it on rank 0 and return its result, or raise its error, on all ranks."""
    results: list[T | None] = [None]

    def run() -> None:
        if dist.get_rank() == 0:
            results[0] = action()

    on_all_ranks(run, what)
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]


def agreed_problems(problems: Sequence[str]) -> list[str]:
    """Collective: the problems found by any rank, each once."""
    return sorted({problem for found in of_all_ranks(list(problems)) for problem in found})
