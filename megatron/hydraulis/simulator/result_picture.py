"""Results of a simulation as a picture: what an iteration takes in each way, and what for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.simulator.results import PARTS, WayResult

__all__ = ["draw_results"]

# Okabe and Ito's colours, as in the other pictures; idle time recedes.
_COLORS = {
    "work": "#0072B2",
    "padding": "#CC79A7",
    "fill": "#56B4E9",
    "imbalance": "#d0d0d0",
    "regroup": "#E69F00",
    "planning": "#009E73",
}
_WIDTH_INCHES = 9.0
_MARGIN_INCHES = 1.7
_ROW_INCHES = 0.42
_DOTS_PER_INCH = 120
_MAX_OVER_NEXT = 2.5
"""A way so many times slower than the next one is cut off, or no other one could be read."""


def draw_results(
    results: Sequence[WayResult], reference: WayResult, path: Path, title: str
) -> None:
    """Draw a bar a way as a PNG, its length an iteration's mean time, divided by its parts.

    Work is divided by the tokens that it computes, trained ones and padding. Raises HydraulisError
    where the file cannot be written.
    """
    height = _MARGIN_INCHES + _ROW_INCHES * len(results)
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    longest_s = _longest_drawn_s([result.time_s / len(result.accounts) for result in results])
    for place, result in enumerate(results):
        _draw_way(axes, place, result, reference, longest_s)
    axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=9)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlim(0.0, 1.22 * longest_s)
    axes.set_xlabel("s per iteration, divided by what the ranks do in it", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    figure.legend(
        first.values(),
        first.keys(),
        loc="outside lower center",
        ncols=len(_COLORS),
        fontsize=8,
        frameon=False,
    )
    try:
        FigureCanvasAgg(figure)
        figure.savefig(path)
    except OSError as error:
        raise HydraulisError(
            f"the picture needs a file that can be written: {path}: {error.strerror}; make room or "
            "name another folder with --out"
        ) from error


def _longest_drawn_s(times_s: Sequence[float]) -> float:
    rising = sorted(times_s)
    for shorter_s, longer_s in zip(reversed(rising[:-1]), reversed(rising), strict=False):
        if longer_s <= _MAX_OVER_NEXT * shorter_s:
            return longer_s
    return rising[0]


def _draw_way(
    axes: Axes, place: int, result: WayResult, reference: WayResult, longest_s: float
) -> None:
    iteration_s = result.time_s / len(result.accounts)
    shares = result.shares
    padding = shares["work"] * result.padding_fraction
    parts = {"work": shares["work"] - padding, "padding": padding}
    parts |= {part: shares[part] for part in PARTS if part != "work"}
    is_cut = iteration_s > longest_s * (1.0 + 1e-9)
    drawn_s = longest_s if is_cut else iteration_s
    left_s = 0.0
    for part, share in parts.items():
        axes.barh(place, share * drawn_s, left=left_s, height=0.66, color=_COLORS[part], label=part)
        left_s += share * drawn_s
    text = f"{result.tokens_per_s:,.0f} tokens/s, {reference.time_s / result.time_s:.2f}x"
    if is_cut:
        text = f"… {iteration_s:,.1f} s: " + text
    axes.text(
        left_s - 0.01 * longest_s if is_cut else left_s + 0.01 * longest_s,
        place,
        text,
        va="center",
        ha="right" if is_cut else "left",
        fontsize=8,
        color="white" if is_cut else "black",
    )
