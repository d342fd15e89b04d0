"""What the training program asks of a planner, whatever solves behind it.

A planner asks ``StrategyCosts(cost_model, strategy)`` for what a strategy of its pool costs, not
the cost model alone: a strategy may have its own limits of tokens per micro-batch (``max_tokens``
in the pool file) and its own time of regrouping and optimizer. Strategies are compared by makespan
plus ``overhead_ms``, which is an iteration's predicted time. The objectives and bounds of dispatch
and packing are about the makespan alone, those of an explanation about the predicted time.
"""

from collections.abc import Sequence
from typing import Protocol

from megatron.hydraulis.planner.plan import IterationPlan

__all__ = ["Planner"]


class Planner(Protocol):
    """Turns the lengths of a global batch into an iteration plan."""

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        """Plan one iteration.

        lengths: shape (num_sequences,), tokens of each sequence of the global batch; a plan names
        sequences by their index here. The same lengths always give a plan of the same digest.

        Raises PlanError for an empty batch, a length below 1 and a sequence that no replica of
        any strategy can hold.
        """
        ...
