"""What regrouping carries: elements by link as planned.

Nothing depends on the strategy of the previous iteration: parameters come from the canonical shards
and gradients return to them, and shards never change their owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megatron.hydraulis.transfer.amounts import LinkElements, RankAmounts, StrategyAmounts
from megatron.hydraulis.transfer.canonical import Bucket
from megatron.hydraulis.transfer.collective import (
    BucketPlan,
    Collective,
    EqualShares,
    equal_shares,
)
from megatron.hydraulis.transfer.two_step import TwoStepPlan

NOTHING = LinkElements(0, 0, 0, 0)


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


def link_elements(plan: BucketPlan, rank: int, *, ranks_per_node: int | None) -> LinkElements[int]:
    """What ``rank`` exchanges with other ranks for one bucket.

    For an all-gather or reduce-scatter N - 1 shares in each direction, padding included. The
    library chooses the route; assumed is the minimum, in which every element enters a node once
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
    if collective is Collective.TWO_STEP:
        return amounts.two_step(bucket)
    if collective is Collective.ALL_TO_ALL:
        return amounts.one_step(bucket)
    plan = equal_shares(bucket, amounts.roles)
    of_any = link_elements(plan, 0, ranks_per_node=amounts.ranks_per_node)
    gather = RankAmounts(*(np.full(plan.num_ranks, each) for each in vars(of_any).values()))
    return gather, gather.inverse()


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
