"""Regrouping: canonical shards -> a strategy's parameters, its gradients -> canonical shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.runtime.arena import Arena
from megatron.hydraulis.runtime.shards import CanonicalShards
from megatron.hydraulis.runtime.staging import Staging
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.plan import Transfer, gather_plan, scatter_plan
from megatron.hydraulis.transfer.role import Role


@dataclass(frozen=True)
class _Copy:
    """A rectangle of the arena, flat where it has no gaps, and its run in the staging buffer."""

    start: int
    stop: int
    view: Tensor


@dataclass(frozen=True)
class _BucketRoute:
    """What this rank sends, receives and copies for one bucket, all worked out beforehand."""

    bucket: Bucket
    gather_send: tuple[tuple[int, int], ...]
    """Runs of the owned shard, in the order they are sent."""
    gather_send_sizes: list[int]
    gather_receive_sizes: list[int]
    gather_copies: tuple[_Copy, ...]
    scatter_send_sizes: list[int]
    scatter_copies: tuple[_Copy, ...]
    scatter_receive: tuple[tuple[int, int], ...]
    """Runs of the owned shard that arriving gradients are added to, in the order they arrive."""
    scatter_receive_sizes: list[int]


class Regrouper:
    """Gathers parameters for one strategy and scatters its gradients.

    All ranks call `gather` and `scatter` in the same order: each is a collective per bucket, in
    the order of the buckets, that idle ranks and replicas without sequences take part in.

    Args:
        layout: the canonical layout.
        roles: the role of every rank in the strategy, None where idle.
        shards: this rank's canonical shards.
        arena: this rank's arena, its model bound; None where idle.
        wire_dtype: in which parameters travel: that of every rank's arena.
        staging: buffers for what cannot be sent or received in place.
    """

    def __init__(
        self,
        layout: CanonicalLayout,
        roles: Sequence[Role | None],
        shards: CanonicalShards,
        arena: Arena | None,
        *,
        wire_dtype: torch.dtype,
        staging: Staging,
    ) -> None:
        self._layout = layout
        self._shards = shards
        self._arena = arena
        self._role = roles[shards.rank]
        self._wire_dtype = wire_dtype
        self._staging = staging
        self._routes = [self._route(bucket, roles) for bucket in layout.buckets]

    def gather(self) -> None:
        """Fill the arena's parameters from everybody's canonical shards."""
        for route in self._routes:
            send = self._parameters_to_send(route)
            size = sum(route.gather_receive_sizes)
            run = _single_run(route.gather_copies, size)
            received = self._take("received", size, self._wire_dtype) if run is None else run
            _exchange(send, route.gather_send_sizes, received, route.gather_receive_sizes)
            if run is None:
                for copy in route.gather_copies:
                    copy.view.copy_(received[copy.start : copy.stop].view(copy.view.shape))

    def scatter(self) -> None:
        """Add everybody's gradients up on the canonical shards, in the order of the ranks."""
        for route in self._routes:
            gradients = self._shards.bucket_gradients(route.bucket)
            send = self._gradients_to_send(route, gradients.dtype)
            received = self._take("received", sum(route.scatter_receive_sizes), gradients.dtype)
            _exchange(send, route.scatter_send_sizes, received, route.scatter_receive_sizes)
            gradients.zero_()
            at = 0
            for start, stop in route.scatter_receive:
                gradients[start:stop] += received[at : at + stop - start]
                at += stop - start

    def _parameters_to_send(self, route: _BucketRoute) -> Tensor:
        """For each destination in turn what it gets of the owned shard."""
        shard = self._shards.bucket_parameters(route.bucket)
        if len(route.gather_send) == 1 and shard.dtype == self._wire_dtype:
            start, stop = route.gather_send[0]
            return shard[start:stop]
        send = self._take("sent", sum(route.gather_send_sizes), self._wire_dtype)
        at = 0
        for start, stop in route.gather_send:
            send[at : at + stop - start].copy_(shard[start:stop])
            at += stop - start
        return send

    def _gradients_to_send(self, route: _BucketRoute, dtype: torch.dtype) -> Tensor:
        """What this rank contributes to the bucket, in canonical order."""
        size = sum(route.scatter_send_sizes)
        run = _single_run(route.scatter_copies, size)
        if run is not None:
            return run
        send = self._take("sent", size, dtype)
        for copy in route.scatter_copies:
            send[copy.start : copy.stop].view(copy.view.shape).copy_(copy.view)
        return send

    def _take(self, purpose: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        return self._staging.take(purpose, num_elements, dtype)

    def _route(self, bucket: Bucket, roles: Sequence[Role | None]) -> _BucketRoute:
        rank = self._shards.rank
        gather = gather_plan(self._layout, bucket, roles, rank=rank)
        scatter = scatter_plan(self._layout, bucket, roles, rank=rank)
        own_start, _ = bucket.shard_range(rank)
        return _BucketRoute(
            bucket=bucket,
            gather_send=_runs(gather.sent_by(rank), own_start),
            gather_send_sizes=_sizes(gather.sent_by(rank), self._layout.num_ranks, "destination"),
            gather_receive_sizes=_sizes(gather.received_by(rank), self._layout.num_ranks, "source"),
            gather_copies=self._copies(bucket, gradients=False),
            scatter_send_sizes=_sizes(scatter.sent_by(rank), self._layout.num_ranks, "destination"),
            scatter_copies=self._copies(bucket, gradients=True),
            scatter_receive=_runs(scatter.received_by(rank), own_start),
            scatter_receive_sizes=_sizes(
                scatter.received_by(rank), self._layout.num_ranks, "source"
            ),
        )

    def _copies(self, bucket: Bucket, *, gradients: bool) -> tuple[_Copy, ...]:
        """Rectangles of the arena in canonical order; neighbours in both places are merged."""
        role, arena = self._role, self._arena
        if role is None or arena is None or bucket.unit not in role.units:
            return ()
        copies: list[_Copy] = []
        at = 0
        for piece in bucket.pieces:
            if not self._layout.holds(piece, role.tp, role.tp_rank):
                continue
            kind = self._layout.parameters[piece.parameter].contribution
            if gradients and not role.contributes(kind):
                continue
            block = self._layout.block(piece, role.tp, role.tp_rank)
            bound = arena.bound[block.parameter]
            flat = bound.gradient if gradients else bound.values
            view = flat.as_strided(
                (block.num_rows, block.row_length),
                (block.row_stride, 1),
                flat.storage_offset() + block.offset,
            )
            copy = _Copy(at, at + view.numel(), view)
            if copies and _adjoin(copies[-1].view, view):
                copies[-1] = _joined(copies[-1], copy)
            else:
                copies.append(copy)
            at = copy.stop
        return tuple(copies)


def _exchange(
    send: Tensor, send_sizes: list[int], received: Tensor, receive_sizes: list[int]
) -> None:
    if dist.get_world_size() == 1:
        received.copy_(send)
    else:
        dist.all_to_all_single(received, send, receive_sizes, send_sizes)


def _adjoin(first: Tensor, second: Tensor) -> bool:
    """Whether both are without gaps and ``second`` begins where ``first`` ends."""
    return (
        first.is_contiguous()
        and second.is_contiguous()
        and second.storage_offset() == first.storage_offset() + first.numel()
    )


def _joined(first: _Copy, second: _Copy) -> _Copy:
    size = second.stop - first.start
    return _Copy(first.start, second.stop, first.view.as_strided((size,), (1,)))


def _single_run(copies: Sequence[_Copy], size: int) -> Tensor | None:
    """The part of the arena that travels in place, flat; None where a copy has to rearrange it."""
    if len(copies) != 1 or copies[0].stop != size or not copies[0].view.is_contiguous():
        return None
    return copies[0].view.view(-1)


def _runs(transfers: Sequence[Transfer], own_start: int) -> tuple[tuple[int, int], ...]:
    return tuple(
        (r.start - own_start, r.stop - own_start) for transfer in transfers for r in transfer.ranges
    )


def _sizes(transfers: Sequence[Transfer], num_ranks: int, end: str) -> list[int]:
    sizes = [0] * num_ranks
    for transfer in transfers:
        sizes[getattr(transfer, end)] = transfer.num_elements
    return sizes
