"""Core attention over a packed row that a context-parallel group holds in parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron.hydraulis.cost_model.context import choose_way
from megatron.hydraulis.data.context_split import gathered_places, local_stretches
from megatron.hydraulis.runtime.packed_attention import (
    SegmentAttention,
    once_a_row,
    segment_lengths,
)
from megatron.hydraulis.runtime.process_groups import to_device

QUERY_BLOCK = 512
"""Queries that attend at once, in tokens: the mask of a block is as high, and a block looks at no
more keys than half its height too many."""
MASK_QUANTUM = 16
"""Masks begin at a multiple of this in memory, in elements: CUDA's memory-efficient kernel reads 16
bytes at a time and refuses a mask that begins between."""


class ContextAttention(SegmentAttention):
    """`SegmentAttention` whose queries, keys and values are one context rank's part of the row.

    The group is that of the micro-batch, ``packed_seq_params.cp_group``, not the model's. Without
    one, or in a group of one rank, this is `SegmentAttention` bit by bit. How the ranks exchange is
    ``config.cp_comm_type``, see `context`. Between forward and backward a rank keeps no more
    than its part either way: what was gathered is gathered again.
    """

    takes_context_group = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Upstream hands the type to core attention only where the model's own cp is above 1.
        self.cp_comm_type: str = self.config.cp_comm_type or "auto"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend inside every sequence of the row. Collective over the micro-batch's group.

        Args:
            query: (T, heads, head size), this rank's tokens in the order of `local_places`.
            key: (T, query groups, head size), likewise.
            value: as ``key``.
            attention_mask: not used.
            packed_seq_params: borders of the whole row, the group, its size.

        Returns:
            (T, heads · head size).

        Raises:
            ConfigurationError: an all-to-all that the heads do not allow was asked for.
        """
        if packed_seq_params is None or context_size_of(packed_seq_params) == 1:
            return super().forward(
                query,
                key,
                value,
                attention_mask,
                attn_mask_type,
                attention_bias,
                packed_seq_params,
            )
        row = shared_row(packed_seq_params, query)
        way = choose_way(self.cp_comm_type, query.size(1), key.size(1), row.size)
        if way == "a2a":
            context = self._attend_to_share_of_heads(query, key, value, row)
        else:
            context = self._attend_to_gathered(query, key, value, row)
        return context.reshape(context.size(0), -1)

    def _attend_to_gathered(self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow) -> Any:
        part = torch.cat([key, value], dim=1)
        return attend_and_forget(
            lambda gathered: self._attend_by_blocks(query, gathered, row),
            gather_row(part, row),
            functools.partial(gathered_again, part.detach(), row),
        )

    def _attend_by_blocks(self, query: Tensor, keys_and_values: Tensor, row: SharedRow) -> Tensor:
        """Queries of this rank's part; (R, 2 · query groups, head size) keys beside values."""
        num_groups = keys_and_values.size(1) // 2
        # Split by segment first: the gradient of a slice is as large as what it was cut from.
        segments = keys_and_values.split(row.lengths)
        attended = []
        for block, q in zip(row.blocks, query.split(row.block_lengths), strict=True):
            attendable = segments[block.segment][: block.num_keys].transpose(0, 1).unsqueeze(0)
            k, v = attendable.split(num_groups, dim=1)
            is_square = block.num_queries == block.num_keys
            context = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k,
                v,
                attn_mask=None if is_square else row.mask_of(block),
                is_causal=is_square,
                scale=self.softmax_scale,
                enable_gqa=q.size(1) != num_groups,
            )
            attended.append(context.squeeze(0).transpose(0, 1))
        return torch.cat(attended)

    def _attend_to_share_of_heads(
        self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow
    ) -> Any:
        num_groups = key.size(1)
        if num_groups < row.size:
            num_copies = row.size // num_groups
            key = key.repeat_interleave(num_copies, dim=1)
            value = value.repeat_interleave(num_copies, dim=1)
        # Shares of one rank beside each other, so that one collective moves all three.
        shares = [each.unflatten(1, (row.size, -1)) for each in (query, key, value)]
        num_heads = [share.size(2) for share in shares]
        exchanged: Tensor = _TokensForHeads.apply(torch.cat(shares, dim=2), row)
        q, k, v = exchanged.split(num_heads, dim=1)
        return _HeadsForTokens.apply(self._attend_to_row(q, k, v, row), row).flatten(1, 2)

    def _attend_to_row(self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow) -> Tensor:
        """All tokens of the row, some of its heads."""
        return self.attend(query, key, value, row.lengths)


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Neighbouring queries of this rank, which attend to the beginning of their segment."""

    segment: int
    num_queries: int
    num_keys: int
    """Up to the last query, itself included."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """Neighbouring queries of this rank as far as they are of one segment, each with the keys up to
    its end."""

    places: list[tuple[int, int, int]]
    """Segment, and where in it the queries begin and end."""
    num_queries: list[int]
    num_keys: list[int]
    query_borders: Tensor
    """(stretches + 1,) int32: the numbers of queries added up from 0."""
    key_borders: Tensor
    """Likewise of keys."""


@dataclass(frozen=True, eq=False)
class SharedRow:
    """What every layer has to know of a row that a group shares; found out once a micro-batch."""

    group: dist.ProcessGroup
    size: int
    """Ranks of the group, c."""
    lengths: tuple[int, ...]
    """Of the segments of the whole row, padding included, in tokens."""
    borders: Tensor
    """(segments + 1,) int32: these lengths added up from 0."""
    by_place: Tensor
    """(R,) int64: takes parts laid out by rank into the order of the row."""
    by_rank: Tensor
    """(R,) int64: takes the row into parts laid out by rank."""
    blocks: list[QueryBlock]
    """This rank's tokens in their order."""
    block_lengths: list[int]
    dtype: torch.dtype
    """Of the queries."""

    @functools.cached_property
    def mask(self) -> Tensor:
        """0 where attended and −∞ elsewhere: the last query attends to all keys, each earlier one
        to one less. Those of blocks are cut out of it, and it has a few rows and columns more than
        the largest: moved up the diagonal, a cut is the same. In the type of the queries: of any
        other, every block would keep a copy. Made at first use: kernels that attend to a row at
        once need none."""
        num_rows = max(block.num_queries for block in self.blocks) + MASK_QUANTUM - 1
        longest = max(block.num_keys for block in self.blocks)
        num_columns = math.ceil(longest / MASK_QUANTUM) * MASK_QUANTUM
        device = self.by_rank.device
        mask = torch.full((num_rows, num_columns), -math.inf, dtype=self.dtype, device=device)
        return mask.triu_(num_columns - num_rows + 1)

    @functools.cached_property
    def stretches(self) -> Stretches:
        """Made at first use, as the mask."""
        places = [
            (segment, start, stop)
            for segment, length in enumerate(self.lengths)
            for start, stop in local_stretches(length, self.size, self.group.rank())
        ]
        num_queries = [stop - start for _, start, stop in places]
        num_keys = [stop for _, _, stop in places]
        sums = np.cumsum([[0, *num_queries], [0, *num_keys]], axis=1, dtype=np.int32)
        borders = to_device(torch.from_numpy(sums), self.by_rank.device)
        return Stretches(places, num_queries, num_keys, borders[0], borders[1])

    def mask_of(self, block: QueryBlock) -> Tensor:
        """(queries, keys), a view that begins at a multiple of `MASK_QUANTUM`."""
        num_rows, num_columns = self.mask.shape
        column = num_columns - block.num_keys
        up = column % MASK_QUANTUM
        row, column = num_rows - block.num_queries - up, column - up
        return self.mask[row : row + block.num_queries, column : column + block.num_keys]


def context_size_of(packed_seq_params: PackedSeqParams) -> int:
    """Ranks that share the row; 1 where its description names no group."""
    group = packed_seq_params.cp_group
    return 1 if group is None else int(group.size())


def shared_row(packed_seq_params: PackedSeqParams, query: Tensor) -> SharedRow:
    """What layers need to know of a row, kept with its description.

    Args:
        packed_seq_params: with a ``cp_group`` of more than one rank.
        query: of any layer; tells device and type.
    """
    return once_a_row(
        packed_seq_params,
        ("shared row", query.dtype),
        lambda: _shared_row(packed_seq_params, query),
    )


def _shared_row(packed_seq_params: PackedSeqParams, query: Tensor) -> SharedRow:
    lengths = segment_lengths(packed_seq_params)
    group = packed_seq_params.cp_group
    size = group.size()
    blocks = [
        QueryBlock(segment, min(QUERY_BLOCK, stop - begin), min(begin + QUERY_BLOCK, stop))
        for segment, length in enumerate(lengths)
        for start, stop in local_stretches(length, size, group.rank())
        for begin in range(start, stop, QUERY_BLOCK)
    ]
    by_rank = gathered_places(lengths, size)
    places = to_device(torch.from_numpy(np.stack([by_rank, by_rank.argsort()])), query.device)
    borders = packed_seq_params.cu_seqlens_q_padded
    return SharedRow(
        group=group,
        size=size,
        lengths=lengths,
        borders=packed_seq_params.cu_seqlens_q if borders is None else borders,
        by_place=places[1],
        by_rank=places[0],
        blocks=blocks,
        block_lengths=[block.num_queries for block in blocks],
        dtype=query.dtype,
    )


def gather_row(part: Tensor, row: SharedRow) -> Tensor:
    """(T, …) of every rank into (R, …) in the order of the row. Collective, also in the backward,
    where gradients are added up and cut."""
    gathered: Tensor = _Gather.apply(part, row)
    return gathered


class _Gather(Function):
    """(T, …) of every rank into (R, …) in the order of the row; gradients are added up and cut."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, row: SharedRow) -> Tensor:
        ctx.row = row
        return gathered_again(part, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        row: SharedRow = ctx.row
        part = gradient.new_empty(gradient.size(0) // row.size, *gradient.shape[1:])
        dist.reduce_scatter_tensor(part, gradient.index_select(0, row.by_rank), group=row.group)
        return part, None


def gathered_again(part: Tensor, row: SharedRow) -> Tensor:
    """As `gather_row`, for nothing but the values. Collective."""
    parts = part.new_empty(row.size * part.size(0), *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous(), group=row.group)
    return parts.index_select(0, row.by_place)


@dataclass(frozen=True, slots=True)
class _View:
    """Where a forgotten tensor lay in what was gathered."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def attend_and_forget(
    attend: Callable[[Tensor], Tensor], gathered: Tensor, again: Callable[[], Tensor]
) -> Any:
    """Attention that keeps nothing of what was gathered between forward and backward.

    Args:
        attend: to keys and values of the row; what autograd would keep of them is forgotten.
        gathered: these keys and values.
        again: makes them anew in the backward, once. Collective, so it runs at a fixed place.
    """
    memory = _GatheredAgain(gathered, again)
    gathered = _BackwardEnds.apply(gathered, memory)
    with torch.autograd.graph.saved_tensors_hooks(memory.forget, memory.recall):
        attended = attend(gathered)
    return _BackwardBegins.apply(attended, memory)


class _GatheredAgain:
    """Hooks that let the backward gather anew what the forward had gathered, once for all blocks.

    It gathers at a fixed place, before the backward of any block: which of their inputs kernels
    keep differs from kernel to kernel and so from rank to rank, and a rank that gathered only when
    it is asked for one would leave the others of its group waiting.
    """

    def __init__(self, gathered: Tensor, again: Callable[[], Tensor]) -> None:
        self._address = gathered.untyped_storage().data_ptr()
        self._make = again
        self._again: Tensor | None = None

    def forget(self, saved: Tensor) -> Tensor | _View:
        """What autograd is to keep instead of a tensor; called in the forward."""
        if saved.untyped_storage().data_ptr() != self._address:
            return saved
        return _View(saved.size(), saved.stride(), int(saved.storage_offset()))

    def begin(self) -> None:
        """Gather; called before the backward of the blocks. Collective over the group."""
        self._again = self._make()

    def recall(self, kept: Tensor | _View) -> Tensor:
        """The tensor itself; called in the backward."""
        if isinstance(kept, Tensor):
            return kept
        assert self._again is not None
        return self._again.as_strided(kept.size, kept.stride, kept.offset)

    def end(self) -> None:
        """No block needs it any more."""
        self._again = None


class _BackwardBegins(Function):
    """Around the outcome of all blocks: its backward comes before theirs."""

    @staticmethod
    def forward(ctx: Any, attended: Tensor, again: _GatheredAgain) -> Tensor:
        ctx.again = again
        return attended.view_as(attended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.again.begin()
        return gradient, None


class _BackwardEnds(Function):
    """Around what was gathered: its backward comes when the blocks' are done."""

    @staticmethod
    def forward(ctx: Any, gathered: Tensor, again: _GatheredAgain) -> Tensor:
        ctx.again = again
        return gathered.view_as(gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.again.end()
        return gradient, None


class _TokensForHeads(Function):
    """(T, c, heads of a rank, size) into (R, heads of this rank, size) in the order of the row."""

    @staticmethod
    def forward(ctx: Any, shares: Tensor, row: SharedRow) -> Tensor:
        ctx.row = row
        return _scatter_heads(shares, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather_heads(gradient, ctx.row), None


class _HeadsForTokens(Function):
    """(R, heads of this rank, size) into (T, c, heads of a rank, size): the way back."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, row: SharedRow) -> Tensor:
        ctx.row = row
        return _gather_heads(whole, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scatter_heads(gradient, ctx.row), None


def _scatter_heads(shares: Tensor, row: SharedRow) -> Tensor:
    sent = shares.transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=row.group)
    return received.flatten(0, 1).index_select(0, row.by_place)


def _gather_heads(whole: Tensor, row: SharedRow) -> Tensor:
    sent = whole.index_select(0, row.by_rank)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=row.group)
    return received.unflatten(0, (row.size, -1)).transpose(0, 1)
