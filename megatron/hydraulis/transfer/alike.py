"""Buckets that travel alike: the layers of a stage are cut, owned and held in the same way."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.plan import contributed_ranges, held_ranges
from megatron.hydraulis.transfer.role import Role


def alike_buckets(
    layout: CanonicalLayout, roles: Sequence[Role | None]
) -> tuple[tuple[Bucket, ...], ...]:
    """All buckets, in groups whose transfer plans for these roles differ in the index alone.

    Plans of one bucket of a group serve for all: with 60 layers on few stages, that is most of the
    work of planning for many ranks.
    """
    distinct = tuple(dict.fromkeys(roles))
    groups: dict[object, list[Bucket]] = {}
    for bucket in layout.buckets:
        held = tuple(held_ranges(layout, bucket, role) for role in distinct)
        contributed = tuple(contributed_ranges(layout, bucket, role) for role in distinct)
        key = (bucket.shard_borders, bucket.owner_order, held, contributed)
        groups.setdefault(key, []).append(bucket)
    return tuple(tuple(group) for group in groups.values())
