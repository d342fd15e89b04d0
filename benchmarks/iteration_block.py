"""Several iterations of our engine in a row, timed as a whole on every rank.

An overlapped gather belongs to the iteration before it as much as to the one after it. In a block
every iteration announces the next one's strategy, the last one that of the block's first, and the
clock stops when that gather has arrived too: as many gathers as iterations are in the time, and
none of them is left to run while nobody measures.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from benchmarks.step_report import Spent, StepClock
from benchmarks.workload import DATA_SEED, WEIGHT_SEED, Workload
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Pool, Strategy

PHASES = ("gather", "forward-backward", "scatter", "optimizer")
"""Of the engine; see `runtime.engine.Phase`."""

MicroBatchLengths = tuple[int, ...]


@dataclass(frozen=True)
class PlannedIteration:
    """What every rank runs: random tokens, of these lengths."""

    number: int
    """Seeds the tokens: equal numbers and lengths, equal tokens."""
    strategy: str
    replicas: tuple[tuple[MicroBatchLengths, ...], ...]
    """Lengths in tokens of the sequences of each micro-batch, by replica of the strategy."""

    @classmethod
    def of_plan(cls, plan: IterationPlan) -> PlannedIteration:
        """What a plan says."""
        return cls(
            plan.iteration,
            plan.strategy,
            tuple(tuple(b.lengths for b in r.micro_batches) for r in plan.replicas),
        )

    @classmethod
    def even(cls, number: int, strategy: Strategy, workload: Workload) -> PlannedIteration:
        """The workload's equal micro-batches, evenly over the replicas.

        Raises ValueError where they cannot be shared out evenly.
        """
        num_replicas = len(strategy.replicas)
        per_replica, rest = divmod(workload.num_micro_batches, num_replicas)
        if rest:
            raise ValueError(
                f"{workload.num_micro_batches} micro-batches cannot be shared out evenly over the "
                f"{num_replicas} replicas of {strategy}; choose a multiple"
            )
        return cls(number, strategy.name, (((workload.lengths,) * per_replica),) * num_replicas)

    @property
    def num_tokens(self) -> int:
        """Of all replicas."""
        return sum(sum(lengths) for batches in self.replicas for lengths in batches)


@dataclass(frozen=True)
class IterationReport:
    """One rank's view of one iteration of a block."""

    end_s: float
    """Since the block began."""
    phases: dict[str, Spent]
    """Names are those of `PHASES`; what overlaps compute is in none but compute's CPU time."""
    gather_wait_s: float
    scatter_wait_s: float
    regroup_bytes: int
    loss: float


@dataclass(frozen=True)
class BlockReport:
    """One rank's view of a block."""

    spent: Spent
    """From the moment all ranks were ready until the last gather had arrived."""
    iterations: tuple[IterationReport, ...]
    last_gather: Spent
    """What of the last gather was left when the last iteration had ended."""


class EngineRank:
    """One rank of the engine; callable with the iterations of a block, collective.

    Args:
        workload: model and optimizer.
        pool: of the engine; all of its strategies are built at once.
        overlap: whether regrouping overlaps compute.
        is_pinned: whether the rank keeps to one core, neighbours sharing one.
    """

    def __init__(
        self,
        workload: Workload,
        pool: Pool,
        *,
        overlap: bool = True,
        is_pinned: bool = False,
    ) -> None:
        if is_pinned:
            pin_to_core(dist.get_rank(), dist.get_world_size())
        self.pool = pool
        self._workload = workload
        self._clock = StepClock()
        self.engine = Engine(
            workload.definition(), pool, workload.optimizer, seed=WEIGHT_SEED, overlap=overlap
        )
        for strategy in pool.strategies:
            self.engine.runtime_of(strategy.name)
        self.forward_step = make_forward_step()

    def __call__(self, block: Sequence[PlannedIteration]) -> BlockReport:
        batches = [self.micro_batches(iteration) for iteration in block]
        followers = [*block[1:], block[0]]
        reports = []
        self.engine.gather(block[0].strategy)
        self.engine.finish_regrouping()
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for iteration, mine, follower in zip(block, batches, followers, strict=True):
            self._clock.start_step()
            outcome = self.engine.train_step(
                iteration.strategy,
                mine,
                self.forward_step,
                next_strategy=follower.strategy,
                phase=self._clock.measure,
            )
            assert outcome.updated
            report = self._clock.report(loss=outcome.loss.mean, gradient_norm=math.nan)
            reports.append(
                IterationReport(
                    time.perf_counter() - start_s,
                    report.phases,
                    outcome.gather_wait_s,
                    outcome.scatter_wait_s,
                    outcome.regroup_bytes,
                    outcome.loss.mean,
                )
            )
        self._clock.start_step()
        with self._clock.measure("gather"):
            # Without overlap nothing has been posted yet.
            self.engine.gather(block[0].strategy)
            self.engine.finish_regrouping()
        spent = Spent(time.perf_counter() - start_s, time.process_time() - start_cpu_s)
        last = self._clock.report(loss=math.nan, gradient_norm=math.nan).phases["gather"]
        return BlockReport(spent, tuple(reports), last)

    def micro_batches(self, iteration: PlannedIteration) -> list[PackedBatch]:
        """Of this rank's replica; none where it is idle."""
        strategy = self.pool.strategy(iteration.strategy)
        for index, replica in enumerate(strategy.replicas):
            if self.engine.rank in replica.ranks:
                rng = np.random.default_rng((DATA_SEED, iteration.number, index))
                return [
                    pack(
                        [rng.integers(0, self._workload.vocab_size, size=n + 1) for n in lengths],
                        replica.scheme.tp,
                    )
                    for lengths in iteration.replicas[index]
                ]
        return []


def pin_to_core(rank: int, num_ranks: int) -> None:
    """Keep this process, with the threads it has, to one of the cores; neighbours share one."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[rank * len(cores) // num_ranks]
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})
