"""Global batches with their plans: sampled and planned once, checked and packed on every rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.data.sampler import EvaluationSampler, GlobalBatch, LengthSampler
from megatron.hydraulis.errors import HydraulisError, PlanError
from megatron.hydraulis.loop.plan_exchange import PlanExchange
from megatron.hydraulis.planner.lookahead import LookAheadPlanner
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replay import write_plan
from megatron.hydraulis.scheme import Scheme
from megatron.hydraulis.strategy import Pool


@dataclass(frozen=True)
class PlannedBatch:
    """One iteration's work, as one rank sees it."""

    batch: GlobalBatch
    plan: IterationPlan
    micro_batches: tuple[PackedBatch, ...]
    """Of this rank's replica; empty where it is idle or has no sequence."""
    num_padding_tokens: int
    """Over all replicas, counted once each."""
    micro_batch_sequences: tuple[tuple[int, ...], ...]
    """Sequence ids of ``micro_batches``."""
    plan_wait_s: float = 0.0
    """How long this rank waited for the plan."""

    @property
    def padding_fraction(self) -> float:
        """Padding tokens over all tokens run."""
        total = self.batch.num_tokens + self.num_padding_tokens
        return self.num_padding_tokens / total if total else 0.0


class PlannedBatches:
    """An endless iterator of `PlannedBatch`.

    Every rank samples the same batches. Rank 0 samples some iterations further, has their plans
    made while training runs, and publishes each once; every rank checks digest and rules of what
    arrives, and reads just its own sequences.

    Args:
        corpus: the sequences.
        sampler: draws global batches; equal on every rank.
        planner: plans on rank 0; None on the others.
        exchange: how plans reach the ranks.
        pool: the strategies that plans may name.
        max_tokens: hard limit of a micro-batch by scheme, in tokens.
        device: of the job.
        num_ahead: iterations that rank 0 samples further than it has trained.
        plan_dir: where rank 0 writes each plan, if anywhere.
    """

    def __init__(
        self,
        corpus: Corpus,
        sampler: LengthSampler | EvaluationSampler,
        planner: LookAheadPlanner | None,
        exchange: PlanExchange,
        pool: Pool,
        *,
        max_tokens: Callable[[Scheme], int],
        device: torch.device,
        num_ahead: int = 0,
        plan_dir: Path | None = None,
    ) -> None:
        self.corpus = corpus
        self.sampler = sampler
        self._planner = planner
        self._exchange = exchange
        self._pool = pool
        self._max_tokens = max_tokens
        self._device = device
        self._num_ahead = num_ahead if planner is not None else 0
        self._plan_dir = plan_dir
        self._sampled: deque[GlobalBatch] = deque()
        self._num_sampled = 0
        self._iteration = 0
        self._rank = dist.get_rank()

    def __iter__(self) -> PlannedBatches:
        return self

    def __next__(self) -> PlannedBatch:
        while len(self._sampled) <= self._num_ahead:
            self._sample()
        batch = self._sampled.popleft()
        start_s = time.perf_counter()
        if self._planner is not None:
            self._publish(self._planner)
        plan = self._exchange.fetch(self._iteration)
        plan_wait_s = time.perf_counter() - start_s
        plan.validate(batch.lengths, self._pool.strategy(plan.strategy), self._max_tokens)
        if self._plan_dir is not None and self._planner is not None:
            write_plan(self._plan_dir, plan)
        self._iteration += 1
        mine = plan.replica_of(self._rank)
        packs: list[PackedBatch] = []
        ids: list[tuple[int, ...]] = []
        if mine is not None:
            for micro_batch in mine.micro_batches:
                members = tuple(batch.sequence_ids[i] for i in micro_batch.sequences)
                sequences = [self.corpus.tokens(sequence_id) for sequence_id in members]
                packs.append(pack(sequences, mine.scheme.tp).to(self._device))
                ids.append(members)
        return PlannedBatch(
            batch, plan, tuple(packs), num_padding_tokens(plan), tuple(ids), plan_wait_s
        )

    def _sample(self) -> None:
        batch = self.sampler.next_batch()
        self._sampled.append(batch)
        if self._planner is not None:
            self._planner.submit(self._num_sampled, batch.lengths)
        self._num_sampled += 1

    def _publish(self, planner: LookAheadPlanner) -> None:
        """Put the plan where all ranks read it; or why there is none, so that none waits for it."""
        try:
            plan, _ = planner.take(self._iteration)
        except HydraulisError as error:
            self._exchange.publish(self._iteration, PlanError(str(error)))
        except Exception as error:
            self._exchange.publish(
                self._iteration,
                PlanError(
                    f"iteration {self._iteration + 1}: the planner failed on rank 0 with "
                    f"{type(error).__name__}: {error}"
                ),
            )
            raise
        else:
            self._exchange.publish(self._iteration, plan)


def num_padding_tokens(plan: IterationPlan) -> int:
    """Tokens added so that tensor parallelism divides every micro-batch's row."""
    return sum(
        -micro_batch.num_tokens % replica.scheme.tp
        for replica in plan.replicas
        for micro_batch in replica.micro_batches
    )
