"""Global batches with their plans: sampled and planned once, checked and packed on every rank."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import StrategyCosts
from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.data.sampler import EvaluationSampler, GlobalBatch, LengthSampler
from megatron.hydraulis.errors import HydraulisError, PlanError
from megatron.hydraulis.loop.plan_exchange import PlanExchange
from megatron.hydraulis.planner.ahead import LookAheadPlanner
from megatron.hydraulis.planner.plan import IterationPlan, Planner
from megatron.hydraulis.planner.planners import write_plan
from megatron.hydraulis.strategy import Pool

NUM_PLANS_KEPT = 2
"""A plan is forgotten this many iterations later: by then every rank has fetched it, because it has
since met the others in a collective of the iteration."""


@dataclass(frozen=True)
class PlannedBatch:
    """One iteration's work, as one rank sees it."""

    batch: GlobalBatch
    plan: IterationPlan
    micro_batches: tuple[PackedBatch, ...]
    """Of this rank's replica, its own part of each where that has cp > 1; empty where it is idle or
    the replica has no sequence."""
    num_padding_tokens: int
    """Over all replicas, counted once each."""
    micro_batch_sequences: tuple[tuple[int, ...], ...]
    """Sequence ids of ``micro_batches``, those that this rank has a part of."""
    plan_wait_s: float = 0.0
    """How long training stood still because the planner had no plan yet; equal on every rank."""
    plan_fetch_s: float = 0.0
    """How long this rank took to read the plan in the job's store, with the wait for the planner
    and for rank 0 to come there."""

    @property
    def padding_fraction(self) -> float:
        """Padding tokens over all tokens run."""
        total = self.batch.num_tokens + self.num_padding_tokens
        return self.num_padding_tokens / total if total else 0.0


class PlannedBatches:
    """An endless iterator of `PlannedBatch`.

    Every rank samples the same batches. Rank 0 samples some iterations further, has their plans
    made while training runs, and publishes each once: what is ready when an iteration begins, also
    for later ones, so that no rank waits for rank 0 to reach them. Every rank checks digest and
    rules of what arrives, and reads just its own sequences.

    Args:
        corpus: the sequences.
        sampler: draws global batches; equal on every rank.
        planner: plans on rank 0; None on the others.
        exchange: how plans reach the ranks.
        pool: the strategies that plans may name.
        cost_model: gives the hard limit of a micro-batch, where the strategy has none of its own.
        device: of the job.
        num_ahead: iterations that rank 0 samples further than it has trained.
        plan_dir: where rank 0 writes each plan, if anywhere.
        first_iteration: of the first batch, counted from 0; the sampler already stands there.
    """

    def __init__(
        self,
        corpus: Corpus,
        sampler: LengthSampler | EvaluationSampler,
        planner: LookAheadPlanner | None,
        exchange: PlanExchange,
        pool: Pool,
        *,
        cost_model: CostModel,
        device: torch.device,
        num_ahead: int = 0,
        plan_dir: Path | None = None,
        first_iteration: int = 0,
    ) -> None:
        self.corpus = corpus
        self.sampler = sampler
        self._planner = planner
        self._exchange = exchange
        self._pool = pool
        self._costs = _costs_of(pool, cost_model)
        self._device = device
        self._num_ahead = num_ahead if planner is not None else 0
        self._plan_dir = plan_dir
        self._sampled: deque[tuple[GlobalBatch, dict[str, Any]]] = deque()
        """With the sampler's state after each."""
        self._last: tuple[GlobalBatch, dict[str, Any]] | None = None
        """What was handed out last."""
        self._num_sampled = first_iteration
        self._iteration = first_iteration
        self._num_published = first_iteration
        self._sampler_state = sampler.state_dict()
        self._upcoming: dict[int, str] = {}
        """Strategies of published plans, on rank 0."""
        self._rank = dist.get_rank()

    def __iter__(self) -> PlannedBatches:
        return self

    def __next__(self) -> PlannedBatch:
        while len(self._sampled) <= self._num_ahead:
            self._sample()
        batch, self._sampler_state = self._last = self._sampled.popleft()
        start_s = time.perf_counter()
        if self._planner is not None and self._num_published <= self._iteration:
            self._publish_next(self._planner)
        plan, plan_wait_s = self._exchange.fetch(self._iteration)
        plan_fetch_s = time.perf_counter() - start_s
        if self._planner is not None:
            self._publish_ready(self._planner)
        strategy = self._pool.strategy(plan.strategy)
        plan.validate(batch.lengths, strategy, self._costs[strategy.name].max_tokens)
        if self._plan_dir is not None and self._planner is not None:
            write_plan(self._plan_dir, plan)
        self._upcoming.pop(self._iteration, None)
        self._iteration += 1
        mine = plan.replica_of(self._rank)
        packs: list[PackedBatch] = []
        ids: list[tuple[int, ...]] = []
        position = None if mine is None else mine.replica.position_of(self._rank)
        if mine is not None and position is not None:
            for micro_batch in mine.micro_batches:
                share = micro_batch.share_of(position.cp, mine.scheme.cp)
                members = tuple(batch.sequence_ids[i] for i in share.sequences)
                sequences = [self.corpus.tokens(sequence_id) for sequence_id in members]
                packed = pack(
                    sequences,
                    mine.scheme.tp,
                    context_size=share.group.size,
                    context_rank=position.cp - share.group.offset,
                    allow_empty=True,
                )
                if self._device.type == "cuda":
                    # The copy goes on beside compute; the host's memory stays until it is done.
                    packed = packed.pinned().to(self._device, non_blocking=True)
                packs.append(packed)
                ids.append(members)
        return PlannedBatch(
            batch,
            plan,
            tuple(packs),
            num_padding_tokens(plan),
            tuple(ids),
            plan_wait_s=plan_wait_s,
            plan_fetch_s=plan_fetch_s,
        )

    @property
    def sampler_state(self) -> dict[str, Any]:
        """Where the sampler stood after the batch that was taken last, however far it is by now.

        What a checkpoint needs: batches that are sampled or planned ahead are not consumed.
        """
        return self._sampler_state

    def next_strategy(self) -> str | None:
        """The strategy of the next batch, where its plan is ready; on rank 0, never waiting."""
        if self._planner is not None:
            self._publish_ready(self._planner)
        return self._upcoming.get(self._iteration)

    def lower_limits(
        self,
        pool: Pool,
        cost_model: CostModel,
        planners: tuple[Planner, Planner] | None,
        *,
        repeats_last: bool,
    ) -> None:
        """Plan what comes next under lower limits; collective, while no rank is ahead of another.

        What is sampled and has not been run is planned anew.

        Args:
            pool: the strategies that plans may name from now on.
            cost_model: of the lower limits.
            planners: on rank 0, what plans and what stands in for it.
            repeats_last: whether the batch that was handed out last comes again.
        """
        if repeats_last and self._last is not None:
            self._sampled.appendleft(self._last)
            self._iteration -= 1
            self._last = None
        self._pool = pool
        self._costs = _costs_of(pool, cost_model)
        self._exchange = self._exchange.renewed()
        if self._planner is None or planners is None:
            return
        for iteration in range(self._num_published, self._num_sampled):
            with contextlib.suppress(PlanError):
                self._planner.take(iteration)  # made under the old limits
        self._planner.replace(planners[0], stand_in=planners[1])
        self._upcoming.clear()
        self._num_published = self._iteration
        for ahead, (batch, _) in enumerate(self._sampled):
            self._planner.submit(self._iteration + ahead, batch.lengths)

    def replace_planner(self, planner: Planner, stand_in: Planner) -> None:
        """On rank 0: plan what is sampled from now on with another planner."""
        assert self._planner is not None
        self._planner.replace(planner, stand_in=stand_in)

    def _sample(self) -> None:
        batch = self.sampler.next_batch()
        self._sampled.append((batch, self.sampler.state_dict()))
        if self._planner is not None:
            self._planner.submit(self._num_sampled, batch.lengths)
        self._num_sampled += 1

    def _publish_ready(self, planner: LookAheadPlanner) -> None:
        """Put the plans of later iterations that need no wait where all ranks read them.

        Those that every rank has fetched go.
        """
        while self._num_published < self._num_sampled and planner.is_ready(self._num_published):
            self._publish_next(planner)
        if self._iteration >= NUM_PLANS_KEPT:
            self._exchange.forget(self._iteration - NUM_PLANS_KEPT)

    def _publish_next(self, planner: LookAheadPlanner) -> None:
        """Put the plan where all ranks read it; or why there is none, so that none waits for it."""
        iteration = self._num_published
        self._num_published += 1
        try:
            plan, waited_s = planner.take(iteration)
        except HydraulisError as error:
            self._exchange.publish(iteration, PlanError(str(error)))
        except Exception as error:
            self._exchange.publish(
                iteration,
                PlanError(
                    f"iteration {iteration + 1}: the planner failed on rank 0 with "
                    f"{type(error).__name__}: {error}"
                ),
            )
            raise
        else:
            self._exchange.publish(iteration, plan, waited_s=waited_s)
            self._upcoming[iteration] = plan.strategy


def _costs_of(pool: Pool, cost_model: CostModel) -> dict[str, StrategyCosts]:
    return {strategy.name: StrategyCosts(cost_model, strategy) for strategy in pool.strategies}


def num_padding_tokens(plan: IterationPlan) -> int:
    """Tokens added so that tp and cp ranks share every row evenly."""
    return sum(
        scheme.row_tokens(share.lengths) - share.num_tokens
        for replica in plan.replicas
        for micro_batch in replica.micro_batches
        for scheme, share in replica.shares(micro_batch)
    )
