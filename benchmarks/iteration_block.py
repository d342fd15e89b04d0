"""Several iterations of our engine in a row, timed as one block on every rank.

An overlapped gather belongs to the iteration before it as much as to the one after it. In a block
every iteration announces the next one's strategy, the last one that of the block's first, and the
clock stops when that gather has arrived too: the block contains as many gathers as iterations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from benchmarks.step_report import Spent, spent_now
from benchmarks.workload import DATA_SEED, WEIGHT_SEED, Workload
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Pool


@dataclass(frozen=True)
class EvenIteration:
    """What every rank runs: the workload's micro-batches of random tokens, equally many a replica.

    Equal numbers have equal tokens.
    """

    number: int
    strategy: str
    num_micro_batches: int
    """Of each replica."""


@dataclass(frozen=True)
class BlockReport:
    """One rank's view of a block."""

    spent: Spent
    """From the moment all ranks were ready until the last gather had arrived."""
    waits_s: tuple[float, float]
    """Waits for gathers and scatters."""
    regroup_bytes: int


class EngineRank:
    """One rank of the engine; callable with the iterations of a block, collective."""

    def __init__(self, workload: Workload, pool: Pool) -> None:
        self._pool = pool
        self._workload = workload
        self._engine = Engine(workload.definition(), pool, workload.optimizer, seed=WEIGHT_SEED)
        for strategy in pool.strategies:
            self._engine.runtime_of(strategy.name)
        self._forward_step = make_forward_step()

    def __call__(self, block: Sequence[EvenIteration]) -> BlockReport:
        engine = self._engine
        batches = [self._micro_batches(iteration) for iteration in block]
        followers = [*block[1:], block[0]]
        outcomes = []
        engine.gather(block[0].strategy)
        engine.finish_regrouping()
        dist.barrier()
        start = spent_now()
        for iteration, mine, follower in zip(block, batches, followers, strict=True):
            outcome = engine.train_step(
                iteration.strategy, mine, self._forward_step, next_strategy=follower.strategy
            )
            assert outcome.updated
            outcomes.append(outcome)
        last_gather_s = time.perf_counter()
        engine.finish_regrouping()
        last_gather_s = time.perf_counter() - last_gather_s
        return BlockReport(
            spent_now() - start,
            (
                last_gather_s + sum(outcome.gather_wait_s for outcome in outcomes),
                sum(outcome.scatter_wait_s for outcome in outcomes),
            ),
            sum(outcome.regroup_bytes for outcome in outcomes),
        )

    def _micro_batches(self, iteration: EvenIteration) -> list[PackedBatch]:
        """The micro-batches of this rank's replica; none where it is idle."""
        replicas = self._pool.strategy(iteration.strategy).replicas
        for index, replica in enumerate(replicas):
            if self._engine.rank in replica.ranks:
                rng = np.random.default_rng((DATA_SEED, iteration.number, index))
                lengths, vocab_size = self._workload.lengths, self._workload.vocab_size
                return [
                    pack(
                        [rng.integers(0, vocab_size, size=n + 1) for n in lengths],
                        replica.scheme.tp,
                    )
                    for _ in range(iteration.num_micro_batches)
                ]
        return []
