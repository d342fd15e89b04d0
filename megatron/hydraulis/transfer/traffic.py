"""What regrouping carries: elements by link as planned, and formulas for them.

Nothing depends on the strategy of the previous iteration: parameters come from the canonical shards
and gradients return to them, and shards never change their owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.collective import BucketPlan, EqualShares
from megatron.hydraulis.transfer.ranges import (
    RangesOfRole,
    contributed_ranges,
    elements_in_shares,
    held_ranges,
)
from megatron.hydraulis.transfer.role import Role
from megatron.hydraulis.transfer.two_step import TwoStepPlan


@dataclass(frozen=True)
class LinkElements:
    """Elements that a rank exchanges with other ranks of its node and of other nodes."""

    received_inside: int = 0
    """From ranks of its node."""
    received_across: int = 0
    """From ranks of other nodes."""
    sent_inside: int = 0
    sent_across: int = 0

    @property
    def received(self) -> int:
        """From all other ranks."""
        return self.received_inside + self.received_across

    @property
    def sent(self) -> int:
        """To all other ranks."""
        return self.sent_inside + self.sent_across

    def __add__(self, other: LinkElements) -> LinkElements:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return LinkElements(*(mine + theirs for mine, theirs in pairs))

    def __mul__(self, num_times: int) -> LinkElements:
        return LinkElements(*(each * num_times for each in vars(self).values()))


@dataclass(frozen=True)
class RegroupBytes:
    """What one rank exchanges with others in the regrouping of one iteration."""

    gather_received_bytes: int
    gather_sent_bytes: int
    scatter_received_bytes: int
    scatter_sent_bytes: int

    @property
    def received_bytes(self) -> int:
        """In gather and scatter."""
        return self.gather_received_bytes + self.scatter_received_bytes

    @property
    def sent_bytes(self) -> int:
        """In gather and scatter."""
        return self.gather_sent_bytes + self.scatter_sent_bytes


def link_elements(plan: BucketPlan, rank: int, *, ranks_per_node: int | None) -> LinkElements:
    """What ``rank`` exchanges with other ranks for one bucket.

    For an all-gather or reduce-scatter N - 1 shares in each direction, padding included. The
    library chooses the route; assumed is the minimum, in which every element enters a node once
    (one ring per index in a node): with n nodes, n - 1 shares of a rank cross nodes.

    Args:
        plan: of the bucket, for all ranks or for this one.
        rank: whose elements are counted.
        ranks_per_node: None if nodes are unknown: all ranks then count as one node.
    """
    return _link_elements(plan, [rank], ranks_per_node)[0]


def link_elements_by_rank(
    plan: BucketPlan, num_ranks: int, *, ranks_per_node: int | None
) -> list[LinkElements]:
    """`link_elements` of every rank, from the plan for all ranks: shape (num_ranks,)."""
    return _link_elements(plan, range(num_ranks), ranks_per_node)


def regroup_bytes(
    gathers: Iterable[BucketPlan],
    scatters: Iterable[BucketPlan],
    rank: int,
    *,
    ranks_per_node: int | None,
    parameter_bytes: int,
    gradient_bytes: int,
) -> RegroupBytes:
    """What ``rank`` exchanges in one iteration.

    Args:
        gathers: of every bucket, for all ranks or for this one.
        scatters: likewise.
        rank: whose bytes are counted.
        ranks_per_node: None if nodes are unknown.
        parameter_bytes: of one parameter on the wire, 2 for bf16.
        gradient_bytes: of one gradient on the wire, 4 for fp32.
    """
    gather, scatter = (
        sum((link_elements(p, rank, ranks_per_node=ranks_per_node) for p in plans), LinkElements())
        for plans in (gathers, scatters)
    )
    return RegroupBytes(
        gather.received * parameter_bytes,
        gather.sent * parameter_bytes,
        scatter.received * gradient_bytes,
        scatter.sent * gradient_bytes,
    )


def _link_elements(
    plan: BucketPlan, ranks: Sequence[int], ranks_per_node: int | None
) -> list[LinkElements]:
    if isinstance(plan, EqualShares):
        num_nodes = 1 if ranks_per_node is None else max(1, plan.num_ranks // ranks_per_node)
        across = (num_nodes - 1) * plan.share_elements
        inside = (plan.num_ranks - num_nodes) * plan.share_elements
        return [LinkElements(inside, across, inside, across)] * len(ranks)
    steps = plan.steps if isinstance(plan, TwoStepPlan) else (plan,)
    amounts: Counter[tuple[int, str, bool]] = Counter()
    for transfer in (transfer for step in steps for transfer in step.transfers):
        source, destination = transfer.source, transfer.destination
        if source != destination:
            is_inside = (
                ranks_per_node is None or source // ranks_per_node == destination // ranks_per_node
            )
            amounts[destination, "received", is_inside] += transfer.num_elements
            amounts[source, "sent", is_inside] += transfer.num_elements
    return [
        LinkElements(
            received_inside=amounts[rank, "received", True],
            received_across=amounts[rank, "received", False],
            sent_inside=amounts[rank, "sent", True],
            sent_across=amounts[rank, "sent", False],
        )
        for rank in ranks
    ]


@dataclass(frozen=True)
class RegroupVolume:
    """Formulas for what a rank exchanges in a one-step regrouping, from what it holds and owns."""

    num_ranks: int
    num_held: int
    """P_local: elements of the rank's parameters."""
    num_held_and_owned: int
    """Those of them in its canonical shards, which need no network."""
    num_contributed: int
    """Elements of the gradients that it sends back."""
    num_contributed_and_owned: int
    num_held_by_others: int
    """Elements of its shards that other ranks hold, counted once per rank."""
    num_contributed_by_others: int
    """Elements of its shards that other ranks contribute to, counted once per rank."""

    @property
    def gather_received(self) -> int:
        """What it holds and does not own."""
        return self.num_held - self.num_held_and_owned

    @property
    def gather_sent(self) -> int:
        """What it owns, to every other holder."""
        return self.num_held_by_others

    @property
    def scatter_received(self) -> int:
        """What it owns, from every other contributor."""
        return self.num_contributed_by_others

    @property
    def scatter_sent(self) -> int:
        """What it contributes and does not own."""
        return self.num_contributed - self.num_contributed_and_owned

    @property
    def estimate(self) -> float:
        """P_local·(1 - 1/N): gather_received if it owned 1/N of what it holds."""
        return self.num_held * (1 - 1 / self.num_ranks)


def regroup_volumes(
    layout: CanonicalLayout, roles: Sequence[Role | None]
) -> tuple[RegroupVolume, ...]:
    """The formulas' values for every rank, without any transfer plan: shape (num_ranks,)."""
    held = _amounts(layout, roles, held_ranges)
    contributed = _amounts(layout, roles, contributed_ranges)
    return tuple(
        RegroupVolume(
            num_ranks=layout.num_ranks,
            num_held=num_held,
            num_held_and_owned=held_and_owned,
            num_contributed=num_contributed,
            num_contributed_and_owned=contributed_and_owned,
            num_held_by_others=num_held_by_others,
            num_contributed_by_others=num_contributed_by_others,
        )
        for (num_held, held_and_owned, num_held_by_others), (
            num_contributed,
            contributed_and_owned,
            num_contributed_by_others,
        ) in zip(held, contributed, strict=True)
    )


def _amounts(
    layout: CanonicalLayout, roles: Sequence[Role | None], find: RangesOfRole
) -> list[list[int]]:
    """By rank: elements of its part, those that it owns, those of its shards that others need."""
    ranks_of: dict[Role | None, list[int]] = {}
    for rank, role in enumerate(roles):
        ranks_of.setdefault(role, []).append(rank)
    amounts = np.zeros((layout.num_ranks, 3), dtype=np.int64)
    part, owned, needed = amounts.T
    for bucket in layout.buckets:
        owners = [bucket.owner_of(share) for share in range(layout.num_ranks)]
        for role, ranks in ranks_of.items():
            in_shards = np.empty(layout.num_ranks, dtype=np.int64)
            in_shards[owners] = elements_in_shares(bucket, find(layout, bucket, role))
            part[ranks] += in_shards.sum()
            owned[ranks] += in_shards[ranks]
            needed += len(ranks) * in_shards
    needed -= owned
    found: list[list[int]] = amounts.tolist()
    return found


def zero1_degree(roles: Sequence[Role | None]) -> int:
    """dp of a homogeneous strategy, over which ZeRO-1 would shard its optimizer states.

    As in Megatron this includes context-parallel ranks. A ZeRO-1 rank receives P_local·(1 - 1/dp)
    in an iteration's parameter all-gather and sends as much in its gradients' reduce-scatter
    (Rajbhandari et al., arXiv 1910.02054, §7).

    Raises:
        PlanError: replicas have different schemes, or ranks are idle.
    """
    counts = Counter(roles)
    stages = {(role.first_layer, role.num_layers) for role in counts if role is not None}
    num_layers = {role.num_layers_of_model for role in counts if role is not None}
    is_homogeneous = (
        None not in counts
        and len(set(counts.values())) == 1
        and len({role.tp for role in counts if role is not None}) == 1
        and {sum(size for _, size in stages)} == num_layers
    )
    if not is_homogeneous:
        raise PlanError(
            f"ZeRO-1 shards over equal replicas but {len(counts)} roles are held by "
            f"{min(counts.values())} to {max(counts.values())} of {len(roles)} ranks; compare with "
            "a strategy of one scheme without idle ranks"
        )
    return next(iter(counts.values()))
