"""A command line becomes a checked configuration, before any communication between ranks.

One parser reads upstream's flags and ours. Upstream's checks run as for a job of one rank, with all
parallel sizes 1, because the strategy defines what the ranks do. Nothing here uses
torch.distributed or changes upstream's process-wide variables.
"""

import argparse
import contextlib
import importlib.util
import io
import os
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.enums import AttnBackend
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import validate_args
from megatron.training.models import GPTModelConfig

from megatron.hydraulis.cost_model.model_arguments import (
    LATENT_SIZES_TEXT,
    NOT_OF_LATENTS,
    OF_TE,
    TE_LAYERS,
    core_attention_of,
    drop_kept_modules,
    model_shape,
)
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import ConfigurationError, Problems, listed
from megatron.hydraulis.flags import checks
from megatron.hydraulis.flags.changes import COMPLETED
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.flags.defaults import (
    Difference,
    Vocabulary,
    chosen_layers,
    differences,
    modules_kept_by,
    resolve_vocabulary,
    runs_here,
    set_defaults,
)
from megatron.hydraulis.flags.layer_pattern import (
    check_recurrent_heads,
    planning_notes,
    take_layer_pattern,
)
from megatron.hydraulis.flags.parser import FlagParser, ParsedFlags
from megatron.hydraulis.flags.samples import evaluation_sizes, read_for_sizes, training_sizes
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.strategy.megatron_layout import SIZES
from megatron.hydraulis.strategy.pool import num_ranks_of

_OF_POOL = (
    "num_layers num_experts strategy strategy_pool strategy_schedule regroup_owners_for elastic "
    "ranks_per_node num_ranks max_tokens_per_micro_batch"
)
_OF_LIMITS = "seq_length global_batch_tokens max_tokens_per_micro_batch"
_OF_VOCABULARY = (
    "tokenizer_type tokenizer_model vocab_size padded_vocab_size make_vocab_size_divisible_by "
    "null_tokenizer_eod_id null_tokenizer_pad_id tiktoken_num_special_tokens"
)
"""Settings that the checks of `parse_arguments` read."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A command line, checked and completed."""

    args: argparse.Namespace
    """Upstream's arguments after its validate_args, without ours. All parallel sizes are 1;
    world_size and rank are the job's."""
    hydraulis: HydraulisConfig
    pool: Pool
    """The strategies of the flags and the pool file."""
    pool_changes: tuple[str, ...]
    """Differences from what the flags describe, by --elastic or as experts are whole, and what
    figures of them do not count; one line each."""
    given: tuple[str, ...]
    """Honoured options with their values, as typed."""
    taken: tuple[tuple[str, str], ...]
    """Options that were accepted without acting on them: (as typed, what happens instead)."""
    unknown: tuple[tuple[str, str], ...]
    """Unknown options that were left out: (as typed, upstream's equivalent or empty)."""
    differences: tuple[Difference, ...]
    """Settings that no option gives and that differ from upstream's defaults."""
    settings: Mapping[str, Any]
    """The attributes of args that honoured options set, with upstream's defaults."""
    sizes: BatchSizes
    """Sizes of the global batches of training."""
    evaluation_sizes: BatchSizes
    as_given: Mapping[str, Any]
    """Settings as given where args have nominal values, or upstream completes them."""
    shape: ModelShape
    vocabulary: Vocabulary
    frozen: Frozen
    """What is not trained, as far as flags say."""

    @property
    def explicit(self) -> frozenset[str]:
        """Honoured option strings that were given."""
        return frozenset(typed.split()[0] for typed in self.given)


def parse_arguments(
    argv: Sequence[str] | None,
    *,
    num_ranks: int,
    rank: int,
    flag_parser: FlagParser | None = None,
    needs_data: bool = True,
    proposed_pool: Pool | None = None,
) -> Resolved:
    """Parse, complete and check a command line; None reads ``sys.argv``.

    All ranks get the same result except for ``args.rank``. Callers that parse many command lines
    can pass a flag_parser, which takes a quarter of a second to build. Without needs_data the
    training corpus is not checked, and in a dry run its files are not. A proposed_pool is taken in
    place of the file of --strategy-pool.

    Raises ConfigurationError, including StrategyError, with a line for each thing that is wrong;
    what depends on values that are wrong already is not checked.
    """
    flag_parser = flag_parser or FlagParser()
    problems = Problems()
    flags = flag_parser.parse(argv, problems)
    args = flags.args
    problems.check(partial(take_layer_pattern, args))
    missing = checks.missing_flags(args, attempted=flags.attempted)
    with problems.collected():
        checks.check_required(missing)
    is_here = runs_here(flags)
    has_cuda = _has_cuda(args)
    before, run_dir, needs_files = dict(vars(args)), args.run_dir, not args.dry_run
    taken = (
        *flags.taken,
        *drop_kept_modules(args, modules_kept_by(flags, args.transformer_impl, has_cuda=has_cuda)),
        *run_as_others(flags),
        *_missing_here(flags, has_cuda=has_cuda),
    )
    problems.wrong |= {*flags.wrong, *missing}
    given = {given.dest for given in flags.given}
    checks.check_combinations(args, given=given, problems=problems)
    hydraulis = _take_our_flags(flags)
    problems.check(lambda: hydraulis.trace_window)
    num_started = num_ranks

    def describe_pool() -> tuple[int, Pool, tuple[str, ...]]:
        number = _num_ranks(hydraulis, num_started)
        per_node = _ranks_per_node(hydraulis, is_started=number == num_started)
        return number, *checks.resolve_pool(
            args, hydraulis, num_ranks=number, ranks_per_node=per_node, proposed=proposed_pool
        )

    described = problems.check(describe_pool, f"{_OF_POOL} {' '.join(SIZES.values())}")
    problems.check(partial(checks.check_batch, args, hydraulis), _OF_LIMITS)
    sizes = problems.check(
        partial(training_sizes, args, hydraulis.global_batch_tokens), read_for_sizes(args)
    )
    problems.check(
        partial(checks.check_plan_time, args, hydraulis),
        "plan_time_limit distributed_timeout_minutes",
    )
    set_defaults(flags, before, run_dir, has_cuda=has_cuda)
    checks.check_settings(args, problems)
    problems.check(partial(checks.check_device, args, has_cuda=is_here), "distributed_backend")
    problems.check(partial(checks.check_layers, args, has_cuda=is_here), "transformer_impl spec")
    problems.check(partial(checks.check_spec, args), "spec")
    if needs_data:
        data = partial(checks.check_data, args, needs_files=needs_files)
        problems.check(data, f"{' '.join(checks.DATA_PATHS)} sft")
    args.rank = rank  # for upstream's tokenizers
    vocabulary = problems.check(partial(resolve_vocabulary, args), _OF_VOCABULARY)

    if (
        described is None
        or sizes is None
        or vocabulary is None
        or missing
        or not flag_parser.knows_shape(problems)
    ):
        problems.raise_any()
        raise AssertionError("what is missing had a problem")
    num_ranks, pool, pool_changes = described
    try:
        sizes_of_evaluation = evaluation_sizes(args, sizes)
        if sizes.number_varies:
            # Upstream's loop counts batches of one sequence: the sampler makes the batches, and the
            # step corrects the consumed samples.
            args.global_batch_size, args.step_batch_size_schedule = 1, None
        _validate_as_one_group(args, is_here=is_here)
    except ConfigurationError:
        problems.raise_any()  # upstream's words are for what our checks let pass
        raise
    args.padded_vocab_size = vocabulary.padded_size
    check_fit(args, pool, problems)
    with problems.collected():
        checks.check_sequence_parallel(model_shape(args, args.padded_vocab_size), hydraulis, pool)
    with problems.collected():
        checks.check_predictions(args, hydraulis, pool)
    shape = model_shape(args, args.padded_vocab_size)
    lora = problems.check(partial(hydraulis.lora, shape))
    if lora is not None and args.hybrid_layer_pattern is not None:
        problems.add(
            "adapters are of the layers of a GPT but --lora-rank is given with "
            "--hybrid-layer-pattern; remove one of the two"
        )
    problems.raise_any()
    if lora is not None:  # for checkpoints
        vars(args).update(lora.arguments)
    with _upstream_checks(args, "apply_rope_fusion", "moe_permute_fusion", is_here=is_here):
        gpt_model_config(args)
    args.world_size = num_ranks
    return Resolved(
        args=args,
        hydraulis=hydraulis,
        pool=pool,
        pool_changes=(*pool_changes, *planning_notes(args)),
        given=flags.as_typed,
        taken=(*taken, *_layout_taken(flags, hydraulis, pool)),
        unknown=flags.unknown,
        differences=differences(
            flag_parser, flags, before, uses_tp=pool.tp_lcm > 1, has_cuda=has_cuda
        ),
        settings=flag_parser.honoured_defaults,
        sizes=sizes,
        evaluation_sizes=sizes_of_evaluation,
        as_given={name: before[name] for name in COMPLETED},
        shape=shape,
        vocabulary=vocabulary,
        frozen=Frozen.around(lora, shape),
    )


def check_fit(args: argparse.Namespace, pool: Pool, problems: Problems) -> None:
    """Collect why strategies do not fit the model; args have all sizes of it."""
    with problems.collected():
        checks.check_vocabulary_parts(pool, args.padded_vocab_size)
        pool.check_model(model_shape(args, args.padded_vocab_size))
    with problems.collected():
        checks.check_context(args, pool, model_shape(args, args.padded_vocab_size))
        check_recurrent_heads(args, pool)


def _has_cuda(args: argparse.Namespace) -> bool:
    """True if the job computes with CUDA, on this machine or on the device of a dry run."""
    if args.dry_run and args.device is not None:
        return args.device != "cpu"
    return torch.cuda.is_available()


def wants_proposal(argv: Sequence[str]) -> bool:
    """True if the last --strategy-pool of a command line is ``auto``."""
    return _split_pool(argv)[0] == "auto"


def parse_without_pool(argv: Sequence[str], *, num_ranks: int, rank: int) -> Resolved:
    """A command line without --strategy-pool; raises as `parse_arguments`."""
    return parse_arguments(_split_pool(argv)[1], num_ranks=num_ranks, rank=rank)


def _split_pool(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of the last --strategy-pool, and all other words."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--strategy-pool", nargs="?")
    namespace, rest = parser.parse_known_args(argv)
    return namespace.strategy_pool, rest


def _layout_taken(
    flags: ParsedFlags, hydraulis: HydraulisConfig, pool: Pool
) -> Iterator[tuple[str, str]]:
    """The sizes of upstream's one layout that were given although strategies are named."""
    for option, value in (
        ("--strategy", hydraulis.strategy),
        ("--strategy-pool", hydraulis.strategy_pool),
    ):
        if value is not None:
            for name, dest in SIZES.items():
                axis = "ep" if name == "etp" else name
                degrees = {getattr(s, axis) for each in pool.strategies for s in each.schemes}
                wins = f"{option} {value} wins: its {axis} is {listed(sorted(degrees))}"
                yield from ((str(given), wins) for given in flags.given if given.dest == dest)


def run_as_others(flags: ParsedFlags) -> Iterator[tuple[str, str]]:
    """Set what runs in place of given options; yields (as typed, what happens instead)."""
    args = flags.args
    backend = next((given for given in flags.given if given.dest == "attention_backend"), None)
    if backend is not None:
        if not flags.was_given("core_attention"):
            args.core_attention = core_attention_of(args.attention_backend.name)
        # Upstream's own choice, which its checks tie to a layer spec, is not used.
        args.attention_backend = AttnBackend.auto
        yield str(backend), f"--core-attention {args.core_attention}"
    if args.device is not None and args.cost_profile is not None:
        yield (
            f"--device {args.device}",
            "times and limits are those of --cost-profile, only regrouping that it lacks is "
            "predicted",
        )
    pattern = next((given for given in flags.given if given.dest == "hybrid_layer_pattern"), None)
    if pattern is not None and any("|" in value for value in pattern.values):
        yield str(pattern), "--strategy gives the layers of stages, as in pp2:3,5"
    if args.cp_comm_type == ["p2p"] and flags.was_given("cp_comm_type"):
        yield "--cp-comm-type p2p", "run as all_gather, the same bytes"
    if args.num_experts is not None and args.moe_token_dispatcher_type == "flex":
        args.moe_token_dispatcher_type = "alltoall"
        yield "--moe-token-dispatcher-type flex", "run as alltoall, with the same result"
    if args.multi_latent_attention:
        if flags.was_given("kv_channels"):
            yield "--kv-channels", LATENT_SIZES_TEXT
        if args.position_embedding_type == "rope":
            for given in flags.given:
                if given.dest in NOT_OF_LATENTS:
                    yield str(given), "without effect: latent attention rotates by --rope-type"


def _missing_here(flags: ParsedFlags, *, has_cuda: bool) -> Iterator[tuple[str, str]]:
    """Do without what this machine or its layers do not have and no update depends on."""
    args = flags.args
    if chosen_layers(flags, args.transformer_impl, has_cuda=has_cuda) != TE_LAYERS:
        why = "layers are not Transformer Engine's" if has_cuda else "the device is a CPU"
        for given in flags.given:
            if given.dest in OF_TE:
                setattr(args, given.dest, False)
                yield str(given), f"the plain path gives the same result, as {why}"
    if not has_cuda and args.distributed_backend == "nccl":
        args.distributed_backend = "gloo"
        if flags.was_given("distributed_backend"):
            yield "--distributed-backend nccl", "gloo, as the device is a CPU"
    if not has_cuda and args.transformer_impl == TE_LAYERS:
        args.transformer_impl = "local"
        if flags.was_given("transformer_impl"):
            instead = "layers of megatron-core, as the device is a CPU"
            yield f"--transformer-impl {TE_LAYERS}", instead
    if args.wandb_project and importlib.util.find_spec("wandb") is None:
        yield (
            f"--wandb-project {args.wandb_project}",
            "metrics go to TensorBoard and metrics.jsonl alone, as wandb is not installed "
            "(pip install wandb)",
        )
        args.wandb_project = None


def gpt_model_config(
    args: argparse.Namespace, model_config_cls: type[GPTModelConfig] = GPTModelConfig
) -> Any:
    """Upstream's model configuration for validated arguments, an instance of model_config_cls.

    Upstream's own function (0.19.2) forgets --rope-scaling-factor.
    """
    config = gpt_config_from_args(args, model_config_cls=model_config_cls)
    config.rope_scaling_factor = args.rope_scaling_factor
    return config


def _take_our_flags(flags: ParsedFlags) -> HydraulisConfig:
    """Move our attributes out of the parsed arguments."""
    values = {field.name: getattr(flags.args, field.name) for field in fields(HydraulisConfig)}
    for name in values:
        delattr(flags.args, name)
    switches = [given.option for given in flags.given if given.option.endswith("sequence-parallel")]
    # Two flags for one switch: the last one wins, as with a repeated flag.
    values["no_sequence_parallel"] = switches[-1:] == ["--no-sequence-parallel"]
    return HydraulisConfig(**values)


def _num_ranks(hydraulis: HydraulisConfig, num_started: int) -> int:
    """Number of ranks of the job: those started; in a dry run on one process those of --num-ranks,
    else of --strategy."""
    if hydraulis.num_ranks is None:
        if hydraulis.dry_run and num_started == 1 and hydraulis.strategy is not None:
            return num_ranks_of(hydraulis.strategy)
        return num_started
    if num_started > 1 and hydraulis.num_ranks != num_started:
        raise ConfigurationError(
            f"--num-ranks {hydraulis.num_ranks} is for a dry run on one process but {num_started} "
            f"were started; start one process or remove --num-ranks"
        )
    return hydraulis.num_ranks


def _ranks_per_node(hydraulis: HydraulisConfig, *, is_started: bool) -> int | None:
    """Number of ranks per node, None if unknown."""
    if hydraulis.ranks_per_node is not None:
        return hydraulis.ranks_per_node
    if hydraulis.num_ranks is not None or not is_started:
        # The launcher's variable describes the one process of a dry run, not the job.
        return None
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdigit() else None


def _validate_as_one_group(args: argparse.Namespace, *, is_here: bool) -> None:
    """Run upstream's validate_args on a job of one rank."""
    # Upstream's parse_args, whose own parser cannot be handed in, sets these from the environment.
    args._is_global_batch_size_explicitly_specified = True
    args.world_size = 1
    # Upstream allows --async-save only with its persistent worker, which needs CUDA; ours does not.
    args.use_persistent_ckpt_worker = args.async_save
    with _upstream_checks(args, "moe_grouped_gemm", is_here=is_here):
        validate_args(args)
    args.use_persistent_ckpt_worker = False


@contextlib.contextmanager
def _upstream_checks(args: argparse.Namespace, *kernels: str, is_here: bool) -> Iterator[None]:
    """Turn upstream's errors into a ConfigurationError, and suppress its printed table of all
    arguments, which RUN_DIR/config.json holds.

    kernels: switches that are off meanwhile unless the job is_here: upstream looks for their
    kernels on this machine.
    """
    asked = {} if is_here else {name: getattr(args, name) for name in kernels}
    vars(args).update(dict.fromkeys(asked, False))
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except (AssertionError, ValueError, RuntimeError, TypeError, KeyError) as error:
        reason = " ".join(str(error).split())
        if not reason:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reason = (frame.line or type(error).__name__).removeprefix("assert ")
        raise ConfigurationError(
            f"Megatron refuses these flags: {reason}; change the flags it names"
        ) from error
    finally:
        vars(args).update(asked)
