"""A picture of how long sequences are, and in which of them tokens and attention's work lie."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.counts import LengthCounts

__all__ = ["draw_lengths"]

_SIZE_INCHES = (8.0, 6.0)
_DOTS_PER_INCH = 120
_BARS_PER_DOUBLING = 4
_KINDS = (
    ("sequences", "#4477aa"),
    ("tokens", "#228833"),
    ("work of attention, Σs²", "#cc6677"),
)
_SUFFIXES = {".png", ".pdf", ".svg"}


def draw_lengths(counts: LengthCounts, path: str | Path, *, seq_length: int | None = None) -> None:
    """Draw the shares per length and summed up, both over a logarithmic axis of lengths.

    seq_length: marked by a line. Raises ConfigurationError for a path that cannot be written.
    """
    if Path(path).suffix not in _SUFFIXES:
        raise ConfigurationError(
            f"--picture {path}: a picture is one of {', '.join(sorted(_SUFFIXES))} but this is "
            f"{Path(path).suffix or 'none'!r}; give another name"
        )
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    lengths = counts.lengths.astype(np.float64)
    num_doublings = np.log2(lengths[-1] / lengths[0])
    num_bars = max(1, round(_BARS_PER_DOUBLING * num_doublings))
    edges = np.geomspace(lengths[0], lengths[-1] * 1.0001, num_bars + 1)
    if lengths[-1] == lengths[0]:
        edges = lengths[0] * np.array([0.9, 1.1])
    for power, (label, colour) in enumerate(_KINDS):
        weights = lengths**power * counts.counts
        shares = 100.0 * weights / weights.sum()
        heights = np.histogram(lengths, edges, weights=shares)[0]
        above.stairs(heights, edges, color=colour, fill=True, alpha=0.15)
        above.stairs(heights, edges, color=colour, linewidth=1.6, label=label)
        below.step(lengths, np.cumsum(shares), where="post", color=colour, linewidth=1.6)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.set_ylim(bottom=0.0)
        if seq_length is not None:
            axes.axvline(seq_length, color="black", linestyle="--", linewidth=1.0)
    if seq_length is not None:
        above.plot([], [], color="black", linestyle="--", label=f"--seq-length {seq_length:,}")
    below.set_xscale("log")
    below.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    above.set_ylabel("% of all, per bar")
    below.set_ylabel("% of all, up to this length")
    below.set_xlabel("length of the sequence, tokens")
    above.legend(frameon=False)
    above.set_title(f"{counts.num_sequences:,} sequences, {counts.num_tokens:,} tokens")
    FigureCanvasAgg(figure)
    try:
        figure.savefig(path, dpi=_DOTS_PER_INCH)
    except OSError as error:
        raise ConfigurationError(
            f"--picture {path}: must be a path that can be written but: {error.strerror}; give "
            f"another path"
        ) from error
