"""Spans of each micro-batch, from the timers that Megatron's schedules start and stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.model_parallel_config import ModelParallelConfig

from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder

_SPAN_OF_TIMER = {"forward-compute": "forward", "backward-compute": "backward"}
_MESSAGE_ENDINGS = ("-send", "-recv")


@contextmanager
def schedule_spans(
    config: ModelParallelConfig, spans: SpanRecorder, *, stage: int
) -> Iterator[None]:
    """Tell ``spans`` what a schedule of Megatron does with a model of this configuration.

    ``config.timers`` is upstream's own hook: its schedules start and stop ``forward-compute`` and
    ``backward-compute`` around each micro-batch (loss function included), and its communicator a
    timer around each message. In a schedule, the k-th forward and the k-th backward of a stage are
    those of its k-th micro-batch.
    """
    if spans is NO_SPANS:
        yield
        return
    before, config.timers = config.timers, _ScheduleTimers(spans, stage)
    try:
        yield
    finally:
        config.timers = before


class _ScheduleTimers:
    """In the place of ``megatron.core.timers.Timers``."""

    def __init__(self, spans: SpanRecorder, stage: int) -> None:
        self._spans = spans
        self._stage = stage
        self._timers: dict[str, _Timer] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        timer = self._timers.get(name)
        if timer is None:
            timer = self._timers[name] = self._new(name)
        return timer

    def _new(self, name: str) -> _Timer:
        if name in _SPAN_OF_TIMER:
            return _MicroBatchTimer(self._spans, _SPAN_OF_TIMER[name], self._stage)
        if name.endswith(_MESSAGE_ENDINGS):
            return _MessageTimer(self._spans, name, self._stage)
        return _Timer()


class _Timer:
    """One that measures nothing: the schedule as a whole."""

    def start(self, barrier: bool = False) -> None:
        return None

    def stop(self, barrier: bool = False) -> None:
        return None


class _MicroBatchTimer(_Timer):
    def __init__(self, spans: SpanRecorder, name: str, stage: int) -> None:
        self._spans, self._name, self._stage = spans, name, stage
        self._num_started = 0
        self._handle = 0

    def start(self, barrier: bool = False) -> None:
        self._handle = self._spans.begin(
            self._name, micro_batch=self._num_started, stage=self._stage
        )
        self._num_started += 1

    def stop(self, barrier: bool = False) -> None:
        self._spans.end(self._handle)


class _MessageTimer(_Timer):
    def __init__(self, spans: SpanRecorder, message: str, stage: int) -> None:
        self._spans, self._message, self._stage = spans, message, stage
        self._handle = 0

    def start(self, barrier: bool = False) -> None:
        self._handle = self._spans.begin("pipeline wait", message=self._message, stage=self._stage)

    def stop(self, barrier: bool = False) -> None:
        self._spans.end(self._handle)
