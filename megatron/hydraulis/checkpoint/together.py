"""Steps that all ranks take: when one fails, all learn why instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron.hydraulis.errors import CheckpointError, HydraulisError

__all__ = ["agreed_problems", "failure_of", "on_all_ranks", "on_rank_0", "raise_first"]

Failure = tuple[type[HydraulisError], str]
"""Class and message of an error, to be raised on other ranks too."""


def on_all_ranks[T](action: Callable[[], T], what: str) -> T:
    """Collective: run it on every rank; where it fails on some, all raise.

    Args:
        action: without collectives of its own.
        what: for the error, such as "saving iteration 4 to DIR".

    Raises:
        HydraulisError: of the class of the first failing rank's error where that is one of ours,
            else CheckpointError.
    """
    result: T | None = None
    failure: Failure | None = None
    try:
        result = action()
    except Exception as error:
        failure = failure_of(error, what)
    failures: list[Failure | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    raise_first(failures, what)
    return result  # type: ignore[return-value]


def failure_of(error: Exception, what: str) -> Failure:
    """What an error of one rank comes to; see `on_all_ranks`."""
    if isinstance(error, HydraulisError):
        return type(error), str(error)
    if isinstance(error, OSError):
        name = f" {error.filename}" if error.filename else ""
        return CheckpointError, f"{what}:{name} {error.strerror or error}"
    return CheckpointError, f"{what}: {type(error).__name__}: {error}"


def raise_first(failures: Sequence[Failure | None], what: str) -> None:
    """Raise the failure of the first rank that has one, and name the rank."""
    for rank, found in enumerate(failures):
        if found is not None:
            kind, message = found
            is_named = " (rank " in message  # where rank 0 tells what another one met
            if kind is CheckpointError and message.startswith(what) and not is_named:
                message = f"{message} (rank {rank}); make room or correct it, then start again"
            raise kind(message)


def on_rank_0[T](action: Callable[[], T], what: str) -> T:
    """Collective: run it on rank 0 and give all ranks its result, or its error as above."""
    results: list[T | None] = [None]

    def run() -> None:
        if dist.get_rank() == 0:
            results[0] = action()

    on_all_ranks(run, what)
    dist.broadcast_object_list(results, src=0)
    return results[0]  # type: ignore[return-value]


def agreed_problems(problems: Sequence[str]) -> list[str]:
    """Collective: what all ranks found, each once."""
    everyone: list[Sequence[str]] = [()] * dist.get_world_size()
    dist.all_gather_object(everyone, list(problems))
    return sorted({problem for found in everyone for problem in found})
