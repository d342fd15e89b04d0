"""Spans, their events and files, traced iterations, and the clocks of ranks."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.observability.trace import (
    TRACKS,
    BarrierStamps,
    Lanes,
    Span,
    TraceWindow,
    TraceWriter,
    clock_offsets,
    event_of_span,
    merge_trace,
    rank_file,
    rank_files,
    read_trace,
    span_of_event,
)

TIMES_NS = st.integers(0, 10**15)


def span(name: str, start_us: float, end_us: float, *, rank: int = 0, **more: Any) -> Span:
    fields: dict[str, Any] = {"track": "compute", "detail": {"iteration": 1}} | more
    return Span(rank=rank, name=name, start_us=start_us, end_us=end_us, **fields)


SPANS = [
    span("forward", 0.0, 10.5, detail={"iteration": 1, "micro_batch": 0, "stage": 0}),
    span("gather", 1.0, 4.0, track="regroup", detail={"iteration": 1, "bucket": 0}),
    span("gather", 2.0, 6.0, track="regroup", detail={"iteration": 1, "bucket": 1}),
    span("backward", 10.5, 30.0, detail={"iteration": 1, "micro_batch": 0, "stage": 0}),
]


def written(folder: Path, spans: list[Span], rank: int = 0) -> Path:
    with TraceWriter(rank_file(folder, rank)) as writer:
        writer.write(spans)
    return writer.path


def test_reads_back_what_was_written(tmp_path: Path) -> None:
    path = written(tmp_path, SPANS)
    assert path.name == "trace_rank_0000.json"
    assert list(read_trace(path)) == SPANS
    assert list(read_trace(tmp_path)) == SPANS


def test_events_are_those_of_the_trace_event_format(tmp_path: Path) -> None:
    events = json.loads(written(tmp_path, SPANS).read_text())
    complete = [event for event in events if event["ph"] == "X"]
    metadata = [event for event in events if event["ph"] == "M"]
    assert len(complete) == len(SPANS)
    assert len(complete) + len(metadata) == len(events)
    for event in events:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
    threads = {
        event["tid"]: event["args"]["name"] for event in metadata if event["name"] == "thread_name"
    }
    assert set(threads) == {event["tid"] for event in complete}
    assert sorted(threads.values()) == ["compute", "regroup", "regroup (2)"]
    (process,) = [event for event in metadata if event["name"] == "process_name"]
    assert process["args"]["name"] == "rank 0"


def test_an_empty_trace_is_an_array(tmp_path: Path) -> None:
    assert json.loads(written(tmp_path, []).read_text()) == []
    assert list(read_trace(tmp_path)) == []


def test_a_cut_file_reads_back_up_to_the_cut(tmp_path: Path) -> None:
    content = written(tmp_path, SPANS).read_bytes()
    cut = tmp_path / "cut.json"
    sizes = random.Random(5).sample(range(1, len(content)), 60)
    for size in [*sizes, len(content) - 1, len(content) - 2, len(content) - 3]:
        cut.write_bytes(content[:size])
        found = list(read_trace(cut))
        assert found == SPANS[: len(found)]
        num_whole_lines = content[:size].count(b'"ph": "X"')
        assert len(found) >= num_whole_lines - 1


def test_a_file_that_is_open_can_be_read(tmp_path: Path) -> None:
    writer = TraceWriter(rank_file(tmp_path, 0))
    writer.write(SPANS[:2])
    assert list(read_trace(tmp_path)) == SPANS[:2]
    writer.write(SPANS[2:])
    assert list(read_trace(tmp_path)) == SPANS
    writer.close()
    writer.close()


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, SPANS)
    path.write_text(path.read_text().replace('{"ph": "X"', '{"ph" "X"', 1))
    with pytest.raises(HydraulisError, match=r"line 2 of \d+ is not"):
        read_trace(path)


def test_merging_starts_the_plans_of_an_iteration_together(tmp_path: Path) -> None:
    for rank, start_us in ((0, 120.0), (1, 100.0)):
        whole = span("iteration", start_us, start_us + 50.0, rank=rank, track="iteration")
        planned = span("forward", start_us + 5.0, start_us + 9.0, rank=rank, is_planned=True)
        measured = span("forward", start_us + 6.0, start_us + 9.0, rank=rank)
        written(tmp_path, [whole, planned, measured], rank)
    assert merge_trace(tmp_path) == tmp_path / "trace.json"
    merged = read_trace(tmp_path / "trace.json")
    assert [s.start_us for s in merged if s.is_planned] == [105.0, 105.0]
    measured_us = [s.start_us for s in merged if s.name == "forward" and not s.is_planned]
    assert sorted(measured_us) == [106.0, 126.0]
    names = {
        event["args"]["name"]
        for event in json.loads((tmp_path / "trace.json").read_text())
        if event["name"] == "process_name"
    }
    assert names == {"rank 0", "rank 0 planned", "rank 1", "rank 1 planned"}


def test_ranks_sort_by_number(tmp_path: Path) -> None:
    for rank in (10000, 9, 2):
        written(tmp_path, [], rank)
    assert [path.name for path in rank_files(tmp_path)] == [
        "trace_rank_0002.json",
        "trace_rank_0009.json",
        "trace_rank_10000.json",
    ]


def test_a_folder_without_a_trace(tmp_path: Path) -> None:
    with pytest.raises(HydraulisError, match="give its folder"):
        read_trace(tmp_path)
    with pytest.raises(HydraulisError, match="give the folder of --trace"):
        merge_trace(tmp_path)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HydraulisError, match="another --trace folder"):
        TraceWriter(tmp_path / "file" / "trace.json")


def gather_span(start_us: float, end_us: float, **given: Any) -> Span:
    fields: dict[str, Any] = {"rank": 0, "track": "regroup", "name": "gather"} | given
    return Span(start_us=start_us, end_us=end_us, **fields)


@given(
    TIMES_NS,
    TIMES_NS,
    st.integers(0, 9999),
    st.booleans(),
    st.sampled_from(TRACKS),
    st.dictionaries(
        st.sampled_from(["iteration", "micro_batch", "bucket", "stage", "unit"]),
        st.integers(0, 10**6) | st.text(max_size=5),
    ),
)
def test_an_event_reads_back_as_its_span(
    start_ns: int, more_ns: int, rank: int, is_planned: bool, track: str, detail: dict[str, Any]
) -> None:
    wanted = gather_span(
        start_ns / 1e3,
        (start_ns + more_ns) / 1e3,
        rank=rank,
        track=track,
        is_planned=is_planned,
        name="gather wait",
        detail=detail,
    )
    event = event_of_span(wanted, thread_id=7)
    assert event["dur"] >= 0.0
    found = span_of_event(event)
    assert found is not None
    assert found.end_us == pytest.approx(wanted.end_us, abs=1e-3, rel=1e-15)
    assert found.start_us == wanted.start_us
    assert (found.rank, found.track, found.is_planned) == (rank, track, is_planned)
    assert found.detail == detail
    assert found.name == "gather wait"


def test_labels_number_what_repeats() -> None:
    detail = {"iteration": 4, "micro_batch": 2, "stage": 1}
    assert gather_span(0, 1, name="forward", detail=detail).label == "forward 2"
    assert gather_span(0, 1, name="optimizer", detail={"iteration": 4}).label == "optimizer 4"
    assert gather_span(0, 1, name="optimizer").label == "optimizer"


@pytest.mark.parametrize(
    ("start_us", "end_us", "name"),
    [(2.0, 1.0, "gather"), (0.0, math.nan, "gather"), (-math.inf, 0.0, "gather"), (0, 1, "a 3")],
)
def test_spans_are_refused(start_us: float, end_us: float, name: str) -> None:
    with pytest.raises(HydraulisError):
        gather_span(start_us, end_us, name=name)


@pytest.mark.parametrize("event", [{}, {"ph": "B"}, {"ph": "X", "name": "forward"}])
def test_foreign_events_are_refused(event: dict[str, Any]) -> None:
    with pytest.raises(HydraulisError, match="give a folder that --trace wrote"):
        span_of_event(event)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10), st.booleans()), max_size=30))
def test_spans_of_a_lane_follow_one_another(drawn: list[tuple[int, int, bool]]) -> None:
    lanes = Lanes()
    end_us: dict[tuple[bool, int], float] = {}
    for start, length, is_planned in sorted(drawn):
        given_ = gather_span(start, start + length, is_planned=is_planned)
        event, *names = lanes.events_of(given_)
        lane = (is_planned, event["tid"])
        assert end_us.get(lane, -1.0) <= given_.start_us
        is_new_process = not any(process == is_planned for process, _ in end_us)
        assert len(names) == 2 * (lane not in end_us) + 2 * is_new_process
        end_us[lane] = given_.end_us


def test_windows() -> None:
    assert TraceWindow.parse("5..12") == TraceWindow(5, 12)
    assert TraceWindow.parse("7") == TraceWindow(7, 7)
    window = TraceWindow.starting_at(101)
    assert 101 in window
    assert 120 in window
    assert not {100, 121} & {i for i in range(200) if i in window}


@pytest.mark.parametrize("text", ["", "a", "3..", "..4", "5..3", "0..3", "-1", "1...3"])
def test_windows_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"give for example 1\.\.20"):
        TraceWindow.parse(text)


def barrier_stamps(
    offsets_ns: list[int], clocks: list[str], *, num_barriers: int = 8, seed: int = 0
) -> list[BarrierStamps]:
    """Stamps of ranks that enter and leave barriers at random times."""
    generator = random.Random(seed)
    before: list[list[int]] = [[] for _ in offsets_ns]
    after: list[list[int]] = [[] for _ in offsets_ns]
    true_ns = 10**12
    for _ in range(num_barriers):
        entries = [true_ns + generator.randrange(50_000) for _ in offsets_ns]
        for rank, offset in enumerate(offsets_ns):
            before[rank].append(entries[rank] + offset)
            after[rank].append(max(entries) + generator.randrange(20_000) + offset)
        true_ns += 1_000_000
    return [
        BarrierStamps(clock, tuple(b), tuple(a))
        for clock, b, a in zip(clocks, before, after, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_offsets_lie_within_their_bounds(seed: int) -> None:
    true = [0, 0, 7_000_000_000, 7_000_000_000, -123_456, -123_456]
    found = clock_offsets(barrier_stamps(true, ["a", "a", "b", "b", "c", "c"], seed=seed))
    for offset, wanted in zip(found, true, strict=True):
        assert abs(offset.offset_ns - wanted) <= offset.error_ns
        assert offset.error_ns <= 70_000
    assert found[0] == found[1]
    assert (found[1].offset_ns, found[1].error_ns) == (0, 0), "one clock needs no estimate"
    assert found[2] == found[3]
    assert found[4] == found[5]


def test_more_barriers_never_widen_the_bounds() -> None:
    true, clocks = [0, 5_000], ["a", "b"]
    stamps = barrier_stamps(true, clocks, num_barriers=8, seed=3)
    few = [BarrierStamps(s.clock, s.before_ns[:2], s.after_ns[:2]) for s in stamps]
    assert clock_offsets(stamps)[1].error_ns <= clock_offsets(few)[1].error_ns
