"""``hydraulis report``: a page about a run, from its folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from megatron.hydraulis.errors import HydraulisError, listed
from megatron.hydraulis.json_object import replace_text
from megatron.hydraulis.observability import console
from megatron.hydraulis.observability.advice import advice_on
from megatron.hydraulis.observability.records import (
    REPORT_FILE_NAME,
    REPORT_PICTURES_FOLDER_NAME,
)
from megatron.hydraulis.observability.report_data import Run, read_run
from megatron.hydraulis.observability.report_figures import ReportFigure, figures_of

TEMPLATE = Path(__file__).with_name("report_page.html.jinja")
MAX_ROWS = 200
"""Limit of a table's rows, as more make the page slow; --json has all of them."""
MAX_RANKS_NAMED = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a page about a run from its folder, also if the run was killed or is still going on: "
        "loss, tokens/s, strategies, predicted against measured times in s or ms, idle share, "
        "padding, plan gap and wait, bytes of regrouping, and what to do about them. The page "
        "needs no network; the same pictures are written next to it as PNG."
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
        help=f"folder for {REPORT_FILE_NAME} and {REPORT_PICTURES_FOLDER_NAME}/*.png; default: "
        "RUN_DIR",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the numbers behind the page as JSON, times in s, shares from 0 to 1, and "
        "write no files",
    )


def run(namespace: argparse.Namespace) -> int:
    """Writes the page and prints its path, or prints the numbers; returns the exit status.

    Raises HydraulisError for a folder without an iteration, or if a file cannot be written.
    """
    found = read_run(namespace.folder, trace=namespace.trace)
    if namespace.json:
        content = {
            "run_dir": str(found.folder),
            "notes": list(found.notes),
            "starts": sorted(found.starts),
            "strategies_of_pool": [dataclasses.asdict(strategy) for strategy in found.strategies],
            **found.numbers.to_json(),
            "advice": [dataclasses.asdict(one) for one in advice_on(found)],
            "records": [record.to_json() for record in found.records],
        }
        print(json.dumps(_finite(content), indent=1, allow_nan=False))
        return 0
    page = _write(namespace.output_dir or namespace.folder, found)
    for note in found.notes:
        print(f"note: {note}")
    print(f"report: {page}")
    return 0


def _write(folder: Path, found: Run) -> Path:
    path, pictures = folder / REPORT_FILE_NAME, folder / REPORT_PICTURES_FOLDER_NAME
    figures = figures_of(found)
    page = make_page(found, figures)
    try:
        if pictures.is_symlink():
            pictures.unlink()  # the pictures of the folder that it names are not the report's
        pictures.mkdir(parents=True, exist_ok=True)
        # An earlier report may have had figures that this one does not have.
        for picture in pictures.glob("*.png"):
            picture.unlink()
        replace_text(path, page)
    except OSError as error:
        raise HydraulisError(
            f"a report needs writable files: {error.filename or folder}: {error.strerror}; free "
            "space there or give another --output-dir"
        ) from error
    for figure in figures:
        figure.write_png(pictures)
    return path


def _finite(value: Any) -> Any:
    """The value with None for numbers that are not finite, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_page(run: Run, figures: Iterable[ReportFigure]) -> str:
    """The whole document, which refers to nothing outside itself."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # By the first part of its name each text of a number is a filter: {{ 0.5 | share }}.
    names = (name for name in vars(console) if name.endswith("_text") and name[0] != "_")
    environment.filters |= {name[: -len("_text")]: getattr(console, name) for name in names}
    environment.filters |= {
        "json": lambda content: json.dumps(content, indent=1),
        "text_of": _text_of,
    }
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        run=run,
        numbers=run.numbers,
        totals=run.numbers.totals,
        advice=advice_on(run),
        figures=figures,
        global_batch=_global_batch(run),
        limits=[
            {"strategy": strategy.name} | dataclasses.asdict(replica)
            for strategy in run.strategies
            for replica in strategy.replicas
        ],
        records=[
            record.to_json()
            | {"tokens": console.tokens_text(record.num_tokens, record.trained_tokens)}
            for record in run.records[-MAX_ROWS:]
        ],
        max_rows=MAX_ROWS,
    )


def _text_of(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    return _ranks(value) if isinstance(value, tuple) else console.text_of(name, value)


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "–"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return listed(ranks, most=MAX_RANKS_NAMED)


def _global_batch(run: Run) -> str:
    sizes = [size for _, size in run.setting("batch_sizes", "steps") or ()]
    if len(sizes) > 1:
        return f"{sizes[0]:,} to {sizes[-1]:,} {run.setting('batch_sizes', 'unit')}"
    if num_tokens := run.setting("hydraulis", "global_batch_tokens"):
        return f"{num_tokens:,} tokens"
    return f"{run.setting('settings', 'global_batch_size')} sequences"
