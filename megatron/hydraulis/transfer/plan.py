"""Transfer plans: for one bucket and one strategy, which ranges travel from whom to whom.

A **gather** carries parameters from their owners to every rank that holds them in the strategy; a
**scatter** carries gradients from every rank that contributes to the owners. Reversing the
direction of every transfer turns one kind into the other.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.ranges import Range, clip
from megatron.hydraulis.transfer.role import Role

__all__ = [
    "Range",
    "Transfer",
    "TransferPlan",
    "contributed_ranges",
    "gather_plan",
    "held_ranges",
    "regroup_elements",
    "scatter_plan",
]


@dataclass(frozen=True)
class Transfer:
    """What one rank sends to another; ascending, disjoint ranges that never touch."""

    source: int
    destination: int
    ranges: tuple[Range, ...]

    @cached_property
    def num_elements(self) -> int:
        """Elements that travel."""
        return sum(r.num_elements for r in self.ranges)


@dataclass(frozen=True)
class TransferPlan:
    """All transfers of one bucket that touch the ranks asked for, sorted by (source, destination).

    A rank's transfer to itself is part of the plan: it costs no network, but the data moves.
    """

    bucket: int
    num_ranks: int
    transfers: tuple[Transfer, ...]

    def inverse(self) -> TransferPlan:
        """The same ranges travelling the other way; twice is the identity."""
        turned = [Transfer(t.destination, t.source, t.ranges) for t in self.transfers]
        turned.sort(key=lambda t: (t.source, t.destination))
        return TransferPlan(self.bucket, self.num_ranks, tuple(turned))

    def for_bucket(self, index: int) -> TransferPlan:
        """The same ranges of another bucket, see `alike.alike_buckets`."""
        return dataclasses.replace(self, bucket=index)

    def sent_by(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers out of ``rank``, by destination."""
        return tuple(t for t in self.transfers if t.source == rank)

    def received_by(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers into ``rank``, by source."""
        return tuple(t for t in self.transfers if t.destination == rank)

    def num_network_elements(self, rank: int, *, received: bool = True) -> int:
        """Elements that ``rank`` receives from (or sends to) *other* ranks."""
        ends = self.received_by(rank) if received else self.sent_by(rank)
        return sum(t.num_elements for t in ends if t.source != t.destination)


def held_ranges(layout: CanonicalLayout, bucket: Bucket, role: Role | None) -> tuple[Range, ...]:
    """What a rank in this role holds of the bucket, in canonical order, adjacent runs merged."""
    return _ranges(layout, bucket, role, contributed=False)


def contributed_ranges(
    layout: CanonicalLayout, bucket: Bucket, role: Role | None
) -> tuple[Range, ...]:
    """What a rank in this role sends back of the bucket: a prefix of what it holds."""
    return _ranges(layout, bucket, role, contributed=True)


def gather_plan(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    rank: int | None = None,
) -> TransferPlan:
    """Parameters: from their owners to all who hold them.

    Args:
        layout: the canonical layout.
        bucket: one of its buckets.
        roles: the role of every rank in the strategy, None where idle.
        rank: only transfers that this rank sends or receives; all of them if None.
    """
    return _plan(layout, bucket, roles, rank, contributed=False)


def scatter_plan(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    rank: int | None = None,
) -> TransferPlan:
    """Gradients: from all who contribute to their owners (arguments as `gather_plan`)."""
    return _plan(layout, bucket, roles, rank, contributed=True).inverse()


def _ranges(
    layout: CanonicalLayout, bucket: Bucket, role: Role | None, *, contributed: bool
) -> tuple[Range, ...]:
    if role is None or bucket.unit not in role.units:
        return ()
    merged: list[Range] = []
    for piece, start in zip(bucket.pieces, bucket.piece_offsets, strict=False):
        if not layout.holds(piece, role.tp, role.tp_rank):
            continue
        if contributed and not role.contributes(layout.parameters[piece.parameter].contribution):
            continue
        stop = start + piece.num_elements
        if merged and merged[-1].stop == start:
            merged[-1] = Range(merged[-1].start, stop)
        else:
            merged.append(Range(start, stop))
    return tuple(merged)


def _plan(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    rank: int | None,
    *,
    contributed: bool,
) -> TransferPlan:
    if len(roles) != layout.num_ranks:
        raise PlanError(f"{len(roles)} roles for {layout.num_ranks} ranks; give one a rank")
    ranges_of: dict[Role | None, tuple[Range, ...]] = {}
    for role in roles:
        if role not in ranges_of:
            ranges_of[role] = _ranges(layout, bucket, role, contributed=contributed)
    # What an owner sends depends on the receiver's role alone, and roles are few: at 1,024 ranks
    # this is what keeps a plan of one rank from clipping ranges two thousand times a bucket.
    owners: Iterable[int] = range(layout.num_ranks) if rank is None else (rank,)
    transfers = []
    for owner in owners:
        parts_of = {
            role: clip(ranges, *bucket.shard_range(owner)) for role, ranges in ranges_of.items()
        }
        for receiver, role in enumerate(roles):
            if parts_of[role]:
                transfers.append(Transfer(owner, receiver, parts_of[role]))
    if rank is not None:
        transfers += _received(bucket, ranges_of[roles[rank]], rank)
        transfers.sort(key=lambda transfer: (transfer.source, transfer.destination))
    return TransferPlan(bucket.index, layout.num_ranks, tuple(transfers))


def _received(bucket: Bucket, ranges: Sequence[Range], rank: int) -> list[Transfer]:
    """Transfers to ``rank`` from all other owners of the ranges."""
    borders = bucket.shard_borders
    parts: dict[int, list[Range]] = {}
    for held in ranges:
        start = held.start
        while start < held.stop:
            share = bisect.bisect_right(borders, start) - 1
            stop = min(held.stop, borders[share + 1])
            parts.setdefault(bucket.owner_of(share), []).append(Range(start, stop))
            start = stop
    return [
        Transfer(owner, rank, tuple(of_owner)) for owner, of_owner in parts.items() if owner != rank
    ]


def regroup_elements(
    plans: Mapping[int, TransferPlan] | Sequence[TransferPlan], rank: int
) -> tuple[int, int]:
    """(received, sent) elements over the network by ``rank`` in the given plans."""
    every = plans.values() if isinstance(plans, Mapping) else plans
    received = sum(plan.num_network_elements(rank, received=True) for plan in every)
    sent = sum(plan.num_network_elements(rank, received=False) for plan in every)
    return received, sent
