"""Counting of a command line: sizes of global batches, and samples.

A sample is a sequence or, with ``--global-batch-tokens``, ``--seq-length`` tokens as in Megatron.
"""

import argparse

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.config import option_of, typed

_BY_ITERATIONS: tuple[str, ...] = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
_BY_SAMPLES: tuple[str, ...] = (
    "lr_decay_samples",
    "lr_warmup_samples",
    "lr_wsd_decay_samples",
)


def check_counting(args: argparse.Namespace) -> None:
    """Raise ConfigurationError unless all options count iterations, or all count samples."""
    end, unit, others = "train_iters", "iterations", _BY_SAMPLES
    other_end, other_unit = "--train-samples", "samples"
    if args.train_iters is None:
        end, unit, others = "train_samples", "samples", _BY_ITERATIONS
        other_end, other_unit = "--train-iters", "iterations"
    wrong = [typed(args, dest) for dest in others if getattr(args, dest)]
    if wrong:
        raise ConfigurationError(
            f"a run counts iterations or samples, but {typed(args, end)} counts {unit} and "
            f"{', '.join(wrong)} {other_unit}; give {other_end} instead of {option_of(end)}, or "
            f"options that count {unit}"
        )


def sample_tokens(args: argparse.Namespace, sizes: BatchSizes) -> int:
    """Size of a sample in the unit of the sizes: 1 sequence, or --seq-length tokens."""
    return int(args.seq_length) if sizes.in_tokens else 1


def num_iterations(args: argparse.Namespace, sizes: BatchSizes, num_consumed: int = 0) -> int:
    """Iterations of training by samples after num_consumed sequences or tokens; under a budget of
    tokens the least number."""
    return sizes.num_batches(num_consumed, args.train_samples * sample_tokens(args, sizes))


def counts_iterations(*, number_varies: bool, by_samples: bool) -> bool:
    """True if the learning-rate schedule counts iterations, instead of samples as Megatron's does.

    Args:
        number_varies: whether global batches may differ in their number of sequences.
        by_samples: whether --train-samples ends training.
    """
    return number_varies and not by_samples


def read_for_sizes(args: argparse.Namespace) -> str:
    """The settings that `training_sizes` reads, for `Problems.check`."""
    names = "global_batch_size global_batch_tokens step_batch_size_schedule rampup_batch_size "
    counts_tokens = args.step_batch_size_schedule or args.rampup_batch_size or args.train_samples
    return f"{names} train_samples{' seq_length' if counts_tokens else ''}"


def training_sizes(args: argparse.Namespace, num_budget_tokens: int | None) -> BatchSizes:
    """Sizes of the global batches of training.

    Args:
        num_budget_tokens: ``--global-batch-tokens``.

    Raises ConfigurationError for options that are missing or contradict each other.
    """
    sizes = _training_sizes(args, num_budget_tokens)
    if args.train_samples is not None and num_iterations(args, sizes) < 1:
        raise ConfigurationError(
            f"training is one global batch or more but --train-samples is {args.train_samples} and "
            f"the first batch has {sizes.smallest} {sizes.unit}; give more samples"
        )
    return sizes


def _training_sizes(args: argparse.Namespace, num_budget_tokens: int | None) -> BatchSizes:
    num_sequences, schedule = args.global_batch_size, args.step_batch_size_schedule
    if schedule is not None:
        return _scheduled(args, num_budget_tokens)
    if num_sequences is None and num_budget_tokens is None:
        raise ConfigurationError(
            "the global batch has no size; give --global-batch-size in sequences or "
            "--global-batch-tokens in tokens"
        )
    if args.rampup_batch_size is not None:
        return _ramp(args, num_budget_tokens)
    return BatchSizes.constant(num_sequences=num_sequences, num_tokens=num_budget_tokens)


def evaluation_sizes(args: argparse.Namespace, training: BatchSizes) -> BatchSizes:
    """Size of the global batches of evaluation: the largest of training unless given."""
    size = training.largest
    if args.eval_global_batch_size is not None:
        size = args.eval_global_batch_size * sample_tokens(args, training)
    return BatchSizes(((0, size),), training.in_tokens)


def _scheduled(args: argparse.Namespace, num_budget_tokens: int | None) -> BatchSizes:
    """The sizes of --step-batch-size-schedule, read by upstream's own calculator."""
    typed = f"--step-batch-size-schedule '{args.step_batch_size_schedule}'"
    try:
        steps = StepBatchsizeNumMicroBatchesCalculator(
            micro_batch_size=1,
            data_parallel_size=1,
            decrease_batch_size_if_needed=False,
            rank=-1,  # logs nothing
            schedule=args.step_batch_size_schedule,
            seq_length=args.seq_length,
        ).schedule
        in_tokens = num_budget_tokens is not None
        scale = args.seq_length if in_tokens else 1
        sizes = BatchSizes(tuple((at * scale, size * scale) for at, size in steps), in_tokens)
    except (AssertionError, ValueError, OverflowError, ConfigurationError) as error:
        raise ConfigurationError(
            f"{typed}: sizes from numbers of tokens on cannot be read: {error}; write for example "
            "'0:256 1M:512', with 0 first"
        ) from error
    option, full = "--global-batch-size", args.global_batch_size
    if in_tokens:
        option, full = "--global-batch-tokens", num_budget_tokens
    if full is not None and full != sizes.largest:
        raise ConfigurationError(
            f"{typed} ends with global batches of {sizes.largest} {sizes.unit} but {option} is "
            f"{full}; give {option} {sizes.largest}"
        )
    return sizes


def _ramp(args: argparse.Namespace, num_budget_tokens: int | None) -> BatchSizes:
    """The sizes of --rampup-batch-size.

    By the rule of upstream's earlier versions (0.19.2 has the option but does not act on it): after
    c samples of the ramp's R the size is START + INCREMENT * floor(c / (R / number of increments)).
    """
    start, increment, num_samples = args.rampup_batch_size
    shown = typed(args, "rampup_batch_size")
    if min(start, increment, num_samples) < 1:
        raise ConfigurationError(
            f"{shown}: START, INCREMENT and SAMPLES of the ramp are at least 1; raise the one that "
            "is 0"
        )
    in_tokens = num_budget_tokens is not None
    scale = args.seq_length if in_tokens else 1
    full = num_budget_tokens if in_tokens else args.global_batch_size
    num_increments, remainder = divmod(full - start * scale, increment * scale)
    if num_increments < 1 or remainder:
        unit = f"samples of {scale} tokens" if in_tokens else "sequences"
        option = "--global-batch-tokens" if in_tokens else "--global-batch-size"
        fitting = (start + increment * max(num_increments, 1)) * scale
        raise ConfigurationError(
            f"{shown} grows from {start} {unit} by {increment} at a time, which does not reach "
            f"{option} {full}; give for example {option} {fitting}"
        )
    steps = {
        # Of equal numbers the last counts.
        -(-index * num_samples * scale // num_increments): (start + index * increment) * scale
        for index in range(num_increments + 1)
    }
    # As upstream, which ends a --step-batch-size-schedule with a batch that leads beyond the end.
    return BatchSizes(tuple(steps.items()), in_tokens, drops_partial=not in_tokens)
