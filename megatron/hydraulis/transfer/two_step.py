"""Two-step plans: what several ranks of a node need crosses the network once.

Ranks are numbered node by node; a rank's *index* is its position in its node. The **relay** of an
owner in a node is the rank there with the owner's index: load is spread evenly, and ranks exchange
data across nodes only with ranks of the same index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.plan import (
    Transfer,
    TransferPlan,
    located_ranges,
    merged_copies,
)
from megatron.hydraulis.transfer.ranges import (
    Range,
    RangesOfRole,
    clip,
    contributed_ranges,
    held_ranges,
    intersection,
    union,
)
from megatron.hydraulis.transfer.role import Role


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
       everything that the rank holds of the bucket: `plan.arrival_segments` of ``inside`` say in
       which order.

    **Scatter** (not ``across_first``), the same in reverse:

    1. inside: every rank sends its contributions, in the order of `plan.departure_segments` of
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
        """What ``rank`` copies (gather) or adds (scatter) between the steps.

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


def two_step_gather(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None,
    rank: int | None = None,
) -> TwoStepPlan:
    """Parameters: from their owners over relays to all ranks that hold them.

    Arguments as `plan.gather_plan`; ranks of a node have consecutive numbers.

    Raises:
        PlanError: the nodes are unknown or not full, or roles are missing.
    """
    return _plan(layout, bucket, roles, ranks_per_node, rank, held_ranges)


def two_step_scatter(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None,
    rank: int | None = None,
) -> TwoStepPlan:
    """Gradients: from all ranks that contribute over relays, which add them up, to their owners.

    Arguments and errors as `two_step_gather`.
    """
    return _plan(layout, bucket, roles, ranks_per_node, rank, contributed_ranges).inverse()


class _Needs:
    """The ranges of one bucket that roles and nodes need, and the transfers that follow."""

    def __init__(
        self,
        layout: CanonicalLayout,
        bucket: Bucket,
        roles: Sequence[Role | None],
        ranks_per_node: int,
        find: RangesOfRole,
    ) -> None:
        layout.check_roles(roles)
        if ranks_per_node < 1 or layout.num_ranks % ranks_per_node:
            raise PlanError(
                f"nodes have {ranks_per_node} ranks each but {layout.num_ranks} ranks do not fill "
                "whole nodes; correct ranks_per_node"
            )
        self._bucket = bucket
        self._roles = roles
        self._ranks_per_node = ranks_per_node
        # There are few roles and sets of roles, whatever the number of ranks: finding their ranges
        # once keeps plans for 1,024 ranks fast.
        self.of_role = {role: find(layout, bucket, role) for role in set(roles)}
        nodes = [
            frozenset(roles[first : first + ranks_per_node])
            for first in range(0, layout.num_ranks, ranks_per_node)
        ]
        of_roles = {
            present: union(self.of_role[role] for role in present) for present in set(nodes)
        }
        self.of_node = [of_roles[present] for present in nodes]
        """What at least one rank of each node needs."""

    def node_of(self, rank: int) -> range:
        """The ranks of the rank's node."""
        first = rank - rank % self._ranks_per_node
        return range(first, first + self._ranks_per_node)

    def with_index_of(self, rank: int) -> range:
        """The ranks of all nodes with the rank's index."""
        return range(rank % self._ranks_per_node, len(self._roles), self._ranks_per_node)

    def shard(self, owner: int) -> tuple[Range, ...]:
        start, stop = self._bucket.shard_range(owner)
        return (Range(start, stop),) if start < stop else ()

    @cached_property
    def _relayed(self) -> tuple[tuple[Range, ...], ...]:
        """What each index relays."""
        return tuple(
            union(self.shard(owner) for owner in self.with_index_of(index))
            for index in range(self._ranks_per_node)
        )

    def across(self, owner: int, relay: int) -> tuple[Range, ...]:
        """What an owner sends to a relay."""
        needed = self.of_node[relay // self._ranks_per_node]
        return clip(needed, *self._bucket.shard_range(owner))

    def inside(self, relay: int, rank: int) -> tuple[Range, ...]:
        """What a relay sends to a rank of its node."""
        relayed = self._relayed[relay % self._ranks_per_node]
        return intersection(self.of_role[self._roles[rank]], relayed)


def _plan(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    ranks_per_node: int | None,
    rank: int | None,
    find: RangesOfRole,
) -> TwoStepPlan:
    if ranks_per_node is None:
        raise PlanError("a two-step transfer needs nodes but ranks_per_node is None; give it")
    needs = _Needs(layout, bucket, roles, ranks_per_node, find)
    ranks: Sequence[int] = range(layout.num_ranks) if rank is None else (rank,)

    def step(
        partners: Callable[[int], range], part: Callable[[int, int], tuple[Range, ...]]
    ) -> TransferPlan:
        transfers = (Transfer(*ends, part(*ends)) for ends in _ends(ranks, partners))
        return TransferPlan(bucket.index, layout.num_ranks, tuple(t for t in transfers if t.ranges))

    across = step(needs.with_index_of, needs.across)
    inside = step(needs.node_of, needs.inside)
    return TwoStepPlan(across, inside, ranks_per_node, across_first=True)


def _ends(
    ranks: Iterable[int], partners: Callable[[int], Iterable[int]]
) -> Iterator[tuple[int, int]]:
    """(source, destination) of transfers between the ranks and their partners, ascending."""
    pairs = [(rank, other) for rank in ranks for other in partners(rank)]
    yield from sorted({*pairs, *((other, rank) for rank, other in pairs)})
