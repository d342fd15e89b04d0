"""Memory that ran out while a rank ran its micro-batches: what to tell, and whether to go on.

A rank of a replica of one rank communicates with nobody while it computes but for regrouping. Where
its memory runs out, it can throw its micro-batches away and take part in the rest of the iteration:
the others learn of it with the loss, and nobody updates. In a replica of several ranks the others
stand in a collective that this one will never enter; with NCCL that can only be ended by ending the
process, and the launcher ends the job.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import OutOfMemoryError
from megatron.hydraulis.runtime.forward_step import ForwardStep
from megatron.hydraulis.strategy import Scheme, Strategy

__all__ = [
    "CountedForwardStep",
    "LoneOutOfMemoryError",
    "OutOfMemory",
    "SharedOutOfMemoryError",
    "free_what_is_left",
    "is_out_of_memory",
    "what_to_go_on_with",
]

_BYTES_OF_MAXRSS = 1024
"""Unit of ``ru_maxrss`` on Linux."""
_NO_MEMORY_ON_CPU = "can't allocate memory"
"""What torch's CPU allocator says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """Where memory ran out."""

    rank: int
    strategy: str
    scheme: Scheme
    """Of the rank's replica."""
    context_size: int
    """Ranks that share the row: those of the wave's group where the scheme splits its cp ranks."""
    micro_batch: int
    """Of the rank's replica, from 0."""
    num_tokens: int
    """Of the row, over all ranks that share it, padding included."""
    measured_bytes: int
    """What this rank held when it asked for more."""

    @property
    def group(self) -> Scheme:
        """What the row costs and holds like."""
        return self.scheme.of_context_group(self.context_size)

    @property
    def text(self) -> str:
        """Who ran out of memory with what, for an error or the log."""
        where = f"{self.scheme}"
        if self.scheme.splits_cp:
            where = f"{self.context_size} cp ranks of {where}"
        return (
            f"rank {self.rank} has no memory for micro-batch {self.micro_batch} of strategy "
            f"'{self.strategy}', {self.num_tokens:,} tokens on {where}, with "
            f"{self.measured_bytes / 2**30:.2f} GiB taken by then"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch found no memory, on a device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError | OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY_ON_CPU in str(error)


class SharedOutOfMemoryError(OutOfMemoryError):
    """Raised on every rank alike, when all have done what they had to."""

    def __init__(self, own: OutOfMemory | None, num_ranks_without_memory: int) -> None:
        super().__init__(
            f"{num_ranks_without_memory} ranks, this one not among them, have no memory for a "
            "micro-batch"
            if own is None
            else own.text
        )
        self.own = own
        """What happened on this rank, if it is one of them."""


class LoneOutOfMemoryError(OutOfMemoryError):
    """Raised on one rank, for which the others of its replica wait in vain."""

    def __init__(self, own: OutOfMemory) -> None:
        super().__init__(
            f"{own.text}; the other {own.scheme.num_ranks - 1} ranks of the replica wait for it, "
            "so that this run cannot go on: start it again with a lower "
            "--max-tokens-per-micro-batch, or give the replica more ranks"
        )
        self.own = own


class CountedForwardStep:
    """A forward step that knows how many micro-batches it was called for."""

    def __init__(self, forward_step: ForwardStep) -> None:
        self._forward_step = forward_step
        self.num_begun = 0

    def __call__(
        self, data_iterator: Iterator[PackedBatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Any]:
        self.num_begun += 1
        return self._forward_step(data_iterator, model)


def what_to_go_on_with(
    error: BaseException,
    rank: int,
    strategy: Strategy,
    batches: Sequence[PackedBatch],
    num_begun: int,
) -> OutOfMemory:
    """What to tell the other ranks; raises where they cannot be told.

    Args:
        error: that memory ran out.
        rank: this one.
        strategy: at hand.
        batches: this rank's micro-batches.
        num_begun: how many of them a forward was begun for.

    Raises:
        LoneOutOfMemoryError: other ranks of the replica wait for this one.
    """
    mine = strategy.replica_of(rank)
    if mine is None or not batches:
        raise error
    index = max(0, num_begun - 1)
    found = OutOfMemory(
        rank=rank,
        strategy=strategy.name,
        scheme=mine.scheme,
        context_size=batches[index].context_size,
        micro_batch=index,
        num_tokens=batches[index].tokens.size(-1) * batches[index].context_size,
        measured_bytes=_bytes_taken(),
    )
    if mine.scheme.num_ranks > 1:
        raise LoneOutOfMemoryError(found) from error
    return found


def _bytes_taken() -> int:
    """By torch's allocator on the device; without one, the most that this process ever held."""
    if torch.cuda.is_available():
        return torch.cuda.memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _BYTES_OF_MAXRSS


def free_what_is_left() -> None:
    """Give memory back that an abandoned micro-batch held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
