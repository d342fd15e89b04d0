"""How a context-parallel group shares a packed row: each rank has two chunks of every sequence.

Every sequence is padded to a multiple of 2·c tokens, c being the size of the group, and cut into
2·c chunks of equal length. Context rank r holds chunks r and 2·c−1−r ("zigzag"): a query chunk
attends to what lies before it, so an early and a late chunk together are the same causal work on
every rank. It is the form that Transformer Engine and Megatron expect of packed (THD) rows. With
c = 1 nothing is cut and no sequence is padded.

Ints and numpy arrays only: the layout of a row does not depend on where its tokens are.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = [
    "chunk_multiple",
    "gathered_places",
    "local_places",
    "local_stretches",
    "padded_length",
    "row_segments",
    "zigzag_chunks",
]

Places = npt.NDArray[np.int64]


def chunk_multiple(context_size: int) -> int:
    """Padded sequences have a multiple of this many tokens: 2·c, or 1 if c is 1.

    Raises:
        ValueError: a size below 1.
    """
    if context_size < 1:
        raise ValueError(f"context_size is at least 1 but is {context_size}")
    return 1 if context_size == 1 else 2 * context_size


def padded_length(length: int, context_size: int) -> int:
    """Number of tokens of a sequence in the row of a group of that size."""
    multiple = chunk_multiple(context_size)
    return -(-length // multiple) * multiple


def row_segments(
    lengths: Sequence[int], *, pad_multiple: int = 1, context_size: int = 1
) -> tuple[list[int], list[int]]:
    """The segments of a row: the sequences in their order, then padding if needed.

    Args:
        lengths: of the sequences, in tokens; none for a row of padding alone.
        pad_multiple: tensor parallel ranks that share each context rank's part; every part is a
            multiple of it.
        context_size: ranks of the context-parallel group.

    Returns:
        True and padded length of every segment, in tokens. The padded ones add up to a multiple of
        ``pad_multiple`` · `chunk_multiple`, and to no less than that. Padding is as long as it is
        in both.

    Raises:
        ValueError: a ``pad_multiple`` or ``context_size`` below 1.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple is at least 1 but is {pad_multiple}")
    row_multiple = pad_multiple * chunk_multiple(context_size)
    padded = [padded_length(length, context_size) for length in lengths]
    num_tokens = sum(padded)
    num_padding = -num_tokens % row_multiple if num_tokens else row_multiple
    tail = [num_padding] if num_padding else []
    return [*lengths, *tail], [*padded, *tail]


def zigzag_chunks(context_size: int, context_rank: int) -> tuple[int, int]:
    """The two of 2·c chunks of a segment that a context rank holds, the earlier one first.

    Raises:
        ValueError: a rank that is not in the group.
    """
    if not 0 <= context_rank < context_size:
        raise ValueError(
            f"context_rank {context_rank} is not in a group of {context_size}; ranks count from 0"
        )
    return context_rank, 2 * context_size - 1 - context_rank


def local_stretches(
    padded_length: int, context_size: int, context_rank: int
) -> list[tuple[int, int]]:
    """A context rank's part of one segment: ranges ``[start, stop)`` in it, in order.

    Args:
        padded_length: of the segment, a multiple of `chunk_multiple`.
        context_size: ranks of the group.
        context_rank: this rank's place in it.
    """
    first, last = zigzag_chunks(context_size, context_rank)
    if context_size == 1:
        return [(0, padded_length)]
    chunk = padded_length // (2 * context_size)
    return [(first * chunk, (first + 1) * chunk), (last * chunk, (last + 1) * chunk)]


def local_places(padded_lengths: Sequence[int], context_size: int, context_rank: int) -> Places:
    """Positions, in the whole row, of the tokens of a context rank's part.

    Args:
        padded_lengths: of all segments, each a multiple of `chunk_multiple`.
        context_size: ranks of the group.
        context_rank: this rank's place in it.

    Returns:
        (row / c,) positions in the row, in the order in which the rank holds its tokens: segment by
        segment, the earlier chunk before the later one.
    """
    chunks = zigzag_chunks(context_size, context_rank)
    lengths = np.asarray(padded_lengths, dtype=np.int64)
    if context_size == 1:
        return np.arange(lengths.sum(), dtype=np.int64)
    chunk_lengths = lengths // (2 * context_size)
    starts = np.cumsum(lengths) - lengths
    begins = starts[:, None] + chunk_lengths[:, None] * np.array(chunks, dtype=np.int64)
    return _ranges(begins.ravel(), np.repeat(chunk_lengths, 2))


def gathered_places(padded_lengths: Sequence[int], context_size: int) -> Places:
    """Positions, in the whole row, of the tokens of all parts, concatenated by rank.

    Returns:
        (row,) a permutation. ``row[gathered_places(...)]`` are the parts in rank order; its
        `argsort` puts parts in rank order back into the row's.
    """
    return np.concatenate(
        [local_places(padded_lengths, context_size, rank) for rank in range(context_size)]
    )


def _ranges(begins: Places, lengths: Places) -> Places:
    """``[begin, begin + length)`` of every pair, concatenated."""
    ends = np.cumsum(lengths)
    within = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64)
    return within + np.repeat(begins - (ends - lengths), lengths)
