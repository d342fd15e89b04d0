"""Spans that a plan predicts for each rank, compared with the plan and the cost model."""

from dataclasses import dataclass, replace

import pytest

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.observability.trace import Spans
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planned import planned_spans
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.planner.replica_plan import ContextGroup, MicroBatch, ReplicaPlan
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

LENGTHS = (900, 40, 40, 30, 300, 20, 700, 10, 5, 250)
NUM_RANKS = 6
START_US = 1e6


@dataclass(frozen=True)
class Costs:
    overhead: float = 0.0

    def coefficients(self, scheme: Scheme) -> Coefficients:
        ranks = scheme.num_ranks
        return Coefficients(2e-5 / ranks, 0.02 / ranks, 0.5)

    def max_tokens(self, scheme: Scheme) -> int:
        return 450 * scheme.num_ranks

    def overhead_ms(self, strategy: Strategy) -> float:
        return self.overhead


def planned(costs: Costs) -> IterationPlan:
    strategy = Strategy.parse("pp3@4,2,0+2*tp1@1,5+idle", NUM_RANKS)
    pool = Pool(num_ranks=NUM_RANKS, ranks_per_node=NUM_RANKS, strategies=(strategy,))
    return GreedyPlanner(pool, costs).plan(LENGTHS)


def spans_of(plan: IterationPlan, costs: Costs, rank: int) -> Spans:
    return Spans.of(planned_spans(plan, costs, rank=rank, iteration=1, start_us=START_US))


def test_replicas_take_their_predicted_time() -> None:
    costs = Costs()
    plan = planned(costs)
    for replica in plan.replicas:
        everywhere = [spans_of(plan, costs, rank) for rank in replica.ranks]
        assert min(spans.first_start_us for spans in everywhere) == START_US
        end_us = max(spans.last_end_us for spans in everywhere)
        assert end_us - START_US == pytest.approx(replica.predicted_time_s * 1e6)


def test_each_rank_has_its_own_stage() -> None:
    costs = Costs()
    plan = planned(costs)
    (pipeline,) = [replica for replica in plan.replicas if replica.scheme.pp == 3]
    assert pipeline.ranks == (4, 2, 0)
    for stage, rank in enumerate(pipeline.ranks):
        spans = spans_of(plan, costs, rank)
        assert set(spans.values("stage")) == {stage}
        for name in ("forward", "backward"):
            assert spans.where(name=name).values("micro_batch") == [
                *range(len(pipeline.micro_batches))
            ]
        coefficients = costs.coefficients(pipeline.scheme)
        for index, batch in enumerate(pipeline.micro_batches):
            own = spans.where(micro_batch=index)
            assert own.values("num_tokens") == [batch.num_tokens] * 2
            assert sum(span.duration_us for span in own) == pytest.approx(
                coefficients.time_ms(batch.lengths) * 1e3
            )
    assert not spans_of(plan, costs, 3), "an idle rank has nothing planned"


def test_a_replica_without_sequences_has_nothing_planned() -> None:
    costs = Costs()
    plan = planned(costs)
    empty = replace(plan.replicas[1], micro_batches=(), predicted_time_s=0.0)
    replicas = (plan.replicas[0], empty, *plan.replicas[2:])
    makespan_s = max(replica.predicted_time_s for replica in replicas)
    without = replace(plan, replicas=replicas, predicted_time_s=makespan_s, dispatch=None)
    assert not spans_of(without, costs, empty.ranks[0])


def test_overhead_follows_the_makespan_on_every_rank() -> None:
    costs = Costs(overhead=3.0)
    plan = planned(costs)
    makespan_us = max(replica.predicted_time_s for replica in plan.replicas) * 1e6
    for rank in range(NUM_RANKS):
        (overhead,) = spans_of(plan, costs, rank).where(name="overhead")
        assert overhead.start_us == pytest.approx(START_US + makespan_us)
        assert overhead.duration_us == pytest.approx(3000.0)


def test_groups_of_a_wave_end_together_and_show_their_own_tokens() -> None:
    costs = Costs()
    scheme = Scheme(cp=2, pp=2, splits_cp=True)
    groups = (ContextGroup(0, 1, 1), ContextGroup(1, 1, 2))
    batches = (MicroBatch((0, 1, 2), (400, 30, 20), groups), MicroBatch((3,), (600,)))
    replica = ReplicaPlan(scheme, (0, 1, 2, 3), batches, 1.0)
    (first_ms, second_ms) = replica.times_ms(costs.coefficients)
    assert first_ms == costs.coefficients(Scheme(pp=2)).time_ms((400,))
    assert second_ms == costs.coefficients(Scheme(cp=2, pp=2)).time_ms((600,))
    plan = IterationPlan(iteration=0, strategy="cp2~pp2", replicas=(replica,), predicted_time_s=1.0)
    for rank in range(4):
        spans = spans_of(plan, costs, rank).where(name="forward")
        assert spans.values("num_tokens") == [(400, 50)[rank % 2], 600]
        assert spans.values("cp") == [1, 2]
        durations = [span.duration_us for span in spans_of(plan, costs, rank)]
        assert sum(durations) == pytest.approx((first_ms + second_ms) * 1e3)
