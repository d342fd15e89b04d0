"""Why a plan uses the strategy it uses: every strategy's bound and what was found for it."""

import math
from dataclasses import dataclass

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.plan import IterationPlan

__all__ = ["PlanExplanation", "StrategyOutcome"]

# Bounds and times are sums of floats taken in different orders.
_RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyOutcome:
    """What planning made of one strategy of the pool.

    Raises PlanError when the time found is below the bound.
    """

    name: str
    """Name of the strategy in its pool."""
    bound_s: float | None
    """No plan with this strategy takes less; None when the strategy cannot hold the batch."""
    found_s: float | None
    """Predicted time of the best plan found; None when the strategy was not searched."""
    why_not_chosen: str
    """One sentence; empty for the chosen strategy."""

    def __post_init__(self) -> None:
        if self.bound_s is None or self.found_s is None:
            return
        close = math.isclose(self.found_s, self.bound_s, rel_tol=_RELATIVE_TOLERANCE)
        if self.found_s < self.bound_s and not close:
            raise PlanError(
                f"strategy {self.name!r}: nothing is better than a bound but a plan takes "
                f"{self.found_s} s and the bound is {self.bound_s} s; correct the bound"
            )

    @property
    def gap(self) -> float | None:
        """(found - bound) / found, None when either is missing."""
        if self.bound_s is None or self.found_s is None:
            return None
        if self.found_s == 0.0:
            return 0.0
        return max(0.0, (self.found_s - self.bound_s) / self.found_s)

    @property
    def is_chosen(self) -> bool:
        """Whether the plan uses this strategy."""
        return not self.why_not_chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanExplanation:
    """A plan and what became of every strategy of the pool.

    Raises PlanError unless exactly the plan's strategy is marked as chosen.
    """

    plan: IterationPlan
    strategies: tuple[StrategyOutcome, ...]
    """In the order of the pool."""

    def __post_init__(self) -> None:
        chosen = [outcome.name for outcome in self.strategies if outcome.is_chosen]
        if chosen != [self.plan.strategy]:
            raise PlanError(
                f"one strategy is chosen, the plan's, but the plan is for {self.plan.strategy!r} "
                f"and {chosen} are marked as chosen; give every other one a reason"
            )
