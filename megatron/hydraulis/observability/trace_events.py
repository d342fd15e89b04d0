"""Spans of a trace, and how they stand in the Trace Event Format (Chrome, Perfetto).

Whatever has spans to show, a run or a simulation, writes them by these types; so prediction and
measurement overlay in one view.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron.hydraulis.errors import HydraulisError

__all__ = [
    "TRACKS",
    "Span",
    "complete_event",
    "metadata_events",
    "process_id",
    "span_of_event",
]

TRACKS = ("iteration", "compute", "regroup", "host")
"""The tracks of a rank, from top to bottom."""

PLANNED_PROCESS_OFFSET = 1_000_000
"""A rank's planned spans are a process of their own in the view, this much above its number."""

NUMBERED_BY = ("micro_batch", "bucket", "iteration")
"""Details that number spans of one name: the first that a span has goes into its label."""

_DECIMALS_OF_US = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What one rank did, or was to do, from when to when.

    Raises HydraulisError for an end before the start, a time that is not finite or a name that ends
    in a number.
    """

    rank: int
    track: str
    name: str
    start_us: float
    """Since the start of the trace, by the clock of rank 0."""
    end_us: float
    is_planned: bool = False
    """Whether it was predicted from the plan instead of measured."""
    detail: Mapping[str, int | str] = field(default_factory=dict)
    """What the view shows of it: ``iteration``, ``micro_batch``, ``stage``, ``bucket``, …"""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.start_us) and self.start_us <= self.end_us < math.inf):
            raise HydraulisError(
                f"a span starts before it ends, but '{self.name}' of rank {self.rank} starts at "
                f"{self.start_us} us and ends at {self.end_us} us; correct what recorded it"
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
        """The name with the number that tells it from its neighbours: 'forward 3'."""
        for key in NUMBERED_BY:
            if isinstance(self.detail.get(key), int):
                return f"{self.name} {self.detail[key]}"
        return self.name


def process_id(rank: int, *, is_planned: bool) -> int:
    """The ``pid`` under which a rank's spans stand."""
    return rank + PLANNED_PROCESS_OFFSET if is_planned else rank


def complete_event(span: Span, thread_id: int) -> dict[str, Any]:
    """The span as an event of phase ``X``; `span_of_event` is its inverse, to 1 ns."""
    start_us = round(span.start_us, _DECIMALS_OF_US)
    return {
        "ph": "X",
        "name": span.label,
        "cat": span.track,
        "pid": process_id(span.rank, is_planned=span.is_planned),
        "tid": thread_id,
        "ts": start_us,
        "dur": round(round(span.end_us, _DECIMALS_OF_US) - start_us, _DECIMALS_OF_US),
        "args": dict(span.detail),
    }


def metadata_events(
    rank: int, *, is_planned: bool, thread_id: int, track: str, lane: int, names_process: bool
) -> list[dict[str, Any]]:
    """What names a thread of the view, and its process if it is the first thread there."""
    pid = process_id(rank, is_planned=is_planned)
    thread = track if lane == 0 else f"{track} ({lane + 1})"
    events = [
        _metadata("thread_name", pid, thread_id, {"name": thread}),
        _metadata("thread_sort_index", pid, thread_id, {"sort_index": thread_id}),
    ]
    if names_process:
        name = f"rank {rank} planned" if is_planned else f"rank {rank}"
        events += [
            _metadata("process_name", pid, 0, {"name": name}),
            # The plan of a rank stands right above what became of it.
            _metadata("process_sort_index", pid, 0, {"sort_index": 2 * rank + (not is_planned)}),
        ]
    return events


def span_of_event(event: Mapping[str, Any]) -> Span | None:
    """The span of an event that `complete_event` wrote; None for metadata.

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
        numbered = any(isinstance(detail.get(key), int) for key in NUMBERED_BY)
        return Span(
            rank=pid - PLANNED_PROCESS_OFFSET if is_planned else pid,
            track=str(event["cat"]),
            name=label.rsplit(maxsplit=1)[0] if numbered else label,
            start_us=start_us,
            end_us=round(start_us + float(event["dur"]), _DECIMALS_OF_US),
            is_planned=is_planned,
            detail=detail,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise HydraulisError(
            f"an event of a trace is a span or metadata of this program, but {dict(event)!r} is "
            f"not ({error!r}); give a folder that --trace wrote"
        ) from None


def _metadata(name: str, pid: int, tid: int, what: dict[str, int | str]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": what}
