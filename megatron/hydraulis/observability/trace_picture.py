"""A timeline of one iteration: of every rank what was planned, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace_events import Span
from megatron.hydraulis.observability.trace_query import Spans

__all__ = ["draw_trace"]

# Okabe and Ito's colours, as in the summary of a run; waits recede.
COLORS = {
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#009E73",
    "gather": "#E69F00",
    "scatter": "#CC79A7",
    "overhead": "#8a8a8a",
    "pipeline wait": "#e4e4e4",
    "gather wait": "#e4e4e4",
    "scatter wait": "#e4e4e4",
    "planning wait": "#e4e4e4",
}
WAIT_LABEL = "waiting"
LIGHT = ("forward", "gather", "scatter")
"""Names whose bars want dark writing."""

WIDTH_INCHES = 12.0
MARGIN_INCHES = 1.5
ROW_INCHES = 0.26
GAP_ROWS = 0.6
BAR_HEIGHT = 0.86
"""Of a row of height 1; spans that overlap share it."""
DOTS_PER_INCH = 120
MIN_NUMBERED_SHARE = 0.009
"""Share of the picture's width from which a bar has room for its number."""
MIN_BORDERED_SHARE = 0.003
PLANNED_ALPHA = 0.55
_US_PER_MS = 1e3


def draw_trace(
    spans: Spans, iteration: int, path: Path, rank_names: Mapping[int, str] | None = None
) -> None:
    """Draws an iteration as a PNG.

    rank_names: what to call ranks, where it is not ``rank 3``.

    A rank has up to four rows: planned, compute, regroup, waits of the host where one of them is
    long enough to be seen. Bars of forward and
    backward bear the number of their micro-batch, those of regroup that of their bucket. The axis
    ends with what was measured: a plan that expected more is cut off there.

    Raises HydraulisError where the iteration has no measured span or the file cannot be written.
    """
    wholes = spans.where(name="iteration", iteration=iteration)
    if not wholes:
        raise HydraulisError(
            f"iteration {iteration} is not in the trace, which has "
            f"{sorted(set(spans.where(name='iteration').values('iteration')))}; choose one of these"
        )
    start_us, end_us = wholes.first_start_us, wholes.last_end_us
    # By time, not by number: what is gathered for an iteration may have begun in the one before.
    measured = spans.where(is_planned=False).between(start_us, end_us)
    planned = spans.where(is_planned=True, iteration=iteration)
    span_ms = (end_us - start_us) / _US_PER_MS
    drawn = (measured | planned).named(*COLORS)
    rows = _rows(drawn, MIN_BORDERED_SHARE * span_ms)
    ranks = sorted({rank for rank, _ in rows})
    height = sum(len([r for r, _ in rows if r == rank]) + GAP_ROWS for rank in ranks)
    figure = Figure(
        figsize=(WIDTH_INCHES, MARGIN_INCHES + ROW_INCHES * height),
        dpi=DOTS_PER_INCH,
        layout="constrained",
    )
    axes = figure.subplots()
    axes.set_xlim(-0.01 * span_ms, 1.01 * span_ms)
    rank_names = rank_names or {}
    at = 0.0
    ticks: list[tuple[float, str]] = []
    for rank in ranks:
        own_rows = [row for row_rank, row in rows if row_rank == rank]
        for row in own_rows:
            called = rank_names.get(rank, f"rank {rank}")
            name = f"{called}  {row}" if row == own_rows[0] else row
            ticks.append((at, name))
            lanes = _lanes([span for span in drawn.where(rank=rank) if _row_of(span) == row])
            for number, lane in enumerate(lanes):
                height = BAR_HEIGHT / len(lanes)
                middle = at - BAR_HEIGHT / 2 + (number + 0.5) * height
                for span in lane:
                    _draw_bar(axes, span, middle, height, start_us, span_ms)
            at += 1.0
        at += GAP_ROWS
    axes.set_yticks([place for place, _ in ticks], [name for _, name in ticks], fontsize=8)
    axes.set_ylim(at - GAP_ROWS, -1.0)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("ms since the iteration's start", fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.set_title(_title(wholes, planned, iteration), fontsize=10, loc="left")
    shown = Spans.of(span for span in drawn if (span.rank, _row_of(span)) in rows)
    figure.legend(
        handles=_legend(shown), loc="outside lower center", ncols=8, fontsize=8, frameon=False
    )
    try:
        FigureCanvasAgg(figure)
        figure.savefig(path)
    except OSError as error:
        raise HydraulisError(
            f"the picture needs a file that can be written: {path}: {error.strerror}; make room "
            "or name another with --picture"
        ) from error


def _row_of(span: Span) -> str:
    if span.is_planned:
        return "planned"
    return "waits" if span.track == "host" else span.track


def _rows(spans: Spans, least_wait_ms: float) -> list[tuple[int, str]]:
    order = ("planned", "compute", "regroup", "waits")
    found = {
        (span.rank, _row_of(span))
        for span in spans
        if _row_of(span) != "waits" or span.duration_us >= least_wait_ms * _US_PER_MS
    }
    return sorted(
        (row for row in found if row[1] in order), key=lambda row: (row[0], order.index(row[1]))
    )


def _lanes(spans: list[Span]) -> list[list[Span]]:
    """Spans that overlap go below one another."""
    lanes: list[list[Span]] = []
    for span in spans:
        for lane in lanes:
            if lane[-1].end_us <= span.start_us:
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


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
        # A border would hide what is thinner than it.
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


def _legend(spans: Spans) -> list[Patch]:
    names = {span.name for span in spans}
    handles = [
        Patch(color=color, label=name)
        for name, color in COLORS.items()
        if name in names and not name.endswith("wait")
    ]
    if any(name.endswith("wait") for name in names):
        handles.append(Patch(color=COLORS["pipeline wait"], label=WAIT_LABEL))
    return handles
