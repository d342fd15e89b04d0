"""Steps of all ranks: if one rank fails, all raise its error instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron.hydraulis.errors import CheckpointError, HydraulisError, why_not_written
from megatron.hydraulis.runtime.process_groups import of_all_ranks

Failure = tuple[type[HydraulisError], str]
"""Class and message of an error, to be raised on other ranks too."""


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


def failure_of(error: Exception, what: str) -> Failure:
    """Class and message that other ranks are sent; see `on_all_ranks`."""
    if isinstance(error, HydraulisError):
        return type(error), str(error)
    if isinstance(error, OSError):
        name = f" {error.filename}" if error.filename else ""
        reason = why_not_written(error, error.filename) if error.filename else error.strerror
        return CheckpointError, f"{what}:{name} {reason or error}"
    return CheckpointError, f"{what}: {type(error).__name__}: {error}"


def raise_first(failures: Sequence[Failure | None], what: str) -> None:
    """Raise the failure of the first rank that has one, and name the rank."""
    for rank, found in enumerate(failures):
        if found is not None:
            kind, message = found
            is_named = " (rank " in message  # by rank 0, for another rank
            if kind is CheckpointError and message.startswith(what) and not is_named:
                message = f"{message} (rank {rank}); make room or correct it, then start again"
            error = kind(message)
            error.is_shared = True
            raise error


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
