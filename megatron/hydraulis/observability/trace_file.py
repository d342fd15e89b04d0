"""Files of a trace: one of each rank while a run goes on, one of them all at its end."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace_events import (
    Span,
    complete_event,
    metadata_events,
    span_of_event,
)
from megatron.hydraulis.observability.trace_lanes import LaneAssigner

__all__ = [
    "MERGED_FILE_NAME",
    "TraceWriter",
    "merge_trace",
    "rank_file",
    "rank_files",
    "read_trace",
]

MERGED_FILE_NAME = "trace.json"
_RANK_FILES = "trace_rank_*.json"


def rank_file(folder: str | Path, rank: int) -> Path:
    """``trace_rank_0003.json``."""
    return Path(folder) / f"trace_rank_{rank:04d}.json"


def rank_files(folder: str | Path) -> list[Path]:
    """The files of all ranks that there are, by rank."""
    return sorted(Path(folder).glob(_RANK_FILES), key=lambda path: int(path.stem.rsplit("_")[-1]))


class TraceWriter:
    """Writes spans as an array of trace events, a line each.

    An event is in the file when `write` returns. Without `close`, the bracket that ends the array
    is missing: viewers and `read_trace` do without it, so what a killed run leaves can be looked
    at.

    Raises `HydraulisError` if the file cannot be opened or written, e.g. on a full disk.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lanes = LaneAssigner()
        self._is_empty = True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open(self.path, "wb", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise self._error(error) from error
        self._put(b"[")

    def write(self, spans: Iterable[Span]) -> None:
        """Appends spans; those of a track are best given by their start."""
        lines: list[str] = []
        for span in spans:
            thread_id, new_lane, is_new_process = self._lanes.assign(span)
            events = [complete_event(span, thread_id)]
            if new_lane is not None:
                events += metadata_events(
                    span.rank,
                    is_planned=span.is_planned,
                    thread_id=thread_id,
                    track=span.track,
                    lane=new_lane,
                    names_process=is_new_process,
                )
            for event in events:
                separator = "\n" if self._is_empty else ",\n"
                self._is_empty = False
                lines.append(separator + json.dumps(event, allow_nan=False))
        if lines:
            self._put("".join(lines).encode())

    def close(self) -> None:
        """Ends the array; writing is over."""
        if not self._file.closed:
            try:
                self._put(b"\n]\n")
            finally:
                self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _put(self, content: bytes) -> None:
        num_written = 0
        try:
            while num_written < len(content):
                num_written += self._file.write(content[num_written:])
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> HydraulisError:
        return HydraulisError(
            f"a trace needs a file that can be written: {self.path}: {error.strerror}; make room "
            "or name another --trace folder"
        )


def read_trace(path: str | Path) -> list[Span]:
    """Spans of one file, or of all ranks' files in a folder, by their start.

    A folder without the ranks' files is read from its merged one. A last line without its end, as
    a killed run leaves it, is passed over.

    Raises `HydraulisError` if there is no such file, or a whole line is not an event.
    """
    path = Path(path)
    if path.is_dir():
        paths = rank_files(path) or [path / MERGED_FILE_NAME]
    else:
        paths = [path]
    spans = [span for file in paths for span in _read_file(file)]
    return sorted(spans, key=lambda span: (span.start_us, -span.end_us))


def merge_trace(folder: str | Path) -> Path:
    """``trace.json`` out of the ranks' files, which stay; returns its path.

    Planned spans of an iteration are moved to the earliest start of that iteration on any rank, so
    that those of different ranks fit together.

    Raises `HydraulisError` as `read_trace` and `TraceWriter` do.
    """
    folder = Path(folder)
    files = rank_files(folder)
    if not files:
        raise HydraulisError(
            f"a trace is merged from the ranks' files but {folder} has none "
            f"({_RANK_FILES}); give the folder of --trace"
        )
    starts: dict[tuple[int, int], float] = {}
    for file in files:
        starts |= iteration_starts(_read_file(file))
    with TraceWriter(folder / MERGED_FILE_NAME) as writer:
        for file in files:
            writer.write(aligned_plan(_read_file(file), starts))
    return writer.path


def iteration_starts(spans: Iterable[Span]) -> dict[tuple[int, int], float]:
    """Start of each (iteration, rank) that was measured, in us."""
    return {
        (int(span.detail["iteration"]), span.rank): span.start_us
        for span in spans
        if span.name == "iteration" and not span.is_planned
    }


def aligned_plan(spans: Iterable[Span], starts: dict[tuple[int, int], float]) -> Iterator[Span]:
    """The spans, planned ones moved to the earliest start of their iteration on any rank."""
    earliest: dict[int, float] = {}
    for (number, _), start_us in starts.items():
        earliest[number] = min(start_us, earliest.get(number, start_us))
    for span in spans:
        iteration = int(span.detail.get("iteration", 0))
        own = starts.get((iteration, span.rank))
        if not span.is_planned or own is None:
            yield span
            continue
        earlier_us = own - earliest[iteration]
        yield dataclasses.replace(
            span, start_us=span.start_us - earlier_us, end_us=span.end_us - earlier_us
        )


def _read_file(path: Path) -> Iterator[Span]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise HydraulisError(
            f"a trace is a file that --trace wrote: {path}: {error.strerror}; give its folder"
        ) from error
    lines = content.split(b"\n")
    is_closed = content.rstrip().endswith(b"]")
    for number, line in enumerate(lines, start=1):
        text = line.strip().rstrip(b",")
        if text in (b"", b"[", b"]"):
            continue
        try:
            event = json.loads(text)
        except ValueError as error:
            if number == len(lines) and not is_closed:
                return  # cut off when the run was killed
            raise HydraulisError(
                f"every line of {path} between its brackets is one event, but line {number} of "
                f"{len(lines)} is not ({error}); remove that line"
            ) from None
        span = span_of_event(event)
        if span is not None:
            yield span
