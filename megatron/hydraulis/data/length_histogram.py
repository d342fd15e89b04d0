"""How document lengths are distributed, in powers of two, for people to read."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.table import Table

__all__ = ["LengthBin", "length_bins", "length_table"]

_BAR_WIDTH = 24


@dataclass(frozen=True)
class LengthBin:
    """Documents with ``first`` to ``last`` tokens, both included."""

    first: int
    last: int
    num_documents: int
    num_tokens: int


def length_bins(lengths: npt.NDArray[np.int64]) -> tuple[LengthBin, ...]:
    """Bins 1, 2–3, 4–7, 8–15, … from the shortest document to the longest.

    Args:
        lengths: (num_documents,) tokens of each document, at least 1.
    """
    if len(lengths) == 0:
        return ()
    # frexp, not log2: exact for every length below 2**53.
    exponents = np.frexp(lengths.astype(np.float64))[1] - 1
    lowest, highest = int(exponents.min()), int(exponents.max())
    num_documents = np.bincount(exponents - lowest)
    num_tokens = np.bincount(exponents - lowest, weights=lengths)
    return tuple(
        LengthBin(
            first=1 << exponent,
            last=(2 << exponent) - 1,
            num_documents=int(num_documents[exponent - lowest]),
            num_tokens=int(num_tokens[exponent - lowest]),
        )
        for exponent in range(lowest, highest + 1)
    )


def length_table(lengths: npt.NDArray[np.int64]) -> Table:
    """The bins as a table: documents with a bar, and the share of all tokens."""
    bins = length_bins(lengths)
    most = max((row.num_documents for row in bins), default=1)
    all_tokens = max(1, sum(row.num_tokens for row in bins))
    table = Table(title="document lengths", title_justify="left")
    table.add_column("tokens", justify="right")
    table.add_column("documents", justify="right")
    table.add_column("", min_width=_BAR_WIDTH)
    table.add_column("tokens in all", justify="right")
    for row in bins:
        # A bin that is not empty shows at least one block: the long tail is what matters here.
        width = -(-row.num_documents * _BAR_WIDTH // most)
        table.add_row(
            f"{row.first:,} – {row.last:,}" if row.last > row.first else f"{row.first:,}",
            f"{row.num_documents:,}",
            "█" * width,
            f"{row.num_tokens / all_tokens:.1%}",
        )
    return table
