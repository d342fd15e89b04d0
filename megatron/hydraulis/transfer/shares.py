"""How much of some ranges lies in each share of a bucket's cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.transfer.canonical import Bucket
from megatron.hydraulis.transfer.ranges import Range

Amounts = npt.NDArray[np.int64]


def elements_in_shares(bucket: Bucket, ranges: Sequence[Range]) -> Amounts:
    """Elements of the ranges in every share, in the order of the shares: shape (num_ranks,)."""
    borders = np.array(bucket.shard_borders, dtype=np.int64)
    before = np.zeros(len(borders), dtype=np.int64)
    for r in ranges:
        before += np.clip(borders - r.start, 0, r.num_elements)
    return np.diff(before)


def elements_in_shards(bucket: Bucket, ranges: Sequence[Range]) -> Amounts:
    """Elements of the ranges in every rank's shard, in the order of the ranks."""
    by_share = elements_in_shares(bucket, ranges)
    if bucket.owner_order is None:
        return by_share
    by_rank = np.empty_like(by_share)
    by_rank[list(bucket.owner_order)] = by_share
    return by_rank
