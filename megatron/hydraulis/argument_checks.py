"""Checks of a command line that need no other rank, so that none waits for one that stops."""

import argparse
import importlib
import importlib.util
from pathlib import Path

from megatron.core.datasets.utils import get_blend_from_list

from megatron.hydraulis.config import HydraulisConfig
from megatron.hydraulis.errors import ConfigurationError

__all__ = [
    "check_batch",
    "check_checkpoints",
    "check_data",
    "check_device",
    "check_layers",
    "check_learning_rate",
    "check_model",
    "check_required",
    "check_spec",
    "check_wandb",
]

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "train_iters",
    "lr",
    "tokenizer_type",
)
_POSITIVE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "seq_length",
    "max_position_embeddings",
    "train_iters",
    "seed",
    "global_batch_size",
    "make_vocab_size_divisible_by",
    "vocab_size",
    "padded_vocab_size",
    "log_interval",
    "save_interval",
    "ckpt_step",
    "eval_interval",
    "tensorboard_log_interval",
    "distributed_timeout_minutes",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)
_MAX_SEED = 2**32 - 1
"""NumPy's generator, which upstream seeds as well, takes no larger one."""
_TOKENIZED_ELSEWHERE = "--tokenizer-type NullTokenizer --vocab-size N"


def _option(dest: str) -> str:
    return "--" + dest.replace("_", "-")


def check_required(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for flags without which there is no run, and for sizes below 1."""
    missing = [dest for dest in _REQUIRED if getattr(args, dest) is None]
    if missing:
        flags = ", ".join(_option(dest) for dest in missing)
        hint = ""
        if "tokenizer_type" in missing:
            hint = f" (data tokenized elsewhere goes with {_TOKENIZED_ELSEWHERE})"
        raise ConfigurationError(
            f"{len(missing)} flags without a default are missing; give {flags}{hint}"
            if len(missing) > 1
            else f"a flag without a default is missing; give {flags}{hint}"
        )
    for dest in _POSITIVE:
        value = getattr(args, dest)
        if value is not None and value < 1:
            raise ConfigurationError(
                f"{_option(dest)} must be at least 1 but is {value}; give a positive number"
            )
    if args.seed > _MAX_SEED:
        raise ConfigurationError(
            f"--seed must be at most {_MAX_SEED} but is {args.seed}; give a smaller one"
        )


def check_batch(
    args: argparse.Namespace, hydraulis: HydraulisConfig, *, batch_size_given: bool
) -> None:
    """Raise ConfigurationError unless one global batch, and any sequence in it, is possible."""
    budget = hydraulis.global_batch_tokens
    if budget is None and not batch_size_given:
        raise ConfigurationError(
            "the global batch has no size; give --global-batch-size in sequences or "
            "--global-batch-tokens in tokens"
        )
    if budget is not None and batch_size_given:
        raise ConfigurationError(
            f"--global-batch-size {args.global_batch_size} and --global-batch-tokens {budget} "
            f"both size the global batch; give one of them"
        )
    limits = (
        ("a global batch", "--global-batch-tokens", budget),
        (
            "a micro-batch",
            "--max-tokens-per-micro-batch",
            hydraulis.max_tokens_per_micro_batch,
        ),
    )
    for what, option, limit in limits:
        if limit is not None and args.seq_length > limit:
            raise ConfigurationError(
                f"{what} must hold the longest sequence but --seq-length is {args.seq_length} "
                f"tokens and {option} is {limit}; "
                f"give {option} {args.seq_length} or more, or --seq-length {limit} or less"
            )


def check_model(args: argparse.Namespace) -> None:
    """Raise ConfigurationError when heads cannot share the hidden size."""
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise ConfigurationError(
            f"without --kv-channels the heads share the hidden size evenly but --hidden-size "
            f"{args.hidden_size} is not a multiple of --num-attention-heads "
            f"{args.num_attention_heads}; change one of them or give --kv-channels"
        )
    if args.max_position_embeddings < args.seq_length:
        raise ConfigurationError(
            f"every position of a sequence needs an embedding but --max-position-embeddings is "
            f"{args.max_position_embeddings} and --seq-length {args.seq_length}; "
            f"give --max-position-embeddings {args.seq_length} or leave it out"
        )


def check_spec(spec: list[str] | None) -> None:
    """Raise ConfigurationError unless a layer spec can be imported."""
    if spec is None:
        return
    if len(spec) != 2:
        raise ConfigurationError(
            f"--spec takes a module and a name in it but has {len(spec)} values: "
            f"{' '.join(spec)}; write --spec package.module name"
        )
    module_name, name = spec
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(
            f"--spec {module_name} {name}: the module cannot be imported ({error}); correct its "
            f"name or put its folder on PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        raise ConfigurationError(
            f"--spec {module_name} {name}: the module has no {name}; name a layer spec in it"
        )


def check_learning_rate(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for a schedule of learning rate or decay that upstream refuses."""
    if not 0.0 <= args.min_lr <= args.lr:
        raise ConfigurationError(
            f"the learning rate falls from --lr {args.lr} to --min-lr {args.min_lr}, which must "
            f"lie between 0 and --lr; change one of them"
        )
    if args.lr_warmup_init > args.lr:
        raise ConfigurationError(
            f"the warm-up rises to --lr {args.lr} but --lr-warmup-init is {args.lr_warmup_init}; "
            f"give at most {args.lr}"
        )
    decay_iters = args.lr_decay_iters if args.lr_decay_iters is not None else args.train_iters
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        raise ConfigurationError(
            f"--lr-warmup-fraction {args.lr_warmup_fraction} and --lr-warmup-iters "
            f"{args.lr_warmup_iters} both set the warm-up; give one of them"
        )
    fraction = args.lr_warmup_fraction or 0.0
    if max(args.lr_warmup_iters, fraction * decay_iters) >= decay_iters:
        raise ConfigurationError(
            f"the warm-up must end before the decay does, after {decay_iters} iterations, but "
            f"--lr-warmup-iters is {args.lr_warmup_iters} and --lr-warmup-fraction {fraction}; "
            f"shorten the warm-up"
        )
    if args.lr_decay_style == "WSD" and args.lr_wsd_decay_iters is None:
        raise ConfigurationError(
            "--lr-decay-style WSD anneals over a number of iterations that is missing; "
            "give --lr-wsd-decay-iters"
        )
    if args.weight_decay_incr_style != "constant":
        ends = (args.start_weight_decay, args.end_weight_decay)
        if None in ends or not 0.0 <= ends[0] <= ends[1]:
            raise ConfigurationError(
                f"--weight-decay-incr-style {args.weight_decay_incr_style} rises from "
                f"--start-weight-decay {ends[0]} to --end-weight-decay {ends[1]}; "
                f"give both, the first at least 0 and at most the second"
            )


def check_data(args: argparse.Namespace) -> None:
    """Raise ConfigurationError unless there is one training corpus whose files exist."""
    train = "--train-data-path"
    if args.data_path and args.train_data_path:
        raise ConfigurationError(
            f"--data-path and {train} both name the training corpus; give one of them"
        )
    for dest in ("valid_data_path", "test_data_path"):
        if getattr(args, dest) and args.data_path:
            raise ConfigurationError(
                f"{_option(dest)} goes with {train}, whereas --data-path is cut by --split; "
                f"give {train} instead of --data-path"
            )
    if not args.data_path and not args.train_data_path:
        raise ConfigurationError(f"there is no training corpus; give --data-path or {train}")
    for dest in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        blend = getattr(args, dest)
        if blend:
            _check_files(_option(dest), blend)


def _check_files(option: str, blend: list[str]) -> None:
    try:
        prefixes, _ = get_blend_from_list(blend)
    except AssertionError:
        raise ConfigurationError(
            f"{option} {' '.join(blend)}: a blend gives a weight to every prefix or to none; "
            f"write 'weight prefix' pairs or prefixes alone"
        ) from None
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            if not Path(prefix + suffix).is_file():
                raise ConfigurationError(
                    f"{option} {prefix}: a corpus is a pair of files but there is no "
                    f"{prefix}{suffix}; correct the prefix or write the corpus by "
                    f"'python -m megatron.hydraulis preprocess'"
                )


def check_layers(args: argparse.Namespace, *, has_cuda: bool) -> None:
    """Raise ConfigurationError for layers that this machine, or a spec of the user's, rules out."""
    if args.transformer_impl != "transformer_engine":
        return
    option = "--transformer-impl transformer_engine"
    if args.spec is not None:
        raise ConfigurationError(
            f"{option} builds layers of its own but --spec {' '.join(args.spec)} names others; "
            f"remove one of the two"
        )
    if not has_cuda:
        raise ConfigurationError(
            f"{option} needs CUDA, which this machine does not have; use --transformer-impl local"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigurationError(
            f"{option} needs Transformer Engine, which is not installed; run "
            f"pip install transformer-engine[pytorch] or use --transformer-impl local"
        )


def check_device(args: argparse.Namespace, *, has_cuda: bool) -> None:
    """Raise ConfigurationError for a backend that does not go with this machine's devices."""
    if args.distributed_backend == "nccl" and not has_cuda:
        raise ConfigurationError(
            "--distributed-backend nccl needs CUDA, which this machine does not have; "
            "use --distributed-backend gloo or leave it out"
        )
    if args.distributed_backend == "gloo" and has_cuda:
        raise ConfigurationError(
            "--distributed-backend gloo sends tensors of the CPU but this machine has CUDA, on "
            "which the model would be; set CUDA_VISIBLE_DEVICES= to train on the CPU, or leave "
            "the flag out to train on the GPU"
        )


def check_checkpoints(args: argparse.Namespace, hydraulis: HydraulisConfig) -> None:
    """Raise ConfigurationError for flags of checkpoints that say nothing without another one."""
    if args.save is not None and args.save_interval is None:
        raise ConfigurationError(
            f"--save {args.save} says where but not when; give --save-interval in iterations"
        )
    for option, is_set, needed, value in (
        ("--keep-last", hydraulis.keep_last is not None, "--save", args.save),
        ("--load-fallback", hydraulis.load_fallback, "--load", args.load),
    ):
        if is_set and value is None:
            raise ConfigurationError(
                f"{option} is about {needed}, which is missing; give {needed} DIR or remove it"
            )


def check_wandb(args: argparse.Namespace) -> None:
    """Raise ConfigurationError when Weights & Biases is wanted but not installed."""
    if args.wandb_project and importlib.util.find_spec("wandb") is None:
        raise ConfigurationError(
            f"--wandb-project {args.wandb_project} needs the package wandb, which is not "
            f"installed; run pip install wandb or remove the flag"
        )
