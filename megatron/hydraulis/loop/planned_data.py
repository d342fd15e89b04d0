"""The data of a run as planned batches: rank 0 samples, plans ahead and publishes, all ranks read.

Plans travel through the job's store, not by a collective: rank 0 sets a key and continues, the
other ranks read the key when they need the plan. So planning can run ahead, and nothing has to be
ordered against the collectives of training.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import EvaluationSampler, GlobalBatch, LengthSampler
from megatron.hydraulis.errors import HydraulisError, PlanError
from megatron.hydraulis.library.batches import RankShare, TokenSequence, checked_plan
from megatron.hydraulis.planner.ahead import LookAheadPlanner
from megatron.hydraulis.planner.plan import IterationPlan, Planner, PlanText
from megatron.hydraulis.planner.planners import write_plan
from megatron.hydraulis.strategy import Pool

NUM_PLANS_KEPT = 2
"""A plan is deleted from the store this many iterations later. By then every rank has fetched it,
because the ranks have met in a collective of the iteration."""


class SampledBatches:
    """Global batches in order, some of them sampled before they are needed.

    Args:
        sampler: draws the batches; equal on every rank.
        first_iteration: of the next batch, counted from 0.
    """

    def __init__(
        self, sampler: LengthSampler | EvaluationSampler, *, first_iteration: int = 0
    ) -> None:
        self.sampler = sampler
        self.iteration = first_iteration
        """Number of the batch that `take` returns next."""
        self.state = sampler.state_dict()
        """The sampler's state after the batch that was taken last, for a checkpoint: batches that
        were only sampled or planned ahead are not consumed."""
        self._ahead: deque[tuple[GlobalBatch, dict[str, Any]]] = deque()
        self._taken: tuple[GlobalBatch, dict[str, Any]] | None = None

    def peek(self, iteration: int) -> GlobalBatch:
        """The batch of this or a later iteration, without taking it."""
        while len(self._ahead) <= iteration - self.iteration:
            self._ahead.append((self.sampler.next_batch(), self.sampler.state_dict()))
        return self._ahead[iteration - self.iteration][0]

    def take(self) -> GlobalBatch:
        self.peek(self.iteration)
        batch, self.state = self._taken = self._ahead.popleft()
        self.iteration += 1
        return batch

    def put_back(self) -> None:
        """Let `take` return the last batch again, if one was taken."""
        if self._taken is not None:
            self._ahead.appendleft(self._taken)
            self._taken = None
            self.iteration -= 1


class PlanExchange:
    """One stream of plans in the job's store, published by rank 0 and fetched by every rank.

    Args:
        store: of this start of the job (`meet`), the same on every rank.
        name: of the stream; streams of one job differ.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self._job_store, self._name, self._num_restarts = store, name, 0
        self._store = dist.PrefixStore(f"hydraulis_plans/{name}/0", store)

    def restart(self) -> None:
        """Continue with an empty stream; to be called by all ranks."""
        self._num_restarts += 1
        prefix = f"hydraulis_plans/{self._name}/{self._num_restarts}"
        self._store = dist.PrefixStore(prefix, self._job_store)

    def publish(self, iteration: int, plan: PlanText | PlanError, *, waited_s: float = 0.0) -> None:
        """Rank 0: store a plan, or the reason why there is none.

        waited_s: how long training waited for the planner.
        """
        head: dict[str, str | float]
        if isinstance(plan, PlanError):
            head, text = {"error": str(plan)}, ""
        else:
            head = {"strategy": plan.strategy, "digest": plan.digest, "waited_s": waited_s}
            text = plan.text
        self._store.set(str(iteration), f"{json.dumps(head)}\n{text}")

    def forget(self, iteration: int) -> None:
        """Rank 0: delete a plan that every rank has fetched."""
        self._store.delete_key(str(iteration))

    def fetch(self, iteration: int) -> tuple[PlanText, float]:
        """Wait for a plan; returns it with its waited_s.

        Raises PlanError if rank 0 found none, or publishes none within the store's timeout.
        """
        begin_s = time.monotonic()
        try:
            head_line, text = self._store.get(str(iteration)).decode().split("\n", 1)
        except dist.DistStoreError as error:
            raise PlanError(
                f"plan {iteration + 1} of the {self._name} data was not published by rank 0 within "
                f"{time.monotonic() - begin_s:.0f} s: its planner hangs or is slow; see the log of "
                "rank 0, or raise --distributed-timeout-minutes"
            ) from error
        head = json.loads(head_line)
        if "error" in head:
            raise PlanError(head["error"])
        return PlanText(head["strategy"], head["digest"], text), float(head["waited_s"])


class PlanFeed:
    """Requests plans ahead of training and publishes each of them once; on rank 0.

    Args:
        batches: that are planned; whoever reads them takes them.
        num_ahead: how many batches after the next one are planned while training runs.
    """

    def __init__(
        self,
        planner: LookAheadPlanner,
        exchange: PlanExchange,
        batches: SampledBatches,
        *,
        num_ahead: int = 0,
    ) -> None:
        self._planner = planner
        self._exchange = exchange
        self._batches = batches
        self._num_ahead = num_ahead
        self._num_requested = batches.iteration
        self._num_published = batches.iteration
        self._strategies: dict[int, str] = {}
        """Names of the strategies of published plans, by iteration."""

    @property
    def next_strategy(self) -> str | None:
        """The strategy of the next batch; None if its plan has not been published yet."""
        return self._strategies.get(self._batches.iteration)

    def publish_next(self) -> None:
        """Publish the plan of the next batch, for which this waits, and all later ones ready."""
        while self._num_requested <= self._batches.iteration + self._num_ahead:
            lengths = self._batches.peek(self._num_requested).lengths
            self._planner.submit(self._num_requested, lengths)
            self._num_requested += 1
        if self._num_published <= self._batches.iteration:
            self._publish()
        self.publish_ready()

    def publish_ready(self) -> None:
        """Publish the plans that are ready; delete those that every rank has fetched."""
        while self._num_published < self._num_requested and self._planner.is_ready(
            self._num_published
        ):
            self._publish()
        fetched = self._batches.iteration - NUM_PLANS_KEPT
        if fetched >= 0:
            self._exchange.forget(fetched)
            self._strategies.pop(fetched, None)

    def replace_plans(self, planner: Planner, stand_in: Planner) -> None:
        """Plan all batches that have not been taken with another planner.

        To be called after `PlanExchange.restart`, and after `SampledBatches.put_back` where the
        last batch is repeated.
        """
        for iteration in range(self._num_published, self._num_requested):
            with contextlib.suppress(PlanError):
                self._planner.take(iteration)
        self._planner.replace(planner, stand_in=stand_in)
        self._strategies.clear()
        self._num_published = self._num_requested = self._batches.iteration

    def _publish(self) -> None:
        """Publish a plan, or why there is none, so that no rank waits for it in vain."""
        iteration = self._num_published
        self._num_published += 1
        try:
            plan, waited_s = self._planner.take(iteration)
        except HydraulisError as error:
            self._exchange.publish(iteration, PlanError(str(error)))
        except Exception as error:
            reason = (
                f"iteration {iteration + 1}: the planner failed on rank 0 with "
                f"{type(error).__name__}: {error}"
            )
            self._exchange.publish(iteration, PlanError(reason))
            raise
        else:
            self._exchange.publish(iteration, plan, waited_s=waited_s)
            self._strategies[iteration] = plan.strategy


@dataclass(frozen=True)
class RankBatch:
    """One iteration's work, as one rank sees it."""

    batch: GlobalBatch
    plan: IterationPlan
    digest: str
    """Digest of the plan."""
    share: RankShare
    """This rank's share of the plan."""
    plan_wait_s: float
    """Time that training waited for the planner; equal on every rank."""
    plan_fetch_s: float
    """Time that this rank waited for the plan in the job's store; on ranks other than 0 this
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
class PlannedData:
    """Training, validation or test data of a run, as this rank reads them.

    A batch is sampled on every rank and planned on rank 0; its plan is checked by its digest and
    its rules, and the sequences of this rank are packed.
    """

    corpus: Corpus
    batches: SampledBatches
    """Batches that are equal on every rank."""
    exchange: PlanExchange
    """Plans are published here."""
    feed: PlanFeed | None
    """Publishes the plans that all ranks wait for; on rank 0."""
    pool: Pool
    """The strategies that plans may name."""
    limits: Limits
    device: torch.device
    plan_dir: Path | None = None
    """Folder in which this rank records each plan; None for no record."""
    num_predictions: int = 0
    """Layers of multi-token prediction that train on the data."""

    def next_batch(self) -> RankBatch:
        """The next batch, for whose plan this waits. Raises PlanError, DataError."""
        if self.feed is not None:
            self.feed.publish_next()
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

        share = RankShare.of(
            plan, dist.get_rank(), self.device, sequence_of, num_predictions=self.num_predictions
        )
        return RankBatch(batch, plan, published.digest, share, plan_wait_s, plan_fetch_s)

    def publish_ready(self) -> str | None:
        """Publish the plans made meanwhile; returns the next batch's strategy, known on rank 0."""
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
        if repeats_last:
            self.batches.put_back()
        self.exchange.restart()
        self.pool, self.limits = pool, limits
        if self.feed is not None:
            assert planners is not None
            self.feed.replace_plans(*planners)
