"""From a published plan to the micro-batches of this rank."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import GlobalBatch
from megatron.hydraulis.library.batches import RankShare, TokenSequence, checked_plan
from megatron.hydraulis.loop.plan_feed import PlanExchange, PlanFeed, SampledBatches
from megatron.hydraulis.planner.plan import IterationPlan, Planner
from megatron.hydraulis.planner.planners import write_plan
from megatron.hydraulis.strategy import Pool


@dataclass(frozen=True)
class RankBatch:
    """One iteration's work, as one rank sees it."""

    batch: GlobalBatch
    plan: IterationPlan
    digest: str
    """Of the plan."""
    share: RankShare
    """What this rank runs of it."""
    plan_wait_s: float
    """How long training waited for the planner; equal on every rank."""
    plan_fetch_s: float
    """How long this rank waited for the plan in the job's store; on ranks other than 0 this
    includes the planner and the time until rank 0 publishes the plan."""

    @property
    def padding_fraction(self) -> float:
        """Padding tokens over all tokens run; padding makes rows divisible by tp and cp, and rounds
        them up to the row quantum."""
        num_padding_tokens = sum(
            (share.row_tokens or scheme.row_tokens(share.lengths)) - share.num_tokens
            for replica in self.plan.replicas
            for micro_batch in replica.micro_batches
            for scheme, share in replica.shares(micro_batch)
        )
        total = self.batch.num_tokens + num_padding_tokens
        return num_padding_tokens / total if total else 0.0


@dataclass(kw_only=True)
class BatchReader:
    """Fetches plans, checks their digest and rules, and packs the sequences of this rank."""

    corpus: Corpus
    batches: SampledBatches
    """Equal on every rank."""
    exchange: PlanExchange
    """Where plans are published."""
    pool: Pool
    """The strategies that plans may name."""
    limits: Limits
    device: torch.device
    plan_dir: Path | None = None
    """Where this rank records each plan, if anywhere."""

    def read(self) -> RankBatch:
        """The next batch; waits for its plan. Raises PlanError, DataError."""
        iteration, batch = self.batches.iteration, self.batches.take()
        start_s = time.perf_counter()
        published, plan_wait_s = self.exchange.fetch(iteration)
        plan_fetch_s = time.perf_counter() - start_s
        plan = checked_plan(published, batch.lengths, self.pool, self.limits)
        if self.plan_dir is not None:
            write_plan(self.plan_dir, iteration, plan, batch.sequence_ids)

        def sequence_of(place: int) -> TokenSequence:
            number = batch.sequence_ids[place]
            return TokenSequence(self.corpus.tokens(number), self.corpus.token_weights(number))

        share = RankShare.of(plan, dist.get_rank(), self.device, sequence_of)
        return RankBatch(batch, plan, published.digest, share, plan_wait_s, plan_fetch_s)

    def lower_limits(self, pool: Pool, limits: Limits, *, repeats_last: bool) -> None:
        """Read plans of lower limits from now on; see `PlannedData.lower_limits`."""
        if repeats_last:
            self.batches.put_back()
        self.exchange.restart()
        self.pool = pool
        self.limits = limits


@dataclass(frozen=True)
class PlannedData:
    """Training, validation or test data of a run, as this rank sees it."""

    reader: BatchReader
    feed: PlanFeed | None
    """Publishes the plans that readers wait for; on rank 0."""

    def next_batch(self) -> RankBatch:
        """The next batch; on rank 0 its plan is published first."""
        if self.feed is not None:
            self.feed.publish_next()
        return self.reader.read()

    def publish_ready(self) -> str | None:
        """On rank 0: publish the plans made meanwhile; the strategy of the next batch, if known."""
        if self.feed is None:
            return None
        self.feed.publish_ready()
        return self.feed.next_strategy

    def lower_limits(
        self,
        pool: Pool,
        limits: Limits,
        planners: tuple[Planner, Planner] | None,
        *,
        repeats_last: bool,
    ) -> None:
        """Plan what follows under lower limits; collective, when all ranks are at the same batch.

        Batches that are sampled and have not been read are planned again.

        Args:
            pool: the strategies that plans may name from now on.
            planners: on rank 0, the planner and the one that stands in for it.
            repeats_last: whether the batch that was read last is read again.
        """
        self.reader.lower_limits(pool, limits, repeats_last=repeats_last)
        if self.feed is not None:
            assert planners is not None
            self.feed.replace_plans(*planners)
