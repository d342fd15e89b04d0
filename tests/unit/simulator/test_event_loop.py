"""Lanes, waiting and circles."""

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.simulator.event_loop import EventLoop


def test_a_lane_runs_its_tasks_one_after_the_other() -> None:
    loop = EventLoop()
    tasks = [loop.add("a", duration) for duration in (3.0, 0.0, 2.0)]
    loop.run()
    assert [(task.start_ms, task.end_ms) for task in tasks] == [(0, 3), (3, 3), (3, 5)]


def test_a_task_starts_when_its_lane_is_free_and_all_it_waits_for_has_ended() -> None:
    loop = EventLoop()
    first = loop.add("a", 3.0)
    other = loop.add("b", 5.0)
    both = loop.add("a", 1.0, [first, other, None])
    behind = loop.add("a", 1.0)
    loop.run()
    assert (both.start_ms, behind.start_ms) == (5, 6)


def test_a_task_may_wait_for_one_that_is_added_later() -> None:
    loop = EventLoop()
    early = loop.add("a", 1.0)
    late = loop.add("b", 4.0)
    loop.wait(early, [late])
    loop.run()
    assert (early.start_ms, early.end_ms) == (4, 5)


def test_a_lane_keeps_its_order_even_where_the_next_one_could_start() -> None:
    loop = EventLoop()
    slow = loop.add("b", 7.0)
    loop.add("a", 1.0, [slow])
    ready = loop.add("a", 1.0)
    loop.run()
    assert ready.start_ms == 8


def test_tasks_that_wait_in_a_circle_are_named() -> None:
    loop = EventLoop()
    second = loop.add("a", 1.0)
    first = loop.add("b", 1.0, [second])
    loop.wait(second, [first])
    with pytest.raises(HydraulisError, match="circle but 2 never start, on 2 lanes"):
        loop.run()


@pytest.mark.parametrize("duration_ms", [-1.0, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(duration_ms: float) -> None:
    with pytest.raises(ValueError, match="finite time from 0 on"):
        EventLoop().add("a", duration_ms)
