"""Files of a trace: valid, readable when cut short, merged with their plans aligned."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace_events import Span
from megatron.hydraulis.observability.trace_file import (
    TraceWriter,
    merge_trace,
    rank_file,
    rank_files,
    read_trace,
)


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
    assert read_trace(path) == SPANS
    assert read_trace(tmp_path) == SPANS


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
    assert read_trace(tmp_path) == []


def test_a_file_cut_anywhere_reads_back_as_far_as_it_goes(tmp_path: Path) -> None:
    content = written(tmp_path, SPANS).read_bytes()
    cut = tmp_path / "cut.json"
    sizes = random.Random(5).sample(range(1, len(content)), 60)
    for size in [*sizes, len(content) - 1, len(content) - 2, len(content) - 3]:
        cut.write_bytes(content[:size])
        found = read_trace(cut)
        assert found == SPANS[: len(found)]
        num_whole_lines = content[:size].count(b'"ph": "X"')
        assert len(found) >= num_whole_lines - 1


def test_a_file_that_is_open_can_be_read(tmp_path: Path) -> None:
    writer = TraceWriter(rank_file(tmp_path, 0))
    writer.write(SPANS[:2])
    assert read_trace(tmp_path) == SPANS[:2]
    writer.write(SPANS[2:])
    assert read_trace(tmp_path) == SPANS
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
    assert sorted(s.start_us for s in merged if s.name == "forward" and not s.is_planned) == [
        106.0,
        126.0,
    ]
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
