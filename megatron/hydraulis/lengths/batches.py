"""Global batches of a corpus: what commands ask for, and how batches are drawn."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.command_line import Flag, check_flags, given_flags
from megatron.hydraulis.cost_model.limits import CUDA_ROW_QUANTUM
from megatron.hydraulis.data.dataset import LONG_SEQUENCES, LongSequences
from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler, SequenceGroup
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.counts import LengthCounts, read_length_counts
from megatron.hydraulis.terminal import results_console

_DRAWN_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class BatchesRequest:
    """Global batches of a corpus that is cut as in training.

    Raises ConfigurationError for a number outside the range of its flag.
    """

    corpus: LengthCounts
    """Lengths before the cut."""
    sizes: BatchSizes
    seq_length: Annotated[int | None, Flag("most tokens of a sequence (default: no limit)")] = None
    long_sequences: Annotated[
        LongSequences,
        Flag(
            "what to do with a sequence longer than --seq-length",
            metavar=None,
            choices=LONG_SEQUENCES,
        ),
    ] = "split"
    seed: Annotated[
        int, Flag("seed of the batches; files, flags and seed determine the result")
    ] = 0
    row_quantum_tokens: Annotated[
        int,
        Flag(
            "round rows up to a multiple of N tokens, but not beyond their limit; training with "
            f"CUDA takes {CUDA_ROW_QUANTUM}"
        ),
    ] = 1

    def __post_init__(self) -> None:
        check_flags(self)

    @classmethod
    def of_command(cls, namespace: argparse.Namespace, **others: Any) -> Self:
        """The request that the flags of a command make; others: fields without a flag.

        Raises DataError for a file of lengths that cannot be read, and as `batch_sizes`.
        """
        return cls(
            corpus=read_length_counts(namespace.lengths),
            sizes=batch_sizes(namespace),
            **given_flags(cls, namespace),
            **others,
        )

    @property
    def most_tokens(self) -> int | None:
        """Tokens of the longest possible sequence; None for those of the longest of the corpus."""
        return self.seq_length

    @cached_property
    def counts(self) -> LengthCounts:
        """Lengths of the sequences that training would see; raises as `LengthCounts.cut`."""
        return self.corpus.cut(self.most_tokens, self.long_sequences)

    def print_batch(self) -> None:
        """Prints what a global batch is, in the words of training."""
        mean_length = self.counts.num_tokens / self.counts.num_sequences
        # A clause a line: an option must not be parted from its number.
        clauses = self.sizes.text(mean_length, self.seq_length).replace("; ", ";\n  ")
        results_console().print(f"global batch: {clauses}", highlight=False)


def add_batch_arguments(parser: argparse._ActionsContainer) -> None:
    """Declares the flags that `batch_sizes` reads, as in training."""
    parser.add_argument(
        "--global-batch-size", type=int, metavar="N", help="sequences of a global batch"
    )
    parser.add_argument(
        "--global-batch-tokens", type=int, metavar="N", help="or its most tokens instead"
    )
    parser.add_argument(
        "--rampup-batch-size",
        nargs=3,
        metavar=("START", "INCREMENT", "SAMPLES"),
        help="accepted: batches here are those of the end of training",
    )
    parser.add_argument(
        "--step-batch-size-schedule",
        metavar="'0:256 1M:512'",
        help="likewise; without the others its last size is that of a batch, in sequences",
    )


def batch_sizes(namespace: argparse.Namespace) -> BatchSizes:
    """The size of global batches; of those that grow in training the last, which stderr says.

    Raises ConfigurationError unless exactly one size is given, and positive.
    """
    num_sequences, num_tokens = namespace.global_batch_size, namespace.global_batch_tokens
    schedule = namespace.step_batch_size_schedule
    if schedule is not None and num_sequences is None and num_tokens is None:
        last = re.fullmatch(r"(?:.*[\s,])?[\d.]+[KMBT]?:(\d+)", schedule.strip(), re.IGNORECASE)
        if last is None:
            raise ConfigurationError(
                f"--step-batch-size-schedule lists sizes from numbers of tokens on but is "
                f"'{schedule}'; write for example '0:256 1M:512'"
            )
        num_sequences = int(last[1])
    sizes = BatchSizes.constant(num_sequences=num_sequences, num_tokens=num_tokens)
    if schedule is not None or namespace.rampup_batch_size is not None:
        print(
            f"batches grow in training; these are those of its end, {sizes.largest:,} {sizes.unit}",
            file=sys.stderr,
            flush=True,
        )
    return sizes


def sample_batches(
    lengths: npt.NDArray[np.integer[Any]] | Sequence[int],
    *,
    num_batches: int,
    seed: int,
    sizes: BatchSizes,
) -> list[tuple[int, ...]]:
    """Global batches as the training program samples them.

    lengths: shape (num_sequences,), the corpus. Raises ConfigurationError as LengthSampler and
    `BatchSizes.check_num_drawn` do.
    """
    sizes.check_num_drawn(num_batches, float(np.mean(lengths)))
    groups = [SequenceGroup(0, len(lengths), 1.0)]
    sampler = LengthSampler(np.asarray(lengths), groups, seed=seed, sizes=sizes)
    return [sampler.next_batch().lengths for _ in range(num_batches)]


def draw_batches(
    counts: LengthCounts, size: BatchSizes, num_batches: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Lengths in tokens of num_batches global batches, sequences sampled with replacement.

    With a budget of tokens, the first sequence that does not fit begins the next batch.

    Raises ConfigurationError if the longest sequence is longer than the budget, and as
    `BatchSizes.check_num_drawn`.
    """
    budget = size.largest if size.in_tokens else None
    if budget is not None and counts.longest > budget:
        raise ConfigurationError(
            f"a global batch must hold the longest sequence: {counts.longest} tokens are more "
            f"than --global-batch-tokens {budget}; raise it or lower --seq-length"
        )
    size.check_num_drawn(num_batches, counts.num_tokens / counts.num_sequences)
    generator = np.random.default_rng(seed)
    shares = counts.counts / counts.counts.sum()
    batches: list[tuple[int, ...]] = []
    open_batch: list[int] = []
    num_tokens = 0
    while True:
        for length in generator.choice(counts.lengths, size=_DRAWN_AT_ONCE, p=shares).tolist():
            is_full = (
                len(open_batch) == size.largest if budget is None else num_tokens + length > budget
            )
            if is_full:
                batches.append(tuple(open_batch))
                if len(batches) == num_batches:
                    return tuple(batches)
                open_batch, num_tokens = [], 0
            open_batch.append(length)
            num_tokens += length
