"""Core attention over packed sequences: causal inside each sequence, none between sequences.

With `SegmentAttention` one rank has the whole row, with `ContextAttention` each rank of the
micro-batch's context-parallel group has a part. A layer may limit attention to a window of tokens,
and the model may add an offset per head to the denominator of the softmax.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

from megatron.hydraulis.cost_model.context import choose_way
from megatron.hydraulis.cost_model.layer_memory import OFFSET_CHANNELS, QUERY_BLOCK
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import require_no_dropout, windowed_layers
from megatron.hydraulis.runtime.packed_rows import (
    HeadExchange,
    SharedRow,
    Stretch,
    context_size_of,
    gather_row,
    gathered_again,
    once_a_row,
    segment_lengths,
    shared_row,
)

MASK_QUANTUM = 16
"""Masks begin at a multiple of this in memory, in elements, as CUDA's memory-efficient kernel
requires, which reads 16 bytes at a time."""


class PackedAttention(torch.nn.Module, ABC):
    """Core attention over packed rows with upstream's signatures.

    Its only parameter is the offset of a learnable softmax, with upstream's name.

    Args:
        layer_number: from 1.
        attn_mask_type: not used: packed rows have one causal mask.
        attention_dropout: must be 0.
        softmax_scale: 1 / √(head size) where None.

    Raises:
        ConfigurationError: a softmax with an offset, or dropout, which it does not have.
    """

    takes_offset = False
    takes_any_values = False
    """Whether values of another size than queries and keys need no padding."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        require_no_dropout(
            config.attention_dropout if attention_dropout is None else attention_dropout
        )
        self.config = config
        self.layer_number = max(1, layer_number)
        self.attention_type = attention_type
        self.cp_comm_type: str = config.cp_comm_type or "auto"
        """Upstream passes it to core attention only where the model's cp is above 1."""
        if config.softmax_type != "vanilla" and not self.takes_offset:
            raise ConfigurationError(
                f"--softmax-type {config.softmax_type} adds an offset to the softmax, which "
                f"{type(self).__name__} does not; use --core-attention sdpa"
            )
        head_size = config.kv_channels
        assert head_size is not None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(head_size)
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            offset = torch.nn.Parameter(torch.empty(num_heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(offset, is_parallel=True, dim=0, stride=1)
            if config.perform_initialization:
                assert config.init_method is not None
                config.init_method(offset)
            self.softmax_offset = offset

    @property
    def window(self) -> int | None:
        """Number of tokens before its own that a token attends to; None for all of its sequence.

        Read at every use: the layers of a stage get their numbers after they are built.
        """
        size, frequency = self.config.window_size, self.config.window_attn_skip_freq
        if size is None or not is_layer_window_attention(size, frequency, self.layer_number):
            return None
        return None if size[0] < 0 else size[0]

    @property
    def has_windows(self) -> bool:
        """Whether some layer of the model has a window."""
        size, frequency = self.config.window_size, self.config.window_attn_skip_freq
        is_limited = size is not None and size[0] >= 0
        return is_limited and sum(windowed_layers(self.config.num_layers, frequency)) > 0

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
        """Attend inside every sequence.

        Args:
            query: (T, heads, head size), this rank's tokens; without ``packed_seq_params``
                (T, 1, heads, head size).
            key: (T, query groups, head size), likewise.
            value: as ``key``, with heads of any size.
            attention_mask: not used: sequence borders and causality determine it.
            packed_seq_params: borders of the whole row; None for one unpacked sequence.

        Returns:
            (T, heads · size of a value's head), or (T, 1, …) unpacked.

        Raises:
            ConfigurationError: unpacked input that this attention does not take, or a way of
                exchange that the heads do not allow.
        """
        num_heads, num_channels = query.size(-2), value.size(-1)
        if query.size(-1) != num_channels and not self.takes_any_values:
            # Kernels take one size. Zeros in queries and keys add nothing to a score.
            size = max(query.size(-1), num_channels)
            query, key, value = (
                F.pad(each, (0, size - each.size(-1))) for each in (query, key, value)
            )
        if packed_seq_params is None:
            context = self._attend_unpacked(query, key, value)
        else:
            context = self._attend_packed(query, key, value, packed_seq_params).flatten(1)
        if context.size(-1) != num_heads * num_channels:
            context = context.unflatten(-1, (num_heads, -1))[..., :num_channels].flatten(-2)
        return context

    @abstractmethod
    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams
    ) -> Tensor:
        """(T, heads, head size), or with the last two flat. Collective over the row's group."""

    @abstractmethod
    def _attend_unpacked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(T, 1, heads · head size)."""


class SegmentAttention(PackedAttention):
    """`scaled_dot_product_attention` per sequence of a THD pack, on every device.

    Replaces Megatron's local core attention, which refuses packed input. On a CPU it is two to
    forty times faster than a dense mask over the pack. On a GPU it is correct but slow: it launches
    a kernel per sequence, where `VarlenAttention` and `TEAttention` launch one per pack.
    """

    takes_offset = True

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams
    ) -> Tensor:
        lengths = segment_lengths(packed_seq_params)
        if not self._needs_masks:
            return self.attend(query, key, value, lengths)
        blocks = self._blocks_of_row(packed_seq_params, query)
        return self._attend_with_masks(query, key, value, lengths, blocks)

    def _attend_unpacked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.size(1) != 1:
            raise ConfigurationError(
                f"unpacked input has {query.size(1)} rows; pack them into one THD row"
            )
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        context = self.attend(query, key, value, [query.size(0)])
        return context.reshape(context.size(0), 1, -1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        """Causal attention inside every segment of a complete row.

        Args:
            query: (tokens, heads, head size).
            key: (tokens, query groups, head size).
            value: as ``key``.
            lengths: of the segments, which cover the row, in tokens.

        Returns:
            (tokens, heads, head size).
        """
        if self._needs_masks:
            blocks = self._blocks(whole_segments(lengths), query)
            return self._attend_with_masks(query, key, value, lengths, blocks)
        parts = (each.split(list(lengths)) for each in (query, key, value))
        segments = [self._attend_once(*part) for part in zip(*parts, strict=True)]
        return torch.cat(segments) if len(segments) > 1 else segments[0]

    def _attend_once(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """(queries, heads, head size) of one kernel, which is causal without a mask."""
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return attended.squeeze(0).transpose(0, 1)

    @property
    def _has_offset(self) -> bool:
        return self.config.softmax_type != "vanilla"

    @property
    def _needs_masks(self) -> bool:
        return self.window is not None or self._has_offset

    def _blocks(self, stretches: Iterable[Stretch], query: Tensor) -> QueryBlocks:
        return QueryBlocks.of(stretches, self.window, query, has_offset=self._has_offset)

    def _blocks_of_row(self, row: PackedSeqParams | SharedRow, query: Tensor) -> QueryBlocks:
        """Blocks of a complete row, made by the first layer that has this window."""

        def make() -> QueryBlocks:
            lengths = row.lengths if isinstance(row, SharedRow) else segment_lengths(row)
            return self._blocks(whole_segments(lengths), query)

        return once_a_row(row, ("blocks of row", self.window, query.dtype), make)

    def _attend_with_masks(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Sequence[int],
        blocks: QueryBlocks,
        heads: slice = slice(None),
    ) -> Tensor:
        """`_attend_by_blocks` with keys and values of the complete row."""
        row = torch.cat([key, value], dim=1)
        return self._attend_by_blocks(query, row, row.detach, lengths, blocks, heads)

    def _attend_by_blocks(
        self,
        query: Tensor,
        row: Tensor,
        again: Callable[[], Tensor],
        lengths: Sequence[int],
        blocks: QueryBlocks,
        heads: slice = slice(None),
    ) -> Any:
        """Attend with the queries of all blocks.

        An offset of the softmax is the score of one more key, which is the first of every block and
        has the value 0. Where the offset b is learnable, another channel makes the score: b / scale
        in queries, 1 in this key, 0 in the others.

        Args:
            query: (queries, heads, head size) in the order of the blocks.
            row: (R, 2 · query groups, head size): keys, and values after them.
            again: computes ``row`` in the backward, which keeps no copy of it until then.
            lengths: of the segments of the row, in tokens.
            heads: of this tensor-parallel rank, to which the queries belong.
        """
        num_groups, head_size = row.size(1) // 2, row.size(2)
        num_channels = 0
        if self.config.softmax_type == "learnable":
            num_channels = OFFSET_CHANNELS
            offsets = (self.softmax_offset[heads] / self.softmax_scale).to(query.dtype)
            channels = F.pad(offsets[:, None], (0, num_channels - 1))
            query = torch.cat([query, channels.expand(query.size(0), -1, -1)], dim=-1)

        def attend(laid_out: Tensor) -> Tensor:
            attended = []
            parts = (query.split(blocks.lengths), blocks.keys_of(laid_out, lengths))
            for block, q, keys in zip(blocks.blocks, *parts, strict=True):
                k, v = keys.split(num_groups, dim=1)
                context = self._attend_once(q, k, v, blocks.mask_of(block))
                attended.append(context[..., :head_size])
            return torch.cat(attended)

        return attend_and_forget(
            attend,
            blocks.laid_out(row, lengths, num_channels),
            lambda: blocks.laid_out(again(), lengths, num_channels),
        )


class ContextAttention(SegmentAttention):
    """`SegmentAttention` whose queries, keys and values are one context rank's part of the row.

    The group is that of the micro-batch, ``packed_seq_params.cp_group``, not the model's. Without
    a group, or in a group of one rank, the result equals `SegmentAttention`'s bit by bit.
    ``config.cp_comm_type`` selects how ranks exchange, see `cost_model.context`. Ranks that gather
    keys and values keep their parts only between forward and backward, which gathers them again.
    """

    takes_context_group = True

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams
    ) -> Tensor:
        """Collective over the micro-batch's group; tokens in the order of `local_places`."""
        if context_size_of(packed_seq_params) == 1:
            return super()._attend_packed(query, key, value, packed_seq_params)
        row = shared_row(packed_seq_params, query)
        way = choose_way(self.cp_comm_type, query.size(1), key.size(1), row.size, has_te=False)
        attend = self._attend_to_share_of_heads if way == "a2a" else self._attend_to_gathered
        context: Tensor = attend(query, key, value, row)
        return context

    def _attend_to_gathered(self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow) -> Any:
        part = torch.cat([key, value], dim=1)
        key_of_blocks = ("blocks of part", self.window, query.dtype)
        blocks = once_a_row(row, key_of_blocks, lambda: self._blocks(row.stretches, query))
        again = functools.partial(gathered_again, part.detach(), row)
        return self._attend_by_blocks(query, gather_row(part, row), again, row.lengths, blocks)

    def _attend_to_share_of_heads(
        self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow
    ) -> Any:
        num_groups = key.size(1)
        if num_groups < row.size:
            num_copies = row.size // num_groups
            key = key.repeat_interleave(num_copies, dim=1)
            value = value.repeat_interleave(num_copies, dim=1)
        # The shares of a rank are adjacent, so that one collective moves all three tensors.
        shares = [each.unflatten(1, (row.size, -1)) for each in (query, key, value)]
        num_heads = [share.size(2) for share in shares]
        exchanged: Tensor = HeadExchange.apply(torch.cat(shares, dim=2), row, True)
        q, k, v = exchanged.split(num_heads, dim=1)
        attended = self._attend_to_row(q, k, v, row)
        return HeadExchange.apply(attended, row, False).flatten(1, 2)

    def _attend_to_row(self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow) -> Tensor:
        """Attend with all tokens of the row and this rank's share of the heads."""
        if not self._needs_masks:
            return self.attend(query, key, value, row.lengths)
        blocks = self._blocks_of_row(row, query)
        first_head = row.group.rank() * query.size(1)
        heads = slice(first_head, first_head + query.size(1))
        return self._attend_with_masks(query, key, value, row.lengths, blocks, heads)


def whole_segments(lengths: Sequence[int]) -> tuple[Stretch, ...]:
    """The stretches of a rank that has all queries of the row."""
    return tuple((segment, 0, length) for segment, length in enumerate(lengths))


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Consecutive queries, and consecutive keys of their segment that they attend to."""

    segment: int
    num_queries: int
    first_key: int
    stop_key: int
    """The last query attends up to the key before."""

    @property
    def num_keys(self) -> int:
        return self.stop_key - self.first_key


@dataclass(frozen=True, eq=False)
class QueryBlocks:
    """Queries of a rank in the blocks in which they attend, in their order, and masks of keys."""

    blocks: list[QueryBlock]
    window: int | None
    """Number of tokens before its own that a token attends to."""
    has_offset: bool
    """Whether each segment has one key more before its own, to which all its queries attend."""
    dtype: torch.dtype
    """Dtype of the queries."""
    device: torch.device

    @classmethod
    def of(
        cls, stretches: Iterable[Stretch], window: int | None, query: Tensor, *, has_offset: bool
    ) -> QueryBlocks:
        """The blocks of some stretches, on the device of the queries."""
        blocks = [
            QueryBlock(
                segment,
                min(QUERY_BLOCK, stop - begin),
                0 if window is None else max(0, begin - window),
                min(begin + QUERY_BLOCK, stop),
            )
            for segment, start, stop in stretches
            for begin in range(start, stop, QUERY_BLOCK)
        ]
        return cls(blocks, window, has_offset, query.dtype, query.device)

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [block.num_queries for block in self.blocks]

    @functools.cached_property
    def _stretches(self) -> dict[tuple[int, int], int]:
        """Keys that blocks attend to: segment and first key -> stop of the last such block."""
        return {(block.segment, block.first_key): block.stop_key for block in self.blocks}

    def laid_out(self, row: Tensor, lengths: Sequence[int], num_channels: int) -> Tensor:
        """The row or, with an offset, its key before each stretch of keys that blocks attend to.

        Blocks that attend to the beginning of a segment share a stretch.

        Args:
            row: (R, 2 · query groups, head size): keys, and values after them.
            lengths: of the segments of the row, in tokens.
            num_channels: added to all keys and values: 1 in the offset's key, 0 elsewhere.
        """
        if not self.has_offset:
            return row
        _, num_heads, head_size = row.shape
        first = row.new_zeros(1, num_heads, head_size + num_channels)
        first[:, : num_heads // 2, head_size:] = 1.0
        segments = F.pad(row, (0, num_channels)).split(list(lengths))
        parts = []
        for (segment, begin), stop in self._stretches.items():
            parts += [first, segments[segment][begin:stop]]
        return torch.cat(parts)

    def keys_of(self, laid_out: Tensor, lengths: Sequence[int]) -> Iterator[Tensor]:
        """The keys and values of each block, views of `laid_out`, each made when it is taken.

        The backward runs in the opposite order: if all were made before the first block attends,
        their gradients would exist together. By segment or stretch: the gradient of a slice is as
        large as the tensor it is cut from.
        """
        if not self.has_offset:
            segments = laid_out.split(list(lengths))
            for each in self.blocks:
                yield segments[each.segment][each.first_key : each.stop_key]
            return
        sizes = [1 + stop - begin for (_, begin), stop in self._stretches.items()]
        stretches = dict(zip(self._stretches, laid_out.split(sizes), strict=True))
        for each in self.blocks:
            yield stretches[each.segment, each.first_key][: 1 + each.num_keys]

    def mask_of(self, block: QueryBlock) -> Tensor | None:
        """(queries, keys): 0 where attended and −∞ elsewhere; None for the causal mask of as many
        queries as keys, which kernels have themselves."""
        num_queries, num_keys = block.num_queries, block.num_keys
        if not self.has_offset:
            is_square = num_queries == num_keys
            if is_square and (self.window is None or num_keys <= self.window + 1):
                return None
            return self._band(num_queries, num_keys)
        if self.window is None:
            return self._band(num_queries, num_keys + 1)
        if (num_queries, num_keys) not in self._padded_masks:
            band = self._band(num_queries, num_keys)
            self._padded_masks[num_queries, num_keys] = F.pad(
                band, (1, -(num_keys + 1) % MASK_QUANTUM)
            )
        return self._padded_masks[num_queries, num_keys][:, : num_keys + 1]

    @functools.cached_property
    def _padded_masks(self) -> dict[tuple[int, int], Tensor]:
        """Masks by numbers of queries and keys, with a column for the offset's key before the
        others, and columns after them up to a multiple of `MASK_QUANTUM`."""
        return {}

    def _band(self, num_queries: int, num_keys: int) -> Tensor:
        """A view of `_mask` that begins at a multiple of `MASK_QUANTUM`."""
        num_rows, num_columns = self._mask.shape
        column = num_columns - num_keys
        up = column % MASK_QUANTUM
        row, column = num_rows - num_queries - up, column - up
        return self._mask[row : row + num_queries, column : column + num_keys]

    @functools.cached_property
    def _mask(self) -> Tensor:
        """The last query attends up to the last key, each earlier one to one less, and all to a
        window before. The masks of blocks are views of it; it has a few more rows and columns than
        the largest, since a view moved along the diagonal is the same. It has the queries' dtype,
        or every block would keep a copy. Made at first use.
        """
        num_rows = max(self.lengths) + MASK_QUANTUM - 1
        longest = max(block.num_keys for block in self.blocks) + self.has_offset
        num_columns = math.ceil(longest / MASK_QUANTUM) * MASK_QUANTUM
        unseen = torch.full(
            (num_rows, num_columns), -math.inf, dtype=self.dtype, device=self.device
        )
        last = num_columns - num_rows
        mask = unseen.triu(last + 1)
        return mask if self.window is None else mask + unseen.tril(last - self.window - 1)


@dataclass(frozen=True, slots=True)
class _View:
    """The place of a discarded tensor in what was gathered."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def attend_and_forget(
    attend: Callable[[Tensor], Tensor], gathered: Tensor, again: Callable[[], Tensor]
) -> Any:
    """Attention that keeps nothing of what was gathered between forward and backward.

    Args:
        attend: takes keys and values of the row; what autograd would save of them is discarded.
        gathered: these keys and values.
        again: gathers them in the backward, once. Collective, so it runs at a fixed place.
    """
    memory = _GatheredAgain(gathered, again)
    gathered = _InBackward.apply(gathered, memory.end)
    with torch.autograd.graph.saved_tensors_hooks(memory.forget, memory.recall):
        attended = attend(gathered)
    return _InBackward.apply(attended, memory.begin)


class _GatheredAgain:
    """Hooks with which the backward gathers again what the forward gathered, once for all blocks.

    It gathers at a fixed place, before the backward of any block: kernels differ in the inputs that
    they save, and so do ranks; a rank that gathered on demand could leave its group waiting.
    """

    def __init__(self, gathered: Tensor, again: Callable[[], Tensor]) -> None:
        self._address = gathered.untyped_storage().data_ptr()
        self._make: Callable[[], Tensor] | None = again
        self._again: Tensor | None = None

    def forget(self, saved: Tensor) -> Tensor | _View:
        """Returns what autograd saves instead of a tensor; called in the forward."""
        if saved.untyped_storage().data_ptr() != self._address:
            return saved
        return _View(saved.size(), saved.stride(), int(saved.storage_offset()))

    def begin(self) -> None:
        """Gather; called before the backward of the blocks. Collective over the group.

        Raises RuntimeError at a second backward, as autograd does: what it needs is freed.
        """
        if self._make is None:
            raise RuntimeError(
                "keys and values are gathered again for one backward of a graph but a second one "
                "needs them; run the forward again instead of retain_graph"
            )
        self._again = self._make()
        # Its keys and values would stay as long as a tensor of this graph, such as the loss.
        self._make = None

    def recall(self, kept: Tensor | _View) -> Tensor:
        """The tensor itself; called in the backward."""
        if isinstance(kept, Tensor):
            return kept
        assert self._again is not None
        return self._again.as_strided(kept.size, kept.stride, kept.offset)

    def end(self) -> None:
        """Free what was gathered; called after the backward of the blocks."""
        self._again = None


class _InBackward(Function):
    """Identity; the backward calls ``action`` when it reaches this place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.action()
        return gradient, None
