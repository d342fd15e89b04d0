"""What was found for one strategy, before it is known to be the best."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.planner.packing import Packing
from megatron.hydraulis.planner.plan import IterationPlan, ReplicaPlan, StageReport
from megatron.hydraulis.strategy import Strategy

__all__ = ["MS_PER_S", "Candidate", "StageResult"]

MS_PER_S = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class StageResult:
    """Bound, time spent and status of dispatch or packing; the objective is the makespan."""

    bound_ms: float
    seconds: float
    status: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """Packings of all replicas of a strategy."""

    strategy: Strategy
    packings: Sequence[Packing]
    """Shape (num_replicas,)."""
    overhead_ms: float
    dispatch: StageResult
    packing: StageResult

    @property
    def makespan_ms(self) -> float:
        """Time of the slowest replica."""
        return max(packing.time_ms for packing in self.packings)

    @property
    def time_ms(self) -> float:
        """Time of the iteration: strategies compete with all that it takes."""
        return self.makespan_ms + self.overhead_ms

    def to_plan(self, iteration: int, start_s: float) -> IterationPlan:
        """The plan; start_s: when planning began, by time.perf_counter."""
        return IterationPlan(
            iteration=iteration,
            strategy=self.strategy.name,
            replicas=tuple(
                ReplicaPlan(
                    scheme=replica.scheme,
                    ranks=replica.ranks,
                    micro_batches=packing.micro_batches,
                    predicted_time_s=packing.time_ms / MS_PER_S,
                )
                for replica, packing in zip(self.strategy.replicas, self.packings, strict=True)
            ),
            predicted_time_s=self.time_ms / MS_PER_S,
            dispatch=self._report(self.dispatch),
            packing=self._report(self.packing),
            plan_time_s=time.perf_counter() - start_s,
        )

    def _report(self, result: StageResult) -> StageReport:
        return StageReport.of(
            objective_s=self.makespan_ms / MS_PER_S,
            bound_s=result.bound_ms / MS_PER_S,
            seconds=result.seconds,
            status=result.status,
        )
