"""Panels of ``summary.png`` for a run whose strategy changes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from megatron.hydraulis.observability.records import IterationRecord

__all__ = [
    "CATEGORY_COLORS",
    "IDLE_COLOR",
    "busy_shares_of_strategies",
    "draw_makespans",
    "draw_shares_of_strategies",
]

IDLE_COLOR = "#e4e4e4"
# Okabe and Ito's colours, told apart by colour-blind readers too.
CATEGORY_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
# The strategies beyond those that have a colour of their own.
OTHERS = "others"
OTHERS_COLOR = "#8a8a8a"
# So that seven names stand beside each other under their bars.
MAX_NAME_CHARS = 15


def busy_shares_of_strategies(records: Sequence[IterationRecord]) -> dict[str, float]:
    """By strategy: predicted times of its replicas / (its makespans x replicas), from 0 to 1.

    In the order of their iterations, most first; 0 for a strategy that nothing was predicted of.
    """
    shares = {}
    for name, _ in Counter(record.strategy for record in records).most_common():
        own = [record for record in records if record.strategy == name]
        busy_s = math.fsum(time_s for record in own for time_s in record.replica_times_s)
        possible_s = math.fsum(
            max(record.replica_times_s, default=0.0) * len(record.replica_times_s) for record in own
        )
        shares[name] = busy_s / possible_s if possible_s > 0.0 else 0.0
    return shares


def draw_makespans(
    axes: Axes,
    records: Sequence[IterationRecord],
    *,
    finish: Callable[[Axes, Sequence[int]], None],
) -> None:
    """A dot an iteration, in the colour of its strategy; finish makes the axis of iterations."""
    axes.set_title("Predicted makespan by strategy", loc="left", fontsize=10)
    shown = _as_drawn(records)
    for name, color in _colors(shown).items():
        own = [record for record in shown if record.strategy == name]
        axes.plot(
            [record.iteration for record in own],
            [max(record.replica_times_s, default=0.0) * 1e3 for record in own],
            color=color,
            linestyle="",
            marker="o",
            markersize=4,
            label=f"{name} ({len(own)})",
        )
    axes.set_ylabel("ms")
    # The legend gets room of its own above the dots.
    _, top = axes.get_ylim()
    axes.set_ylim(0.0, max(top, 0.0) * 1.3 or 1.0)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    finish(axes, [record.iteration for record in records])


def draw_shares_of_strategies(axes: Axes, records: Sequence[IterationRecord]) -> None:
    """A bar a strategy: how much of its makespans its replicas have work."""
    axes.set_title(
        "Share of the makespan with work, mean over a strategy's replicas", loc="left", fontsize=10
    )
    shown = _as_drawn(records)
    colors = _colors(shown)
    shares = busy_shares_of_strategies(shown)
    names = list(colors)
    positions = range(len(names))
    axes.bar(positions, [100.0] * len(names), color=IDLE_COLOR)
    heights = [100.0 * shares[name] for name in names]
    bars = axes.bar(positions, heights, color=list(colors.values()))
    axes.bar_label(bars, fmt="%.1f%%", label_type="center", color="white", fontsize=9)
    axes.set_xticks(positions, names, fontsize=8)
    axes.set_ylabel("%")
    axes.set_ylim(0.0, 105.0)
    axes.spines[["top", "right"]].set_visible(False)


def _as_drawn(records: Sequence[IterationRecord]) -> list[IterationRecord]:
    """The records with names that fit, those without a colour of their own under one."""
    counts = Counter(record.strategy for record in records)
    most_used = [name for name, _ in counts.most_common(len(CATEGORY_COLORS))]
    names = {name: name if name in most_used else OTHERS for name in counts}
    for name, shown in names.items():
        if len(shown) > MAX_NAME_CHARS:
            # The place keeps names apart that begin alike.
            place = f" #{most_used.index(name) + 1}"
            names[name] = shown[: MAX_NAME_CHARS - 1 - len(place)] + "…" + place
    return [dataclasses.replace(record, strategy=names[record.strategy]) for record in records]


def _colors(records: Sequence[IterationRecord]) -> dict[str, str]:
    """By name as drawn, the most used first."""
    counts = Counter(record.strategy for record in records)
    names = [name for name, _ in counts.most_common() if name != OTHERS]
    colors = dict(zip(names, CATEGORY_COLORS, strict=False))
    return colors | ({OTHERS: OTHERS_COLOR} if OTHERS in counts else {})
