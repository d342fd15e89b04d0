"""One-step transfer plans of a bucket, and how their buffers map to canonical order.

A **gather** carries parameters from their owners to every rank that holds them in the strategy; a
**scatter** carries gradients from every rank that contributes to the owners. The inverse of one
kind of plan is a plan of the other kind.

`all_to_all_single` sorts its buffers by partner rank, whereas a rank holds its part of a bucket in
canonical order. The two orders are equal if owners are sorted by share, and differ for permuted
owners and for the second step of a `TwoStepPlan`: then `Segment`s say what to copy where.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.ranges import (
    Range,
    RangesOfRole,
    clip,
    contributed_ranges,
    held_ranges,
    num_elements,
)
from megatron.hydraulis.transfer.role import Role


@dataclass(frozen=True)
class Transfer:
    """What one rank sends to another; ascending, disjoint ranges that never touch."""

    source: int
    destination: int
    ranges: tuple[Range, ...]

    @cached_property
    def num_elements(self) -> int:
        return num_elements(self.ranges)


@dataclass(frozen=True)
class TransferPlan:
    """Transfers of one bucket, of all ranks or of one, sorted by (source, destination).

    A rank's transfer to itself is part of the plan: it needs no network, but the data moves.
    """

    bucket: int
    num_ranks: int
    transfers: tuple[Transfer, ...]

    def inverse(self) -> TransferPlan:
        """The same ranges in the opposite direction."""
        turned = [Transfer(t.destination, t.source, t.ranges) for t in self.transfers]
        turned.sort(key=lambda t: (t.source, t.destination))
        return TransferPlan(self.bucket, self.num_ranks, tuple(turned))

    def for_bucket(self, index: int) -> TransferPlan:
        """The same plan for another bucket, see `buckets_with_equal_plans`."""
        return dataclasses.replace(self, bucket=index)

    def sent_by(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers out of ``rank``, by destination."""
        return tuple(t for t in self.transfers if t.source == rank)

    def received_by(self, rank: int) -> tuple[Transfer, ...]:
        """Transfers into ``rank``, by source."""
        return tuple(t for t in self.transfers if t.destination == rank)


def gather_plan(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    rank: int | None = None,
) -> TransferPlan:
    """Parameters: from their owners to all ranks that hold them.

    Args:
        roles: the role of every rank in the strategy, None for idle ranks.
        rank: if given, the plan has only what this rank sends or receives.
    """
    return _plan(layout, bucket, roles, rank, held_ranges)


def scatter_plan(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    rank: int | None = None,
) -> TransferPlan:
    """Gradients: from all ranks that contribute to their owners (arguments as `gather_plan`)."""
    return _plan(layout, bucket, roles, rank, contributed_ranges).inverse()


def _plan(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    rank: int | None,
    find: RangesOfRole,
) -> TransferPlan:
    layout.check_roles(roles)
    ranges_of = {role: find(layout, bucket, role) for role in dict.fromkeys(roles)}
    owners: Iterable[int] = range(layout.num_ranks) if rank is None else (rank,)
    transfers = []
    for owner in owners:
        # By role, of which there are few: with 1,024 ranks this keeps the plan of one rank fast.
        parts_of = {
            role: clip(ranges, *bucket.shard_range(owner)) for role, ranges in ranges_of.items()
        }
        for receiver, role in enumerate(roles):
            if parts_of[role]:
                transfers.append(Transfer(owner, receiver, parts_of[role]))
    if rank is not None:
        transfers += _received_from_others(bucket, ranges_of[roles[rank]], rank)
        transfers.sort(key=lambda transfer: (transfer.source, transfer.destination))
    return TransferPlan(bucket.index, layout.num_ranks, tuple(transfers))


def _received_from_others(bucket: Bucket, ranges: Sequence[Range], rank: int) -> Iterator[Transfer]:
    borders = bucket.shard_borders
    parts: dict[int, list[Range]] = {}
    for held in ranges:
        start = held.start
        while start < held.stop:
            share = bisect.bisect_right(borders, start) - 1
            stop = min(held.stop, borders[share + 1])
            parts.setdefault(bucket.owner_of(share), []).append(Range(start, stop))
            start = stop
    for owner, of_owner in parts.items():
        if owner != rank:
            yield Transfer(owner, rank, tuple(of_owner))


@dataclass(frozen=True)
class Segment:
    """Elements that are contiguous both in the collective's buffer and in canonical order."""

    transfer_start: int
    """First element in the buffer that the collective fills or sends."""
    canonical_start: int
    """First element in the rank's part of the bucket, in canonical order and without gaps."""
    num_elements: int


def arrival_segments(plan: TransferPlan, rank: int) -> tuple[Segment, ...]:
    """Where to put what ``rank`` receives in a *gather*, by ascending ``canonical_start``.

    Copy ``num_elements`` from ``transfer_start`` of the received buffer, which is sorted by source,
    to ``canonical_start`` of what the rank holds of the bucket. If there is a single segment, the
    buffer is already in canonical order and can be received in place.

    Raises:
        PlanError: an element arrives twice, as in a scatter, whose arrivals are added instead.
    """
    return _segments(plan.received_by(rank), f"rank {rank} receives")


def departure_segments(plan: TransferPlan, rank: int) -> tuple[Segment, ...]:
    """Where to take what ``rank`` sends in a *scatter*, by ascending ``canonical_start``.

    The opposite of `arrival_segments`: copy from ``canonical_start`` of what the rank contributes
    to ``transfer_start`` of the buffer to send, which is sorted by destination. If there is a
    single segment, the contributions can be sent in place.

    Raises:
        PlanError: an element leaves twice, as in a gather.
    """
    return _segments(plan.sent_by(rank), f"rank {rank} sends")


def located_ranges(transfers: Iterable[Transfer]) -> list[tuple[Range, int]]:
    """Every range of the transfers and its start in their buffer, in the buffer's order."""
    located, at = [], 0
    for transfer in transfers:
        for r in transfer.ranges:
            located.append((r, at))
            at += r.num_elements
    return located


def merged_copies(copies: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Copies between two buffers, neighbours in both merged into one.

    copies: (start in one buffer, start in the other, number of elements) of each.
    """
    before: tuple[int, int, int] | None = None
    for first, second, size in copies:
        if before is not None and (before[0] + before[2], before[1] + before[2]) == (first, second):
            before = (before[0], before[1], before[2] + size)
        else:
            if before is not None:
                yield before
            before = (first, second, size)
    if before is not None:
        yield before


def _segments(transfers: Iterable[Transfer], what: str) -> tuple[Segment, ...]:
    copies, canonical_start, last_stop = [], 0, 0
    for r, at in sorted(located_ranges(transfers)):
        if r.start < last_stop:
            raise PlanError(
                f"{what} element {r.start} twice, which has no canonical order; ask for the "
                "arrivals of a gather or the departures of a scatter"
            )
        last_stop = r.stop
        copies.append((at, canonical_start, r.num_elements))
        canonical_start += r.num_elements
    return tuple(Segment(*copy) for copy in merged_copies(copies))
