"""Iterations one after the other, as events.

An iteration begins when the one before has ended and its plan is there. Its replicas run 1F1B. What
follows depends on what is known:

- The cost model has a time beside the makespan for the strategy (a cost profile's ``regroup_ms``
  and ``optimizer_ms``): it follows the slowest replica.
- Bytes and links are known (`RegroupCosts`): every bucket is a gather, a scatter and an update. All
  collectives share one queue of all ranks. A bucket is scattered when every holder has finished its
  part of the last backward and every other rank has begun its last backward, in the order output,
  layers from the last to the first, embedding. When all are there (clipping wants the norm of all
  gradients), buckets are updated in the reverse order, and each is gathered for the next iteration
  as soon as it is updated and the next plan is there. The first forward enters a layer when that
  has come. Without overlap, regrouping and compute take turns.
- Neither: regrouping and update take no time.

The planner makes one plan after the other, each asked for when the iteration plan_ahead before it
begins. Time 0 is when the first plan is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.simulator.event_loop import EventLoop, Task
from megatron.hydraulis.simulator.regroup_times import BucketTimes, RegroupCosts, RegroupTimes
from megatron.hydraulis.simulator.replica_tasks import ReplicaTasks
from megatron.hydraulis.simulator.stage_costs import StageCosts
from megatron.hydraulis.simulator.work import IterationWork
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.canonical import Unit

__all__ = ["BucketTasks", "IterationTasks", "Simulator"]

_MS_PER_S = 1e3
_ITERATION, _REGROUP, _UPDATE, _PLANNER = "iteration", "regroup", "update", "planner"
"""Lanes that all ranks have in common."""


@dataclass(frozen=True, slots=True, eq=False)
class BucketTasks:
    """Of one bucket in one iteration."""

    index: int
    gather: Task
    scatter: Task
    update: Task


@dataclass(frozen=True, slots=True, eq=False)
class IterationTasks:
    """What became of one iteration; times in ms since the first plan was there."""

    number: int
    """Counted from 1."""
    work: IterationWork
    begin: Task
    end: Task
    replicas: tuple[ReplicaTasks, ...]
    buckets: tuple[BucketTasks, ...]
    """Empty where regrouping is not simulated."""
    overhead: Task | None
    """What the cost model says that the iteration takes beside its makespan."""

    @property
    def begin_ms(self) -> float:
        """When plan and parameters of the iteration before were there."""
        return self.begin.end_ms

    @property
    def end_ms(self) -> float:
        """When the update was done."""
        return self.end.end_ms

    @property
    def replica_ends_ms(self) -> tuple[float, ...]:
        """When each replica finished its last backward; begin_ms for one without work."""
        return tuple(
            max((task.end_ms for task in replica.ends), default=self.begin_ms)
            for replica in self.replicas
        )


class Simulator:
    """Runs plans.

    Args:
        costs: of micro-batches on stages.
        regroup: times of regrouping; None where nothing is known of model and links.
        plan_ahead: iterations planned ahead; 0 plans between iterations.
        overlaps_regrouping: whether regrouping and compute run at the same time.

    Raises ConfigurationError for a negative plan_ahead, and for regrouping without the model's
    shape in costs.
    """

    def __init__(
        self,
        costs: StageCosts,
        *,
        regroup: RegroupCosts | None = None,
        plan_ahead: int = 2,
        overlaps_regrouping: bool = True,
    ) -> None:
        if plan_ahead < 0:
            raise ConfigurationError(
                f"simulation: plans are made 0 or more iterations ahead but plan_ahead is "
                f"{plan_ahead}; give 0 to plan between iterations"
            )
        if regroup is not None and costs.shape is None:
            raise ConfigurationError(
                "simulation: buckets of regrouping follow the model's layers but the costs of "
                "stages have 0 of them; give StageCosts the model's shape"
            )
        self._costs = costs
        self._regroup = regroup
        self._plan_ahead = plan_ahead
        self._overlaps = overlaps_regrouping
        self._times: dict[Strategy, RegroupTimes | None] = {}

    def regroup_times(self, strategy: Strategy) -> RegroupTimes | None:
        """Times of a strategy's buckets; None where the cost model has its own time or none is
        known."""
        if strategy not in self._times:
            times = None
            if self._regroup is not None and not self._costs.cost_model.overhead_ms(strategy):
                times = self._regroup.times(strategy)
            self._times[strategy] = times
        return self._times[strategy]

    def run(self, works: Sequence[IterationWork]) -> list[IterationTasks]:
        """Simulate iterations, in their order; the same works always take the same times.

        Raises StrategyError for a scheme that the cost model does not know.
        """
        loop = EventLoop()
        iterations: list[IterationTasks] = []
        for index, work in enumerate(works):
            iterations.append(self._add(loop, index, work, iterations))
        loop.run()
        return iterations

    def _add(
        self,
        loop: EventLoop,
        index: int,
        work: IterationWork,
        before: Sequence[IterationTasks],
    ) -> IterationTasks:
        asked = None
        if index:
            asked = (
                before[max(0, index - self._plan_ahead)].begin
                if self._plan_ahead
                else before[-1].end
            )
        plan = loop.add(_PLANNER, _MS_PER_S * work.plan_time_s if index else 0.0, [asked])
        begin = loop.add(_ITERATION, 0.0, [plan])
        times = self.regroup_times(work.strategy)
        gathers: list[Task] = []
        gathered: dict[Unit, Task] = {}
        if times is not None:
            updated, ended = _updates(before[-1]) if before else ({}, None)
            for bucket in times.buckets:
                when = [plan, updated.get(bucket.index, ended)] if self._overlaps else [begin]
                gathers.append(loop.add(_REGROUP, bucket.gather_ms, when))
                gathered[bucket.unit] = gathers[-1]
        started = begin
        if gathers and not self._overlaps:
            started, gathered = gathers[-1], {}
        replicas = tuple(
            ReplicaTasks(
                loop,
                replica,
                micro_batches,
                self._costs,
                lane=f"iteration {index + 1}, replica {number}",
                begin=started,
                gathered=gathered,
                splits_last_backward=times is not None and self._overlaps,
            )
            for number, (replica, micro_batches) in enumerate(
                zip(work.strategy.replicas, work.replicas, strict=True)
            )
        )
        ends = [task for replica in replicas for task in replica.ends]
        buckets: tuple[BucketTasks, ...] = ()
        overhead = None
        if times is not None:
            buckets = self._add_buckets(loop, times.buckets, gathers, replicas, ends)
            ends += [bucket.update for bucket in buckets]
        else:
            overhead_ms = self._costs.cost_model.overhead_ms(work.strategy)
            if overhead_ms:
                overhead = loop.add(_UPDATE, overhead_ms, [begin, *ends])
                ends.append(overhead)
        end = loop.add(_ITERATION, 0.0, ends)
        return IterationTasks(index + 1, work, begin, end, replicas, buckets, overhead)

    def _add_buckets(
        self,
        loop: EventLoop,
        times: Sequence[BucketTimes],
        gathers: Sequence[Task],
        replicas: Sequence[ReplicaTasks],
        ends: Sequence[Task],
    ) -> tuple[BucketTasks, ...]:
        complete: dict[Unit, list[Task]] = {}
        posted: list[Task] = list(ends)
        if self._overlaps:
            posted = [task for replica in replicas for task in replica.before_last_backward]
            for replica in replicas:
                for unit, task in replica.gradients_done():
                    complete.setdefault(unit, []).append(task)
        scatters: dict[int, Task] = {}
        for bucket in reversed(times):
            awaited = complete.get(bucket.unit, []) if self._overlaps else []
            scatters[bucket.index] = loop.add(
                _REGROUP, bucket.scatter_ms, [gathers[-1], *posted, *awaited]
            )
        last = scatters[times[0].index]
        return tuple(
            BucketTasks(
                bucket.index,
                gather,
                scatters[bucket.index],
                loop.add(_UPDATE, bucket.update_ms, [last, *ends]),
            )
            for bucket, gather in zip(times, gathers, strict=True)
        )


def _updates(iteration: IterationTasks) -> tuple[dict[int, Task], Task]:
    """What a bucket's next gather waits for: its update, or the end where there was none."""
    return {bucket.index: bucket.update for bucket in iteration.buckets}, iteration.end
