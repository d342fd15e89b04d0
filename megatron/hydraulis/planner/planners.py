"""The planners: certified, greedy, of a fixed sequence of strategies, and of recorded plans."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import PlanError, why_not_written
from megatron.hydraulis.json_object import read_json, replace_text
from megatron.hydraulis.planner.bounds import dispatch_bound_ms, packing_bound_ms
from megatron.hydraulis.planner.costs import PoolCosts, SchemeCost, checked_batch
from megatron.hydraulis.planner.greedy import longest_first
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.plan import (
    MS_PER_S,
    Candidate,
    IterationPlan,
    PlanExplanation,
    Planner,
    StageReport,
    StrategyOutcome,
    StrategyTime,
)
from megatron.hydraulis.planner.search import TARGET_GAP, StrategySearch, greedy_plan
from megatron.hydraulis.planner.solver import Deadline, Solver
from megatron.hydraulis.planner.wave_packing import packer_for
from megatron.hydraulis.strategy import Pool, Strategy

logger = logging.getLogger(__name__)

PLAN_FILES = "iteration_*.json"
"""Files in the folder of recorded plans."""

_GREEDY = "greedy"
# A strategy is searched unless it is proved to be slower by more than this share.
_ROUNDING = 1e-9
# Work that the searches of one plan may take, in the unit of Effort: about 0.5 s on one core, and
# less where a step waits for the plan.
_EFFORT = 5e7
_IN_LINE_EFFORT = 4e6
# Share of the predicted time that is worth a search where a step waits for it.
_IN_LINE_GAIN = 0.01
_Planned = tuple[IterationPlan, dict[str, float], dict[str, float]]
"""A plan, and by the name of a strategy its bound and the time found for it, in ms."""
_INFEASIBLE = "no replica can hold the longest sequence, or one has no room for its weights"


class CertifiedPlanner:
    """Bounds every strategy of a pool, searches the promising ones, and gives the gap of the best.

    It always gives a valid plan. The search starts from the greedy plan of every strategy and
    replaces it only by a better one. If a solver fails or overruns, the best plan so far is used
    and marked. If the search itself fails, or its plan breaks a rule, the plan is GreedyPlanner's,
    marked as well. Only time_limit_s depends on the clock: without it the same input gives the
    same plan on every machine and under any load.

    Args:
        limits: of the tokens of a micro-batch; None for those of pool file and cost model.
        seed: for the solver's tie-breaking; another seed may give another, equally good plan.
        time_limit_s: wall-clock limit after which the best plan so far is used and marked
            'time limit'. Such a plan may differ between machines. None for no limit.
        is_in_line: whether a step waits for each plan. Strategies are then started only as far as
            they may win, and searches end when at most 1 % is left to gain or little effort is.

    Raises StrategyError when a scheme of the pool does not fit the cost model's model.
    """

    def __init__(
        self,
        pool: Pool,
        cost_model: CostModel,
        limits: Limits | None = None,
        *,
        seed: int = 0,
        time_limit_s: float | None = None,
        is_in_line: bool = False,
    ) -> None:
        self._is_in_line = is_in_line
        self._greedy = GreedyPlanner(pool, cost_model, limits)
        self._costs = self._greedy.costs
        self._seed = seed
        self._time_limit_s = time_limit_s

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """Plan one iteration; see Planner."""
        return self._plan(lengths, iteration)[0]

    def explain(self, lengths: Sequence[int], *, iteration: int = 0) -> PlanExplanation:
        """Plan, and say why each strategy was chosen or not; raises what plan raises."""
        return _explanation(self._costs.pool, *self._plan(lengths, iteration))

    def _plan(self, lengths: Sequence[int], iteration: int) -> _Planned:
        start_s = time.perf_counter()
        batch = checked_batch(lengths, iteration)
        feasible = self._costs.feasible_strategies(batch, iteration)
        solver = Solver(Deadline(self._time_limit_s), seed=self._seed)
        order = longest_first(batch)
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
                    order,
                    packer_of,
                    solver,
                    overhead_ms=self._costs.overheads_ms[strategy.name],
                    target_gap=_IN_LINE_GAIN if self._is_in_line else TARGET_GAP,
                )
                for strategy in feasible
            ]
            best = self._costs.with_rows(
                _search_all(searches, solver, is_in_line=self._is_in_line).candidate(), batch
            )
            plan = replace(
                best.to_plan(iteration, batch, start_s), strategy_times_s=self._times(searches)
            )
            plan.validate(
                batch, best.strategy, partial(self._costs.limits.max_tokens, best.strategy)
            )
        except Exception as error:  # Training continues with the greedy plan.
            logger.warning(
                "plan of iteration %d: the search failed and the greedy plan is used: %r",
                iteration + 1,
                error,
            )
            plan, bounds_ms, found_ms = self._greedy.planned(batch, iteration)
            return _marked(plan, f"{_GREEDY}: {type(error).__name__}"), bounds_ms, found_ms
        bounds_ms = {search.strategy.name: _bound_ms(search) for search in searches}
        found_ms = {s.strategy.name: _found_ms(s) for s in searches if s.is_started}
        return plan, bounds_ms, found_ms

    def _times(self, searches: Sequence[StrategySearch]) -> tuple[StrategyTime, ...]:
        """Times of all started strategies, to the microsecond; empty for a pool of one strategy."""
        if len(self._costs.pool.strategies) == 1:
            return ()
        return tuple(
            StrategyTime(
                search.strategy.name,
                round(min(_bound_ms(search), _found_ms(search)) / MS_PER_S, 6),
                round(_found_ms(search) / MS_PER_S, 6),
            )
            for search in searches
            if search.is_started
        )


def _search_all(
    searches: Sequence[StrategySearch], solver: Solver, *, is_in_line: bool
) -> StrategySearch:
    """Search the strategies that may be the fastest; returns that with the best plan.

    Each search may take half of the effort that is left, the last one all of it.
    """
    least_gain = _IN_LINE_GAIN if is_in_line else _ROUNDING
    for search in sorted(searches, key=_bound_ms):
        most_ms = (1.0 - least_gain) * min(map(_found_ms, searches))
        if not is_in_line or _bound_ms(search) < most_ms:
            search.start()
    best = min(searches, key=_found_ms)
    promising = []
    for search in sorted(searches, key=_bound_ms):
        if not _is_beaten(search, best, least_gain):
            if not is_in_line:
                search.raise_bound()
            promising.append(search)
    left = _IN_LINE_EFFORT if is_in_line else _EFFORT
    promising.sort(key=_bound_ms)
    for search in promising:
        if solver.deadline.is_over:
            break
        if not _is_beaten(search, best, least_gain):
            share = left if search is promising[-1] else left / 2.0
            effort = Effort(share)
            search.search(effort)
            left -= share - effort.left
            best = min(best, search, key=_found_ms)
    return best


def _is_beaten(search: StrategySearch, best: StrategySearch, least_gain: float) -> bool:
    """True if no plan of a strategy can be faster than the best one so far by more than a share."""
    if search is best:
        return False
    return search.excludes(_found_ms(best) * (1.0 - least_gain) - search.overhead_ms)


def _found_ms(search: StrategySearch) -> float:
    return search.found_ms + search.overhead_ms


def _bound_ms(search: StrategySearch) -> float:
    return search.bound_ms + search.overhead_ms


def _explanation(
    pool: Pool, plan: IterationPlan, bounds_ms: Mapping[str, float], found_ms: Mapping[str, float]
) -> PlanExplanation:
    """bounds_ms, found_ms: by name of the strategies that are feasible, and that were searched."""
    outcomes = []
    for name in (strategy.name for strategy in pool.strategies):
        bound_s = found_s = None
        if name in bounds_ms:
            bound_s = bounds_ms[name] / MS_PER_S
        if name in found_ms:
            found_s = found_ms[name] / MS_PER_S
        if name == plan.strategy:
            why = ""
        elif bound_s is None:
            why = _INFEASIBLE
        elif bound_s >= plan.predicted_time_s * (1.0 - 2.0 * _ROUNDING):
            why = f"proved to be no faster than the plan for {plan.strategy!r}"
        else:
            why = f"the plan for {plan.strategy!r} is faster than any found for it"
        if bound_s is not None and found_s is not None:
            bound_s = min(bound_s, found_s)
        outcomes.append(
            StrategyOutcome(name=name, bound_s=bound_s, found_s=found_s, why_not_chosen=why)
        )
    return PlanExplanation(plan=plan, strategies=tuple(outcomes))


def _marked(plan: IterationPlan, status: str) -> IterationPlan:
    def marked(report: StageReport | None) -> StageReport | None:
        return None if report is None else replace(report, status=status)

    return replace(plan, dispatch=marked(plan.dispatch), packing=marked(plan.packing))


class GreedyPlanner:
    """Plans without a solver: longest processing time first, then the exact pipeline time.

    It visits the strategies in the order of their lower bounds until a bound is no better than the
    best plan found.

    Raises StrategyError when a scheme of the pool does not fit the cost model's model.
    """

    def __init__(self, pool: Pool, cost_model: CostModel, limits: Limits | None = None) -> None:
        self.costs = PoolCosts(pool, cost_model, limits)

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """Plan one iteration; see Planner."""
        return self.planned(lengths, iteration)[0]

    def explain(self, lengths: Sequence[int], *, iteration: int = 0) -> PlanExplanation:
        """Plan, and say why each strategy was chosen or not; raises what plan raises."""
        return _explanation(self.costs.pool, *self.planned(lengths, iteration))

    def planned(self, lengths: Sequence[int], iteration: int) -> _Planned:
        """The plan with the times of strategies."""
        start_s = time.perf_counter()
        batch = checked_batch(lengths, iteration)
        feasible = self.costs.feasible_strategies(batch, iteration)
        makespan_bounds_ms = {
            strategy.name: dispatch_bound_ms(batch, self.costs.replica_costs(strategy))
            for strategy in feasible
        }
        bounds_ms = {
            name: bound_ms + self.costs.overheads_ms[name]
            for name, bound_ms in makespan_bounds_ms.items()
        }
        found_ms: dict[str, float] = {}
        best: Candidate | None = None
        # Stable: of equal bounds the pool's first comes first.
        for strategy in sorted(feasible, key=lambda strategy: bounds_ms[strategy.name]):
            if best is not None and bounds_ms[strategy.name] >= best.time_ms:
                break
            candidate = self._candidate(strategy, makespan_bounds_ms[strategy.name], batch)
            found_ms[strategy.name] = candidate.time_ms
            if best is None or candidate.time_ms < best.time_ms:
                best = candidate
        assert best is not None  # some strategy is feasible
        plan = best.to_plan(iteration, batch, start_s)
        plan.validate(batch, best.strategy, partial(self.costs.limits.max_tokens, best.strategy))
        return plan, bounds_ms, found_ms

    def _candidate(self, strategy: Strategy, bound_ms: float, batch: Sequence[int]) -> Candidate:
        start_s = time.perf_counter()
        costs = self.costs.replica_costs(strategy)
        shares, packings, middle_s = greedy_plan(longest_first(batch), batch, costs)
        packing_bounds_ms = [
            packing_bound_ms([batch[sequence] for sequence in share], cost)
            for share, cost in zip(shares, costs, strict=True)
        ]
        end_s = time.perf_counter()
        report = partial(
            StageReport,
            objective_s=max(packing.time_ms for packing in packings) / MS_PER_S,
            status=_GREEDY,
        )
        candidate = Candidate(
            strategy=strategy,
            packings=packings,
            overhead_ms=self.costs.overheads_ms[strategy.name],
            dispatch=report(bound_s=bound_ms / MS_PER_S, seconds=middle_s - start_s),
            packing=report(bound_s=max(packing_bounds_ms) / MS_PER_S, seconds=end_s - middle_s),
        )
        return self.costs.with_rows(candidate, batch)


class ScheduledPlanner:
    """Uses given strategies in turn, one per iteration; it still dispatches and packs.

    Args:
        names: strategies of the pool, at least one; iteration i uses ``names[i % len(names)]``.
        make_planner: makes the planner for a pool of one strategy.

    Raises StrategyError for a name that is not in the pool.
    """

    def __init__(
        self,
        pool: Pool,
        limits: Limits,
        names: Sequence[str],
        make_planner: Callable[[Pool], Planner],
    ) -> None:
        self._names = tuple(names)
        strategies = {name: pool.strategy(name) for name in self._names}
        self._planners = {
            name: make_planner(Pool.of(strategy)) for name, strategy in strategies.items()
        }
        self._max_tokens = {
            name: max(limits.max_tokens(strategy, scheme) for scheme in strategy.schemes)
            for name, strategy in strategies.items()
        }

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """Plan one iteration; also raises PlanError if its strategy cannot hold a sequence."""
        name = self._names[iteration % len(self._names)]
        longest = max(lengths, default=0)
        if longest > self._max_tokens[name]:
            raise PlanError(
                f"iteration {iteration + 1}: --strategy-schedule forces strategy {name!r}, on "
                f"which a micro-batch holds at most {self._max_tokens[name]} tokens, but sequence "
                f"{list(lengths).index(longest)} of the batch has {longest}; force a strategy that "
                f"holds it, lower --seq-length, or leave out --strategy-schedule"
            )
        return self._planners[name].plan(lengths, iteration=iteration)


def plan_path(folder: Path, iteration: int) -> Path:
    """File of an iteration's plan; ``iteration`` counts from 0, the name from 1."""
    return folder / PLAN_FILES.replace("*", f"{iteration + 1:07d}")


def write_plan(
    folder: Path, iteration: int, plan: IterationPlan, sequence_ids: Sequence[int]
) -> None:
    """Record a plan, creating the folder if needed; PlanError if it cannot be written.

    sequence_ids: in the corpus, of the sequences of the batch.
    """
    path = plan_path(folder, iteration)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        content = replace(plan, sequence_ids=tuple(sequence_ids)).to_json()
        replace_text(path, f"{json.dumps(content)}\n")
    except OSError as error:
        raise PlanError(
            f"iteration {iteration + 1}: the plan cannot be written to {path}: "
            f"{why_not_written(error, path)}; make room or name another --plan-dir"
        ) from error


class RecordedPlans:
    """Replays plans from the folder that ``--plan-dir`` of an earlier run wrote.

    Raises PlanError when the folder has no plan.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not plan_path(folder, 0).exists() and not any(folder.glob(PLAN_FILES)):
            raise PlanError(
                f"--replay-plans {folder}: there is no {PLAN_FILES} in it; name a folder that "
                "--plan-dir of an earlier run wrote"
            )

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """The recorded plan of an iteration.

        Raises PlanError when its file is missing, damaged or for other sequences.
        """
        path = plan_path(self._folder, iteration)
        if not path.exists():
            raise PlanError(
                f"iteration {iteration + 1}: {path} was not recorded; train fewer iterations or "
                "plan without --replay-plans"
            )
        try:
            plan = IterationPlan.from_json(read_json(path, "plan", PlanError))
        except PlanError as error:
            raise PlanError(
                f"iteration {iteration + 1}: {path} cannot be read: {error}; record the plans again"
            ) from error
        if plan.lengths != dict(enumerate(lengths)):
            raise PlanError(
                f"iteration {iteration + 1}: {path} is for other sequences than this run samples; "
                "replay with the same data, --seed, batch size and --seq-length"
            )
        return plan
