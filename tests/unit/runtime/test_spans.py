"""The recorder in memory, and the spans of a schedule's timers."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.runtime.spans import (
    ALL_TRACKS,
    COMPUTE,
    HOST,
    NO_SPANS,
    MemoryRecorder,
    combine_recorders,
    schedule_spans,
)


class LazyClock:
    """As CUDA events: a stamp is a ticket, its time is known only on request."""

    def __init__(self) -> None:
        self.num_stamps = 0
        self.asked: list[int] = []

    def stamp(self) -> int:
        self.num_stamps += 1
        return self.num_stamps

    def times_ns(self, stamps: Sequence[int]) -> list[int]:
        self.asked += stamps
        return [1000 * stamp for stamp in stamps]


def test_spans_are_kept_until_taken() -> None:
    recorder = MemoryRecorder()
    recorder.common_detail = {"iteration": 3}
    gather = recorder.begin("gather", bucket=0)
    forward = recorder.begin("forward", micro_batch=1, iteration=4)
    recorder.end(forward)
    (first,) = recorder.take()
    assert (first.name, first.track) == ("forward", "compute")
    assert first.detail == {"iteration": 4, "micro_batch": 1}
    assert 0 < first.start_ns <= first.end_ns
    recorder.end(gather)
    (second,) = recorder.take()
    assert (second.name, second.track) == ("gather", "regroup")
    assert second.detail == {"iteration": 3, "bucket": 0}
    assert second.start_ns <= first.start_ns
    assert recorder.take() == []


def test_device_times_are_read_only_when_spans_are_taken() -> None:
    clock = LazyClock()
    recorder = MemoryRecorder(clock)
    still_open = recorder.begin("gather", bucket=1)
    for _ in range(2):
        recorder.end(recorder.begin("forward"))
    recorder.end(recorder.begin("planning wait"))
    recorder.end(recorder.begin("gather wait"))
    assert (clock.num_stamps, clock.asked) == (7, [])
    taken = recorder.take()
    assert sorted(clock.asked) == [2, 3, 4, 5, 6, 7], "neither open spans nor those of the host"
    device = [(s.name, s.start_ns, s.end_ns) for s in taken if s.name != "planning wait"]
    assert device == [
        ("forward", 2000, 3000),
        ("forward", 4000, 5000),
        ("gather wait", 6000, 7000),
    ]
    recorder.end(still_open)
    assert [(s.start_ns, s.end_ns) for s in recorder.take()] == [(1000, 8000)]


def test_a_disabled_track_records_nothing() -> None:
    recorder = MemoryRecorder()
    early = recorder.begin("forward")
    recorder.tracks = ALL_TRACKS - {"compute"}
    unkept, other = recorder.begin("optimizer"), recorder.begin("gather")
    recorder.end(early)
    recorder.tracks = ALL_TRACKS
    recorder.end(unkept)
    recorder.end(other)
    assert [span.name for span in recorder.take()] == ["forward", "gather"]


def test_threads_may_share_a_recorder() -> None:
    recorder = MemoryRecorder()

    def record(track: int) -> None:
        for number in range(2000):
            recorder.end(recorder.begin("gather", bucket=number, unit=track))

    threads = [threading.Thread(target=record, args=(track,)) for track in range(4)]
    for thread in threads:
        thread.start()
    taken = []
    while any(thread.is_alive() for thread in threads):
        taken += recorder.take()
    taken += recorder.take()
    assert len({(s.detail["bucket"], s.detail["unit"]) for s in taken}) == len(taken) == 8000


def test_misuse_is_named() -> None:
    recorder = MemoryRecorder()
    with pytest.raises(HydraulisError, match="there is no span 'lunch'"):
        recorder.begin("lunch")
    handle = recorder.begin("forward")
    recorder.end(handle)
    with pytest.raises(HydraulisError, match="is not open"):
        recorder.end(handle)


def run_schedule(config: Any) -> None:
    """As upstream's schedules use their timers."""
    config.timers("forward-backward", log_level=1).start(barrier=False)
    for _ in range(2):
        config.timers("forward-recv", log_level=2).start()
        config.timers("forward-recv").stop()
        config.timers("forward-compute", log_level=2).start()
        config.timers("forward-compute").stop()
    for _ in range(2):
        config.timers("backward-compute", log_level=2).start()
        config.timers("backward-compute").stop()
    config.timers("forward-backward").stop()


def test_timers_of_a_schedule_become_spans() -> None:
    recorder = MemoryRecorder()
    config: Any = SimpleNamespace(timers=None)
    with schedule_spans(config, recorder, stage=1):
        run_schedule(config)
    assert config.timers is None
    recorded = [(span.name, *span.detail.values()) for span in recorder.take()]
    assert recorded == [
        ("pipeline wait", "forward-recv", 1),
        ("forward", 0, 1),
        ("pipeline wait", "forward-recv", 1),
        ("forward", 1, 1),
        ("backward", 0, 1),
        ("backward", 1, 1),
    ]


def test_upstreams_timers_stay_if_nothing_is_measured() -> None:
    timers = object()
    config: Any = SimpleNamespace(timers=timers)
    with schedule_spans(config, NO_SPANS, stage=0):
        assert config.timers is timers
    with (
        pytest.raises(RuntimeError, match="broken"),
        schedule_spans(config, MemoryRecorder(), stage=0),
    ):
        raise RuntimeError("broken")
    assert config.timers is timers


def test_every_combined_recorder_keeps_its_own_tracks() -> None:
    first, second = MemoryRecorder(), MemoryRecorder()
    first.tracks, second.tracks = frozenset({COMPUTE}), frozenset({HOST})
    both = combine_recorders(first, second)
    outer = both.begin("forward", micro_batch=1)
    inner = both.begin("gather wait")
    both.end(inner)
    both.end(outer)
    assert [span.name for span in first.take()] == ["forward"]
    assert [span.name for span in second.take()] == ["gather wait"]


def test_one_recorder_is_returned_as_it_is_and_none_records_nothing() -> None:
    recorder = MemoryRecorder()
    assert combine_recorders(recorder) is recorder
    assert combine_recorders() is NO_SPANS
