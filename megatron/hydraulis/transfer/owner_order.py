"""Which rank owns which share of a bucket, so that owners hold what they need anyway.

What a rank owns of its parameters it does not receive. In the order of the ranks it owns about one
N-th of what it holds; of all its canonical shards, that is the part P_local / P that happens to be
its own. Another order of the owners can raise that to all of its shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.plan import held_ranges
from megatron.hydraulis.transfer.role import Role
from megatron.hydraulis.transfer.shares import Amounts, elements_in_shares


def best_owner_orders(
    layout: CanonicalLayout, roles: Sequence[Role | None]
) -> tuple[tuple[int, ...] | None, ...]:
    """The orders, one a bucket, for `CanonicalLayout.with_owner_orders`.

    They maximise the elements that a rank both owns and holds in the strategy of these roles, and
    among the orders that do so leave the most ranks with the share of their own number. Every rank
    owns one share of every bucket whatever the order, so that memory and work of the optimizer stay
    as even as the cut is.

    The same for the same arguments: an assignment problem, solved exactly by
    `scipy.optimize.linear_sum_assignment`, which draws no random numbers.

    Args:
        layout: the canonical layout; orders that it has already do not matter.
        roles: the role of every rank in the pool's commonest strategy, None where idle.

    Returns:
        For each bucket the owner of every share, or None where rank r keeps share r.
    """
    if len(roles) != layout.num_ranks:
        raise PlanError(f"{len(roles)} roles for {layout.num_ranks} ranks; give one a rank")
    distinct = list(dict.fromkeys(roles))
    column_of = {role: column for column, role in enumerate(distinct)}
    role_of_rank = np.array([column_of[role] for role in roles])
    # The layers of a stage are cut alike: their orders are the same.
    known: dict[object, tuple[int, ...] | None] = {}
    orders = []
    for bucket in layout.buckets:
        ranges = tuple(held_ranges(layout, bucket, role) for role in distinct)
        key = (bucket.shard_borders, ranges)
        if key not in known:
            held = np.stack([elements_in_shares(bucket, of_role) for of_role in ranges], axis=1)
            known[key] = _best_order(held[:, role_of_rank])
        orders.append(known[key])
    return tuple(orders)


def _best_order(held: Amounts) -> tuple[int, ...] | None:
    """The owner of every share, from the elements of each share (row) that each rank (column)
    holds."""
    num_ranks = len(held)
    # One element more outweighs all ranks that stay with their own share.
    worth = held * (num_ranks + 1) + np.eye(num_ranks, dtype=np.int64)
    _, owners = linear_sum_assignment(worth, maximize=True)
    order = tuple(int(owner) for owner in owners)
    return None if order == tuple(range(num_ranks)) else order
