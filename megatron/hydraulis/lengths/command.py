"""``hydraulis lengths``: statistics of a corpus as tables and a picture."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from megatron.hydraulis.command_line import add_flags, add_lengths_argument
from megatron.hydraulis.data.dataset import LongSequences
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.batches import BatchesRequest
from megatron.hydraulis.lengths.counts import LengthCounts, read_length_counts
from megatron.hydraulis.terminal import figures_table, print_json, print_next, results_console

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)
_BAR_WIDTH = 12
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

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRange:
    """Sequences of first to last tokens, both included, and their shares of the corpus."""

    first: int
    last: int
    num_sequences: int
    sequence_share: float
    token_share: float
    square_share: float
    """Share of Σs², to which the work of attention is proportional."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutEffect:
    """Effect of --seq-length and --long-sequences on the corpus."""

    seq_length: int
    how: LongSequences
    num_longer: int
    """Number of sequences above seq_length."""
    num_longer_tokens: int
    """Tokens of these sequences."""
    num_sequences: int
    """Number of sequences after the cut."""
    num_tokens: int
    square_ratio: float
    """Σs² after over Σs² before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthStatistics:
    """Statistics of the sequences of a corpus, lengths in tokens."""

    num_sequences: int
    num_tokens: int
    shortest: int
    longest: int
    mean: float
    token_mean: float
    """Σs²/Σs: mean over tokens of the length of their sequences."""
    percentiles: tuple[tuple[float, int], ...]
    """(percent, length): percentage of the sequences with at most this length."""
    token_percentiles: tuple[tuple[float, int], ...]
    """(percent, length): percentage of the tokens in sequences of at most this length."""
    ranges: tuple[LengthRange, ...]
    """Powers of two: 1, 2–3, 4–7, …; from the shortest to the longest."""
    cut: CutEffect | None = None

    @classmethod
    def of(
        cls, counts: LengthCounts, *, seq_length: int | None = None, how: LongSequences = "split"
    ) -> "LengthStatistics":
        """Statistics of the corpus before a cut, and with seq_length the effect of the cut.

        Raises DataError if the cut leaves nothing, and with ``error`` for longer sequences.
        """
        squares = _squares(counts)
        tokens = counts.lengths.astype(np.float64) * counts.counts
        return cls(
            num_sequences=counts.num_sequences,
            num_tokens=counts.num_tokens,
            shortest=int(counts.lengths[0]),
            longest=counts.longest,
            mean=counts.num_tokens / counts.num_sequences,
            token_mean=float(squares.sum() / tokens.sum()),
            percentiles=_percentiles(counts.lengths, counts.counts.astype(np.float64)),
            token_percentiles=_percentiles(counts.lengths, tokens),
            ranges=_ranges(counts, tokens, squares),
            cut=None if seq_length is None else _cut(counts, seq_length, how),
        )

    def to_json(self) -> dict[str, Any]:
        """All statistics; percentiles as an object from percent to length."""
        content = asdict(self)
        for name in ("percentiles", "token_percentiles"):
            content[name] = {f"{percent:g}": length for percent, length in getattr(self, name)}
        return content


def _percentiles(
    lengths: npt.NDArray[np.int64], weights: FloatArray
) -> tuple[tuple[float, int], ...]:
    """The shortest length with so much of the weight at or below it, for each percentage."""
    below = np.cumsum(weights)
    # Rounded sums may fall below a share that exact ones reach.
    wanted = below[-1] * np.array(PERCENTILES) / 100.0 * (1.0 - 1e-12)
    reached = lengths[np.searchsorted(below, wanted)]
    return tuple((float(p), int(length)) for p, length in zip(PERCENTILES, reached, strict=True))


def _squares(counts: LengthCounts) -> FloatArray:
    # Floats, since a billion sequences of a million tokens overflow 64 bits.
    squares: FloatArray = np.square(counts.lengths.astype(np.float64)) * counts.counts
    return squares


def _ranges(
    counts: LengthCounts, tokens: FloatArray, squares: FloatArray
) -> tuple[LengthRange, ...]:
    # frexp, not log2: exact for every length below 2**53.
    exponents = np.frexp(counts.lengths.astype(np.float64))[1] - 1
    lowest, highest = int(exponents.min()), int(exponents.max())
    sequences = np.bincount(exponents - lowest, weights=counts.counts.astype(np.float64))
    of_tokens = np.bincount(exponents - lowest, weights=tokens)
    of_squares = np.bincount(exponents - lowest, weights=squares)
    return tuple(
        LengthRange(
            first=1 << exponent,
            last=(2 << exponent) - 1,
            num_sequences=int(sequences[exponent - lowest]),
            sequence_share=float(sequences[exponent - lowest] / sequences.sum()),
            token_share=float(of_tokens[exponent - lowest] / of_tokens.sum()),
            square_share=float(of_squares[exponent - lowest] / of_squares.sum()),
        )
        for exponent in range(lowest, highest + 1)
    )


def _cut(counts: LengthCounts, seq_length: int, how: LongSequences) -> CutEffect:
    after = counts.cut(seq_length, how)
    is_longer = counts.lengths > seq_length
    return CutEffect(
        seq_length=seq_length,
        how=how,
        num_longer=int(counts.counts[is_longer].sum()),
        num_longer_tokens=int(counts.lengths[is_longer] @ counts.counts[is_longer]),
        num_sequences=after.num_sequences,
        num_tokens=after.num_tokens,
        square_ratio=float(_squares(after).sum() / _squares(counts).sum()),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_lengths_argument(parser)
    add_flags(parser, BatchesRequest, "seq_length", "long_sequences")
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
    counts = read_length_counts(namespace.lengths)
    statistics = LengthStatistics.of(
        counts, seq_length=namespace.seq_length, how=namespace.long_sequences
    )
    if namespace.picture is not None:
        draw_lengths(counts, namespace.picture, seq_length=namespace.seq_length)
    if namespace.json:
        print_json(statistics.to_json())
        return 0
    console = results_console()
    for table in length_tables(statistics):
        console.print(table)
    print_next(
        "hydraulis advise --lengths",
        namespace.lengths,
        *([] if namespace.seq_length is None else ["--seq-length", str(namespace.seq_length)]),
        *["--global-batch-size", "N", "--num-ranks", "N", "--model", "FILE", "--device", "NAME"],
    )
    return 0


def length_tables(statistics: LengthStatistics) -> Iterator[Table]:
    """Yields summary with percentiles, ranges, and the cut if there is one."""
    yield _summary_table(statistics)
    yield _range_table(statistics)
    if statistics.cut is not None:
        yield _cut_table(statistics.cut, statistics)


def _summary_table(statistics: LengthStatistics) -> Table:
    table = figures_table(
        "lengths in tokens",
        numbers=("share", "of the sequences", "of the tokens"),
        caption=f"{statistics.num_sequences:,} sequences, {statistics.num_tokens:,} tokens; "
        f"{statistics.shortest:,} to {statistics.longest:,} tokens long, "
        f"mean {statistics.mean:,.0f}, mean over tokens {statistics.token_mean:,.0f}. "
        f"The share is in sequences of at most this length.",
    )
    rows = zip(statistics.percentiles, statistics.token_percentiles, strict=True)
    for (percent, length), (_, length_of_tokens) in rows:
        table.add_row(f"{percent:g} %", f"{length:,}", f"{length_of_tokens:,}")
    return table


def _range_table(statistics: LengthStatistics) -> Table:
    table = figures_table(
        "by length",
        numbers=("length, tokens", "sequences", "%", "tokens %", "Σs² %"),
        caption="Σs²: the work of attention.",
    )
    for column in table.columns:
        column.no_wrap = True
    table.add_column("token share", min_width=_BAR_WIDTH)
    most = max(row.token_share for row in statistics.ranges)
    for row in statistics.ranges:
        bar = "█" * round(_BAR_WIDTH * row.token_share / most)
        table.add_row(
            f"{row.first:,} – {row.last:,}" if row.last > row.first else f"{row.first:,}",
            f"{row.num_sequences:,}",
            *(f"{100 * s:.2f}" for s in (row.sequence_share, row.token_share, row.square_share)),
            bar or ("▏" if row.num_sequences else ""),
        )
    return table


def _cut_table(cut: CutEffect, statistics: LengthStatistics) -> Table:
    table = figures_table(
        f"with --seq-length {cut.seq_length} --long-sequences {cut.how}",
        ("",),
        ("sequences", "tokens"),
        caption=f"Σs² after is {100 * cut.square_ratio:.2f} % of that before.",
    )
    table.add_row("before", f"{statistics.num_sequences:,}", f"{statistics.num_tokens:,}")
    table.add_row(f"longer: {_HOW[cut.how]}", f"{cut.num_longer:,}", f"{cut.num_longer_tokens:,}")
    table.add_row("after", f"{cut.num_sequences:,}", f"{cut.num_tokens:,}")
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
    # Not above: only this command needs them, and they take half a second.
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    from megatron.hydraulis.observability.pictures import save_picture

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
