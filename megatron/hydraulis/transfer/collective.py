"""Which of three kinds of transfer a strategy's regrouping uses, and its plans.

What a runtime does, for all three: every rank builds the plans of its own part once a strategy, by
`strategy_plans`, and runs them bucket by bucket. All ranks of the job post the
same collectives in the same order, idle ones too: one a bucket, two for a `TwoStepPlan`.

- ``ALL_TO_ALL``: an uneven all_to_all_single both ways; see below, `plan` and `segments`.
- ``ALL_GATHER``: all_gather_into_tensor, reduce_scatter_tensor; see `equal_shares.EqualShares`.
- ``TWO_STEP``: two uneven all_to_all_single both ways; see `two_step.TwoStepPlan`.

``ALL_TO_ALL``, gather: send the runs of the own shard that ``plan.sent_by(rank)`` names, by rising
destination; what arrives, by rising source, belongs where `segments.arrival_segments` says. Unless
owners are permuted that is a single segment: what arrives is canonical order. Scatter: send what
the rank contributes, ordered by `segments.departure_segments` (a single segment likewise); the
owner adds up the transfers of ``plan.received_by(rank)``, by rising source, on its shard.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.alike import alike_buckets
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.equal_shares import EqualShares, equal_shares, wants_everything
from megatron.hydraulis.transfer.plan import TransferPlan, gather_plan, scatter_plan
from megatron.hydraulis.transfer.role import Role
from megatron.hydraulis.transfer.two_step import (
    TwoStepPlan,
    elements_across,
    two_step_gather,
    two_step_scatter,
)

LEAST_SAVING_ACROSS = 0.1
"""Share of the elements that cross nodes which two steps have to save. The second step repeats the
volume inside the node, where a rank's link is about ten times as fast (`cost_model.device`: 300
against 25 GB/s on A100, 450 against 50 on H100); norms alone, which all TP ranks hold, save too
little to be worth it."""

BucketPlan = TransferPlan | EqualShares | TwoStepPlan


class Collective(enum.Enum):
    """The kind of a strategy's gather; its scatter is the mirror image."""

    ALL_TO_ALL = "all_to_all"
    """`TransferPlan`: uneven all-to-all, both ways."""
    ALL_GATHER = "all_gather"
    """`EqualShares`: all-gather, and reduce-scatter back."""
    TWO_STEP = "two_step"
    """`TwoStepPlan`: across nodes, then inside; inside, then across on the way back."""


def collective_of(
    layout: CanonicalLayout,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None,
    least_saving: float = LEAST_SAVING_ACROSS,
) -> Collective:
    """The kind for a strategy: a function of its roles alone, so that all ranks choose alike.

    ``ALL_GATHER`` where every rank holds the whole model (tp 1, pp 1, none idle); ``TWO_STEP``
    where there are several nodes and ranks of one node need so much in common that two steps save
    at least ``least_saving`` of what would cross nodes in one; ``ALL_TO_ALL`` otherwise.

    Args:
        layout: the canonical layout.
        roles: the role of every rank in the strategy, None where idle.
        ranks_per_node: None where nothing is known of nodes: all ranks then count as one.
        least_saving: a share of the elements that cross nodes in one step, in (0, 1].

    Raises:
        PlanError: the ranks do not fill whole nodes, or roles are missing.
    """
    if len(roles) != layout.num_ranks:
        raise PlanError(f"{len(roles)} roles for {layout.num_ranks} ranks; give one a rank")
    if wants_everything(roles):
        return Collective.ALL_GATHER
    if ranks_per_node is None or ranks_per_node >= layout.num_ranks:
        return Collective.ALL_TO_ALL
    one_step, two_steps = elements_across(layout, roles, ranks_per_node=ranks_per_node)
    is_worth_it = one_step > two_steps and one_step - two_steps >= least_saving * one_step
    return Collective.TWO_STEP if is_worth_it else Collective.ALL_TO_ALL


def bucket_gather(
    collective: Collective,
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None = None,
    rank: int | None = None,
) -> BucketPlan:
    """The gather of one bucket by the given kind.

    Args:
        collective: from `collective_of`; any kind that the roles allow works.
        layout: the canonical layout.
        bucket: one of its buckets.
        roles: the role of every rank in the strategy, None where idle.
        ranks_per_node: for ``TWO_STEP``.
        rank: only what this rank sends or receives; everything if None.

    Raises:
        PlanError: ``ALL_GATHER`` where a rank does not hold everything, ``TWO_STEP`` without nodes.
    """
    if collective is Collective.ALL_GATHER:
        return equal_shares(bucket, roles, adds_up=False)
    if collective is Collective.TWO_STEP:
        nodes = _known(ranks_per_node)
        return two_step_gather(layout, bucket, roles, ranks_per_node=nodes, rank=rank)
    return gather_plan(layout, bucket, roles, rank=rank)


def bucket_scatter(
    collective: Collective,
    layout: CanonicalLayout,
    bucket: Bucket,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None = None,
    rank: int | None = None,
) -> BucketPlan:
    """The scatter of one bucket by the given kind (arguments and errors as `bucket_gather`)."""
    if collective is Collective.ALL_GATHER:
        return equal_shares(bucket, roles, adds_up=True)
    if collective is Collective.TWO_STEP:
        nodes = _known(ranks_per_node)
        return two_step_scatter(layout, bucket, roles, ranks_per_node=nodes, rank=rank)
    return scatter_plan(layout, bucket, roles, rank=rank)


def strategy_plans(
    collective: Collective,
    layout: CanonicalLayout,
    roles: Sequence[Role | None],
    *,
    ranks_per_node: int | None = None,
    rank: int | None = None,
) -> tuple[tuple[BucketPlan, BucketPlan], ...]:
    """(gather, scatter) of every bucket: what `bucket_gather` and `bucket_scatter` give for each.

    Buckets that travel alike are planned once: seconds less a strategy at 1,024 ranks. Arguments
    and errors as `bucket_gather`.
    """
    plans: dict[int, tuple[BucketPlan, BucketPlan]] = {}
    for buckets in alike_buckets(layout, roles):
        gather, scatter = (
            make(collective, layout, buckets[0], roles, ranks_per_node=ranks_per_node, rank=rank)
            for make in (bucket_gather, bucket_scatter)
        )
        for bucket in buckets:
            plans[bucket.index] = (
                gather.for_bucket(bucket.index),
                scatter.for_bucket(bucket.index),
            )
    return tuple(plans[bucket.index] for bucket in layout.buckets)


def _known(ranks_per_node: int | None) -> int:
    if ranks_per_node is None:
        raise PlanError("a two-step transfer needs nodes but ranks_per_node is None; give it")
    return ranks_per_node
