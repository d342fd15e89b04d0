"""Transfer plans of a bucket, in one step or two, and how their buffers map to canonical order.

A **gather** carries parameters from their owners to every rank that holds them in the strategy; a
**scatter** carries gradients from every rank that contributes to the owners. The inverse of one
kind of plan is a plan of the other kind.

`all_to_all_single` sorts its buffers by partner rank, whereas a rank holds its part of a bucket in
canonical order. The two orders are equal if owners are sorted by share, and differ for permuted
owners and for the second step of a `TwoStepPlan`: then `Segment`s say what to copy where.

In two steps, what several ranks of a node need crosses the network once. Ranks are numbered node by
node; a rank's *index* is its position in its node. The **relay** of an owner in a node is the rank
there with the owner's index: load is spread evenly, and ranks exchange data across nodes only with
ranks of the same index.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    intersection,
    num_elements,
    union,
)
from megatron.hydraulis.transfer.role import Role


@dataclass(frozen=True)
class Transfer:
    """Ranges that one rank sends to another; ascending, disjoint and never touching."""

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
            share = bisect_right(borders, start) - 1
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
    """Places for what ``rank`` receives in a *gather*, by ascending ``canonical_start``.

    Copy ``num_elements`` from ``transfer_start`` of the received buffer, which is sorted by source,
    to ``canonical_start`` of what the rank holds of the bucket. If there is a single segment, the
    buffer is already in canonical order and can be received in place.

    Raises:
        PlanError: an element arrives twice, as in a scatter, whose arrivals are added instead.
    """
    return _segments(plan.received_by(rank), f"rank {rank} receives")


def departure_segments(plan: TransferPlan, rank: int) -> tuple[Segment, ...]:
    """Places of what ``rank`` sends in a *scatter*, by ascending ``canonical_start``.

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


def merged_copies(copies: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Copies between two buffers, neighbours in both merged into one.

    copies: (start in one buffer, start in the other, number of elements) of each.
    """
    merged: list[tuple[int, int, int]] = []
    for first, second, size in copies:
        before = merged[-1] if merged else (-1, -1, 0)
        if (before[0] + before[2], before[1] + before[2]) == (first, second):
            merged[-1] = (before[0], before[1], before[2] + size)
        else:
            merged.append((first, second, size))
    return merged


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


@dataclass(frozen=True)
class RelayCopy:
    """Elements that a relay moves between its two buffers."""

    across_start: int
    """First element in the buffer of the step across nodes, which is sorted by the other rank."""
    inside_start: int
    """First element in the buffer of the step inside the node, sorted likewise."""
    num_elements: int


@dataclass(frozen=True)
class TwoStepPlan:
    """One bucket in two transfer plans, each run as an `all_to_all_single` of all ranks.

    **Gather** (``across_first``):

    1. across: every owner sends ``across.sent_by(rank)`` from its shard, sorted by destination.
       What stays in the owner's node is a transfer to itself.
    2. The relay fills the buffer of the next step: for each of `relay_copies`, it copies from
       ``across_start`` of what arrived to ``inside_start`` of what it will send. An element that
       several ranks need is copied once for each.
    3. inside: ``inside.sent_by(rank)``, sorted by destination; what arrives, sorted by source, is
       everything that the rank holds of the bucket: `arrival_segments` of ``inside`` say in
       which order.

    **Scatter** (not ``across_first``), the same in reverse:

    1. inside: every rank sends its contributions, in the order of `departure_segments` of
       ``inside``.
    2. The relay sets the buffer of the next step to zero and for each of `relay_copies` *adds* from
       ``inside_start`` of what arrived to ``across_start``, in the gradients' wide dtype.
    3. across: relays send that buffer; the owner adds what arrives in ``across.received_by``.

    A relay's buffer has about 1/``ranks_per_node`` of the bucket for the step across, and at most
    about the bucket for the step inside, if the entire node needs all of it. A rank takes part in
    the collective of a step even if it sends and receives nothing.
    """

    across: TransferPlan
    inside: TransferPlan
    ranks_per_node: int
    across_first: bool

    @property
    def bucket(self) -> int:
        """Index of the bucket."""
        return self.across.bucket

    @property
    def steps(self) -> tuple[TransferPlan, TransferPlan]:
        """Both steps in the order in which they run."""
        return (self.across, self.inside) if self.across_first else (self.inside, self.across)

    def for_bucket(self, index: int) -> TwoStepPlan:
        """The same plan for another bucket, see `buckets_with_equal_plans`."""
        steps = (self.across.for_bucket(index), self.inside.for_bucket(index))
        return TwoStepPlan(*steps, self.ranks_per_node, self.across_first)

    def inverse(self) -> TwoStepPlan:
        """The same ranges in the opposite direction over the same relays."""
        return TwoStepPlan(
            self.across.inverse(), self.inside.inverse(), self.ranks_per_node, not self.across_first
        )

    def relay_copies(self, rank: int) -> tuple[RelayCopy, ...]:
        """Elements that ``rank`` copies (gather) or adds (scatter) between the steps.

        By ascending ``inside_start``, without gaps.
        """
        if self.across_first:
            outer, inner = self.across.received_by(rank), self.inside.sent_by(rank)
        else:
            outer, inner = self.across.sent_by(rank), self.inside.received_by(rank)
        relayed = sorted(located_ranges(outer))
        starts = [r.start for r, _ in relayed]
        copies = []
        for r, inside_start in located_ranges(inner):
            at = r.start
            while at < r.stop:
                # Shards of neighbouring owners with the same index are one range inside.
                held, across_start = relayed[bisect_right(starts, at) - 1]
                stop = min(r.stop, held.stop)
                starts_of_copy = across_start + at - held.start, inside_start + at - r.start
                copies.append((*starts_of_copy, stop - at))
                at = stop
        return tuple(RelayCopy(*copy) for copy in merged_copies(copies))


def two_step_plans(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None,
    rank: int | None = None,
) -> tuple[TwoStepPlan, TwoStepPlan]:
    """(gather, scatter) over relays, which add up what is sent back.

    Arguments as `gather_plan`; ranks of a node have consecutive numbers.

    Raises:
        PlanError: the nodes are unknown or not full, or roles are missing.
    """
    if ranks_per_node is None:
        raise PlanError("a two-step transfer needs nodes but ranks_per_node is None; give it")
    layout.check_roles(roles)
    layout.check_nodes(ranks_per_node)
    gather, scatter = (
        _two_steps(layout, bucket, roles, ranks_per_node, rank, find)
        for find in (held_ranges, contributed_ranges)
    )
    return gather, scatter.inverse()


def _two_steps(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    ranks_per_node: int,
    rank: int | None,
    find: RangesOfRole,
) -> TwoStepPlan:
    # There are few roles and sets of roles, whatever the number of ranks: finding their ranges
    # once keeps plans for 1,024 ranks fast.
    of_role = {role: find(layout, bucket, role) for role in set(roles)}
    nodes = [
        range(first, first + ranks_per_node) for first in range(0, layout.num_ranks, ranks_per_node)
    ]
    roles_of_node = [frozenset(roles[node.start : node.stop]) for node in nodes]
    of_roles = {present: union(of_role[role] for role in present) for present in set(roles_of_node)}
    indices = [range(index, layout.num_ranks, ranks_per_node) for index in range(ranks_per_node)]
    shards = [bucket.shard_range(owner) for owner in range(layout.num_ranks)]
    relayed = [
        union((Range(*shards[owner]),) for owner in owners if shards[owner][0] < shards[owner][1])
        for owners in indices
    ]
    ranks: Sequence[int] = range(layout.num_ranks) if rank is None else (rank,)

    def across(owner: int, relay: int) -> tuple[Range, ...]:
        return clip(of_roles[roles_of_node[relay // ranks_per_node]], *shards[owner])

    def inside(relay: int, receiver: int) -> tuple[Range, ...]:
        return intersection(of_role[roles[receiver]], relayed[relay % ranks_per_node])

    def step(
        partners: Callable[[int], range], part: Callable[[int, int], tuple[Range, ...]]
    ) -> TransferPlan:
        pairs = [(each, other) for each in ranks for other in partners(each)]
        ends = sorted({*pairs, *((other, each) for each, other in pairs)})
        found = [Transfer(*pair, part(*pair)) for pair in ends]
        return TransferPlan(bucket.index, layout.num_ranks, tuple(t for t in found if t.ranges))

    return TwoStepPlan(
        step(lambda each: indices[each % ranks_per_node], across),
        step(lambda each: nodes[each // ranks_per_node], inside),
        ranks_per_node,
        across_first=True,
    )
