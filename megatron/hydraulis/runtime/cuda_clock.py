"""Stamps in the device's own order of work, so that measuring never waits for it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_NS_PER_MS = 1e6
_MS_PER_S = 1e3


class CudaStamp:
    """A moment of the current CUDA stream: when it has done all that was queued before."""

    def __init__(self) -> None:
        self._event = _recorded()

    def s_until(self, later: CudaStamp) -> float | None:
        """Time to a later moment; None where the stream has not come to it. Never waits."""
        if not later._event.query():
            return None
        return self._event.elapsed_time(later._event) / _MS_PER_S


@dataclass(frozen=True)
class _Base:
    """An event whose time on the host is known."""

    event: torch.cuda.Event
    time_ns: int


@dataclass(frozen=True)
class _Stamp:
    event: torch.cuda.Event
    base: _Base


class CudaClock:
    """A `Clock` of CUDA events on the current stream.

    `times_ns` waits until the device has passed the stamps, so it belongs at the end of an
    iteration. Times are differences to a base event whose place on the host's axis is the moment
    at which the host saw it done: late by what a synchronisation takes, some microseconds. A
    newer base is taken at every `times_ns`, for a difference comes in single precision.
    """

    def __init__(self) -> None:
        self._base = _new_base()

    def stamp(self) -> _Stamp:
        return _Stamp(_recorded(), self._base)

    def times_ns(self, stamps: Sequence[_Stamp]) -> list[int]:
        for stamp in stamps:
            stamp.event.synchronize()
        times = [
            stamp.base.time_ns + round(stamp.base.event.elapsed_time(stamp.event) * _NS_PER_MS)
            for stamp in stamps
        ]
        self._base = _new_base()
        return times


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _new_base() -> _Base:
    event = _recorded()
    event.synchronize()
    return _Base(event, time.perf_counter_ns())
