"""Entries of Megatron's state dict besides tensors, in its form."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from megatron.hydraulis.checkpoint.names import sharding_metadata
from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW

_VERSION = 3.0
"""Of upstream's state dict."""
_PLAIN = (str, int, float, bool, type(None))


def upstream_entries(
    args: Namespace,
    iteration: int,
    optimizer: ShardedAdamW,
    *,
    num_floating_point_operations: float = 0.0,
) -> dict[str, Any]:
    """What Megatron needs to read a checkpoint, in any program that saves one."""
    return {
        "args": _plain_arguments(args),
        "checkpoint_version": _VERSION,
        "iteration": iteration,
        "num_floating_point_operations_so_far": num_floating_point_operations,
        "optimizer": optimizer_entry(optimizer),
    }


def _plain_arguments(args: Namespace) -> Namespace:
    """Upstream's arguments that can be read without running code."""
    return Namespace(**{key: value for key, value in vars(args).items() if _is_plain(value)})


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return type(value) in _PLAIN


def optimizer_entry(optimizer: ShardedAdamW) -> dict[str, Any]:
    """The optimizer's state in the form of upstream's distributed optimizer."""
    num_steps = int(optimizer.num_steps.item())
    settings = optimizer.settings
    # Upstream tells groups apart by their rates, which it writes into each.
    rates = {"max_lr": settings.lr, "min_lr": settings.min_lr}
    groups = [
        rates
        | {key: value for key, value in group.items() if key != "params"}
        | {"step": num_steps, "is_expert_parallel": False, "is_decoupled_lr": False}
        for group in optimizer.param_groups
    ]
    return {
        "optimizer": {"param_groups": groups},
        "param_state_sharding_type": sharding_metadata()["distrib_optim_sharding_type"],
    }
