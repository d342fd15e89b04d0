"""A figure as inline SVG whose colours follow the page, light or dark, and as PNG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.strategy_panels import CATEGORY_COLORS

__all__ = ["FONT_SIZE", "GRID", "IDLE", "INK", "MUTED", "SERIES", "inline_svg", "write_png"]

INK = "#24292f"
MUTED = "#8b949e"
GRID = "#d8dee4"
IDLE = "#e4e8ec"
SERIES = CATEGORY_COLORS

VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", IDLE: "idle"} | {
    color: f"series-{number}" for number, color in enumerate(SERIES)
}
"""The page's custom property of each colour that figures are drawn in."""

FONT_SIZE = 8.5
"""Points, of a figure some 330 points wide: legible where that becomes 390 pixels."""
PNG_DOTS_PER_INCH = 200

SETTINGS: dict[Any, Any] = {
    "font.size": FONT_SIZE,
    "font.family": "sans-serif",
    "axes.titlesize": FONT_SIZE,
    "axes.labelsize": FONT_SIZE,
    "xtick.labelsize": FONT_SIZE,
    "ytick.labelsize": FONT_SIZE,
    "legend.fontsize": FONT_SIZE,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
    "svg.fonttype": "none",
}
"""matplotlib's, while a figure is made and drawn."""

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))
_FONT_FAMILY = re.compile(r"font-family: [^;\"]*")


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """An ``<svg>`` element for a page: no file, no font, no identifier that another figure has.

    Args:
        figure: made under `SETTINGS`, in the colours of this module.
        name: what its identifiers begin with.
        description: for those who do not see it.
    """
    text = io.StringIO()
    FigureCanvasSVG(figure)
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=_NO_METADATA)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
    # The page's own font, whatever fonts the reader's machine has.
    svg = _FONT_FAMILY.sub("font-family: var(--font)", svg)
    for color, variable in VARIABLES.items():
        svg = re.sub(color, f"var(--{variable})", svg, flags=re.IGNORECASE)
    opening = re.compile(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>')
    return opening.sub(
        rf'<svg viewBox="\1" role="img" aria-label="{description}">', svg, count=1
    ).strip()


def write_png(figure: Figure, path: Path) -> None:
    """The figure on white. Raises HydraulisError if the file cannot be written."""
    FigureCanvasAgg(figure)
    try:
        with matplotlib.rc_context(SETTINGS):
            figure.savefig(path, dpi=PNG_DOTS_PER_INCH, facecolor="white")
    except OSError as error:
        raise HydraulisError(
            f"a report needs files that can be written: {path}: {error.strerror}; free space there "
            "or give another --output-dir"
        ) from error
