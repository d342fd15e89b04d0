"""Result of simulating a way to train: where the time of all ranks goes, over all iterations."""

from __future__ import annotations

import contextlib
import gc
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.regrouping import RegroupCosts, RegroupTimes
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.simulator.simulation import IterationTasks, Simulator
from megatron.hydraulis.simulator.ways import Variant
from megatron.hydraulis.simulator.work import CeilingCosts, IterationWork

_MS_PER_S = 1e3
PARTS = ("work", "fill", "parameters", "imbalance", "regroup", "planning")
"""Parts of the time of a rank; see `IterationAccount`."""


@dataclass(frozen=True, kw_only=True)
class WayResult:
    """One way over all iterations."""

    name: str
    accounts: tuple[IterationAccount, ...]
    iterations: tuple[IterationTasks, ...]
    """Iterations whose tasks were kept."""
    strategies: dict[str, str]
    """Notation of each used strategy by name."""
    num_row_shapes: int
    """Number of different rows that ran: by scheme and tokens, padding included."""

    @property
    def time_s(self) -> float:
        """Time of all iterations."""
        return math.fsum(each.time_ms for each in self.accounts) / _MS_PER_S

    @property
    def error_s(self) -> float | None:
        """Standard error of an iteration's mean time; None of a single one."""
        times_s = [each.time_ms / _MS_PER_S for each in self.accounts]
        return stdev(times_s) / math.sqrt(len(times_s)) if len(times_s) > 1 else None

    @property
    def num_tokens(self) -> int:
        """Trained tokens of all iterations."""
        return sum(each.num_tokens for each in self.accounts)

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens over time."""
        return self.num_tokens / self.time_s

    @property
    def padding_fraction(self) -> float:
        """Padding over trained tokens and padding, from 0 to 1."""
        num_padding = sum(each.num_padding for each in self.accounts)
        return num_padding / (self.num_tokens + num_padding)

    @property
    def imbalance(self) -> float:
        """Makespan over the rank-weighted mean of the replica times, mean over iterations."""
        return fmean(each.imbalance for each in self.accounts)

    @property
    def received_bytes(self) -> float:
        """Bytes per iteration, mean over ranks and iterations."""
        return fmean(each.received_bytes for each in self.accounts)

    @property
    def skipped_bytes(self) -> float:
        """The same of frozen parameters that need not be gathered again."""
        return fmean(each.skipped_bytes for each in self.accounts)

    @property
    def shares(self) -> dict[str, float]:
        """Share of each part in the time of all ranks; the sum is 1."""
        totals_ms = {
            part: math.fsum(getattr(each, f"{part}_ms") for each in self.accounts) for part in PARTS
        }
        all_ms = math.fsum(each.num_ranks * each.time_ms for each in self.accounts)
        # Not below 0 by a rounding error.
        return {part: max(0.0, total_ms) / all_ms for part, total_ms in totals_ms.items()}

    @property
    def num_uses(self) -> Counter[str]:
        """Number of iterations by strategy."""
        return Counter(each.strategy for each in self.accounts)

    def to_json(self, reference: WayResult) -> dict[str, Any]:
        """Figures by name; speed_up is relative to the reference."""
        return {
            "way": self.name,
            "time_s": self.time_s,
            "error_of_iteration_s": self.error_s,
            "num_tokens": self.num_tokens,
            "tokens_per_s": self.tokens_per_s,
            "speed_up": reference.time_s / self.time_s,
            "utilisation": self.shares["work"],
            "shares": self.shares,
            "imbalance": self.imbalance,
            "padding_fraction": self.padding_fraction,
            "num_row_shapes": self.num_row_shapes,
            "received_bytes_per_iteration": self.received_bytes,
            "skipped_bytes_per_iteration": self.skipped_bytes,
            "strategies": [
                {"name": name, "replicas": self.strategies[name], "num_iterations": num}
                for name, num in self.num_uses.most_common()
            ],
            "iterations": [
                {
                    "iteration": each.iteration,
                    "strategy": each.strategy,
                    "time_s": each.time_ms / _MS_PER_S,
                    "makespan_s": each.makespan_ms / _MS_PER_S,
                    "replica_times_s": [ms / _MS_PER_S for ms in each.replica_times_ms],
                    "num_tokens": each.num_tokens,
                    "imbalance": each.imbalance,
                }
                for each in self.accounts
            ],
        }


def simulate_way(
    name: str,
    candidates: Iterable[Variant],
    *,
    shape: ModelShape | None = None,
    regroup: RegroupCosts | None = None,
    plan_ahead: int = 2,
    kept: range | None = None,
) -> WayResult | None:
    """The candidate that takes the least time over all batches; None if there is none.

    Args:
        shape: see `StageCosts`.
        regroup, plan_ahead: see `Simulator`.
        kept: numbers of the iterations whose tasks are kept in the result; None for all.

    Raises HydraulisError as Simulator.run does.
    """
    best: WayResult | None = None
    for candidate in candidates:
        if best is not None and candidate.least_ms >= _MS_PER_S * best.time_s:
            continue
        simulator = Simulator(
            StageCosts(candidate.cost_model, shape),
            regroup=None if isinstance(candidate.cost_model, CeilingCosts) else regroup,
            plan_ahead=plan_ahead,
        )
        result = _simulated(name, simulator, candidate.works(), kept)
        if best is None or result.time_s < best.time_s:
            best = result
    return best


def _simulated(
    name: str, simulator: Simulator, works: Sequence[IterationWork], kept: range | None
) -> WayResult:
    accounts: list[IterationAccount] = []
    ended_ms = 0.0
    with _no_garbage_collection():
        iterations = simulator.run(works)
        before = None
        for iteration in iterations:
            times = simulator.regroup_times(iteration.work.strategy, before)
            accounts.append(account(iteration, started_ms=ended_ms, regrouping=times))
            ended_ms, before = iteration.end_ms, iteration.work.strategy
    return WayResult(
        name=name,
        accounts=tuple(accounts),
        iterations=tuple(each for each in iterations if kept is None or each.number in kept),
        strategies={work.strategy.name: str(work.strategy) for work in works},
        num_row_shapes=len(frozenset().union(*(work.row_shapes for work in works))),
    )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hundreds of thousands of tasks live until the last one has run; collecting garbage, of which
    there is none, would take as long as the simulation."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationAccount:
    """The time of one iteration, by what it was spent on.

    Parts are rank-times: ms of one rank, summed over ranks. From the end of the previous iteration
    to the end of this one, the time of every rank is

    - **work**: forward and backward;
    - **fill**: waiting in the replica for pipeline neighbours or the host;
    - **parameters**: what the replica takes longer because parameters have not arrived;
    - **imbalance**: waiting for the slowest replica, also on ranks without a replica or work;
    - **regroup**: after the end of the slowest replica: scatter and update that are not hidden;
    - **planning**: waiting for the plan.
    """

    iteration: int
    strategy: str
    num_ranks: int
    num_tokens: int
    """Trained tokens."""
    num_padding: int
    time_ms: float
    """Time from the end of the previous iteration to the end of this one."""
    makespan_ms: float
    """Time from the beginning of the iteration to the end of its slowest replica."""
    replica_times_ms: tuple[float, ...]
    """Times from the beginning of the iteration to the end of each replica; 0.0 without work."""
    imbalance: float
    """Makespan over the rank-weighted mean of the replica times: 1.0 is perfect."""
    work_ms: float
    fill_ms: float
    parameters_ms: float
    imbalance_ms: float
    regroup_ms: float
    planning_ms: float
    received_bytes: float
    """Mean over ranks of gather and scatter; 0.0 if regrouping is not simulated."""
    skipped_bytes: float
    """The same of what ranks still hold."""


def account(
    iteration: IterationTasks, *, started_ms: float, regrouping: RegroupTimes | None = None
) -> IterationAccount:
    """Splits the time of an iteration by use; the sum of the parts is time x ranks.

    Args:
        iteration: after the simulation.
        started_ms: end of the previous iteration; 0.0 for the first.
        regrouping: None if it is not simulated.
    """
    strategy = iteration.work.strategy
    begin_ms, end_ms = iteration.begin_ms, iteration.end_ms
    ends_ms = iteration.replica_ends_ms
    slowest_ms = max(ends_ms)
    makespan_ms = slowest_ms - begin_ms
    work_ms = fill_ms = parameters_ms = waiting_ms = 0.0
    rank_times_ms: list[float] = []
    num_in_replicas = 0
    for replica, replica_end_ms in zip(iteration.replicas, ends_ms, strict=True):
        num_per_stage = replica.replica.scheme.tp * replica.replica.scheme.cp
        num_in_replicas += replica.replica.num_ranks
        late_ms = 0.0
        if iteration.calls and replica.ends:
            late_ms = replica_end_ms - begin_ms - replica.time_without_waits_ms
        parameters_ms += replica.replica.num_ranks * late_ms
        for operations in replica.by_stage:
            stage_work_ms = math.fsum(operation.work_ms for operation in operations)
            work_ms += num_per_stage * stage_work_ms
            fill_ms += num_per_stage * (replica_end_ms - begin_ms - late_ms - stage_work_ms)
        waiting_ms += replica.replica.num_ranks * (slowest_ms - replica_end_ms)
        rank_times_ms.append(replica.replica.num_ranks * (replica_end_ms - begin_ms))
    num_idle = strategy.num_ranks - num_in_replicas
    rank_time_ms = math.fsum(rank_times_ms)
    return IterationAccount(
        iteration=iteration.number,
        strategy=strategy.name,
        num_ranks=strategy.num_ranks,
        num_tokens=iteration.work.num_tokens,
        num_padding=iteration.work.num_padding,
        time_ms=end_ms - started_ms,
        makespan_ms=makespan_ms,
        replica_times_ms=tuple(each_ms - begin_ms for each_ms in ends_ms),
        imbalance=makespan_ms * num_in_replicas / rank_time_ms if rank_time_ms else 1.0,
        work_ms=work_ms,
        fill_ms=fill_ms,
        parameters_ms=parameters_ms,
        imbalance_ms=waiting_ms + num_idle * makespan_ms,
        regroup_ms=strategy.num_ranks * (end_ms - slowest_ms),
        planning_ms=strategy.num_ranks * (begin_ms - started_ms),
        received_bytes=0.0 if regrouping is None else regrouping.received_bytes,
        skipped_bytes=0.0 if regrouping is None else regrouping.skipped_bytes,
    )
