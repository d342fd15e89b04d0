"""Defaults that differ from upstream's, and the size of the vocabulary."""

import argparse
import contextlib
import copy
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.datasets.utils import get_blend_from_list

from megatron.hydraulis.cost_model.model_arguments import (
    TE_LAYERS,
    asked_layers,
    balances_by_a_loss,
    num_gate_tensors,
)
from megatron.hydraulis.cost_model.trained_model import kept_modules
from megatron.hydraulis.data.tokenizer import (
    build_tokenizer,
    check_made_with,
    check_tokenizer_sources,
)
from megatron.hydraulis.errors import ConfigurationError, DataError
from megatron.hydraulis.flags.config import option_of
from megatron.hydraulis.flags.parser import FlagParser, ParsedFlags


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that differs from upstream's default, or an option from upstream's effect."""

    typed: str
    """The setting as one would type it: ``--hidden-dropout 0.0``."""
    upstream: str
    """Upstream's default in the same form; empty for a switch."""
    why: str
    changes_update: bool
    """Whether training takes another course by it."""

    @property
    def warns(self) -> bool:
        """True if a user has to be warned of it: dropout, which most scripts leave to a default,
        a loss that balances experts, and positions."""
        named = ("dropout", "aux-loss", "rope-scaling-factor")
        return self.changes_update and any(name in self.typed for name in named)

    def __str__(self) -> str:
        theirs = f" (Megatron: {self.upstream})" if self.upstream else ""
        return f"{self.typed}{theirs}: {self.why}"


_CHANGES_UPDATE = {
    "hidden_dropout": "dropout would make the update depend on the plan",
    "attention_dropout": "dropout would make the update depend on the plan",
    "calculate_per_token_loss": "the loss is a mean over the tokens of the global batch",
    "reset_position_ids": "positions restart in every sequence",
    "reset_attention_mask": "attention stays inside a sequence",
}
UPSTREAMS_ROPE_FACTOR = 8.0
"""Megatron's ``--rope-scaling-factor`` whatever a command line says."""
_FILLERS = ("eval_interval", "save_interval")
"""Settings that get a number which is never reached where no option gives one."""
_CHANGES_NO_UPDATE = {
    "log_interval": "a line for every iteration",
    "log_throughput": "TFLOP/s in the log line",
    "transformer_impl": "layers of megatron-core, without Transformer Engine",
    "max_position_embeddings": "as long as the longest sequence",
    "cp_comm_type": "a ring that hides behind attention, else the fewest bytes",
    "gradient_accumulation_fusion": "apex, which fuses it, is not installed",
    "tensorboard_dir": "events are part of the run folder",
    "wandb_save_dir": "part of the run folder",
    "eval_interval": "no evaluation during training",
    "eval_iters": "",  # says the same
    "use_distributed_optimizer": "state is sharded over all ranks",
    "apply_rope_fusion": "fused rotation comes with layers of Transformer Engine",
    "no_persist_layer_norm": "persistent norms need apex",
    "enable_one_logger": "no metrics go to One Logger",
    "dist_ckpt_optim_fully_reshardable": "checkpoints load under every strategy",
    "save_interval": "one checkpoint, at the end",
    "bias_swiglu_fusion": "no fused kernel for the offset or limit",
    "bias_gelu_fusion": "no fused kernel for the activation",
    "num_workers": "ranks read memory-mapped files without loader processes",
    "micro_batch_size": "",  # nominal, see _set_always
    "accumulate_allreduce_grads_in_fp32": "",  # upstream's own choice, see _of_option
}
_CHANGES_ON_A_CPU = dict.fromkeys(
    (
        "distributed_backend",
        "masked_softmax_fusion",
        "bias_swiglu_fusion",
        "bias_gelu_fusion",
        "bias_dropout_fusion",
    ),
    "the device is a CPU",
) | {"disable_jit_fuser": "compiling takes longer than it saves without CUDA"}


def differences(
    parser: FlagParser,
    flags: ParsedFlags,
    before: Mapping[str, object],
    *,
    uses_tp: bool,
    has_cuda: bool,
) -> tuple[Difference, ...]:
    """Differences between training and upstream's with the same options, mostly of defaults.

    What changes the update comes first.

    Args:
        parser: which parsed the flags.
        flags: after `set_defaults`.
        before: attributes as parsed, before it.
        uses_tp: whether a replica has tp > 1.
        has_cuda: whether the job computes with CUDA.
    """
    found = [
        Difference(str(given), "", why, changes_update=True)
        for given in flags.given
        if (why := _of_option(flags.args, given.dest))
    ]
    without_effect = _CHANGES_NO_UPDATE | ({} if has_cuda else _CHANGES_ON_A_CPU)
    for changes_update, table in ((True, _CHANGES_UPDATE), (False, without_effect)):
        for dest, why in table.items():
            ours, theirs = getattr(flags.args, dest), before[dest]
            if why and ours != theirs and dest not in flags.attempted:
                typed, upstream = parser.as_typed(dest, ours), parser.as_typed(dest, theirs)
                if dest in _FILLERS:
                    typed, upstream = f"no {option_of(dest)}", ""
                found.append(Difference(typed, upstream, why, changes_update))
    switches = {"--sequence-parallel", "--no-sequence-parallel"}
    if uses_tp and not switches & flags.explicit:
        why = "activations between tensor-parallel layers are cut along the sequence"
        found.append(Difference("--sequence-parallel", "", why, changes_update=False))
    return tuple(found)


def _of_option(args: argparse.Namespace, dest: str) -> str:
    """Difference from upstream's training with an option that is given; empty if there is none."""
    if dest == "grad_reduce_in_bf16":
        return "gradients of micro-batches, and those of ranks, are added in fp32"
    if dest == "moe_aux_loss_coeff" and balances_by_a_loss(args):
        return (
            "the balancing loss is that of each sequence, weighted by its tokens, as Megatron's "
            "depends on packing"
        )
    if dest == "rope_scaling_factor" and args.rope_scaling_factor != UPSTREAMS_ROPE_FACTOR:
        return (
            "positions are scaled as in Hugging Face, whereas Megatron 0.19.2 drops the option and "
            f"scales by {UPSTREAMS_ROPE_FACTOR:g}: to continue its training, give "
            f"{UPSTREAMS_ROPE_FACTOR:g}"
        )
    by_iterations = "the learning rate goes by iterations, as with a batch of one size"
    if dest == "rampup_batch_size":
        also = f", and {by_iterations}" if args.train_samples is None else ""
        return f"the global batch grows, whereas Megatron 0.19.2 ignores the option{also}"
    if dest != "step_batch_size_schedule" or args.train_samples is not None:
        return ""
    return (
        f"{by_iterations}; Megatron 0.19.2 ends its schedule after --train-iters batches of a "
        "micro-batch a rank"
    )


def set_defaults(
    flags: ParsedFlags, before: Mapping[str, Any], run_dir: Path, *, has_cuda: bool
) -> None:
    """Change attributes of ``flags.args`` that no given option sets.

    before: all attributes as parsed; ``flags.args`` lacks those that have a problem.
    """
    _set_always(flags.args)
    seq_length, train_iters = before["seq_length"], before["train_iters"]
    layers = chosen_layers(flags, before["transformer_impl"], has_cuda=has_cuda)
    has_te_layers = layers == TE_LAYERS
    defaults: dict[str, object] = {
        "log_interval": 1,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": layers,
        "max_position_embeddings": seq_length,
        "cp_comm_type": ["auto"],
        # Upstream's default is an error where local layers have no apex.
        "gradient_accumulation_fusion": has_cuda
        and (has_fused_weight_gradients() or has_te_layers),
        # Upstream's default, but an error without Transformer Engine. Latents have their own.
        "apply_rope_fusion": has_te_layers and not before["multi_latent_attention"],
        "tensorboard_dir": str(run_dir / "tensorboard"),
        # Upstream would write to the folder of checkpoints.
        "wandb_save_dir": str(run_dir / "wandb"),
    }
    # A batch holds at least a sequence, or of a budget a token.
    most_iterations = train_iters or (before["train_samples"] or 0) * (seq_length or 1)
    if before["save"] is not None:
        # Never reached: upstream saves at the end of training, too.
        defaults["save_interval"] = most_iterations + 1
    if before["eval_interval"] is None:
        # Upstream uses the interval even without evaluation: set one that is never reached, and
        # evaluate nothing after the last iteration either.
        defaults["eval_interval"] = most_iterations + 1
        defaults["eval_iters"] = 0
    if not has_cuda:
        defaults |= _CPU_DEFAULTS
    if before["squared_relu"] or before["quick_geglu"] or before["num_experts"]:
        defaults["bias_gelu_fusion"] = False
    if num_gate_tensors(argparse.Namespace(**before)):
        defaults["bias_swiglu_fusion"] = False
    for dest, value in defaults.items():
        if not flags.was_given(dest):
            setattr(flags.args, dest, value)


def chosen_layers(flags: ParsedFlags, asked: str, *, has_cuda: bool) -> str:
    """The value of --transformer-impl where the job runs, for the one that was parsed:
    Transformer Engine's layers if they are asked for, or if an option needs them and a machine
    with CUDA has them installed, or the job runs on another machine."""
    if not has_cuda:
        return "local"
    is_given = flags.was_given("transformer_impl")
    layers = asked_layers(flags.args, asked if is_given else None)
    is_missing = runs_here(flags) and importlib.util.find_spec(TE_LAYERS) is None
    return "local" if is_missing and not is_given else layers


def modules_kept_by(flags: ParsedFlags, asked: str, *, has_cuda: bool) -> dict[str, str]:
    """`kept_modules` of the layers that the job runs; arguments of `chosen_layers`."""
    has_te_layers = chosen_layers(flags, asked, has_cuda=has_cuda) == TE_LAYERS
    return kept_modules(
        has_experts=bool(flags.args.num_experts),
        has_te_layers=has_te_layers,
        groups_experts=has_te_layers and bool(flags.args.moe_grouped_gemm),
    )


def runs_here(flags: ParsedFlags) -> bool:
    """True if the job may compute with CUDA on this machine: not without a GPU, nor where --device
    says what a dry run is for."""
    return torch.cuda.is_available() and not flags.was_given("device")


def has_fused_weight_gradients() -> bool:
    """True if apex's kernel that accumulates weight gradients is installed."""
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
    args.num_workers = 0
    args.tensor_model_parallel_size = 1
    args.pipeline_model_parallel_size = 1
    args.context_parallel_size = 1
    args.expert_model_parallel_size = args.expert_tensor_parallel_size = 1
    args.sequence_parallel = False
    args.calculate_per_token_loss = True
    args.use_distributed_optimizer = True
    args.accumulate_allreduce_grads_in_fp32 = True
    # It needs apex.
    args.no_persist_layer_norm = True
    args.reset_position_ids = True
    args.reset_attention_mask = True
    args.log_throughput = True
    args.enable_one_logger = False
    # Checkpoints hold the state in global coordinates.
    args.dist_ckpt_optim_fully_reshardable = True


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
    """Load the tokenizer, compare it with that of the data, and derive the size of the vocabulary.

    --padded-vocab-size is used unchanged if given. Otherwise the vocabulary, or a larger
    --vocab-size, is padded to a multiple of --make-vocab-size-divisible-by.

    Raises ConfigurationError when the tokenizer is missing, cannot be read or did not make the
    data, or its vocabulary is larger than the model's.
    """
    check_tokenizer_sources(args)
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


def _tokenizer_size(args: argparse.Namespace) -> int:
    if args.tokenizer_type == "NullTokenizer":  # building it would import every library of them
        for dest in ("null_tokenizer_eod_id", "null_tokenizer_pad_id"):
            token = getattr(args, dest)
            if token is not None and token >= args.vocab_size:
                raise ConfigurationError(
                    f"{option_of(dest)} must be a token of the vocabulary but is {token} and "
                    f"--vocab-size {args.vocab_size}; give at most {args.vocab_size - 1}"
                )
        return int(args.vocab_size)
    try:
        # Upstream writes the padded size into the arguments it is given.
        tokenizer = build_tokenizer(copy.copy(args))
        check_made_with(tokenizer, _prefixes(args))
    except DataError as error:
        raise ConfigurationError(str(error)) from error
    return int(tokenizer.vocab_size)


def _prefixes(args: argparse.Namespace) -> list[str]:
    """The prefixes of all datasets that the flags name."""
    blends = (args.data_path, args.train_data_path, args.valid_data_path, args.test_data_path)
    prefixes: list[str] = []
    for blend in filter(None, blends):
        with contextlib.suppress(AssertionError):  # a wrong blend, which check_data names
            prefixes += get_blend_from_list(blend)[0]
    return prefixes
