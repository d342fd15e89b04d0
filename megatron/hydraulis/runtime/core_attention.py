"""Which core attention a run uses: what is asked for, what is there, and why."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron.hydraulis.errors import ConfigurationError

__all__ = [
    "CORE_ATTENTIONS",
    "CoreAttention",
    "CoreAttentionName",
    "Surroundings",
    "builder_of",
    "choose",
    "surroundings_here",
]

CoreAttentionName = Literal["te", "torch", "sdpa"]

CORE_ATTENTIONS: tuple[CoreAttentionName, ...] = ("te", "torch", "sdpa")
"""The best first."""

_HALF_PRECISIONS = (torch.bfloat16, torch.float16)
_HEAD_SIZE_MULTIPLE = 8
_MAX_HEAD_SIZE = 256
"""What the kernel of ``varlen_attn``, FlashAttention 2, takes."""
_MAJOR_OF_AMPERE = 8
"""Compute capability from which it runs."""
_TRANSFORMER_ENGINE = "transformer_engine"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a choice depends on."""

    compute_capability: tuple[int, int] | None
    """Of this rank's GPU; None without CUDA."""
    dtype: torch.dtype
    """Of queries, keys and values."""
    head_size: int
    why_no_te: str | None
    """Why Transformer Engine cannot be used; None where it can."""
    why_no_varlen: str | None
    """Why this torch has no ``varlen_attn``; None where it has."""

    def obstacle(self, name: CoreAttentionName) -> str | None:
        """Why a core attention cannot be used, with the numbers; None where it can."""
        if name == "sdpa":
            return None
        capability = self.compute_capability
        if capability is None:
            return "there is no CUDA device"
        if self.dtype not in _HALF_PRECISIONS:
            return f"its kernels take bf16 but the model computes in {_name(self.dtype)}"
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
    """For the log: ``core attention: te (asked for)``."""


def choose(wish: str, here: Surroundings) -> CoreAttention:
    """What ``--core-attention`` comes to: the best that is there, or what was asked for.

    Raises:
        ConfigurationError: what was asked for is not there, or is no core attention.
    """
    if wish == "auto":
        obstacles: list[str] = []
        for name in CORE_ATTENTIONS:
            why_not = here.obstacle(name)
            if why_not is None:
                reason = "; ".join(obstacles) if obstacles else "the best there is"
                return CoreAttention(name, reason)
            obstacles.append(f"not {name}: {why_not}")
    known: dict[str, CoreAttentionName] = {name: name for name in CORE_ATTENTIONS}
    if wish not in known:
        raise ConfigurationError(
            f"--core-attention {wish} is none of the {len(known) + 1} that are known; choose one "
            f"of auto, {', '.join(known)}"
        )
    why_not = here.obstacle(known[wish])
    if why_not is not None:
        usable = [name for name in CORE_ATTENTIONS if here.obstacle(name) is None]
        raise ConfigurationError(
            f"--core-attention {wish} cannot be used: {why_not}; choose {' or '.join(usable)}, or "
            "auto for the best that is there"
        )
    return CoreAttention(known[wish], "asked for")


def surroundings_here(*, dtype: torch.dtype, head_size: int) -> Surroundings:
    """Those of this process and its current CUDA device."""
    has_cuda = torch.cuda.is_available()
    return Surroundings(
        compute_capability=torch.cuda.get_device_capability() if has_cuda else None,
        dtype=dtype,
        head_size=head_size,
        why_no_te=_why_no_te() if has_cuda else "there is no CUDA device",
        why_no_varlen=_why_no_varlen(),
    )


def builder_of(name: CoreAttentionName) -> Any:
    """What stands in a layer spec as ``core_attention``, with upstream's signature.

    Modules are imported here, when they are needed: Transformer Engine must not be, on a CPU.
    """
    if name == "te":
        from megatron.hydraulis.runtime.attention_gpu import TEAttention

        return TEAttention
    if name == "torch":
        from megatron.hydraulis.runtime.attention_gpu import VarlenAttention

        return VarlenAttention
    from megatron.hydraulis.runtime.attention import ContextAttention

    return ContextAttention


def _why_no_te() -> str | None:
    if importlib.util.find_spec(_TRANSFORMER_ENGINE) is None:
        return "Transformer Engine is not installed"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # built for another torch or CUDA: it raises what it likes
        reason = " ".join(str(error).split()) or type(error).__name__
        return f"Transformer Engine cannot be imported ({reason})"
    return None


def _why_no_varlen() -> str | None:
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
