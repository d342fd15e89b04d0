"""Plans of fixed-length training: rows of about equal tokens, equally many on every replica.

`fixed_length_shares` of the simulator packs the rows. Padding costs nothing in these plans;
`padded_time_s` is the time with rows padded to the context window, which is the actual cost of
fixed shapes. Attention is not balanced: rows with the same number of tokens differ in Σ s².
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import MicroBatch, ReplicaPlan
from megatron.hydraulis.simulator.ways import fixed_length_shares
from megatron.hydraulis.strategy import Strategy

MS_PER_S = 1000.0


def fixed_length_plan(
    lengths: Sequence[int],
    strategy: Strategy,
    cost_model: CostModel,
    *,
    window_tokens: int,
    iteration: int = 0,
) -> IterationPlan:
    """The plan for a strategy of equal replicas, each with the same number of rows.

    Raises ValueError if replicas differ or cannot hold a row.
    """
    schemes = {replica.scheme for replica in strategy.replicas}
    if len(schemes) != 1 or strategy.idle_ranks:
        raise ValueError(
            f"rows are distributed evenly over equal replicas but these are {strategy}"
        )
    scheme = schemes.pop()
    if cost_model.max_tokens(scheme) < window_tokens:
        raise ValueError(
            f"{scheme} holds {cost_model.max_tokens(scheme)} tokens but a row has {window_tokens}"
        )
    coefficients = cost_model.coefficients(scheme)
    shares = fixed_length_shares(lengths, window_tokens, len(strategy.replicas))
    replicas = []
    for replica, rows in zip(strategy.replicas, shares, strict=True):
        micro_batches = tuple(
            MicroBatch(tuple(row), tuple(lengths[i] for i in row)) for row in rows if row
        )
        times_ms = [coefficients.time_ms(m.lengths) for m in micro_batches]
        time_s = pipeline_time_ms(times_ms, scheme.pp) / MS_PER_S
        replicas.append(ReplicaPlan(scheme, replica.ranks, micro_batches, time_s))
    makespan_s = max(replica.predicted_time_s for replica in replicas)
    return IterationPlan(
        iteration=iteration,
        strategy=strategy.name,
        replicas=tuple(replicas),
        predicted_time_s=makespan_s + cost_model.overhead_ms(strategy) / MS_PER_S,
    )


def padded_time_s(plan: IterationPlan, cost_model: CostModel, *, window_tokens: int) -> float:
    """Predicted makespan of such a plan if every row is padded to the context window.

    Padding costs what tokens cost outside attention.
    """
    slowest_ms = 0.0
    for replica in plan.replicas:
        coefficients = cost_model.coefficients(replica.scheme)
        times_ms = [
            coefficients.time_ms(m.lengths)
            + coefficients.b_ms_per_token * (window_tokens - m.num_tokens)
            for m in replica.micro_batches
        ]
        slowest_ms = max(slowest_ms, pipeline_time_ms(times_ms, replica.scheme.pp))
    return slowest_ms / MS_PER_S
