"""Spans: what a rank did from when to when, measured without a place in the code that measures."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.hydraulis.errors import HydraulisError

COMPUTE, REGROUP, HOST = "compute", "regroup", "host"
ALL_TRACKS = frozenset((COMPUTE, REGROUP, HOST))

TRACK_OF_SPAN = {
    "forward": COMPUTE,
    "backward": COMPUTE,
    "pipeline wait": COMPUTE,
    "optimizer": COMPUTE,
    "gather": REGROUP,
    "scatter": REGROUP,
    "gather wait": HOST,
    "scatter wait": HOST,
    "planning wait": HOST,
}
"""The spans there are and their tracks. Spans of 'compute' and of 'host' follow one another, those
of 'regroup' may overlap: an asynchronous collective begins when it is posted and ends when it is
known to be complete."""

HOST_TIMED = frozenset({"planning wait"})
"""Waits of the host itself. For a gather or a scatter it is the device's stream that waits."""

_NOT_KEPT = 0
"""The handle of a span that nobody keeps."""


class SpanRecorder(Protocol):
    """What an engine tells of its work."""

    def begin(self, name: str, **detail: int | str) -> int:
        """A span begins; returns the handle to end it with."""
        ...

    def end(self, handle: int) -> None:
        """The span has ended."""
        ...


class _NoSpans:
    """Measures nothing."""

    def begin(self, name: str, **detail: int | str) -> int:
        return _NOT_KEPT

    def end(self, handle: int) -> None:
        return None


NO_SPANS: SpanRecorder = _NoSpans()


class Clock(Protocol):
    """Gives stamps at once, and says what they mean when somebody has time to ask."""

    def stamp(self) -> Any:
        """The present."""
        ...

    def times_ns(self, stamps: Sequence[Any]) -> list[int]:
        """The stamps on the axis of ``time.perf_counter_ns``, in ns; may wait for a device."""
        ...


class HostClock:
    """``time.perf_counter_ns``."""

    def stamp(self) -> int:
        return time.perf_counter_ns()

    def times_ns(self, stamps: Sequence[int]) -> list[int]:
        return list(stamps)


@dataclass(frozen=True)
class RecordedSpan:
    """One measured span."""

    name: str
    start_ns: int
    """By ``time.perf_counter_ns``."""
    end_ns: int
    detail: Mapping[str, int | str] = field(default_factory=dict)

    @property
    def track(self) -> str:
        return TRACK_OF_SPAN[self.name]


@dataclass
class _Open:
    name: str
    detail: Mapping[str, int | str]
    start: Any
    end: Any = None


class MemoryRecorder:
    """Keeps spans until they are taken. Threads may share it.

    Args:
        device_clock: for what a device does, maybe long after it was told to: all spans but those
            of `HOST_TIMED`. Without it the host's clock serves for all.
    """

    def __init__(self, device_clock: Clock | None = None) -> None:
        self._host_clock: Clock = HostClock()
        self._device_clock = self._host_clock if device_clock is None else device_clock
        self._open: dict[int, _Open] = {}
        self._ended: list[_Open] = []
        self._num_begun = 0
        self._lock = threading.Lock()
        self.tracks: frozenset[str] = ALL_TRACKS
        """The tracks whose spans are kept, of those that begin from now on."""
        self.common_detail: dict[str, int | str] = {}
        """Goes with every span that begins, unless its own detail says otherwise."""

    def begin(self, name: str, **detail: int | str) -> int:
        """A span begins, under a name of `TRACK_OF_SPAN`; returns its handle."""
        clock = self._clock(name)
        if TRACK_OF_SPAN[name] not in self.tracks:
            return _NOT_KEPT
        span = _Open(name, self.common_detail | detail, clock.stamp())
        with self._lock:
            self._num_begun += 1
            self._open[self._num_begun] = span
            return self._num_begun

    def end(self, handle: int) -> None:
        """The span has ended. Raises HydraulisError for a handle that is not open."""
        if handle == _NOT_KEPT:
            return
        with self._lock:
            span = self._open.pop(handle, None)
        if span is None:
            raise HydraulisError(
                f"a span ends once but handle {handle} of {self._num_begun} is not open; end "
                "every span with the handle that its begin returned"
            )
        span.end = self._clock(span.name).stamp()
        with self._lock:
            self._ended.append(span)

    def take(self) -> list[RecordedSpan]:
        """The spans that have ended since the last call, by their start; open ones stay."""
        with self._lock:
            ended, self._ended = self._ended, []
        taken: list[RecordedSpan] = []
        for clock in {id(c): c for c in (self._host_clock, self._device_clock)}.values():
            own = [span for span in ended if self._clock(span.name) is clock]
            starts = clock.times_ns([span.start for span in own])
            ends = clock.times_ns([span.end for span in own])
            taken += [
                RecordedSpan(span.name, start, max(start, end), span.detail)
                for span, start, end in zip(own, starts, ends, strict=True)
            ]
        return sorted(taken, key=lambda span: (span.start_ns, -span.end_ns))

    def _clock(self, name: str) -> Clock:
        if name not in TRACK_OF_SPAN:
            known = ", ".join(f"'{known}'" for known in TRACK_OF_SPAN)
            raise HydraulisError(
                f"there is no span '{name}'; use one of {known} or add it to TRACK_OF_SPAN"
            )
        return self._host_clock if name in HOST_TIMED else self._device_clock
