"""Copies between a role's arena and the flat buffers that travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron.hydraulis.runtime.arena import Arena
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.plan import Segment
from megatron.hydraulis.transfer.role import Role


@dataclass(frozen=True)
class Copy:
    """A rectangle of the arena, flat where it has no gaps, and its run in a flat buffer."""

    start: int
    stop: int
    view: Tensor


def canonical_copies(
    layout: CanonicalLayout, bucket: Bucket, role: Role, arena: Arena, *, gradients: bool
) -> tuple[Copy, ...]:
    """What the role holds of the bucket, or contributes to its gradients, in canonical order.

    Neighbours in both places are one copy. The arena's memory must be in place.
    """
    copies: list[Copy] = []
    if bucket.unit not in role.units:
        return ()
    at = 0
    for piece in bucket.pieces:
        if not layout.holds(piece, role.tp, role.tp_rank):
            continue
        kind = layout.parameters[piece.parameter].contribution
        if gradients and not role.contributes(kind):
            continue
        block = layout.block(piece, role.tp, role.tp_rank)
        bound = arena.bound[block.parameter]
        flat = bound.gradient if gradients else bound.values
        view = flat.as_strided(
            (block.num_rows, block.row_length),
            (block.row_stride, 1),
            flat.storage_offset() + block.offset,
        )
        copies.append(Copy(at, at + view.numel(), view))
        at += view.numel()
    return _merged(copies)


def in_order_of(segments: Sequence[Segment], copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """The same copies against a buffer in which the segments lie in another order.

    Args:
        segments: by rising ``canonical_start``.
        copies: in canonical order; together they cover what the segments cover.
    """
    moved: list[Copy] = []
    at = 0
    for segment in segments:
        first, last = segment.canonical_start, segment.canonical_start + segment.num_elements
        while at < len(copies) and copies[at].stop <= first:
            at += 1
        for copy in copies[at:]:
            if copy.start >= last:
                break
            start, stop = max(copy.start, first), min(copy.stop, last)
            shift = segment.transfer_start - first
            moved.append(Copy(start + shift, stop + shift, _part(copy, start, stop)))
    return _merged(sorted(moved, key=lambda copy: copy.start))


def single_run(copies: Sequence[Copy], num_elements: int) -> Tensor | None:
    """The part of the arena that travels in place, flat; None where a copy has to rearrange it."""
    if len(copies) != 1 or copies[0].stop != num_elements or not copies[0].view.is_contiguous():
        return None
    return copies[0].view.view(-1)


def to_buffer(copies: Iterable[Copy], buffer: Tensor) -> None:
    """Arena to buffer."""
    for copy in copies:
        buffer[copy.start : copy.stop].view(copy.view.shape).copy_(copy.view)


def from_buffer(copies: Iterable[Copy], buffer: Tensor) -> None:
    """Buffer to arena."""
    for copy in copies:
        copy.view.copy_(buffer[copy.start : copy.stop].view(copy.view.shape))


def _part(copy: Copy, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the copy's run: whole rows where the rectangle has gaps."""
    if (start, stop) == (copy.start, copy.stop):
        return copy.view
    view = copy.view
    if view.is_contiguous():
        offset = view.storage_offset() + start - copy.start
        return view.as_strided((stop - start,), (1,), offset)
    row_length = view.size(1)
    first, first_rest = divmod(start - copy.start, row_length)
    last, last_rest = divmod(stop - copy.start, row_length)
    assert not first_rest
    assert not last_rest  # shards are cut at row borders
    return view[first:last]


def _merged(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    merged: list[Copy] = []
    for copy in copies:
        if merged and merged[-1].stop == copy.start and _adjoin(merged[-1].view, copy.view):
            size = copy.stop - merged[-1].start
            merged[-1] = Copy(
                merged[-1].start, copy.stop, merged[-1].view.as_strided((size,), (1,))
            )
        else:
            merged.append(copy)
    return tuple(merged)


def _adjoin(first: Tensor, second: Tensor) -> bool:
    """Whether both are without gaps and ``second`` begins where ``first`` ends."""
    if not (first.is_contiguous() and second.is_contiguous()):
        return False
    return bool(second.storage_offset() == first.storage_offset() + first.numel())
