"""``summary.png``: the loss of a run and how evenly its replicas were given work."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.metrics_writer import METRICS_FILE_NAME, read_metrics
from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.strategy_panels import (
    CATEGORY_COLORS,
    IDLE_COLOR,
    draw_makespans,
    draw_shares_of_strategies,
)

SUMMARY_FILE_NAME = "summary.png"

# One line per replica stays readable up to here; more replicas become rows of a map.
MAX_REPLICA_LINES = 6
# Iterations from which the median of the losses around each one is drawn over them.
MIN_ITERATIONS_TO_SMOOTH = 20
MIN_SMOOTHING_HALF_WINDOW = 2
MAX_SMOOTHING_HALF_WINDOW = 10
MAX_ITERATIONS_WITH_MARKERS = 100
MAX_STRATEGY_CHARS = 60
# Slots of the bars' axis, so that one replica is a bar and not a wall.
MIN_BAR_SLOTS = 3

FIGURE_SIZE_INCHES = (8.0, 9.0)
DOTS_PER_INCH = 120
LOSS_COLOR = "#1f5fa8"
MUTED_COLOR = "#8a8a8a"


def write_summary(run_dir: str | Path, *, replica_labels: Sequence[str] | None = None) -> Path:
    """Draws ``summary.png`` from the ``metrics.jsonl`` of `run_dir` and returns its path.

    Three panels: loss per iteration; predicted time of each replica per iteration (as a share of
    that iteration's makespan when there are too many for lines); share of the run's makespans
    during which each replica has work. Replicas of different strategies are not compared: a run
    with several shows makespans and shares by strategy instead. `replica_labels` name the replicas
    in the order of `IterationRecord.replica_times_s`, e.g. by their schemes; they are used only if
    every iteration has that many replicas.

    Raises `HydraulisError` if there are no metrics, or the picture cannot be written.
    """
    run_dir = Path(run_dir)
    records = read_metrics(run_dir)
    if not records:
        raise HydraulisError(
            f"a summary needs at least 1 iteration, but {run_dir / METRICS_FILE_NAME} has 0; "
            "train an iteration first"
        )
    figure = Figure(figsize=FIGURE_SIZE_INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    loss_axes, time_axes, share_axes = figure.subplots(3, 1, height_ratios=(1.15, 1.15, 0.8))
    _draw_loss(loss_axes, records)
    if len(_strategies(records)) == 1:
        labels = _labels(records, replica_labels)
        _draw_replica_times(figure, time_axes, records, labels)
        _draw_busy_shares(share_axes, records, labels)
    else:
        draw_makespans(time_axes, records, finish=_finish_iteration_axes)
        draw_shares_of_strategies(share_axes, records)
    figure.suptitle(_title(records), fontsize=11)
    path = run_dir / SUMMARY_FILE_NAME
    try:
        # A canvas of its own, not pyplot: no process-wide figures and no choice of a backend.
        FigureCanvasAgg(figure)
        figure.savefig(path)
    except OSError as error:
        raise HydraulisError(
            f"the summary needs a file that can be written: {path}: {error.strerror}; "
            "free space there or make the folder writable"
        ) from error
    return path


def replica_times_ms(records: Sequence[IterationRecord]) -> NDArray[np.float64]:
    """Predicted times in ms, shape (most replicas of any iteration, iterations).

    NaN where an iteration's strategy has fewer replicas.
    """
    num_replicas = max(len(record.replica_times_s) for record in records)
    times_ms = np.full((num_replicas, len(records)), np.nan)
    for column, record in enumerate(records):
        times_ms[: len(record.replica_times_s), column] = record.replica_times_s
    return times_ms * 1e3


def busy_shares(records: Sequence[IterationRecord]) -> NDArray[np.float64]:
    """Predicted time of each replica / makespans of the iterations it takes part in, from 0 to 1.

    Shape (most replicas of any iteration,). 0 for a replica that never got a sequence.
    """
    times_ms = replica_times_ms(records)
    if not times_ms.size:
        return np.zeros(0)
    takes_part = ~np.isnan(times_ms)
    makespans_ms = np.where(takes_part, times_ms, 0.0).max(axis=0)
    possible_ms = (takes_part * makespans_ms).sum(axis=1)
    shares: NDArray[np.float64] = np.nansum(times_ms, axis=1) / np.maximum(
        possible_ms, np.finfo(np.float64).tiny
    )
    return shares


def _title(records: Sequence[IterationRecord]) -> str:
    strategies = _strategies(records)
    shown = strategies[0] if len(strategies) == 1 else f"{len(strategies)} strategies"
    if len(shown) > MAX_STRATEGY_CHARS:
        shown = shown[: MAX_STRATEGY_CHARS - 1] + "…"
    num_tokens = sum(record.num_tokens for record in records)
    iterations = "1 iteration" if len(records) == 1 else f"{len(records):,} iterations"
    return f"{shown}   ·   {iterations}   ·   {num_tokens:,} trained tokens"


def _strategies(records: Sequence[IterationRecord]) -> list[str]:
    """Their names, in the order of their first iteration."""
    return list(dict.fromkeys(record.strategy for record in records))


def _labels(records: Sequence[IterationRecord], given: Sequence[str] | None) -> list[str]:
    counts = {len(record.replica_times_s) for record in records}
    numbers = [f"replica {number}" for number in range(max(counts))]
    if given is None or counts != {len(given)}:
        return numbers
    return [f"{number} ({label})" for number, label in zip(numbers, given, strict=True)]


def _draw_loss(axes: Axes, records: Sequence[IterationRecord]) -> None:
    iterations = [record.iteration for record in records]
    losses = [math.nan if record.lm_loss is None else record.lm_loss for record in records]
    smooth = len(records) >= MIN_ITERATIONS_TO_SMOOTH
    axes.plot(
        iterations,
        losses,
        color=MUTED_COLOR if smooth else LOSS_COLOR,
        linewidth=0.9 if smooth else 1.6,
        marker=_marker(iterations),
        markersize=4,
        label="each iteration",
    )
    if smooth:
        half = min(
            max(len(records) // MIN_ITERATIONS_TO_SMOOTH, MIN_SMOOTHING_HALF_WINDOW),
            MAX_SMOOTHING_HALF_WINDOW,
        )
        axes.plot(
            iterations,
            running_median(losses, half),
            color=LOSS_COLOR,
            linewidth=2.0,
            label=f"median of {2 * half + 1} iterations",
        )
        axes.legend(frameon=False, fontsize=8)
    axes.set_title("Loss", loc="left", fontsize=10)
    axes.set_ylabel("lm loss per token")
    _finish_iteration_axes(axes, iterations)


def _marker(iterations: Sequence[int]) -> str:
    return "." if len(iterations) <= MAX_ITERATIONS_WITH_MARKERS else ""


def running_median(values: Sequence[float], half: int) -> list[float]:
    """Median of the finite ones of up to 2·half+1 values around each; NaN where there are none.

    Windows are symmetric and shrink towards both ends: one-sided windows would flatten the steep
    beginning of a loss curve.
    """
    medians = []
    for center in range(len(values)):
        reach = min(half, center, len(values) - 1 - center)
        window = values[center - reach : center + reach + 1]
        finite = [value for value in window if math.isfinite(value)]
        medians.append(statistics.median(finite) if finite else math.nan)
    return medians


def _draw_replica_times(
    figure: Figure, axes: Axes, records: Sequence[IterationRecord], labels: Sequence[str]
) -> None:
    iterations = [record.iteration for record in records]
    times_ms = replica_times_ms(records)
    if len(labels) <= MAX_REPLICA_LINES:
        axes.set_title("Work per replica: predicted time", loc="left", fontsize=10)
        for row, label in enumerate(labels):
            axes.plot(
                iterations,
                times_ms[row],
                color=CATEGORY_COLORS[row],
                linewidth=1.2,
                marker=_marker(iterations),
                markersize=4,
                label=label,
            )
        axes.set_ylabel("ms")
        # The legend gets room of its own above the lines.
        _, top = axes.get_ylim()
        axes.set_ylim(0.0, max(top, 0.0) * 1.3 or 1.0)
        if labels:
            axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    else:
        # Half an iteration to each side, so that a column stands above its own number.
        axes.set_title(
            "Work per replica: predicted time, % of the iteration's makespan",
            loc="left",
            fontsize=10,
        )
        makespans_ms = np.where(np.isnan(times_ms), 0.0, times_ms).max(axis=0)
        mesh = axes.pcolormesh(
            _edges(iterations),
            np.arange(len(labels) + 1) - 0.5,
            100.0 * times_ms / np.maximum(makespans_ms, np.finfo(np.float64).tiny),
            cmap="viridis",
            vmin=0.0,
            vmax=100.0,
            rasterized=True,
        )
        figure.colorbar(mesh, ax=axes, label="%", pad=0.01)
        axes.invert_yaxis()
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_ylabel("replica")
    _finish_iteration_axes(axes, iterations)


def _edges(iterations: Sequence[int]) -> NDArray[np.float64]:
    """Borders between columns, one more than iterations; gaps go half to each neighbour."""
    centers = np.asarray(iterations, dtype=np.float64)
    inner = (centers[:-1] + centers[1:]) / 2
    return np.concatenate([[centers[0] - 0.5], inner, [centers[-1] + 0.5]])


def _draw_busy_shares(
    axes: Axes, records: Sequence[IterationRecord], labels: Sequence[str]
) -> None:
    shares_percent = 100.0 * busy_shares(records)
    axes.set_title("Share of the makespan with work, over the whole run", loc="left", fontsize=10)
    positions = np.arange(len(labels))
    few = len(labels) <= MAX_REPLICA_LINES
    if few:
        axes.bar(positions, np.full(len(labels), 100.0), color=IDLE_COLOR)
        bars = axes.bar(positions, shares_percent, color=CATEGORY_COLORS[: len(labels)])
        axes.set_xlim(-0.6, max(len(labels), MIN_BAR_SLOTS) - 0.4)
        axes.bar_label(bars, fmt="%.1f%%", label_type="center", color="white", fontsize=9)
        axes.set_xticks(positions, labels)
    else:
        edges = np.arange(len(labels) + 1) - 0.5
        axes.stairs(np.full(len(labels), 100.0), edges, fill=True, color=IDLE_COLOR)
        axes.stairs(shares_percent, edges, fill=True, color=LOSS_COLOR)
        axes.set_xlim(edges[0], edges[-1])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("replica")
    axes.set_ylabel("%")
    axes.set_ylim(0.0, 105.0)
    axes.spines[["top", "right"]].set_visible(False)


def _finish_iteration_axes(axes: Axes, iterations: Sequence[int]) -> None:
    axes.set_xlim(iterations[0] - 0.5, iterations[-1] + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("iteration")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
