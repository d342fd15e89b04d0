"""What a mix takes for a batch, by the planner: its bound, and its plan. Everything is kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.planner.certified import CertifiedPlanner
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.pool_costs import PoolCosts
from megatron.hydraulis.planner.replica_packing import ReplicaPacker
from megatron.hydraulis.planner.solver import Deadline, Solver
from megatron.hydraulis.planner.strategy_search import StrategySearch
from megatron.hydraulis.proposal.menu import Menu, Mix
from megatron.hydraulis.strategy import Pool

__all__ = ["Bounded", "Judge"]

_MS_PER_S = 1e3
_STEP = 0.02
"""Steps by which times are asked for, as a share."""
_TIGHT = 3e-3
"""A greedy plan this close to its bound needs no better one."""
_PLAN_ABOVE_BOUND = 0.15
"""Where plans usually lie between the bound and the greedy plan, for choosing what to plan."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """Times that a plan lies between, overhead included."""

    bound_ms: float
    """No plan takes less."""
    greedy_ms: float
    """The greedy plan takes this."""

    @property
    def is_tight(self) -> bool:
        """Whether a better plan than the greedy one can hardly be."""
        return self.greedy_ms * (1.0 - _TIGHT) <= self.bound_ms

    @property
    def expected_ms(self) -> float:
        """A guess at what the plan will take."""
        if self.is_tight:
            return self.greedy_ms
        return self.bound_ms + _PLAN_ABOVE_BOUND * (self.greedy_ms - self.bound_ms)


class Judge:
    """Bounds and plans of mixes for given batches.

    Args:
        batches: shape (num_batches, …), lengths in tokens.
    """

    def __init__(
        self,
        menu: Menu,
        cost_model: CostModel,
        batches: Sequence[Sequence[int]],
        *,
        seed: int = 0,
    ) -> None:
        self._menu = menu
        self._cost_model = cost_model
        self.batches = batches
        self.longest = tuple(max(batch) for batch in batches)
        self._seed = seed
        self._pools: dict[Mix, tuple[Pool, PoolCosts]] = {}
        self._bounds: dict[tuple[Mix, int], Bounded] = {}
        self._plans_ms: dict[tuple[Mix, int], float] = {}
        self._packers: dict[tuple[SchemeCost, int], ReplicaPacker] = {}

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
        return self._menu.limit(mix) >= self.longest[batch]

    def bounded(self, mix: Mix, batch: int, estimate_ms: float) -> Bounded:
        """Bound and greedy plan of a mix that holds the batch.

        estimate_ms: where the bound is looked for first; a wrong one costs time only.
        """
        known = self._bounds.get((mix, batch))
        if known is None:
            known = self._bounds[mix, batch] = self._bounded(mix, batch, estimate_ms)
        return known

    def is_planned(self, mix: Mix, batch: int) -> bool:
        """Whether the time of a plan is known, be it the greedy one where that is tight."""
        bounded = self._bounds.get((mix, batch))
        return (mix, batch) in self._plans_ms or (bounded is not None and bounded.is_tight)

    def plan_ms(self, mix: Mix, batch: int) -> float:
        """The predicted time of the plan of a mix that holds the batch."""
        known = self._plans_ms.get((mix, batch))
        if known is None:
            pool, _ = self._pool(mix)
            plan = CertifiedPlanner(pool, self._cost_model, seed=self._seed).plan(
                self.batches[batch]
            )
            known = self._plans_ms[mix, batch] = plan.predicted_time_s * _MS_PER_S
        return known

    def _pool(self, mix: Mix) -> tuple[Pool, PoolCosts]:
        if mix not in self._pools:
            pool = Pool.of(self._menu.strategy(mix))
            self._pools[mix] = (pool, PoolCosts(pool, self._cost_model))
        return self._pools[mix]

    def _bounded(self, mix: Mix, batch: int, estimate_ms: float) -> Bounded:
        pool, costs = self._pool(mix)
        strategy = pool.strategies[0]
        overhead_ms = costs.overheads_ms[strategy.name]

        def packer_of(cost: SchemeCost) -> ReplicaPacker:
            if (cost, batch) not in self._packers:
                self._packers[cost, batch] = ReplicaPacker(
                    cost, self.batches[batch], Solver(Deadline(None), seed=self._seed)
                )
            return self._packers[cost, batch]

        search = StrategySearch(
            strategy,
            costs.replica_costs(strategy),
            self.batches[batch],
            packer_of,
            Solver(Deadline(None), seed=self._seed),
            overhead_ms=overhead_ms,
        )
        search.start()
        _raise_bound(search, estimate_ms)
        return Bounded(search.bound_ms + overhead_ms, search.found_ms + overhead_ms)


def _raise_bound(search: StrategySearch, estimate_ms: float) -> None:
    """Raise the bound to within _STEP of what the planner's program can prove.

    Up or down from the estimate: that asks for fewer programs than halving from far away.
    """
    high_ms = search.found_ms * (1.0 - _TIGHT)
    time_ms = min(estimate_ms, high_ms)
    if search.excludes(time_ms):
        while time_ms < high_ms:
            time_ms = min(time_ms * (1.0 + _STEP), high_ms)
            if not search.excludes(time_ms):
                break
        return
    while time_ms > search.bound_ms:
        time_ms *= 1.0 - _STEP
        if search.excludes(time_ms):
            break
