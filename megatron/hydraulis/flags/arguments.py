"""From a command line to a checked configuration, before any rank waits for another.

Flags are upstream's and ours in one parser. To upstream's arithmetic the job is one data-parallel
group, so its checks run with all parallel sizes and the world size at 1; what the ranks really do
is in the strategy. Nothing here touches torch.distributed or, but for install_globals, upstream's
process-wide variables.
"""

import argparse
import contextlib
import dataclasses
import io
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.arguments import validate_args
from megatron.training.global_vars import set_global_variables
from megatron.training.models import GPTModelConfig

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags import checks
from megatron.hydraulis.flags.checks import (
    check_context,
    check_recompute,
    check_vocabulary_parts,
    resolve_pool,
)
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.flags.defaults import Vocabulary, resolve_vocabulary, set_defaults
from megatron.hydraulis.flags.parser import FlagParser, ParsedFlags
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Pool

__all__ = [
    "FlagParser",
    "ParsedFlags",
    "Resolved",
    "gpt_model_config",
    "install_globals",
    "parse_arguments",
]


@dataclass(frozen=True, slots=True)
class Resolved:
    """A command line, checked and completed."""

    args: argparse.Namespace
    """Upstream's arguments as its validate_args leaves them, without ours. Parallel sizes are 1 and
    data_parallel_size is 1; world_size and rank are the job's."""
    hydraulis: HydraulisConfig
    pool: Pool
    """The strategies that the run may use, as far as flags and files tell."""
    pool_changes: tuple[str, ...]
    """What --elastic made of them, a line each; none where it changed nothing."""
    explicit: frozenset[str]
    """Option strings that were given, as typed."""
    settings: tuple[str, ...]
    """The attributes of args that honoured options set."""
    shape: ModelShape
    vocabulary: Vocabulary


def parse_arguments(
    argv: Sequence[str] | None,
    *,
    num_ranks: int,
    rank: int,
    flag_parser: FlagParser | None = None,
    needs_data: bool = True,
) -> Resolved:
    """Read, complete and check a command line; None reads ``sys.argv``.

    The outcome is the same on every rank but for ``args.rank``. A flag_parser, which takes a
    quarter of a second to build, may be handed in when many command lines are read. Without
    needs_data a training corpus may be absent and is not looked for.

    An unknown flag or a value of the wrong type ends the process with status 2. Raises
    ConfigurationError, StrategyError among them, for all else that cannot be run as asked.
    """
    flag_parser = flag_parser or FlagParser()
    flags = flag_parser.parse(argv)
    args = flags.args
    hydraulis = _take_our_flags(flags)
    num_ranks = _num_ranks(hydraulis, num_ranks)
    has_cuda = torch.cuda.is_available()

    checks.check_required(args)
    fitted = resolve_pool(
        args,
        hydraulis,
        num_ranks=num_ranks,
        ranks_per_node=_ranks_per_node(hydraulis),
        degrees_given=flags.was_given("tensor_model_parallel_size")
        or flags.was_given("pipeline_model_parallel_size"),
    )
    pool = fitted.pool
    checks.check_batch(args, hydraulis, batch_size_given=flags.was_given("global_batch_size"))
    set_defaults(flags, hydraulis.run_dir, has_cuda=has_cuda)
    if hydraulis.global_batch_tokens is not None:
        # Nominal: the number of sequences varies, and the step corrects the consumed samples.
        args.global_batch_size = 1
    checks.check_model(args)
    check_recompute(args)
    checks.check_spec(args.spec)
    checks.check_learning_rate(args)
    checks.check_device(args, has_cuda=has_cuda)
    checks.check_layers(args, has_cuda=has_cuda)
    checks.check_wandb(args)
    checks.check_checkpoints(args, hydraulis)
    if needs_data:
        checks.check_data(args)

    _validate_as_one_group(args, rank)
    vocabulary = resolve_vocabulary(args)
    args.padded_vocab_size = vocabulary.padded_size
    shape = _model_shape(args)
    check_vocabulary_parts(pool, vocabulary.padded_size)
    pool.check_model(shape)
    check_context(args, pool, shape)
    with _upstream_errors():
        gpt_model_config(args)
    args.world_size = num_ranks
    return Resolved(
        args=args,
        hydraulis=hydraulis,
        pool=pool,
        pool_changes=fitted.changes,
        explicit=flags.explicit,
        settings=flag_parser.honoured_dests,
        shape=shape,
        vocabulary=vocabulary,
    )


def install_globals(resolved: Resolved) -> None:
    """Hand the arguments to upstream's process-wide variables: once a process, before pretrain().

    Builds tokenizer, timers and, on the last rank, the TensorBoard and W&B writers.
    """
    set_global_variables(resolved.args)


def gpt_model_config(
    args: argparse.Namespace, model_config_cls: type[GPTModelConfig] = GPTModelConfig
) -> Any:
    """Upstream's model configuration of validated arguments, an instance of model_config_cls.

    Upstream's own function (0.19.2) forgets --rope-scaling-factor.
    """
    config = gpt_config_from_args(args, model_config_cls=model_config_cls)
    config.rope_scaling_factor = args.rope_scaling_factor
    return config


def _take_our_flags(flags: ParsedFlags) -> HydraulisConfig:
    """Move our attributes out of the parsed arguments, so that each has one place to be read."""
    values = {}
    for field in dataclasses.fields(HydraulisConfig):
        values[field.name] = getattr(flags.args, field.name)
        delattr(flags.args, field.name)
    wishes = [
        option
        for option, _ in flags.given
        if option in ("--sequence-parallel", "--no-sequence-parallel")
    ]
    # Two flags for one switch: the last wins, as with a repeated flag.
    values["no_sequence_parallel"] = wishes[-1:] == ["--no-sequence-parallel"]
    return HydraulisConfig(**values)


def _num_ranks(hydraulis: HydraulisConfig, num_started: int) -> int:
    """Ranks of the job: those started, but for a dry run on one process what it asks for."""
    if hydraulis.num_ranks is None:
        return num_started
    if num_started > 1 and hydraulis.num_ranks != num_started:
        raise ConfigurationError(
            f"--num-ranks {hydraulis.num_ranks} is for a dry run on one process but {num_started} "
            f"were started; start one process or remove --num-ranks"
        )
    return hydraulis.num_ranks


def _ranks_per_node(hydraulis: HydraulisConfig) -> int | None:
    """Ranks of a node, None where nobody has said it."""
    if hydraulis.ranks_per_node is not None:
        return hydraulis.ranks_per_node
    if hydraulis.num_ranks is not None:
        # The launcher's variable describes the one process of a dry run, not the job.
        return None
    value = os.environ.get("LOCAL_WORLD_SIZE")
    return None if value is None else int(value)


def _validate_as_one_group(args: argparse.Namespace, rank: int) -> None:
    """Run upstream's validate_args on a job of one rank."""
    # Upstream's parse_args, whose own parser cannot be handed in, sets these from the environment.
    args._is_global_batch_size_explicitly_specified = True
    args.rank = rank
    args.world_size = 1
    # Upstream has --async-save only with a worker that needs CUDA; ours is another.
    args.use_persistent_ckpt_worker = args.async_save
    with _upstream_errors():
        validate_args(args)
    args.use_persistent_ckpt_worker = False


@contextlib.contextmanager
def _upstream_errors() -> Iterator[None]:
    """Turn what upstream raises into one ConfigurationError, and keep its 800-line table quiet.

    The table of all arguments is part of the run's resolved configuration instead.
    """
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


def _model_shape(args: argparse.Namespace) -> ModelShape:
    return ModelShape(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=(
            args.num_query_groups if args.group_query_attention else args.num_attention_heads
        ),
        kv_channels=args.kv_channels,
        vocab_size=args.padded_vocab_size,
        gated_mlp=args.swiglu,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
    )
