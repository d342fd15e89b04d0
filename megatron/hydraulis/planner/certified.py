"""The planner: every strategy bounded, the promising ones searched, the best plan with its gap.

Whatever happens inside, a valid plan comes out: the search starts from the greedy plan of every
strategy and only ever replaces it by a better one; a solver that fails or overruns leaves the plan
in hand and marks it; an error in the search itself, or a plan that does not hold what it has to,
falls back to GreedyPlanner, marked as well. No limit but the safety net time_limit_s looks at the
clock, so without it the same input gives the same plan on every machine and under any load.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.planner.candidate import MS_PER_S
from megatron.hydraulis.planner.explanation import PlanExplanation, StrategyOutcome
from megatron.hydraulis.planner.greedy import GreedyPlanner
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.plan import IterationPlan, StageReport
from megatron.hydraulis.planner.pool_costs import PoolCosts, checked_batch
from megatron.hydraulis.planner.replica_packing import ReplicaPacker
from megatron.hydraulis.planner.solver import Deadline, Solver
from megatron.hydraulis.planner.strategy_search import StrategySearch
from megatron.hydraulis.planner.wave_packer import packer_for
from megatron.hydraulis.strategy import Pool

__all__ = ["CertifiedPlanner"]

logger = logging.getLogger(__name__)

# A strategy that is slower than the best plan by no more than this has to be searched.
_ROUNDING = 1e-9


class CertifiedPlanner:
    """Planner over a pool of strategies; see planner.interface.Planner.

    Args:
        seed: of the solver's tie-breaking; another seed may give another plan, equally good.
        time_limit_s: wall clock after which the best plan in hand is taken and marked
            'time limit'. Such a plan need not be the same elsewhere. None for no limit.

    Raises StrategyError when a scheme of the pool does not fit the cost model's model.
    """

    def __init__(
        self,
        pool: Pool,
        cost_model: CostModel,
        *,
        seed: int = 0,
        time_limit_s: float | None = None,
    ) -> None:
        self._costs = PoolCosts(pool, cost_model)
        self._greedy = GreedyPlanner(pool, cost_model)
        self._seed = seed
        self._time_limit_s = time_limit_s

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """Plan one iteration for lengths of shape (num_sequences,), in tokens.

        Raises PlanError for an empty batch, a length below 1 and a sequence that no strategy can
        hold.
        """
        return self._plan(lengths, iteration)[0]

    def explain(self, lengths: Sequence[int], *, iteration: int = 0) -> PlanExplanation:
        """Plan as plan does, and say what became of every strategy; the same errors."""
        plan, searches = self._plan(lengths, iteration)
        if searches is None:
            return replace(self._greedy.explain(lengths, iteration=iteration), plan=plan)
        by_name = {search.strategy.name: search for search in searches}
        return PlanExplanation(
            plan=plan,
            strategies=tuple(
                _outcome(strategy.name, by_name.get(strategy.name), plan)
                for strategy in self._costs.pool.strategies
            ),
        )

    def _plan(
        self, lengths: Sequence[int], iteration: int
    ) -> tuple[IterationPlan, list[StrategySearch] | None]:
        """The plan and what was found for every able strategy; None for the latter if greedy."""
        start_s = time.perf_counter()
        batch = checked_batch(lengths, iteration)
        able = self._costs.able_strategies(batch, iteration)
        solver = Solver(Deadline(self._time_limit_s), seed=self._seed)
        packers: dict[SchemeCost, ReplicaPacker] = {}

        def packer_of(cost: SchemeCost) -> ReplicaPacker:
            if cost not in packers:
                packers[cost] = packer_for(cost, batch, solver)
            return packers[cost]

        try:
            searches = [
                StrategySearch(
                    strategy,
                    self._costs.replica_costs(strategy),
                    batch,
                    packer_of,
                    solver,
                    overhead_ms=self._costs.overheads_ms[strategy.name],
                )
                for strategy in able
            ]
            best = _search_all(searches, solver)
            plan = best.candidate().to_plan(iteration, start_s)
            plan.validate(batch, best.strategy, partial(self._costs.max_tokens, best.strategy))
        except Exception as error:  # Whatever it is, training goes on with the greedy plan.
            logger.warning(
                "plan of iteration %d: the search failed and the greedy plan is used: %r",
                iteration + 1,
                error,
            )
            plan = self._greedy.plan(batch, iteration=iteration)
            return _marked(plan, f"greedy: {type(error).__name__}"), None
        return plan, searches


def _search_all(searches: Sequence[StrategySearch], solver: Solver) -> StrategySearch:
    """Search the strategies that can win; the one with the best plan."""
    for search in searches:
        search.start()
    best = min(searches, key=_found_ms)
    promising = []
    for search in sorted(searches, key=_bound_ms):
        if not _is_beaten(search, best):
            search.raise_bound()
            promising.append(search)
    for search in sorted(promising, key=_bound_ms):
        if solver.deadline.is_over:
            break
        if not _is_beaten(search, best):
            search.search()
            best = min(best, search, key=_found_ms)
    return best


def _is_beaten(search: StrategySearch, best: StrategySearch) -> bool:
    """Whether it is proved that a strategy has no better plan than the best one in hand."""
    if search is best:
        return False
    return search.excludes((_found_ms(best) - search.overhead_ms) * (1.0 - _ROUNDING))


def _found_ms(search: StrategySearch) -> float:
    return search.found_ms + search.overhead_ms


def _bound_ms(search: StrategySearch) -> float:
    return search.bound_ms + search.overhead_ms


def _outcome(name: str, search: StrategySearch | None, plan: IterationPlan) -> StrategyOutcome:
    if search is None:
        why = "no replica can hold the longest sequence, or one has no room for its weights"
        return StrategyOutcome(name=name, bound_s=None, found_s=None, why_not_chosen=why)
    bound_s, found_s = _bound_ms(search) / MS_PER_S, _found_ms(search) / MS_PER_S
    if name == plan.strategy:
        why = ""
    elif bound_s >= plan.predicted_time_s * (1.0 - 2.0 * _ROUNDING):
        why = f"proved to be no faster than the plan for {plan.strategy!r}"
    else:
        why = f"the plan for {plan.strategy!r} is faster than any found for it"
    return StrategyOutcome(
        name=name, bound_s=min(bound_s, found_s), found_s=found_s, why_not_chosen=why
    )


def _marked(plan: IterationPlan, status: str) -> IterationPlan:
    def marked(report: StageReport | None) -> StageReport | None:
        return None if report is None else replace(report, status=status)

    return replace(plan, dispatch=marked(plan.dispatch), packing=marked(plan.packing))
