"""Figures of a run: those of the report, and ``summary.png``."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron.hydraulis.observability.console import factor_text, factors_text, share_text
from megatron.hydraulis.observability.pictures import CATEGORY_COLORS, figure_svg, save_picture
from megatron.hydraulis.observability.records import SUMMARY_FILE_NAME
from megatron.hydraulis.observability.report_data import Run, busy_fraction

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
"""Number of dots beyond which they are one image: separate elements make the page slow."""
MAX_ITERATIONS_WITH_MARKERS = 60
MIN_ITERATIONS_TO_SMOOTH = 20
HALF_WINDOWS_PER_RUN = 20
MAX_HALF_WINDOW = 10
MAX_RANK_BARS = 64
MAX_LABELLED_REPLICAS = 6
"""Limit above which the summary draws only the slowest, median and fastest of an iteration."""
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
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor"), INK),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
        "ytick.labelcolor": INK,
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "legend.frameon": False,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.5,
    }


SETTINGS = _settings(FONT_SIZE)
SUMMARY_SETTINGS = _settings(10.0) | {"legend.fontsize": 8.0}


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """A figure with its title and caption."""

    name: str
    title: str
    caption: str
    """A sentence or two about what is drawn and how it is measured."""
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


@dataclass(frozen=True)
class _Panel:
    """Lines over the iterations."""

    ylabel: str
    lines: Mapping[str, tuple[str | Sequence[float], str]]
    """A record's field, or a value for each iteration, and a colour by label, which is empty for a
    single line."""
    min_top: float | None = None
    """If given, the axis begins at 0 and reaches at least this."""
    scale: float = 1.0
    """The factor of all values."""
    is_smoothed: bool = False
    """If True, many values are drawn grey, below their running median."""
    has_only_dots: bool = False

    def draw(self, axes: Axes, run: Run) -> str:
        """Returns a sentence about the running median, or nothing."""
        iterations, caption = [record.iteration for record in run.records], ""
        has_markers = len(iterations) <= MAX_ITERATIONS_WITH_MARKERS
        for label, (given, color) in self.lines.items():
            if isinstance(given, str):
                given = [_or_nan(getattr(record, given)) for record in run.records]
            values = [self.scale * value for value in given]
            is_smoothed = self.is_smoothed and len(values) >= MIN_ITERATIONS_TO_SMOOTH
            axes.plot(
                iterations,
                values,
                color=MUTED if is_smoothed else color,
                linestyle="" if self.has_only_dots else "-",
                linewidth=1.2,
                marker="o" if self.has_only_dots else "." if has_markers else "",
                markersize=4,
                label="each iteration" if is_smoothed else label,
            )
            if is_smoothed:
                half = min(max(len(values) // HALF_WINDOWS_PER_RUN, 2), MAX_HALF_WINDOW)
                window = f"median of {2 * half + 1} iterations"
                medians = running_median(values, half)
                axes.plot(iterations, medians, color=color, linewidth=1.8, label=window)
                caption = f" In colour: {window}."
        axes.set_ylabel(self.ylabel)
        if self.min_top is not None:
            # No dot is cut by the edge.
            room = 1.04 if self.has_only_dots else 1.0
            axes.set_ylim(0.0, room * max(axes.get_ylim()[1], self.min_top) or 1.0)
        _iteration_axis(axes, run)
        return caption


_PERCENT = 100.0
_CURVES: Mapping[str, tuple[str, str, tuple[_Panel, ...]]] = {
    "loss": (
        "Loss",
        "Mean loss of each global batch, by the weights of its tokens.",
        (_Panel("lm loss per token", {"": ("lm_loss", MEASURED)}, is_smoothed=True),),
    ),
    "throughput": (
        "Tokens per second",
        "Trained tokens of an iteration / its measured time; padding does not count.",
        (_Panel("tokens/s", {"": ("tokens_per_s", MEASURED)}, 0.0, is_smoothed=True),),
    ),
    "times": (
        "Time of an iteration",
        "Time that the plan predicted for an iteration, and its measured time.",
        (
            _Panel(
                "time, s",
                {
                    "measured": ("iteration_time_s", MEASURED),
                    "predicted": ("predicted_time_s", PREDICTED),
                },
                0.0,
            ),
        ),
    ),
    "idle": (
        "Idle share, predicted",
        "By the plan: share of the makespan that the ranks of replicas wait for the slowest one.",
        (_Panel("% of the makespan", {"": ("idle_share", SERIES[2])}, 1.0, _PERCENT, True),),
    ),
    "padding": (
        "Padding",
        "Tokens that only fill up lengths to multiples that tp and cp need; they are not trained.",
        (_Panel("% of the computed tokens", {"": ("padding_fraction", SERIES[3])}, 0.1, _PERCENT),),
    ),
    "planning": (
        "Plans: gap and wait",
        "Above: largest share of the makespan that a better plan with the same strategy could "
        "save. Below: time of planning, mostly in parallel with training, and how long training "
        "waited for the plan.",
        (
            _Panel("gap, %", {"": ("plan_gap", SERIES[4])}, 0.5, _PERCENT),
            _Panel(
                "time, ms",
                {"planning": ("plan_time_s", MUTED), "waiting": ("plan_wait_s", SERIES[4])},
                0.0,
                _MS_PER_S,
            ),
        ),
    ),
    "regrouping": (
        "Regrouping: bytes and waits",
        "On the logging rank. Above: bytes that it receives and sends to gather parameters and "
        "scatter gradients. Below: how long its compute waited for them, late ranks included.",
        (
            _Panel("bytes, MB", {"": ("regroup_bytes", SERIES[5])}, 1.0, 1.0 / _BYTES_PER_MB),
            _Panel(
                "time, ms",
                {
                    "waits for parameters": ("gather_wait_s", SERIES[5]),
                    "waits for gradients": ("scatter_wait_s", SERIES[3]),
                },
                0.0,
                _MS_PER_S,
            ),
        ),
    ),
}
"""Title, caption and panels, below each other, of the figures over the iterations, by name."""
_OTHERS_AFTER = "times"


def figures_of(run: Run) -> list[ReportFigure]:
    """The report's figures that the run has data for."""
    figures: list[ReportFigure | None] = []
    with matplotlib.rc_context(SETTINGS):
        for name in _CURVES:
            if name != "regrouping" or any(r.regroup_bytes is not None for r in run.records):
                figures.append(_curves(run, name))
            if name == _OTHERS_AFTER:
                figures += [_prediction(run), _strategies(run), _replicas(run), _ranks(run)]
        found = [figure for figure in figures if figure is not None]
        for one in found:
            # The layout uses the ticks of the previous draw: without it, longer labels are cut off.
            one.figure.draw_without_rendering()
    return found


def _curves(run: Run, name: str) -> ReportFigure:
    """The figure of `_CURVES`."""
    title, caption, panels = _CURVES[name]
    figure = Figure(
        figsize=(WIDTH_INCHES, HEIGHT_INCHES if len(panels) == 1 else TALL_INCHES),
        layout="constrained",
    )
    ratios = (1.0,) if len(panels) == 1 else (0.8, 1.0)
    all_axes = figure.subplots(len(panels), 1, height_ratios=ratios, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        caption += panel.draw(axes, run)
        if len(panel.lines) > 1:
            _legend_above(axes, num_columns=2)
        if axes is not all_axes[-1]:
            axes.set_xlabel("")
    return ReportFigure(name, title, caption, figure)


def _prediction(run: Run) -> ReportFigure | None:
    prediction = run.numbers.iterations
    if prediction is None:
        return None
    points = [
        (record.strategy, record.predicted_time_s, record.iteration_time_s) for record in run.steady
    ]
    return ReportFigure(
        "prediction",
        "Predicted against measured: iterations",
        "A dot per iteration, without the first of a process. Median error "
        f"{share_text(prediction['error'])}; measured / predicted is {factors_text(prediction)}.",
        _scatter(points, prediction["factor"], _colors_of_strategies(run)),
    )


def _strategies(run: Run) -> ReportFigure | None:
    rows = run.numbers.strategies
    if len(run.numbers.used) == 1:
        return None
    colors = _colors_of_strategies(run)
    figure, axes = _figure(min(HEIGHT_INCHES * 0.45 + INCHES_PER_ROW * len(rows), TALL_INCHES * 2))
    for place, row in enumerate(rows):
        own = [(r.iteration, place) for r in run.records if r.strategy == row["name"]]
        marker = "|" if len(run.records) > MAX_ITERATIONS_WITH_MARKERS else "s"
        _dots(axes, own, colors.get(row["name"], MUTED), marker=marker, markersize=6)
    labels = _short([row["name"] for row in rows])
    ticks = [f"{label} ({row['num_iterations']})" for label, row in zip(labels, rows, strict=True)]
    axes.set_yticks(range(len(rows)), ticks)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    _iteration_axis(axes, run)
    caption = "The strategy of each iteration, and in brackets the number of its iterations."
    return ReportFigure("strategies", "Strategies over time", caption, figure)


def _replicas(run: Run) -> ReportFigure | None:
    prediction, measured = run.numbers.replicas_traced, run.numbers.measured_replicas
    if prediction is None:
        return None
    colors, behind = _colors_of_strategies(run), ""
    labels = [one["strategy"] for one in measured]
    if len(set(labels)) == 1:
        behind = "; behind a replica: the median of measured / predicted"
        names = {
            row["replica"]: f"replica {row['replica']} ({row['scheme']})"
            + (f" {factor_text(row['traced']['factor'])}" if row["traced"] else "")
            for row in run.numbers.replicas
            if row["strategy"] == labels[0]
        }
        labels = [names[one["replica"]] for one in measured]
        colors = _colors(list(dict.fromkeys(labels)))
    points = [
        (label, one["predicted_s"], one["measured_s"])
        for label, one in zip(labels, measured, strict=True)
    ]
    num_traced = len({one["iteration"] for one in measured})
    return ReportFigure(
        "replicas",
        "Predicted against measured: replicas",
        "A dot per replica of a traced iteration: from its first forward to the end of its last "
        f"backward ({num_traced} iterations are traced). Median error "
        f"{share_text(prediction['error'])}{behind}.",
        _scatter(points, None, colors),
    )


def _ranks(run: Run) -> ReportFigure | None:
    ranks = run.numbers.ranks[:MAX_RANK_BARS]
    if not ranks:
        return None
    height = min(HEIGHT_INCHES * 0.5 + INCHES_PER_ROW * len(ranks), MAX_HEIGHT_INCHES)
    figure, axes = _figure(height)
    positions = list(range(len(ranks)))
    left = [0.0] * len(ranks)
    for label, color in {"busy": SERIES[0], "wait": SERIES[1], "idle": IDLE}.items():
        widths = [100.0 * row[f"{label}_fraction"] for row in ranks]
        axes.barh(positions, widths, left=left, color=color, label=label, height=0.75)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(positions, [str(row["rank"]) for row in ranks])
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_xlim(0.0, 100.0)
    axes.set_xlabel("% of the time of the traced iterations")
    axes.set_ylabel("rank")
    figure.legend(ncols=3, loc="outside upper left")
    caption = (
        "Measured, from the trace. Busy: forward, backward, optimizer. Wait: for a pipeline "
        "neighbour, for regrouping, for a plan."
    )
    num_left_out = len(run.numbers.ranks) - len(ranks)
    if num_left_out:
        caption += f" The table has the {num_left_out} ranks that are not drawn."
    return ReportFigure("ranks", "Idle share, measured, by rank", caption, figure)


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
    """Three panels: loss; predicted time of each replica (of many: of the slowest, the median and
    the fastest of an iteration); predicted share of the makespans with work.

    Replicas of different strategies are not comparable: a run with several strategies shows
    makespans and shares by strategy instead.
    """
    used = [row["name"] for row in run.numbers.used]
    figure = Figure(figsize=SUMMARY_SIZE_INCHES, layout="constrained")
    loss_axes, time_axes, share_axes = figure.subplots(3, 1, height_ratios=(1.15, 1.15, 0.8))
    if _CURVES["loss"][2][0].draw(loss_axes, run):
        loss_axes.legend()
    loss_axes.set_title("Loss", loc="left")
    if len(used) == 1:
        work = list(_work_of_replicas(run))
        time_title, share_title = "Work per replica: predicted time", "over the whole run"
        (title,) = _short(used, MAX_TITLE_CHARS)
    else:
        work = list(_work_of_strategies(run))
        time_title = "Predicted makespan by strategy"
        share_title, title = "mean over a strategy's replicas", f"{len(used)} strategies"
    lines = {one.label + one.remark: (one.times_s, one.color) for one in work}
    _Panel("ms", lines, 0.0, _MS_PER_S, has_only_dots=len(used) > 1).draw(time_axes, run)
    _legend_above(time_axes, num_columns=3, title=time_title)
    _draw_shares(share_axes, work)
    share_axes.set_title(f"Predicted share of the makespan with work, {share_title}", loc="left")
    num = len(run.records)
    iterations = "1 iteration" if num == 1 else f"{num:,} iterations"
    figure.suptitle(
        f"{title}   ·   {iterations}   ·   {run.numbers.totals['trained_tokens']:,} trained tokens",
        fontsize=11,
    )
    return figure


@dataclass(frozen=True)
class _Work:
    """A replica's or a strategy's line and bar in the summary."""

    label: str
    color: str
    times_s: Sequence[float]
    """Predicted, for every iteration; NaN where it has none."""
    share: float
    """Share of the makespans with work."""
    remark: str = ""
    """The legend's addition to the label."""


def _work_of_replicas(run: Run) -> Iterator[_Work]:
    rows = run.numbers.replicas
    all_times_s = [record.replica_times_s for record in run.records]
    if len(rows) <= MAX_LABELLED_REPLICAS:
        lines = {
            f"replica {row['replica']}" + f" ({row['scheme']})" * bool(row["scheme"]): [
                times_s[place] if place < len(times_s) else math.nan for times_s in all_times_s
            ]
            for place, row in enumerate(rows)
        }
    else:
        kinds: dict[str, Callable[[Sequence[float]], float]]
        kinds = {"slowest": max, "median": statistics.median, "fastest": min}
        lines = {
            kind: [of(times_s) if times_s else math.nan for times_s in all_times_s]
            for kind, of in kinds.items()
        }
    for color, (label, line) in zip(SERIES, lines.items(), strict=False):
        known = [
            (time_s, max(times_s))
            for time_s, times_s in zip(line, all_times_s, strict=True)
            if not math.isnan(time_s)
        ]
        whole_s = math.fsum(most_s for _, most_s in known)
        share = math.fsum(time_s for time_s, _ in known) / whole_s if whole_s else 0.0
        yield _Work(label, color, line, share)


def _work_of_strategies(run: Run) -> Iterator[_Work]:
    for label, color, names in _groups(_colors_of_strategies(run), MAX_BAR_LABEL_CHARS):
        own = [record for record in run.records if record.strategy in names]
        times_s = [
            max(record.replica_times_s, default=0.0) if record.strategy in names else math.nan
            for record in run.records
        ]
        yield _Work(label, color, times_s, busy_fraction(own) or 0.0, f" ({len(own)})")


def _draw_shares(axes: Axes, work: Sequence[_Work]) -> None:
    """A bar for each share of 100 %, with its number."""
    positions = range(len(work))
    axes.bar(positions, [100.0] * len(work), color=IDLE)
    axes.bar(positions, [100.0 * one.share for one in work], color=[one.color for one in work])
    for position, one in enumerate(work):
        axes.text(position, 102.0, f"{one.share:.1%}", ha="center", va="bottom")
    axes.set_ylabel("%")
    axes.set_ylim(0.0, 118.0)
    axes.set_yticks(range(0, 101, 20))
    axes.set_xticks(positions, [one.label for one in work], fontsize=8.0)
    axes.set_xlim(-0.6, max(len(work), MIN_BAR_SLOTS) - 0.4)


def _figure(height_inches: float = HEIGHT_INCHES) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    return figure, figure.subplots()


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
    points: Sequence[tuple[str, float, float]], factor: float | None, colors: Mapping[str, str]
) -> Figure:
    """Points (label, predicted s, measured s), with lines for measured = predicted and for a
    factor."""
    figure, axes = _figure()
    points = [point for point in points if min(point[1:]) > 0.0]
    for label, color, names in _groups(colors):
        own = [(x, y) for name, x, y in points if name in names]
        if own:
            shown = label if len(colors) > 1 else None
            _dots(axes, own, color, marker="o", markersize=3.5, alpha=0.85, label=shown)
    right = 1.08 * max(x for _, x, _ in points)
    top = 1.08 * max(y for _, _, y in points)
    ends = [0.0, right]
    axes.plot(ends, ends, color=MUTED, linewidth=1.0, label="as predicted")
    if factor is not None:
        label = f"{factor_text(factor)} as long"
        axes.plot(ends, [0.0, right * factor], "--", color=INK, linewidth=1.0, label=label)
    axes.set_xlim(0.0, right)
    axes.set_ylim(0.0, max(top, right if right < 2.0 * top else 0.0))
    axes.set_xlabel("predicted, s")
    axes.set_ylabel("measured, s")
    axes.grid()
    figure.legend(loc="outside upper left", ncols=2 if len(colors) > 1 else 3)
    return figure


def _dots(axes: Axes, points: Sequence[tuple[float, float]], color: str, **look: Any) -> None:
    """Points (x, y) without lines; many of them as one image."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    axes.plot(xs, ys, color=color, linestyle="", rasterized=len(points) > MAX_DOTS, **look)


def _iteration_axis(axes: Axes, run: Run) -> None:
    first, last = run.records[0].iteration, run.records[-1].iteration
    for start in sorted(run.starts):
        if start > first:
            axes.axvline(start - 0.5, color=INK, linewidth=0.8, linestyle=":")
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, nbins=8))
    axes.set_xlabel("iteration")
    axes.grid(axis="y")


def _legend_above(axes: Axes, *, num_columns: int, title: str = "") -> None:
    """A legend on top of an axis, with a title above it."""
    num_rows = math.ceil(len(axes.get_legend_handles_labels()[0]) / num_columns)
    if num_rows:
        axes.legend(
            ncols=num_columns, loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.1
        )
    if title:
        axes.set_title(title, loc="left", pad=6.0 + POINTS_PER_LEGEND_ROW * num_rows)


def _colors(names: Sequence[str]) -> dict[str, str]:
    """The colour of each name, in their order; names beyond the colours share one."""
    return {
        name: SERIES[place] if place < len(SERIES) else MUTED for place, name in enumerate(names)
    }


def _colors_of_strategies(run: Run) -> dict[str, str]:
    """The same in every figure; the most used first."""
    return _colors([row["name"] for row in run.numbers.used])


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


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)
