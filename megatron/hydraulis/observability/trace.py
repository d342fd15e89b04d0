"""Spans of a trace, what each rank did with its time, and files in the Trace Event Format.

Runs and simulations write the same spans, so prediction and measurement can be compared in one
view. While a run goes on there is one file per rank; at its end they are merged.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.observability.records import UnbufferedFile, set_aside

MERGED_FILE_NAME = "trace.json"
_RANK_FILES = "trace_rank_*.json"

DEFAULT_NUM_TRACED = 20
"""Number of iterations traced by default: enough to see a pattern, a few MB per rank."""

TRACKS = ("iteration", "compute", "regroup", "host")
"""The tracks of a rank, from top to bottom."""

PLANNED_PROCESS_OFFSET = 1_000_000
"""Planned spans of a rank are a separate process in the view: the rank plus this number."""

MAX_LANES = 100
"""Lanes of a track before the thread ids of the next track begin."""

NUMBERED_BY = ("micro_batch", "bucket", "iteration")
"""Details that number spans of one name: the first that a span has is part of its label."""

WORK = ("forward", "backward", "optimizer")
WAITS = (
    "pipeline wait",
    "gather wait",
    "scatter wait",
    "column gather wait",
    "column scatter wait",
    "planning wait",
)
TRANSFERS = ("gather", "scatter", "column gather", "column scatter")

_DECIMALS_OF_US = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A piece of work or a wait of one rank, measured or planned.

    Raises HydraulisError if the end is before the start, a time is not finite, or the name ends in
    a number.
    """

    rank: int
    track: str
    name: str
    start_us: float
    """Time since the start of the trace, by the clock of rank 0."""
    end_us: float
    is_planned: bool = False
    """True if it was predicted from the plan instead of measured."""
    detail: Mapping[str, int | str] = field(default_factory=dict)
    """Details for the view: ``iteration``, ``micro_batch``, ``stage``, ``bucket``, …"""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_us) and self.start_us <= self.end_us < math.inf):
            raise HydraulisError(
                f"a span starts before it ends, but '{self.name}' of rank {self.rank} starts at "
                f"{self.start_us} us and ends at {self.end_us} us; correct the code that records it"
            )
        if not self.name or self.name.rsplit(maxsplit=1)[-1].isdigit():
            raise HydraulisError(
                f"the name of a span ends in a word, but it is '{self.name}'; put the number into "
                "its detail"
            )

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def label(self) -> str:
        """The name with its number: 'forward 3'."""
        for key in NUMBERED_BY:
            if isinstance(self.detail.get(key), int):
                return f"{self.name} {self.detail[key]}"
        return self.name


@dataclass(frozen=True)
class Spans:
    """Some spans of a trace, by their start.

    For example: whether a scatter overlaps with the backward pass of rank 2 in iteration 5::

        rank = Spans.of(read_trace(folder)).where(rank=2, iteration=5, is_planned=False)
        rank.where(name="scatter").first_start_us < rank.where(name="backward").last_end_us

    The three times raise HydraulisError if there is no span.
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Spans:
        return cls(tuple(sorted(spans, key=lambda span: (span.start_us, -span.end_us))))

    def where(self, **wanted: int | str | bool) -> Spans:
        """The spans whose fields (``rank``, ``name``, ``track``, ``is_planned``) or details
        (``iteration``, ``micro_batch``, ``stage``, ``bucket``, …) have these values."""
        return Spans(
            tuple(
                span
                for span in self.spans
                if all(_value(span, key) == value for key, value in wanted.items())
            )
        )

    def named(self, *names: str) -> Spans:
        """The spans with one of these names."""
        return Spans(tuple(span for span in self.spans if span.name in names))

    def __or__(self, other: Spans) -> Spans:
        return Spans.of((*self.spans, *other.spans))

    def between(self, start_us: float, end_us: float) -> Spans:
        """The parts of the spans within a window."""
        return Spans(
            tuple(
                dataclasses.replace(
                    span, start_us=max(span.start_us, start_us), end_us=min(span.end_us, end_us)
                )
                for span in self.spans
                if span.start_us < end_us and span.end_us > start_us
            )
        )

    def values(self, key: str) -> list[int | str]:
        """A field or detail of each span, in their order; spans without it are skipped."""
        return [value for span in self.spans if (value := _value(span, key)) is not None]

    @property
    def first_start_us(self) -> float:
        return min(span.start_us for span in self._required())

    @property
    def last_end_us(self) -> float:
        return max(span.end_us for span in self._required())

    @property
    def total_us(self) -> float:
        """Time in which at least one of the spans runs."""
        total_us, until_us = 0.0, float("-inf")
        for span in self.spans:
            total_us += max(0.0, span.end_us - max(span.start_us, until_us))
            until_us = max(until_us, span.end_us)
        return total_us

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def _required(self) -> tuple[Span, ...]:
        if not self.spans:
            raise HydraulisError(
                "the trace has no such span whose time could be asked for; use fewer conditions in "
                "where()"
            )
        return self.spans


def _value(span: Span, key: str) -> int | str | bool | None:
    if key in ("rank", "name", "track", "is_planned"):
        value: int | str | bool = getattr(span, key)
        return value
    return span.detail.get(key)


class TraceWriter(UnbufferedFile):
    """Writes spans as a JSON array of trace events, one per line.

    Without `close` the closing bracket is missing; viewers and `read_trace` do not need it, so the
    file of a killed run can be read.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(
            Path(path),
            what="a trace",
            fix="free space there or choose another --trace folder",
            keeps_lines=False,
        )
        self._lanes = Lanes()
        self._separator = "\n"
        self.append(b"[")

    def write(self, spans: Iterable[Span]) -> None:
        """Appends spans; they use the fewest lanes if those of a track are sorted by start."""
        events = [event for span in spans for event in self._lanes.events_of(span)]
        if events:
            lines = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
            self.append(f"{self._separator}{lines}".encode())
            self._separator = ",\n"

    def close(self) -> None:
        if not self._file.closed:
            try:
                self.append(b"\n]\n")
            finally:
                super().close()


def rank_file(folder: str | Path, rank: int) -> Path:
    """``trace_rank_0003.json``."""
    return Path(folder) / f"trace_rank_{rank:04d}.json"


def rank_files(folder: str | Path) -> list[Path]:
    return sorted(Path(folder).glob(_RANK_FILES), key=lambda path: int(path.stem.rsplit("_")[-1]))


def set_aside_earlier_trace(folder: str | Path) -> Path | None:
    """Moves the files of an earlier trace, which may have had other ranks, into a subfolder.

    Returns and raises as `set_aside_earlier_run` does.
    """
    folder = Path(folder)
    found = [*rank_files(folder), folder / MERGED_FILE_NAME]
    return set_aside(folder, [path for path in found if path.exists()], "--trace")


def read_trace(path: str | Path) -> Spans:
    """Spans of one file, or of all ranks' files in a folder.

    If a folder has no files of ranks, its merged file is read. An unfinished last line, as a killed
    run leaves it, is ignored.

    Raises `HydraulisError` if there is no such file, or a complete line is not an event.
    """
    path = Path(path)
    paths = [path]
    if path.is_dir():
        paths = rank_files(path) or [path / MERGED_FILE_NAME]
    return Spans.of(span for file in paths for span in _read_file(file))


def merge_trace(folder: str | Path) -> Path:
    """Writes ``trace.json`` from the ranks' files, which are kept; returns its path.

    Planned spans of an iteration are shifted to the earliest start of that iteration on any rank,
    so that those of different ranks match.

    Raises `HydraulisError` as `read_trace` and `TraceWriter` do.
    """
    folder = Path(folder)
    files = rank_files(folder)
    if not files:
        raise HydraulisError(
            f"a trace is merged from the ranks' files but {folder} has none "
            f"({_RANK_FILES}); give the folder of --trace"
        )
    starts_us: dict[tuple[int, int], float] = {}
    earliest_us: dict[int, float] = {}
    for file in files:
        for span in _read_file(file):
            if span.name == "iteration" and not span.is_planned:
                number = int(span.detail["iteration"])
                starts_us[number, span.rank] = span.start_us
                earliest_us[number] = min(span.start_us, earliest_us.get(number, span.start_us))

    def aligned(span: Span) -> Span:
        number = int(span.detail.get("iteration", 0))
        own_us = starts_us.get((number, span.rank))
        if not span.is_planned or own_us is None:
            return span
        shift_us = own_us - earliest_us[number]
        return dataclasses.replace(
            span, start_us=span.start_us - shift_us, end_us=span.end_us - shift_us
        )

    with TraceWriter(folder / MERGED_FILE_NAME) as writer:
        for file in files:
            writer.write(map(aligned, _read_file(file)))
    return writer.path


def _read_file(path: Path) -> Iterator[Span]:
    try:
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no regular file")
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
        except (ValueError, RecursionError) as error:
            if number == len(lines) and not is_closed:
                return  # the run was killed while it wrote this line
            raise HydraulisError(
                f"every line of {path} between its brackets is one event, but line {number} of "
                f"{len(lines)} is not ({error}); remove that line"
            ) from None
        span = span_of_event(event)
        if span is not None:
            yield span


def event_of_span(span: Span, thread_id: int) -> dict[str, Any]:
    """The span as an event of phase ``X``; `span_of_event` is the inverse, to 1 ns."""
    start_us = round(span.start_us, _DECIMALS_OF_US)
    return {
        "ph": "X",
        "name": span.label,
        "cat": span.track,
        "pid": _process_id(span),
        "tid": thread_id,
        "ts": start_us,
        "dur": round(round(span.end_us, _DECIMALS_OF_US) - start_us, _DECIMALS_OF_US),
        "args": dict(span.detail),
    }


def span_of_event(event: Mapping[str, Any]) -> Span | None:
    """The span of an event that `event_of_span` made; None for metadata.

    Raises HydraulisError for any other event.
    """
    try:
        if event["ph"] == "M":
            return None
        if event["ph"] != "X":
            raise ValueError(f"phase {event['ph']!r}")
        pid, detail = int(event["pid"]), dict(event["args"])
        is_planned = pid >= PLANNED_PROCESS_OFFSET
        start_us = float(event["ts"])
        label = str(event["name"])
        is_numbered = any(isinstance(detail.get(key), int) for key in NUMBERED_BY)
        return Span(
            rank=pid - PLANNED_PROCESS_OFFSET if is_planned else pid,
            track=str(event["cat"]),
            name=label.rsplit(maxsplit=1)[0] if is_numbered else label,
            start_us=start_us,
            end_us=round(start_us + float(event["dur"]), _DECIMALS_OF_US),
            is_planned=is_planned,
            detail=detail,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise HydraulisError(
            f"an event of a trace is a span or metadata of this program, but {event!r:.200} is "
            f"not ({error!r}); give a folder that --trace wrote"
        ) from None


def _process_id(span: Span) -> int:
    return span.rank + PLANNED_PROCESS_OFFSET if span.is_planned else span.rank


def free_lane(ends_us: list[float], span: Span) -> int:
    """The first lane that is free from the span's start on; a new one if there is none.

    Args:
        ends_us: end of the last span of each lane; the span's end becomes that of its lane.
    """
    for lane, end_us in enumerate(ends_us):
        if end_us <= span.start_us:
            ends_us[lane] = span.end_us
            return lane
    ends_us.append(span.end_us)
    return len(ends_us) - 1


class Lanes:
    """Assigns each span to a lane of its track, which is a thread of the view.

    A viewer draws spans of one thread as nested calls. Spans that overlap in another way would be
    drawn wrongly or not at all.
    """

    def __init__(self) -> None:
        self._ends_us: dict[int, dict[str, list[float]]] = {}

    def events_of(self, span: Span) -> list[dict[str, Any]]:
        """The span's event; then, if they are new, the names of its thread and process."""
        process = _process_id(span)
        is_new_process = process not in self._ends_us
        ends_us = self._ends_us.setdefault(process, {}).setdefault(span.track, [])
        num_lanes = len(ends_us)
        lane = free_lane(ends_us, span)
        track = TRACKS.index(span.track) if span.track in TRACKS else len(TRACKS)
        thread = 1 + track * MAX_LANES + lane
        events = [event_of_span(span, thread)]

        def name(kind: str, thread: int, text: str, place: int) -> None:
            for what, value in (("name", text), ("sort_index", place)):
                args = {"pid": process, "tid": thread, "args": {what: value}}
                events.append({"ph": "M", "name": f"{kind}_{what}", **args})

        if lane == num_lanes:
            name("thread", thread, f"{span.track} ({lane + 1})" if lane else span.track, thread)
        if is_new_process:
            # The plan of a rank is shown right above what was measured.
            place = 2 * span.rank + (not span.is_planned)
            name("process", 0, f"rank {span.rank}" + " planned" * span.is_planned, place)
        return events


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShares:
    """Times of one rank in its traced iterations, in us; evaluation between them is left out.

    ``busy_us + wait_us + idle_us`` is ``window_us``.
    """

    rank: int
    window_us: float
    forward_us: float
    backward_us: float
    busy_us: float
    """Time of forward, backward and optimizer without the waits within them."""
    wait_us: float
    """Time spent waiting for a pipeline neighbour, for regrouping or for a plan."""
    transfer_us: float
    """Time with a transfer of parameters or gradients in progress."""
    hidden_us: float
    """The part of ``transfer_us`` in which the rank is busy."""
    planned_us: float
    """Forward and backward by the plans."""

    @property
    def idle_us(self) -> float:
        return max(0.0, self.window_us - self.busy_us - self.wait_us)


def rank_shares(spans: Spans) -> list[RankShares]:
    """Shares of every rank with measured spans, by rank."""
    measured, planned = spans.where(is_planned=False), spans.where(is_planned=True)
    ranks = sorted({span.rank for span in measured})
    return [
        _shares_of_rank(rank, measured.where(rank=rank), planned.where(rank=rank)) for rank in ranks
    ]


def _shares_of_rank(rank: int, measured: Spans, planned: Spans) -> RankShares:
    windows = [_window(measured, whole) for whole in measured.where(name="iteration")]
    parts = [measured.between(start_us, end_us) for start_us, end_us in windows]
    return RankShares(
        rank=rank,
        window_us=sum(end_us - start_us for start_us, end_us in windows),
        forward_us=sum(part.where(name="forward").total_us for part in parts),
        backward_us=sum(part.where(name="backward").total_us for part in parts),
        busy_us=sum(_busy_us(part) for part in parts),
        wait_us=sum(part.named(*WAITS).total_us for part in parts),
        transfer_us=sum(part.named(*TRANSFERS).total_us for part in parts),
        hidden_us=sum(_hidden_us(part) for part in parts),
        planned_us=sum(span.duration_us for span in planned.named("forward", "backward")),
    )


def _window(measured: Spans, whole: Span) -> tuple[float, float]:
    """Start and end of an iteration, with the wait for its plan."""
    number = int(whole.detail["iteration"])
    waits = measured.where(name="planning wait", iteration=number)
    return min([whole.start_us, *(wait.start_us for wait in waits)]), whole.end_us


def _busy_us(spans: Spans) -> float:
    work, waits = spans.named(*WORK), spans.named(*WAITS)
    return (work | waits).total_us - waits.total_us


def _hidden_us(spans: Spans) -> float:
    """Time of transfers without what is outside work and waits, and without what is in waits."""
    work, waits, transfers = (spans.named(*names) for names in (WORK, WAITS, TRANSFERS))
    alone_us = (work | waits | transfers).total_us - (work | waits).total_us
    waited_for_us = waits.total_us + transfers.total_us - (waits | transfers).total_us
    return max(0.0, transfers.total_us - alone_us - waited_for_us)


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """The traced iterations: ``first`` to ``last``, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ConfigurationError(
                f"--trace-iterations are counted from 1 in ascending order but are "
                f"{self.first}..{self.last}; give for example 1..{DEFAULT_NUM_TRACED}"
            )

    @classmethod
    def parse(cls, text: str) -> TraceWindow:
        """'5..12', or '7' for one iteration. Raises ConfigurationError."""
        found = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", text)
        if found is None:
            raise ConfigurationError(
                f"--trace-iterations is FIRST..LAST but is '{text}'; give for example "
                f"1..{DEFAULT_NUM_TRACED}"
            )
        first = int(found[1])
        return cls(first, int(found[2] or first))

    @classmethod
    def starting_at(cls, iteration: int) -> TraceWindow:
        """The default: the first iterations of a run that starts or resumes with this one."""
        return cls(iteration, iteration + DEFAULT_NUM_TRACED - 1)

    def __contains__(self, iteration: int) -> bool:
        return self.first <= iteration <= self.last


@dataclass(frozen=True, slots=True)
class BarrierStamps:
    """The clock of one rank before and after each of a few barriers of all ranks."""

    clock: str
    """Name of the clock: ranks on one booted machine share one."""
    before_ns: tuple[int, ...]
    after_ns: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A rank's clock minus rank 0's at the same moment."""

    offset_ns: int
    error_ns: int
    """Upper bound of the error of the offset; 0 for the same clock."""


def clock_offsets(stamps: Sequence[BarrierStamps]) -> list[ClockOffset]:
    """Offset of every rank's clock to that of rank 0.

    No rank leaves a barrier before every rank has entered it. With d the offset of rank r, each
    barrier therefore shows ``before_r - after_0 <= d <= after_r - before_0``; the offset is the
    middle of the intersection, as in NTP (RFC 5905). Ranks of one machine share a clock and the
    bounds of all of them. All ranks pass the same barriers, at least one.
    """
    reference = stamps[0]
    bounds: dict[str, tuple[int, int]] = {}
    for own in stamps:
        lower = max(b - a for b, a in zip(own.before_ns, reference.after_ns, strict=True))
        upper = min(a - b for a, b in zip(own.after_ns, reference.before_ns, strict=True))
        known = bounds.get(own.clock, (lower, upper))
        bounds[own.clock] = (max(lower, known[0]), min(upper, known[1]))
    bounds[reference.clock] = (0, 0)
    return [
        ClockOffset((lower + upper) // 2, max(0, upper - lower + 1) // 2)
        for lower, upper in (bounds[own.clock] for own in stamps)
    ]
