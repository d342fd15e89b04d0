"""Core attention by one kernel per pack, torch's or Transformer Engine's, and which a run uses.

Both are imported when they are used, since a machine may have neither.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron.hydraulis.cost_model.context import Way, choose_way
from megatron.hydraulis.cost_model.trained_model import CORE_ATTENTIONS, CoreAttentionName
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.runtime.attention import (
    ContextAttention,
    PackedAttention,
    attend_and_forget,
)
from megatron.hydraulis.runtime.packed_rows import (
    Borders,
    SharedRow,
    borders_of,
    context_size_of,
    gather_row,
    gathered_again,
)
from megatron.hydraulis.runtime.process_groups import to_device
from megatron.hydraulis.strategy import Pool


def window_size(window: int | None) -> tuple[int, int]:
    """A layer's window as kernels take it: how many keys before and after its own a query sees.

    The last query of a segment is aligned with its last key: fewer queries than keys are the
    segment's end.
    """
    return (-1 if window is None else window, 0)


class VarlenAttention(ContextAttention):
    """`ContextAttention` with one kernel per pack instead of one per sequence. CUDA only.

    The kernel is FlashAttention 2: bf16 or fp16; the order in which it adds up gradients of queries
    differs from run to run. At capability 9.0 and 10.0 torch 2.15 would prefer cuDNN's, whose
    backward allocates the longest sequence for every sequence of the pack.
    """

    takes_offset = False

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams
    ) -> Tensor:
        if context_size_of(packed_seq_params) > 1:
            return super()._attend_packed(query, key, value, packed_seq_params)
        row = Borders(borders_of(packed_seq_params), packed_seq_params.max_seqlen_q)
        return self._attend_between(query, key, value, row, row)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        """See `SegmentAttention.attend`."""
        sums = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        row = Borders(to_device(sums, query.device), max(lengths))
        return self._attend_between(query, key, value, row, row)

    def _attend_to_row(self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow) -> Tensor:
        return self._attend_between(query, key, value, row.borders, row.borders)

    def _attend_to_gathered(self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow) -> Any:
        """Each stretch of this rank's queries becomes a segment, with the keys up to its end.

        Keys that both stretches of a sequence attend to are copied twice: at most one and a half
        times the row. In return there is one kernel instead of one per block of queries.
        """
        stretches = row.attended(self.window)

        def by_stretch(gathered: Tensor) -> Tensor:
            segments = gathered.split(row.lengths)
            return torch.cat([segments[i][first:stop] for i, first, stop in stretches.ranges])

        def attend(keys_and_values: Tensor) -> Tensor:
            k, v = keys_and_values.split(key.size(1), dim=1)
            return self._attend_between(query, k, v, stretches.queries, stretches.keys)

        part = torch.cat([key, value], dim=1)
        kept = part.detach()
        return attend_and_forget(
            attend,
            by_stretch(gather_row(part, row)),
            lambda: by_stretch(gathered_again(kept, row)),
        )

    def _attend_between(
        self, query: Tensor, key: Tensor, value: Tensor, queries: Borders, keys: Borders
    ) -> Tensor:
        """(queries, heads, head size), each segment of queries with that of keys."""
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.varlen import varlen_attn

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            context = varlen_attn(
                query,
                key,
                value,
                queries.sums,
                keys.sums,
                queries.longest,
                keys.longest,
                scale=self.softmax_scale,
                window_size=window_size(self.window),
                enable_gqa=query.size(1) != key.size(1),
            )
        assert isinstance(context, Tensor)  # a pair only if auxiliary outputs are requested
        return context


TE_MASK = "padding_causal"
"""Mask that is causal inside each segment, the only causal one for packed rows."""


_PACKED_BY_CUDNN = 16
"""Head sizes whose multiples cuDNN's backward computes in memory for the tokens of a row."""


class TEAttention(PackedAttention):
    """Transformer Engine's ``DotProductAttention`` as Megatron's core attention.

    The group of the micro-batch, ``packed_seq_params.cp_group``, is set in every forward;
    ``config.cp_comm_type`` selects how its ranks exchange keys and values, see `choose_way`.

    Upstream's wrapper also takes the group of a micro-batch, but creates the ring's stream only
    where the model's cp is above 1, exchanges in one way for groups of all sizes, and lets
    Transformer Engine infer padding from borders, which excludes most of its kernels.

    Args:
        arguments: those of `PackedAttention`, also by name.
        make_attention: Transformer Engine's class; tests pass a stand-in.
        pg_collection: holds the ``tp`` group.
        k_channels: size of a head of keys, if values have another.
        v_channels: size of a head of values.
    """

    takes_context_group = True
    takes_any_values = True

    def __init__(
        self,
        *arguments: Any,
        make_attention: Callable[..., Any] | None = None,
        pg_collection: Any = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        if make_attention is None:
            from transformer_engine.pytorch import DotProductAttention

            make_attention = DotProductAttention
        config = self.config
        self.attention = make_attention(
            num_attention_heads=config.num_attention_heads,
            kv_channels=config.kv_channels if k_channels is None else (k_channels, v_channels),
            num_gqa_groups=config.num_query_groups,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type=TE_MASK,
            sequence_parallel=config.sequence_parallel,
            tp_size=config.tensor_model_parallel_size,
            tp_group=None if pg_collection is None else pg_collection.tp,
            layer_number=self.layer_number,
            attention_type=self.attention_type,
            softmax_scale=self.softmax_scale,
        )

    def _attend_packed(
        self, query: Tensor, key: Tensor, value: Tensor, packed_seq_params: PackedSeqParams
    ) -> Tensor:
        size = context_size_of(packed_seq_params)
        if size == 1:
            # Reset each time, or the previous micro-batch's group would remain.
            self.attention.set_context_parallel_group(None, None, None)
        else:
            group = packed_seq_params.cp_group
            self.attention.set_context_parallel_group(
                group,
                dist.get_process_group_ranks(group),
                _context_stream(query.device),
                choose_way(
                    self.cp_comm_type,
                    query.size(1),
                    key.size(1),
                    size,
                    has_te=True,
                    tp=self.config.tensor_model_parallel_size,
                    has_windows=self.has_windows,
                ),
            )
        arguments = packed_arguments(packed_seq_params)
        if self.window is not None:
            arguments["window_size"] = window_size(self.window)
        context: Tensor = self.attention(query, key, value, None, **arguments)
        return context

    def _attend_unpacked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        raise ConfigurationError(
            f"core attention 'te' takes packed rows but was given {tuple(query.shape)} without "
            "PackedSeqParams; pack the sequences, or use --core-attention sdpa"
        )


def packed_arguments(packed_seq_params: PackedSeqParams) -> dict[str, Any]:
    """The arguments of ``DotProductAttention.forward`` other than queries, keys and values.

    True borders are passed as equal to the padded ones, so that Transformer Engine assumes no
    padding and can choose from all its kernels. In an unshared row padding is a segment. In a
    shared row it ends a segment: causality hides it from the sequence, loss weights hide what it
    computes.
    """
    borders = borders_of(packed_seq_params)
    return {
        "qkv_format": "thd",
        "attn_mask_type": TE_MASK,
        "cu_seqlens_q": borders,
        "cu_seqlens_kv": borders,
        "cu_seqlens_q_padded": borders,
        "cu_seqlens_kv_padded": borders,
        "max_seqlen_q": packed_seq_params.max_seqlen_q,
        "max_seqlen_kv": packed_seq_params.max_seqlen_kv,
        "pad_between_seqs": False,
    }


@dataclass(frozen=True)
class RowKind:
    """Properties of packed rows that decide which kernel they take, except their dtype."""

    num_heads: int
    """Query heads on a rank, after tensor parallelism."""
    num_groups: int
    """Key and value heads on a rank."""
    context_size: int = 1
    """Ranks that share the row."""
    num_tokens: int = 4096
    """Tokens of the row, and of its longest sequence."""
    window: int | None = None
    """Number of tokens before its own that a token attends to; None for all of its sequence."""
    value_head_size: int | None = None
    """Size of a value's head; None if it is that of queries and keys."""
    tp: int = 1
    """Tensor-parallel ranks of each of those."""
    has_windows: bool = False
    """Whether some layer of the model has a window."""


def te_obstacle(
    row: RowKind, *, dtype: torch.dtype, head_size: int, cp_comm_type: str
) -> str | None:
    """Reason why `TEAttention` should not compute such rows; None if it should.

    Transformer Engine's own selection decides. Its unfused kernel, which it takes where the others
    refuse, is refused here: its memory grows with the square of the row. So is cuDNN's where its
    backward allocates the longest sequence for every sequence of the row, by the rules of
    cudnn-frontend (1.32, ``scaled_dot_product_flash_attention.h``).
    """
    size = row.context_size
    try:
        way = (
            None
            if size == 1
            else choose_way(
                cp_comm_type,
                row.num_heads,
                row.num_groups,
                size,
                has_te=True,
                tp=row.tp,
                has_windows=row.has_windows,
            )
        )
    except ConfigurationError as error:
        return str(error)
    if way == "p2p" and row.window is not None:
        return (
            f"a ring of {size} context-parallel ranks needs all keys but a layer has a window of "
            f"{row.window} tokens"
        )
    kernel = te_kernel(row, way, dtype=dtype, head_size=head_size)
    if kernel is None:
        takes = "no kernel"
    elif kernel == "unfused":
        takes = "only its unfused kernel, O(T²) in memory,"
    elif kernel == "cuDNN" and any(
        size % _PACKED_BY_CUDNN for size in (head_size, row.value_head_size or head_size)
    ):
        takes = (
            f"cuDNN's kernel, which takes memory for sequences times the longest of them unless "
            f"heads are a multiple of {_PACKED_BY_CUDNN} (NVTE_FUSED_ATTN=0 leaves flash-attn),"
        )
    else:
        return None
    heads = f"{row.num_heads} heads ({row.num_groups} groups) of {head_size}"
    if row.value_head_size is not None:
        heads += f" (values: {row.value_head_size})"
    shared = "" if way is None else f" shared by {size} ranks ({way})"
    return (
        f"Transformer Engine has {takes} for packed rows{shared} with {heads} on this GPU "
        "(NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 logs why)"
    )


def te_kernel(
    row: RowKind,
    way: Way | None,
    *,
    dtype: torch.dtype,
    head_size: int,
    pad_between_seqs: bool = False,
) -> str | None:
    """The kernel that Transformer Engine's rules select for packed rows on the current device.

    Args:
        way: how ranks exchange, for a shared row.
        pad_between_seqs: whether to ask for rows with declared padding, which we never pass.

    Returns:
        ``flash-attn`` and its version, ``cuDNN``, ``unfused``, or None if there is none.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    num_tokens = row.num_tokens // row.context_size
    deterministic = (
        os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"
        or torch.are_deterministic_algorithms_enabled()
    )
    asked: dict[str, Any] = {
        "qkv_type": torch.Tensor,
        "qkv_dtype": dtype,
        "qkv_layout": "thd_thd_thd",
        # Sequences of the row. Deterministic on compute capability 9.0, Transformer Engine 2.20
        # leaves out cuDNN where sequences × heads × longest² reach 2^30, because its backward
        # would need 128 GiB: ask for the most, so that no row gets another kernel than this says.
        "batch_size": row.num_tokens if deterministic else 2,
        "num_heads": row.num_heads,
        "num_gqa_groups": row.num_groups,
        "max_seqlen_q": row.num_tokens,
        "max_seqlen_kv": row.num_tokens,
        "num_tokens_q": num_tokens,
        "num_tokens_kv": num_tokens,
        "head_dim_qk": head_size,
        "head_dim_v": row.value_head_size or head_size,
        "attn_mask_type": TE_MASK,
        "window_size": window_size(row.window),
        "bottom_right_diagonal": False,
        "pad_between_seqs": pad_between_seqs,
        "context_parallel": way is not None,
        "cp_comm_type": way or "p2p",
        "cp_size": row.context_size,
        "deterministic": deterministic,
        "core_attention_bias_requires_grad": False,
        "softmax_scale": head_size**-0.5,
    }
    known = {field.name for field in fields(utils.AttentionParams)}  # fewer in older versions
    parameters = utils.AttentionParams(
        **{name: value for name, value in asked.items() if name in known}
    )
    flash, version, fused, _, unfused, _ = utils.get_attention_backend(parameters)
    if flash:
        return f"flash-attn {version}"
    return "cuDNN" if fused else "unfused" if unfused else None


@functools.cache
def _context_stream(device: torch.device) -> Any:
    """The stream on which Transformer Engine passes on keys and values; None without CUDA."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


MODULE_OF: dict[CoreAttentionName, Any] = {
    "te": TEAttention,
    "torch": VarlenAttention,
    "sdpa": ContextAttention,
}
"""The class for ``core_attention`` in a layer spec, with upstream's signature."""

_HALF_PRECISIONS = (torch.bfloat16, torch.float16)
_HEAD_SIZE_MULTIPLE = 8
_MAX_HEAD_SIZE = 256
"""Limits of the kernel of ``varlen_attn``, FlashAttention 2."""
_MAJOR_OF_AMPERE = 8
"""Compute capability that it needs."""
_NO_CUDA = "there is no CUDA device"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Facts that the selection depends on."""

    compute_capability: tuple[int, int] | None
    """Compute capability of this rank's GPU; None without CUDA."""
    dtype: torch.dtype
    """Dtype of queries, keys and values."""
    head_size: int
    """The larger of those of keys and values."""
    why_no_te: str | None
    """Reason why Transformer Engine cannot or should not be used; None where it can."""
    why_no_varlen: str | None
    """Reason why this torch has no ``varlen_attn``; None where it has."""
    softmax_type: str = "vanilla"
    """The model's."""

    def obstacle(self, name: CoreAttentionName) -> str | None:
        """Reason why a core attention cannot be used; None where it can."""
        if name == "sdpa":
            return None
        capability = self.compute_capability
        if capability is None:
            return _NO_CUDA
        if self.softmax_type != "vanilla":
            return (
                f"only sdpa adds an offset to the softmax but --softmax-type is {self.softmax_type}"
            )
        if self.dtype not in _HALF_PRECISIONS:
            name_of_dtype = str(self.dtype).removeprefix("torch.")
            return f"its kernels take bf16 but the model computes in {name_of_dtype}"
        if name == "te":
            return self.why_no_te
        if capability[0] < _MAJOR_OF_AMPERE:
            return (
                f"its kernel needs compute capability {_MAJOR_OF_AMPERE}.0 but this GPU has "
                f"{capability[0]}.{capability[1]}"
            )
        if self.head_size > _MAX_HEAD_SIZE or self.head_size % _HEAD_SIZE_MULTIPLE:
            return (
                f"its kernel takes heads of a multiple of {_HEAD_SIZE_MULTIPLE} up to "
                f"{_MAX_HEAD_SIZE} but they have {self.head_size}"
            )
        return self.why_no_varlen


@dataclass(frozen=True)
class CoreAttention:
    """The core attention of a run."""

    name: CoreAttentionName
    why: str
    """The reason, for the log: ``core attention: te (requested)``."""


def choose(wish: str, here: Environment) -> CoreAttention:
    """The core attention for a value of ``--core-attention``: the best available, or a given one.

    Raises:
        ConfigurationError: it cannot be used here, or is no core attention.
    """
    obstacles = {name: here.obstacle(name) for name in CORE_ATTENTIONS}
    usable = [name for name, obstacle in obstacles.items() if obstacle is None]
    if wish == "auto":
        better = CORE_ATTENTIONS[: CORE_ATTENTIONS.index(usable[0])]
        why = "; ".join(f"not {name}: {obstacles[name]}" for name in better)
        return CoreAttention(usable[0], why or "the best available")
    if wish not in CORE_ATTENTIONS:
        raise ConfigurationError(
            f"--core-attention {wish} is none of the {len(CORE_ATTENTIONS) + 1} that are known; "
            f"choose one of auto, {', '.join(CORE_ATTENTIONS)}"
        )
    if wish not in usable:
        raise ConfigurationError(
            f"--core-attention {wish} cannot be used: {obstacles[wish]}; choose "
            f"{' or '.join(usable)}, or auto for the best available"
        )
    return CoreAttention(wish, "requested")


def row_kinds(pool: Pool, shape: ModelShape, longest: int) -> tuple[RowKind, ...]:
    """The kinds of packed rows that the strategies of a pool compute core attention for.

    Args:
        longest: tokens of the longest sequence.
    """
    schemes = {scheme for strategy in pool.strategies for scheme in strategy.schemes}
    groups = {(group.tp, group.cp) for scheme in schemes for group in scheme.group_schemes}
    windows: list[int | None] = [None] if shape.num_windowed_layers < shape.num_layers else []
    if shape.num_windowed_layers:
        windows.append(shape.window_tokens - 1)
    return tuple(
        RowKind(
            shape.num_attention_heads // tp,
            shape.num_query_groups // tp,
            cp,
            longest,
            window,
            shape.v_head_dim or None,
            tp,
            bool(shape.num_windowed_layers),
        )
        for tp, cp in sorted(groups)
        for window in windows
    )


def current_environment(
    *,
    dtype: torch.dtype,
    head_size: int,
    rows: Sequence[RowKind] = (RowKind(1, 1),),
    cp_comm_type: str = "auto",
    softmax_type: str = "vanilla",
) -> Environment:
    """The environment of this process and its current CUDA device.

    Args:
        rows: kinds of rows that a core attention has to compute, see `row_kinds`.
        cp_comm_type: how ranks that share a row exchange, one of `CP_COMM_TYPES`.
    """
    has_cuda = torch.cuda.is_available()
    has_varlen = importlib.util.find_spec("torch.nn.attention.varlen") is not None
    return Environment(
        compute_capability=torch.cuda.get_device_capability() if has_cuda else None,
        dtype=dtype,
        head_size=max(head_size, *(row.value_head_size or 0 for row in rows)),
        why_no_te=_why_no_te(rows, dtype, head_size, cp_comm_type) if has_cuda else _NO_CUDA,
        softmax_type=softmax_type,
        why_no_varlen=(
            None if has_varlen else f"torch {torch.__version__} has no torch.nn.attention.varlen"
        ),
    )


def _why_no_te(
    rows: Sequence[RowKind], dtype: torch.dtype, head_size: int, cp_comm_type: str
) -> str | None:
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # built for another torch or CUDA, it may raise anything
        return f"Transformer Engine cannot be imported ({_in_one_line(error)})"
    try:
        for row in rows:
            obstacle = te_obstacle(row, dtype=dtype, head_size=head_size, cp_comm_type=cp_comm_type)
            if obstacle is not None:
                return obstacle
    except Exception as error:  # the selection is internal and may differ in other versions
        return f"Transformer Engine does not say which kernel it would use ({_in_one_line(error)})"
    return None


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
