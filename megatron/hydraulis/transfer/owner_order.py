"""Assigns the shares of buckets to ranks, so that ranks own what they hold anyway.

A rank does not receive what it owns of its parameters. If rank r owns share r, that is about 1/N of
what it holds; of its canonical shards, it is the part P_local / P that it happens to hold. Another
order of the owners can raise that to all of its shards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.hydraulis.transfer.canonical import CanonicalLayout
from megatron.hydraulis.transfer.ranges import Amounts, elements_in_shares, held_ranges
from megatron.hydraulis.transfer.role import Role


def best_owner_orders(
    layout: CanonicalLayout, roles: Sequence[Role | None]
) -> tuple[tuple[int, ...] | None, ...]:
    """The orders, one per bucket, for `CanonicalLayout.with_owner_orders`.

    They maximise the number of elements that ranks both own and hold in the strategy of these
    roles, and among such orders the number of ranks r with share r. Every rank owns one share of
    every bucket in any order, so memory and work of the optimizer remain balanced.

    The result is deterministic: `scipy.optimize.linear_sum_assignment` solves the assignment
    problem exactly and without random numbers.

    Args:
        layout: its present orders do not matter.
        roles: the role of every rank in the pool's commonest strategy, None for idle ranks.

    Returns:
        For each bucket the owner of every share, or None if rank r owns share r.
    """
    layout.check_roles(roles)
    distinct = list(dict.fromkeys(roles))
    column_of = {role: column for column, role in enumerate(distinct)}
    role_of_rank = np.array([column_of[role] for role in roles])
    # The layers of a stage are cut in the same way, so they get the same order.
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
    """The owner of every share; held: elements of each share (row) that a rank (column) holds."""
    # Not above: it takes half a second, and most runs do not choose owners.
    from scipy.optimize import linear_sum_assignment

    num_ranks = len(held)
    # One more element outweighs that all ranks keep the share of their number.
    worth = held * (num_ranks + 1) + np.eye(num_ranks, dtype=np.int64)
    _, owners = linear_sum_assignment(worth, maximize=True)
    order = tuple(int(owner) for owner in owners)
    return None if order == tuple(range(num_ranks)) else order
