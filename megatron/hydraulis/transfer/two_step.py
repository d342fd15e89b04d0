"""Two steps between nodes: what several ranks of a node need crosses the network once.

Ranks are counted node by node; a rank's *index* is its place in its node. The **relay** of an owner
in a node is the rank there with the owner's index: load spreads evenly, and across the network a
rank only ever talks to ranks of its own index.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.alike import alike_buckets
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.plan import (
    Transfer,
    TransferPlan,
    contributed_ranges,
    held_ranges,
)
from megatron.hydraulis.transfer.ranges import Range, clip, intersection, num_elements, union
from megatron.hydraulis.transfer.role import Role
from megatron.hydraulis.transfer.segments import located_ranges


@dataclass(frozen=True)
class RelayCopy:
    """Elements that a relay moves between its two buffers."""

    across_start: int
    """First element in the buffer of the step across: transfers in the order of their other end."""
    inside_start: int
    """First element in the buffer of the step inside, in the same order."""
    num_elements: int


@dataclass(frozen=True)
class TwoStepPlan:
    """One bucket in two transfer plans, each run as an `all_to_all_single` of all ranks.

    **Gather** (``across_first``):

    1. across: every owner sends ``across.sent_by(rank)``, runs of its shard, by rising destination.
       What stays in the owner's node is a transfer to itself.
    2. The relay builds the buffer of the next step: for each of `relay_copies`, copy from
       ``across_start`` of what arrived to ``inside_start`` of what it will send. An element that
       several ranks need is copied once for each.
    3. inside: ``inside.sent_by(rank)``, by rising destination; what arrives, by rising source, is
       everything that the rank holds of the bucket: `segments.arrival_segments` of ``inside`` say
       in which order.

    **Scatter** (not ``across_first``), each step the mirror image:

    1. inside: every rank sends its contributions, ordered by `segments.departure_segments` of
       ``inside``.
    2. The relay sets the buffer of the next step to zero and for each of `relay_copies` *adds* from
       ``inside_start`` of what arrived to ``across_start``, in the gradients' wide dtype.
    3. across: relays send that buffer; the owner adds up what arrives in ``across.received_by``.

    A relay's buffer of the step across has at most about one ``ranks_per_node``-th of the bucket,
    that of the step inside at most about the bucket: so much where the whole node needs all of it.
    A step in which a rank has nothing to send or receive is still a collective it takes part in.
    """

    across: TransferPlan
    inside: TransferPlan
    ranks_per_node: int
    across_first: bool

    def __post_init__(self) -> None:
        if (self.across.bucket, self.across.num_ranks) != (
            self.inside.bucket,
            self.inside.num_ranks,
        ):
            raise PlanError(
                f"two steps of one bucket of one job but they are of buckets {self.across.bucket} "
                f"and {self.inside.bucket}, of {self.across.num_ranks} and "
                f"{self.inside.num_ranks} ranks; build both from the same layout"
            )

    @property
    def bucket(self) -> int:
        """Index of the bucket."""
        return self.across.bucket

    @property
    def steps(self) -> tuple[TransferPlan, TransferPlan]:
        """Both steps in the order in which they run."""
        return (self.across, self.inside) if self.across_first else (self.inside, self.across)

    def for_bucket(self, index: int) -> TwoStepPlan:
        """The same ranges of another bucket, see `alike.alike_buckets`."""
        steps = (self.across.for_bucket(index), self.inside.for_bucket(index))
        return TwoStepPlan(*steps, self.ranks_per_node, self.across_first)

    def inverse(self) -> TwoStepPlan:
        """The same ranges back over the same relays; twice is the identity."""
        return TwoStepPlan(
            self.across.inverse(), self.inside.inverse(), self.ranks_per_node, not self.across_first
        )

    def relay_copies(self, rank: int) -> tuple[RelayCopy, ...]:
        """What ``rank`` copies (gather) or adds (scatter) between the steps; see the class.

        By rising ``inside_start``, which they cover without gaps.
        """
        if self.across_first:
            outer, inner = self.across.received_by(rank), self.inside.sent_by(rank)
        else:
            outer, inner = self.across.sent_by(rank), self.inside.received_by(rank)
        relayed = sorted(located_ranges(outer))
        starts = [r.start for r, _ in relayed]
        copies: list[RelayCopy] = []
        for r, inside_start in located_ranges(inner):
            at = r.start
            while at < r.stop:
                # Owners of one index may be neighbours: their shards then are one range inside.
                held, across_start = relayed[bisect_right(starts, at) - 1]
                stop = min(r.stop, held.stop)
                copy = RelayCopy(
                    across_start + at - held.start, inside_start + at - r.start, stop - at
                )
                copies.append(copy)
                at = stop
        return _merged(copies)


def two_step_gather(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int,
    rank: int | None = None,
) -> TwoStepPlan:
    """Parameters: from their owners over relays to all who hold them.

    Args:
        layout: the canonical layout.
        bucket: one of its buckets.
        roles: the role of every rank in the strategy, None where idle.
        ranks_per_node: nodes are equal, their ranks neighbours.
        rank: only transfers that this rank sends or receives; all of them if None.

    Raises:
        PlanError: the ranks do not fill whole nodes, or roles are missing.
    """
    return _plan(layout, bucket, roles, ranks_per_node, rank, contributed=False)


def two_step_scatter(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int,
    rank: int | None = None,
) -> TwoStepPlan:
    """Gradients: from all who contribute over relays, which add up, to their owners.

    Arguments and errors as `two_step_gather`.
    """
    return _plan(layout, bucket, roles, ranks_per_node, rank, contributed=True).inverse()


def elements_across(
    layout: CanonicalLayout, roles: Sequence[Role | None], *, ranks_per_node: int
) -> tuple[int, int]:
    """(in one step, in two): elements that all nodes together receive from others in a gather."""
    one_step = two_steps = 0
    for buckets in alike_buckets(layout, roles):
        needs = _Needs(layout, buckets[0], roles, ranks_per_node, contributed=False)
        for node in range(needs.num_nodes):
            own = union([needs.shard(rank) for rank in needs.ranks_of(node)])
            outside: dict[Role | None, int] = {}
            for role in needs.roles_of(node):
                if role not in outside:
                    outside[role] = _num_outside(needs.of_role(role), own)
                one_step += outside[role] * len(buckets)
            two_steps += _num_outside(needs.of_node(node), own) * len(buckets)
    return one_step, two_steps


class _Needs:
    """Which ranges of one bucket are needed by roles and nodes, and lie with relays."""

    def __init__(
        self,
        layout: CanonicalLayout,
        bucket: Bucket,
        roles: Sequence[Role | None],
        ranks_per_node: int,
        *,
        contributed: bool,
    ) -> None:
        if len(roles) != layout.num_ranks:
            raise PlanError(f"{len(roles)} roles for {layout.num_ranks} ranks; give one a rank")
        if ranks_per_node < 1 or layout.num_ranks % ranks_per_node:
            raise PlanError(
                f"nodes have {ranks_per_node} ranks each but {layout.num_ranks} ranks do not fill "
                "whole nodes; correct ranks_per_node"
            )
        self._bucket = bucket
        self._roles = roles
        self._ranks_per_node = ranks_per_node
        self.num_nodes = layout.num_ranks // ranks_per_node
        find = contributed_ranges if contributed else held_ranges
        # Roles and sets of roles are few at any number of ranks: what depends on them alone is
        # worked out once, which keeps a plan of one of 1,024 ranks small.
        self._of_role = {role: find(layout, bucket, role) for role in set(roles)}
        self._of_roles: dict[frozenset[Role | None], tuple[Range, ...]] = {}

    def of_role(self, role: Role | None) -> tuple[Range, ...]:
        return self._of_role[role]

    def roles_of(self, node: int) -> Sequence[Role | None]:
        return [self._roles[rank] for rank in self.ranks_of(node)]

    def ranks_of(self, node: int) -> range:
        return range(node * self._ranks_per_node, (node + 1) * self._ranks_per_node)

    def of_node(self, node: int) -> tuple[Range, ...]:
        """What at least one rank of the node needs."""
        present = frozenset(self.roles_of(node))
        if present not in self._of_roles:
            self._of_roles[present] = union(self._of_role[role] for role in present)
        return self._of_roles[present]

    def shard(self, owner: int) -> tuple[Range, ...]:
        start, stop = self._bucket.shard_range(owner)
        return (Range(start, stop),) if start < stop else ()

    @cached_property
    def _relayed(self) -> tuple[tuple[Range, ...], ...]:
        num_ranks = len(self._roles)
        return tuple(
            union(self.shard(owner) for owner in range(index, num_ranks, self._ranks_per_node))
            for index in range(self._ranks_per_node)
        )

    def across_from(self, owner: int) -> list[Transfer]:
        index = owner % self._ranks_per_node
        return self._across(
            (owner, node * self._ranks_per_node + index) for node in range(self.num_nodes)
        )

    def across_to(self, relay: int) -> list[Transfer]:
        owners = range(relay % self._ranks_per_node, len(self._roles), self._ranks_per_node)
        return self._across((owner, relay) for owner in owners)

    def _across(self, ends: Iterable[tuple[int, int]]) -> list[Transfer]:
        transfers = []
        for owner, relay in ends:
            need = self.of_node(relay // self._ranks_per_node)
            part = clip(need, *self._bucket.shard_range(owner))
            if part:
                transfers.append(Transfer(owner, relay, part))
        return transfers

    def inside_from(self, relay: int) -> list[Transfer]:
        return self._inside((relay, rank) for rank in self._neighbours(relay))

    def inside_to(self, rank: int) -> list[Transfer]:
        return self._inside((relay, rank) for relay in self._neighbours(rank))

    def _neighbours(self, rank: int) -> range:
        return self.ranks_of(rank // self._ranks_per_node)

    def _inside(self, ends: Iterable[tuple[int, int]]) -> list[Transfer]:
        transfers = []
        for relay, rank in ends:
            relayed = self._relayed[relay % self._ranks_per_node]
            part = intersection(self._of_role[self._roles[rank]], relayed)
            if part:
                transfers.append(Transfer(relay, rank, part))
        return transfers


def _plan(
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    ranks_per_node: int,
    rank: int | None,
    *,
    contributed: bool,
) -> TwoStepPlan:
    needs = _Needs(layout, bucket, roles, ranks_per_node, contributed=contributed)
    if rank is None:
        everyone = range(layout.num_ranks)
        across = [transfer for owner in everyone for transfer in needs.across_from(owner)]
        inside = [transfer for relay in everyone for transfer in needs.inside_from(relay)]
    else:
        across = needs.across_from(rank) + needs.across_to(rank)
        inside = needs.inside_from(rank) + needs.inside_to(rank)
    return TwoStepPlan(
        _transfer_plan(bucket, layout, across),
        _transfer_plan(bucket, layout, inside),
        ranks_per_node,
        across_first=True,
    )


def _transfer_plan(
    bucket: Bucket, layout: CanonicalLayout, transfers: Iterable[Transfer]
) -> TransferPlan:
    # A rank's transfer to itself is among what it sends and among what it receives.
    by_ends = {(transfer.source, transfer.destination): transfer for transfer in transfers}
    return TransferPlan(bucket.index, layout.num_ranks, tuple(by_ends[e] for e in sorted(by_ends)))


def _num_outside(ranges: Sequence[Range], own: Sequence[Range]) -> int:
    return num_elements(ranges) - num_elements(intersection(ranges, own))


def _merged(copies: Iterable[RelayCopy]) -> tuple[RelayCopy, ...]:
    found: list[RelayCopy] = []
    for copy in copies:
        before = found[-1] if found else None
        if (
            before is not None
            and before.across_start + before.num_elements == copy.across_start
            and before.inside_start + before.num_elements == copy.inside_start
        ):
            size = before.num_elements + copy.num_elements
            found[-1] = RelayCopy(before.across_start, before.inside_start, size)
        else:
            found.append(copy)
    return tuple(found)
