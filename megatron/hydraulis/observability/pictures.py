"""Colours of all pictures, and how they are saved.

matplotlib, which takes long to import, is imported by what draws.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.hydraulis.errors import HydraulisError, why_not_written

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CATEGORY_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""

DOTS_PER_INCH = 120


def style_rows(axes: Axes, xlabel: str, title: str) -> None:
    """The look of a picture with a named row for each bar and time along the x axis."""
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(xlabel, fontsize=9)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color="#e8e8e8", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, fontsize=10, loc="left")


def figure_svg(figure: Figure, name: str, settings: Mapping[Any, Any] | None = None) -> str:
    """An ``<svg>`` element for a page, which needs no file and no font.

    Args:
        figure: to be drawn; it gets its own canvas.
        name: identifiers of the element begin with it, and depend on nothing else.
        settings: of matplotlib while it draws.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    text = io.StringIO()
    FigureCanvasSVG(figure)
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", **(settings or {}), "svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', svg)
    return re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)


def save_picture(figure: Figure, path: Path, *, fix: str, **options: Any) -> None:
    """Writes a figure in the format of the path's suffix.

    Args:
        figure: to be saved; it gets its own canvas, so that no process-wide state of pyplot exists.
        fix: what the user can do if the file cannot be written.

    Raises:
        HydraulisError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, **({"dpi": DOTS_PER_INCH} | options))
    except OSError as error:
        raise HydraulisError(
            f"a picture needs a writable file: {path}: {why_not_written(error, path)}; {fix}"
        ) from error
