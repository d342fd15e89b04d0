"""``hydraulis lengths``: statistics of a corpus as tables and a picture."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.table import Table

from megatron.hydraulis.data.index import LONG_SEQUENCES
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.counts import LengthCounts, read_length_counts
from megatron.hydraulis.lengths.statistics import CutEffect, LengthStatistics
from megatron.hydraulis.observability.pictures import save_picture

__all__ = ["add_arguments", "add_lengths_arguments", "check_seed", "check_seq_length", "run"]

_MAX_SEED = 2**31 - 1
"""Of the solver."""
_WIDTH = 100
"""Columns of the tables if the output is not a terminal."""
_BAR_WIDTH = 20
_HOW = {
    "split": "cut into pieces",
    "truncate": "cut off",
    "drop": "dropped",
    "error": "none is longer",
}
_SIZE_INCHES = (8.0, 6.0)
_BARS_PER_DOUBLING = 4
_KINDS = (
    ("sequences", "#4477aa"),
    ("tokens", "#228833"),
    ("work of attention, Σs²", "#cc6677"),
)
_SUFFIXES = {".png", ".pdf", ".svg"}


def add_lengths_arguments(parser: argparse._ActionsContainer) -> None:
    """Declares the flags for the lengths and how they are cut."""
    parser.add_argument(
        "--lengths",
        required=True,
        metavar="FILE",
        help="lengths in tokens: an .idx (a document of D tokens trains D-1), a JSON list, text "
        "with a number per line, or a histogram .csv with the header length_tokens,count",
    )
    parser.add_argument(
        "--seq-length", type=int, metavar="N", help="most tokens of a sequence (default: no limit)"
    )
    parser.add_argument(
        "--long-sequences",
        choices=LONG_SEQUENCES,
        default="split",
        help="what to do with a sequence longer than --seq-length (default: %(default)s)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the subcommand."""
    add_lengths_arguments(parser)
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help="draw shares of sequences, tokens and work of attention by length: .png, .pdf or .svg",
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")


def run(namespace: argparse.Namespace) -> int:
    """Prints the statistics and draws the picture; returns the exit status.

    Raises DataError or ConfigurationError for invalid files and flags.
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
    """Raises ConfigurationError for a length below 1."""
    if seq_length is not None and seq_length < 1:
        raise ConfigurationError(
            f"a sequence has at least 1 token but --seq-length is {seq_length}; raise it"
        )


def check_seed(seed: int) -> None:
    """Raises ConfigurationError for a seed that the solver does not accept."""
    if not 0 <= seed <= _MAX_SEED:
        raise ConfigurationError(f"--seed is from 0 to {_MAX_SEED} but is {seed}; give another one")


def length_tables(statistics: LengthStatistics) -> Iterator[Table]:
    """Yields summary with percentiles, ranges, and the cut if there is one."""
    yield _summary_table(statistics)
    yield _range_table(statistics)
    if statistics.cut is not None:
        yield _cut_table(statistics.cut, statistics)


def _summary_table(statistics: LengthStatistics) -> Table:
    table = Table(title="lengths in tokens", title_justify="left")
    table.add_column("of all", overflow="fold")
    for percent, _ in statistics.percentiles:
        table.add_column(f"{percent:g} %", justify="right")
    for name, rows in (
        ("sequences", statistics.percentiles),
        ("tokens", statistics.token_percentiles),
    ):
        table.add_row(name, *(f"{length:,}" for _, length in rows))
    table.caption = (
        f"{statistics.num_sequences:,} sequences, {statistics.num_tokens:,} tokens; "
        f"{statistics.shortest:,} to {statistics.longest:,} tokens long, "
        f"mean {statistics.mean:,.0f}, mean over tokens {statistics.token_mean:,.0f}. "
        f"Percentage in sequences of at most this length."
    )
    table.caption_justify = "left"
    return table


def _range_table(statistics: LengthStatistics) -> Table:
    table = Table(title="by length", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("sequences", justify="right")
    table.add_column("%", justify="right")
    table.add_column("tokens %", justify="right")
    table.add_column("Σs² %", justify="right")
    table.add_column("share of all tokens", min_width=_BAR_WIDTH)
    most = max(row.token_share for row in statistics.ranges)
    for row in statistics.ranges:
        bar = "█" * round(_BAR_WIDTH * row.token_share / most)
        table.add_row(
            f"{row.first:,} – {row.last:,}" if row.last > row.first else f"{row.first:,}",
            f"{row.num_sequences:,}",
            *(f"{100 * s:.2f}" for s in (row.sequence_share, row.token_share, row.square_share)),
            bar or ("▏" if row.num_sequences else ""),
        )
    table.caption = "Σs²: the work of attention."
    table.caption_justify = "left"
    return table


def _cut_table(cut: CutEffect, statistics: LengthStatistics) -> Table:
    title = f"with --seq-length {cut.seq_length} --long-sequences {cut.how}"
    table = Table(title=title, title_justify="left")
    for name in ("", "sequences", "tokens"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("before", f"{statistics.num_sequences:,}", f"{statistics.num_tokens:,}")
    table.add_row(f"longer: {_HOW[cut.how]}", f"{cut.num_longer:,}", f"{cut.num_longer_tokens:,}")
    table.add_row("after", f"{cut.num_sequences:,}", f"{cut.num_tokens:,}")
    table.caption = f"Σs² after is {100 * cut.square_ratio:.2f} % of that before."
    table.caption_justify = "left"
    return table


def draw_lengths(counts: LengthCounts, path: Path, *, seq_length: int | None = None) -> None:
    """Draws the shares per length and their sums, both over a logarithmic axis of lengths.

    seq_length: marked by a line.

    Raises ConfigurationError for an unknown kind of picture, HydraulisError if the file cannot be
    written.
    """
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"--picture {path}: a picture is one of {', '.join(sorted(_SUFFIXES))} but this is "
            f"{path.suffix or 'none'!r}; give another name"
        )
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    lengths = counts.lengths.astype(np.float64)
    num_doublings = np.log2(lengths[-1] / lengths[0])
    num_bars = max(1, round(_BARS_PER_DOUBLING * num_doublings))
    edges = np.geomspace(lengths[0], lengths[-1] * 1.0001, num_bars + 1)
    if lengths[-1] == lengths[0]:
        edges = lengths[0] * np.array([0.9, 1.1])
    for power, (label, colour) in enumerate(_KINDS):
        weights = lengths**power * counts.counts
        shares = 100.0 * weights / weights.sum()
        heights = np.histogram(lengths, edges, weights=shares)[0]
        above.stairs(heights, edges, color=colour, fill=True, alpha=0.15)
        above.stairs(heights, edges, color=colour, linewidth=1.6, label=label)
        below.step(lengths, np.cumsum(shares), where="post", color=colour, linewidth=1.6)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=0.0)
        if seq_length is not None:
            axes.axvline(seq_length, color="black", linestyle="--", linewidth=1.0)
    if seq_length is not None:
        above.plot([], [], color="black", linestyle="--", label=f"--seq-length {seq_length:,}")
    below.set_xscale("log")
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    above.set_ylabel("% of all, per bar")
    below.set_ylabel("% of all, up to this length")
    below.set_xlabel("length of the sequence, tokens")
    above.legend(frameon=False)
    above.set_title(f"{counts.num_sequences:,} sequences, {counts.num_tokens:,} tokens")
    save_picture(figure, path, fix="free space there or choose another --picture")
