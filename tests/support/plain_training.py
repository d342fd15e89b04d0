"""Upstream's GPTModel, parameter groups and schedule, called directly on one process.

Of this project only the patch for CPUs is used. Sequences run one after the other, unpacked.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core import num_microbatches_calculator as batches
from megatron.core.distributed.finalize_model_grads import (
    _update_router_expert_bias,
    reset_model_temporary_tensors,
)
from megatron.core.optimizer import _get_param_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import add_megatron_arguments, validate_args
from megatron.training.global_vars import set_args
from megatron.training.models.gpt import GPTModelBuilder
from megatron.training.training import (
    get_megatron_optimizer_config,
    get_optimizer_param_scheduler,
    update_train_iters,
)

from hydraulis_patches.cpu_backend import apply_cpu_backend
from tests.support.plain_checkpoints import put_writer_on_cpu
from tests.support.reference import give_missing_groups, local_latent_attention, sequence_loss

ITERATION = 1
"""That the checkpoint of the initial weights claims."""


@dataclass(frozen=True)
class PlainRun:
    """The outcome of each iteration of plain training."""

    losses: tuple[float, ...]
    """Mean over the tokens of the global batch, before the update."""
    gradient_norms: tuple[float, ...]
    """Before clipping."""
    learning_rates: tuple[float, ...]
    """After the iteration, of parameters without a rate of their own."""

    @classmethod
    def read(cls, folder: Path) -> PlainRun:
        """The outcome that `train_plainly` wrote."""
        found = json.loads((folder / "plain.json").read_text())
        return cls(**{name: tuple(values) for name, values in found.items()})


def train_plainly(argv: Sequence[str], sequences: Sequence[np.ndarray], folder: Path) -> None:
    """Write a checkpoint of the initial weights, train, and write what `PlainRun` reads.

    Args:
        argv: options of Megatron; unknown ones are left out. ``--padded-vocab-size`` among them.
        sequences: tokens of each sequence, in the order of training.
        folder: where the checkpoint and the results go.
    """
    apply_cpu_backend()
    put_writer_on_cpu()
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    args = _arguments(argv)
    set_args(args)
    batches.init_num_microbatches_calculator(
        rank=0,
        global_batch_size=args.global_batch_size,
        micro_batch_size=1,
        data_parallel_size=1,
        step_batch_size_schedule=args.step_batch_size_schedule,
        seq_length=args.seq_length,
    )
    torch.manual_seed(args.seed)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with local_latent_attention():
        model = GPTModelBuilder(gpt_config_from_args(args)).build_model(groups, True, True)
    give_missing_groups(model, groups.tp)
    _save(model, args, folder)

    optimizer_config, overrides = get_megatron_optimizer_config(args)
    adamw = torch.optim.AdamW(
        _get_param_groups([model], optimizer_config, overrides),
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_eps,
    )
    scheduler = get_optimizer_param_scheduler(adamw)
    update_train_iters(args)
    found: dict[str, list[float]] = {"losses": [], "gradient_norms": [], "learning_rates": []}
    num_consumed = 0
    for _ in range(args.train_iters):
        batches.update_num_microbatches(num_consumed)
        size = batches.get_current_global_batch_size()
        batch = sequences[num_consumed : num_consumed + size]
        num_consumed += size
        num_tokens = sum(len(tokens) - 1 for tokens in batch)
        adamw.zero_grad()
        total = 0.0
        for tokens in batch:
            loss = sequence_loss(model, tokens)
            (loss / num_tokens).backward()
            total += loss.item()
        found["losses"].append(total / num_tokens)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        found["gradient_norms"].append(norm.item())
        adamw.step()
        if model.config.moe_router_enable_expert_bias:
            _update_router_expert_bias([model], model.config)
            reset_model_temporary_tensors(model.config, [model])
        scheduler.step(increment=size)
        found["learning_rates"].append(
            next(group["lr"] for group in adamw.param_groups if group["default_config"])
        )
    (folder / "plain.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments as upstream's parse_args and validate_args have them on one process."""
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args, _ = parser.parse_known_args(argv)
    args.rank, args.world_size = 0, 1
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    with contextlib.redirect_stdout(io.StringIO()):
        validate_args(args)
    return args


def _save(model: torch.nn.Module, args: argparse.Namespace, folder: Path) -> None:
    path = folder / f"iter_{ITERATION:07d}"
    path.mkdir()
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    names = ("num_layers", "hidden_size", "normalization", "swiglu", "rotary_base")
    state = {
        "model": model.sharded_state_dict(),  # type: ignore[operator]
        "args": argparse.Namespace(**{name: getattr(args, name) for name in names}),
        "checkpoint_version": 3.0,
        "iteration": ITERATION,
    }
    dist_checkpointing.save(state, str(path))
