"""What a plan predicts, as spans of a trace."""

from __future__ import annotations

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.pipeline import pipeline_schedule
from megatron.hydraulis.observability.trace import Span
from megatron.hydraulis.planner.plan import IterationPlan

__all__ = ["planned_spans"]

_US_PER_MS = 1e3
_MS_PER_S = 1e3


def planned_spans(
    plan: IterationPlan, cost_model: CostModel, *, rank: int, iteration: int, start_us: float
) -> list[Span]:
    """Forward and backward of each micro-batch on one rank, as the plan's predicted time has them.

    Args:
        plan: of the iteration.
        cost_model: with which it was planned.
        rank: whose spans are wanted; none where it is idle or its replica has no sequence.
        iteration: its number, as logged.
        start_us: when the iteration starts.

    Returns:
        The 1F1B schedule of the rank's stage, in which the groups of a wave end together, with
        tokens and size of the rank's own group; and from the makespan on what of regrouping and
        optimizer the plan does not expect to overlap, as a span 'overhead'.
    """
    spans: list[Span] = []
    makespan_s = max((replica.predicted_time_s for replica in plan.replicas), default=0.0)
    mine = plan.replica_of(rank)
    if mine is not None:
        times_ms = mine.times_ms(cost_model.coefficients)
        position = mine.replica.position_of(rank)
        assert position is not None
        stage = position.stage
        shares = [batch.share_of(position.cp, mine.scheme.cp) for batch in mine.micro_batches]
        spans = [
            Span(
                rank=rank,
                track="compute",
                name="forward" if operation.is_forward else "backward",
                start_us=start_us + operation.start_ms * _US_PER_MS,
                end_us=start_us + operation.end_ms * _US_PER_MS,
                is_planned=True,
                detail={
                    "iteration": iteration,
                    "micro_batch": operation.micro_batch,
                    "stage": stage,
                    "num_tokens": shares[operation.micro_batch].num_tokens,
                    "cp": shares[operation.micro_batch].group.size,
                },
            )
            for operation in pipeline_schedule(times_ms, mine.scheme.pp)
            if operation.stage == stage
        ]
    if plan.predicted_time_s > makespan_s:
        spans.append(
            Span(
                rank=rank,
                track="regroup",
                name="overhead",
                start_us=start_us + makespan_s * _MS_PER_S * _US_PER_MS,
                end_us=start_us + plan.predicted_time_s * _MS_PER_S * _US_PER_MS,
                is_planned=True,
                detail={"iteration": iteration},
            )
        )
    return spans
