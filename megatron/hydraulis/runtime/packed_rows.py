"""Packed rows: what the layers know of one, its positions, and how ranks exchange its parts.

Upstream's attention rotates queries and keys of a packed row sequence by sequence: it reads the
borders from the device, so that the host waits four times per layer, and selects a rank's chunks by
``self.pg_collection.cp``, the group that the model was built with, ignoring the group in
``packed_seq_params``. A micro-batch that runs in another group would get wrong positions.

`follow_rows` sets hooks on the built modules, which include a user's layers, without a patch. A row
with `PackedRow.positions` is rotated by them before core attention, and upstream's attention gets
no table. Cosines and sines are looked up once per micro-batch. Where upstream rotates (Transformer
Engine's fused kernel, attentions that override ``forward``, rows without positions), it gets a
collection whose ``cp`` is the micro-batch's group. A core attention that does not support parts of
a row is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.hydraulis.data.packed_batch import (
    PredictedTokens,
    gathered_places,
    local_stretches,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.process_groups import LocalGroup, to_device

TAKES_CONTEXT_GROUP = "takes_context_group"
"""Attribute of core attentions that attend over ``packed_seq_params.cp_group``."""


@dataclass
class PackedRow(PackedSeqParams):
    """Upstream's description of a packed row, with what the host knows of it already.

    Upstream reads the same from ``cu_seqlens``, and waits for the device each time.
    """

    positions: Tensor | None = None
    """(T,) int64: the position of each token of this rank in its sequence."""
    segment_lengths: tuple[int, ...] = ()
    """Lengths in tokens of the segments of the whole row, padding included."""
    sequence_lengths: tuple[int, ...] = ()
    """Lengths of the sequences, which are the first segments, without padding."""
    predictions: tuple[PredictedTokens, ...] = ()
    """Of the layers of multi-token prediction, in their order."""


def segment_lengths(packed_seq_params: PackedSeqParams) -> tuple[int, ...]:
    """Padded lengths of the whole row, even where this rank holds a part of it.

    Padding is at the end of a segment, so causality hides it from the other tokens. The host waits
    for the device unless the description is a `PackedRow`.
    """
    if isinstance(packed_seq_params, PackedRow) and packed_seq_params.segment_lengths:
        return packed_seq_params.segment_lengths

    def read() -> tuple[int, ...]:
        return tuple(borders_of(packed_seq_params).diff().tolist())

    return once_a_row(packed_seq_params, "segment lengths", read)


def borders_of(packed_seq_params: PackedSeqParams) -> Tensor:
    """(segments + 1,) int32: cumulative padded lengths of the whole row, from 0."""
    padded = packed_seq_params.cu_seqlens_q_padded
    borders: Tensor = packed_seq_params.cu_seqlens_q if padded is None else padded
    return borders


def once_a_row[Value](
    packed_seq_params: PackedSeqParams | SharedRow, key: Hashable, compute: Callable[[], Value]
) -> Value:
    """A value that all layers need for a row, computed by the first and cached in its description.

    Args:
        packed_seq_params: describes one micro-batch; not reused for another.
        key: of the value.
        compute: the value.
    """
    cache: dict[Hashable, Value] = vars(packed_seq_params).setdefault("hydraulis_row_cache", {})
    if key not in cache:
        cache[key] = compute()
    return cache[key]


Stretch = tuple[int, int, int]
"""Consecutive queries in a segment: its index, and begin and end of the queries in it."""


@dataclass(frozen=True, slots=True)
class Borders:
    """Borders of a row's segments, as kernels take them."""

    sums: Tensor
    """(segments + 1,) int32: cumulative lengths in tokens, from 0."""
    longest: int
    """Tokens of the longest segment."""


@dataclass(frozen=True, slots=True)
class Stretches:
    """The stretches of this rank's queries, each with the keys up to its end."""

    ranges: list[tuple[int, int, int]]
    """Each stretch's segment, and begin and end of the keys in it."""
    queries: Borders
    keys: Borders


@dataclass(frozen=True, eq=False)
class SharedRow:
    """Data that every layer needs for a row that a group shares; computed once per micro-batch."""

    group: dist.ProcessGroup
    size: int
    """Ranks of the group, c."""
    lengths: tuple[int, ...]
    """Lengths of the segments of the whole row, padding included, in tokens."""
    borders: Borders
    by_place: Tensor
    """(R,) int64: index that reorders parts by rank into the row."""
    by_rank: Tensor
    """(R,) int64: index that reorders the row into parts by rank."""
    stretches: tuple[Stretch, ...]
    """This rank's tokens in their order."""

    def attended(self, window: int | None) -> Stretches:
        """The keys of each stretch; computed once for all layers with this window."""
        return once_a_row(self, ("stretches", window), lambda: self._attended(window))

    def _attended(self, window: int | None) -> Stretches:
        ranges = [
            (segment, 0 if window is None else max(0, start - window), stop)
            for segment, start, stop in self.stretches
        ]
        lengths = [[stop - start for _, start, stop in each] for each in (self.stretches, ranges)]
        sums = np.cumsum(np.pad(lengths, ((0, 0), (1, 0))), axis=1, dtype=np.int32)
        on_device = to_device(torch.from_numpy(sums), self.by_rank.device)
        queries, keys = (
            Borders(each, max(found)) for each, found in zip(on_device, lengths, strict=True)
        )
        return Stretches(ranges, queries, keys)


def context_size_of(packed_seq_params: PackedSeqParams) -> int:
    """Ranks that share the row; 1 without a group."""
    group = packed_seq_params.cp_group
    return 1 if group is None else int(group.size())


def shared_row(packed_seq_params: PackedSeqParams, query: Tensor) -> SharedRow:
    """The `SharedRow` of a row whose ``cp_group`` has several ranks; ``query`` of any layer."""

    def make() -> SharedRow:
        lengths = segment_lengths(packed_seq_params)
        group = packed_seq_params.cp_group
        size = group.size()
        by_rank = gathered_places(lengths, size)
        places = to_device(torch.from_numpy(np.stack([by_rank, by_rank.argsort()])), query.device)
        return SharedRow(
            group=group,
            size=size,
            lengths=lengths,
            borders=Borders(borders_of(packed_seq_params), max(lengths)),
            by_place=places[1],
            by_rank=places[0],
            stretches=tuple(
                (segment, start, stop)
                for segment, length in enumerate(lengths)
                for start, stop in local_stretches(length, size, group.rank())
            ),
        )

    return once_a_row(packed_seq_params, "shared row", make)


def gather_row(part: Tensor, row: SharedRow) -> Tensor:
    """(T, …) of every rank into (R, …) in the order of the row. Collective, also in the backward,
    which adds up gradients and returns this rank's part."""
    gathered: Tensor = _Gather.apply(part, row)
    return gathered


class _Gather(Function):
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
    """The values of `gather_row`, without autograd. Collective."""
    parts = part.new_empty(row.size * part.size(0), *part.shape[1:])
    dist.all_gather_into_tensor(parts, part.contiguous(), group=row.group)
    return parts.index_select(0, row.by_place)


class HeadExchange(Function):
    """(T, c, heads of a rank, size) into (R, heads of this rank, size) in the order of the row, or
    back."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, row: SharedRow, scatters: bool) -> Tensor:
        ctx.row, ctx.scatters = row, scatters
        return _scatter_heads(given, row) if scatters else _gather_heads(given, row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        inverse = _gather_heads if ctx.scatters else _scatter_heads
        return inverse(gradient, ctx.row), None, None


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


def follow_rows(model: torch.nn.Module) -> None:
    """Make every attention of a model take positions and context group from each micro-batch.

    Rows without a group, and unpacked input, belong to this rank alone.

    Args:
        model: contains upstream's attentions or subclasses; call once, when it is built.
    """
    alone = LocalGroup()
    for module in model.modules():
        if hasattr(type(module).forward, "cache_clear"):
            module.register_forward_hook(_forget_tables)
        if isinstance(module, Attention):
            module.register_forward_pre_hook(partial(_before_attention, alone), with_kwargs=True)
            module.core_attention.register_forward_pre_hook(
                partial(_before_core_attention, module.config, _keeps_fused_output(module)),
                with_kwargs=True,
            )


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Any:
    """Rotate queries and keys by the positions of their tokens.

    Three kernels per tensor, in forward and backward; autograd saves only ``cos`` and ``sin``.

    Args:
        query: (T, heads, head size).
        key: (T, query groups, head size).
        cos: (T, 1, size) for the first ``size`` channels of a head; the others are copied.
        sin: likewise.
        interleaved: channels 2i and 2i + 1 form a pair, otherwise i and i + size / 2.

    Returns:
        Both, in new memory.
    """
    return _Rotation.apply(query, key, cos, sin, interleaved)


class _Rotation(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return tuple(_turned(each, cos, sin, 1, interleaved) for each in (query, key))  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        turned = (_turned(each, cos, sin, -1, ctx.interleaved) for each in gradients)
        return (*turned, None, None, None)


def _turned(given: Tensor, cos: Tensor, sin: Tensor, way: int, interleaved: bool) -> Tensor:
    """(T, heads, head size), rotated forwards (``way`` 1) or back (-1)."""
    size = cos.size(-1)
    turned = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    inner, result = given[..., :size], turned[..., :size]
    if size < given.size(-1):
        turned[..., size:] = given[..., size:]
    firsts, seconds = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (slice(0, size // 2), slice(size // 2, None))
    )
    torch.mul(inner, cos, out=result)
    # A channel uses the sine of its output; rotating back, that of the other channel.
    first, second = (sin[..., channels] for channels in (firsts, seconds)[::way])
    result[..., firsts].addcmul_(inner[..., seconds], first, value=-way)
    result[..., seconds].addcmul_(inner[..., firsts], second, value=way)
    return turned


def _before_attention(
    alone: LocalGroup, attention: Any, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    row = named.get("packed_seq_params")
    _take_group(alone, attention, row)
    table = named.get("rotary_pos_emb")
    if not isinstance(row, PackedRow) or row.positions is None or not _is_rotated_here(attention):
        return None
    if not isinstance(table, Tensor) or table.shape[1:3] != (1, 1):
        return None
    _rotations(row)[attention.core_attention] = _rotation_of(row, table, attention)
    return inputs, named | {"rotary_pos_emb": None}


def _rotations(row: Any) -> dict[Any, tuple[Tensor, Tensor, bool]]:
    """Core attention -> cosines, sines and whether channels are interleaved."""
    return once_a_row(row, "rotations", dict)


def _rotation_of(row: PackedRow, table: Tensor, attention: Any) -> tuple[Tensor, Tensor, bool]:
    positions = row.positions
    assert positions is not None
    scale: float = attention._yarn_concentration_factor
    dtype = attention.config.params_dtype

    def look_up() -> tuple[Tensor, Tensor]:
        # As upstream: angles in the table's dtype, rounded to the model's for the rotation.
        angles = table.flatten(0, 2).index_select(0, positions).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin_()
        if scale != 1.0:
            cos, sin = cos.mul_(scale), sin.mul_(scale)
        return cos.to(dtype), sin.to(dtype)

    # Recomputed layers get the table as another tensor in the same storage. A weak reference to it
    # does not keep its memory and, unlike its address, cannot equal that of a later storage.
    storage = StorageWeakRef(table.untyped_storage())
    view = (table.storage_offset(), table.shape, table.stride())
    cos, sin = once_a_row(row, ("rotation", storage, view, scale, dtype), look_up)
    return cos, sin, bool(attention.config.rotary_interleaved)


def _is_rotated_here(attention: Any) -> bool:
    config = attention.config
    if config.no_rope_freq and config.no_rope_freq[attention.layer_number - 1]:
        return False
    return type(attention).forward is Attention.forward and not config.apply_rope_fusion


def _keeps_fused_output(attention: Any) -> bool:
    """True if norms of queries or keys save the output of the fused linear layer.

    Those of Transformer Engine save copies, and ours around one save them in fp32.
    """
    config = attention.config
    if config.layernorm_zero_centered_gamma and config.params_dtype != torch.float32:
        return False
    norms = (getattr(attention, name, None) for name in ("q_layernorm", "k_layernorm"))
    return any(not isinstance(norm, IdentityOp) and not _is_of_te(norm) for norm in norms if norm)


def _is_of_te(norm: Any) -> bool:
    return type(norm).__module__.startswith("transformer_engine.")


def _before_core_attention(
    config: TransformerConfig,
    keeps_fused_output: bool,
    core: Any,
    inputs: tuple[Any, ...],
    named: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    row = named.get("packed_seq_params")
    rotation = None if row is None else _rotations(row).get(core)
    if rotation is None and not config.apply_rope_fusion:
        return None
    query, key, value, *others = inputs
    if rotation is not None:
        cos, sin, interleaved = rotation
        query, key = rotate(
            query, key, cos.to(query.dtype), sin.to(query.dtype), interleaved=interleaved
        )
    if not keeps_fused_output:
        # A view would keep the complete output of the fused linear layer until the backward.
        value = value.contiguous()
    return (query, key, value, *others), named


def _forget_tables(rotary: torch.nn.Module, *_: Any) -> None:
    """Upstream caches tables of the last 32 lengths, but almost every row has another length."""
    type(rotary).forward.cache_clear()  # type: ignore[attr-defined]


def _take_group(alone: LocalGroup, attention: Any, row: Any) -> None:
    group = None if row is None else row.cp_group
    if group is None:
        size = None if row is None else row.local_cp_size
        if size not in (None, 1):
            raise ConfigurationError(
                f"a packed row is shared by {size} ranks but has no context-parallel group; set "
                "PackedSeqParams.cp_group"
            )
        group = alone
    if group.size() > 1 and not getattr(attention.core_attention, TAKES_CONTEXT_GROUP, False):
        raise ConfigurationError(
            f"core attention {type(attention.core_attention).__name__} got a part of a row that "
            f"{group.size()} ranks share but is not known to support parts of rows; use strategies "
            "without cp, or let it attend over packed_seq_params.cp_group and set "
            f"{TAKES_CONTEXT_GROUP} = True on it"
        )
    if attention.pg_collection.cp is not group:
        # A copy: modules of one model share the collection, and the schedule reads it too.
        attention.pg_collection = copy.copy(attention.pg_collection)
        attention.pg_collection.cp = group
