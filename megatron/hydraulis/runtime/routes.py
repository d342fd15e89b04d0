"""What one rank does for one bucket: packs, posts, and puts away or adds up what arrives.

A route of each kind of transfer (`transfer.collective`), with everything that can be worked out
beforehand worked out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.runtime.copies import Copy, from_buffer, in_order_of, single_run, to_buffer
from megatron.hydraulis.runtime.shards import CanonicalShards
from megatron.hydraulis.runtime.staging import StagingSlot
from megatron.hydraulis.runtime.track import Step
from megatron.hydraulis.transfer.canonical import Bucket
from megatron.hydraulis.transfer.collective import EqualShares
from megatron.hydraulis.transfer.plan import (
    Transfer,
    TransferPlan,
    arrival_segments,
    departure_segments,
)
from megatron.hydraulis.transfer.two_step import TwoStepPlan

Run = tuple[int, int]
"""Elements [start, stop) of the rank's shard of a bucket."""

# Newer versions of torch give these two collectives other names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class BucketEnds:
    """The two ends of a bucket on one rank, between which routes lead."""

    bucket: Bucket
    shards: CanonicalShards
    held: tuple[Copy, ...]
    """What the rank's role holds, in canonical order."""
    contributed: tuple[Copy, ...]
    """What it contributes to gradients, in canonical order."""
    wire_dtype: torch.dtype
    """In which parameters travel; gradients travel in the dtype of the shards."""
    group: dist.ProcessGroup
    """Of all ranks, in their order."""

    @property
    def parameters(self) -> Tensor:
        """The owned part of the parameters."""
        return self.shards.bucket_parameters(self.bucket)

    @property
    def gradients(self) -> Tensor:
        """The owned part of the gradients."""
        return self.shards.bucket_gradients(self.bucket)


class Route(ABC):
    """How one bucket travels."""

    num_collectives: int
    """Posted by a gather, and by a scatter."""
    gather_needs_staging: bool
    scatter_needs_staging: bool
    received_in_place: bool
    """Whether parameters arrive in the arena itself."""
    sent_in_place: bool
    """Whether gradients leave from the arena itself."""

    def __init__(self, ends: BucketEnds) -> None:
        self._ends = ends
        self.bucket = ends.bucket

    @abstractmethod
    def gather(self, slot: StagingSlot) -> Iterator[Step]:
        """Shards to arena; see `track.Job.steps`."""

    @abstractmethod
    def scatter(self, slot: StagingSlot) -> Iterator[Step]:
        """Arena to shards, whose gradients are overwritten; see `track.Job.steps`."""

    def _shard_to_send(self, slot: StagingSlot, runs: Sequence[Run], num_elements: int) -> Tensor:
        """Runs of the owned parameters one after another, in the dtype of the wire."""
        shard, dtype = self._ends.parameters, self._ends.wire_dtype
        if _is_in_place(runs, num_elements) and shard.dtype == dtype:
            start, stop = runs[0]
            return shard[start:stop]
        send = slot.take("sent", num_elements, dtype)
        at = 0
        for start, stop in runs:
            send[at : at + stop - start].copy_(shard[start:stop])
            at += stop - start
        return send

    def _add_to_shard(self, runs: Sequence[Run], received: Tensor) -> None:
        """What arrives one after another, added up in that order."""
        gradients = self._ends.gradients
        gradients.zero_()
        at = 0
        for start, stop in runs:
            gradients[start:stop] += received[at : at + stop - start]
            at += stop - start

    def _exchange(
        self,
        received: Tensor,
        receive_sizes: list[int],
        send: Tensor,
        send_sizes: list[int],
    ) -> Step:
        group = self._ends.group
        if group.size() == 1:
            received.copy_(send)
            return None
        if received.is_cuda:
            return _exchange_by_pairs(received, receive_sizes, send, send_sizes, group)
        return dist.all_to_all_single(
            received, send, receive_sizes, send_sizes, group=group, async_op=True
        )


class OneStepRoute(Route):
    """Uneven all-to-all, both ways."""

    num_collectives = 1

    def __init__(self, ends: BucketEnds, gather: TransferPlan, scatter: TransferPlan) -> None:
        super().__init__(ends)
        rank, num_ranks = ends.shards.rank, gather.num_ranks
        own_start, _ = ends.bucket.shard_range(rank)
        self._gather_runs = _runs(gather.sent_by(rank), own_start)
        self._gather_send_sizes = _sizes(gather.sent_by(rank), num_ranks, "destination")
        self._gather_receive_sizes = _sizes(gather.received_by(rank), num_ranks, "source")
        self._arrivals = in_order_of(arrival_segments(gather, rank), ends.held)
        self._scatter_runs = _runs(scatter.received_by(rank), own_start)
        self._scatter_send_sizes = _sizes(scatter.sent_by(rank), num_ranks, "destination")
        self._scatter_receive_sizes = _sizes(scatter.received_by(rank), num_ranks, "source")
        self._departures = in_order_of(departure_segments(scatter, rank), ends.contributed)
        num_received = sum(self._gather_receive_sizes)
        num_sent = sum(self._gather_send_sizes)
        self.received_in_place = single_run(self._arrivals, num_received) is not None
        self.sent_in_place = single_run(self._departures, sum(self._scatter_send_sizes)) is not None
        sends_shard = _is_in_place(self._gather_runs, num_sent) and _is_wide(ends)
        self.gather_needs_staging = (num_received > 0 and not self.received_in_place) or (
            num_sent > 0 and not sends_shard
        )
        self.scatter_needs_staging = True

    def gather(self, slot: StagingSlot) -> Iterator[Step]:
        num_received = sum(self._gather_receive_sizes)
        send = self._shard_to_send(slot, self._gather_runs, sum(self._gather_send_sizes))
        run = single_run(self._arrivals, num_received)
        received = (
            slot.take("received", num_received, self._ends.wire_dtype) if run is None else run
        )
        yield self._exchange(received, self._gather_receive_sizes, send, self._gather_send_sizes)
        if run is None:
            from_buffer(self._arrivals, received)

    def scatter(self, slot: StagingSlot) -> Iterator[Step]:
        dtype = self._ends.gradients.dtype
        send = _departing(self._departures, sum(self._scatter_send_sizes), slot, dtype)
        received = slot.take("received", sum(self._scatter_receive_sizes), dtype)
        yield self._exchange(received, self._scatter_receive_sizes, send, self._scatter_send_sizes)
        self._add_to_shard(self._scatter_runs, received)


class EqualSharesRoute(Route):
    """All-gather; reduce-scatter back.

    gloo's reduce-scatter is an all-reduce of everything that throws most of it away: on the CPU an
    even all-to-all takes its place, which moves as much as a reduce-scatter should.
    """

    num_collectives = 1

    def __init__(self, ends: BucketEnds, gather: EqualShares, scatter: EqualShares) -> None:
        super().__init__(ends)
        self._share = gather.share_elements
        self._num_elements = gather.num_buffer_elements
        self._is_padded = gather.num_elements < self._num_elements
        self._arrivals = in_order_of(gather.segments, ends.held)
        self._departures = in_order_of(scatter.segments, ends.contributed)
        self._owns_whole_share = ends.parameters.numel() == self._share
        self.received_in_place = single_run(self._arrivals, self._num_elements) is not None
        self.sent_in_place = single_run(self._departures, self._num_elements) is not None
        sends_shard = self._owns_whole_share and _is_wide(ends)
        self.gather_needs_staging = not (self.received_in_place and sends_shard)
        self.scatter_needs_staging = not (
            ends.parameters.is_cuda and self.sent_in_place and self._owns_whole_share
        )

    def gather(self, slot: StagingSlot) -> Iterator[Step]:
        ends = self._ends
        shard = ends.parameters
        if self._owns_whole_share and shard.dtype == ends.wire_dtype:
            send = shard
        else:
            send = slot.take("sent", self._share, ends.wire_dtype)
            send[: shard.numel()].copy_(shard)
        run = single_run(self._arrivals, self._num_elements)
        received = (
            slot.take("received", self._num_elements, ends.wire_dtype) if run is None else run
        )
        if ends.group.size() == 1:
            received.copy_(send)
            yield None
        else:
            yield _all_gather(received, send, group=ends.group, async_op=True)
        if run is None:
            from_buffer(self._arrivals, received)

    def scatter(self, slot: StagingSlot) -> Iterator[Step]:
        gradients, group = self._ends.gradients, self._ends.group
        send = single_run(self._departures, self._num_elements)
        if send is None:
            send = slot.take("sent", self._num_elements, gradients.dtype)
            if self._is_padded:
                send.zero_()  # padding is added up as well
            to_buffer(self._departures, send)
        if not gradients.is_cuda:
            received = slot.take("received", self._num_elements, gradients.dtype)
            sizes = [self._share] * group.size()
            yield self._exchange(received, sizes, send, sizes)
            shares = received.view(group.size(), self._share)[:, : gradients.numel()]
            gradients.copy_(shares[0])
            for share in shares[1:]:
                gradients += share
            return
        received = gradients
        if not self._owns_whole_share:
            received = slot.take("received", self._share, gradients.dtype)
        yield _reduce_scatter(received, send, group=group, async_op=True)
        if not self._owns_whole_share:
            gradients.copy_(received[: gradients.numel()])


class TwoStepRoute(Route):
    """Across nodes once, then inside; inside, where relays add up, then across on the way back."""

    num_collectives = 2
    gather_needs_staging = True
    scatter_needs_staging = True

    def __init__(self, ends: BucketEnds, gather: TwoStepPlan, scatter: TwoStepPlan) -> None:
        super().__init__(ends)
        rank, num_ranks = ends.shards.rank, gather.across.num_ranks
        own_start, _ = ends.bucket.shard_range(rank)
        self._gather_runs = _runs(gather.across.sent_by(rank), own_start)
        self._gather_steps = [_StepSizes.of(plan, rank, num_ranks) for plan in gather.steps]
        self._gather_relays = gather.relay_copies(rank)
        self._arrivals = in_order_of(arrival_segments(gather.inside, rank), ends.held)
        self._departures = in_order_of(departure_segments(scatter.inside, rank), ends.contributed)
        self._scatter_steps = [_StepSizes.of(plan, rank, num_ranks) for plan in scatter.steps]
        self._scatter_relays = scatter.relay_copies(rank)
        self._scatter_runs = _runs(scatter.across.received_by(rank), own_start)
        num_received = sum(self._gather_steps[1].received)
        self.received_in_place = single_run(self._arrivals, num_received) is not None
        num_sent = sum(self._scatter_steps[0].sent)
        self.sent_in_place = single_run(self._departures, num_sent) is not None

    def gather(self, slot: StagingSlot) -> Iterator[Step]:
        across, inside = self._gather_steps
        dtype = self._ends.wire_dtype
        send = self._shard_to_send(slot, self._gather_runs, sum(across.sent))
        relayed = slot.take("relayed", sum(across.received), dtype)
        yield self._exchange(relayed, across.received, send, across.sent)
        send = slot.take("sent", sum(inside.sent), dtype)
        for copy in self._gather_relays:
            send[copy.inside_start : copy.inside_start + copy.num_elements].copy_(
                relayed[copy.across_start : copy.across_start + copy.num_elements]
            )
        num_received = sum(inside.received)
        run = single_run(self._arrivals, num_received)
        received = slot.take("received", num_received, dtype) if run is None else run
        yield self._exchange(received, inside.received, send, inside.sent)
        if run is None:
            from_buffer(self._arrivals, received)

    def scatter(self, slot: StagingSlot) -> Iterator[Step]:
        inside, across = self._scatter_steps
        dtype = self._ends.gradients.dtype
        send = _departing(self._departures, sum(inside.sent), slot, dtype)
        received = slot.take("received", sum(inside.received), dtype)
        yield self._exchange(received, inside.received, send, inside.sent)
        relayed = slot.take("relayed", sum(across.sent), dtype).zero_()
        for copy in self._scatter_relays:
            relayed[copy.across_start : copy.across_start + copy.num_elements] += received[
                copy.inside_start : copy.inside_start + copy.num_elements
            ]
        received = slot.take("received", sum(across.received), dtype)
        yield self._exchange(received, across.received, relayed, across.sent)
        self._add_to_shard(self._scatter_runs, received)


@dataclass(frozen=True)
class _StepSizes:
    """Elements for every rank, and from every rank."""

    sent: list[int]
    received: list[int]

    @classmethod
    def of(cls, plan: TransferPlan, rank: int, num_ranks: int) -> _StepSizes:
        return cls(
            _sizes(plan.sent_by(rank), num_ranks, "destination"),
            _sizes(plan.received_by(rank), num_ranks, "source"),
        )


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


def _exchange_by_pairs(
    received: Tensor,
    receive_sizes: Sequence[int],
    send: Tensor,
    send_sizes: Sequence[int],
    group: dist.ProcessGroup,
) -> Step:
    """All messages of the rank as one group of NCCL's; nothing where it has none.

    As all-to-all NCCL would connect every pair of ranks, to send most of them no bytes. The
    communicator must be there: a rank that has no message does not help to make it.
    """
    own = group.rank()
    arriving, leaving = _parts(received, receive_sizes), _parts(send, send_sizes)
    if own in arriving:
        arriving.pop(own).copy_(leaving.pop(own))
    messages = [
        dist.P2POp(operation, part, group=group, group_peer=rank)
        for operation, parts in ((dist.isend, leaving), (dist.irecv, arriving))
        for rank, part in parts.items()
    ]
    if not messages:
        return None
    (work,) = dist.batch_isend_irecv(messages)  # one, for NCCL runs them as one
    return work


def _parts(whole: Tensor, sizes: Sequence[int]) -> dict[int, Tensor]:
    """Rank -> its part of what lies one behind the other, where there is any."""
    parts: dict[int, Tensor] = {}
    start = 0
    for rank, size in enumerate(sizes):
        if size:
            parts[rank] = whole[start : start + size]
            start += size
    return parts


def _departing(
    departures: Sequence[Copy], num_elements: int, slot: StagingSlot, dtype: torch.dtype
) -> Tensor:
    """What the rank contributes, in the order in which it is sent."""
    run = single_run(departures, num_elements)
    if run is not None:
        return run
    send = slot.take("sent", num_elements, dtype)
    to_buffer(departures, send)
    return send


def _is_wide(ends: BucketEnds) -> bool:
    """Whether parameters travel as they are owned."""
    return ends.parameters.dtype == ends.wire_dtype


def _is_in_place(runs: Sequence[Run], num_elements: int) -> bool:
    return len(runs) == 1 and runs[0][1] - runs[0][0] == num_elements


def _runs(transfers: Sequence[Transfer], own_start: int) -> tuple[Run, ...]:
    return tuple(
        (r.start - own_start, r.stop - own_start) for transfer in transfers for r in transfer.ranges
    )


def _sizes(transfers: Sequence[Transfer], num_ranks: int, end: str) -> list[int]:
    sizes = [0] * num_ranks
    for transfer in transfers:
        sizes[getattr(transfer, end)] = transfer.num_elements
    return sizes
