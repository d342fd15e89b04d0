"""Spans as trace events and back, and the rules they keep."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace_events import (
    TRACKS,
    Span,
    complete_event,
    span_of_event,
)
from megatron.hydraulis.observability.trace_lanes import LaneAssigner

TIMES_NS = st.integers(0, 10**15)


def span(start_us: float, end_us: float, **given: Any) -> Span:
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
    wanted = span(
        start_ns / 1e3,
        (start_ns + more_ns) / 1e3,
        rank=rank,
        track=track,
        is_planned=is_planned,
        name="gather wait",
        detail=detail,
    )
    event = complete_event(wanted, thread_id=7)
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
    assert span(0, 1, name="forward", detail=detail).label == "forward 2"
    assert span(0, 1, name="optimizer", detail={"iteration": 4}).label == "optimizer 4"
    assert span(0, 1, name="optimizer").label == "optimizer"


@pytest.mark.parametrize(
    ("start_us", "end_us", "name"),
    [(2.0, 1.0, "gather"), (0.0, math.nan, "gather"), (-math.inf, 0.0, "gather"), (0, 1, "a 3")],
)
def test_spans_are_refused(start_us: float, end_us: float, name: str) -> None:
    with pytest.raises(HydraulisError):
        span(start_us, end_us, name=name)


@pytest.mark.parametrize("event", [{}, {"ph": "B"}, {"ph": "X", "name": "forward"}])
def test_foreign_events_are_refused(event: dict[str, Any]) -> None:
    with pytest.raises(HydraulisError, match="give a folder that --trace wrote"):
        span_of_event(event)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10), st.booleans()), max_size=30))
def test_spans_of_a_lane_follow_one_another(drawn: list[tuple[int, int, bool]]) -> None:
    lanes = LaneAssigner()
    end_us: dict[tuple[bool, int], float] = {}
    named: set[tuple[bool, int]] = set()
    for start, length, is_planned in sorted(drawn):
        given_ = span(start, start + length, is_planned=is_planned)
        thread_id, new_lane, is_new_process = lanes.assign(given_)
        lane = (is_planned, thread_id)
        assert end_us.get(lane, -1.0) <= given_.start_us
        assert (new_lane is not None) == (lane not in named)
        assert is_new_process == (not any(process == is_planned for process, _ in named))
        named.add(lane)
        end_us[lane] = given_.end_us
