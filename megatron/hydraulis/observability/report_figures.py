"""The figures of a report, a function each."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron.hydraulis.observability.report_numbers import Numbers, Prediction, idle_share
from megatron.hydraulis.observability.report_run import Run
from megatron.hydraulis.observability.report_svg import (
    GRID,
    IDLE,
    INK,
    MUTED,
    SERIES,
    SETTINGS,
)
from megatron.hydraulis.observability.report_text import factor, percent
from megatron.hydraulis.observability.summary import running_median

__all__ = ["ReportFigure", "figures_of"]

WIDTH_INCHES, HEIGHT_INCHES = 4.6, 2.6
TALL_INCHES = 3.6
MEASURED, PREDICTED = SERIES[0], SERIES[1]

MAX_DOTS = 2000
"""More are drawn as one image: elements of their own would make the page slow."""
MAX_ITERATIONS_WITH_MARKERS = 60
MIN_ITERATIONS_TO_SMOOTH = 30
HALF_WINDOWS_PER_RUN = 20
MAX_HALF_WINDOW = 10
MAX_RANK_BARS = 64
INCHES_PER_ROW = 0.18
MAX_HEIGHT_INCHES = 9.0
MAX_LABEL_CHARS = 24
OTHERS = "others"
_MS_PER_S = 1e3
_BYTES_PER_MB = 1e6


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """A figure with what is said about it."""

    name: str
    title: str
    caption: str
    """What is drawn and how it is measured, a sentence or two."""
    figure: Figure


def figures_of(run: Run, numbers: Numbers) -> Iterator[ReportFigure]:
    """Those that the run has data for."""
    with matplotlib.rc_context(SETTINGS):
        found = [
            _loss(run),
            _throughput(run),
            _times(run),
            _prediction(run, numbers),
            _strategies(run),
            _replicas(run, numbers),
            _idle(run),
            _ranks(numbers),
            _padding(run),
            _planning(run),
            _regrouping(run),
        ]
        for one in found:
            if one is not None:
                # The layout is made for the ticks of the draw before: without one, labels that
                # become longer are cut off.
                one.figure.draw_without_rendering()
    return (figure for figure in found if figure is not None)


def _loss(run: Run) -> ReportFigure:
    losses = [math.nan if record.lm_loss is None else record.lm_loss for record in run.records]
    figure, axes = _figure()
    caption = "Mean loss per trained token of each global batch."
    caption += _line_with_median(axes, run, losses, MEASURED)
    axes.set_ylabel("lm loss per token")
    _iteration_axis(axes, run)
    return ReportFigure("loss", "Loss", caption, figure)


def _throughput(run: Run) -> ReportFigure:
    rates = [
        record.num_tokens / record.iteration_time_s if record.iteration_time_s else math.nan
        for record in run.records
    ]
    figure, axes = _figure()
    caption = "Trained tokens of an iteration over its measured time; padding does not count."
    caption += _line_with_median(axes, run, rates, MEASURED)
    axes.set_ylabel("tokens/s")
    axes.set_ylim(bottom=0.0)
    _iteration_axis(axes, run)
    return ReportFigure("throughput", "Tokens per second", caption, figure)


def _times(run: Run) -> ReportFigure:
    figure, axes = _figure()
    measured = [record.iteration_time_s for record in run.records]
    predicted = [record.predicted_time_s for record in run.records]
    unit, scale = _unit([*measured, *predicted])
    for values, color, label in (
        (measured, MEASURED, "measured"),
        (predicted, PREDICTED, "predicted"),
    ):
        _line(axes, run, [value * scale for value in values], color, label=label)
    axes.set_ylabel(f"time, {unit}")
    _legend_above(axes, num_columns=2)
    _iteration_axis(axes, run)
    caption = "What the plan expected of an iteration, and what it took."
    return ReportFigure("times", "Time of an iteration", caption, figure)


def _prediction(run: Run, numbers: Numbers) -> ReportFigure | None:
    prediction = numbers.iterations
    if prediction is None:
        return None
    figure, axes = _figure()
    points = [
        (record.strategy, record.predicted_time_s, record.iteration_time_s) for record in run.steady
    ]
    _scatter(axes, points, prediction, _colors_of_strategies(run))
    return ReportFigure(
        "prediction",
        "Predicted against measured: iterations",
        f"A dot an iteration, without the first of a process. {_said(prediction)}",
        figure,
    )


def _strategies(run: Run) -> ReportFigure | None:
    counts = Counter(record.strategy for record in run.records)
    if len(counts) == 1:
        return None
    colors = _colors_of_strategies(run)
    names = [name for name, _ in counts.most_common()]
    names += [shape.name for shape in run.strategies if shape.name not in counts]
    figure, axes = _figure(min(HEIGHT_INCHES * 0.45 + INCHES_PER_ROW * len(names), TALL_INCHES * 2))
    for row, name in enumerate(names):
        iterations = [record.iteration for record in run.records if record.strategy == name]
        axes.plot(
            iterations,
            [row] * len(iterations),
            color=colors.get(name, MUTED),
            linestyle="",
            marker="|" if len(run.records) > MAX_ITERATIONS_WITH_MARKERS else "s",
            markersize=6,
            rasterized=len(iterations) > MAX_DOTS,
        )
    labels = [f"{_short(name)} ({counts[name]})" for name in names]
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.4, -0.6)
    _iteration_axis(axes, run)
    caption = "Which strategy each iteration ran, and in brackets how many ran it."
    return ReportFigure("strategies", "Strategies over time", caption, figure)


def _replicas(run: Run, numbers: Numbers) -> ReportFigure | None:
    prediction = numbers.replicas_traced
    if prediction is None:
        return None
    figure, axes = _figure()
    names = {one.strategy for one in numbers.measured_replicas}
    schemes = {(row.strategy, row.replica): row.scheme for row in numbers.replicas}
    points = []
    for one in numbers.measured_replicas:
        label = one.strategy
        if len(names) == 1:
            label = f"replica {one.replica} ({schemes[one.strategy, one.replica]})"
        points.append((label, one.predicted_s, one.measured_s))
    colors = _colors_of_strategies(run)
    if len(names) == 1:
        colors = _colors(list(dict.fromkeys(label for label, _, _ in points)))
    _scatter(axes, points, prediction, colors)
    traced = {one.iteration for one in numbers.measured_replicas}
    return ReportFigure(
        "replicas",
        "Predicted against measured: replicas",
        "A dot a replica of a traced iteration: from its first forward to the end of its last "
        f"backward ({len(traced)} iterations are traced). {_said(prediction)}",
        figure,
    )


def _idle(run: Run) -> ReportFigure:
    figure, axes = _figure()
    shares = [100.0 * idle_share(record) for record in run.records]
    caption = (
        "By the plan: share of the makespan that the ranks of replicas wait for the slowest one."
    )
    caption += _line_with_median(axes, run, shares, SERIES[2])
    axes.set_ylabel("% of the makespan")
    axes.set_ylim(0.0, max(axes.get_ylim()[1], 1.0))
    _iteration_axis(axes, run)
    return ReportFigure("idle", "Idle share, predicted", caption, figure)


def _ranks(numbers: Numbers) -> ReportFigure | None:
    ranks = numbers.ranks[:MAX_RANK_BARS]
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
    left_out = len(numbers.ranks) - len(ranks)
    caption = (
        "Measured, from the trace. Busy: forward, backward, optimizer. Wait: for a neighbour of "
        "the pipeline, for regrouping, for a plan."
    )
    if left_out:
        caption += f" The table has the {left_out} ranks that are not drawn."
    return ReportFigure("ranks", "Idle share, measured, by rank", caption, figure)


def _padding(run: Run) -> ReportFigure:
    figure, axes = _figure()
    shares = [100.0 * record.padding_fraction for record in run.records]
    _line(axes, run, shares, SERIES[3])
    axes.set_ylabel("% of the tokens run")
    axes.set_ylim(0.0, max(axes.get_ylim()[1], 0.1))
    _iteration_axis(axes, run)
    caption = "Tokens that only fill up lengths to what tp and cp divide; they are not trained."
    return ReportFigure("padding", "Padding", caption, figure)


def _planning(run: Run) -> ReportFigure:
    figure, (above, below) = _stacked()
    gaps = [
        math.nan if record.plan_gap is None else 100.0 * record.plan_gap for record in run.records
    ]
    _line(above, run, gaps, SERIES[4])
    above.set_ylabel("gap, %")
    above.set_ylim(0.0, max(above.get_ylim()[1], 0.5))
    for name, color, label in (
        ("plan_time_s", MUTED, "making a plan"),
        ("plan_wait_s", SERIES[4], "training waits"),
    ):
        values = [getattr(record, name) * _MS_PER_S for record in run.records]
        _line(below, run, values, color, label=label)
    below.set_ylabel("time, ms")
    _legend_above(below, num_columns=2)
    _iteration_axis(above, run, is_labelled=False)
    _iteration_axis(below, run)
    caption = (
        "Above: what a better plan with the same strategy could save of the makespan at most. "
        "Below: how long planning took, most of it beside training, and how long training stood "
        "still for it."
    )
    return ReportFigure("planning", "Plans: gap and wait", caption, figure)


def _regrouping(run: Run) -> ReportFigure | None:
    if all(record.regroup_bytes is None for record in run.records):
        return None
    figure, (above, below) = _stacked()
    megabytes = [_or_nan(record.regroup_bytes) / _BYTES_PER_MB for record in run.records]
    _line(above, run, megabytes, SERIES[5])
    above.set_ylabel("bytes, MB")
    above.set_ylim(0.0, _top(megabytes) * 1.15 or 1.0)
    for name, color, label in (
        ("gather_wait_s", SERIES[5], "waits for parameters"),
        ("scatter_wait_s", SERIES[3], "waits for gradients"),
    ):
        values = [_or_nan(getattr(record, name)) * _MS_PER_S for record in run.records]
        _line(below, run, values, color, label=label)
    below.set_ylabel("time, ms")
    _legend_above(below, num_columns=2)
    _iteration_axis(above, run, is_labelled=False)
    _iteration_axis(below, run)
    caption = (
        "Of the rank that logs. Above: bytes it receives and sends to gather parameters and "
        "scatter gradients. Below: how long its compute stood still for them, late ranks included."
    )
    return ReportFigure("regrouping", "Regrouping: bytes and waits", caption, figure)


def _figure(height_inches: float = HEIGHT_INCHES) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return figure, figure.subplots()


def _stacked() -> tuple[Figure, Sequence[Axes]]:
    figure = Figure(figsize=(WIDTH_INCHES, TALL_INCHES), layout="constrained")
    axes: Sequence[Axes] = figure.subplots(2, 1, height_ratios=(0.8, 1.0))
    return figure, axes


def _line(
    axes: Axes, run: Run, values: Sequence[float], color: str, *, label: str | None = None
) -> None:
    iterations = [record.iteration for record in run.records]
    has_markers = len(iterations) <= MAX_ITERATIONS_WITH_MARKERS
    axes.plot(
        iterations,
        values,
        color=color,
        linewidth=1.2,
        marker="." if has_markers else "",
        markersize=4,
        label=label,
    )


def _line_with_median(axes: Axes, run: Run, values: Sequence[float], color: str) -> str:
    """Draws values, and over many of them their running median; returns what to say of it."""
    if len(values) < MIN_ITERATIONS_TO_SMOOTH:
        _line(axes, run, values, color)
        return ""
    half = min(max(len(values) // HALF_WINDOWS_PER_RUN, 2), MAX_HALF_WINDOW)
    _line(axes, run, values, MUTED)
    axes.plot(
        [record.iteration for record in run.records],
        running_median(values, half),
        color=color,
        linewidth=1.8,
    )
    return f" In colour the median of {2 * half + 1} iterations."


def _scatter(
    axes: Axes,
    points: Sequence[tuple[str, float, float]],
    prediction: Prediction,
    colors: Mapping[str, str],
) -> None:
    """(Label, predicted s, measured s), with lines for as predicted and for the usual factor.

    Colours are by label; labels that share one share the legend's last line.
    """
    points = [point for point in points if min(point[1:]) > 0.0]
    unit, scale = _unit([value for point in points for value in point[1:]])
    for color in dict.fromkeys(colors.values()):
        labels = [label for label in colors if colors[label] == color]
        own = [(x * scale, y * scale) for label, x, y in points if label in labels]
        if not own:
            continue
        axes.plot(
            [x for x, _ in own],
            [y for _, y in own],
            color=color,
            linestyle="",
            marker="o",
            markersize=3.5,
            alpha=0.85,
            label=(_short(labels[0]) if len(labels) == 1 else OTHERS) if len(colors) > 1 else None,
            rasterized=len(own) > MAX_DOTS,
        )
    right = 1.08 * scale * max(x for _, x, _ in points)
    top = 1.08 * scale * max(y for _, _, y in points)
    axes.plot([0.0, right], [0.0, right], color=MUTED, linewidth=1.0, label="as predicted")
    axes.plot(
        [0.0, right],
        [0.0, right * prediction.factor],
        color=INK,
        linewidth=1.0,
        linestyle="--",
        label=f"{factor(prediction.factor)} as long",
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


def _said(prediction: Prediction) -> str:
    return (
        f"Median error {percent(prediction.error)}; measured is {factor(prediction.factor)} "
        f"predicted, and with that factor taken out the error is "
        f"{percent(prediction.error_beyond_factor)}."
    )


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


def _legend_above(axes: Axes, *, num_columns: int) -> None:
    """A legend on top of an axis, which is made to begin at 0."""
    axes.set_ylim(0.0, max(axes.get_ylim()[1], 0.0) or 1.0)
    axes.legend(
        frameon=False,
        ncols=num_columns,
        loc="lower left",
        bbox_to_anchor=(0.0, 1.0),
        borderaxespad=0.1,
    )


def _colors(names: Sequence[str]) -> dict[str, str]:
    """By name, in their order; those beyond the colours there are share one."""
    return {
        name: SERIES[place] if place < len(SERIES) else MUTED for place, name in enumerate(names)
    }


def _colors_of_strategies(run: Run) -> dict[str, str]:
    """The same in every figure; the most used first."""
    counts = Counter(record.strategy for record in run.records)
    return _colors([name for name, _ in counts.most_common()])


def _unit(values_s: Sequence[float]) -> tuple[str, float]:
    """Unit and what seconds are multiplied by."""
    return ("s", 1.0) if statistics.median(values_s) >= 1.0 else ("ms", _MS_PER_S)


def _short(name: str) -> str:
    return name if len(name) <= MAX_LABEL_CHARS else name[: MAX_LABEL_CHARS - 1] + "…"


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _top(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0)
