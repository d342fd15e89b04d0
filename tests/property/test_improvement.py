"""Moves, swaps and repacking: never slower, no sequence lost, deterministic."""

import importlib
import itertools
import math
import pkgutil
from dataclasses import replace

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import megatron.hydraulis.planner as planner_package
from megatron.hydraulis.cost_model import Coefficients, pipeline_time_ms
from megatron.hydraulis.planner.ahead import PlannerProcess
from megatron.hydraulis.planner.costs import Pipeline, ReplicaClass, SchemeCost
from megatron.hydraulis.planner.greedy import dispatch, longest_first, mix
from megatron.hydraulis.planner.improve import (
    Assignment,
    assign_owed,
    dispatch_by_program,
    improve_dispatch,
)
from megatron.hydraulis.planner.pipeline_packing import (
    Effort,
    ReplicaPacker,
    improve_pipeline,
    pipeline_times_ms,
)
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.relaxation import Relaxation
from megatron.hydraulis.planner.solver import Deadline, Solver
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.plan_oracle import simulated_time_ms
from tests.support.planning import TableCostModel

LONGEST = 60
PLENTY = 1e8


def costs() -> st.SearchStrategy[list[SchemeCost]]:
    """Up to five replicas of up to three classes and three forms; the first holds every
    sequence."""
    form = st.builds(
        Coefficients,
        st.sampled_from([0.0, 1e-3, 0.02]),
        st.sampled_from([0.0, 0.1, 0.4]),
        st.sampled_from([0.0, 3.0, 15.0]),
    )
    coefficients = (
        st.builds(
            lambda first, *others, host_ms: replace(first, others=others, host_ms=host_ms),
            form,
            form,
            form,
            host_ms=st.sampled_from([0.0, 0.0, 10.0]),
        )
        | form
    )
    stages = st.integers(1, 3)
    first = st.builds(SchemeCost, coefficients, st.integers(LONGEST, 150), stages)
    other = st.builds(SchemeCost, coefficients, st.integers(20, 150), stages)
    return st.builds(
        lambda one, more, twice: [one, *more, *([one, *more] if twice else [])][:5],
        first,
        st.lists(other, max_size=2),
        st.booleans(),
    )


LENGTHS = st.lists(st.integers(1, LONGEST), min_size=1, max_size=16)


def assigned(
    lengths: list[int], replicas: list[SchemeCost], *, effort: float = PLENTY
) -> Assignment:
    """The greedy dispatch, packed."""
    packers = {cost: ReplicaPacker(cost, lengths, Solver(Deadline(None))) for cost in replicas}
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    shares = dispatch(order, lengths, replicas)
    return Assignment([packers[cost] for cost in replicas], shares, Effort(effort))


def check(assignment: Assignment, lengths: list[int], replicas: list[SchemeCost]) -> None:
    """Every sequence once, within the limits, with the time of 1F1B."""
    seen: list[int] = []
    for share, packed, cost in zip(assignment.shares, assignment.packed, replicas, strict=True):
        assert share == sorted(share, key=lambda i: (-lengths[i], i))
        assert sorted(itertools.chain(*packed.micro_batches)) == sorted(share)
        held = [[lengths[i] for i in micro_batch] for micro_batch in packed.micro_batches]
        assert all(0 < sum(one) <= cost.max_tokens for one in held)
        times_ms = [cost.coefficients.time_ms(one) for one in held]
        host_ms = cost.coefficients.host_ms
        simulated_ms = simulated_time_ms(times_ms, cost.num_stages, host_ms=host_ms)
        assert packed.time_ms == pytest.approx(simulated_ms)
        seen += share
    assert sorted(seen) == list(range(len(lengths)))


@given(LENGTHS, costs())
def test_every_step_is_faster_or_there_is_none(
    lengths: list[int], replicas: list[SchemeCost]
) -> None:
    assignment = assigned(lengths, replicas)
    check(assignment, lengths, replicas)
    before = assignment.times_ms
    for step in (assignment.step, assignment.repack_slowest) * 6:
        is_better = step()
        after = assignment.times_ms
        # The slowest replica gets faster; another one of equal time may now be the slowest.
        assert max(after) <= max(before)
        assert is_better or after == before
        if is_better:
            assert after[before.index(max(before))] < max(before)
        check(assignment, lengths, replicas)
        before = after


def test_there_is_no_improvement_if_nothing_takes_time() -> None:
    for num_stages in (1, 2):
        free = SchemeCost(Coefficients(0.0, 0.0, 0.0), 60, num_stages)
        assignment = assigned([5, 5, 3], [free, free])
        assert not assignment.step()
        assert not assignment.repack_slowest()
        check(assignment, [5, 5, 3], [free, free])


@given(LENGTHS, costs(), st.integers(0, 8), st.sampled_from([0.0, 1e5, PLENTY]))
def test_improving_again_gives_the_same_plan(
    lengths: list[int], replicas: list[SchemeCost], num_steps: int, effort: float
) -> None:
    start_ms = assigned(lengths, replicas).makespan_ms
    found = []
    for _ in range(2):
        assignment = assigned(lengths, replicas, effort=effort)
        assert improve_dispatch(assignment, 0.0, num_steps) <= num_steps
        check(assignment, lengths, replicas)
        assert assignment.makespan_ms <= start_ms
        found.append(assignment.packed)
    assert found[0] == found[1]


def test_improvement_ends_at_its_target_and_on_request() -> None:
    lengths = [40, 30, 30, 20, 20, 10, 10, 10]
    slow = SchemeCost(Coefficients(0.0, 1.0, 0.0), 100, 1)
    packer = ReplicaPacker(slow, lengths, Solver(Deadline(None)))

    def piled_up() -> Assignment:
        return Assignment([packer, packer], [list(range(8)), []], Effort(PLENTY))

    assert improve_dispatch(piled_up(), 170.0, 10) == 0
    one_pile = piled_up()
    assert improve_dispatch(one_pile, 90.0, 100) > 0
    assert one_pile.makespan_ms == 90.0
    stopped = piled_up()
    assert improve_dispatch(stopped, 90.0, 100, is_over=lambda: True) == 0
    assert stopped.makespan_ms == 170.0
    spent = Assignment([packer, packer], [list(range(8)), []], Effort(0.0))
    assert improve_dispatch(spent, 90.0, 100) == 0


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[list[int]], list[int], SchemeCost]:
    """Micro-batches of a part of a batch, in any order, and a limit that they respect."""
    num = draw(st.integers(1, 5))
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=num, max_size=12))
    places = list(range(num)) + [draw(st.integers(-1, num - 1)) for _ in lengths[num:]]
    micro_batches = [[i for i, k in enumerate(places) if k == one] for one in range(num)]
    fullest = max(sum(lengths[i] for i in share) for share in micro_batches)
    first = Coefficients(draw(st.sampled_from([0.0, 0.02])), 0.3, draw(st.floats(0.0, 9.0)))
    others = draw(
        st.sampled_from([(), (Coefficients(0.01, 0.6, 1.0), Coefficients(0.0, 0.0, 20.0))])
    )
    coefficients = replace(first, others=others)
    cost = SchemeCost(coefficients, fullest + draw(st.integers(0, 20)), draw(st.integers(1, 4)))
    return micro_batches, lengths, cost


@given(pipelines(), st.integers(0, 12))
def test_improving_never_makes_a_pipeline_slower(
    case: tuple[list[list[int]], list[int], SchemeCost], num_steps: int
) -> None:
    micro_batches, lengths, cost = case

    def time_ms(shares: list[list[int]]) -> float:
        times_ms = [cost.coefficients.time_ms(lengths[i] for i in share) for share in shares]
        return simulated_time_ms(times_ms, cost.num_stages)

    works_ms = works_of_forms_ms(cost, lengths)
    improved = [
        improve_pipeline(
            micro_batches,
            works_ms,
            np.array(lengths),
            cost,
            num_steps,
            effort=Effort(PLENTY),
        )
        for _ in range(2)
    ]
    assert improved[0] == improved[1]
    after = improved[0]
    assert sorted(itertools.chain(*after)) == sorted(itertools.chain(*micro_batches))
    assert len(after) == len(micro_batches)
    assert all(0 < sum(lengths[i] for i in share) <= cost.max_tokens for share in after)
    assert time_ms(after) <= time_ms(micro_batches) * (1 + 1e-12)
    if num_steps == 0:
        assert [sorted(share) for share in after] == [sorted(share) for share in micro_batches]


def works_of_forms_ms(cost: SchemeCost, lengths: list[int]) -> np.ndarray:
    """Shape (num_forms, num_sequences)."""
    return np.array(
        [form.sequence_time_ms(np.array(lengths, float)) for form in cost.coefficients.forms]
    )


def test_forms_are_mixed_at_once_or_by_steps() -> None:
    """Both long ones in the first micro-batch take 142 ms there, and 8 ms remain."""
    lengths = [8, 8, *([1] * 16)]
    forms = (Coefficients(1.0, 0.0, 0.0), Coefficients(0.0, 4.0, 0.0))
    cost = SchemeCost(replace(forms[0], others=forms[1:]), 30, 1)
    works_ms = works_of_forms_ms(cost, lengths)
    mixed = mix(range(18), works_ms, lengths, 30, 2)
    assert mixed is not None
    dense, uneven = [list(range(16)), [16, 17]], [[0, *range(2, 16)], [1, 16, 17]]
    in_steps = improve_pipeline(
        uneven, works_ms, np.array(lengths), cost, 40, effort=Effort(PLENTY)
    )
    packer = ReplicaPacker(cost, lengths, Solver(Deadline(None)))
    # Steps end where no single one helps; no packing takes less than a form of all sequences.
    times_ms = [packer.packed(each).time_ms for each in (dense, mixed, uneven, in_steps)]
    assert times_ms == [150.0, 144.0, 154.0, 150.0]
    assert packer.pack(range(18), Effort(PLENTY)).time_ms == 144.0
    assert mix(range(18), works_ms[:1], lengths, 30, 2) is None


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_many_pipelines_at_once_take_the_same_time_as_each_alone(
    num: int, num_stages: int, num_replicas: int, draws: object
) -> None:
    works = np.array(
        [[draws.uniform(0.0, 9.0) for _ in range(num)] for _ in range(num_replicas)]  # type: ignore[attr-defined]
    )
    at_once = pipeline_times_ms(works, Pipeline(num_stages))
    for row, time_ms in zip(works, at_once, strict=True):
        assert time_ms == pytest.approx(pipeline_time_ms(list(row), num_stages))


@given(LENGTHS, costs(), st.integers(1, 8), st.floats(0.9, 1.5), st.sampled_from([0.1, math.inf]))
def test_sequences_are_assigned_once_to_a_replica_that_holds_them(
    lengths: list[int], replicas: list[SchemeCost], num_buckets: int, share: float, fill: float
) -> None:
    """Whatever the program answers, even nonsense."""
    packers = {cost: ReplicaPacker(cost, lengths, Solver(Deadline(None))) for cost in replicas}
    of_replica = [packers[cost] for cost in replicas]
    relaxation = Relaxation(
        ReplicaClass.of(replicas),
        sorted(lengths),
        num_buckets=num_buckets,
        solver=Solver(Deadline(None)),
    )
    time_ms = share * assigned(lengths, replicas).makespan_ms + 1e-6
    dispatches: list[list[list[int]] | None] = [
        dispatch_by_program(relaxation, time_ms, of_replica, longest_fill=fill)
    ]
    nonsense = np.random.default_rng(0).uniform(
        -1e3, 1e3, (len(relaxation.buckets), len(relaxation.classes))
    )
    order = longest_first(lengths)
    by_nonsense: list[list[int]] = [[] for _ in replicas]
    assign_owed(relaxation, nonsense, order, lengths, of_replica, by_nonsense)
    dispatches.append(by_nonsense)
    for shares in dispatches:
        if shares is None:  # some sequence does not fit into the time
            continue
        check(Assignment(of_replica, shares, Effort(PLENTY)), lengths, replicas)


# ---------------------------------------------------------------- whole plans


@st.composite
def planned_pools(draw: st.DrawFn) -> tuple[list[int], Pool, int]:
    texts = draw(
        st.sampled_from([("4*tp1",), ("tp2+2*tp1", "2*tp2"), ("pp2+2*tp1",), ("pp4", "2*pp2")])
    )
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=14))
    return lengths, Pool.of(*(Strategy.parse(text, 4) for text in texts)), draw(st.integers(60, 99))


def planner(pool: Pool, limit: int, **options: float) -> CertifiedPlanner:
    model = TableCostModel(
        default_limit=limit,
        times=lambda s: Coefficients(2e-3 / s.num_ranks, 0.2 / s.num_ranks, 4.0),
    )
    return CertifiedPlanner(pool, model, **options)  # type: ignore[arg-type]


@settings(max_examples=15)
@given(planned_pools(), st.integers(1, 60))
def test_a_larger_limit_cannot_make_a_strategy_slower(
    case: tuple[list[int], Pool, int], more: int
) -> None:
    """Searches are heuristics, so the smaller plan is compared with the bound, not with a plan."""
    lengths, pool, limit = case
    narrow = planner(pool, limit).explain(lengths)
    roomy = planner(pool, limit + more).explain(lengths)
    for small, large in zip(narrow.strategies, roomy.strategies, strict=True):
        assert small.found_s is not None
        assert large.bound_s is not None
        assert large.bound_s <= small.found_s * (1 + 1e-9)
    for plan in (narrow.plan, roomy.plan):
        for report in (plan.dispatch, plan.packing):
            assert report is not None
            assert report.bound_s <= report.objective_s * (1 + 1e-9)


def test_the_planner_process_keeps_no_memory_of_earlier_batches() -> None:
    """Memory in Python and outside: plans, bounds of pipelines, programs of the solver."""
    draws = np.random.default_rng(0)
    pool = Pool.of(Strategy.parse("pp2", 2))
    process = PlannerProcess(CertifiedPlanner(pool, TableCostModel(default_limit=128)))

    def resident_bytes_after(iterations: range) -> int:
        for iteration in iterations:
            # Few long sequences have the largest bounds and the fastest plans.
            process.request(iteration, draws.integers(64, 128, 4).tolist())
        process.result(iterations[-1])
        return psutil.Process(process.pid).memory_info().rss

    num_first, num_more = 40, 60
    try:
        before = resident_bytes_after(range(num_first))
        after = resident_bytes_after(range(num_first, num_first + num_more))
    finally:
        process.kill()
    # The orders of one batch's long micro-batches take 56 kB, a HiGHS object 2 MB.
    assert after - before < 10_000 * num_more


def test_caches_between_plans_are_bounded() -> None:
    names = [name for _, name, _ in pkgutil.iter_modules(planner_package.__path__)]
    kept = {
        f"{name}.{attribute}": value.cache_info()
        for name in names
        for attribute, value in vars(
            importlib.import_module(f"{planner_package.__name__}.{name}")
        ).items()
        if hasattr(value, "cache_info")
    }
    assert "bounds._best_shapes" in kept
    assert all(info.maxsize is not None and info.maxsize <= 4096 for info in kept.values()), kept
