"""A planner without a solver: longest processing time first, then the exact pipeline time.

It looks at every strategy that can hold the batch, in the order of their lower bounds, until a
bound is no better than the best plan found. All choices depend on the lengths, the pool and the
cost model alone, ties included, so every machine finds the same plan.
"""

import time
from collections.abc import Sequence
from functools import partial

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.planner.bounds import dispatch_bound_ms, packing_bound_ms
from megatron.hydraulis.planner.candidate import MS_PER_S, Candidate, StageResult
from megatron.hydraulis.planner.dispatch import dispatch
from megatron.hydraulis.planner.explanation import PlanExplanation, StrategyOutcome
from megatron.hydraulis.planner.packing import pack
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.pool_costs import PoolCosts, checked_batch
from megatron.hydraulis.planner.wave_packer import pack_waves
from megatron.hydraulis.strategy import Pool, Strategy

__all__ = ["GreedyPlanner"]

_STATUS = "greedy"


class GreedyPlanner:
    """Planner over a pool of strategies; see planner.interface.Planner.

    Raises StrategyError when a scheme of the pool does not fit the cost model's model.
    """

    def __init__(self, pool: Pool, cost_model: CostModel) -> None:
        self._costs = PoolCosts(pool, cost_model)

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """Plan one iteration for lengths of shape (num_sequences,), in tokens.

        Raises PlanError for an empty batch, a length below 1 and a sequence that no strategy can
        hold.
        """
        return self._plan(lengths, iteration)[0]

    def explain(self, lengths: Sequence[int], *, iteration: int = 0) -> PlanExplanation:
        """Plan as plan does, and say what became of every strategy; the same errors."""
        plan, bounds_ms, found_ms = self._plan(lengths, iteration)
        outcomes = (
            self._outcome(strategy, plan, bounds_ms.get(strategy.name), found_ms.get(strategy.name))
            for strategy in self._costs.pool.strategies
        )
        return PlanExplanation(plan=plan, strategies=tuple(outcomes))

    def _plan(
        self, lengths: Sequence[int], iteration: int
    ) -> tuple[IterationPlan, dict[str, float], dict[str, float]]:
        """The plan, and by the name of a strategy its bound and the time found, in ms."""
        start_s = time.perf_counter()
        batch = checked_batch(lengths, iteration)
        able = self._costs.able_strategies(batch, iteration)
        order = sorted(range(len(batch)), key=lambda sequence: (-batch[sequence], sequence))
        makespan_bounds_ms = {
            strategy.name: dispatch_bound_ms(batch, self._costs.replica_costs(strategy))
            for strategy in able
        }
        # Strategies compete with all that an iteration takes, overhead included.
        bounds_ms = {
            name: bound_ms + self._costs.overheads_ms[name]
            for name, bound_ms in makespan_bounds_ms.items()
        }
        found_ms: dict[str, float] = {}
        best: Candidate | None = None
        # Stable: of equal bounds the pool's first comes first.
        for strategy in sorted(able, key=lambda strategy: bounds_ms[strategy.name]):
            if best is not None and bounds_ms[strategy.name] >= best.time_ms:
                break
            candidate = self._try(strategy, makespan_bounds_ms[strategy.name], batch, order)
            found_ms[strategy.name] = candidate.time_ms
            if best is None or candidate.time_ms < best.time_ms:
                best = candidate
        assert best is not None  # able is never empty
        plan = best.to_plan(iteration, start_s)
        plan.validate(batch, best.strategy, partial(self._costs.max_tokens, best.strategy))
        return plan, bounds_ms, found_ms

    def _outcome(
        self,
        strategy: Strategy,
        plan: IterationPlan,
        bound_ms: float | None,
        found_ms: float | None,
    ) -> StrategyOutcome:
        if strategy.name == plan.strategy:
            why = ""
        elif bound_ms is None:
            why = "no replica can hold the longest sequence, or one has no room for its weights"
        elif found_ms is None:
            why = f"its bound is no better than the plan for {plan.strategy!r}"
        else:
            why = f"the plan for {plan.strategy!r} is faster"
        return StrategyOutcome(
            name=strategy.name,
            bound_s=None if bound_ms is None else bound_ms / MS_PER_S,
            found_s=None if found_ms is None else found_ms / MS_PER_S,
            why_not_chosen=why,
        )

    def _try(
        self, strategy: Strategy, bound_ms: float, batch: Sequence[int], order: Sequence[int]
    ) -> Candidate:
        dispatch_start_s = time.perf_counter()
        costs = self._costs.replica_costs(strategy)
        shares = dispatch(order, batch, costs)
        packing_start_s = time.perf_counter()
        packings = [
            pack(share, batch, cost) if cost.waves is None else pack_waves(share, batch, cost)
            for share, cost in zip(shares, costs, strict=True)
        ]
        packing_bounds_ms = [
            packing_bound_ms([batch[sequence] for sequence in share], cost)
            for share, cost in zip(shares, costs, strict=True)
        ]
        end_s = time.perf_counter()
        return Candidate(
            strategy=strategy,
            packings=packings,
            overhead_ms=self._costs.overheads_ms[strategy.name],
            dispatch=StageResult(
                bound_ms=bound_ms, seconds=packing_start_s - dispatch_start_s, status=_STATUS
            ),
            packing=StageResult(
                bound_ms=max(packing_bounds_ms), seconds=end_s - packing_start_s, status=_STATUS
            ),
        )
