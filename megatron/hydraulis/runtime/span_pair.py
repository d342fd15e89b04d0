"""Two recorders in the place of one."""

from __future__ import annotations

import threading

from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder

__all__ = ["SpanPair", "told"]


class SpanPair:
    """A `SpanRecorder` that tells two others. Threads may share it."""

    def __init__(self, first: SpanRecorder, second: SpanRecorder) -> None:
        self._recorders = (first, second)
        self._handles: dict[int, tuple[int, int]] = {}
        self._num_begun = 0
        self._lock = threading.Lock()

    def begin(self, name: str, **detail: int | str) -> int:
        """A span begins for both."""
        first, second = (recorder.begin(name, **detail) for recorder in self._recorders)
        with self._lock:
            self._num_begun += 1
            self._handles[self._num_begun] = (first, second)
            return self._num_begun

    def end(self, handle: int) -> None:
        """It ends for both."""
        with self._lock:
            handles = self._handles.pop(handle)
        for recorder, own in zip(self._recorders, handles, strict=True):
            recorder.end(own)


def told(*recorders: SpanRecorder) -> SpanRecorder:
    """One recorder in the place of any number: `NO_SPANS` of none, which costs nothing."""
    whole = NO_SPANS
    for recorder in recorders:
        whole = recorder if whole is NO_SPANS else SpanPair(whole, recorder)
    return whole
