"""Defaults that differ from upstream's, and the size of the vocabulary."""

import argparse
import copy
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.parser import ParsedFlags

__all__ = [
    "Vocabulary",
    "has_fused_weight_gradients",
    "padded_vocabulary_size",
    "resolve_vocabulary",
    "set_defaults",
]


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
        # Upstream's default is an error where local layers have no apex.
        "gradient_accumulation_fusion": has_cuda
        and (has_fused_weight_gradients() or _has_te_layers(flags)),
        "tensorboard_dir": str(run_dir / "tensorboard"),
        # Upstream would write to the folder of checkpoints.
        "wandb_save_dir": str(run_dir / "wandb"),
    }
    if flags.args.eval_interval is None:
        # Upstream uses the interval even without evaluation: set one that is never reached, and
        # evaluate nothing after the last iteration either.
        defaults["eval_interval"] = (flags.args.train_iters or 0) + 1
        defaults["eval_iters"] = 0
    if not has_cuda:
        defaults |= _CPU_DEFAULTS
    for dest, value in defaults.items():
        if not flags.was_given(dest):
            setattr(flags.args, dest, value)


def _has_te_layers(flags: ParsedFlags) -> bool:
    was_given = flags.was_given("transformer_impl")
    return was_given and flags.args.transformer_impl == "transformer_engine"


def has_fused_weight_gradients() -> bool:
    """Whether apex's kernel that accumulates weight gradients is installed."""
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
    """Set what canonical shards and packing require; options for these attributes change nothing.

    For upstream, the job is one data-parallel group with micro-batches of one sequence.
    """
    args.micro_batch_size = 1
    args.tensor_model_parallel_size = 1
    args.pipeline_model_parallel_size = 1
    args.context_parallel_size = 1
    args.sequence_parallel = False
    args.calculate_per_token_loss = True
    args.use_distributed_optimizer = True
    args.accumulate_allreduce_grads_in_fp32 = True
    # Fused rotation and persistent norms need apex or Transformer Engine.
    args.apply_rope_fusion = False
    args.no_persist_layer_norm = True
    args.reset_position_ids = True
    args.reset_attention_mask = True
    args.log_throughput = True
    args.enable_one_logger = False
    # Checkpoints hold the state in global coordinates.
    args.dist_ckpt_optim_fully_reshardable = True


# The flags that each tokenizer needs. HuggingFaceTokenizer also takes the name of a published one.
_MADE_FROM_FILES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "GPTSentencePieceTokenizer": ("tokenizer_model",),
    "Llama2Tokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
}
_MADE_FROM_VALUES = {
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}
# Tokenizers built from --vocab-size; for others the flag is the least vocabulary of the model.
_SIZED_BY_FLAG = ("NullTokenizer", "TikTokenizer")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Numbers of entries."""

    size: int
    """Tokens that exist; logits beyond are masked."""
    padded_size: int
    """Rows of the embedding and of the output layer."""


def padded_vocabulary_size(size: int, divisible_by: int) -> int:
    """The least multiple of divisible_by that holds size entries."""
    return math.ceil(size / divisible_by) * divisible_by


def resolve_vocabulary(args: argparse.Namespace) -> Vocabulary:
    """Load the tokenizer and derive the size of the model's vocabulary.

    --padded-vocab-size is used unchanged if given. Otherwise the vocabulary, or a larger
    --vocab-size, is padded to a multiple of --make-vocab-size-divisible-by.

    Raises ConfigurationError when the tokenizer is missing or cannot be read, or its vocabulary is
    larger than the model's.
    """
    _check_sources(args)
    size = _tokenizer_size(args)
    if args.vocab_size is not None and args.tokenizer_type not in _SIZED_BY_FLAG:
        _check_holds(size, args.vocab_size, "--vocab-size")
        size = args.vocab_size
    if args.padded_vocab_size is not None:
        _check_holds(size, args.padded_vocab_size, "--padded-vocab-size")
        return Vocabulary(size, args.padded_vocab_size)
    return Vocabulary(size, padded_vocabulary_size(size, args.make_vocab_size_divisible_by))


def _check_holds(size: int, num_entries: int, option: str) -> None:
    if size > num_entries:
        raise ConfigurationError(
            f"the vocabulary must fit the model but has {size} tokens and {option} is "
            f"{num_entries}; give {option} {size} or more, or leave it out"
        )


def _check_sources(args: argparse.Namespace) -> None:
    kind = args.tokenizer_type
    files = _MADE_FROM_FILES.get(kind, ())
    for dest in files + _MADE_FROM_VALUES.get(kind, ()):
        option = "--" + dest.replace("_", "-")
        value = getattr(args, dest)
        if value is None:
            raise ConfigurationError(
                f"{kind} is made from {option}, which is missing; give {option}"
            )
        if dest in files and not Path(value).is_file():
            raise ConfigurationError(
                f"{kind} is made from {option}, but there is no file {value}; correct the path"
            )


def _tokenizer_size(args: argparse.Namespace) -> int:
    if args.tokenizer_type == "NullTokenizer":  # building it would import every library of them
        return int(args.vocab_size)
    try:
        # Upstream writes the padded size into the arguments it is given.
        return int(build_tokenizer(copy.copy(args)).vocab_size)
    except Exception as error:  # Each of the tokenizer libraries raises its own kinds.
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"{args.tokenizer_type} {args.tokenizer_model or ''} cannot be read: "
            f"{type(error).__name__}: {reason}; check the --tokenizer-* flags"
        ) from error
