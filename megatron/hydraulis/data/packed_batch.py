"""Several sequences in one THD row: the unit that a replica's schedule runs.

The ranks of a context-parallel group share a row. Every sequence is padded to a multiple of 2·c
tokens, c being the size of the group, and cut into 2·c chunks of equal length. Context rank r holds
chunks r and 2·c−1−r ("zigzag"): a query chunk attends to what lies before it, so an early and a
late chunk together are the same causal work on every rank. Transformer Engine and Megatron expect
packed (THD) rows in this form. With c = 1 nothing is cut and no sequence is padded.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from megatron.hydraulis.data.dataset import Weights
from megatron.hydraulis.errors import DataError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PredictedTokens:
    """What a layer of multi-token prediction takes of a row: (1, T) each, 0 where the sequence ends
    before the label, and on padding.

    Place t of layer k, counted from 0, sees token t + k + 1 of the sequence and predicts token
    t + k + 2, whose weight it has.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor

    def changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PredictedTokens":
        """The same of changed tensors."""
        return PredictedTokens(change(self.tokens), change(self.labels), change(self.weights))


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch as one rank holds it.

    The *row* is the whole micro-batch, R tokens with padding. Segments are the stretches between
    neighbouring entries of ``cu_seqlens_padded``: the sequences in their order, then padding if
    there is any. No segment attends to another. The ranks of a context-parallel group of size c
    hold T = R / c tokens each; without such a group T = R. Fields about tokens describe the rank's
    part; fields about segments describe the whole row and are equal on all ranks of the group.
    """

    tokens: torch.Tensor
    """(1, T) int64 input token ids; 0 on padding."""
    labels: torch.Tensor
    """(1, T) int64 token to predict at each place; 0 on padding."""
    weights: torch.Tensor
    """(1, T) float32 weight, at least 0, of predicting the label at each place; 0 on padding."""
    position_ids: torch.Tensor
    """(1, T) int64 place in the sequence, from 0; 0 on padding, which may be longer than any
    sequence and than what a model has positions for."""
    cu_seqlens: torch.Tensor
    """(segments + 1,) int32 cumulative true lengths of the segments, from 0."""
    cu_seqlens_padded: torch.Tensor
    """(segments + 1,) int32 borders of the segments in the row, 0 to R. They differ from
    ``cu_seqlens`` by the padding of sequences, which only context parallelism needs."""
    segment_lengths: tuple[int, ...]
    """Lengths of the segments in tokens, padding included: the differences of
    ``cu_seqlens_padded``, kept on the host so that nobody has to read them from a device."""
    max_seqlen: int
    """The longest of them."""
    num_tokens: int
    """Labels in this rank's part, trained or not; their sum over the group is the length of the
    sequences."""
    trained_tokens: int
    """Labels among them with a weight above 0."""
    has_fractional_weights: bool
    """Whether one of this part's weights is neither 0 nor 1."""
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
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """(labels, ...) tensors for a user's loss, about the labels that `token_places` lists."""
    predictions: tuple[PredictedTokens, ...] = ()
    """Of the layers of multi-token prediction, in their order."""

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "PackedBatch":
        """The same batch with its tensors on ``device``."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pinned(self) -> "PackedBatch":
        """The same batch in page-locked memory, from which copies to a GPU can be asynchronous.

        Needs CUDA. torch's allocator keeps the memory until copies that were begun have ended.
        """
        return self._with_tensors(torch.Tensor.pin_memory)

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "PackedBatch":
        """Changes all tensors; a tensor that several fields share is changed once."""
        changed: dict[int, torch.Tensor] = {}
        inputs = {name: change(value) for name, value in self.inputs.items()}
        predictions = tuple(each.changed(change) for each in self.predictions)
        values: dict[str, Any] = {"inputs": inputs, "predictions": predictions}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                if id(value) not in changed:
                    changed[id(value)] = change(value)
                values[name] = changed[id(value)]
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

    def with_inputs(self, inputs: Mapping[str, Sequence[torch.Tensor]]) -> "PackedBatch":
        """The same batch with `inputs`.

        Args:
            inputs: for each sequence of the row a tensor (length + 1, ...), about its tokens; that
                of the first token is ignored.
        """
        _, numbers, positions = token_places(self)
        starts = np.cumsum([0, *(length + 1 for length in self.sequence_lengths)])[numbers]
        labels = torch.from_numpy(starts + positions + 1)
        device = self.tokens.device
        cut = {key: torch.cat(list(each)).cpu()[labels].to(device) for key, each in inputs.items()}
        return dataclasses.replace(self, inputs=cut)


def token_places(batch: PackedBatch) -> tuple[Places, Places, Places]:
    """Places of the sequences' tokens in a rank's part of a row; see `part_places`."""
    return part_places(
        batch.sequence_lengths, batch.segment_lengths, batch.context_size, batch.context_rank
    )


def part_places(
    lengths: Sequence[int], padded: Sequence[int], context_size: int, context_rank: int
) -> tuple[Places, Places, Places]:
    """(tokens,) places in the rank's part, numbers of sequences in the row, places in them.

    Args:
        padded: of the segments: the padded sequences, then padding if there is any.
        context_rank: this rank's place among them.
    """
    found: list[Places] = [np.zeros((3, 0), dtype=np.int64)]
    begin = 0
    for number, (length, padded_length) in enumerate(zip(lengths, padded, strict=False)):
        for start, stop in local_stretches(padded_length, context_size, context_rank):
            positions = np.arange(start, max(start, min(stop, length)))
            shifted = positions - start + begin
            found.append(np.stack([shifted, np.full_like(positions, number), positions]))
            begin += stop - start
    places, numbers, in_sequence = np.concatenate(found, axis=1)
    return places, numbers, in_sequence


def pack(
    sequences: Sequence[npt.NDArray[np.int64]],
    pad_multiple: int = 1,
    *,
    weights: Sequence[Weights] | None = None,
    context_size: int = 1,
    context_rank: int = 0,
    row_tokens: int = 1,
    allow_empty: bool = False,
    num_predictions: int = 0,
) -> PackedBatch:
    """Concatenate sequences, pad, and build one context rank's part of the row.

    Args:
        sequences: (length + 1,) token ids each, as ``Corpus.tokens`` gives them; those of the whole
            group, equal on all its ranks.
        pad_multiple: T is a multiple of it (tensor parallelism divides a rank's part).
        weights: (length + 1,) for each sequence, that of predicting each of its tokens, the first
            one ignored; `checked_weights` has accepted them. None: 1 for every token.
        context_rank: this rank's place in it.
        row_tokens: of the row at least.
        allow_empty: whether there may be no sequence. The result is a row of padding, for a group
            of a wave that has no work but must keep in step.
        num_predictions: layers of multi-token prediction.

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
    segments, padded = row_segments(
        lengths, pad_multiple=pad_multiple, context_size=context_size, row_tokens=row_tokens
    )
    num_local = sum(padded) // context_size
    tokens, labels, position_ids = (np.zeros(num_local, dtype=np.int64) for _ in range(3))
    local_weights = np.zeros(num_local, dtype=np.float32)
    shifted = [
        (np.zeros_like(tokens), np.zeros_like(labels), np.zeros_like(local_weights))
        for _ in range(num_predictions)
    ]
    places, numbers, positions = part_places(lengths, padded, context_size, context_rank)
    if len(places):
        given = np.cumsum([0, *(length + 1 for length in lengths)])[numbers] + positions
        left = np.array(lengths)[numbers] - positions  # tokens of the sequence behind the place
        row = np.concatenate(sequences)
        row_weights = np.ones(len(row), np.float32) if weights is None else np.concatenate(weights)
        position_ids[places] = positions
        for ahead, found in enumerate([(tokens, labels, local_weights), *shifted]):
            is_inside = left > ahead
            at, source = places[is_inside], given[is_inside] + ahead
            # What the label at a place weighs: the weight is that of the next token.
            found[0][at], found[1][at] = row[source], row[source + 1]
            found[2][at] = row_weights[source + 1]
    num_tokens = len(places)
    cu_seqlens_padded = cu_seqlens = torch.from_numpy(np.cumsum([0, *padded], dtype=np.int32))
    if segments != padded:
        cu_seqlens = torch.from_numpy(np.cumsum([0, *segments], dtype=np.int32))
    return PackedBatch(
        tokens=torch.from_numpy(tokens)[None],
        labels=torch.from_numpy(labels)[None],
        weights=torch.from_numpy(local_weights)[None],
        position_ids=torch.from_numpy(position_ids)[None],
        cu_seqlens=cu_seqlens,
        cu_seqlens_padded=cu_seqlens_padded,
        segment_lengths=tuple(padded),
        max_seqlen=max(padded),
        num_tokens=num_tokens,
        trained_tokens=int(np.count_nonzero(local_weights)),
        has_fractional_weights=bool(np.any((local_weights != 0) & (local_weights != 1))),
        num_padding=num_local - num_tokens,
        sequence_lengths=tuple(lengths),
        context_size=context_size,
        context_rank=context_rank,
        predictions=tuple(
            PredictedTokens(*(torch.from_numpy(each)[None] for each in arrays))
            for arrays in shifted
        ),
    )


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
    lengths: Sequence[int], *, pad_multiple: int = 1, context_size: int = 1, row_tokens: int = 1
) -> tuple[list[int], list[int]]:
    """The segments of a row: the sequences in their order, then padding if needed.

    Args:
        lengths: of the sequences, in tokens; none for a row of padding alone.
        pad_multiple: each context rank's part is a multiple of it.
        row_tokens: of the row at least, rounded up like the sequences.

    Returns:
        True and padded length of every segment, in tokens. The padded ones add up to a positive
        multiple of ``pad_multiple`` · `chunk_multiple`. The padding at the end has the same length
        in both.

    Raises:
        ValueError: a ``pad_multiple`` or ``context_size`` below 1.
    """
    if pad_multiple < 1:
        raise ValueError(f"pad_multiple is at least 1 but is {pad_multiple}")
    row_multiple = pad_multiple * chunk_multiple(context_size)
    padded = [padded_length(length, context_size) for length in lengths]
    num_tokens = sum(padded)
    num_padding = -(-max(num_tokens, row_tokens) // row_multiple) * row_multiple - num_tokens
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

    ``padded_length`` is that of the segment, a multiple of `chunk_multiple`.
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
        context_rank: this rank's place in it.

    Returns:
        (row / c,) positions in the row, in the order in which the rank holds its tokens: segment by
        segment, the earlier chunk before the later one.
    """
    chunks = np.array(zigzag_chunks(context_size, context_rank), dtype=np.int64)
    lengths = np.asarray(padded_lengths, dtype=np.int64)
    if context_size == 1:
        return np.arange(lengths.sum(), dtype=np.int64)
    # Two chunks of each segment: where they begin in the row, and where they end in the part.
    chunk_lengths = lengths // (2 * context_size)
    begins = (np.cumsum(lengths) - lengths)[:, None] + chunk_lengths[:, None] * chunks
    lengths_twice = np.repeat(chunk_lengths, 2)
    local_ends = np.cumsum(lengths_twice)
    shifts = begins.ravel() - (local_ends - lengths_twice)
    return np.arange(lengths_twice.sum(), dtype=np.int64) + np.repeat(shifts, lengths_twice)


def gathered_places(padded_lengths: Sequence[int], context_size: int) -> Places:
    """Positions, in the whole row, of the tokens of all parts, concatenated by rank.

    Returns:
        (row,) a permutation. ``row[gathered_places(...)]`` are the parts in rank order; its
        `argsort` restores the order of the row.
    """
    return np.concatenate(
        [local_places(padded_lengths, context_size, rank) for rank in range(context_size)]
    )
