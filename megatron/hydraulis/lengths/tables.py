"""Statistics of lengths as tables for people."""

from collections.abc import Iterator

from rich.table import Table

from megatron.hydraulis.lengths.statistics import CutEffect, LengthStatistics

__all__ = ["length_tables"]

_BAR_WIDTH = 20
_HOW = {
    "split": "cut into pieces",
    "truncate": "cut off",
    "drop": "left out",
    "error": "none is longer",
}


def length_tables(statistics: LengthStatistics) -> Iterator[Table]:
    """Summary, percentiles, ranges, and the cut if there is one."""
    yield _summary(statistics)
    yield _ranges(statistics)
    if statistics.cut is not None:
        yield _cut(statistics.cut, statistics)


def _summary(statistics: LengthStatistics) -> Table:
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
        f"So many percent are in sequences of at most this length."
    )
    table.caption_justify = "left"
    return table


def _ranges(statistics: LengthStatistics) -> Table:
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


def _cut(cut: CutEffect, statistics: LengthStatistics) -> Table:
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
