"""Regrouping: canonical shards -> a strategy's parameters, its gradients -> canonical shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist

from megatron.hydraulis.runtime.arena import Arena
from megatron.hydraulis.runtime.copies import Copy, canonical_copies
from megatron.hydraulis.runtime.routes import BucketEnds, Route, make_route
from megatron.hydraulis.runtime.shards import CanonicalShards
from megatron.hydraulis.runtime.staging import StagingSlot
from megatron.hydraulis.runtime.track import Step
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.collective import collective_of, strategy_plans
from megatron.hydraulis.transfer.role import Role
from megatron.hydraulis.transfer.traffic import regroup_bytes


class RegroupJob:
    """The gather or scatter of one bucket, for a `track.Track`."""

    def __init__(
        self,
        span: str,
        bucket: Bucket,
        run: Callable[[StagingSlot], Iterator[Step]],
        *,
        num_collectives: int,
        needs_staging: bool,
    ) -> None:
        self.span = span
        self.detail: dict[str, int | str] = {"bucket": bucket.index, "unit": bucket.unit.name}
        self.num_collectives = num_collectives
        self.needs_staging = needs_staging
        self._run = run

    def steps(self, slot: StagingSlot) -> Iterator[Step]:
        """Of `Route.gather` or `Route.scatter`."""
        return self._run(slot)


class Regrouper:
    """What a rank does to regroup for one strategy: a job a bucket and direction.

    All ranks run all jobs, in one order: gathers by rising bucket, scatters by falling bucket.
    Idle ranks and replicas without sequences take part.

    Args:
        layout: the canonical layout.
        roles: the role of every rank in the strategy, None where idle.
        shards: this rank's canonical shards.
        arena: this rank's arena, its model bound; None where idle.
        wire_dtype: in which parameters travel: that of every rank's arena.
        group: of all ranks, in their order, used by regrouping alone.
        ranks_per_node: as the pool says.
    """

    def __init__(
        self,
        layout: CanonicalLayout,
        roles: Sequence[Role | None],
        shards: CanonicalShards,
        arena: Arena | None,
        *,
        wire_dtype: torch.dtype,
        group: dist.ProcessGroup,
        ranks_per_node: int,
    ) -> None:
        self._layout = layout
        self._shards = shards
        self._arena = arena
        self._role = roles[shards.rank]
        self._wire_dtype = wire_dtype
        self._group = group
        self.collective = collective_of(layout, roles, ranks_per_node=ranks_per_node)
        """The kind of all transfers of the strategy."""
        plans = strategy_plans(
            self.collective, layout, roles, ranks_per_node=ranks_per_node, rank=shards.rank
        )
        self.traffic = regroup_bytes(
            [gather for gather, _ in plans],
            [scatter for _, scatter in plans],
            shards.rank,
            ranks_per_node=ranks_per_node,
            parameter_bytes=wire_dtype.itemsize,
            gradient_bytes=shards.gradients.element_size(),
        )
        """What this rank exchanges with others in an iteration."""
        # Views are made here, and torch refuses those beyond the memory there is.
        with nullcontext() if arena is None else arena.in_memory():
            self.routes: list[Route] = [
                make_route(self._ends(bucket), gather, scatter)
                for bucket, (gather, scatter) in zip(layout.buckets, plans, strict=True)
            ]
            """By index of the bucket."""

    def gather_job(self, bucket: int) -> RegroupJob:
        """Fills the arena's parameters of the bucket from everybody's shards."""
        route = self.routes[bucket]
        return RegroupJob(
            "gather",
            self._layout.buckets[bucket],
            route.gather,
            num_collectives=route.num_collectives,
            needs_staging=route.gather_needs_staging,
        )

    def scatter_job(self, bucket: int) -> RegroupJob:
        """Adds everybody's gradients of the bucket up on the shards, in the order of the ranks."""
        route = self.routes[bucket]
        return RegroupJob(
            "scatter",
            self._layout.buckets[bucket],
            route.scatter,
            num_collectives=route.num_collectives,
            needs_staging=route.scatter_needs_staging,
        )

    def _ends(self, bucket: Bucket) -> BucketEnds:
        held: tuple[Copy, ...] = ()
        contributed: tuple[Copy, ...] = ()
        if self._role is not None and self._arena is not None:
            place = (self._layout, bucket, self._role, self._arena)
            held = canonical_copies(*place, gradients=False)
            contributed = canonical_copies(*place, gradients=True)
        return BucketEnds(bucket, self._shards, held, contributed, self._wire_dtype, self._group)
