"""What is set for a user who has not said otherwise, and why it differs from upstream's default."""

import argparse
import importlib.util
from pathlib import Path

from megatron.hydraulis.flag_parser import ParsedFlags

__all__ = ["has_fused_weight_gradients", "set_defaults"]


def set_defaults(flags: ParsedFlags, run_dir: Path, *, has_cuda: bool) -> None:
    """Change attributes of ``flags.args`` that no given option sets."""
    _set_always(flags.args)
    defaults: dict[str, object] = {
        "log_interval": 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": "local",
        "max_position_embeddings": flags.args.seq_length,
        "num_workers": 0,
        "cp_comm_type": ["auto"],
        # Upstream's default is an error where apex is not installed.
        "gradient_accumulation_fusion": has_cuda and has_fused_weight_gradients(),
        "tensorboard_dir": str(run_dir / "tensorboard"),
        # Upstream would put it into the folder of checkpoints.
        "wandb_save_dir": str(run_dir / "wandb"),
    }
    if flags.args.eval_interval is None:
        # Upstream computes with the interval even where nothing is evaluated: take one that is
        # never reached, and evaluate nothing after the last iteration either.
        defaults["eval_interval"] = (flags.args.train_iters or 0) + 1
        defaults["eval_iters"] = 0
    if not has_cuda:
        defaults |= _CPU_DEFAULTS
    for dest, value in defaults.items():
        if not flags.was_given(dest):
            setattr(flags.args, dest, value)


def has_fused_weight_gradients() -> bool:
    """Whether apex's kernel is there that adds a weight's gradient to what there is of it."""
    return importlib.util.find_spec(_FUSED_WEIGHT_GRADIENTS) is not None


_FUSED_WEIGHT_GRADIENTS = "fused_weight_gradient_mlp_cuda"

# No CUDA: no NCCL, and compiled fusions cost each process 10-20 s before its first step.
_CPU_DEFAULTS: dict[str, object] = {
    "distributed_backend": "gloo",
    "masked_softmax_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_gelu_fusion": False,
    "bias_dropout_fusion": False,
    "disable_jit_fuser": True,
}


def _set_always(args: argparse.Namespace) -> None:
    """What follows from canonical shards and packing; its options are accepted and change nothing.

    To upstream's arithmetic the job is one data-parallel group that takes a global batch in
    micro-batches of one sequence.
    """
    args.micro_batch_size = 1
    args.tensor_model_parallel_size = 1
    args.pipeline_model_parallel_size = 1
    args.context_parallel_size = 1
    args.sequence_parallel = False
    args.calculate_per_token_loss = True
    args.use_distributed_optimizer = True
    args.accumulate_allreduce_grads_in_fp32 = True
    # Fused rotation and persistent norms are kernels of apex or of Transformer Engine.
    args.apply_rope_fusion = False
    args.no_persist_layer_norm = True
    args.reset_position_ids = True
    args.reset_attention_mask = True
    args.log_throughput = True
    args.enable_one_logger = False
    # What we write: every rectangle of the state in global coordinates.
    args.dist_ckpt_optim_fully_reshardable = True
