"""All plans of a few sequences: the best one, in full, and when there is none to be had."""

import math

import pytest

from megatron.hydraulis.cost_model import Coefficients, pipeline_time_ms
from megatron.hydraulis.planner.modes import ReplicaClass
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.small_batch import (
    MAX_SMALL_BATCH,
    SmallPlan,
    best_small_plan,
    is_small,
)
from tests.support.brute_force import ReplicaFigures, best_makespan_ms

PIPE = ReplicaFigures(1e-3, 0.3, 5.0, 120, num_stages=4)
FAST = ReplicaFigures(2e-3, 0.4, 8.0, 60)
SLOW = ReplicaFigures(4e-3, 0.9, 4.0, 30)


def cost_of(figures: ReplicaFigures) -> SchemeCost:
    return SchemeCost(
        Coefficients(figures.a_ms_per_token2, figures.b_ms_per_token, figures.c_ms),
        figures.max_tokens,
        figures.num_stages,
    )


def found(
    lengths: list[int], replicas: list[ReplicaFigures], found_ms: float = math.inf
) -> SmallPlan | None:
    classes = ReplicaClass.of([cost_of(figures) for figures in replicas])
    assert is_small(len(lengths), classes)
    return best_small_plan(lengths, classes, found_ms)


def makespan_ms(plan: SmallPlan, lengths: list[int], replicas: list[ReplicaFigures]) -> float:
    """Of the plan, counted anew; it holds every sequence once, within the limits."""
    seen: list[int] = []
    times_ms = []
    for micro_batches, figures in zip(plan.micro_batches, replicas, strict=True):
        shares = [[lengths[i] for i in members] for members in micro_batches]
        assert all(0 < sum(share) <= figures.max_tokens for share in shares)
        seen += [i for members in micro_batches for i in members]
        works_ms = [cost_of(figures).coefficients.time_ms(share) for share in shares]
        times_ms.append(pipeline_time_ms(works_ms, figures.num_stages))
    assert sorted(seen) == list(range(len(lengths)))
    return max(times_ms)


@pytest.mark.parametrize(
    ("lengths", "replicas"),
    [
        ([25], [FAST, SLOW, PIPE]),
        ([60, 59, 58, 7, 1], [PIPE]),
        ([60, 30, 30, 20, 20, 10, 5], [SLOW, PIPE, FAST]),
        ([20] * 8, [FAST, FAST, FAST]),
        # The pipeline alone holds the first; the replicas of a class do not stand together.
        ([100, 30, 30, 30, 12, 3], [SLOW, PIPE, SLOW]),
    ],
)
def test_it_is_the_best_of_all_plans(lengths: list[int], replicas: list[ReplicaFigures]) -> None:
    plan = found(lengths, replicas)
    assert plan is not None
    best_ms = best_makespan_ms(lengths, replicas)
    assert makespan_ms(plan, lengths, replicas) == pytest.approx(best_ms)
    # Only what is faster than the plan in hand is an answer.
    again = found(lengths, replicas, found_ms=best_ms * 1.001)
    assert again is not None
    assert makespan_ms(again, lengths, replicas) == pytest.approx(best_ms)
    assert found(lengths, replicas, found_ms=best_ms) is None


def test_far_more_replicas_than_sequences() -> None:
    replicas = [FAST, *([SLOW] * 500)]
    plan = found([20, 20, 20], replicas)
    assert plan is not None
    assert sum(bool(micro_batches) for micro_batches in plan.micro_batches) == 3
    assert makespan_ms(plan, [20, 20, 20], replicas) == pytest.approx(23.6)


def test_no_plan_without_room() -> None:
    assert found([61, 5], [FAST, SLOW]) is None


def test_what_takes_no_time_cannot_be_made_faster() -> None:
    free = ReplicaFigures(0.0, 0.0, 0.0, 60, num_stages=2)
    assert found([5, 6], [free], found_ms=0.0) is None


def test_long_pipelines_and_larger_batches_are_not_small() -> None:
    def small(num_sequences: int, num_stages: int) -> bool:
        figures = ReplicaFigures(1e-3, 0.3, 5.0, 120, num_stages=num_stages)
        return is_small(num_sequences, ReplicaClass.of([cost_of(figures), cost_of(FAST)]))

    assert small(MAX_SMALL_BATCH, 4)
    assert not small(MAX_SMALL_BATCH + 1, 1)
    assert not small(MAX_SMALL_BATCH, 64)
    assert small(5, 64)
