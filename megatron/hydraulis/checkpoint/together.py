"""Steps that all ranks take: when one fails, all learn why instead of waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from megatron.hydraulis.errors import CheckpointError, HydraulisError

__all__ = ["agreed_problems", "on_all_ranks", "on_rank_0"]


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
    failure: tuple[type[HydraulisError], str] | None = None
    try:
        result = action()
    except HydraulisError as error:
        failure = (type(error), str(error))
    except OSError as error:
        name = f" {error.filename}" if error.filename else ""
        failure = (CheckpointError, f"{what}:{name} {error.strerror or error}")
    except Exception as error:
        failure = (CheckpointError, f"{what}: {type(error).__name__}: {error}")
    failures: list[tuple[type[HydraulisError], str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for rank, found in enumerate(failures):
        if found is not None:
            kind, message = found
            if kind is CheckpointError and message.startswith(what):
                message = f"{message} (rank {rank}); make room or correct it, then start again"
            raise kind(message)
    return result  # type: ignore[return-value]


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
