"""Long sequences on few replicas: the program gives bounds, the search finds valid plans."""

import math
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.costs import ReplicaClass, SchemeCost
from megatron.hydraulis.planner.long_sequences import LongSequences, anneal_long, long_sequences
from megatron.hydraulis.planner.solver import Deadline, Solver
from tests.support.brute_force import best_makespan_ms, figures_of

LIMIT = 400
ROUNDING = 1e-9


FORMS = st.builds(
    Coefficients,
    st.sampled_from([0.0, 1e-3]),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 20.0, 200.0]),
)


@st.composite
def replica_costs(draw: st.DrawFn) -> list[SchemeCost]:
    """One to three replicas of up to two costs of up to three forms, the first a pipeline; some
    costs are 0."""
    kinds = []
    for num_stages in (draw(st.integers(2, 4)), draw(st.integers(1, 3))):
        first, *others = draw(st.lists(FORMS, min_size=1, max_size=3))
        host_ms = draw(st.sampled_from([0.0, 0.0, 500.0]))
        limit = LIMIT + draw(st.integers(0, LIMIT))
        coefficients = replace(first, others=tuple(others), host_ms=host_ms)
        kinds.append(SchemeCost(coefficients, limit, num_stages))
    return [kinds[0], *draw(st.lists(st.sampled_from(kinds), max_size=2))]


LENGTHS = st.lists(st.integers(LIMIT // 4, LIMIT), min_size=1, max_size=6).map(sorted)


FREE = SchemeCost(Coefficients(0.0, 0.0, 0.0), LIMIT, 2)


@settings(max_examples=60)
@given(replica_costs(), LENGTHS)
@example([FREE], [LIMIT // 2 + 1])
@example([FREE], [LIMIT] * 6)
@example([replace(FREE, num_stages=1)], [100, 100, 201])
@example([FREE, replace(FREE, num_stages=1)], [LIMIT] * 6)
def test_the_optimal_time_is_feasible(costs: list[SchemeCost], lengths: list[int]) -> None:
    best_ms = best_makespan_ms(lengths, [figures_of(cost) for cost in costs])
    program = LongSequences(ReplicaClass.of(costs), lengths, Solver(Deadline(None)))
    assert not program.is_impossible(best_ms * (1.0 + ROUNDING))


@given(replica_costs(), LENGTHS)
def test_the_program_gives_a_positive_bound(costs: list[SchemeCost], lengths: list[int]) -> None:
    classes = ReplicaClass.of(costs)
    program = LongSequences(classes, lengths, Solver(Deadline(None)))
    least_ms = max(
        min(cost.num_stages * cost.coefficients.time_ms((length,)) for cost in costs)
        for length in lengths
    )
    if least_ms > 0.0:
        assert program.is_impossible(0.99 * least_ms)


def test_a_pipeline_needs_the_time_of_its_long_micro_batches_in_the_best_order() -> None:
    """Four equal long ones on four stages take (4 + 3)·t, however many short ones there are."""
    cost = SchemeCost(Coefficients(0.0, 1.0, 0.0), 100, 4)
    short = SchemeCost(Coefficients(0.0, 1.0, 0.0), 10, 1)
    programs = long_sequences(
        ReplicaClass.of([cost, short]), [5, 10, 60, 60, 60, 60], Solver(Deadline(None))
    )
    assert [program.lengths for program in programs] == [(60, 60, 60, 60)]
    assert programs[0].is_impossible(419.0)
    assert not programs[0].is_impossible(420.1)


@settings(max_examples=15)
@given(replica_costs().filter(lambda costs: len(costs) > 1), LENGTHS)
def test_the_search_finds_a_plan_with_the_time_it_claims(
    costs: list[SchemeCost], lengths: list[int]
) -> None:
    falling = lengths[::-1]
    everything = list(range(len(falling)))
    found = anneal_long(falling, costs, [everything, *([] for _ in costs[1:])])
    assert found is not None
    assert sorted(i for of in found.micro_batches for m in of for i in m) == everything
    times_ms = []
    for cost, micro_batches in zip(costs, found.micro_batches, strict=True):
        assert all(sum(falling[i] for i in m) <= cost.max_tokens for m in micro_batches)
        works_ms = [cost.coefficients.time_ms(falling[i] for i in m) for m in micro_batches]
        host_ms = len(works_ms) * cost.coefficients.host_ms
        times_ms.append(max(pipeline_time_ms(works_ms, cost.num_stages), host_ms))
    assert math.isclose(max(times_ms), found.makespan_ms, rel_tol=ROUNDING)


def test_the_search_halves_the_work() -> None:
    """From 24 against 16 to 20 against 20."""
    cost = SchemeCost(Coefficients(0.0, 1.0, 0.0), 10, 1)
    found = anneal_long([9, 8, 7, 6, 5, 5], [cost, cost], [[0, 1, 2], [3, 4, 5]])
    assert found is not None
    assert found.makespan_ms == 20.0
