"""``python -m megatron.hydraulis trace``: what a trace tells, as a table and a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace_file import (
    MERGED_FILE_NAME,
    merge_trace,
    rank_files,
    read_trace,
)
from megatron.hydraulis.observability.trace_query import Spans
from megatron.hydraulis.observability.trace_shares import rank_shares, shares_table

__all__ = ["add_arguments", "run"]

PICTURE_FILE_NAME = "trace.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    parser.description = (
        "Merge the ranks' files of a trace, also of a run that was killed; print how much of its "
        "time each rank worked, waited and was idle; draw one iteration."
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder that --trace wrote")
    parser.add_argument(
        "--iteration", type=int, metavar="N", help="iteration to draw; default: the last one traced"
    )
    parser.add_argument(
        "--picture",
        type=Path,
        metavar="FILE",
        help=f"where to draw it (PNG); default: DIR/{PICTURE_FILE_NAME}",
    )


def run(namespace: argparse.Namespace) -> int:
    """Merge, print, draw; returns the exit status.

    Raises HydraulisError for a folder without a trace, or without the iteration.
    """
    # Only now: drawing takes a moment to import.
    from megatron.hydraulis.observability.trace_picture import draw_trace

    folder: Path = namespace.folder
    merged = merge_trace(folder) if rank_files(folder) else folder / MERGED_FILE_NAME
    spans = Spans.of(read_trace(merged))
    iterations = sorted({int(span.detail["iteration"]) for span in spans.where(name="iteration")})
    if not iterations:
        raise HydraulisError(
            f"a trace holds whole iterations but {folder} has none; the run ended before the first "
            "of --trace-iterations did"
        )
    print(shares_table(rank_shares(spans), len(iterations)), end="")
    picture = namespace.picture or folder / PICTURE_FILE_NAME
    number = iterations[-1] if namespace.iteration is None else namespace.iteration
    draw_trace(spans, number, picture)
    print(f"iterations {iterations[0]} to {iterations[-1]}: {merged}")
    print(f"iteration {number}: {picture}")
    return 0
