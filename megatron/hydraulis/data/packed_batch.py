"""Several sequences in one THD row: the unit that a replica's schedule runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron.hydraulis.errors import DataError

__all__ = ["PackedBatch", "pack"]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch of n sequences, T tokens with padding.

    Segments are the stretches between neighbouring entries of ``cu_seqlens``: the sequences in
    their order, then the padding if there is any. No segment attends to another.
    """

    tokens: torch.Tensor
    """(1, T) int64 input token ids."""
    labels: torch.Tensor
    """(1, T) int64 token to predict at each place."""
    loss_mask: torch.Tensor
    """(1, T) float32, 1 where a token is trained, 0 on padding."""
    position_ids: torch.Tensor
    """(1, T) int64, from 0 in each segment."""
    cu_seqlens: torch.Tensor
    """(segments + 1,) int32 borders of the segments, 0 to T."""
    cu_seqlens_padded: torch.Tensor
    """(segments + 1,) int32 borders in memory; those of ``cu_seqlens``, since no sequence is padded
    by itself."""
    max_seqlen: int
    """Longest segment, padding included, in tokens."""
    num_tokens: int
    """Trained tokens."""
    num_padding: int
    """Padding tokens; ``T = num_tokens + num_padding``."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """The same batch with its tensors on ``device``."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return PackedBatch(
            tokens=moved(self.tokens),
            labels=moved(self.labels),
            loss_mask=moved(self.loss_mask),
            position_ids=moved(self.position_ids),
            cu_seqlens=moved(self.cu_seqlens),
            cu_seqlens_padded=moved(self.cu_seqlens_padded),
            max_seqlen=self.max_seqlen,
            num_tokens=self.num_tokens,
            num_padding=self.num_padding,
        )


def pack(sequences: Sequence[npt.NDArray[np.int64]], pad_multiple: int = 1) -> PackedBatch:
    """Lay sequences one behind the other and pad the row.

    Args:
        sequences: (length + 1,) token ids each, as ``Corpus.tokens`` gives them.
        pad_multiple: T is rounded up to a multiple of it (tensor and context parallelism divide
            the row).

    Raises:
        DataError: no sequence, or one of fewer than two tokens.
        ValueError: a ``pad_multiple`` below 1.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple is at least 1 but is {pad_multiple}")
    if not sequences:
        raise DataError("a micro-batch holds at least 1 sequence but was given 0")
    lengths = [len(sequence) - 1 for sequence in sequences]
    if min(lengths) < 1:
        raise DataError(
            f"a sequence needs 2 tokens, an input and its label, but number "
            f"{lengths.index(min(lengths))} of the micro-batch has {min(lengths) + 1}"
        )
    num_tokens = sum(lengths)
    num_padding = -num_tokens % pad_multiple
    total = num_tokens + num_padding
    segments = [*lengths, num_padding] if num_padding else lengths

    tokens = np.zeros(total, dtype=np.int64)
    labels = np.zeros(total, dtype=np.int64)
    loss_mask = np.zeros(total, dtype=np.float32)
    np.concatenate([sequence[:-1] for sequence in sequences], out=tokens[:num_tokens])
    np.concatenate([sequence[1:] for sequence in sequences], out=labels[:num_tokens])
    loss_mask[:num_tokens] = 1.0
    cu_seqlens = torch.from_numpy(np.cumsum([0, *segments], dtype=np.int32))
    return PackedBatch(
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        loss_mask=torch.from_numpy(loss_mask)[None],
        position_ids=torch.from_numpy(
            np.concatenate([np.arange(length, dtype=np.int64) for length in segments])
        )[None],
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens,
        max_seqlen=max(segments),
        num_tokens=num_tokens,
        num_padding=num_padding,
    )
