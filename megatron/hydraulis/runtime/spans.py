"""Spans: what a rank did from when to when, recorded without slowing down what is measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from megatron.core.model_parallel_config import ModelParallelConfig

from megatron.hydraulis.errors import HydraulisError

COMPUTE, REGROUP, HOST = "compute", "regroup", "host"
ALL_TRACKS = frozenset((COMPUTE, REGROUP, HOST))
NO_TRACKS: frozenset[str] = frozenset()

TRACK_OF_SPAN = {
    "forward": COMPUTE,
    "backward": COMPUTE,
    "pipeline wait": COMPUTE,
    "optimizer": COMPUTE,
    "gather": REGROUP,
    "scatter": REGROUP,
    "column gather": REGROUP,
    "column scatter": REGROUP,
    "gather wait": HOST,
    "scatter wait": HOST,
    "column gather wait": HOST,
    "column scatter wait": HOST,
    "planning wait": HOST,
}
"""All span names and their tracks. Spans of 'compute' and of 'host' follow one another, those of
'regroup' may overlap: an asynchronous collective begins when it is posted and ends when it is known
to be complete."""

HOST_TIMED = frozenset({"planning wait"})
"""Waits of the host. For a gather or a scatter the device's stream waits."""

_NS_PER_MS = 1e6
_MS_PER_S = 1e3


class SpanRecorder(Protocol):
    """Receives the spans of an engine."""

    def begin(self, name: str, **detail: int | str) -> Any:
        """Begin a span; returns the handle to end it with."""
        ...

    def end(self, handle: Any) -> None:
        """End a span."""
        ...


class _NoSpans:
    """Records nothing."""

    def begin(self, name: str, **detail: int | str) -> None:
        return None

    def end(self, handle: None) -> None:
        return None


NO_SPANS: SpanRecorder = _NoSpans()


class Clock(Protocol):
    """Takes stamps at once and converts them to times later."""

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
class _Stamp:
    event: torch.cuda.Event
    base: torch.cuda.Event
    base_ns: int
    """Time at which the host saw the base complete."""


class CudaClock:
    """A `Clock` of CUDA events on the current stream.

    `times_ns` waits until the device has passed the stamps; call it at the end of an iteration.
    Times are differences to a base event, which is placed on the host's axis at the moment when the
    host saw it complete: late by the duration of a synchronisation, some microseconds. Each
    `times_ns` takes a new base because differences have single precision.
    """

    def __init__(self) -> None:
        self._take_base()

    def stamp(self) -> _Stamp:
        return _Stamp(_recorded_event(), *self._base)

    def times_ns(self, stamps: Sequence[_Stamp]) -> list[int]:
        for stamp in stamps:
            stamp.event.synchronize()
        times = [
            stamp.base_ns + round(stamp.base.elapsed_time(stamp.event) * _NS_PER_MS)
            for stamp in stamps
        ]
        self._take_base()
        return times

    def _take_base(self) -> None:
        event = _recorded_event()
        event.synchronize()
        # One attribute, as the threads of backward passes stamp too.
        self._base = event, time.perf_counter_ns()


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class HostStamp:
    """A moment of the host."""

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def s_until(self, later: HostStamp) -> float | None:
        """Time to a later moment; None where it is not known yet."""
        return later._time_s - self._time_s


class CudaStamp:
    """The moment at which the current CUDA stream has done all that was queued before."""

    def __init__(self) -> None:
        self._event = _recorded_event()

    def s_until(self, later: CudaStamp) -> float | None:
        """Time to a later moment; None where the stream has not reached it. Never waits."""
        if not later._event.query():
            return None
        return self._event.elapsed_time(later._event) / _MS_PER_S


@dataclass(frozen=True)
class RecordedSpan:
    """One measured span."""

    name: str
    start_ns: int
    """Start by ``time.perf_counter_ns``."""
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
    """Keeps spans until they are taken. Thread-safe.

    Args:
        device_clock: times all spans except those of `HOST_TIMED`, since a device may do its work
            long after the host queued it. The host's clock by default.
    """

    def __init__(self, device_clock: Clock | None = None) -> None:
        self._host_clock: Clock = HostClock()
        self._device_clock = self._host_clock if device_clock is None else device_clock
        self._ended: list[_Open] = []
        self._lock = threading.Lock()
        self.tracks: frozenset[str] = ALL_TRACKS
        """Only spans of these tracks are recorded, from the next `begin` on."""
        self.common_detail: dict[str, int | str] = {}
        """Detail of every span that begins, unless the span's own detail has the same key."""

    def begin(self, name: str, **detail: int | str) -> _Open | None:
        """Begin a span of a name in `TRACK_OF_SPAN`; None where its track is not recorded."""
        clock = self._clock(name)
        if TRACK_OF_SPAN[name] not in self.tracks:
            return None
        return _Open(name, self.common_detail | detail, clock.stamp())

    def end(self, handle: _Open | None) -> None:
        """End a span. Raises HydraulisError for one that has ended."""
        if handle is None:
            return
        if handle.end is not None:
            raise HydraulisError(
                f"a span ends once but this '{handle.name}' is not open; end every span with the "
                "handle that its begin returned"
            )
        handle.end = self._clock(handle.name).stamp()
        with self._lock:
            self._ended.append(handle)

    def take(self) -> list[RecordedSpan]:
        """The spans that have ended since the last call, by start; open ones stay."""
        with self._lock:
            ended, self._ended = self._ended, []
        taken: list[RecordedSpan] = []
        for clock in {id(c): c for c in (self._host_clock, self._device_clock)}.values():
            timed = [span for span in ended if self._clock(span.name) is clock]
            starts = clock.times_ns([span.start for span in timed])
            ends = clock.times_ns([span.end for span in timed])
            taken += [
                RecordedSpan(span.name, start, max(start, end), span.detail)
                for span, start, end in zip(timed, starts, ends, strict=True)
            ]
        return sorted(taken, key=lambda span: (span.start_ns, -span.end_ns))

    def _clock(self, name: str) -> Clock:
        if name not in TRACK_OF_SPAN:
            known = ", ".join(f"'{known}'" for known in TRACK_OF_SPAN)
            raise HydraulisError(
                f"there is no span '{name}'; use one of {known} or add it to TRACK_OF_SPAN"
            )
        return self._host_clock if name in HOST_TIMED else self._device_clock


def combine_recorders(*recorders: SpanRecorder) -> SpanRecorder:
    """One recorder that forwards to all given ones; `NO_SPANS` where there are none."""
    if not recorders:
        return NO_SPANS
    return recorders[0] if len(recorders) == 1 else _CombinedRecorder(recorders)


class _CombinedRecorder:
    """Forwards every span to several recorders."""

    def __init__(self, recorders: Sequence[SpanRecorder]) -> None:
        self._recorders = recorders

    def begin(self, name: str, **detail: int | str) -> list[Any]:
        return [recorder.begin(name, **detail) for recorder in self._recorders]

    def end(self, handle: list[Any]) -> None:
        for recorder, its_handle in zip(self._recorders, handle, strict=True):
            recorder.end(its_handle)


@contextmanager
def schedule_spans(
    config: ModelParallelConfig, spans: SpanRecorder, *, stage: int
) -> Iterator[None]:
    """Record the spans of a Megatron schedule that runs a model of this configuration.

    ``config.timers`` is upstream's own hook: its schedules start and stop ``forward-compute`` and
    ``backward-compute`` around each micro-batch (loss function included), and its communicator a
    timer around each message. In a schedule, the k-th forward and the k-th backward of a stage are
    those of its k-th micro-batch.
    """
    if spans is NO_SPANS:
        yield
        return
    before = config.timers
    timers = cache(lambda name: _ScheduleTimer(spans, name, stage))
    config.timers = lambda name, log_level=None: timers(name)
    try:
        yield
    finally:
        config.timers = before


_SPAN_OF_TIMER = {"forward-compute": "forward", "backward-compute": "backward"}
_MESSAGE_ENDINGS = ("-send", "-recv")


class _ScheduleTimer:
    """One timer of ``megatron.core.timers.Timers``, without effect for the schedule as a whole."""

    def __init__(self, spans: SpanRecorder, name: str, stage: int) -> None:
        self._spans, self._name, self._stage = spans, name, stage
        self._is_message = name.endswith(_MESSAGE_ENDINGS)
        self._span = "pipeline wait" if self._is_message else _SPAN_OF_TIMER.get(name)
        self._num_started = 0
        self._handle: Any = None

    def start(self, barrier: bool = False) -> None:
        if self._span is not None:
            which: dict[str, int | str] = {"micro_batch": self._num_started}
            if self._is_message:
                which = {"message": self._name}
            self._handle = self._spans.begin(self._span, **which, stage=self._stage)
            self._num_started += 1

    def stop(self, barrier: bool = False) -> None:
        if self._span is not None:
            self._spans.end(self._handle)
