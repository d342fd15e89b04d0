"""``python -m megatron.hydraulis lengths``: how long the sequences of a corpus are."""

import argparse
import json
import sys

from rich.console import Console

from megatron.hydraulis.data.long_sequences import LONG_SEQUENCES
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.lengths.picture import draw_lengths
from megatron.hydraulis.lengths.statistics import LengthStatistics
from megatron.hydraulis.lengths.tables import length_tables

__all__ = ["add_arguments", "add_lengths_arguments", "check_seed", "check_seq_length", "run"]

# What the solver takes.
_MOST_SEED = 2**31 - 1
_WIDTH = 100
"""Columns of the tables where the output is no terminal."""


def add_lengths_arguments(parser: argparse._ActionsContainer) -> None:
    """Declare the flags that say which lengths, and how they are cut."""
    parser.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help="lengths in tokens: an .idx (a document of D tokens trains D-1), a JSON list, text "
        "with a number a line, or a histogram .csv with the header length_tokens,count",
    )
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="most tokens of a sequence (default: no limit)"
    )
    parser.add_argument(
        "--long-sequences",
        choices=LONG_SEQUENCES,
        default="split",
        help="what happens to a sequence longer than --seq-length (default: %(default)s)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    add_lengths_arguments(parser)
    parser.add_argument(
        "--picture",
        metavar="FILE",
        help="draw shares of sequences, tokens and attention's work over the length: .png, .pdf "
        "or .svg",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Print the statistics and draw the picture; returns the exit status.

    Raises DataError or ConfigurationError for files and flags that make no sense.
    """
    check_seq_length(namespace.seq_length)
    counts = read_length_counts(namespace.lengths)
    statistics = LengthStatistics.of(
        counts, seq_length=namespace.seq_length, how=namespace.long_sequences
    )
    if namespace.picture is not None:
        draw_lengths(counts, namespace.picture, seq_length=namespace.seq_length)
    if namespace.json:
        json.dump(statistics.to_json(), sys.stdout, indent=1)
        print()
        return 0
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for table in length_tables(statistics):
        console.print(table)
    return 0


def check_seq_length(seq_length: int | None) -> None:
    """Raise ConfigurationError for a length below 1."""
    if seq_length is not None and seq_length < 1:
        raise ConfigurationError(
            f"a sequence has at least 1 token but --seq-length is {seq_length}; raise it"
        )


def check_seed(seed: int) -> None:
    """Raise ConfigurationError for a seed that the solver does not take."""
    if not 0 <= seed <= _MOST_SEED:
        raise ConfigurationError(
            f"--seed is from 0 to {_MOST_SEED} but is {seed}; give another one"
        )
