"""Where the time of all ranks goes.

All times are rank-times: ms of one rank, added up over ranks. Of an iteration, from the end of the
one before to its own, every rank's time is

- **work**: forward and backward;
- **fill**: within its replica, waiting for pipeline neighbours or for parameters to arrive;
- **imbalance**: its replica is done, or has no work, or the rank is in no replica, and the slowest
  replica is not done;
- **regroup**: from the end of the slowest replica on: scatter and update that nothing hides;
- **planning**: the plan is not there yet.

The parts are found each on its own and have to add up to time x ranks, as have work and the gaps
between the tasks of every lane: an error of the simulation does not go unnoticed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.simulator.replica_tasks import ReplicaTasks
from megatron.hydraulis.simulator.simulation import IterationTasks

__all__ = ["IterationAccount", "account"]

_RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationAccount:
    """The figures of one iteration; see the module for the parts."""

    iteration: int
    strategy: str
    num_ranks: int
    num_tokens: int
    """Trained tokens."""
    num_padding: int
    time_ms: float
    """From the end of the iteration before to the end of this one."""
    makespan_ms: float
    """From the beginning of the iteration to the end of its slowest replica."""
    replica_times_ms: tuple[float, ...]
    """From the beginning of the iteration to the end of each replica; 0.0 without work."""
    imbalance: float
    """Makespan over the rank-weighted mean of the replica times: 1.0 is perfect."""
    work_ms: float
    fill_ms: float
    imbalance_ms: float
    regroup_ms: float
    planning_ms: float
    received_bytes: float
    """By gather and scatter together, mean over ranks; 0.0 where regrouping is not simulated."""

    @property
    def idle_ms(self) -> float:
        """Rank-time without work."""
        return self.fill_ms + self.imbalance_ms + self.regroup_ms + self.planning_ms


def account(
    iteration: IterationTasks, *, started_ms: float, received_bytes: float = 0.0
) -> IterationAccount:
    """Where the time of an iteration went.

    Args:
        iteration: which was run.
        started_ms: end of the iteration before it; 0.0 for the first.
        received_bytes: see `IterationAccount`.

    Raises HydraulisError where tasks of a lane overlap, or the parts do not add up.
    """
    strategy = iteration.work.strategy
    begin_ms, end_ms = iteration.begin_ms, iteration.end_ms
    ends_ms = iteration.replica_ends_ms
    slowest_ms = max(ends_ms)
    work_ms = fill_ms = waiting_ms = 0.0
    gaps_ms: list[float] = []
    num_in_replicas = 0
    for replica, replica_end_ms in zip(iteration.replicas, ends_ms, strict=True):
        num_per_stage = replica.replica.scheme.tp * replica.replica.scheme.cp
        num_in_replicas += replica.replica.num_ranks
        for operations in replica.by_stage:
            stage_work_ms = math.fsum(operation.work_ms for operation in operations)
            work_ms += num_per_stage * stage_work_ms
            fill_ms += num_per_stage * (replica_end_ms - begin_ms - stage_work_ms)
        waiting_ms += replica.replica.num_ranks * (slowest_ms - replica_end_ms)
        gaps_ms += _gaps_ms(replica, started_ms, end_ms, iteration.number)
    num_idle = strategy.num_ranks - num_in_replicas
    result = IterationAccount(
        iteration=iteration.number,
        strategy=strategy.name,
        num_ranks=strategy.num_ranks,
        num_tokens=iteration.work.num_tokens,
        num_padding=iteration.work.num_padding,
        time_ms=end_ms - started_ms,
        makespan_ms=slowest_ms - begin_ms,
        replica_times_ms=tuple(each_ms - begin_ms for each_ms in ends_ms),
        imbalance=_imbalance(iteration, slowest_ms),
        work_ms=work_ms,
        fill_ms=fill_ms,
        imbalance_ms=waiting_ms + num_idle * (slowest_ms - begin_ms),
        regroup_ms=strategy.num_ranks * (end_ms - slowest_ms),
        planning_ms=strategy.num_ranks * (begin_ms - started_ms),
        received_bytes=received_bytes,
    )
    total_ms = strategy.num_ranks * result.time_ms
    idle_ms = math.fsum([*gaps_ms, num_idle * result.time_ms])
    _check_sum(iteration.number, "work and gaps of the lanes", work_ms + idle_ms, total_ms)
    _check_sum(iteration.number, "parts", result.work_ms + result.idle_ms, total_ms)
    return result


def _gaps_ms(replica: ReplicaTasks, from_ms: float, to_ms: float, number: int) -> list[float]:
    """Rank-times between the tasks of each stage of a replica, before and after them included."""
    gaps_ms = []
    num_per_stage = replica.replica.scheme.tp * replica.replica.scheme.cp
    for stage, operations in enumerate(replica.by_stage):
        tasks = [task for operation in operations for task in operation.tasks]
        borders_ms = [from_ms, *itertools.chain(*((t.start_ms, t.end_ms) for t in tasks)), to_ms]
        for start_ms, stop_ms in zip(borders_ms[::2], borders_ms[1::2], strict=True):
            if stop_ms < start_ms:
                raise HydraulisError(
                    f"simulation: a stage does one thing after the other but in iteration {number} "
                    f"stage {stage} of {replica.replica.scheme} starts a task at {stop_ms} ms "
                    f"before the last one ends at {start_ms} ms; report this as a bug"
                )
            gaps_ms.append(num_per_stage * (stop_ms - start_ms))
    return gaps_ms


def _imbalance(iteration: IterationTasks, slowest_ms: float) -> float:
    begin_ms = iteration.begin_ms
    shares: Sequence[tuple[int, float]] = [
        (replica.replica.num_ranks, end_ms - begin_ms)
        for replica, end_ms in zip(iteration.replicas, iteration.replica_ends_ms, strict=True)
    ]
    total_ms = math.fsum(num_ranks * time_ms for num_ranks, time_ms in shares)
    if total_ms == 0.0:
        return 1.0
    return (slowest_ms - begin_ms) * sum(num_ranks for num_ranks, _ in shares) / total_ms


def _check_sum(number: int, what: str, found_ms: float, wanted_ms: float) -> None:
    if not math.isclose(found_ms, wanted_ms, rel_tol=_RELATIVE_TOLERANCE, abs_tol=1e-6):
        raise HydraulisError(
            f"simulation: busy and idle times of all ranks add up to time x ranks but in iteration "
            f"{number} {what} make {found_ms} ms of {wanted_ms} ms; report this as a bug"
        )
