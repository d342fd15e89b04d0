"""Bounds by a pipeline's shape, long micro-batches and modes, against the exact time."""

import itertools
import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import Coefficients, pipeline_time_ms
from megatron.hydraulis.planner.bounds import (
    MAX_EXACT,
    MAX_SHAPED,
    PipelineColumns,
    best_works_ms,
    choose_long_micro_batches,
    fill_bound_ms,
    long_micro_batch_lines,
    long_micro_batch_orders,
    most_work_ms,
    ranges_of_numbers,
    shapes,
)
from megatron.hydraulis.planner.costs import Pipeline, ReplicaClass, SchemeCost, binding_forms
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.relaxation import Tier, class_modes
from megatron.hydraulis.planner.solver import (
    Deadline,
    ProgramBuilder,
    Solver,
    solve,
)

ROUNDING = 1e-9
# By the program of shapes, which leaves out stages: its module's docstring.
LOST = 0.009
WORKS = st.lists(st.integers(0, 60), min_size=1, max_size=9).filter(any)
STAGES = st.integers(1, 5)
SHARES = st.sampled_from([1 / 3, 0.25, 0.5, 0.6])
PIPELINES = st.builds(Pipeline, STAGES, SHARES)


@given(WORKS, PIPELINES)
def test_no_order_of_any_works_is_below_the_fill_bound(
    works: list[int], pipeline: Pipeline
) -> None:
    time_ms, total_ms, num = pipeline.time_ms(works), sum(works), len(works)
    bound_ms = fill_bound_ms(pipeline, num, total_ms, max(works))
    assert total_ms * (1 - ROUNDING) <= bound_ms <= time_ms * (1 + ROUNDING)
    # The same lines, solved for the work.
    assert total_ms <= most_work_ms(pipeline, num, time_ms, max(works)) * (1 + ROUNDING)
    again_ms = most_work_ms(pipeline, num, bound_ms, max(works))
    assert again_ms == pytest.approx(total_ms, rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, MAX_SHAPED + 3), st.integers(2, 4), SHARES, st.randoms())
def test_no_shape_of_many_micro_batches_is_below_the_fill_bound(
    num: int, num_stages: int, share: float, random: Random
) -> None:
    pipeline = Pipeline(num_stages, share)
    # Small at the ends, as the best shapes are, with some noise.
    works = [min(3 * (k + 1), num - k, 9) * random.uniform(0.8, 1.2) for k in range(num)]
    bound_ms = fill_bound_ms(pipeline, num, sum(works), max(works))
    assert sum(works) <= bound_ms <= pipeline.time_ms(works) * (1 + ROUNDING)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_a_range_of_numbers_has_the_bound_of_its_largest(num_stages: int) -> None:
    ranges = list(itertools.takewhile(lambda each: each[1] <= MAX_SHAPED, ranges_of_numbers()))
    assert [num for first, last in ranges for num in range(first, last + 1)] == list(
        range(1, MAX_SHAPED + 1)
    )
    first, last = ranges[MAX_EXACT + 1]
    assert last > first
    bounds = {fill_bound_ms(Pipeline(num_stages), num, 1.0, 1.0) for num in (first, last)}
    assert len(bounds) == 1
    # It is that of the exact program for the largest number, and below those of the others.
    times = []
    for num in (first, last):
        works = best_works_ms(Pipeline(num_stages), [0.0] * num, 1.0, 1.0, Solver(Deadline(None)))
        assert works is not None
        times.append(pipeline_time_ms([max(0.0, work) for work in works], num_stages))
    bound = bounds.pop()
    tolerance = 1e-4 if num_stages <= 3 else LOST
    assert times[1] * (1 - tolerance) <= bound <= times[1] * (1 + 1e-6)
    assert times[1] <= times[0]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("num", [1, 2, 5, 13])
def test_the_best_shapes_reach_their_bound(num_stages: int, num: int) -> None:
    for shape in shapes(Pipeline(num_stages), num)[: -1 if num > 1 else None]:
        assert math.fsum(shape.shares) == pytest.approx(1.0)
        time_ms = pipeline_time_ms(shape.shares, num_stages)
        largest = max(shape.shares)
        assert shape.bound_ms(1.0, largest) == pytest.approx(time_ms, abs=1e-5)
        # Better than equal ones, which is why they are computed.
        assert time_ms <= (1.0 + (num_stages - 1) / num) * (1 + 1e-6)


@pytest.mark.parametrize("num_stages", [4, 8])
@pytest.mark.parametrize("num", [1, 2, 5, 13, 20])
def test_stages_left_out_hardly_change_shapes_and_bounds(num_stages: int, num: int) -> None:
    for shape in shapes(Pipeline(num_stages), num)[: -1 if num > 1 else None]:
        time_ms = pipeline_time_ms(shape.shares, num_stages)
        works = best_works_ms(
            Pipeline(num_stages), [0.0] * num, 1.0, shape.largest, Solver(Deadline(None))
        )
        assert works is not None
        best_ms = pipeline_time_ms([max(0.0, work) for work in works], num_stages)
        assert best_ms * (1 - 1e-6) <= time_ms <= best_ms * (1 + LOST)
        bound_ms = shape.bound_ms(1.0, shape.largest)
        assert best_ms * (1 - LOST) <= bound_ms <= best_ms * (1 + 1e-6)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(2, 4), st.integers(1, 90))
def test_best_works_respect_their_limits_and_beat_others(
    least: list[int], num_stages: int, more: int
) -> None:
    total_ms, largest_ms = float(sum(least) + more), float(max(least) + more)
    works_ms = best_works_ms(
        Pipeline(num_stages), least, total_ms, largest_ms, Solver(Deadline(None))
    )
    assert works_ms is not None
    assert math.fsum(works_ms) == pytest.approx(total_ms)
    for work_ms, least_ms in zip(works_ms, least, strict=True):
        assert least_ms - 1e-5 <= work_ms <= largest_ms + 1e-5
    best_ms = pipeline_time_ms([max(0.0, work_ms) for work_ms in works_ms], num_stages)
    # All of the rest to one of them, or a part to each.
    others: list[list[float]] = [
        [s + more * (i == k) for i, s in enumerate(least)] for k in range(len(least))
    ]
    others.append([s + more / len(least) for s in least])
    for other in others:
        assert best_ms <= pipeline_time_ms(other, num_stages) * (1 + 1e-5)


@given(WORKS, PIPELINES)
def test_the_program_of_a_pipeline_is_its_recurrence(works: list[int], pipeline: Pipeline) -> None:
    program = ProgramBuilder()
    stages = range(pipeline.num_stages)
    columns = PipelineColumns(pipeline, len(works), stages=stages)
    columns.add_to(program, [(work, work) for work in works])
    solution = solve(program.model())
    assert solution.objective == pytest.approx(pipeline.time_ms(works), rel=1e-6)


COEFFICIENTS = st.builds(
    Coefficients,
    st.sampled_from([0.0, 1e-3, 0.05]),
    st.sampled_from([0.1, 1.0]),
    st.sampled_from([0.0, 2.0, 30.0]),
    forward_share=SHARES,
)
LIMITS = st.sampled_from([60, 75, 119, 120, 500])
COSTS = st.builds(SchemeCost, COEFFICIENTS, LIMITS, st.integers(2, 5))


def with_forms(first: Coefficients, others: list[Coefficients], host_ms: float) -> Coefficients:
    """All forms with the first one's share of the forward."""
    share = first.forward_share
    forms = tuple(replace(form, forward_share=share) for form in others)
    return replace(first, others=forms, host_ms=host_ms)


COSTS_OF_FORMS = st.builds(
    SchemeCost,
    st.builds(
        with_forms,
        COEFFICIENTS,
        st.lists(COEFFICIENTS, max_size=3),
        st.sampled_from([0.0, 0.0, 12.0]),
    ),
    LIMITS,
    st.integers(1, 4),
)


@st.composite
def packings(draw: st.DrawFn, cost: SchemeCost) -> list[list[int]]:
    """Any micro-batches within the limit, in any order."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=9))
    micro_batches: list[list[int]] = [[]]
    for length in lengths:
        last = micro_batches[-1]
        is_full = sum(last) + length > cost.max_tokens
        if last and (is_full or draw(st.booleans())):
            micro_batches.append([length])
        else:
            last.append(length)
    order: list[list[int]] = draw(st.permutations(micro_batches))
    return order


@given(COSTS, st.data())
def test_no_packing_is_below_the_bound_of_its_long_ones(
    cost: SchemeCost, data: st.DataObject
) -> None:
    micro_batches = data.draw(packings(cost))
    times_ms = [cost.coefficients.time_ms(share) for share in micro_batches]
    time_ms, total_ms = cost.pipeline.time_ms(times_ms), math.fsum(times_ms)
    falling = sorted(itertools.chain(*micro_batches), reverse=True)
    long = choose_long_micro_batches(falling, cost.max_tokens)
    assert long == tuple(falling[: len(long)])
    # Any number of the longest sequences may count as long.
    for num in range(1, len(long) + 1):
        orders = long_micro_batch_orders(long[:num], cost)
        bound_ms = orders.least_time_ms(len(times_ms), total_ms)
        assert bound_ms <= time_ms * (1 + ROUNDING)
        assert total_ms <= orders.most_works_ms(time_ms)[: len(times_ms) + 1][-1] * (1 + ROUNDING)
    long_ms = cost.coefficients.time_ms((falling[0],))
    for by_total, by_long in long_micro_batch_lines(cost.pipeline):
        assert by_total * total_ms + by_long * long_ms <= time_ms * (1 + ROUNDING)


@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("num_before", [0, 1, 3, 7])
@pytest.mark.parametrize("num_after", [0, 2, 12])
def test_the_best_works_around_a_long_one_are_not_below_its_bound(
    num_stages: int, num_before: int, num_after: int
) -> None:
    # Works may be divided arbitrarily here: the shortest time by a linear program.
    cost = SchemeCost(Coefficients(0.0, 1.0, 0.0), 60, num_stages)
    least_ms = [0.0] * num_before + [60.0] + [0.0] * num_after
    orders = long_micro_batch_orders((60,), cost)
    for total_ms in (60.0, 100.0, 300.0, 900.0):
        if total_ms > 60.0 * len(least_ms):
            continue
        works_ms = best_works_ms(
            Pipeline(num_stages), least_ms, total_ms, 60.0, Solver(Deadline(None))
        )
        assert works_ms is not None
        time_ms = pipeline_time_ms([max(0.0, work) for work in works_ms], num_stages)
        assert orders.least_time_ms(len(least_ms), total_ms) <= time_ms * (1 + 1e-6)


@given(COSTS, st.integers(1, 12), st.integers(1, 3), st.floats(0.1, 4.0))
def test_least_time_and_most_work_are_inverse(
    cost: SchemeCost, num_micro_batches: int, num_long: int, work_over_long: float
) -> None:
    orders = long_micro_batch_orders((60, 45, 31)[:num_long], cost)
    total_ms = work_over_long * cost.coefficients.time_ms((60,))
    time_ms = orders.least_time_ms(num_micro_batches, total_ms)
    if math.isinf(time_ms):
        assert orders.most_works_ms(1e9)[num_micro_batches] == -math.inf
    else:
        # Some order does this work in this time, and none in less time.
        most_ms = orders.most_works_ms(time_ms)
        assert most_ms == sorted(most_ms)
        assert most_ms[: num_micro_batches + 1][-1] == pytest.approx(total_ms)
        assert orders.most_works_ms(0.999 * time_ms)[: num_micro_batches + 1][-1] < total_ms


@given(COSTS_OF_FORMS, st.data())
def test_every_feasible_packing_is_covered_by_a_mode(cost: SchemeCost, data: st.DataObject) -> None:
    micro_batches = data.draw(packings(cost))
    elsewhere = data.draw(st.lists(st.integers(1, 60), max_size=4))
    here = list(itertools.chain(*micro_batches))
    times_ms = [cost.coefficients.time_ms(share) for share in micro_batches]
    # Rounded up, as the caller's time is.
    time_ms = cost.replica_time_ms(times_ms) * (1 + ROUNDING)
    works_ms = [math.fsum(map(view.sequence_time_ms, here)) for view in cost.views]
    long = choose_long_micro_batches(sorted(here, reverse=True), cost.max_tokens)
    has_long = cost.num_stages > 1 and data.draw(st.booleans())
    batch = sorted([*here, *elsewhere])
    modes = class_modes(
        0,
        cost,
        Tier(max(here), long if has_long else ()),
        time_ms,
        lengths=batch,
        num_tokens=sum(batch),
    )
    assert any(
        all(
            most_ms >= work_ms * (1 - ROUNDING)
            for most_ms, work_ms in zip(mode.works_ms, works_ms, strict=True)
        )
        and mode.num_tokens >= sum(here)
        and (mode.packs_all or mode.num_micro_batches >= len(micro_batches))
        for mode in modes
    )


@given(COSTS_OF_FORMS, st.data())
def test_no_micro_batch_is_faster_than_in_a_view(cost: SchemeCost, data: st.DataObject) -> None:
    for share in data.draw(packings(cost)):
        for view in cost.views[: len(cost.coefficients.forms)]:
            work_ms = math.fsum(map(view.sequence_time_ms, share))
            time_ms = cost.time_ms(share) * (1 + ROUNDING)
            assert work_ms + view.coefficients.c_ms <= time_ms
            # What bounds of rounded lengths need.
            tokens_ms = [view.coefficients.token_time_ms(length) for length in (1, *sorted(share))]
            assert tokens_ms == pytest.approx(sorted(tokens_ms))


@given(COSTS_OF_FORMS, st.data())
def test_a_form_is_dropped_if_no_micro_batch_needs_it(
    cost: SchemeCost, data: st.DataObject
) -> None:
    kept = binding_forms(cost.coefficients, cost.max_tokens)
    micro_batches = data.draw(packings(cost))
    times_ms = [kept.time_ms(share) for share in micro_batches]
    assert times_ms == [cost.coefficients.time_ms(share) for share in micro_batches]
    without_host = replace(cost, coefficients=replace(kept, host_ms=0.0))
    if not kept.host_ms:
        assert without_host.replica_time_ms(times_ms) == cost.replica_time_ms(times_ms)


def test_needless_forms_and_hosts_are_dropped() -> None:
    first = Coefficients(0.1, 1.0, 5.0)
    needed, needless = Coefficients(0.0, 3.0, 5.0), Coefficients(0.0, 1.9, 5.0)
    kept = binding_forms(replace(first, others=(needless, needed, first), host_ms=5.0), 60)
    assert kept.forms == (first, needed)
    assert kept.host_ms == 0.0
    assert binding_forms(replace(needless, others=(needed,), host_ms=6.0), 60).host_ms == 6.0
    # With longer micro-batches attention takes longest from 20 tokens a sequence on.
    assert binding_forms(replace(needed, others=(first,)), 15).forms == (needed,)


def test_no_micro_batch_takes_more_than_the_largest() -> None:
    cost = SchemeCost(Coefficients(0.01, 1.0, 2.0), 100, 2)
    assert cost.largest_time_ms(60) >= cost.coefficients.time_ms((60, 40))
    assert cost.largest_time_ms(50) == cost.coefficients.time_ms((50, 50))
    assert cost.largest_time_ms(300) == cost.coefficients.time_ms((100,))


def test_replicas_of_equal_cost_form_a_class() -> None:
    one = SchemeCost(Coefficients(0.0, 1.0, 2.0), 100, 1)
    other = SchemeCost(Coefficients(0.0, 1.0, 2.0), 101, 1)
    classes = ReplicaClass.of([one, other, one])
    assert [c.replicas for c in classes] == [(0, 2), (1,)]
    assert [c.num_replicas for c in classes] == [2, 1]


@given(COSTS_OF_FORMS, st.lists(st.integers(1, 60), min_size=1, max_size=14))
def test_packers_pack_every_sequence_within_the_limit(cost: SchemeCost, lengths: list[int]) -> None:
    packer = ReplicaPacker(cost, lengths, Solver(Deadline(None)))
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plain = packer.pack(order, Effort(1e9))
    thorough = packer.pack_thoroughly(order, 20, Effort(1e9))
    for packed in (plain, thorough):
        assert sorted(itertools.chain(*packed.micro_batches)) == sorted(order)
        shares = [[lengths[i] for i in share] for share in packed.micro_batches]
        assert max(map(sum, shares)) <= cost.max_tokens
        times_ms = [cost.coefficients.time_ms(share) for share in shares]
        assert packed.time_ms == pytest.approx(cost.replica_time_ms(times_ms))
    assert thorough.time_ms <= plain.time_ms
    # The estimates that choose moves are bounds below MAX_SHAPED_MICRO_BATCHES.
    estimate_ms = packer.estimates_ms(
        [
            (np.array([math.fsum(view.works_ms)]), np.array([max(view.works_ms)]))
            for view in packer.views
        ],
        np.array([sum(lengths)]),
        len(plain.micro_batches),
    )
    assert float(estimate_ms[0]) <= thorough.time_ms * (1 + ROUNDING)


@given(COSTS_OF_FORMS, st.lists(st.integers(1, 60), min_size=3, max_size=10), st.data())
def test_an_exchange_changes_one_sequence(
    cost: SchemeCost, lengths: list[int], data: st.DataObject
) -> None:
    packer = ReplicaPacker(cost, lengths, Solver(Deadline(None)))
    held = sorted(range(1, len(lengths)), key=lambda i: (-lengths[i], i))
    packed = packer.pack(held, Effort(1e9))
    gone = data.draw(st.sampled_from([None, *held]))
    come = data.draw(st.sampled_from([None, 0]))
    changed = packer.exchanged(packed, gone, come)
    assume(changed.micro_batches)
    wanted = [*(i for i in held if i != gone), *([] if come is None else [come])]
    assert sorted(itertools.chain(*changed.micro_batches)) == sorted(wanted)
    for share in changed.micro_batches:
        assert 0 < sum(lengths[i] for i in share) <= cost.max_tokens
