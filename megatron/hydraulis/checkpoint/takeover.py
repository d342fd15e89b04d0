"""What upstream's state dict says beside tensors, in checkpoints of plain Megatron and in ours."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.safe_globals import SAFE_GLOBALS

from megatron.hydraulis.checkpoint.names import WRITTEN_HERE
from megatron.hydraulis.checkpoint.reader import read_object
from megatron.hydraulis.checkpoint.tensors import MASTER
from megatron.hydraulis.errors import CheckpointError, ConfigurationError

__all__ = ["MODEL_ARGUMENTS", "UpstreamState", "master_prefix", "model_of", "upstream_state"]

MODEL_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "normalization",
    "norm_epsilon",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
)
"""Attributes of upstream's arguments that make another model of the same tensors, or other tensors;
a run must have those of the checkpoint that it loads."""


@dataclass(frozen=True)
class UpstreamState:
    """Of a run: counters, scheduler, and how its optimizer stored its state."""

    iteration: int
    num_steps: int
    """Updates that the optimizer has made."""
    num_consumed_sequences: int
    scheduler: Mapping[str, Any] | None
    num_floating_point_operations: float
    written_here: bool
    """Whether this package wrote it, so that there must be a manifest."""
    sharding_type: str | None
    """Of the optimizer state; None where the checkpoint does not tell."""
    model: Mapping[str, Any]
    """As far as its arguments are stored; see `MODEL_ARGUMENTS`."""


def model_of(args: Any) -> dict[str, Any]:
    """What makes the model, of upstream's arguments."""
    present = {name: getattr(args, name) for name in MODEL_ARGUMENTS if hasattr(args, name)}
    if not getattr(args, "group_query_attention", True):
        present["num_query_groups"] = args.num_attention_heads
    return present


def upstream_state(path: Path) -> UpstreamState:
    """Read it from a checkpoint's folder, which may be of upstream's earlier form.

    Raises CheckpointError.
    """
    common = _common_state(path)
    if not isinstance(common, dict):
        raise CheckpointError(
            f"{path}: the state beside the tensors must be a dict but is "
            f"{type(common).__name__}; load another checkpoint"
        )
    args = common.get("args")
    optimizer = common.get("optimizer")
    metadata = common.get("content_metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    iteration = _number(path, "iteration", common.get("iteration", 0))
    return UpstreamState(
        iteration=iteration,
        num_steps=_num_steps(path, optimizer, iteration),
        num_consumed_sequences=_number(
            path, "consumed_train_samples", getattr(args, "consumed_train_samples", 0)
        ),
        scheduler=common.get("opt_param_scheduler"),
        num_floating_point_operations=common.get("num_floating_point_operations_so_far", 0),
        written_here=WRITTEN_HERE in metadata,
        sharding_type=metadata.get("distrib_optim_sharding_type"),
        model={} if args is None else model_of(args),
    )


def master_prefix(path: Path, keys: Collection[str], upstream: UpstreamState) -> str:
    """Of the keys of the fp32 master.

    Raises ConfigurationError for a checkpoint without optimizer state in global coordinates.
    """
    if any(key.startswith(MASTER) for key in keys):
        return MASTER
    has_state = any(key.startswith("optimizer.") for key in keys)
    if not has_state:
        raise ConfigurationError(
            f"{path} has no optimizer state; start a new optimizer with its weights by --finetune, "
            "or load another checkpoint"
        )
    raise ConfigurationError(
        f"{path} has optimizer state of the kind '{upstream.sharding_type}', which only the layout "
        f"of ranks that wrote it can read; let Megatron save once with "
        "--dist-ckpt-optim-fully-reshardable, or take the weights alone by --finetune"
    )


def _common_state(path: Path) -> Any:
    if not (path / COMMON_STATE_FNAME).is_file():
        return read_object(path, "common_state")
    try:
        with torch.serialization.safe_globals(SAFE_GLOBALS):
            return torch.load(path / COMMON_STATE_FNAME, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged pickle can raise anything
        raise CheckpointError(
            f"{path / COMMON_STATE_FNAME}: cannot be read: {' '.join(str(error).split())[:300]}; "
            "load another checkpoint"
        ) from error


def _num_steps(path: Path, optimizer: Any, iteration: int) -> int:
    """As its groups say; by older versions with Transformer Engine or apex only the iteration."""
    try:
        steps = {
            int(group["step"])
            for group in optimizer["optimizer"]["param_groups"]
            if group.get("step") is not None
        }
    except (TypeError, KeyError, ValueError):
        return iteration
    if len(steps) > 1:
        raise CheckpointError(
            f"{path}: parameter groups were updated {sorted(steps)} times, which must be one "
            "number; load another checkpoint"
        )
    return steps.pop() if steps else iteration


def _number(path: Path, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CheckpointError(
            f"{path}: {name} must be a number from 0 on but is {value!r}; load another checkpoint"
        )
    return value
