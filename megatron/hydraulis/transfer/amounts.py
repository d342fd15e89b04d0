"""Amounts that strategies exchange over a layout, counted without building transfer plans.

A transfer plan lists ranges; times need only their sizes by owner. These depend on how a bucket is
cut and on the part of it that a role holds, of which a job has few, so they are counted once and
kept for all strategies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from megatron.hydraulis.frozen import NOTHING_FROZEN, Frozen
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout, model_parameters
from megatron.hydraulis.transfer.ranges import (
    Amounts,
    buckets_with_equal_plans,
    contributed_ranges,
    elements_in_shares,
    held_ranges,
    union,
)
from megatron.hydraulis.transfer.role import Role


@dataclass(frozen=True)
class LinkElements[Count: (int, Amounts)]:
    """Elements that a rank exchanges with others, or that each does: numbers or (num_ranks,)."""

    received_inside: Count
    """Elements from ranks of the same node."""
    received_across: Count
    """Elements from ranks of other nodes."""
    sent_inside: Count
    sent_across: Count

    @property
    def received(self) -> Count:
        """Elements from all other ranks."""
        return self.received_inside + self.received_across

    @property
    def sent(self) -> Count:
        """Elements to all other ranks."""
        return self.sent_inside + self.sent_across

    def inverse(self) -> LinkElements[Count]:
        """The same elements in the opposite direction."""
        return LinkElements(
            self.sent_inside, self.sent_across, self.received_inside, self.received_across
        )

    def __add__(self, other: LinkElements[Count]) -> LinkElements[Count]:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return LinkElements(*(mine + theirs for mine, theirs in pairs))


RankAmounts = LinkElements[Amounts]
"""The amounts of all ranks."""


class LayoutAmounts:
    """Amounts of a layout that roles need, counted once for all strategies.

    Args:
        ranks_per_node: None if nodes are unknown: all ranks then count as one node.

    Raises:
        PlanError: the nodes are not full.
    """

    def __init__(self, layout: CanonicalLayout, ranks_per_node: int | None) -> None:
        self.layout = layout
        num_ranks = layout.num_ranks
        self.ranks_per_node = min(ranks_per_node or num_ranks, num_ranks)
        layout.check_nodes(self.ranks_per_node)
        self._known: dict[tuple[int, bool, frozenset[tuple[object, ...]]], Amounts] = {}

    def needed(self, bucket: Bucket, members: Collection[Role], *, contributed: bool) -> Amounts:
        """Elements of each owner's share that at least one of some roles holds or contributes:
        shape (num_ranks,)."""
        holders = {role.cut: role for role in members if bucket.unit in role.units}
        are_shared = any(role.column is not None for role in holders.values())
        cuts = self.layout.places if are_shared else self.layout.cuts
        # A number of one kind may equal one of the other, but then the holders differ.
        key = cuts[bucket.index], contributed, frozenset(holders)
        if key not in self._known:
            find = contributed_ranges if contributed else held_ranges
            ranges = union(find(self.layout, bucket, role) for role in holders.values())
            by_share = elements_in_shares(bucket, ranges)
            if bucket.owner_order is not None:
                by_share[np.array(bucket.owner_order)] = by_share.copy()
            self._known[key] = by_share
        return self._known[key]


@lru_cache
def amounts_of_model(
    shape: ModelShape,
    num_expert_groups: int,
    num_atoms: int,
    num_ranks: int,
    ranks_per_node: int,
    frozen: Frozen = NOTHING_FROZEN,
) -> LayoutAmounts:
    """The amounts of a model's layout, whose experts are grouped as ranks hold them."""
    parameters = model_parameters(shape, num_expert_groups, frozen)
    layout = CanonicalLayout.build(parameters, num_atoms=num_atoms, num_ranks=num_ranks)
    return LayoutAmounts(layout, ranks_per_node)


class StrategyAmounts:
    """Amounts that the ranks of a strategy exchange.

    Args:
        roles: the role of every rank, None for idle ranks.

    Raises:
        PlanError: roles are missing.
    """

    def __init__(self, layout: LayoutAmounts, roles: Sequence[Role | None]) -> None:
        layout.layout.check_roles(roles)
        self._of_layout = layout
        self.layout = layout.layout
        self.ranks_per_node = layout.ranks_per_node
        self.roles = roles
        self._ranks = np.arange(len(roles))
        self._nodes, self._indices = np.divmod(self._ranks, self.ranks_per_node)
        self._roles = [role for role in dict.fromkeys(roles) if role is not None]
        places: dict[Role | None, int] = {role: place for place, role in enumerate(self._roles)}
        # Idle ranks have one more row, of zeros.
        self._place = np.array([places.get(role, len(places)) for role in roles])
        of_nodes = self._place.reshape(-1, self.ranks_per_node)
        self._num_in_node = np.zeros((len(of_nodes), len(places) + 1), dtype=np.int64)
        np.add.at(self._num_in_node, (self._nodes, self._place), 1)
        present, self._kind_of_node = np.unique(
            self._num_in_node[:, :-1] > 0, axis=0, return_inverse=True
        )
        self._roles_of_kind = [
            [role for role, is_here in zip(self._roles, kind, strict=True) if is_here]
            for kind in present
        ]

    @cached_property
    def equal_buckets(self) -> tuple[tuple[Bucket, ...], ...]:
        """All buckets, those together of which ranks exchange equal amounts."""
        return buckets_with_equal_plans(self.layout, self._roles)

    @cached_property
    def across(self) -> tuple[int, int]:
        """Elements that cross nodes in a gather, of all nodes: (in one step, in two steps)."""
        one_step = two_steps = 0
        for buckets in self.equal_buckets:
            one_step += len(buckets) * int(self.one_step(buckets[0], False).received_across.sum())
            two_steps += len(buckets) * int(self.two_step(buckets[0], False).received_across.sum())
        return one_step, two_steps

    def one_step(self, bucket: Bucket, contributed: bool) -> RankAmounts:
        """The gather of a bucket in an uneven all-to-all; contributed: the inverse of a scatter."""
        of_role = self._of_role(bucket, contributed)
        own = of_role[self._place, self._ranks]
        by_node = of_role.reshape(len(of_role), -1, self.ranks_per_node).sum(axis=2)
        received_inside = by_node[self._place, self._nodes]
        sent = self._num_in_node.sum(axis=0) @ of_role
        # (num_nodes, receiver in the node, sender in the node)
        inside = of_role[
            self._place.reshape(-1, self.ranks_per_node, 1),
            self._ranks.reshape(-1, 1, self.ranks_per_node),
        ]
        sent_inside = inside.sum(axis=1).ravel()
        return RankAmounts(
            received_inside - own,
            by_node.sum(axis=1)[self._place] - received_inside,
            sent_inside - own,
            sent - sent_inside,
        )

    def two_step(self, bucket: Bucket, contributed: bool) -> RankAmounts:
        """`one_step` over relays, both steps of a `TwoStepPlan` together."""
        across = self._across(bucket, contributed)
        kept = across[self._nodes, self._nodes, self._indices]
        # Inside: from the relay of each index to the ranks of its node.
        of_role = self._of_role(bucket, contributed)
        by_index = of_role.reshape(len(of_role), -1, self.ranks_per_node).sum(axis=1)
        own = by_index[self._place, self._indices]
        return RankAmounts(
            by_index.sum(axis=1)[self._place] - own,
            across.sum(axis=1)[self._nodes, self._indices] - kept,
            (self._num_in_node @ by_index)[self._nodes, self._indices] - own,
            across.sum(axis=0)[self._nodes, self._indices] - kept,
        )

    def staged(self, bucket: Bucket, *, relays: bool) -> Amounts:
        """Elements of the buffers of a bucket's gather, shape (3, num_ranks): what each rank sends
        in the step that sends most, what it receives as a role, and what it relays.

        relays: whether in two steps.
        """
        of_role = self._of_role(bucket, False)
        received = of_role.sum(axis=1)[self._place]
        if not relays:
            sent = self._num_in_node.sum(axis=0) @ of_role
            return np.stack([sent, received, np.zeros_like(sent)])
        by_index = of_role.reshape(len(of_role), -1, self.ranks_per_node).sum(axis=1)
        inside = (self._num_in_node @ by_index)[self._nodes, self._indices]
        across = self._across(bucket, False)
        sent = np.maximum(inside, across.sum(axis=0).ravel())
        return np.stack([sent, received, across.sum(axis=1).ravel()])

    def _across(self, bucket: Bucket, contributed: bool) -> Amounts:
        """Elements from each owner to its relays: shape (needing node, owning node, index)."""
        of_kind = np.stack([self._needed(bucket, k, contributed) for k in self._roles_of_kind])
        num_nodes = len(self._num_in_node)
        return of_kind[self._kind_of_node].reshape(num_nodes, num_nodes, self.ranks_per_node)

    def _of_role(self, bucket: Bucket, contributed: bool) -> Amounts:
        """Elements that each role needs of each owner: shape (num_roles + 1, num_ranks)."""
        return np.stack(
            [self._needed(bucket, role, contributed) for role in [*([r] for r in self._roles), []]]
        )

    def _needed(self, bucket: Bucket, members: Collection[Role], contributed: bool) -> Amounts:
        return self._of_layout.needed(bucket, members, contributed=contributed)
