"""A planner whose strategy is fixed for every iteration; it still dispatches and packs."""

from collections.abc import Callable, Sequence

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.strategy_costs import StrategyCosts
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.interface import Planner
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.strategy import Pool

__all__ = ["ScheduledPlanner"]


class ScheduledPlanner:
    """Goes through a cycle of strategies, one an iteration; see planner.interface.Planner.

    Args:
        names: of strategies of the pool, at least one; iteration i runs ``names[i % len(names)]``.
        make_planner: makes the planner of a pool of one strategy.

    Raises StrategyError for a name that is not in the pool.
    """

    def __init__(
        self,
        pool: Pool,
        cost_model: CostModel,
        names: Sequence[str],
        make_planner: Callable[[Pool], Planner],
    ) -> None:
        self._names = tuple(names)
        strategies = {name: pool.strategy(name) for name in self._names}
        self._planners = {
            name: make_planner(Pool.of(strategy)) for name, strategy in strategies.items()
        }
        self._max_tokens = {
            name: max(map(StrategyCosts(cost_model, strategy).max_tokens, strategy.schemes))
            for name, strategy in strategies.items()
        }

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """Plan one iteration, with its strategy, for lengths of shape (num_sequences,), in tokens.

        Raises PlanError as the strategy's planner does, and for a sequence that the strategy
        cannot hold.
        """
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
