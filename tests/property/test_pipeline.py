"""The 1F1B recurrence against a simulation of its events in exact fractions, and its bounds."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import pipeline_schedule, pipeline_time_ms
from tests.support.brute_force import operations

TIMES = st.lists(st.integers(0, 60), min_size=1, max_size=9)
STAGES = st.integers(1, 6)


End = dict[tuple[str, int, int], Fraction]
"""End of each operation: 'forward' or 'backward', stage, micro-batch."""


def simulated(times: list[int], num_stages: int, forward_share: Fraction) -> End:
    """Run every stage's list of operations as soon as stage and input are free."""
    queues = [operations(num_stages, len(times), stage) for stage in range(num_stages)]
    end: End = {}
    stage_free = [Fraction(0)] * num_stages
    while any(queues):
        progressed = False
        for stage, queue in enumerate(queues):
            if not queue:
                continue
            kind, k = queue[0]
            share = forward_share if kind == "forward" else 1 - forward_share
            neighbour = stage - 1 if kind == "forward" else stage + 1
            ready: Fraction | None = Fraction(0)
            if 0 <= neighbour < num_stages:
                ready = end.get((kind, neighbour, k))
            if ready is None:
                continue
            stage_free[stage] = max(stage_free[stage], ready) + share * times[k]
            end[kind, stage, k] = stage_free[stage]
            queue.pop(0)
            progressed = True
        assert progressed, "the schedule deadlocks"
    return end


@given(
    TIMES, STAGES, st.sampled_from([Fraction(1, 3), Fraction(1, 2), Fraction(0), Fraction(3, 4)])
)
def test_equals_the_simulation(times: list[int], num_stages: int, share: Fraction) -> None:
    end = simulated(times, num_stages, share)
    found = pipeline_time_ms(times, num_stages, forward_share=float(share))
    assert found == pytest.approx(float(max(end.values())), rel=1e-12, abs=1e-9)
    operations = pipeline_schedule(times, num_stages, forward_share=float(share))
    assert len(operations) == len(end) == 2 * len(times) * num_stages
    for operation in operations:
        kind = "forward" if operation.is_forward else "backward"
        wanted = end[kind, operation.stage, operation.micro_batch]
        part = share if operation.is_forward else 1 - share
        start = wanted - part * times[operation.micro_batch]
        assert operation.end_ms == pytest.approx(float(wanted), rel=1e-12, abs=1e-9)
        assert operation.start_ms == pytest.approx(float(start), rel=1e-12, abs=1e-9)


@given(TIMES, STAGES)
def test_lower_bound_in_every_order(times: list[int], num_stages: int) -> None:
    bound = sum(times) + (num_stages - 1) * min(times)
    assert pipeline_time_ms(times, num_stages) >= bound - 1e-9


@given(TIMES, STAGES, st.booleans())
def test_upper_bound_in_sorted_order(times: list[int], num_stages: int, descending: bool) -> None:
    bound = sum(times) + (num_stages - 1) * max(times)
    in_order = sorted(times, reverse=descending)
    assert pipeline_time_ms(in_order, num_stages) <= bound + 1e-9


@given(TIMES, STAGES, st.data())
def test_more_work_never_takes_less_time(
    times: list[int], num_stages: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(times) - 1))
    more = [*times[:place], times[place] + 1, *times[place + 1 :]]
    assert pipeline_time_ms(more, num_stages) >= pipeline_time_ms(times, num_stages) - 1e-9
