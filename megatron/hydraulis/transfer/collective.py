"""The collectives that regroup a strategy: three kinds, the choice among them, plans and traffic.

The runtime does the same for all three: every rank builds the plans of its part once per strategy,
by `strategy_plans`, and executes them bucket by bucket. All ranks of the job, including idle ones,
post the same collectives in the same order: one per bucket, two for a `TwoStepPlan`.

- ``ALL_TO_ALL``: an uneven all_to_all_single in both directions. Gather: send the ranges of
  ``plan.sent_by(rank)`` from the rank's shard, sorted by destination; what arrives is put where
  `plan.arrival_segments` says. Scatter: send the contributions in the order of
  `plan.departure_segments`; the owner adds what arrives, sorted by source, to its shard.
- ``ALL_GATHER``: all_gather_into_tensor, reduce_scatter_tensor; see `EqualShares`.
- ``TWO_STEP``: two uneven all_to_all_single in both directions; see `plan.TwoStepPlan`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.amounts import LinkElements, RankAmounts, StrategyAmounts
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.plan import (
    Segment,
    TransferPlan,
    TwoStepPlan,
    gather_plan,
    merged_copies,
    scatter_plan,
    two_step_plans,
)
from megatron.hydraulis.transfer.ranges import buckets_with_equal_plans
from megatron.hydraulis.transfer.role import Role

LEAST_SAVING_ACROSS = 0.1
"""Fraction of the elements that cross nodes which two steps must save. The second step repeats the
volume inside the node, where a rank's link is about ten times as fast (`cost_model.device`: 300
against 25 GB/s on A100, 450 against 50 on H100); norms alone, which all TP ranks hold, save too
little."""


class Collective(enum.Enum):
    """The kind of a strategy's gather; its scatter is the inverse, see `collective_of`."""

    ALL_TO_ALL = "all_to_all"
    """`TransferPlan`: uneven all-to-all in both directions."""
    ALL_GATHER = "all_gather"
    """`EqualShares`: all-gather, and reduce-scatter back."""
    TWO_STEP = "two_step"
    """`TwoStepPlan`: across nodes, then inside; on the way back inside, then across."""


@dataclass(frozen=True)
class EqualShares:
    """One bucket as equal shares, for `all_gather_into_tensor` and `reduce_scatter_tensor`.

    Both need shares of one size in the order of the ranks, so shorter shards are padded. The *flat
    buffer* has ``num_buffer_elements``; rank r's share starts at ``r * share_elements`` with its
    shard.

    **Gather**: rank r sends its shard, padded to ``share_elements`` with any value; the collective
    fills the flat buffer; `segments` say where its parts belong in the bucket.
    **Scatter**: copy the bucket's gradients to the flat buffer as `segments` say (the rest must be
    finite, for example zero); the collective gives rank r the sum of all ranks' r-th shares, which
    starts with its shard's gradient.
    """

    bucket: int
    num_ranks: int
    share_elements: int
    shards: tuple[tuple[int, int], ...]
    """Elements [start, stop) of the bucket that each rank owns, by rank."""

    @property
    def num_buffer_elements(self) -> int:
        """Elements of the flat buffer, including padding."""
        return self.num_ranks * self.share_elements

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """``transfer_start`` is in the flat buffer, ``canonical_start`` in the bucket; by ascending
        ``canonical_start``."""
        starts = sorted((*shard, rank) for rank, shard in enumerate(self.shards))
        copies = (
            (rank * self.share_elements, start, stop - start)
            for start, stop, rank in starts
            if start < stop
        )
        return tuple(Segment(*copy) for copy in merged_copies(copies))

    def for_bucket(self, index: int) -> EqualShares:
        """The same plan for another bucket, see `buckets_with_equal_plans`."""
        return dataclasses.replace(self, bucket=index)


BucketPlan = TransferPlan | EqualShares | TwoStepPlan


def equal_shares(bucket: Bucket, roles: Sequence[Role | None]) -> EqualShares:
    """The plan of one bucket, the same for every rank and in both directions.

    Raises:
        PlanError: some rank does not hold the entire model.
    """
    if not _all_hold_everything(roles):
        raise PlanError(
            "an all-gather gives every rank the entire bucket but some rank is idle or has tp, "
            "ep or pp above 1; plan an uneven all-to-all"
        )
    shards = tuple(bucket.shard_range(rank) for rank in range(len(roles)))
    longest = max(stop - start for start, stop in shards)
    return EqualShares(bucket.index, len(roles), longest, shards)


def _all_hold_everything(roles: Sequence[Role | None]) -> bool:
    return all(
        role is not None
        and role.cut == (1, 0, None, None, None)
        and role.has_embedding
        and role.has_output
        for role in roles
    )


def collective_of(amounts: StrategyAmounts, *, may_reduce: bool = True) -> Collective:
    """The kind of a strategy's gather or of its scatter, the same on all ranks.

    ``ALL_GATHER`` if every rank holds the entire model (tp, ep and pp 1, none idle); ``TWO_STEP``
    if there are several nodes and two steps save at least `LEAST_SAVING_ACROSS` of what would cross
    nodes in one, because ranks of a node need the same elements; ``ALL_TO_ALL`` otherwise.

    may_reduce: False for a scatter of gradients in a narrow dtype, in which a reduce-scatter would
    add them up.
    """
    if may_reduce and _all_hold_everything(amounts.roles):
        return Collective.ALL_GATHER
    if amounts.ranks_per_node == amounts.layout.num_ranks:
        return Collective.ALL_TO_ALL
    one_step, two_steps = amounts.across
    is_worth_it = one_step > two_steps and one_step - two_steps >= LEAST_SAVING_ACROSS * one_step
    return Collective.TWO_STEP if is_worth_it else Collective.ALL_TO_ALL


def bucket_plans(
    collective: Collective,
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None = None,
    rank: int | None = None,
) -> tuple[BucketPlan, BucketPlan]:
    """(gather, scatter) of one bucket.

    Args:
        collective: from `collective_of`; any kind that the roles allow works.
        roles: the role of every rank in the strategy, None for idle ranks.
        ranks_per_node: for ``TWO_STEP``.
        rank: if given, the plans have only what this rank sends or receives.

    Raises:
        PlanError: ``ALL_GATHER`` if a rank does not hold everything, ``TWO_STEP`` without nodes.
    """
    if collective is Collective.ALL_GATHER:
        shares = equal_shares(bucket, roles)
        return shares, shares
    if collective is Collective.TWO_STEP:
        return two_step_plans(layout, bucket, roles, ranks_per_node=ranks_per_node, rank=rank)
    return (
        gather_plan(layout, bucket, roles, rank=rank),
        scatter_plan(layout, bucket, roles, rank=rank),
    )


def strategy_plans(
    collective: Collective,
    layout: CanonicalLayout,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None = None,
    rank: int | None = None,
) -> tuple[tuple[BucketPlan, BucketPlan], ...]:
    """(gather, scatter) of every bucket; arguments and errors as `bucket_plans`.

    Buckets with equal plans are planned once, which saves seconds per strategy at 1,024 ranks.
    """
    plans: dict[int, tuple[BucketPlan, BucketPlan]] = {}
    for buckets in buckets_with_equal_plans(layout, roles):
        gather, scatter = bucket_plans(
            collective, layout, buckets[0], roles, ranks_per_node=ranks_per_node, rank=rank
        )
        for bucket in buckets:
            index = bucket.index
            plans[index] = (gather.for_bucket(index), scatter.for_bucket(index))
    return tuple(plans[bucket.index] for bucket in layout.buckets)


NOTHING = LinkElements(0, 0, 0, 0)


@dataclass(frozen=True)
class RegroupBytes:
    """Bytes that one rank exchanges with others in the regrouping of one iteration."""

    gather_received_bytes: int
    gather_sent_bytes: int
    scatter_received_bytes: int
    scatter_sent_bytes: int

    @property
    def received_bytes(self) -> int:
        """Bytes received in gather and scatter."""
        return self.gather_received_bytes + self.scatter_received_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes sent in gather and scatter."""
        return self.gather_sent_bytes + self.scatter_sent_bytes


def link_elements(plan: BucketPlan, rank: int, *, ranks_per_node: int | None) -> LinkElements[int]:
    """Elements that ``rank`` exchanges with other ranks for one bucket.

    An all-gather or reduce-scatter has N - 1 shares in each direction, padding included. The
    library chooses the route; this assumes the minimum, in which every element enters a node once
    (one ring per index in a node): with n nodes, n - 1 shares of a rank cross nodes.

    Args:
        plan: of the bucket, for all ranks or for this one.
        ranks_per_node: None if nodes are unknown: all ranks then count as one node.
    """
    if isinstance(plan, EqualShares):
        num_nodes = 1 if ranks_per_node is None else max(1, plan.num_ranks // ranks_per_node)
        across = (num_nodes - 1) * plan.share_elements
        inside = (plan.num_ranks - num_nodes) * plan.share_elements
        return LinkElements(inside, across, inside, across)
    steps = plan.steps if isinstance(plan, TwoStepPlan) else (plan,)
    amounts: Counter[tuple[str, bool]] = Counter()
    for transfer in (transfer for step in steps for transfer in step.transfers):
        ends = {"received": transfer.destination, "sent": transfer.source}
        if transfer.source == transfer.destination:
            continue
        is_inside = ranks_per_node is None or len({r // ranks_per_node for r in ends.values()}) == 1
        for direction, end in ends.items():
            if end == rank:
                amounts[direction, is_inside] += transfer.num_elements
    return LinkElements(
        received_inside=amounts["received", True],
        received_across=amounts["received", False],
        sent_inside=amounts["sent", True],
        sent_across=amounts["sent", False],
    )


def amounts_by_rank(
    collective: Collective, amounts: StrategyAmounts, bucket: Bucket
) -> tuple[RankAmounts, RankAmounts]:
    """(gather, scatter) of a bucket: `link_elements` of every rank, without a plan."""
    if collective is Collective.ALL_GATHER:
        plan = equal_shares(bucket, amounts.roles)
        of_any = link_elements(plan, 0, ranks_per_node=amounts.ranks_per_node)
        gather = RankAmounts(*(np.full(plan.num_ranks, each) for each in vars(of_any).values()))
        if bucket.unit.is_frozen:
            return gather, RankAmounts(*(each * 0 for each in vars(gather).values()))
        return gather, gather.inverse()
    count = amounts.two_step if collective is Collective.TWO_STEP else amounts.one_step
    return count(bucket, False), count(bucket, True).inverse()


def regroup_bytes(
    gathers: Iterable[BucketPlan],
    scatters: Iterable[BucketPlan],
    rank: int,
    *,
    ranks_per_node: int | None,
    parameter_bytes: int,
    gradient_bytes: int,
) -> RegroupBytes:
    """Bytes that ``rank`` exchanges in one iteration.

    Args:
        gathers: of every bucket, for all ranks or for this one.
        scatters: likewise.
        ranks_per_node: None if nodes are unknown.
        parameter_bytes: of one parameter on the wire, 2 for bf16.
        gradient_bytes: of one gradient on the wire, 4 for fp32.
    """
    gather, scatter = (
        sum((link_elements(p, rank, ranks_per_node=ranks_per_node) for p in plans), NOTHING)
        for plans in (gathers, scatters)
    )
    return RegroupBytes(
        gather.received * parameter_bytes,
        gather.sent * parameter_bytes,
        scatter.received * gradient_bytes,
        scatter.sent * gradient_bytes,
    )
