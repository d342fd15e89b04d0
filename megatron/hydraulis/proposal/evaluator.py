"""Evaluates mixes with the planner: bounds and plans for given batches. All results are kept.

A full plan takes a second. Most mixes get less: the planner's bound, and a quick plan, which is the
planner's first one after some moves and swaps. The time of the full plan lies between them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.planner.costs import PoolCosts, SchemeCost
from megatron.hydraulis.planner.greedy import dispatch, longest_first
from megatron.hydraulis.planner.improve import Assignment, improve_dispatch
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.search import TARGET_GAP, StrategySearch
from megatron.hydraulis.planner.solver import Deadline, Solver
from megatron.hydraulis.planner.wave_packing import packer_for
from megatron.hydraulis.proposal.candidates import Candidates, Mix
from megatron.hydraulis.strategy import Pool

_MS_PER_S = 1e3
_STEP = 0.04
"""First step of the search for the bound, as a share of the time; each next one is doubled."""
_BOUND_GAP = 0.02
"""Precision of the bound, as a share of the time; its distance to the plan is larger."""
_TIGHT = 3e-3
"""A quick plan this close to its bound is expected to be as good as the full one."""
_QUICK_EFFORT = 6e6
"""Of a quick plan: chosen by hand, much less than what a full one may take."""
_QUICK_STEPS = 200
_PLAN_ABOVE_BOUND = 0.75
"""Assumed position of plans between bound and quick plan, to select what to plan: chosen by eye
from 44 plans of the 32B example on 64 ranks, neither fitted nor computed."""
_PLAN_BELOW_QUICK = 0.06
"""Assumed largest gain of a full plan over a quick one: chosen by eye from the same plans."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """Limits of the time of a plan, overhead included."""

    bound_ms: float
    """No plan takes less."""
    quick_ms: float
    """Time of the quick plan."""

    @property
    def is_tight(self) -> bool:
        """Whether there is hardly a better plan than the quick one."""
        return self.quick_ms * (1.0 - _TIGHT) <= self.bound_ms

    @property
    def expected_ms(self) -> float:
        """Expected time of the full plan."""
        if self.is_tight:
            return self.quick_ms
        between_ms = self.bound_ms + _PLAN_ABOVE_BOUND * (self.quick_ms - self.bound_ms)
        return max(between_ms, self.quick_ms * (1.0 - _PLAN_BELOW_QUICK))


class Evaluator:
    """Bounds and plans of mixes for given batches.

    Args:
        batches: shape (num_batches, …), lengths in tokens.
        seed: of the planner.
        row_quantum: to which plans round rows up, in tokens; bounds leave that padding out.
    """

    def __init__(
        self,
        candidates: Candidates,
        cost_model: CostModel,
        batches: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        row_quantum: int = 1,
    ) -> None:
        self._limits = Limits(cost_model, row_quantum=row_quantum)
        self._candidates = candidates
        self._cost_model = cost_model
        self.batches = batches
        self.longest = tuple(max(batch) for batch in batches)
        self._orders = [longest_first(batch) for batch in batches]
        self._seed = seed
        self._pools: dict[Mix, tuple[Pool, PoolCosts]] = {}
        self._bounds: dict[tuple[Mix, int], Bounded] = {}
        self._plans_ms: dict[tuple[Mix, int], float] = {}
        self._packers: dict[tuple[SchemeCost, int], ReplicaPacker] = {}
        self._solver = Solver(Deadline(None), seed=seed)
        self._fastest_ms = [math.inf] * len(batches)
        """Of the quick plans known for each batch."""

    def evaluated(self) -> Iterator[tuple[Mix, int, Bounded]]:
        """Yields mixes and batches with their bounds, in the order in which they were computed."""
        for (mix, batch), bounded in self._bounds.items():
            yield mix, batch, bounded

    @property
    def num_bounds(self) -> int:
        """Bounds computed so far."""
        return len(self._bounds)

    @property
    def num_plans(self) -> int:
        """Plans made so far."""
        return len(self._plans_ms)

    def holds(self, mix: Mix, batch: int) -> bool:
        """Whether some replica holds the longest sequence of a batch."""
        return self._candidates.limit(mix) >= self.longest[batch]

    def overhead_ms(self, mix: Mix) -> float:
        """What regrouping and optimizer add to the makespan of a mix."""
        pool, costs = self._pool(mix)
        return costs.overheads_ms[pool.strategies[0].name]

    def bounded(self, mix: Mix, batch: int, estimate_ms: float) -> Bounded:
        """Bound and quick plan of a mix that holds the batch.

        estimate_ms: where the search for the bound starts; a wrong one only costs time. If the
        quick plan is far slower than the fastest one known for the batch, the bound is rough.
        """
        if (mix, batch) not in self._bounds:
            found = self._bounds[mix, batch] = self._bounded(mix, batch, estimate_ms)
            self._fastest_ms[batch] = min(self._fastest_ms[batch], found.quick_ms)
        return self._bounds[mix, batch]

    def is_planned(self, mix: Mix, batch: int) -> bool:
        """Whether the time of the full plan is known."""
        return (mix, batch) in self._plans_ms

    def plan_ms(self, mix: Mix, batch: int) -> float:
        """The predicted time of the plan of a mix that holds the batch."""
        if not self.is_planned(mix, batch):
            pool, _ = self._pool(mix)
            planner = CertifiedPlanner(pool, self._cost_model, self._limits, seed=self._seed)
            plan = planner.plan(self.batches[batch])
            self._plans_ms[mix, batch] = plan.predicted_time_s * _MS_PER_S
        return self._plans_ms[mix, batch]

    def _pool(self, mix: Mix) -> tuple[Pool, PoolCosts]:
        if mix not in self._pools:
            pool = Pool.of(self._candidates.strategy(mix))
            self._pools[mix] = (pool, PoolCosts(pool, self._cost_model, self._limits))
        return self._pools[mix]

    def _bounded(self, mix: Mix, batch: int, estimate_ms: float) -> Bounded:
        pool, costs = self._pool(mix)
        strategy = pool.strategies[0]
        replica_costs = costs.replica_costs(strategy)
        overhead_ms = self.overhead_ms(mix)
        search = StrategySearch(
            strategy,
            replica_costs,
            self.batches[batch],
            self._orders[batch],
            partial(self._packer, batch),
            self._solver,
            overhead_ms=overhead_ms,
        )
        quick_ms = self._quick_ms(replica_costs, batch, search.bound_ms)
        if (quick_ms + overhead_ms) * (1.0 - _PLAN_BELOW_QUICK) < self._fastest_ms[batch]:
            _raise_bound(search, estimate_ms - overhead_ms, quick_ms)
        return Bounded(search.bound_ms + overhead_ms, quick_ms + overhead_ms)

    def _quick_ms(self, costs: Sequence[SchemeCost], batch: int, bound_ms: float) -> float:
        """Makespan of the first plan after some moves and swaps."""
        quick = Assignment(
            [self._packer(batch, cost) for cost in costs],
            dispatch(self._orders[batch], self.batches[batch], costs),
            Effort(_QUICK_EFFORT),
        )
        improve_dispatch(quick, bound_ms / (1.0 - TARGET_GAP), _QUICK_STEPS)
        return quick.makespan_ms

    def _packer(self, batch: int, cost: SchemeCost) -> ReplicaPacker:
        if (cost, batch) not in self._packers:
            self._packers[cost, batch] = packer_for(cost, self.batches[batch], self._solver)
        return self._packers[cost, batch]


def _raise_bound(search: StrategySearch, estimate_ms: float, quick_ms: float) -> None:
    """Raises the bound to within _BOUND_GAP of what the planner's program can prove.

    Growing steps up or down from the estimate, then bisection: this solves fewer programs than
    bisection alone.
    """
    high_ms = quick_ms * (1.0 - _TIGHT)
    time_ms, step = min(estimate_ms, high_ms), _STEP
    if search.excludes(time_ms):
        while time_ms < high_ms:
            time_ms, step = min(time_ms * (1.0 + step), high_ms), 2.0 * step
            if not search.excludes(time_ms):
                high_ms = time_ms
    else:
        high_ms = time_ms
        while time_ms > search.bound_ms:
            time_ms, step = time_ms * (1.0 - step), 2.0 * step
            if not search.excludes(time_ms):
                high_ms = time_ms
    while high_ms - search.bound_ms > _BOUND_GAP * high_ms:
        middle_ms = (search.bound_ms + high_ms) / 2.0
        if not search.excludes(middle_ms):
            high_ms = middle_ms
