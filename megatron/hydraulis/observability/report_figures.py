"""Figures of a run: those of the report, a function each, and ``summary.png``."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron.hydraulis.observability.console import factor_text, factors_text, share_text
from megatron.hydraulis.observability.pictures import CATEGORY_COLORS, figure_svg, save_picture
from megatron.hydraulis.observability.records import SUMMARY_FILE_NAME
from megatron.hydraulis.observability.report_data import Run
from megatron.hydraulis.observability.report_numbers import busy_fraction

INK = "#24292f"
MUTED = "#8b949e"
GRID = "#d8dee4"
IDLE = "#e4e8ec"
SERIES = CATEGORY_COLORS
MEASURED, PREDICTED = SERIES[0], SERIES[1]

VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", IDLE: "idle"} | {
    color: f"series-{number}" for number, color in enumerate(SERIES)
}
"""The page's custom property for each colour of the figures."""

FONT_SIZE = 8.5
"""Points, in a figure about 330 points wide: legible if that is shown on 390 pixels."""
PNG_DOTS_PER_INCH = 200
WIDTH_INCHES, HEIGHT_INCHES = 4.6, 2.6
TALL_INCHES = 3.6
SUMMARY_SIZE_INCHES = (8.0, 9.0)

MAX_DOTS = 2000
"""More dots are drawn as one image: separate elements would make the page slow."""
MAX_ITERATIONS_WITH_MARKERS = 60
MIN_ITERATIONS_TO_SMOOTH = 20
HALF_WINDOWS_PER_RUN = 20
MAX_HALF_WINDOW = 10
MAX_RANK_BARS = 64
MAX_REPLICA_LINES = 6
"""More replicas are rows of a map in the summary."""
MIN_BAR_SLOTS = 3
"""Slots of an axis of bars, so that a single bar is not as wide as the picture."""
INCHES_PER_ROW = 0.18
POINTS_PER_LEGEND_ROW = 13.0
MAX_HEIGHT_INCHES = 9.0
MAX_LABEL_CHARS = 24
MAX_BAR_LABEL_CHARS = 15
MAX_TITLE_CHARS = 60
OTHERS = "others"
_MS_PER_S = 1e3
_BYTES_PER_MB = 1e6


def _settings(font_size: float) -> dict[Any, Any]:
    """matplotlib's settings while a figure is made and drawn."""
    sizes = ("axes.titlesize", "axes.labelsize", "xtick.labelsize", "ytick.labelsize")
    return {
        **dict.fromkeys(("font.size", "legend.fontsize", *sizes), font_size),
        "font.family": "sans-serif",
        "text.color": INK,
        "axes.edgecolor": MUTED,
        "axes.labelcolor": INK,
        "xtick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.color": MUTED,
        "ytick.labelcolor": INK,
        "svg.fonttype": "none",
    }


SETTINGS = _settings(FONT_SIZE)
SUMMARY_SETTINGS = _settings(10.0) | {"legend.fontsize": 8.0}


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """A figure with its title and caption."""

    name: str
    title: str
    caption: str
    """What is drawn and how it is measured, a sentence or two."""
    figure: Figure

    def svg(self) -> str:
        """An ``<svg>`` element for a page, whose colours follow the page, light or dark.

        It needs no file and no font, and its identifiers begin with the figure's name.
        """
        svg = figure_svg(self.figure, self.name, SETTINGS)
        # The page's font, whatever fonts the reader's machine has.
        svg = re.sub(r"font-family: [^;\"]*", "font-family: var(--font)", svg)
        for color, variable in VARIABLES.items():
            svg = re.sub(color, f"var(--{variable})", svg, flags=re.IGNORECASE)
        opening = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')
        element = rf'<svg viewBox="\1" role="img" aria-label="{self.title}">'
        return opening.sub(element, svg, count=1).strip()

    def write_png(self, folder: Path) -> None:
        """The figure on white. Raises HydraulisError if the file cannot be written."""
        with matplotlib.rc_context(SETTINGS):
            save_picture(
                self.figure,
                folder / f"{self.name}.png",
                fix="free space there or give another --output-dir",
                dpi=PNG_DOTS_PER_INCH,
                facecolor="white",
            )


def figures_of(run: Run) -> list[ReportFigure]:
    """The report's figures that the run has data for."""
    rates = [
        record.num_tokens / record.iteration_time_s if record.iteration_time_s else math.nan
        for record in run.records
    ]
    idle = [100.0 * record.idle_share for record in run.records]
    padding = [100.0 * record.padding_fraction for record in run.records]
    with matplotlib.rc_context(SETTINGS):
        figures = (
            _curve(
                *(run, "loss", "Loss", "lm loss per token", _losses(run), MEASURED),
                caption="Mean loss of each global batch, by the weights of its tokens.",
            ),
            _curve(
                *(run, "throughput", "Tokens per second", "tokens/s", rates, MEASURED),
                caption="Trained tokens of an iteration / its measured time; padding does not "
                "count.",
                min_top=0.0,
            ),
            _times(run),
            _prediction(run),
            _strategies(run),
            _replicas(run),
            _ranks(run),
            _curve(
                *(run, "idle", "Idle share, predicted", "% of the makespan", idle, SERIES[2]),
                caption="By the plan: share of the makespan that the ranks of replicas wait for "
                "the slowest one.",
                min_top=1.0,
            ),
            _curve(
                *(run, "padding", "Padding", "% of the computed tokens", padding, SERIES[3]),
                caption="Tokens that only fill up lengths to multiples that tp and cp need; they "
                "are not trained.",
                min_top=0.1,
                is_smoothed=False,
            ),
            _planning(run),
            _regrouping(run),
        )
        found = [figure for figure in figures if figure is not None]
        for one in found:
            # The layout uses the ticks of the previous draw: without it, longer labels are cut off.
            one.figure.draw_without_rendering()
    return found


def _curve(
    run: Run,
    name: str,
    title: str,
    label: str,
    values: Sequence[float],
    color: str,
    *,
    caption: str,
    min_top: float | None = None,
    is_smoothed: bool = True,
) -> ReportFigure:
    """A value per iteration; with ``min_top`` the axis begins at 0 and reaches at least that."""
    figure, axes = _figure()
    if is_smoothed:
        caption += _line_with_median(axes, run, values, color)
    else:
        _line(axes, run, values, color)
    axes.set_ylabel(label)
    if min_top is not None:
        axes.set_ylim(0.0, max(axes.get_ylim()[1], min_top))
    _iteration_axis(axes, run)
    return ReportFigure(name, title, caption, figure)


def _times(run: Run) -> ReportFigure:
    figure, axes = _figure()
    measured = [record.iteration_time_s for record in run.records]
    predicted = [record.predicted_time_s for record in run.records]
    unit, scale = _unit([*measured, *predicted])
    _line(axes, run, [value * scale for value in measured], MEASURED, label="measured")
    _line(axes, run, [value * scale for value in predicted], PREDICTED, label="predicted")
    axes.set_ylabel(f"time, {unit}")
    _legend_above(axes, num_columns=2)
    _iteration_axis(axes, run)
    caption = "Time that the plan predicted for an iteration, and its measured time."
    return ReportFigure("times", "Time of an iteration", caption, figure)


def _prediction(run: Run) -> ReportFigure | None:
    prediction = run.numbers.iterations
    if prediction is None:
        return None
    figure, axes = _figure()
    points = [
        (record.strategy, record.predicted_time_s, record.iteration_time_s) for record in run.steady
    ]
    _scatter(axes, points, prediction.factor, _colors_of_strategies(run))
    return ReportFigure(
        "prediction",
        "Predicted against measured: iterations",
        "A dot per iteration, without the first of a process. Median error "
        f"{share_text(prediction.error)}; measured / predicted is {factors_text(prediction)}.",
        figure,
    )


def _strategies(run: Run) -> ReportFigure | None:
    rows = run.numbers.strategies
    if sum(row.num_iterations > 0 for row in rows) == 1:
        return None
    colors = _colors_of_strategies(run)
    figure, axes = _figure(min(HEIGHT_INCHES * 0.45 + INCHES_PER_ROW * len(rows), TALL_INCHES * 2))
    for place, row in enumerate(rows):
        iterations = [record.iteration for record in run.records if record.strategy == row.name]
        axes.plot(
            iterations,
            [place] * len(iterations),
            color=colors.get(row.name, MUTED),
            linestyle="",
            marker="|" if len(run.records) > MAX_ITERATIONS_WITH_MARKERS else "s",
            markersize=6,
            rasterized=len(iterations) > MAX_DOTS,
        )
    labels = _short([row.name for row in rows])
    ticks = [f"{label} ({row.num_iterations})" for label, row in zip(labels, rows, strict=True)]
    axes.set_yticks(range(len(rows)), ticks)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _iteration_axis(axes, run)
    caption = "The strategy of each iteration, and in brackets the number of its iterations."
    return ReportFigure("strategies", "Strategies over time", caption, figure)


def _replicas(run: Run) -> ReportFigure | None:
    prediction, measured = run.numbers.replicas_traced, run.numbers.measured_replicas
    if prediction is None:
        return None
    figure, axes = _figure()
    colors = _colors_of_strategies(run)
    points = [(one.strategy, one.predicted_s, one.measured_s) for one in measured]
    names = {
        (row.strategy, row.replica): f"replica {row.replica} ({row.scheme})"
        + ("" if row.traced is None else f" {factor_text(row.traced.factor)}")
        for row in run.numbers.replicas
    }
    if len({one.strategy for one in measured}) == 1:
        labels = [names[one.strategy, one.replica] for one in measured]
        points = [(label, *point[1:]) for label, point in zip(labels, points, strict=True)]
        colors = _colors(list(dict.fromkeys(labels)))
    _scatter(axes, points, None, colors)
    num_traced = len({one.iteration for one in measured})
    return ReportFigure(
        "replicas",
        "Predicted against measured: replicas",
        "A dot per replica of a traced iteration: from its first forward to the end of its last "
        f"backward ({num_traced} iterations are traced). Median error "
        f"{share_text(prediction.error)}; the table of replicas has the factor of each.",
        figure,
    )


def _ranks(run: Run) -> ReportFigure | None:
    ranks = run.numbers.ranks[:MAX_RANK_BARS]
    if not ranks:
        return None
    height = min(HEIGHT_INCHES * 0.5 + INCHES_PER_ROW * len(ranks), MAX_HEIGHT_INCHES)
    figure, axes = _figure(height)
    positions = list(range(len(ranks)))
    left = [0.0] * len(ranks)
    for label, color, values in (
        ("busy", SERIES[0], [row.busy_fraction for row in ranks]),
        ("wait", SERIES[1], [row.wait_fraction for row in ranks]),
        ("idle", IDLE, [row.idle_fraction for row in ranks]),
    ):
        widths = [100.0 * value for value in values]
        axes.barh(positions, widths, left=left, color=color, label=label, height=0.75)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(positions, [str(row.rank) for row in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(0.0, 100.0)
    axes.set_xlabel("% of the time of the traced iterations")
    axes.set_ylabel("rank")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(frameon=False, ncols=3, loc="outside upper left")
    caption = (
        "Measured, from the trace. Busy: forward, backward, optimizer. Wait: for a pipeline "
        "neighbour, for regrouping, for a plan."
    )
    num_left_out = len(run.numbers.ranks) - len(ranks)
    if num_left_out:
        caption += f" The table has the {num_left_out} ranks that are not drawn."
    return ReportFigure("ranks", "Idle share, measured, by rank", caption, figure)


def _planning(run: Run) -> ReportFigure:
    return _two_panels(
        run,
        "planning",
        "Plans: gap and wait",
        "Above: largest share of the makespan that a better plan with the same strategy could "
        "save. Below: time of planning, mostly in parallel with training, and how long training "
        "waited for the plan.",
        above=("gap, %", [100.0 * _or_nan(record.plan_gap) for record in run.records], SERIES[4]),
        min_top=0.5,
        plan_time_s=("planning", MUTED),
        plan_wait_s=("waiting", SERIES[4]),
    )


def _regrouping(run: Run) -> ReportFigure | None:
    if all(record.regroup_bytes is None for record in run.records):
        return None
    megabytes = [_or_nan(record.regroup_bytes) / _BYTES_PER_MB for record in run.records]
    return _two_panels(
        run,
        "regrouping",
        "Regrouping: bytes and waits",
        "On the logging rank. Above: bytes that it receives and sends to gather parameters and "
        "scatter gradients. Below: how long its compute waited for them, late ranks included.",
        above=("bytes, MB", megabytes, SERIES[5]),
        min_top=1.0,
        gather_wait_s=("waits for parameters", SERIES[5]),
        scatter_wait_s=("waits for gradients", SERIES[3]),
    )


def _two_panels(
    run: Run,
    name: str,
    title: str,
    caption: str,
    *,
    above: tuple[str, Sequence[float], str],
    min_top: float,
    **below: tuple[str, str],
) -> ReportFigure:
    """Above: label, values, colour; below: fields of the records in s, drawn in ms, with label and
    colour."""
    figure = Figure(figsize=(WIDTH_INCHES, TALL_INCHES), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=(0.8, 1.0))
    label, values, color = above
    _line(upper, run, values, color)
    upper.set_ylabel(label)
    upper.set_ylim(0.0, max(upper.get_ylim()[1], min_top))
    for field, (label, color) in below.items():
        values = [_or_nan(getattr(record, field)) * _MS_PER_S for record in run.records]
        _line(lower, run, values, color, label=label)
    lower.set_ylabel("time, ms")
    _legend_above(lower, num_columns=2)
    _iteration_axis(upper, run, is_labelled=False)
    _iteration_axis(lower, run)
    return ReportFigure(name, title, caption, figure)


def write_summary(run: Run) -> Path:
    """Draws ``summary.png`` in the run folder and returns its path.

    Raises `HydraulisError` if the picture cannot be written.
    """
    path = run.folder / SUMMARY_FILE_NAME
    with matplotlib.rc_context(SUMMARY_SETTINGS):
        figure = summary_of(run)
        save_picture(figure, path, fix="free space there or make the folder writable")
    return path


def summary_of(run: Run) -> Figure:
    """Three panels: loss; predicted time of each replica (as a share of the makespan if there are
    too many for lines); share of the makespans with work.

    Replicas of different strategies are not comparable: a run with several strategies shows
    makespans and shares by strategy instead.
    """
    used = [row.name for row in run.numbers.strategies if row.num_iterations]
    figure = Figure(figsize=SUMMARY_SIZE_INCHES, layout="constrained")
    loss_axes, time_axes, share_axes = figure.subplots(3, 1, height_ratios=(1.15, 1.15, 0.8))
    loss_axes.set_title("Loss", loc="left")
    if _line_with_median(loss_axes, run, _losses(run), MEASURED):
        loss_axes.legend(frameon=False)
    loss_axes.set_ylabel("lm loss per token")
    _iteration_axis(loss_axes, run)
    if len(used) == 1:
        _draw_replicas(time_axes, share_axes, run)
    else:
        _draw_strategies(time_axes, share_axes, run)
    _iteration_axis(time_axes, run)
    share_axes.set_ylabel("%")
    share_axes.spines[["top", "right"]].set_visible(False)
    (title,) = _short(used, MAX_TITLE_CHARS) if len(used) == 1 else [f"{len(used)} strategies"]
    num = len(run.records)
    iterations = "1 iteration" if num == 1 else f"{num:,} iterations"
    figure.suptitle(
        f"{title}   ·   {iterations}   ·   {run.numbers.totals.trained_tokens:,} trained tokens",
        fontsize=11,
    )
    return figure


def _draw_replicas(time_axes: Axes, share_axes: Axes, run: Run) -> None:
    rows = run.numbers.replicas
    labels = [f"replica {row.replica}" + (f" ({row.scheme})" if row.scheme else "") for row in rows]
    # Replicas that an iteration does not have stay NaN.
    times_ms = np.full((len(rows), len(run.records)), np.nan)
    for column, record in enumerate(run.records):
        times_ms[: len(record.replica_times_s), column] = record.replica_times_s
    times_ms *= _MS_PER_S
    busy = [busy_fraction(run.records, replica=row.replica) or 0.0 for row in rows]
    share_axes.set_title("Share of the makespan with work, over the whole run", loc="left")
    if len(rows) <= MAX_REPLICA_LINES:
        for color, label, values in zip(SERIES, labels, times_ms, strict=False):
            _line(time_axes, run, list(values), color, label=label)
        time_axes.set_ylabel("ms")
        _legend_above(time_axes, num_columns=3, title="Work per replica: predicted time")
        _draw_bars(share_axes, labels, busy, SERIES[: len(rows)])
        return
    iterations = [record.iteration for record in run.records]
    # A column reaches half an iteration to each side; gaps go half to each neighbour.
    middles = [(one + other) / 2 for one, other in itertools.pairwise(iterations)]
    makespans_ms = np.where(np.isnan(times_ms), 0.0, times_ms).max(axis=0)
    time_axes.set_title(
        "Work per replica: predicted time, % of the iteration's makespan", loc="left"
    )
    mesh = time_axes.pcolormesh(
        [iterations[0] - 0.5, *middles, iterations[-1] + 0.5],
        np.arange(len(rows) + 1) - 0.5,
        100.0 * times_ms / np.maximum(makespans_ms, np.finfo(np.float64).tiny),
        cmap="viridis",
        vmin=0.0,
        vmax=100.0,
        rasterized=True,
    )
    time_axes.figure.colorbar(mesh, ax=time_axes, label="%", pad=0.01)
    time_axes.invert_yaxis()
    time_axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    time_axes.set_ylabel("replica")
    edges = np.arange(len(rows) + 1) - 0.5
    share_axes.stairs(np.full(len(rows), 100.0), edges, fill=True, color=IDLE)
    share_axes.stairs(100.0 * np.array(busy), edges, fill=True, color=MEASURED)
    share_axes.set_xlim(edges[0], edges[-1])
    share_axes.set_ylim(0.0, 105.0)
    share_axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    share_axes.set_xlabel("replica")


def _draw_strategies(time_axes: Axes, share_axes: Axes, run: Run) -> None:
    labels, busy, colors = [], [], []
    for label, color, names in _groups(_colors_of_strategies(run), MAX_BAR_LABEL_CHARS):
        own = [record for record in run.records if record.strategy in names]
        time_axes.plot(
            [record.iteration for record in own],
            [_MS_PER_S * max(record.replica_times_s, default=0.0) for record in own],
            color=color,
            linestyle="",
            marker="o",
            markersize=4,
            label=f"{label} ({len(own)})",
        )
        labels.append(label)
        colors.append(color)
        busy.append(busy_fraction(own) or 0.0)
    time_axes.set_ylabel("ms")
    _legend_above(time_axes, num_columns=3, title="Predicted makespan by strategy")
    share_axes.set_title(
        "Share of the makespan with work, mean over a strategy's replicas", loc="left"
    )
    _draw_bars(share_axes, labels, busy, colors)


def _draw_bars(
    axes: Axes, labels: Sequence[str], shares: Sequence[float], colors: Sequence[str]
) -> None:
    """A bar per label, with its share of 100 % as a number above it."""
    positions = range(len(labels))
    axes.bar(positions, [100.0] * len(labels), color=IDLE)
    axes.bar(positions, [100.0 * share for share in shares], color=colors)
    for position, share in zip(positions, shares, strict=True):
        axes.text(position, 102.0, f"{share:.1%}", ha="center", va="bottom")
    axes.set_xticks(positions, labels, fontsize=8.0)
    axes.set_xlim(-0.6, max(len(labels), MIN_BAR_SLOTS) - 0.4)
    axes.set_ylim(0.0, 118.0)
    axes.set_yticks(range(0, 101, 20))


def _figure(height_inches: float = HEIGHT_INCHES) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return figure, figure.subplots()


def _losses(run: Run) -> list[float]:
    return [_or_nan(record.lm_loss) for record in run.records]


def _line(
    axes: Axes, run: Run, values: Sequence[float], color: str, *, label: str | None = None
) -> None:
    has_markers = len(values) <= MAX_ITERATIONS_WITH_MARKERS
    axes.plot(
        [record.iteration for record in run.records],
        values,
        color=color,
        linewidth=1.2,
        marker="." if has_markers else "",
        markersize=4,
        label=label,
    )


def _line_with_median(axes: Axes, run: Run, values: Sequence[float], color: str) -> str:
    """Draws values, and the running median of many; returns a sentence about it, or nothing."""
    if len(values) < MIN_ITERATIONS_TO_SMOOTH:
        _line(axes, run, values, color)
        return ""
    half = min(max(len(values) // HALF_WINDOWS_PER_RUN, 2), MAX_HALF_WINDOW)
    _line(axes, run, values, MUTED, label="each iteration")
    axes.plot(
        [record.iteration for record in run.records],
        running_median(values, half),
        color=color,
        linewidth=1.8,
        label=f"median of {2 * half + 1} iterations",
    )
    return f" In colour: median of {2 * half + 1} iterations."


def running_median(values: Sequence[float], half: int) -> list[float]:
    """Median of the finite ones of up to 2·half+1 values around each; NaN where there are none.

    Windows shrink towards the beginning, since one-sided windows would flatten the steep beginning
    of a loss curve. At the end they keep their size: shrinking would show the noise of the last
    values as a trend.
    """
    medians = []
    for center in range(len(values)):
        reach = min(half, center)
        end = min(center + reach + 1, len(values))
        window = values[max(0, end - 2 * reach - 1) : end]
        finite = [value for value in window if math.isfinite(value)]
        medians.append(statistics.median(finite) if finite else math.nan)
    return medians


def _scatter(
    axes: Axes,
    points: Sequence[tuple[str, float, float]],
    factor: float | None,
    colors: Mapping[str, str],
) -> None:
    """Points (label, predicted s, measured s), with lines for measured = predicted and for a
    factor."""
    points = [point for point in points if min(point[1:]) > 0.0]
    unit, scale = _unit([value for point in points for value in point[1:]])
    for label, color, names in _groups(colors):
        own = [(x * scale, y * scale) for name, x, y in points if name in names]
        if own:
            axes.plot(
                [x for x, _ in own],
                [y for _, y in own],
                color=color,
                linestyle="",
                marker="o",
                markersize=3.5,
                alpha=0.85,
                label=label if len(colors) > 1 else None,
                rasterized=len(own) > MAX_DOTS,
            )
    right = 1.08 * scale * max(x for _, x, _ in points)
    top = 1.08 * scale * max(y for _, _, y in points)
    axes.plot([0.0, right], [0.0, right], color=MUTED, linewidth=1.0, label="as predicted")
    if factor is not None:
        axes.plot(
            [0.0, right],
            [0.0, right * factor],
            color=INK,
            linewidth=1.0,
            linestyle="--",
            label=f"{factor_text(factor)} as long",
        )
    axes.set_xlim(0.0, right)
    axes.set_ylim(0.0, max(top, right if right < 2.0 * top else 0.0))
    axes.set_xlabel(f"predicted, {unit}")
    axes.set_ylabel(f"measured, {unit}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(frameon=False, loc="outside upper left", ncols=2 if len(colors) > 1 else 3)


def _iteration_axis(axes: Axes, run: Run, *, is_labelled: bool = True) -> None:
    first, last = run.records[0].iteration, run.records[-1].iteration
    for start in sorted(run.starts):
        if start > first:
            axes.axvline(start - 0.5, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=8))
    if is_labelled:
        axes.set_xlabel("iteration")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color=GRID, linewidth=0.5)
    axes.set_axisbelow(True)


def _legend_above(axes: Axes, *, num_columns: int, title: str = "") -> None:
    """A legend on top of an axis, which then begins at 0, with a title above it."""
    axes.set_ylim(0.0, max(axes.get_ylim()[1], 0.0) or 1.0)
    num_rows = math.ceil(len(axes.get_legend_handles_labels()[0]) / num_columns)
    if num_rows:
        axes.legend(
            frameon=False,
            ncols=num_columns,
            loc="lower left",
            bbox_to_anchor=(0.0, 1.0),
            borderaxespad=0.1,
        )
    if title:
        axes.set_title(title, loc="left", pad=6.0 + POINTS_PER_LEGEND_ROW * num_rows)


def _colors(names: Sequence[str]) -> dict[str, str]:
    """By name, in their order; names beyond the colours share one."""
    return {
        name: SERIES[place] if place < len(SERIES) else MUTED for place, name in enumerate(names)
    }


def _colors_of_strategies(run: Run) -> dict[str, str]:
    """The same in every figure; the most used first."""
    return _colors([row.name for row in run.numbers.strategies if row.num_iterations])


def _groups(
    colors: Mapping[str, str], max_chars: int = MAX_LABEL_CHARS
) -> Iterator[tuple[str, str, list[str]]]:
    """(label, colour, names) of each colour; names that share a colour are called others."""
    labels = dict(zip(colors, _short(list(colors), max_chars), strict=True))
    for color in dict.fromkeys(colors.values()):
        names = [name for name in colors if colors[name] == color]
        yield labels[names[0]] if len(names) == 1 else OTHERS, color, names


def _short(names: Sequence[str], max_chars: int = MAX_LABEL_CHARS) -> list[str]:
    """Names that fit; the place of a shortened one distinguishes it from others."""
    shown = []
    for place, name in enumerate(names, start=1):
        end = "…" if len(names) == 1 else f"… #{place}"
        is_short = len(name) <= max_chars
        shown.append(name if is_short else name[: max_chars - len(end)] + end)
    return shown


def _unit(values_s: Sequence[float]) -> tuple[str, float]:
    """Unit of times, and the factor that seconds are multiplied by."""
    return ("s", 1.0) if statistics.median(values_s) >= 1.0 else ("ms", _MS_PER_S)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
