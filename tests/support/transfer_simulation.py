"""Regrouping on numpy arrays: runs transfer plans as their docstrings prescribe.

Every rank works from plans restricted to itself. What it sends goes into a `Network`, which checks
that sender and receiver agree, as a collective would hang or crash where they do not, and counts
what crosses it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.collective import (
    BucketPlan,
    Collective,
    EqualShares,
    bucket_plans,
)
from megatron.hydraulis.transfer.plan import (
    Transfer,
    TransferPlan,
    TwoStepPlan,
    arrival_segments,
    departure_segments,
)
from megatron.hydraulis.transfer.role import Role

Values = npt.NDArray[np.float64]

PADDING = 1e6
"""Fills the padding of equal shares in a gather; the value must not matter."""


@dataclass
class Network:
    """Messages between ranks."""

    ranks_per_node: int
    sent: Counter[int] = field(default_factory=Counter)
    """Elements out of every rank to others, self-transfers left out."""
    received: Counter[int] = field(default_factory=Counter)
    crossings: Counter[tuple[int, int, int]] = field(default_factory=Counter)
    """(bucket, element, node): how often the element entered the node from another one."""

    def all_to_all(
        self, plans: Sequence[TransferPlan], send: Sequence[Values], *, gathers: bool
    ) -> list[Values]:
        """The data that every rank receives in an uneven `all_to_all_single`; sizes are checked on
        both ends."""
        boxes: dict[tuple[int, int], Values] = {}
        for rank, plan in enumerate(plans):
            at = 0
            for transfer in plan.sent_by(rank):
                boxes[rank, transfer.destination] = send[rank][at : at + transfer.num_elements]
                at += transfer.num_elements
                self._count(plan.bucket, transfer, gathers)
            assert at == len(send[rank]), "a rank sends its whole buffer"
        received = []
        for rank, plan in enumerate(plans):
            parts = [np.zeros(0)]
            for transfer in plan.received_by(rank):
                box = boxes.pop((transfer.source, rank))
                assert len(box) == transfer.num_elements, "both ends agree on the size"
                parts.append(box)
            received.append(np.concatenate(parts))
        assert not boxes, "a message was sent that no rank expects"
        return received

    def _count(self, bucket: int, transfer: Transfer, gathers: bool) -> None:
        if transfer.source == transfer.destination:
            return
        self.sent[transfer.source] += transfer.num_elements
        self.received[transfer.destination] += transfer.num_elements
        source = transfer.source // self.ranks_per_node
        destination = transfer.destination // self.ranks_per_node
        if source == destination:
            return
        # In a scatter the border of the contributing node counts.
        node = destination if gathers else source
        for r in transfer.ranges:
            for element in range(r.start, r.stop):
                self.crossings[bucket, element, node] += 1


@dataclass
class Simulation:
    """A job whose parameters and gradients are numpy arrays, bucket by bucket."""

    layout: CanonicalLayout
    roles: Sequence[Role | None]
    collective: Collective
    ranks_per_node: int

    def __post_init__(self) -> None:
        self.network = Network(self.ranks_per_node)

    def plan(self, bucket: Bucket, *, gathers: bool, rank: int | None = None) -> BucketPlan:
        """The plan of one direction, of a rank or of all."""
        gather, scatter = bucket_plans(
            self.collective,
            self.layout,
            bucket,
            self.roles,
            ranks_per_node=self.ranks_per_node,
            rank=rank,
        )
        return gather if gathers else scatter

    def plans(self, bucket: Bucket, *, gathers: bool) -> list[BucketPlan]:
        """The plan of every rank."""
        ranks = range(self.layout.num_ranks)
        return [self.plan(bucket, gathers=gathers, rank=rank) for rank in ranks]

    def gather(self, bucket: Bucket, values: Values) -> list[Values]:
        """The data that every rank holds of the bucket in canonical order, from shards of
        ``values``."""
        shards = [values[slice(*bucket.shard_range(r))] for r in range(self.layout.num_ranks)]
        plans = self.plans(bucket, gathers=True)
        if isinstance(plans[0], EqualShares):
            return [_all_gather(plans[0], shards) for _ in plans]
        if isinstance(plans[0], TwoStepPlan):
            two_steps = [plan for plan in plans if isinstance(plan, TwoStepPlan)]
            return self._two_step_gather(bucket, two_steps, shards)
        one_step = [plan for plan in plans if isinstance(plan, TransferPlan)]
        send = [_owned_runs(bucket, plan, r, shards[r]) for r, plan in enumerate(one_step)]
        received = self.network.all_to_all(one_step, send, gathers=True)
        return [_in_order(plan, r, received[r]) for r, plan in enumerate(one_step)]

    def scatter(self, bucket: Bucket, contributions: Sequence[Values]) -> list[Values]:
        """Every rank's shard of the sum, from what every rank contributes in canonical order."""
        plans = self.plans(bucket, gathers=False)
        if isinstance(plans[0], EqualShares):
            return _reduce_scatter(plans[0], contributions)
        if isinstance(plans[0], TwoStepPlan):
            two_steps = [plan for plan in plans if isinstance(plan, TwoStepPlan)]
            return self._two_step_scatter(bucket, two_steps, contributions)
        one_step = [plan for plan in plans if isinstance(plan, TransferPlan)]
        send = [_ordered(plan, r, contributions[r]) for r, plan in enumerate(one_step)]
        received = self.network.all_to_all(one_step, send, gathers=False)
        return [_added_up(bucket, plan, r, received[r]) for r, plan in enumerate(one_step)]

    def _two_step_gather(
        self, bucket: Bucket, plans: Sequence[TwoStepPlan], shards: Sequence[Values]
    ) -> list[Values]:
        across, inside = zip(*(plan.steps for plan in plans), strict=True)
        send = [_owned_runs(bucket, plan, r, shards[r]) for r, plan in enumerate(across)]
        arrived = self.network.all_to_all(across, send, gathers=True)
        send = []
        for rank, plan in enumerate(plans):
            buffer = np.full(sum(t.num_elements for t in inside[rank].sent_by(rank)), np.nan)
            for c in plan.relay_copies(rank):
                buffer[c.inside_start : c.inside_start + c.num_elements] = arrived[rank][
                    c.across_start : c.across_start + c.num_elements
                ]
            send.append(buffer)
        received = self.network.all_to_all(inside, send, gathers=True)
        return [_in_order(plan, r, received[r]) for r, plan in enumerate(inside)]

    def _two_step_scatter(
        self, bucket: Bucket, plans: Sequence[TwoStepPlan], contributions: Sequence[Values]
    ) -> list[Values]:
        inside, across = zip(*(plan.steps for plan in plans), strict=True)
        send = [_ordered(plan, r, contributions[r]) for r, plan in enumerate(inside)]
        arrived = self.network.all_to_all(inside, send, gathers=False)
        send = []
        for rank, plan in enumerate(plans):
            buffer = np.zeros(sum(t.num_elements for t in across[rank].sent_by(rank)))
            for c in plan.relay_copies(rank):
                buffer[c.across_start : c.across_start + c.num_elements] += arrived[rank][
                    c.inside_start : c.inside_start + c.num_elements
                ]
            send.append(buffer)
        received = self.network.all_to_all(across, send, gathers=False)
        return [_added_up(bucket, plan, r, received[r]) for r, plan in enumerate(across)]


def _owned_runs(bucket: Bucket, plan: TransferPlan, rank: int, shard: Values) -> Values:
    own_start, _ = bucket.shard_range(rank)
    runs = [
        shard[r.start - own_start : r.stop - own_start]
        for transfer in plan.sent_by(rank)
        for r in transfer.ranges
    ]
    return np.concatenate([np.zeros(0), *runs])


def _in_order(plan: TransferPlan, rank: int, received: Values) -> Values:
    held = np.full(len(received), np.nan)
    for s in arrival_segments(plan, rank):
        held[s.canonical_start : s.canonical_start + s.num_elements] = received[
            s.transfer_start : s.transfer_start + s.num_elements
        ]
    return held


def _ordered(plan: TransferPlan, rank: int, contributions: Values) -> Values:
    send = np.full(len(contributions), np.nan)
    for s in departure_segments(plan, rank):
        send[s.transfer_start : s.transfer_start + s.num_elements] = contributions[
            s.canonical_start : s.canonical_start + s.num_elements
        ]
    return send


def _added_up(bucket: Bucket, plan: TransferPlan, rank: int, received: Values) -> Values:
    own_start, own_stop = bucket.shard_range(rank)
    shard = np.zeros(own_stop - own_start)
    at = 0
    for transfer in plan.received_by(rank):
        for r in transfer.ranges:
            part = received[at : at + r.num_elements]
            shard[r.start - own_start : r.stop - own_start] += part
            at += r.num_elements
    return shard


def _all_gather(plan: EqualShares, shards: Sequence[Values]) -> Values:
    padding = [np.full(plan.share_elements - len(shard), PADDING) for shard in shards]
    pairs = zip(shards, padding, strict=True)
    flat = np.concatenate([part for pair in pairs for part in pair])
    assert len(flat) == plan.num_buffer_elements
    held = np.full(sum(map(len, shards)), np.nan)
    for s in plan.segments:
        held[s.canonical_start : s.canonical_start + s.num_elements] = flat[
            s.transfer_start : s.transfer_start + s.num_elements
        ]
    return held


def _reduce_scatter(plan: EqualShares, contributions: Sequence[Values]) -> list[Values]:
    total = np.zeros(plan.num_buffer_elements)
    for gradients in contributions:
        flat = np.zeros(plan.num_buffer_elements)
        for s in plan.segments:
            flat[s.transfer_start : s.transfer_start + s.num_elements] = gradients[
                s.canonical_start : s.canonical_start + s.num_elements
            ]
        total += flat
    starts = range(0, plan.num_buffer_elements, plan.share_elements)
    sizes = [stop - start for start, stop in plan.shards]
    return [total[start : start + size] for start, size in zip(starts, sizes, strict=True)]
