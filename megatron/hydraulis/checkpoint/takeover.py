"""What upstream's state dict says beside tensors, in checkpoints of plain Megatron and in ours."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hydraulis.checkpoint.model_arguments import model_of
from megatron.hydraulis.checkpoint.names import WRITTEN_HERE
from megatron.hydraulis.checkpoint.reader import read_common_state
from megatron.hydraulis.checkpoint.tensors import MASTER
from megatron.hydraulis.errors import CheckpointError, ConfigurationError

__all__ = ["UpstreamState", "master_prefix", "upstream_state"]


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
    """As far as its arguments are stored; see `model_of`."""


def upstream_state(path: Path) -> UpstreamState:
    """Read it from a checkpoint's folder, which may be of upstream's earlier form.

    Raises CheckpointError.
    """
    common = read_common_state(path)
    args = common.get("args")
    if args is not None and not isinstance(args, Namespace):
        raise CheckpointError(
            f"{path}: args must be upstream's arguments but is {type(args).__name__}; load another "
            "checkpoint"
        )
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
