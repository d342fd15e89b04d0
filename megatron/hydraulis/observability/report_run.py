"""What a run folder holds for a report, and what is missing or odd about it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.metrics_writer import METRICS_FILE_NAME, read_metrics
from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.trace_file import MERGED_FILE_NAME, rank_files, read_trace
from megatron.hydraulis.observability.trace_query import Spans

__all__ = [
    "CONFIG_FILE_NAME",
    "REPORT_FILE_NAME",
    "REPORT_PICTURES_FOLDER_NAME",
    "ReplicaShape",
    "Run",
    "StrategyShape",
    "read_run",
]

CONFIG_FILE_NAME = "config.json"
REPORT_FILE_NAME = "report.html"
REPORT_PICTURES_FOLDER_NAME = "report"
TRACE_FOLDER_NAME = "trace"
"""Where a trace is looked for in a run folder without a configuration that could name it."""

MAX_TRACE_BYTES = 256 * 2**20
"""A trace beyond that takes longer to read than a reader of reports waits."""

_EARLIER_FOLDER = re.compile(r"earlier\.(\d+)")


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """A replica as the configuration has it."""

    scheme: str
    ranks: tuple[int, ...]
    max_tokens: int | None
    """Most tokens of a micro-batch."""


@dataclass(frozen=True, slots=True)
class StrategyShape:
    """A strategy as the configuration has it."""

    name: str
    notation: str
    replicas: tuple[ReplicaShape, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, with what an interrupted run that it goes on from left behind."""

    folder: Path
    records: tuple[IterationRecord, ...]
    """At least one, by rising iteration."""
    starts: frozenset[int]
    """The first iteration of every process that trained: it also builds models and groups."""
    config: Mapping[str, Any]
    """``config.json``; empty where there is none that can be read."""
    strategies: tuple[StrategyShape, ...]
    """Of the configuration."""
    spans: Spans
    """Of the trace; none where there is none."""
    notes: tuple[str, ...]
    """What a reader has to know before believing the figures, a sentence each."""

    def setting(self, section: str, name: str) -> Any:
        """A value of a section of the configuration; None where it is not there."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    @property
    def num_train_iters(self) -> int | None:
        """The iteration that the run is to end with; None if unknown."""
        value = self.setting("settings", "train_iters")
        return value if isinstance(value, int) else None

    @property
    def steady(self) -> tuple[IterationRecord, ...]:
        """All but the first iterations of the processes, unless there are no others."""
        return (
            tuple(record for record in self.records if record.iteration not in self.starts)
            or self.records
        )


def read_run(folder: str | Path, *, trace: str | Path | None = None) -> Run:
    """What a run folder tells, also of a run that was killed or that still goes on.

    Args:
        folder: of the run, or the ``earlier.N`` in it.
        trace: folder of its trace; where None, the one that the configuration names, if it is
            there; without a configuration the folder ``trace`` in the run folder.

    Raises:
        HydraulisError: there is no such folder, no iteration in it, a whole line of its metrics is
            not a record, or ``trace`` is given and cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise HydraulisError(
            f"a report is of a run folder but {folder} is none; give the folder of --run-dir, "
            "which the end of training prints"
        )
    records = read_metrics(folder)
    if not records:
        raise HydraulisError(
            f"a report needs at least 1 iteration, but {folder / METRICS_FILE_NAME} has 0 whole "
            "lines; train an iteration first"
        )
    notes: list[str] = []
    starts = _starts(folder / METRICS_FILE_NAME, notes)
    records, earlier_starts = _with_earlier(folder, records, notes)
    config = _read_config(folder / CONFIG_FILE_NAME, notes)
    run = Run(
        folder=folder,
        records=tuple(records),
        starts=frozenset(starts | earlier_starts),
        config=config,
        strategies=_strategies(config, notes),
        spans=_read_spans(folder, config, trace, notes),
        notes=(),
    )
    _note_interruption(run, notes)
    return Run(**(vars(run) | {"notes": tuple(notes)}))


def _starts(path: Path, notes: list[str]) -> set[int]:
    """First iterations of processes, as the order of the lines tells."""
    content = path.read_bytes()
    lines = content.split(b"\n")
    if lines[-1]:
        notes.append(
            f"The last line of {METRICS_FILE_NAME} is cut off, as a killed run leaves it; it is "
            "passed over."
        )
    iterations = [int(json.loads(line)["iteration"]) for line in lines[:-1]]
    starts = {iterations[0]}
    for before, after in itertools.pairwise(iterations):
        if after <= before:
            starts.add(after)
            notes.append(
                f"Training went on from iteration {after} after it had come to {before}; of "
                f"iterations that ran twice the later run counts."
            )
    return starts


def _with_earlier(
    folder: Path, records: list[IterationRecord], notes: list[str]
) -> tuple[list[IterationRecord], set[int]]:
    """The records with those before them that lie in ``earlier.N``; first iterations of these."""
    found = sorted(
        (
            (int(match[1]), path)
            for path in folder.iterdir()
            if (match := _EARLIER_FOLDER.fullmatch(path.name))
            and (path / METRICS_FILE_NAME).is_file()
        ),
        reverse=True,
    )
    starts: set[int] = set()
    others = []
    for _, path in found:
        first = records[0].iteration
        if first == 1:
            others.append(path.name)
            continue
        try:
            before = [record for record in read_metrics(path) if record.iteration < first]
        except HydraulisError as error:
            notes.append(f"{path.name} was left out: {error}.")
            continue
        if before:
            records = [*before, *records]
            starts.add(before[0].iteration)
            notes.append(
                f"The run went on from iteration {first}; iterations {before[0].iteration} to "
                f"{before[-1].iteration} are those of {path.name}."
            )
    if others:
        named = ", ".join(others)
        notes.append(
            f"Runs of their own were made in this folder before: {named}. Their reports: give "
            f"{folder / others[0]} to the report command."
        )
    return records, starts


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        notes.append(
            f"{CONFIG_FILE_NAME} cannot be read ({reason}): schemes, ranks and settings of the run "
            "are unknown."
        )
        return {}
    return config


def _strategies(config: Mapping[str, Any], notes: list[str]) -> tuple[StrategyShape, ...]:
    try:
        return tuple(
            StrategyShape(
                name=str(strategy["name"]),
                notation=str(strategy["strategy"]),
                replicas=tuple(
                    ReplicaShape(
                        scheme=str(replica["scheme"]),
                        ranks=tuple(int(rank) for rank in replica["ranks"]),
                        max_tokens=replica.get("max_tokens_per_micro_batch"),
                    )
                    for replica in strategy["replicas"]
                ),
            )
            for strategy in config.get("strategies", ())
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        notes.append(
            f"The strategies of {CONFIG_FILE_NAME} are not as this version writes them ({error!r}):"
            " replicas have numbers but no schemes."
        )
        return ()


def _read_spans(
    folder: Path, config: Mapping[str, Any], given: str | Path | None, notes: list[str]
) -> Spans:
    if given is not None:
        return Spans.of(read_trace(given))
    hydraulis = config.get("hydraulis")
    named = hydraulis.get("trace") if isinstance(hydraulis, Mapping) else None
    candidates = []
    if not config:
        candidates = [folder / TRACE_FOLDER_NAME]
    elif named:
        # As it lies if the run folder was moved or copied, then as the run was told.
        candidates = [folder / Path(named).name]
        if not _EARLIER_FOLDER.fullmatch(folder.name):
            # The next run of the folder may have put a trace of its own there.
            candidates.append(Path(named))
    for path in candidates:
        files = _trace_files(path)
        if not files:
            continue
        num_bytes = sum(file.stat().st_size for file in files)
        if num_bytes > MAX_TRACE_BYTES:
            notes.append(
                f"The trace in {path} has {num_bytes / 1e6:,.0f} MB, more than "
                f"{MAX_TRACE_BYTES / 1e6:,.0f} MB, and is not read; --trace {path} reads it all "
                "the same."
            )
            return Spans(())
        try:
            return Spans.of(read_trace(path))
        except HydraulisError as error:
            notes.append(f"The trace in {path} is left out: {error}.")
            return Spans(())
    return Spans(())


def _trace_files(folder: Path) -> Sequence[Path]:
    if not folder.is_dir():
        return ()
    merged = folder / MERGED_FILE_NAME
    return rank_files(folder) or ([merged] if merged.is_file() else [])


def _note_interruption(run: Run, notes: list[str]) -> None:
    last, wanted = run.records[-1].iteration, run.num_train_iters
    if wanted is not None and last < wanted:
        notes.append(
            f"The run has come to iteration {last} of {wanted}: it was interrupted or still goes "
            "on."
        )
    num_missing = last - run.records[0].iteration + 1 - len(run.records)
    if num_missing:
        notes.append(f"{num_missing} iterations in between are missing in {METRICS_FILE_NAME}.")
    if run.setting("hydraulis", "emulate_device"):
        notes.append(
            "The device was emulated: times are those of its cost profile, losses mean nothing."
        )
