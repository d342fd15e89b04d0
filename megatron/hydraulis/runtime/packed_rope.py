"""Rotary positions of packed rows, and the context-parallel group that an attention runs in.

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
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.packed_rows import PackedRow, once_a_row
from megatron.hydraulis.runtime.process_groups import LocalGroup

MARK = "takes_context_group"
"""Attribute of core attentions that attend over ``packed_seq_params.cp_group``."""


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
    """Whether norms of queries or keys save the output of the fused linear layer.

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
    if group.size() > 1 and not getattr(attention.core_attention, MARK, False):
        raise ConfigurationError(
            f"core attention {type(attention.core_attention).__name__} got a part of a row that "
            f"{group.size()} ranks share but is not known to support parts of rows; use strategies "
            "without cp, or let it attend over packed_seq_params.cp_group and set "
            f"{MARK} = True on it"
        )
    if attention.pg_collection.cp is not group:
        # A copy: modules of one model share the collection, and the schedule reads it too.
        attention.pg_collection = copy.copy(attention.pg_collection)
        attention.pg_collection.cp = group
