"""Several sequences in one THD row: the unit that a replica's schedule runs."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.hydraulis.data.context_split import local_stretches, row_segments
from megatron.hydraulis.errors import DataError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["PackedBatch", "pack"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch as one rank holds it.

    The *row* is the whole micro-batch, R tokens with padding. Segments are the stretches between
    neighbouring entries of ``cu_seqlens_padded``: the sequences in their order, then padding if
    there is any. No segment attends to another. The ranks of a context-parallel group of size c
    hold T = R / c tokens each, two chunks of every segment (`context_split`); a rank without such a
    group holds the row, T = R. What describes tokens is of the rank's part; what describes
    segments is of the whole row and equal on all ranks of the group.
    """

    tokens: torch.Tensor
    """(1, T) int64 input token ids; 0 on padding."""
    labels: torch.Tensor
    """(1, T) int64 token to predict at each place; 0 on padding."""
    loss_mask: torch.Tensor
    """(1, T) float32, 1 where a token is trained, 0 on padding."""
    position_ids: torch.Tensor
    """(1, T) int64 place in the sequence, from 0; 0 on padding, which may be longer than any
    sequence and than what a model has positions for."""
    cu_seqlens: torch.Tensor
    """(segments + 1,) int32 true lengths of the segments, added up from 0."""
    cu_seqlens_padded: torch.Tensor
    """(segments + 1,) int32 borders of the segments in the row, 0 to R. The padding behind a
    sequence is the difference to ``cu_seqlens``; without context parallelism there is none."""
    segment_lengths: tuple[int, ...]
    """Lengths of the segments of the row, padding included, in tokens: the steps of
    ``cu_seqlens_padded``, known on the host so that nobody has to read them from a device."""
    max_seqlen: int
    """The longest of them."""
    num_tokens: int
    """Trained tokens of this rank's part: over the ranks of a group they add up to those of the
    sequences."""
    num_padding: int
    """Padding tokens of this rank's part; ``T = num_tokens + num_padding``."""
    sequence_lengths: tuple[int, ...] = ()
    """Tokens of every sequence of the row, in their order, without padding."""
    context_size: int = 1
    """Ranks of the context-parallel group, c."""
    context_rank: int = 0
    """This rank's place in it."""
    context_group: "ProcessGroup | None" = None
    """The group itself, for the model; None where ``context_size`` is 1. See `in_group`."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """The same batch with its tensors on ``device``."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> "PackedBatch":
        """The same batch in page-locked memory, from which copies to a GPU can be asynchronous.

        Needs CUDA. torch's allocator keeps the memory until copies that were begun have ended.
        """
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch":
        """A tensor that several fields share stays one."""
        changed: dict[int, torch.Tensor] = {}
        values: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                if id(value) not in changed:
                    changed[id(value)] = change(value)
                values[field.name] = changed[id(value)]
        return dataclasses.replace(self, **values)

    def in_group(self, group: "ProcessGroup | None") -> "PackedBatch":
        """The same batch, to be run in a context-parallel group.

        Args:
            group: of ``context_size`` ranks, this one at ``context_rank``; None only for size 1.

        Raises:
            DataError: the batch was cut for another group.
        """
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        if (size, rank) != (self.context_size, self.context_rank):
            raise DataError(
                f"a pack cut for rank {self.context_rank} of {self.context_size} was given the "
                f"context-parallel group of rank {rank} of {size}; pack it for the group it runs in"
            )
        return dataclasses.replace(self, context_group=group if size > 1 else None)


def pack(
    sequences: Sequence[npt.NDArray[np.int64]],
    pad_multiple: int = 1,
    *,
    context_size: int = 1,
    context_rank: int = 0,
    allow_empty: bool = False,
) -> PackedBatch:
    """Lay sequences one behind the other, pad, and take one context rank's part.

    With a context-parallel group every sequence is padded to a multiple of 2 · ``context_size``,
    and the row to one of ``pad_multiple`` · 2 · ``context_size``; without, only the row is, to one
    of ``pad_multiple``. Just the rank's own part is built.

    Args:
        sequences: (length + 1,) token ids each, as ``Corpus.tokens`` gives them; those of the whole
            group, equal on all its ranks.
        pad_multiple: T is a multiple of it (tensor parallelism divides a rank's part).
        context_size: ranks of the context-parallel group that shares the row.
        context_rank: this rank's place in it.
        allow_empty: whether no sequence is an ordinary case: it gives the shortest row there is,
            all padding, for a group of a wave that has nothing to do but must keep in step.

    Raises:
        DataError: no sequence, unless allowed, or one of fewer than two tokens.
        ValueError: a ``pad_multiple`` or ``context_size`` below 1, or a ``context_rank`` outside.
    """
    if not sequences and not allow_empty:
        raise DataError("a micro-batch holds at least 1 sequence but was given 0")
    lengths = [len(sequence) - 1 for sequence in sequences]
    if lengths and min(lengths) < 1:
        raise DataError(
            f"a sequence needs 2 tokens, an input and its label, but number "
            f"{lengths.index(min(lengths))} of the micro-batch has {min(lengths) + 1}"
        )
    segments, padded = row_segments(lengths, pad_multiple=pad_multiple, context_size=context_size)
    num_local = sum(padded) // context_size
    tokens = np.zeros(num_local, dtype=np.int64)
    labels = np.zeros(num_local, dtype=np.int64)
    loss_mask = np.zeros(num_local, dtype=np.float32)
    position_ids = np.zeros(num_local, dtype=np.int64)
    steps = np.arange(max(lengths, default=0), dtype=np.int64)
    begin = 0
    for segment, (length, padded_length) in enumerate(zip(segments, padded, strict=True)):
        for start, stop in local_stretches(padded_length, context_size, context_rank):
            end = max(start, min(stop, length))
            part = slice(begin, begin + end - start)
            if segment < len(sequences):
                position_ids[part] = steps[start:end]
                tokens[part] = sequences[segment][start:end]
                labels[part] = sequences[segment][start + 1 : end + 1]
                loss_mask[part] = 1.0
            begin += stop - start
    num_tokens = int(np.count_nonzero(loss_mask))
    borders = np.cumsum([0, *padded], dtype=np.int32)
    cu_seqlens_padded = torch.from_numpy(borders)
    return PackedBatch(
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        loss_mask=torch.from_numpy(loss_mask)[None],
        position_ids=torch.from_numpy(position_ids)[None],
        cu_seqlens=(
            cu_seqlens_padded
            if segments == padded
            else torch.from_numpy(np.cumsum([0, *segments], dtype=np.int32))
        ),
        cu_seqlens_padded=cu_seqlens_padded,
        segment_lengths=tuple(padded),
        max_seqlen=max(padded),
        num_tokens=num_tokens,
        num_padding=num_local - num_tokens,
        sequence_lengths=tuple(lengths),
        context_size=context_size,
        context_rank=context_rank,
    )
