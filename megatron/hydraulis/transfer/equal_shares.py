"""A bucket that every rank wants whole: all-gather, and reduce-scatter as its mirror image."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import Bucket
from megatron.hydraulis.transfer.role import Role
from megatron.hydraulis.transfer.segments import Segment, merged


@dataclass(frozen=True)
class EqualShares:
    """One bucket as equal shares, for `all_gather_into_tensor` and `reduce_scatter_tensor`.

    Both want shares of one size in the order of the ranks, so that a shard shorter than the
    longest is padded. The *flat buffer* has ``num_buffer_elements``; rank r's share starts at
    ``r * share_elements``, its shard at the share's beginning.

    **Gather** (``adds_up`` false): rank r sends its shard, padded to ``share_elements`` (any
    value); the collective fills the flat buffer; `segments` say where its parts belong in the
    bucket.
    **Scatter** (``adds_up`` true): `segments` the other way from the bucket's gradients to the
    flat buffer (what no segment covers has to be finite, say zero); the collective gives rank r
    the sum of everybody's r-th share, of which the first elements, as many as its shard has, are
    its gradient.

    Where `is_in_place` the flat buffer is the bucket itself: no padding, no copy.
    """

    bucket: int
    num_ranks: int
    share_elements: int
    shards: tuple[tuple[int, int], ...]
    """Elements [start, stop) of the bucket that each rank owns, by rank."""
    adds_up: bool

    @property
    def num_buffer_elements(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.num_ranks * self.share_elements

    @property
    def num_elements(self) -> int:
        """Elements of the bucket."""
        return sum(stop - start for start, stop in self.shards)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """What lies where: ``transfer_start`` in the flat buffer, ``canonical_start`` in the
        bucket; by rising ``canonical_start``."""
        parts = [
            Segment(rank * self.share_elements, start, stop - start)
            for rank, (start, stop) in enumerate(self.shards)
            if start < stop
        ]
        return merged(sorted(parts, key=lambda part: part.canonical_start))

    @property
    def is_in_place(self) -> bool:
        """Whether the flat buffer is the bucket in canonical order, without padding."""
        return len(self.segments) == 1 and self.num_elements == self.num_buffer_elements

    def for_bucket(self, index: int) -> EqualShares:
        """The same shares of another bucket, see `alike.alike_buckets`."""
        return dataclasses.replace(self, bucket=index)

    def inverse(self) -> EqualShares:
        """The reduce-scatter of an all-gather, and back; twice is the identity."""
        return dataclasses.replace(self, adds_up=not self.adds_up)


def wants_everything(roles: Sequence[Role | None]) -> bool:
    """Whether every rank holds the whole model: tp 1 and pp 1 everywhere, none idle."""
    return all(
        role is not None and role.tp == 1 and role.has_embedding and role.has_output
        for role in roles
    )


def equal_shares(bucket: Bucket, roles: Sequence[Role | None], *, adds_up: bool) -> EqualShares:
    """The plan of one bucket; the same for every rank.

    Raises:
        PlanError: some rank does not hold the whole model.
    """
    if not wants_everything(roles):
        raise PlanError(
            "an all-gather gives every rank the whole bucket but some rank is idle or has tp or pp "
            "above 1; plan an uneven all-to-all"
        )
    shards = tuple(bucket.shard_range(rank) for rank in range(len(roles)))
    return EqualShares(
        bucket=bucket.index,
        num_ranks=len(roles),
        share_elements=max(stop - start for start, stop in shards),
        shards=shards,
        adds_up=adds_up,
    )
