"""``python -m megatron.hydraulis report``: a page about a run, out of its folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.report_advice import Advice, advice_on
from megatron.hydraulis.observability.report_numbers import Numbers, numbers_of
from megatron.hydraulis.observability.report_run import (
    REPORT_FILE_NAME,
    REPORT_PICTURES_FOLDER_NAME,
    Run,
    read_run,
)

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the subcommand."""
    parser.description = (
        "Make a page about a run out of its folder, also of one that was killed or still goes on: "
        "loss, tokens/s, strategies, predicted against measured times in s or ms, idle share, "
        "padding, plan gap and wait, bytes of regrouping, and what to do about them. The page "
        "needs no network; the same pictures stand beside it as PNG."
    )
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="the run's --run-dir")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="trace of the run, for measured times of single replicas; default: the one that the "
        "run's configuration names",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help=f"where {REPORT_FILE_NAME} and {REPORT_PICTURES_FOLDER_NAME}/*.png go; default: "
        "RUN_DIR",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the numbers behind the page as JSON, times in s, shares from 0 to 1, and "
        "write no files",
    )


def run(namespace: argparse.Namespace) -> int:
    """Write the page and print its path, or print the numbers; returns the exit status.

    Raises HydraulisError for a folder without an iteration, and when a file cannot be written.
    """
    found = read_run(namespace.folder, trace=namespace.trace)
    numbers = numbers_of(found)
    advice = advice_on(found, numbers)
    if namespace.json:
        print(json.dumps(_as_json(found, numbers, advice), indent=1, allow_nan=False))
        return 0
    page = _write(namespace.output_dir or namespace.folder, found, numbers, advice)
    for note in found.notes:
        print(f"note: {note}")
    print(f"report: {page}")
    return 0


def _write(folder: Path, found: Run, numbers: Numbers, advice: Sequence[Advice]) -> Path:
    # Only now: drawing takes a moment to import.
    from megatron.hydraulis.observability.report_figures import figures_of
    from megatron.hydraulis.observability.report_page import make_page
    from megatron.hydraulis.observability.report_svg import write_png

    path, pictures = folder / REPORT_FILE_NAME, folder / REPORT_PICTURES_FOLDER_NAME
    figures = list(figures_of(found, numbers))
    page = make_page(found, numbers, advice, figures)
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        # Those of an earlier report may be of figures that this one has not.
        for picture in pictures.glob("*.png"):
            picture.unlink()
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HydraulisError(
            f"a report needs files that can be written: {error.filename or folder}: "
            f"{error.strerror}; free space there or give another --output-dir"
        ) from error
    for figure in figures:
        write_png(figure.figure, pictures / f"{figure.name}.png")
    return path


def _as_json(found: Run, numbers: Numbers, advice: Sequence[Advice]) -> dict[str, Any]:
    values = {
        "run_dir": str(found.folder),
        "notes": list(found.notes),
        "starts": sorted(found.starts),
        "strategies_of_pool": [dataclasses.asdict(shape) for shape in found.strategies],
        **dataclasses.asdict(numbers),
        "advice": [dataclasses.asdict(one) for one in advice],
        "records": [record.to_json() for record in found.records],
    }
    finite: dict[str, Any] = _finite(values)
    return finite


def _finite(value: Any) -> Any:
    """The same with None for what is not finite, for JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
