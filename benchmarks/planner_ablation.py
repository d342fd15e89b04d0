"""Simpler ways to plan a batch, each with one idea more, and where a rank's time goes.

Every method is given the same pool, cost model and 1F1B recurrence, and takes the strategy that is
fastest for it. The sequences come in the order in which they were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.certified import CertifiedPlanner
from megatron.hydraulis.planner.dispatch import dispatch
from megatron.hydraulis.planner.packing import SchemeCost, best_fit
from megatron.hydraulis.planner.pool_costs import PoolCosts
from megatron.hydraulis.simulator.fixed_length import deal_fixed_rows, deal_padded
from megatron.hydraulis.strategy import Pool, Strategy

METHODS = ("padding only", "fixed-length packing", "greedy dispatch + fixed length", "full planner")
PARTS = ("work", "padding", "micro-batch cost", "pipeline fill", "idle")


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """On one stage, without the constant cost."""

    work_ms: float
    padding_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodResult:
    """One method on one batch."""

    strategy: str
    time_ms: float
    parts_ms: dict[str, float]
    """By part, mean over all ranks; they add up to the time."""


class Ablation:
    """All methods on the batches of one pool."""

    def __init__(self, pool: Pool, cost_model: CostModel) -> None:
        self._pool = pool
        self._costs = PoolCosts(pool, cost_model)
        self._planner = CertifiedPlanner(pool, cost_model)

    def results(self, batch: Sequence[int]) -> dict[str, MethodResult]:
        """By method."""
        return {
            METHODS[0]: self._best(batch, _padded),
            METHODS[1]: self._best(batch, _fixed_rows),
            METHODS[2]: self._best(batch, _greedy),
            METHODS[3]: self._full(batch),
        }

    def _best(
        self,
        batch: Sequence[int],
        method: Callable[[Sequence[int], list[SchemeCost]], list[list[_MicroBatch]] | None],
    ) -> MethodResult:
        results = []
        for strategy in self._costs.able_strategies(batch, iteration=0):
            costs = self._costs.replica_costs(strategy)
            replicas = method(batch, costs)
            if replicas is not None:
                results.append(_result(strategy, costs, replicas))
        return min(results, key=lambda result: result.time_ms)

    def _full(self, batch: Sequence[int]) -> MethodResult:
        plan = self._planner.plan(batch)
        strategy = self._pool.strategy(plan.strategy)
        costs = self._costs.replica_costs(strategy)
        replicas = [
            [_micro_batch(micro_batch.lengths, cost) for micro_batch in replica.micro_batches]
            for replica, cost in zip(plan.replicas, costs, strict=True)
        ]
        return _result(strategy, costs, replicas)


def _padded(batch: Sequence[int], costs: list[SchemeCost]) -> list[list[_MicroBatch]] | None:
    """Every sequence padded to the longest, as many to a micro-batch as fit, dealt in turn.

    Only for equal replicas: padded rows are all alike, so plain data parallelism deals them out.
    """
    if len(set(costs)) > 1:
        return None
    cost = costs[0]
    row_ms = cost.sequence_time_ms(max(batch))

    def row_batch(members: Sequence[int]) -> _MicroBatch:
        work_ms = math.fsum(cost.sequence_time_ms(batch[sequence]) for sequence in members)
        return _MicroBatch(work_ms, len(members) * row_ms - work_ms)

    dealt = deal_padded(batch, len(costs), cost.max_tokens)
    return [[row_batch(members) for members in replica] for replica in dealt]


def _fixed_rows(batch: Sequence[int], costs: list[SchemeCost]) -> list[list[_MicroBatch]] | None:
    """Packed by best fit into rows as long as the longest sequence, dealt in turn.

    What is left of a row is padding that costs b but looks at nothing. As many rows to a
    micro-batch as fit. Only for equal replicas, as above.
    """
    if len(set(costs)) > 1:
        return None
    cost, row_tokens = costs[0], max(batch)
    b_ms = cost.coefficients.b_ms_per_token

    def row_batch(rows: Sequence[Sequence[int]]) -> _MicroBatch:
        lengths = [batch[sequence] for row in rows for sequence in row]
        padding_ms = b_ms * (len(rows) * row_tokens - sum(lengths))
        return _MicroBatch(_micro_batch(lengths, cost).work_ms, padding_ms)

    dealt = deal_fixed_rows(batch, len(costs), cost.max_tokens, row_tokens)
    return [[row_batch(rows) for rows in replica] for replica in dealt]


def _greedy(batch: Sequence[int], costs: list[SchemeCost]) -> list[list[_MicroBatch]] | None:
    """Longest processing time first; every replica packs by best fit up to its limit of tokens.

    Micro-batches of equal size, not of equal work, in the order in which they were opened. Without
    padding: a packed row may end anywhere.
    """
    shares = dispatch(_longest_first(batch), batch, costs)
    return [
        [
            _micro_batch([batch[sequence] for sequence in members], cost)
            for members in best_fit(share, batch, cost.max_tokens)
        ]
        for share, cost in zip(shares, costs, strict=True)
    ]


def _longest_first(batch: Sequence[int]) -> list[int]:
    return sorted(range(len(batch)), key=lambda sequence: (-batch[sequence], sequence))


def _micro_batch(lengths: Sequence[int], cost: SchemeCost) -> _MicroBatch:
    return _MicroBatch(math.fsum(cost.sequence_time_ms(length) for length in lengths))


def _result(
    strategy: Strategy, costs: Sequence[SchemeCost], replicas: Sequence[Sequence[_MicroBatch]]
) -> MethodResult:
    times_ms = []
    for micro_batches, cost in zip(replicas, costs, strict=True):
        c_ms = cost.coefficients.c_ms
        busy_ms = [m.work_ms + m.padding_ms + c_ms for m in micro_batches]
        times_ms.append(pipeline_time_ms(busy_ms, cost.num_stages))
    makespan_ms = max(times_ms)
    parts_ms = dict.fromkeys(PARTS, 0.0)
    num_ranks = strategy.num_ranks
    for replica, micro_batches, cost, time_ms in zip(
        strategy.replicas, replicas, costs, times_ms, strict=True
    ):
        share = len(replica.ranks) / num_ranks
        work_ms = math.fsum(m.work_ms for m in micro_batches)
        padding_ms = math.fsum(m.padding_ms for m in micro_batches)
        cost_ms = len(micro_batches) * cost.coefficients.c_ms
        # Not below 0 by a rounding error.
        fill_ms = max(0.0, time_ms - work_ms - padding_ms - cost_ms)
        amounts_ms = (work_ms, padding_ms, cost_ms, fill_ms, makespan_ms - time_ms)
        for part, amount_ms in zip(PARTS, amounts_ms, strict=True):
            parts_ms[part] += share * amount_ms
    return MethodResult(strategy=strategy.name, time_ms=makespan_ms, parts_ms=parts_ms)
