"""Reads a run from its folder.

The closing table, ``summary.png``, the report and its advice are all made from a `Run`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.records import (
    CONFIG_FILE_NAME,
    METRICS_FILE_NAME,
    read_metrics,
)
from megatron.hydraulis.observability.report_numbers import PoolReplica, PoolStrategy, Run
from megatron.hydraulis.observability.trace import MERGED_FILE_NAME, rank_files, read_trace
from megatron.hydraulis.observability.trace_analysis import Spans

TRACE_FOLDER_NAME = "trace"
"""Subfolder that is searched for a trace if there is no configuration that could name one."""

MAX_TRACE_BYTES = 256 * 2**20
"""A larger trace would take longer to read than someone waits for a report."""

_EARLIER_FOLDER = re.compile(r"earlier\.(\d+)")
_MS_PER_S = 1e3
_OBJECTS = ("model", "settings", "hydraulis", "batch_sizes")
"""Sections of the configuration."""


def read_run(
    folder: str | Path, *, trace: str | Path | None = None, only_last_start: bool = False
) -> Run:
    """Reads a run folder, also of a run that was killed or is still running.

    Args:
        folder: of the run, or an ``earlier.N`` in it.
        trace: folder of its trace; if None, the one that the configuration names, if it exists;
            without a configuration the subfolder ``trace``.
        only_last_start: whether to leave out trace, earlier parts and notes, as a run does when it
            ends.

    Raises:
        HydraulisError: there is no such folder, it has no iteration, a complete line of its metrics
            is not a record, or ``trace`` is given and cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise HydraulisError(
            f"a report needs a run folder but {folder} is not a folder; give the folder of "
            "--run-dir, which is printed at the end of training"
        )
    records = read_metrics(folder)
    if not records:
        raise HydraulisError(
            f"a report needs at least 1 iteration, but {folder / METRICS_FILE_NAME} has 0 complete "
            "lines; train an iteration first"
        )
    notes: list[str] = []
    config = _read_config(folder / CONFIG_FILE_NAME, notes)
    run = Run(
        folder=folder,
        records=tuple(records),
        starts=_starts(folder / METRICS_FILE_NAME, notes),
        config=config,
        strategies=_strategies(config, notes),
    )
    if only_last_start:
        return run
    notes += map(str, config.get("notes") or ())
    run = _with_earlier_parts(run, notes)
    spans = _read_spans(run, trace, notes)
    notes += _interruptions(run)
    return dataclasses.replace(run, spans=spans, notes=tuple(notes))


def _starts(path: Path, notes: list[str]) -> frozenset[int]:
    """First iterations of processes: an iteration that does not follow the line before it."""
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        notes.append(
            f"The last line of {METRICS_FILE_NAME} is incomplete, as after a killed run; it is "
            "ignored."
        )
    iterations = [int(json.loads(line)["iteration"]) for line in lines[:-1]]
    starts = {iterations[0]}
    for before, after in itertools.pairwise(iterations):
        if after <= before:
            starts.add(after)
            notes.append(
                f"Training resumed from iteration {after} after it had reached {before}; for "
                "iterations that ran twice the later run counts."
            )
    return frozenset(starts)


def _with_earlier_parts(run: Run, notes: list[str]) -> Run:
    """The run with iterations before its first one from ``earlier.N``, latest N first."""
    folders = sorted(
        (
            (int(match[1]), path)
            for path in run.folder.iterdir()
            if (match := _EARLIER_FOLDER.fullmatch(path.name))
            and (path / METRICS_FILE_NAME).is_file()
        ),
        reverse=True,
    )
    records, starts = run.records, run.starts
    others = []
    for _, path in folders:
        first = records[0].iteration
        if first == 1:
            others.append(path.name)
            continue
        try:
            before = [record for record in read_metrics(path) if record.iteration < first]
        except HydraulisError as error:
            notes.append(f"{path.name} is not included: {error}.")
            continue
        if before:
            records = (*before, *records)
            starts |= {before[0].iteration}
            notes.append(
                f"The run resumed from iteration {first}; iterations {before[0].iteration} to "
                f"{before[-1].iteration} are from {path.name}."
            )
    if others:
        notes.append(
            f"This folder also holds separate earlier runs: {', '.join(others)}. For their reports "
            f"give, for example, {run.folder / others[0]} to the report command."
        )
    return dataclasses.replace(run, records=records, starts=starts)


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
        for name in _OBJECTS:
            if not isinstance(config.get(name) or {}, dict):
                raise ValueError(f"{name} is not an object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        notes.append(
            f"{CONFIG_FILE_NAME} cannot be read ({reason}): schemes, ranks and settings of the run "
            "are unknown."
        )
        return {}
    return config


def _strategies(config: Mapping[str, Any], notes: list[str]) -> tuple[PoolStrategy, ...]:
    try:
        return tuple(
            PoolStrategy(
                name=str(strategy["name"]),
                notation=str(strategy["strategy"]),
                replicas=tuple(
                    PoolReplica(
                        scheme=str(replica["scheme"]),
                        ranks=tuple(int(rank) for rank in replica["ranks"]),
                        max_tokens=replica.get("max_tokens_per_micro_batch"),
                        experts=str(replica.get("experts_per_rank", "")),
                    )
                    for replica in strategy["replicas"]
                ),
                overhead_s=(
                    float(strategy["overhead_ms"]) / _MS_PER_S
                    if "overhead_ms" in strategy
                    else None
                ),
            )
            for strategy in config.get("strategies", ())
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        notes.append(
            f"The strategies of {CONFIG_FILE_NAME} have another format than this version writes "
            f"({error!r}): replicas have numbers but no schemes."
        )
        return ()


def _read_spans(run: Run, given: str | Path | None, notes: list[str]) -> Spans:
    if given is not None:
        return Spans.of(read_trace(given))
    named = run.setting("hydraulis", "trace")
    candidates = []
    if not run.config:
        candidates = [run.folder / TRACE_FOLDER_NAME]
    elif named:
        # First inside the run folder, which may have been moved, then where the run wrote it.
        candidates = [run.folder / Path(named).name]
        if not _EARLIER_FOLDER.fullmatch(run.folder.name):
            # Otherwise the next run of the folder may have written its own trace there.
            candidates.append(Path(named))
    for path in candidates:
        merged = path / MERGED_FILE_NAME
        files = rank_files(path) or ([merged] if merged.is_file() else [])
        if not files:
            continue
        num_bytes = sum(file.stat().st_size for file in files)
        if num_bytes > MAX_TRACE_BYTES:
            notes.append(
                f"The trace in {path} has {num_bytes / 1e6:,.0f} MB, more than "
                f"{MAX_TRACE_BYTES / 1e6:,.0f} MB, and is not read; --trace {path} reads it anyway."
            )
            break
        try:
            return Spans.of(read_trace(path))
        except HydraulisError as error:
            notes.append(f"The trace in {path} is not included: {error}.")
            break
    return Spans()


def _interruptions(run: Run) -> list[str]:
    notes = []
    last = run.records[-1].iteration
    if run.why_short is not None:
        notes.append(
            f"The run has reached iteration {last} of {run.num_train_iters}: {run.why_short}."
        )
    num_missing = last - run.records[0].iteration + 1 - len(run.records)
    if num_missing:
        notes.append(f"{num_missing} iterations in between are missing in {METRICS_FILE_NAME}.")
    return notes
