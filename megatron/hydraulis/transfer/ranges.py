"""Ranges of a bucket in canonical order: their algebra, which of them a role holds, who owns them.

Functions take and return sequences of ascending, disjoint ranges; returned ranges never touch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.canonical import Block, Bucket, CanonicalLayout
from megatron.hydraulis.transfer.role import Role, runs_of

Amounts = npt.NDArray[np.int64]


@dataclass(frozen=True, order=True)
class Range:
    """Elements [start, stop) of a bucket in canonical order."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"range [{self.start}, {self.stop}) is empty or negative")

    @property
    def num_elements(self) -> int:
        return self.stop - self.start


def num_elements(ranges: Iterable[Range]) -> int:
    return sum(r.stop - r.start for r in ranges)


def union(sequences: Iterable[Iterable[Range]]) -> tuple[Range, ...]:
    """Every element that is in at least one of the sequences, once."""
    merged: list[Range] = []
    for r in sorted(r for ranges in sequences for r in ranges):
        if merged and r.start <= merged[-1].stop:
            merged[-1] = Range(merged[-1].start, max(merged[-1].stop, r.stop))
        else:
            merged.append(r)
    return tuple(merged)


def intersection(first: Sequence[Range], second: Sequence[Range]) -> tuple[Range, ...]:
    """Every element that is in both sequences."""
    found: list[Range] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i].start, second[j].start)
        stop = min(first[i].stop, second[j].stop)
        if start < stop:
            if found and found[-1].stop == start:
                found[-1] = Range(found[-1].start, stop)
            else:
                found.append(Range(start, stop))
        if first[i].stop < second[j].stop:
            i += 1
        else:
            j += 1
    return tuple(found)


def clip(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """The elements that lie in [start, stop), which may be empty."""
    return intersection(ranges, (Range(start, stop),)) if start < stop else ()


def elements_in_shares(bucket: Bucket, ranges: Sequence[Range]) -> Amounts:
    """Elements of the ranges in each share of the bucket: shape (num_ranks,)."""
    borders = np.array(bucket.shard_borders, dtype=np.int64)
    before = np.zeros(len(borders), dtype=np.int64)
    for r in ranges:
        before += np.clip(borders - r.start, 0, r.num_elements)
    return np.diff(before)


RangesOfRole = Callable[[CanonicalLayout, Bucket, Role | None], tuple[Range, ...]]
"""`held_ranges` or `contributed_ranges`."""


def held_ranges(layout: CanonicalLayout, bucket: Bucket, role: Role | None) -> tuple[Range, ...]:
    """The parameters that a rank in this role holds of the bucket."""
    return _ranges(layout, bucket, role, contributed=False)


def contributed_ranges(
    layout: CanonicalLayout, bucket: Bucket, role: Role | None
) -> tuple[Range, ...]:
    """The gradients that a rank in this role sends back: a prefix of what it holds."""
    return _ranges(layout, bucket, role, contributed=True)


def _ranges(
    layout: CanonicalLayout, bucket: Bucket, role: Role | None, *, contributed: bool
) -> tuple[Range, ...]:
    blocks = held_blocks(layout, bucket, role, contributed=contributed)
    return union([[Range(start, start + block.num_elements) for start, block in blocks]])


def held_blocks(
    layout: CanonicalLayout, bucket: Bucket, role: Role | None, *, contributed: bool
) -> Iterator[tuple[int, Block]]:
    """Yields the blocks that the role holds of the bucket, or contributes to its gradients, in
    canonical order: each with its first element in the bucket. Blocks may be parts of pieces, and
    of their rows, where columns share the role's parameters."""
    if role is None or bucket.unit not in role.units:
        return
    runs = [] if role.column is None else runs_of(layout, role, bucket.unit)
    run_of = {index: run for run in runs if run.is_shared for index in run.offsets}
    for piece, start in zip(bucket.pieces, bucket.piece_offsets, strict=False):
        parameter = layout.parameters[piece.parameter]
        cut = role.cut_of(parameter)
        if cut is None or not layout.holds(piece, *cut):
            continue
        if contributed and not role.contributes(parameter):
            continue
        block = layout.block(piece, *cut)
        run = run_of.get(piece.parameter)
        if run is None:
            yield start, block
        else:
            first = run.share_start - run.offsets[piece.parameter]
            for skipped, part in _within(block, first, first + run.share_elements):
                yield start + skipped, part


def _within(block: Block, first: int, stop: int) -> Iterator[tuple[int, Block]]:
    """The block's elements at flat indices [first, stop) of the local parameter, as blocks: each
    with the number of the block's elements before it."""
    if block.row_stride == block.row_length:
        num = block.num_elements
        block = replace(block, num_rows=1, row_length=num, row_stride=num)

    def num_before(index: int) -> int:
        row, column = divmod(index - block.offset, block.row_stride)
        before = row * block.row_length + min(column, block.row_length)
        return min(max(before, 0), block.num_elements)

    at, end = num_before(first), num_before(stop)
    while at < end:
        row, column = divmod(at, block.row_length)
        num_rows = max(1, (end - at) // block.row_length) if column == 0 else 1
        length = min(block.row_length - column, end - at)
        offset = block.offset + row * block.row_stride + column
        yield at, replace(block, offset=offset, num_rows=num_rows, row_length=length)
        at += num_rows * length


def buckets_with_equal_plans(
    layout: CanonicalLayout, roles: Sequence[Role | None]
) -> tuple[tuple[Bucket, ...], ...]:
    """All buckets, grouped so that the plans of a group differ only in the bucket's index.

    Layers of a stage are cut, owned and held in the same way. Planning one bucket per group saves
    most of the work: a model with 60 layers has few stages.
    """
    distinct = [role for role in dict.fromkeys(roles) if role is not None]
    groups: dict[object, list[Bucket]] = {}
    are_shared = any(role.column is not None for role in distinct)
    cuts = layout.places if are_shared else layout.cuts
    for bucket, cut in zip(layout.buckets, cuts, strict=True):
        holders = tuple(bucket.unit in role.units for role in distinct)
        groups.setdefault((cut, holders), []).append(bucket)
    return tuple(map(tuple, groups.values()))


def best_owner_orders(
    layout: CanonicalLayout, roles: Sequence[Role | None]
) -> tuple[tuple[int, ...] | None, ...]:
    """The orders, one per bucket, for `CanonicalLayout.with_owner_orders`.

    A rank does not receive what it owns of its parameters. If rank r owns share r, that is about
    1/N of what it holds; in another order it can be all of its canonical shards.

    They maximise the number of elements that ranks both own and hold in the strategy of these
    roles, and among such orders the number of ranks r with share r; the solution is exact and
    deterministic. Every rank owns one share of every bucket in any order, so memory and work of the
    optimizer remain balanced. The layout's present orders do not matter.
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
