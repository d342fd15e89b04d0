"""Selection of a run's core attention: what is requested, what is available, and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.runtime.attention import ContextAttention
from megatron.hydraulis.runtime.attention_gpu import (
    RowKind,
    TEAttention,
    VarlenAttention,
    te_obstacle,
)
from megatron.hydraulis.strategy import Pool

CoreAttentionName = Literal["te", "torch", "sdpa"]

MODULE_OF: dict[CoreAttentionName, Any] = {
    "te": TEAttention,
    "torch": VarlenAttention,
    "sdpa": ContextAttention,
}
"""The class for ``core_attention`` in a layer spec, with upstream's signature; the best first."""

CORE_ATTENTIONS = tuple(MODULE_OF)

_HALF_PRECISIONS = (torch.bfloat16, torch.float16)
_HEAD_SIZE_MULTIPLE = 8
_MAX_HEAD_SIZE = 256
"""Limits of the kernel of ``varlen_attn``, FlashAttention 2."""
_MAJOR_OF_AMPERE = 8
"""Compute capability that it needs."""
_NO_CUDA = "there is no CUDA device"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the selection depends on."""

    compute_capability: tuple[int, int] | None
    """Of this rank's GPU; None without CUDA."""
    dtype: torch.dtype
    """Of queries, keys and values."""
    head_size: int
    """The larger of those of keys and values."""
    why_no_te: str | None
    """Why Transformer Engine cannot or should not be used; None where it can."""
    why_no_varlen: str | None
    """Why this torch has no ``varlen_attn``; None where it has."""
    softmax_type: str = "vanilla"
    """Of the model."""

    def obstacle(self, name: CoreAttentionName) -> str | None:
        """Why a core attention cannot be used; None where it can."""
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
    """For the log: ``core attention: te (requested)``."""


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
    for name, obstacle in obstacles.items():
        if name == wish and obstacle is None:
            return CoreAttention(name, "requested")
        if name == wish:
            raise ConfigurationError(
                f"--core-attention {wish} cannot be used: {obstacle}; choose {' or '.join(usable)},"
                " or auto for the best available"
            )
    raise ConfigurationError(
        f"--core-attention {wish} is none of the {len(CORE_ATTENTIONS) + 1} that are known; choose "
        f"one of auto, {', '.join(CORE_ATTENTIONS)}"
    )


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
