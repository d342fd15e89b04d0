"""Buckets that travel alike: the layers of a stage are cut, owned and held in the same way."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.plan import contributed_ranges, held_ranges
from megatron.hydraulis.transfer.ranges import Range
from megatron.hydraulis.transfer.role import Role


def alike_buckets(
    layout: CanonicalLayout, roles: Sequence[Role | None]
) -> tuple[tuple[Bucket, ...], ...]:
    """All buckets, in groups whose transfer plans for these roles differ in the index alone.

    Plans of one bucket of a group serve for all: with 60 layers on few stages, that is most of the
    work of planning for many ranks.
    """
    distinct = tuple(dict.fromkeys(roles))
    found: dict[object, tuple[tuple[Range, ...], tuple[Range, ...]]] = {}
    cuts: dict[object, int] = {}

    def ranges_of(
        bucket: Bucket, cut: int, role: Role | None
    ) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        if role is None or bucket.unit not in role.units:
            return (), ()
        # Of two layers cut alike, the same TP ranks hold the same.
        key = (cut, role.tp, role.tp_rank)
        if key not in found:
            found[key] = (
                held_ranges(layout, bucket, role),
                contributed_ranges(layout, bucket, role),
            )
        return found[key]

    groups: dict[object, list[Bucket]] = {}
    for bucket in layout.buckets:
        cut = cuts.setdefault(_cut_of(layout, bucket), len(cuts))
        held = tuple(ranges_of(bucket, cut, role) for role in distinct)
        key = (bucket.shard_borders, bucket.owner_order, held)
        groups.setdefault(key, []).append(bucket)
    return tuple(tuple(group) for group in groups.values())


def _cut_of(layout: CanonicalLayout, bucket: Bucket) -> tuple[object, ...]:
    """All that tells which ranges of a bucket a TP rank of a holder of its unit has."""
    parameters = layout.parameters
    return tuple(
        (
            piece.num_elements,
            piece.atom,
            parameters[piece.parameter].tp_dim is None,
            parameters[piece.parameter].contribution,
        )
        for piece in bucket.pieces
    )
