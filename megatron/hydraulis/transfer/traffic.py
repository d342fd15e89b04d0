"""What regrouping carries: elements by link, as planned, and the formula that they follow.

None of it depends on the strategy of the iteration before: parameters come from the canonical
shards and gradients return to them, and neither ever moves to another owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.collective import BucketPlan
from megatron.hydraulis.transfer.equal_shares import EqualShares
from megatron.hydraulis.transfer.plan import contributed_ranges, held_ranges
from megatron.hydraulis.transfer.ranges import num_elements
from megatron.hydraulis.transfer.role import Role
from megatron.hydraulis.transfer.shares import elements_in_shards
from megatron.hydraulis.transfer.two_step import TwoStepPlan


@dataclass(frozen=True)
class LinkElements:
    """Elements that a rank exchanges with other ranks, by where these are."""

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
        return LinkElements(
            self.received_inside + other.received_inside,
            self.received_across + other.received_across,
            self.sent_inside + other.sent_inside,
            self.sent_across + other.sent_across,
        )

    def __mul__(self, num_times: int) -> LinkElements:
        return LinkElements(
            self.received_inside * num_times,
            self.received_across * num_times,
            self.sent_inside * num_times,
            self.sent_across * num_times,
        )

    def in_bytes(self, itemsize: int) -> LinkBytes:
        """The same with ``itemsize`` bytes an element."""
        return LinkBytes(
            self.received_inside * itemsize,
            self.received_across * itemsize,
            self.sent_inside * itemsize,
            self.sent_across * itemsize,
        )


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a rank exchanges with other ranks, by where these are."""

    received_inside_bytes: int
    received_across_bytes: int
    sent_inside_bytes: int
    sent_across_bytes: int

    @property
    def received_bytes(self) -> int:
        """From all other ranks."""
        return self.received_inside_bytes + self.received_across_bytes

    @property
    def sent_bytes(self) -> int:
        """To all other ranks."""
        return self.sent_inside_bytes + self.sent_across_bytes


@dataclass(frozen=True)
class RegroupBytes:
    """What one rank exchanges in the regrouping of one iteration."""

    gather: LinkBytes
    scatter: LinkBytes

    @property
    def received_bytes(self) -> int:
        """In both directions of regrouping."""
        return self.gather.received_bytes + self.scatter.received_bytes

    @property
    def sent_bytes(self) -> int:
        """In both directions of regrouping."""
        return self.gather.sent_bytes + self.scatter.sent_bytes


def link_elements(plan: BucketPlan, rank: int, *, ranks_per_node: int | None) -> LinkElements:
    """What ``rank`` exchanges with other ranks for one bucket.

    Of an all-gather or reduce-scatter, padding included: N - 1 shares each way. The library
    chooses the way; counted is the least, by which every element enters a node once (one ring for
    each place in a node): of n nodes n - 1 shares a rank across, the rest inside.

    Args:
        plan: of the bucket, whole or of this rank.
        rank: whose elements are counted.
        ranks_per_node: None where nothing is known of nodes: everything is inside.
    """
    return _link_elements(plan, [rank], ranks_per_node)[rank]


def link_elements_by_rank(
    plan: BucketPlan, num_ranks: int, *, ranks_per_node: int | None
) -> tuple[LinkElements, ...]:
    """`link_elements` of every rank, from the whole plan of a bucket."""
    found = _link_elements(plan, range(num_ranks), ranks_per_node)
    return tuple(found[rank] for rank in range(num_ranks))


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
        gathers: of every bucket, whole or of this rank.
        scatters: of every bucket, whole or of this rank.
        rank: whose bytes are counted.
        ranks_per_node: None where nothing is known of nodes: everything is inside.
        parameter_bytes: of one parameter on the wire, 2 for bf16.
        gradient_bytes: of one gradient on the wire, 4 for fp32.
    """
    gather = _sum_over(gathers, rank, ranks_per_node)
    scatter = _sum_over(scatters, rank, ranks_per_node)
    return RegroupBytes(gather.in_bytes(parameter_bytes), scatter.in_bytes(gradient_bytes))


@dataclass(frozen=True)
class RegroupVolume:
    """The formula: what a rank exchanges in a one-step regrouping, from what it holds and owns."""

    num_ranks: int
    num_held: int
    """P_local: elements of the rank's parameters."""
    num_held_and_owned: int
    """Of these, those in its canonical shards: they cost no network."""
    num_contributed: int
    """Elements of the gradients that it sends back."""
    num_contributed_and_owned: int
    num_wanted: int
    """Elements of its shards, times the other ranks that hold them."""
    num_added: int
    """Elements of its shards, times the other ranks that contribute to them."""

    @property
    def gather_received(self) -> int:
        """P_local minus what it owns of it."""
        return self.num_held - self.num_held_and_owned

    @property
    def gather_sent(self) -> int:
        """To every other holder of what it owns."""
        return self.num_wanted

    @property
    def scatter_received(self) -> int:
        """From every other contributor to what it owns."""
        return self.num_added

    @property
    def scatter_sent(self) -> int:
        """What it contributes minus what it owns of it."""
        return self.num_contributed - self.num_contributed_and_owned

    @property
    def estimate(self) -> float:
        """P_local·(1 - 1/N): as if it owned an even part of what it holds."""
        return self.num_held * (1 - 1 / self.num_ranks)


def regroup_volumes(
    layout: CanonicalLayout, roles: Sequence[Role | None]
) -> tuple[RegroupVolume, ...]:
    """The formula's values for every rank, without any transfer plan."""
    held, held_owned, wanted = _volume(layout, roles, contributed=False)
    given, given_owned, added = _volume(layout, roles, contributed=True)
    return tuple(
        RegroupVolume(
            num_ranks=layout.num_ranks,
            num_held=held[rank],
            num_held_and_owned=held_owned[rank],
            num_contributed=given[rank],
            num_contributed_and_owned=given_owned[rank],
            num_wanted=wanted[rank],
            num_added=added[rank],
        )
        for rank in range(layout.num_ranks)
    )


def zero1_degree(roles: Sequence[Role | None]) -> int:
    """dp of a homogeneous strategy, over which ZeRO-1 would shard its optimizer states.

    Context-parallel ranks count, as in Megatron. A ZeRO-1 rank then receives P_local·(1 - 1/dp)
    in an iteration's parameter all-gather and sends as much in its gradients' reduce-scatter
    (Rajbhandari et al., arXiv 1910.02054, §7).

    Raises:
        PlanError: replicas of different schemes, or idle ranks: ZeRO-1 has no such strategy.
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


def _sum_over(plans: Iterable[BucketPlan], rank: int, ranks_per_node: int | None) -> LinkElements:
    each = (link_elements(plan, rank, ranks_per_node=ranks_per_node) for plan in plans)
    return sum(each, LinkElements())


def _link_elements(
    plan: BucketPlan, ranks: Iterable[int], ranks_per_node: int | None
) -> dict[int, LinkElements]:
    if isinstance(plan, EqualShares):
        num_nodes = 1 if ranks_per_node is None else max(1, plan.num_ranks // ranks_per_node)
        across = (num_nodes - 1) * plan.share_elements
        inside = (plan.num_ranks - num_nodes) * plan.share_elements
        return {rank: LinkElements(inside, across, inside, across) for rank in ranks}
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
    return {
        rank: LinkElements(
            received_inside=amounts[rank, "received", True],
            received_across=amounts[rank, "received", False],
            sent_inside=amounts[rank, "sent", True],
            sent_across=amounts[rank, "sent", False],
        )
        for rank in ranks
    }


def _volume(
    layout: CanonicalLayout, roles: Sequence[Role | None], *, contributed: bool
) -> tuple[list[int], list[int], list[int]]:
    """By rank: elements of its part, those that it owns, those that others need of its shards."""
    find = contributed_ranges if contributed else held_ranges
    ranks_of: dict[Role | None, list[int]] = {}
    for rank, role in enumerate(roles):
        ranks_of.setdefault(role, []).append(rank)
    part, owned, needed = (np.zeros(layout.num_ranks, dtype=np.int64) for _ in range(3))
    for bucket in layout.buckets:
        for role, ranks in ranks_of.items():
            ranges = find(layout, bucket, role)
            in_shards = elements_in_shards(bucket, ranges)
            part[ranks] += num_elements(ranges)
            owned[ranks] += in_shards[ranks]
            needed += len(ranks) * in_shards
    return part.tolist(), owned.tolist(), (needed - owned).tolist()
