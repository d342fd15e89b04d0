"""``hydraulis trace``: the time of each rank as a table, an iteration as a picture."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.observability.pictures import CATEGORY_COLORS, save_picture, style_rows
from megatron.hydraulis.observability.trace import (
    MERGED_FILE_NAME,
    RankShares,
    Span,
    Spans,
    free_lane,
    merge_trace,
    rank_files,
    rank_shares,
    read_trace,
)
from megatron.hydraulis.terminal import figures_table, table_text

PICTURE_FILE_NAME = "trace.png"
TABLE_WIDTH = 100

WAIT_COLOR = "#e4e4e4"
COLORS = {
    "forward": CATEGORY_COLORS[5],
    "backward": CATEGORY_COLORS[0],
    "optimizer": CATEGORY_COLORS[2],
    "gather": CATEGORY_COLORS[1],
    "scatter": CATEGORY_COLORS[3],
    "column gather": CATEGORY_COLORS[1],
    "column scatter": CATEGORY_COLORS[3],
    "overhead": "#8a8a8a",
    "pipeline wait": WAIT_COLOR,
    "gather wait": WAIT_COLOR,
    "scatter wait": WAIT_COLOR,
    "column gather wait": WAIT_COLOR,
    "column scatter wait": WAIT_COLOR,
    "planning wait": WAIT_COLOR,
}
LIGHT = ("forward", "gather", "scatter", "column gather", "column scatter")
"""Names whose bars need dark text."""
ROWS = ("planned", "compute", "regroup", "waits")
"""Rows of a rank, from top to bottom."""

WIDTH_INCHES = 12.0
MARGIN_INCHES = 1.5
ROW_INCHES = 0.26
GAP_ROWS = 0.6
BAR_HEIGHT = 0.86
"""Height in a row of height 1; overlapping spans share it."""
MIN_NUMBERED_SHARE = 0.009
"""Share of the picture's width from which a bar has room for its number."""
MIN_BORDERED_SHARE = 0.003
PLANNED_ALPHA = 0.55
_US_PER_MS = 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Merge the ranks' files of a trace, also if the run was killed; print how much of its time "
        "each rank worked, waited and was idle; draw one iteration."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder that --trace wrote")
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="iteration to draw; default: the last one traced"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help=f"path of the picture (PNG); default: DIR/{PICTURE_FILE_NAME}",
    )


def run(namespace: argparse.Namespace) -> int:
    """Merges, prints, draws; returns the exit status.

    Raises HydraulisError for a folder without a trace, or without the iteration.
    """
    folder: Path = namespace.folder
    picture = namespace.picture or folder / PICTURE_FILE_NAME
    if picture.suffix != ".png":
        raise ConfigurationError(
            f"--picture {picture}: a picture is a .png but this is {picture.suffix or 'none'!r}; "
            "give another name"
        )
    merged = merge_trace(folder) if rank_files(folder) else folder / MERGED_FILE_NAME
    spans = read_trace(merged)
    iterations = sorted({int(span.detail["iteration"]) for span in spans.where(name="iteration")})
    if not iterations:
        raise HydraulisError(
            f"a trace holds complete iterations but {folder} has none; the run ended before the "
            "first of --trace-iterations did"
        )
    print(shares_table(rank_shares(spans), len(iterations)), end="")
    number = iterations[-1] if namespace.iteration is None else namespace.iteration
    figure = trace_figure(spans, number)
    save_picture(figure, picture, fix="free space there or choose another --picture")
    print(f"iterations {iterations[0]} to {iterations[-1]}: {merged}")
    print(f"iteration {number}: {picture}")
    return 0


def shares_table(shares: list[RankShares], num_iterations: int) -> str:
    """The table as plain text: a row per rank, times in ms per iteration."""
    times = ("time", "forward", "backward", "planned", "busy", "wait", "idle")
    table = figures_table(
        "Time of each rank, ms per iteration",
        numbers=("rank", *times, "regrouping", "of it hidden"),
    )

    def per_iteration(time_us: float) -> str:
        return f"{time_us / _US_PER_MS / num_iterations:,.1f}"

    def share(part_us: float, whole_us: float) -> str:
        return f"{part_us / whole_us:.0%}" if whole_us else "–"

    for row in shares:
        table.add_row(
            str(row.rank),
            *map(per_iteration, (row.window_us, row.forward_us, row.backward_us, row.planned_us)),
            *(share(time_us, row.window_us) for time_us in (row.busy_us, row.wait_us, row.idle_us)),
            per_iteration(row.transfer_us),
            share(row.hidden_us, row.transfer_us),
        )
    return table_text(table, TABLE_WIDTH)


def trace_figure(
    spans: Spans, iteration: int, rank_names: Mapping[int, str] | None = None
) -> Figure:
    """An iteration as a picture.

    A rank has up to four rows: planned, compute, regroup, and waits of the host if one of them is
    long enough to be visible. Bars show the number of their micro-batch or bucket. The axis ends
    with the measured end of the iteration: a longer plan is cut off there.

    Args:
        rank_names: names of ranks that are not ``rank 3``.

    Raises:
        HydraulisError: the iteration has no measured span.
    """
    wholes = spans.where(name="iteration", iteration=iteration)
    if not wholes:
        raise HydraulisError(
            f"iteration {iteration} is not in the trace, which has "
            f"{sorted(set(spans.where(name='iteration').values('iteration')))}; choose one of these"
        )
    start_us, end_us = wholes.first_start_us, wholes.last_end_us
    # By time, not by number: a gather for this iteration may have begun in the one before.
    measured = spans.where(is_planned=False).between(start_us, end_us)
    planned = spans.where(is_planned=True, iteration=iteration)
    span_ms = (end_us - start_us) / _US_PER_MS
    drawn = (measured | planned).named(*COLORS)
    rows = _rows(drawn, MIN_BORDERED_SHARE * span_ms)
    num_rows = len(rows) + GAP_ROWS * len({rank for rank, _ in rows})
    figure = Figure(
        figsize=(WIDTH_INCHES, MARGIN_INCHES + ROW_INCHES * num_rows), layout="constrained"
    )
    axes = figure.subplots()
    axes.set_xlim(-0.01 * span_ms, 1.01 * span_ms)
    ticks: dict[float, str] = {}
    at, last_rank = 0.0, None
    for rank, row in rows:
        name = row
        if rank != last_rank:
            at += 0.0 if last_rank is None else GAP_ROWS
            name = f"{(rank_names or {}).get(rank, f'rank {rank}')}  {row}"
        ticks[at], last_rank = name, rank
        own = [span for span in drawn.where(rank=rank) if _row_of(span) == row]
        ends_us: list[float] = []
        lanes = [free_lane(ends_us, span) for span in own]
        height = BAR_HEIGHT / len(ends_us)
        for span, lane in zip(own, lanes, strict=True):
            middle = at - BAR_HEIGHT / 2 + (lane + 0.5) * height
            _draw_bar(axes, span, middle, height, start_us, span_ms)
        at += 1.0
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=8)
    axes.set_ylim(at, -1.0)
    style_rows(axes, "ms since the iteration's start", _title(wholes, planned, iteration))
    names = {span.name for span in drawn if (span.rank, _row_of(span)) in rows}
    figure.legend(
        handles=_legend(names), loc="outside lower center", ncols=8, fontsize=8, frameon=False
    )
    return figure


def _row_of(span: Span) -> str:
    if span.is_planned:
        return "planned"
    return "waits" if span.track == "host" else span.track


def _rows(spans: Spans, min_wait_ms: float) -> list[tuple[int, str]]:
    """(rank, row), in the order of the picture."""
    found = {
        (span.rank, _row_of(span))
        for span in spans
        if _row_of(span) != "waits" or span.duration_us >= min_wait_ms * _US_PER_MS
    }
    return sorted(
        (row for row in found if row[1] in ROWS), key=lambda row: (row[0], ROWS.index(row[1]))
    )


def _draw_bar(
    axes: Axes, span: Span, at: float, height: float, start_us: float, span_ms: float
) -> None:
    left_ms = (span.start_us - start_us) / _US_PER_MS
    width_ms = span.duration_us / _US_PER_MS
    axes.barh(
        at,
        width_ms,
        left=left_ms,
        height=height,
        color=COLORS[span.name],
        alpha=PLANNED_ALPHA if span.is_planned else 1.0,
        # A border would hide a thin bar.
        edgecolor="white" if width_ms >= MIN_BORDERED_SHARE * span_ms else COLORS[span.name],
        linewidth=0.4,
    )
    number = span.detail.get("micro_batch", span.detail.get("bucket"))
    visible_ms = min(left_ms + width_ms, span_ms) - max(left_ms, 0.0)
    if number is not None and span.track != "host" and visible_ms >= MIN_NUMBERED_SHARE * span_ms:
        axes.text(
            max(left_ms, 0.0) + visible_ms / 2,
            at,
            str(number),
            ha="center",
            va="center",
            fontsize=6.5 if height > BAR_HEIGHT / 2 else 5.5,
            color="black" if span.name in LIGHT or span.is_planned else "white",
            clip_on=True,
        )


def _title(wholes: Spans, planned: Spans, iteration: int) -> str:
    strategies = sorted({str(value) for value in wholes.values("strategy")})
    measured_ms = (wholes.last_end_us - wholes.first_start_us) / _US_PER_MS
    title = f"iteration {iteration}   ·   {', '.join(strategies)}   ·   {measured_ms:,.1f} ms"
    if planned:
        planned_ms = (planned.last_end_us - planned.first_start_us) / _US_PER_MS
        title += f", planned {planned_ms:,.1f} ms"
    return title


def _legend(names: set[str]) -> list[Patch]:
    handles = [
        Patch(color=color, label=name)
        for name, color in COLORS.items()
        if name in names and color != WAIT_COLOR
    ]
    if any(COLORS[name] == WAIT_COLOR for name in names):
        handles.append(Patch(color=WAIT_COLOR, label="waiting"))
    return handles
