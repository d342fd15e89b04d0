"""Checks of a command line on one rank, before any communication, and the pool it describes."""

import argparse
import importlib
import importlib.util
import math
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType

from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.hydraulis.cost_model.context import all_to_all_refusal, check_cp_comm_type
from megatron.hydraulis.cost_model.model_arguments import (
    check_latent_heads,
    check_layer_patterns,
    check_pattern,
    check_recompute,
)
from megatron.hydraulis.data.documents import JSON_LINES_SUFFIXES
from megatron.hydraulis.errors import ConfigurationError, Problems, StrategyError, listed
from megatron.hydraulis.flags.config import HydraulisConfig, option_of, typed
from megatron.hydraulis.flags.layer_pattern import NOT_IN_HYBRIDS, check_hybrid
from megatron.hydraulis.flags.samples import check_counting
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.strategy.megatron_layout import MegatronLayout
from megatron.hydraulis.strategy.notation import parse_terms
from megatron.hydraulis.strategy.pool import fit_pool, num_ranks_of
from megatron.hydraulis.strategy.strategy import RANKS_PER_NODE, ranks_of_node

DATA_PATHS = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
"""Attributes of the flags that name data."""

_REQUIRED = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "seq_length",
    "train_iters",
    "lr",
    "tokenizer_type",
)
_TOKENIZED_ELSEWHERE = "--tokenizer-type NullTokenizer --vocab-size N"


def missing_flags(args: argparse.Namespace, *, attempted: Collection[str]) -> tuple[str, ...]:
    """Attributes of the required flags that are missing, without those given a wrong value."""
    given = {*attempted, *(["train_iters"] if "train_samples" in attempted else [])}
    return tuple(dest for dest in _REQUIRED if getattr(args, dest) is None and dest not in given)


def check_required(missing: Collection[str]) -> None:
    """Raise ConfigurationError for required flags that are missing."""
    if missing:
        flags = ", ".join(option_of(dest) for dest in missing)
        hint = ""
        if "tokenizer_type" in missing:
            hint = f" (for data tokenized elsewhere: {_TOKENIZED_ELSEWHERE})"
        raise ConfigurationError(
            f"{len(missing)} flags without a default are missing; give {flags}{hint}"
            if len(missing) > 1
            else f"a flag without a default is missing; give {flags}{hint}"
        )


def check_batch(args: argparse.Namespace, hydraulis: HydraulisConfig) -> None:
    """Raise ConfigurationError unless global batches and micro-batches hold any sequence."""
    limits = (
        ("a global batch", "--global-batch-tokens", hydraulis.global_batch_tokens),
        ("a micro-batch", "--max-tokens-per-micro-batch", hydraulis.max_tokens_per_micro_batch),
    )
    for what, option, limit in limits:
        if limit is not None and args.seq_length > limit:
            raise ConfigurationError(
                f"{what} must hold the longest sequence but --seq-length is {args.seq_length} "
                f"tokens and {option} is {limit}; "
                f"give {option} {args.seq_length} or more, or --seq-length {limit} or less"
            )


def check_model(args: argparse.Namespace) -> None:
    """Raise ConfigurationError when heads or position embeddings do not fit the sizes."""
    if args.kv_channels is None and args.hidden_size % args.num_attention_heads:
        raise ConfigurationError(
            f"without --kv-channels the heads share the hidden size evenly but --hidden-size "
            f"{args.hidden_size} is not a multiple of --num-attention-heads "
            f"{args.num_attention_heads}; change one of them or give --kv-channels"
        )
    num_channels = args.kv_channels or args.hidden_size // args.num_attention_heads
    option, is_rotated = "--kv-channels", args.position_embedding_type in ("rope", "yarn")
    if args.multi_latent_attention:
        num_channels, option, is_rotated = args.qk_pos_emb_head_dim, "--qk-pos-emb-head-dim", True
    if is_rotated and num_channels % 2:
        raise ConfigurationError(
            f"rotary positions turn pairs of channels but a head has {num_channels}; give an even "
            f"{option}"
        )
    if is_rotated and int(num_channels * args.rotary_percent) < 2:
        raise ConfigurationError(
            f"rotary positions turn pairs of channels but --rotary-percent {args.rotary_percent} "
            f"of {num_channels} channels is less than 2; give at least {2 / num_channels:g}"
        )
    if args.max_position_embeddings < args.seq_length:
        raise ConfigurationError(
            f"every position of a sequence needs an embedding but --max-position-embeddings is "
            f"{args.max_position_embeddings} and --seq-length {args.seq_length}; "
            f"give --max-position-embeddings {args.seq_length} or leave it out"
        )


def check_query_groups(args: argparse.Namespace) -> None:
    """Raise ConfigurationError unless the query groups share the attention heads evenly."""
    heads, groups = args.num_attention_heads, args.num_query_groups
    check_latent_heads(args)
    if args.group_query_attention and groups is not None and heads % groups:
        raise ConfigurationError(
            f"query groups share the heads evenly but --num-attention-heads {heads} is not a "
            f"multiple of --num-query-groups {groups}; use {math.gcd(heads, groups)} groups"
        )


def check_variants(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for variants of layers that contradict each other or the model."""
    activations = ("swiglu", "squared_relu", "quick_geglu")
    given = [option_of(dest) for dest in activations if getattr(args, dest)]
    if len(given) > 1:
        raise ConfigurationError(
            f"the MLP has one activation but {' and '.join(given)} give {len(given)}; choose one"
        )
    if args.multi_latent_attention and args.position_embedding_type == "yarn":
        raise ConfigurationError(
            "latent attention has YaRN by --rope-type but --position-embedding-type yarn is given "
            "with --multi-latent-attention; give --rope-type yarn instead"
        )
    if args.multi_latent_attention and args.rotary_interleaved:
        raise ConfigurationError(
            "latent attention pairs the channels that it rotates in its own way but "
            "--rotary-interleaved is given with --multi-latent-attention; remove "
            "--rotary-interleaved"
        )
    check_layer_patterns(args)
    check_pattern("--no-rope-freq", args.no_rope_freq, args.num_layers)
    if isinstance(args.no_rope_freq, int) and args.num_layers % args.no_rope_freq:
        raise ConfigurationError(
            f"--no-rope-freq {args.no_rope_freq} divides the layers but --num-layers is "
            f"{args.num_layers}; give a divisor or a list"
        )


def check_experts(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for a model with experts that cannot be built, or not be cut."""
    num_experts, topk = args.num_experts, args.moe_router_topk
    if num_experts is None:
        return
    if topk > num_experts:
        raise ConfigurationError(
            f"a token passes at most all experts but --moe-router-topk is {topk} and --num-experts "
            f"{num_experts}; give a --moe-router-topk of at most {num_experts}"
        )
    if (
        topk == 1
        and args.moe_router_score_function == "softmax"
        and not args.moe_router_pre_softmax
    ):
        raise ConfigurationError(
            "the softmax over --moe-router-topk 1 expert is 1, so that the router would learn "
            "nothing; add --moe-router-pre-softmax"
        )
    if args.moe_router_enable_expert_bias and args.moe_router_score_function != "sigmoid":
        raise ConfigurationError(
            f"--moe-router-enable-expert-bias adds to sigmoid scores but "
            f"--moe-router-score-function is {args.moe_router_score_function}; give sigmoid, or "
            "balance by --moe-aux-loss-coeff"
        )
    for dest in ("moe_aux_loss_coeff", "moe_router_load_balancing_type"):
        value = getattr(args, dest)
        if isinstance(value, list) and len(value) > 1:
            raise ConfigurationError(
                f"routers have one balancing loss but {option_of(dest)} has {len(value)} values; "
                "give one"
            )
    groups, chosen = args.moe_router_num_groups, args.moe_router_group_topk
    if (chosen is None) != (groups is None):
        missing = "--moe-router-num-groups" if groups is None else "--moe-router-group-topk"
        raise ConfigurationError(
            "tokens choose --moe-router-group-topk of --moe-router-num-groups groups but "
            f"{missing} is missing; give both or neither"
        )
    if groups is not None and num_experts % groups:
        raise ConfigurationError(
            f"groups share the experts evenly but --num-experts {num_experts} is not a multiple of "
            f"--moe-router-num-groups {groups}; use a number that divides {num_experts}"
        )
    if chosen is not None and (
        chosen > groups or topk % chosen or topk > chosen * (num_experts // groups)
    ):
        raise ConfigurationError(
            f"the chosen groups share a token's experts evenly but --moe-router-topk {topk} are "
            f"chosen from --moe-router-group-topk {chosen} of --moe-router-num-groups {groups} "
            f"groups with {num_experts // groups} experts each; change one of them"
        )


def check_expert_biases(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for shared experts with biases, which upstream does not have."""
    width = args.moe_shared_expert_intermediate_size
    if args.num_experts is not None and args.add_bias_linear and width is not None:
        raise ConfigurationError(
            f"shared experts have no biases but --moe-shared-expert-intermediate-size is {width} "
            "and all linear layers have them; add --disable-bias-linear or leave shared experts out"
        )


def check_sequence_parallel(shape: ModelShape, hydraulis: HydraulisConfig, pool: Pool) -> None:
    """Raise ConfigurationError for experts or latents where tp ranks do not cut the sequence."""
    if shape.whole_matrices and pool.tp_lcm > 1 and not hydraulis.sequence_parallel:
        raise ConfigurationError(
            f"{shape.whole_matrices} need sequence parallelism where tp is above 1 but "
            f"--no-sequence-parallel is given, and the tp degrees of the pool have the least "
            f"common multiple {pool.tp_lcm}; remove --no-sequence-parallel"
        )


def check_predicted_positions(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for multi-token prediction with learned or stretched positions."""
    if args.mtp_num_layers and args.position_embedding_type not in ("rope", "none"):
        raise ConfigurationError(
            f"layers of multi-token prediction have rotary positions or none but "
            f"--position-embedding-type is {args.position_embedding_type}; use rope or none, or "
            f"remove --mtp-num-layers {args.mtp_num_layers}"
        )


def check_predictions(args: argparse.Namespace, hydraulis: HydraulisConfig, pool: Pool) -> None:
    """Raise ConfigurationError for multi-token prediction with what it does not support."""
    if not args.mtp_num_layers:
        return
    if hydraulis.lora_rank is not None:
        raise ConfigurationError(
            f"adapters freeze all of the model, which layers of multi-token prediction would need "
            f"to follow, but --lora-rank is {hydraulis.lora_rank} and --mtp-num-layers "
            f"{args.mtp_num_layers}; remove one of the two"
        )
    if hydraulis.hf is not None:
        raise ConfigurationError(
            f"--hf {hydraulis.hf} is read without layers of multi-token prediction but "
            f"--mtp-num-layers is {args.mtp_num_layers}; run hydraulis import-hf --mtp and give "
            "--load, or remove --mtp-num-layers"
        )
    sharing = [s.name for s in pool.strategies if any(each.shares_weights for each in s.schemes)]
    if sharing:
        raise ConfigurationError(
            f"the last stage uses the embedding twice, so that cp ranks cannot share weights, but "
            f"--mtp-num-layers is {args.mtp_num_layers} and {listed(sharing)} has fs; leave fs out "
            f"or remove --mtp-num-layers"
        )


def check_signal(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for an --exit-signal that no process can catch."""
    if args.exit_signal_handler and args.exit_signal in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigurationError(
            f"--exit-signal {args.exit_signal.name} cannot be caught by a process; use SIGTERM, "
            "SIGINT, SIGUSR1 or SIGUSR2"
        )


def check_spec(args: argparse.Namespace) -> None:
    """Raise ConfigurationError unless the layer spec can be imported."""
    spec = args.spec
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
    except Exception as error:  # a module of the user may raise anything
        raise ConfigurationError(
            f"--spec {module_name} {name}: the module cannot be imported ({error}); correct its "
            f"name or put its folder on PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        raise ConfigurationError(
            f"--spec {module_name} {name}: the module has no {name}; name a layer spec in it"
        )
    found = getattr(module, name)
    is_spec = isinstance(found, ModuleSpec | TransformerBlockSubmodules)
    if not is_spec and (not callable(found) or isinstance(found, BuiltinFunctionType)):
        raise ConfigurationError(
            f"--spec {module_name} {name}: a layer spec is a ModuleSpec, a "
            f"TransformerBlockSubmodules or a function but this is "
            f"of type {type(found).__name__}; name one"
        )


def check_learning_rate(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for learning rates that upstream refuses."""
    rates = [("--lr", args.lr, "--min-lr", args.min_lr)]
    if args.decoupled_lr is not None:
        least = args.min_lr if args.decoupled_min_lr is None else args.decoupled_min_lr
        rates.append(("--decoupled-lr", args.decoupled_lr, "--decoupled-min-lr", least))
    for option, rate, min_option, min_rate in rates:
        if not 0.0 <= min_rate <= rate:
            raise ConfigurationError(
                f"the learning rate falls from {option} {rate} to {min_option} {min_rate}, which "
                f"must lie between 0 and {option}; change one of them"
            )
        if args.lr_warmup_init > rate:
            raise ConfigurationError(
                f"the warm-up rises to {option} {rate} but --lr-warmup-init is "
                f"{args.lr_warmup_init}; give at most {rate}"
            )


def check_schedule_lengths(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for a warm-up or an annealing that does not fit the schedule."""
    check_counting(args)
    unit, counted = (
        ("iters", "iterations") if args.train_samples is None else ("samples", "samples")
    )
    decay, warmup, wsd = (
        getattr(args, f"lr_{part}_{unit}") for part in ("decay", "warmup", "wsd_decay")
    )
    if decay is None:
        decay = getattr(args, f"train_{unit}")
    fraction = args.lr_warmup_fraction or 0.0
    if max(warmup, fraction * decay) >= decay:
        raise ConfigurationError(
            f"the warm-up must end before the decay does, after {decay} {counted}, but "
            f"--lr-warmup-{unit} is {warmup} and --lr-warmup-fraction {fraction}; "
            f"shorten the warm-up"
        )
    if args.lr_decay_style == "WSD" and wsd is None:
        raise ConfigurationError(
            f"--lr-decay-style WSD anneals over a number of {counted} that is missing; "
            f"give --lr-wsd-decay-{unit}"
        )
    if args.lr_decay_style == "WSD" and wsd > decay:
        raise ConfigurationError(
            f"--lr-wsd-decay-{unit} {wsd} is the last part of the schedule of {decay} "
            f"{counted}; give at most {decay}"
        )


def check_weight_decay(args: argparse.Namespace) -> None:
    """Raise ConfigurationError for a weight decay that does not rise, or rises without a style."""
    ends = (args.start_weight_decay, args.end_weight_decay)
    if args.weight_decay_incr_style == "constant":
        if ends != (None, None):
            raise ConfigurationError(
                f"a constant weight decay is --weight-decay {args.weight_decay} throughout but "
                f"--start-weight-decay is {ends[0]} and --end-weight-decay {ends[1]}; remove both, "
                "or give --weight-decay-incr-style linear or cosine"
            )
    else:
        if None in ends or not 0.0 <= ends[0] <= ends[1]:
            raise ConfigurationError(
                f"--weight-decay-incr-style {args.weight_decay_incr_style} rises from "
                f"--start-weight-decay {ends[0]} to --end-weight-decay {ends[1]}; "
                f"give both, the first at least 0 and at most the second"
            )


def check_data(args: argparse.Namespace, *, needs_files: bool) -> None:
    """Raise ConfigurationError unless the flags name one training corpus, and its files exist."""
    train = "--train-data-path"
    for dest in ("valid_data_path", "test_data_path"):
        if getattr(args, dest) and args.data_path:
            raise ConfigurationError(
                f"{option_of(dest)} goes with {train}, whereas --data-path is cut by --split; "
                f"give {train} instead of --data-path"
            )
    if not args.data_path and not args.train_data_path:
        raise ConfigurationError(f"there is no training corpus; give --data-path or {train}")
    if args.sft and args.tokenizer_type not in (None, "SFTTokenizer"):
        raise ConfigurationError(
            f"--sft needs --tokenizer-type SFTTokenizer but it is {args.tokenizer_type}; give it, "
            f"or tokenize by hydraulis preprocess --chat and remove --sft"
        )
    check_data_files(args, must_exist=needs_files)


def check_data_files(args: argparse.Namespace, *, must_exist: bool = True) -> None:
    """Raise ConfigurationError unless all data are named rightly and, if they must, exist."""
    for dest in DATA_PATHS:
        blend = getattr(args, dest)
        if blend:
            _check_files(option_of(dest), blend, is_sft=args.sft, must_exist=must_exist)


def _check_files(option: str, blend: list[str], *, is_sft: bool, must_exist: bool) -> None:
    try:
        prefixes, _ = get_blend_from_list(blend)
    except AssertionError:
        raise ConfigurationError(
            f"{option} {' '.join(blend)}: a blend gives a weight to every prefix or to none; "
            f"write 'weight prefix' pairs or prefixes alone"
        ) from None
    for prefix in prefixes if must_exist else ():
        if is_sft:
            if not (prefix.endswith(JSON_LINES_SUFFIXES) and Path(prefix).is_file()):
                raise ConfigurationError(
                    f"{option} {prefix}: data of --sft are files of JSON lines "
                    f"({', '.join(JSON_LINES_SUFFIXES)}) but this is none; correct the path"
                )
            continue
        for suffix in (".idx", ".bin"):
            if not Path(prefix + suffix).is_file():
                raise ConfigurationError(
                    f"{option} {prefix}: a corpus is a pair of files but there is no "
                    f"{prefix}{suffix}; correct the prefix or write the corpus by "
                    "'hydraulis preprocess'"
                )


def check_layers(args: argparse.Namespace, *, has_cuda: bool) -> None:
    """Raise ConfigurationError for layers that this machine or --spec rules out."""
    if args.transformer_impl != "transformer_engine" or not has_cuda:
        return
    option = "--transformer-impl transformer_engine"
    if args.spec is not None:
        raise ConfigurationError(
            f"{option} selects the layers but --spec {' '.join(args.spec)} names others; "
            f"remove one of the two"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigurationError(
            f"{option} needs Transformer Engine, which is not installed; run "
            f"pip install transformer-engine[pytorch] or use --transformer-impl local"
        )


def check_device(args: argparse.Namespace, *, has_cuda: bool) -> None:
    """Raise ConfigurationError for a backend that does not match this machine's devices."""
    if args.distributed_backend == "gloo" and has_cuda:
        raise ConfigurationError(
            "--distributed-backend gloo sends CPU tensors but this machine has CUDA, where the "
            "model would be; set CUDA_VISIBLE_DEVICES= to train on the CPU, or leave "
            "the flag out to train on the GPU"
        )


_ONE_OF = {
    ("strategy", "strategy_pool"): "both say which strategies the run uses",
    ("strategy_schedule", "replay_plans"): "both fix the strategy of every iteration",
    ("global_batch_size", "global_batch_tokens"): "both size the global batch",
    ("rampup_batch_size", "step_batch_size_schedule"): "both let the global batch grow",
    ("train_iters", "train_samples"): "both end training",
    ("lr_warmup_iters", "lr_warmup_fraction"): "both set the warm-up",
    ("lr_warmup_samples", "lr_warmup_fraction"): "both set the warm-up",
    ("data_path", "train_data_path"): "both name the training corpus",
    (
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
    ): "take the schedule of the flags and that of the checkpoint",
    (
        "deterministic_mode",
        "plan_time_limit",
    ): "exclude each other: such plans depend on the clock",
    **dict.fromkeys(
        (("elastic", name) for name in ("strategy_schedule", "regroup_owners_for", "replay_plans")),
        "exclude each other: an elastic job may drop strategies that its ranks cannot hold",
    ),
}
"""Two settings of which one may be given -> why."""
_NEEDED = {
    "keep_last": "save",
    "load_fallback": "load",
    "allow_other_data": "load",
    "allow_changed_settings": "load",
    "max_skipped_in_a_row": "skip_nan_iterations",
    "device": "dry_run",
    "num_ranks": "dry_run",
    "trace_iterations": "trace",
    "strategy_schedule": "strategy_pool",
    "regroup_owners_for": "strategy_pool",
}
"""Setting of ours -> the one without which it has no effect."""


_MOST_PLANNING_OF_TIMEOUT = 1 / 4
"""A process that is silent for longer than a plan may take is replaced, once, while other ranks
wait (`planner.ahead`)."""


def check_plan_time(args: argparse.Namespace, hydraulis: HydraulisConfig) -> None:
    """Raise ConfigurationError for a limit that other ranks do not allow."""
    minutes = args.distributed_timeout_minutes
    most_s = _MOST_PLANNING_OF_TIMEOUT * 60.0 * minutes
    if hydraulis.plan_time_limit is not None and hydraulis.plan_time_limit > most_s:
        raise ConfigurationError(
            f"other ranks wait for a plan, so --plan-time-limit is at most {most_s:g} s, a quarter "
            f"of --distributed-timeout-minutes {minutes}, but is {hydraulis.plan_time_limit:g}; "
            "lower it, or raise the timeout"
        )


def check_combinations(
    args: argparse.Namespace, *, given: Collection[str], problems: Problems
) -> None:
    """Collect flags of ours without the one that gives them an effect, and settings of which only
    one may be given. Those that are too much are unset, so that the rest is checked without them.

    given: the attributes that options of the command line set.
    """
    for name, needed in _NEEDED.items():
        if name in given and not getattr(args, needed):
            problems.add(
                f"{option_of(name)} has an effect only with {option_of(needed)}, which is missing; "
                f"give {option_of(needed)} or remove {option_of(name)}"
            )
            setattr(args, name, None)
    for (first, second), why in _ONE_OF.items():
        if getattr(args, first) and getattr(args, second):
            problems.add(f"{typed(args, first)} and {typed(args, second)} {why}; give one of them")
            setattr(args, second, None)


def check_context(args: argparse.Namespace, pool: Pool, shape: ModelShape) -> None:
    """Raise ConfigurationError for a --cp-comm-type that is unknown or does not fit the heads, in
    any group of ranks that a strategy may use."""
    check_cp_comm_type(args.cp_comm_type)
    if args.cp_comm_type[0] != "a2a":
        return
    schemes = {scheme for strategy in pool.strategies for scheme in strategy.schemes}
    for scheme in sorted(schemes, key=str):
        for group in reversed(scheme.group_schemes):
            refusal = all_to_all_refusal(
                shape.num_attention_heads // scheme.tp,
                shape.num_query_groups // scheme.tp,
                group.cp,
            )
            if refusal is not None:
                raise ConfigurationError(
                    f"--cp-comm-type a2a: scheme {scheme}: {refusal}; use --cp-comm-type auto, or "
                    f"a scheme with less cp or tp"
                )


def resolve_pool(
    args: argparse.Namespace,
    hydraulis: HydraulisConfig,
    *,
    num_ranks: int,
    ranks_per_node: int | None,
    proposed: Pool | None = None,
) -> tuple[Pool, tuple[str, ...]]:
    """The strategies that the flags describe, placed on the job's ranks; a line per change.

    proposed: in place of a pool file, for --strategy-pool auto.

    --elastic adapts those for another number of ranks. If ranks_per_node is None, the pool file
    defines it, and a single strategy assumes the default of `ranks_of_node`.

    --strategy or --strategy-pool describe them; without both, the sizes of upstream's options do,
    see `MegatronLayout`.

    Raises ConfigurationError when the pool is for another job; StrategyError when a strategy cannot
    be read or placed.
    """
    per_node = hydraulis.ranks_per_node
    if per_node is not None and per_node > num_ranks and not hydraulis.elastic:
        raise ConfigurationError(
            f"a node has no more ranks than the job but --ranks-per-node is {per_node} and the job "
            f"has {num_ranks}; give at most {num_ranks}, or leave it out"
        )
    if hydraulis.strategy_pool is None and ranks_per_node is None:
        # Elastic jobs may lose a part of a node.
        is_partial = hydraulis.elastic and num_ranks % RANKS_PER_NODE
        ranks_per_node = num_ranks if is_partial else ranks_of_node(num_ranks, None, "job")
    if hydraulis.strategy is None and hydraulis.strategy_pool is None:
        layout = MegatronLayout.of(args)
        num_used = layout.num_usable_ranks(num_ranks) if hydraulis.elastic else num_ranks
        if not hydraulis.elastic:
            layout.check_ranks(num_ranks)
        strategy = layout.strategy(
            num_used, ranks_per_node=ranks_per_node if num_used == num_ranks else None
        )
        pool, changes = _fitted(Pool.of(strategy), args, num_ranks, ranks_per_node)
        note = layout.note(strategy.schemes[0])
        return pool, (*changes, *([note] if note else []))
    if hydraulis.strategy is not None:
        for term in parse_terms(hydraulis.strategy, label=hydraulis.strategy):
            if term.scheme is not None:  # first: errors of the placement suggest the same ep
                term.scheme.experts_per_rank(args.num_experts or 0)
        if hydraulis.elastic and num_ranks_of(hydraulis.strategy) != num_ranks:
            strategy = Strategy.parse(hydraulis.strategy, num_ranks_of(hydraulis.strategy))
        else:
            strategy = Strategy.parse(hydraulis.strategy, num_ranks, ranks_per_node=ranks_per_node)
        return _fitted(Pool.of(strategy), args, num_ranks, ranks_per_node)
    pool = proposed or Pool.read(str(hydraulis.strategy_pool))
    changes = ()
    if hydraulis.elastic:
        pool, changes = _fitted(pool, args, num_ranks, ranks_per_node or pool.ranks_per_node)
    _check_job(pool, hydraulis, num_ranks=num_ranks, ranks_per_node=ranks_per_node)
    check_schedule(hydraulis, pool)
    if hydraulis.regroup_owners_for is not None:
        _check_name("--regroup-owners-for names a strategy", hydraulis.regroup_owners_for, pool)
    _check_limits_given_once(pool, hydraulis)
    return pool, changes


def _fitted(
    pool: Pool, args: argparse.Namespace, num_ranks: int, ranks_per_node: int | None
) -> tuple[Pool, tuple[str, ...]]:
    ranks_per_node = ranks_per_node or num_ranks
    if num_ranks > ranks_per_node and num_ranks % ranks_per_node:
        ranks_per_node = num_ranks  # nodes of different sizes: no placement is better than another
    return fit_pool(pool, num_ranks, ranks_per_node, num_layers=args.num_layers)


def _check_job(
    pool: Pool, hydraulis: HydraulisConfig, *, num_ranks: int, ranks_per_node: int | None
) -> None:
    what = f"--strategy-pool {hydraulis.strategy_pool}"
    if pool.num_ranks != num_ranks:
        start = f"--num-ranks {pool.num_ranks}" if hydraulis.dry_run else f"{pool.num_ranks} ranks"
        raise ConfigurationError(
            f"{what}: a pool is for the ranks of its job but this one is for {pool.num_ranks} "
            f"ranks and the job has {num_ranks}; {'give' if hydraulis.dry_run else 'start'} "
            f"{start}, write a pool for {num_ranks}, or add --elastic to adapt this one"
        )
    if ranks_per_node is not None and pool.ranks_per_node != min(ranks_per_node, num_ranks):
        raise ConfigurationError(
            f"{what}: a pool is for the nodes of its job but this one has {pool.ranks_per_node} "
            f"ranks a node and the job {ranks_per_node}; correct ranks_per_node in the file or "
            f"give --ranks-per-node {pool.ranks_per_node}"
        )


def check_schedule(hydraulis: HydraulisConfig, pool: Pool, left_out: Sequence[str] = ()) -> None:
    """Raise ConfigurationError when --strategy-schedule names a strategy that is not in the pool.

    left_out: one line for each strategy of the file that the run skips.
    """
    for name in hydraulis.scheduled_strategies:
        _check_name("--strategy-schedule names strategies", name, pool, left_out)


def _check_name(what: str, name: str, pool: Pool, left_out: Sequence[str] = ()) -> None:
    """Raise ConfigurationError unless a strategy of the pool has this name."""
    names = [strategy.name for strategy in pool.strategies]
    if name not in names:
        why = "".join(f" ({line})" for line in left_out if f"strategy {name!r} " in line)
        raise ConfigurationError(
            f"{what} of the pool but {name!r} is none of its {len(names)}{why}; use "
            f"{', '.join(map(repr, names))}"
        )


def _check_limits_given_once(pool: Pool, hydraulis: HydraulisConfig) -> None:
    limit = hydraulis.max_tokens_per_micro_batch
    for strategy in pool.strategies:
        if limit is not None and strategy.token_limits:
            raise ConfigurationError(
                f"--max-tokens-per-micro-batch {limit} is for all strategies but "
                f"{strategy.name!r} of --strategy-pool {hydraulis.strategy_pool} also has "
                f"max_tokens; remove one of them"
            )


def check_vocabulary_parts(pool: Pool, padded_size: int) -> None:
    """Raise StrategyError unless every tp of the pool divides the padded vocabulary.

    The padded vocabulary is part of the model, so it does not depend on the pool.
    """
    num_parts = pool.tp_lcm
    if padded_size % num_parts:
        degrees = sorted({s.tp for strategy in pool.strategies for s in strategy.schemes})
        wanted = math.ceil(padded_size / num_parts) * num_parts
        raise StrategyError(
            f"every tp must divide the padded vocabulary size but of tp "
            f"{', '.join(map(str, degrees))} not all do: it is {padded_size}, not a multiple of "
            f"{num_parts}; give --make-vocab-size-divisible-by a multiple of {num_parts}, or "
            f"--padded-vocab-size {wanted}"
        )


SHAPE = "shape of the model"
"""The name of a model that contradicts itself, among those of settings with a problem."""
SHAPE_CHECKS: Mapping[Callable[[argparse.Namespace], None], str] = {
    check_variants: "num_layers num_experts swiglu squared_relu quick_geglu "
    "multi_latent_attention rotary_interleaved window_size window_attn_skip_freq no_rope_freq "
    "moe_layer_freq",
    check_query_groups: "num_attention_heads num_query_groups group_query_attention "
    "multi_latent_attention",
    check_experts: "num_experts moe_router_topk moe_router_score_function moe_router_pre_softmax "
    "moe_router_enable_expert_bias moe_aux_loss_coeff moe_router_load_balancing_type "
    "moe_router_num_groups moe_router_group_topk",
}
"""Checks of the model's layers -> the settings that they read."""
SETTINGS_CHECKS: Mapping[Callable[[argparse.Namespace], None], str] = {
    check_hybrid: "hybrid_layer_pattern num_experts multi_latent_attention swiglu "
    f"linear_num_key_heads linear_num_value_heads {' '.join(NOT_IN_HYBRIDS)}",
    check_expert_biases: "num_experts add_bias_linear moe_shared_expert_intermediate_size",
    check_model: "kv_channels hidden_size num_attention_heads position_embedding_type "
    "multi_latent_attention qk_pos_emb_head_dim rotary_percent max_position_embeddings seq_length",
    check_recompute: "recompute_granularity recompute_activations recompute_method "
    "recompute_num_layers recompute_modules add_bias_linear",
    check_predicted_positions: "mtp_num_layers position_embedding_type",
    check_signal: "exit_signal_handler exit_signal",
    check_learning_rate: "lr min_lr decoupled_lr decoupled_min_lr lr_warmup_init",
    check_schedule_lengths: "train_iters train_samples lr_decay_iters lr_decay_samples "
    "lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples "
    "lr_warmup_fraction lr_decay_style",
    check_weight_decay: "weight_decay_incr_style start_weight_decay end_weight_decay",
}
"""Checks of model and schedule, whatever job and machine they are for -> what they read."""


def check_shape(args: argparse.Namespace, problems: Problems) -> None:
    """Collect what is wrong with the model's layers."""
    num_before = len(problems.lines)
    for check, reads in SHAPE_CHECKS.items():
        problems.check(partial(check, args), reads)
    if len(problems.lines) > num_before:
        problems.wrong.add(SHAPE)


def check_settings(args: argparse.Namespace, problems: Problems) -> None:
    """Collect what is wrong with model and schedule, whatever job and machine they are for."""
    check_shape(args, problems)
    for check, reads in SETTINGS_CHECKS.items():
        problems.check(partial(check, args), reads)
