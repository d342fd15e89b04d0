"""Regrouping: canonical shards -> a strategy's parameters, its gradients -> canonical shards.

A `Regrouper` has a `Route` for every bucket, which packs, exchanges, and unpacks or adds up; the
buckets of a call do so together. `transfer` decides what goes where and which buckets share a call;
everything that does not change is computed once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.optimizer.shards import CanonicalShards
from megatron.hydraulis.runtime.arena import Arena
from megatron.hydraulis.runtime.copies import (
    Copy,
    canonical_copies,
    in_order_of,
    single_run,
    stacked,
)
from megatron.hydraulis.runtime.track import StagingPart, StagingSlot, Step, TrackJob
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.amounts import LayoutAmounts, StrategyAmounts
from megatron.hydraulis.transfer.calls import calls_of, calls_without
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.collective import (
    EqualShares,
    collective_of,
    link_elements,
    regroup_bytes,
    strategy_plans,
)
from megatron.hydraulis.transfer.plan import (
    Segment,
    Transfer,
    TransferPlan,
    TwoStepPlan,
    arrival_segments,
    departure_segments,
)
from megatron.hydraulis.transfer.role import Role

Run = tuple[int, int]
"""Elements [start, stop) of the rank's shard of a bucket."""
Staged = Mapping[str, int]
"""Bytes of staging that a bucket takes, by purpose."""

# Newer versions of torch give these two collectives other names.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Regrouper:
    """A rank's jobs for one strategy: a gather and a scatter of every call.

    All ranks run all jobs in the same order: gathers in that of `calls`, scatters in the reverse of
    `scatter_calls`. Idle ranks and replicas without sequences take part.

    Args:
        strategy: by which the buckets of a call are chosen.
        roles: the role of every rank in the strategy, None where idle.
        arena: this rank's arena, its model bound; None where idle.
        wire_dtype: in which parameters travel: that of every rank's arena.
        gradient_dtype: in which gradients travel. Owners and relays add them up in the dtype of
            the shards.
        group: of all ranks, in their order, used for regrouping only.
        ranks_per_node: as the pool says.
    """

    def __init__(
        self,
        layout: CanonicalLayout,
        strategy: Strategy,
        roles: Sequence[Role | None],
        shards: CanonicalShards,
        arena: Arena | None,
        *,
        wire_dtype: torch.dtype,
        gradient_dtype: torch.dtype,
        group: dist.ProcessGroup,
        ranks_per_node: int,
    ) -> None:
        amounts = StrategyAmounts(LayoutAmounts(layout, ranks_per_node), roles)
        self.roles = roles
        self.collective = collective_of(amounts)
        """The kind of gathers."""
        self.calls = calls_of(self.collective, amounts, strategy)
        """The buckets of each gather's call, in the order of gathers."""
        frozen = {bucket.index for bucket in layout.buckets if bucket.unit.is_frozen}
        self.scatter_calls = calls_without(self.calls, frozen)
        """The buckets of each scatter's call, without frozen ones, in the order of gathers."""
        self._group = group
        scatter_collective = collective_of(
            amounts, may_reduce=gradient_dtype == shards.gradients.dtype
        )
        plans_of = partial(
            strategy_plans,
            layout=layout,
            roles=roles,
            ranks_per_node=ranks_per_node,
            rank=shards.rank,
        )
        plans = scatter_plans = plans_of(self.collective)
        if scatter_collective is not self.collective:
            scatter_plans = plans_of(scatter_collective)
        self.traffic = regroup_bytes(
            [gather for gather, _ in plans],
            [
                scatter
                for bucket, (_, scatter) in zip(layout.buckets, scatter_plans, strict=True)
                if not bucket.unit.is_frozen
            ],
            shards.rank,
            ranks_per_node=ranks_per_node,
            parameter_bytes=wire_dtype.itemsize,
            gradient_bytes=gradient_dtype.itemsize,
        )
        """Bytes that this rank exchanges with others in an iteration, of which `bytes_of` are not
        exchanged if nobody needs some frozen buckets."""
        links = [
            link_elements(plan, shards.rank, ranks_per_node=ranks_per_node) for plan, _ in plans
        ]
        self._gather_bytes = [wire_dtype.itemsize * (each.received + each.sent) for each in links]
        self.routes: list[Route] = []
        """One for each bucket."""
        self._scatter_routes: list[Route] = []
        role = roles[shards.rank]
        # Views are made here, and torch refuses views beyond the current memory.
        with nullcontext() if arena is None else arena.in_memory():
            for bucket, plan, scatter_plan in zip(
                layout.buckets, plans, scatter_plans, strict=True
            ):
                held: tuple[Copy, ...] = ()
                contributed: tuple[Copy, ...] = ()
                if role is not None and arena is not None:
                    held = canonical_copies(layout, bucket, role, arena, gradients=False)
                    contributed = canonical_copies(layout, bucket, role, arena, gradients=True)
                ends = BucketEnds(
                    bucket, shards, held, contributed, wire_dtype, gradient_dtype, group
                )
                route = make_route(ends, *plan)
                self.routes.append(route)
                self._scatter_routes.append(
                    route if scatter_plan is plan else make_route(ends, *scatter_plan)
                )

    def bytes_of(self, buckets: Iterable[int]) -> int:
        """Bytes that this rank exchanges with others in the gather of some buckets."""
        return sum(self._gather_bytes[bucket] for bucket in buckets)

    def gather_job(self, call: Sequence[int]) -> TrackJob:
        """Fills the arena's parameters of a call's buckets, or of some of them, from the shards of
        all ranks."""
        routes = [self.routes[bucket] for bucket in call]
        return self._job(
            "gather", [(route, route.gather_staging, route.gather) for route in routes]
        )

    def scatter_job(self, call: int, *, adds: bool = False) -> TrackJob:
        """Adds up the gradients of a call's buckets on the shards, in the order of the ranks.

        adds: to what is there, which is replaced otherwise.
        """
        routes = [self._scatter_routes[bucket] for bucket in self.scatter_calls[call]]
        return self._job(
            "scatter",
            [
                (route, route.scatter_staging(adds=adds), partial(route.scatter, adds=adds))
                for route in routes
            ],
        )

    def _job(
        self,
        span: str,
        members: Sequence[tuple[Route, Staged, Callable[[StagingPart], Iterator[Posted]]]],
    ) -> TrackJob:
        """One job of several routes, each with its staging and its steps, by the name of its
        span."""
        needs = [staging for _, staging, _ in members]

        def steps(slot: StagingSlot) -> Iterator[Step]:
            parts = slot.parts(needs)
            running = [of(part) for (_, _, of), part in zip(members, parts, strict=True)]
            for exchanges in zip(*running, strict=True):
                yield _posted(exchanges, self._group)

        buckets = [route.bucket for route, _, _ in members]
        units = dict.fromkeys(bucket.unit.name for bucket in buckets)
        return TrackJob(
            span=span,
            detail={"bucket": buckets[0].index, "unit": ", ".join(units)},
            num_steps=members[0][0].num_steps,
            needs_staging=any(any(staging.values()) for staging in needs),
            steps=steps,
        )


@dataclass(frozen=True)
class BucketEnds:
    """Both ends of a bucket's way on one rank: its shard, and its places in the arena."""

    bucket: Bucket
    shards: CanonicalShards
    held: tuple[Copy, ...]
    """Copies that the rank's role holds, in canonical order."""
    contributed: tuple[Copy, ...]
    """Copies that it contributes to gradients, in canonical order."""
    wire_dtype: torch.dtype
    """Dtype in which parameters travel."""
    gradient_dtype: torch.dtype
    """Dtype in which gradients travel: that of the shards, or a narrower one."""
    group: dist.ProcessGroup
    """All ranks, in their order."""

    @property
    def parameters(self) -> Tensor:
        """The owned part of the parameters."""
        return self.shards.bucket_parameters(self.bucket)

    @property
    def gradients(self) -> Tensor:
        """The owned part of the gradients; of a trained bucket."""
        return self.shards.bucket_gradients(self.bucket)


def make_route(
    ends: BucketEnds,
    gather: TransferPlan | EqualShares | TwoStepPlan,
    scatter: TransferPlan | EqualShares | TwoStepPlan,
) -> Route:
    """The route for two plans of the same kind."""
    if isinstance(gather, EqualShares):
        assert isinstance(scatter, EqualShares)
        return EqualSharesRoute(ends, gather, scatter)
    if isinstance(gather, TwoStepPlan):
        assert isinstance(scatter, TwoStepPlan)
        return TwoStepRoute(ends, gather, scatter)
    assert isinstance(scatter, TransferPlan)
    return OneStepRoute(ends, gather, scatter)


class Route(ABC):
    """Way in which one bucket travels.

    Args:
        arriving: parameters in the order in which they arrive.
        num_received: elements that arrive, padding included.
        departing: gradients in the order in which they are sent.
        num_sent: elements that are sent, padding included.
    """

    num_steps: int
    """Exchanges of a gather, and of a scatter."""
    gather_staging: Staged

    def __init__(
        self,
        ends: BucketEnds,
        arriving: Sequence[Segment],
        num_received: int,
        departing: Sequence[Segment],
        num_sent: int,
    ) -> None:
        self._ends = ends
        self.bucket = ends.bucket
        self._num_received, self._num_sent = num_received, num_sent
        arrivals = in_order_of(arriving, ends.held)
        departures = in_order_of(departing, ends.contributed)
        self._arrivals, self._departures = stacked(arrivals), stacked(departures)
        self._arrival_run = single_run(arrivals, num_received)
        narrows = ends.gradient_dtype != ends.shards.gradients.dtype
        self._departure_run = None if narrows else single_run(departures, num_sent)
        self._pads = sum(copy.stop - copy.start for copy in departures) < num_sent

    @property
    def received_in_place(self) -> bool:
        """True if parameters arrive in the arena itself."""
        return self._arrival_run is not None

    @property
    def sent_in_place(self) -> bool:
        """True if gradients leave from the arena itself."""
        return self._departure_run is not None

    @abstractmethod
    def scatter_staging(self, *, adds: bool) -> Staged:
        """The staging of a scatter."""

    @abstractmethod
    def gather(self, slot: StagingPart) -> Iterator[Posted]:
        """Shards to arena: packs before each ``yield`` and continues once what it yielded is
        complete."""

    @abstractmethod
    def scatter(self, slot: StagingPart, *, adds: bool = False) -> Iterator[Posted]:
        """Arena to shards, whose gradients are replaced or added to; steps as in `gather`."""

    def _sends_shard(self, runs: Sequence[Run], num_elements: int) -> bool:
        """True if a gather sends from the shard itself: one run, in the dtype of the wire."""
        is_one_run = len(runs) == 1 and runs[0][1] - runs[0][0] == num_elements
        return is_one_run and self._ends.parameters.dtype == self._ends.wire_dtype

    def _shard_to_send(self, slot: StagingPart, runs: Sequence[Run], num_elements: int) -> Tensor:
        """Runs of the owned parameters one after another, in the dtype of the wire."""
        shard = self._ends.parameters
        if self._sends_shard(runs, num_elements):
            start, stop = runs[0]
            return shard[start:stop]
        send = slot.take("sent", num_elements, self._ends.wire_dtype)
        at = 0
        for start, stop in runs:
            send[at : at + stop - start].copy_(shard[start:stop])
            at += stop - start
        return send

    def _shard_bytes(self, runs: Sequence[Run], num_elements: int) -> int:
        """Staging of `_shard_to_send`."""
        if self._sends_shard(runs, num_elements):
            return 0
        return num_elements * self._ends.wire_dtype.itemsize

    @property
    def _received_bytes(self) -> int:
        """Staging of `_receive_buffer`."""
        if self.received_in_place:
            return 0
        return self._num_received * self._ends.wire_dtype.itemsize

    @property
    def _packed_bytes(self) -> int:
        """Staging of `_packed_gradients`."""
        return 0 if self.sent_in_place else self._num_sent * self._ends.gradient_dtype.itemsize

    def _receive_buffer(self, slot: StagingPart) -> Tensor:
        """Place where parameters arrive: the arena, or else a buffer to `_unpack`."""
        if self._arrival_run is not None:
            return self._arrival_run
        return slot.take("received", self._num_received, self._ends.wire_dtype)

    def _unpack(self, received: Tensor) -> None:
        if self._arrival_run is None:
            for stack in self._arrivals:
                stack.view.copy_(stack.in_buffer(received))

    def _packed_gradients(self, slot: StagingPart) -> Tensor:
        """The rank's contribution, in the order in which it is sent."""
        if self._departure_run is not None:
            return self._departure_run
        send = slot.take("sent", self._num_sent, self._ends.gradient_dtype)
        if self._pads:
            send.zero_()  # padding is added up as well
        for stack in self._departures:
            stack.in_buffer(send).copy_(stack.view)
        return send

    def _add_to_shard(self, runs: Sequence[Run], received: Tensor, *, adds: bool) -> None:
        """Add up what arrived one after another, in that order."""
        gradients = self._ends.gradients
        if not adds:
            gradients.zero_()
        at = 0
        for start, stop in runs:
            gradients[start:stop] += received[at : at + stop - start]
            at += stop - start


class OneStepRoute(Route):
    """Route by an uneven all-to-all, both ways."""

    num_steps = 1

    def __init__(self, ends: BucketEnds, gather: TransferPlan, scatter: TransferPlan) -> None:
        rank = ends.shards.rank
        self._gather_sizes = _Sizes.of(gather, rank)
        self._scatter_sizes = _Sizes.of(scatter, rank)
        num_received = sum(self._gather_sizes.received)
        super().__init__(
            ends,
            arrival_segments(gather, rank),
            num_received,
            departure_segments(scatter, rank),
            sum(self._scatter_sizes.sent),
        )
        self._gather_runs = _runs(gather.sent_by(rank), ends)
        self._scatter_runs = _runs(scatter.received_by(rank), ends)
        self.gather_staging = {
            "sent": self._shard_bytes(self._gather_runs, sum(self._gather_sizes.sent)),
            "received": self._received_bytes,
        }

    def scatter_staging(self, *, adds: bool) -> Staged:
        num_received = sum(self._scatter_sizes.received)
        return {
            "sent": self._packed_bytes,
            "received": num_received * self._ends.gradient_dtype.itemsize,
        }

    def gather(self, slot: StagingPart) -> Iterator[Posted]:
        sizes = self._gather_sizes
        send = self._shard_to_send(slot, self._gather_runs, sum(sizes.sent))
        received = self._receive_buffer(slot)
        yield BucketExchange(received, send, sizes)
        self._unpack(received)

    def scatter(self, slot: StagingPart, *, adds: bool = False) -> Iterator[Posted]:
        sizes = self._scatter_sizes
        send = self._packed_gradients(slot)
        received = slot.take("received", sum(sizes.received), send.dtype)
        yield BucketExchange(received, send, sizes)
        self._add_to_shard(self._scatter_runs, received, adds=adds)


class EqualSharesRoute(Route):
    """All-gather; reduce-scatter back.

    On the CPU an even all-to-all replaces gloo's reduce-scatter, which is an all-reduce of
    everything: it moves as much as a reduce-scatter should.
    """

    num_steps = 1

    def __init__(self, ends: BucketEnds, gather: EqualShares, scatter: EqualShares) -> None:
        num_elements = gather.num_buffer_elements
        super().__init__(ends, gather.segments, num_elements, scatter.segments, num_elements)
        self._share = gather.share_elements
        self._runs = [(0, ends.parameters.numel())]
        self._owns_whole_share = ends.parameters.numel() == self._share
        self.gather_staging = {
            "sent": self._shard_bytes(self._runs, self._share),
            "received": self._received_bytes,
        }

    def scatter_staging(self, *, adds: bool) -> Staged:
        gradients = self._ends.gradients
        num_received = self._num_received
        if gradients.is_cuda:
            num_received = 0 if self._owns_whole_share and not adds else self._share
        return {"sent": self._packed_bytes, "received": num_received * gradients.itemsize}

    def gather(self, slot: StagingPart) -> Iterator[Posted]:
        send = self._shard_to_send(slot, self._runs, self._share)
        received = self._receive_buffer(slot)
        group = self._ends.group
        if group.size() == 1:
            received.copy_(send)
            yield None
        else:
            yield all_gather(received, send, group=group, async_op=True)
        self._unpack(received)

    def scatter(self, slot: StagingPart, *, adds: bool = False) -> Iterator[Posted]:
        gradients, group = self._ends.gradients, self._ends.group
        send = self._packed_gradients(slot)
        if not gradients.is_cuda:
            received = slot.take("received", self._num_received, gradients.dtype)
            sizes = [self._share] * group.size()
            yield BucketExchange(received, send, _Sizes(sizes, sizes))
            shares = received.view(group.size(), self._share)[:, : gradients.numel()]
            if not adds:
                gradients.zero_()
            for share in shares:
                gradients += share
            return
        received = gradients
        if adds or not self._owns_whole_share:
            received = slot.take("received", self._share, gradients.dtype)
        yield reduce_scatter(received, send, group=group, async_op=True)
        if adds:
            gradients += received[: gradients.numel()]
        elif not self._owns_whole_share:
            gradients.copy_(received[: gradients.numel()])


class TwoStepRoute(Route):
    """A gather sends once between nodes, then inside them; a scatter adds up on relays inside
    nodes, then sends between them."""

    num_steps = 2

    def __init__(self, ends: BucketEnds, gather: TwoStepPlan, scatter: TwoStepPlan) -> None:
        rank = ends.shards.rank
        self._gather_steps = [_Sizes.of(plan, rank) for plan in gather.steps]
        self._scatter_steps = [_Sizes.of(plan, rank) for plan in scatter.steps]
        super().__init__(
            ends,
            arrival_segments(gather.inside, rank),
            sum(self._gather_steps[1].received),
            departure_segments(scatter.inside, rank),
            sum(self._scatter_steps[0].sent),
        )
        self._gather_runs = _runs(gather.across.sent_by(rank), ends)
        self._scatter_runs = _runs(scatter.across.received_by(rank), ends)
        self._gather_relays = gather.relay_copies(rank)
        self._scatter_relays = scatter.relay_copies(rank)
        across, inside = self._gather_steps
        size = ends.wire_dtype.itemsize
        self.gather_staging = {
            "sent": max(
                self._shard_bytes(self._gather_runs, sum(across.sent)), sum(inside.sent) * size
            ),
            "relayed": sum(across.received) * size,
            "received": self._received_bytes,
        }

    def scatter_staging(self, *, adds: bool) -> Staged:
        inside, across = self._scatter_steps
        size, wide = self._ends.gradient_dtype.itemsize, self._ends.gradients.itemsize
        num_relayed = sum(across.sent)
        return {
            "sent": max(self._packed_bytes, num_relayed * size if size < wide else 0),
            "relayed": num_relayed * wide,
            "received": max(sum(inside.received), sum(across.received)) * size,
        }

    def gather(self, slot: StagingPart) -> Iterator[Posted]:
        across, inside = self._gather_steps
        dtype = self._ends.wire_dtype
        send = self._shard_to_send(slot, self._gather_runs, sum(across.sent))
        relayed = slot.take("relayed", sum(across.received), dtype)
        yield BucketExchange(relayed, send, across)
        send = slot.take("sent", sum(inside.sent), dtype)
        for copy in self._gather_relays:
            send[copy.inside_start : copy.inside_start + copy.num_elements].copy_(
                relayed[copy.across_start : copy.across_start + copy.num_elements]
            )
        received = self._receive_buffer(slot)
        yield BucketExchange(received, send, inside)
        self._unpack(received)

    def scatter(self, slot: StagingPart, *, adds: bool = False) -> Iterator[Posted]:
        inside, across = self._scatter_steps
        send = self._packed_gradients(slot)
        received = slot.take("received", sum(inside.received), send.dtype)
        yield BucketExchange(received, send, inside)
        relayed = slot.take("relayed", sum(across.sent), self._ends.gradients.dtype).zero_()
        for copy in self._scatter_relays:
            relayed[copy.across_start : copy.across_start + copy.num_elements] += received[
                copy.inside_start : copy.inside_start + copy.num_elements
            ]
        dtype = send.dtype
        send = relayed
        if relayed.dtype != dtype:
            send = slot.take("sent", relayed.numel(), dtype).copy_(relayed)
        received = slot.take("received", sum(across.received), dtype)
        yield BucketExchange(received, send, across)
        self._add_to_shard(self._scatter_runs, received, adds=adds)


@dataclass(frozen=True)
class _Sizes:
    """Elements sent to every rank, and received from every rank: shape (num_ranks,)."""

    sent: list[int]
    received: list[int]

    @classmethod
    def of(cls, plan: TransferPlan, rank: int) -> _Sizes:
        sent, received = [0] * plan.num_ranks, [0] * plan.num_ranks
        for transfer in plan.sent_by(rank):
            sent[transfer.destination] = transfer.num_elements
        for transfer in plan.received_by(rank):
            received[transfer.source] = transfer.num_elements
        return cls(sent, received)


def _runs(transfers: Sequence[Transfer], ends: BucketEnds) -> tuple[Run, ...]:
    own_start, _ = ends.bucket.shard_range(ends.shards.rank)
    return tuple(
        (r.start - own_start, r.stop - own_start) for transfer in transfers for r in transfer.ranges
    )


@dataclass(frozen=True)
class BucketExchange:
    """The elements of a bucket that a rank exchanges in one step of its call."""

    received: Tensor
    send: Tensor
    sizes: _Sizes


Posted = BucketExchange | dist.Work | None
"""What a route waits for: an exchange that its call posts, a collective that it has posted itself,
or nothing."""


def _posted(parts: Sequence[Posted], group: dist.ProcessGroup) -> Step:
    """The work of one step of a call, after posting what the routes of its buckets exchange."""
    works = [part for part in parts if isinstance(part, dist.Work)]
    exchanges = [part for part in parts if isinstance(part, BucketExchange)]
    if not exchanges:
        return works
    if group.size() == 1:
        for each in exchanges:
            each.received.copy_(each.send)
        return works
    if exchanges[0].received.is_cuda:
        return works + _exchanged_by_pairs(exchanges, group)
    for each in exchanges:
        sizes = each.sizes
        work = dist.all_to_all_single(
            each.received, each.send, sizes.received, sizes.sent, group=group, async_op=True
        )
        assert work is not None
        works.append(work)
    return works


def _exchanged_by_pairs(
    exchanges: Sequence[BucketExchange], group: dist.ProcessGroup
) -> list[dist.Work]:
    """The work of all messages of the rank, one group call of NCCL; none where it has none.

    NCCL matches messages between two ranks by their order: that of the buckets on both. For an
    all-to-all it would connect every pair of ranks, most of them to send no bytes. The
    communicator must exist already: a rank without messages does not take part in creating it.
    """
    rank = group.rank()
    messages: list[dist.P2POp] = []
    for each in exchanges:
        arriving = _by_rank(each.received, each.sizes.received)
        leaving = _by_rank(each.send, each.sizes.sent)
        if rank in arriving:
            arriving.pop(rank).copy_(leaving.pop(rank))
        messages += [
            dist.P2POp(operation, part, group=group, group_peer=peer)
            for operation, parts in ((dist.isend, leaving), (dist.irecv, arriving))
            for peer, part in parts.items()
        ]
    # NCCL runs them as one.
    return list(dist.batch_isend_irecv(messages)) if messages else []


def _by_rank(flat: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
    """The part of each rank, where it is not empty."""
    parts: dict[int, Tensor] = {}
    start = 0
    for rank, size in enumerate(sizes):
        if size:
            parts[rank] = flat[start : start + size]
            start += size
    return parts
