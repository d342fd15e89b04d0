"""Copies between rectangles of an arena and the flat buffers that travel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from megatron.hydraulis.runtime.arena import Arena
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.plan import Segment
from megatron.hydraulis.transfer.ranges import held_blocks
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
    """Copies of a bucket that the role holds, or contributes to gradients, in canonical order.

    Neighbours in both places are one copy. Needs `Arena.in_memory`.
    """
    copies: list[Copy] = []
    at = 0
    flat = arena.gradients if gradients else arena.parameters
    for _, block in held_blocks(layout, bucket, role, contributed=gradients):
        view = flat.as_strided(
            (block.num_rows, block.row_length),
            (block.row_stride, 1),
            arena.regrouped_start(block.parameter) + block.offset,
        )
        copies.append(Copy(at, at + view.numel(), view))
        at += view.numel()
    return _merged(copies)


def in_order_of(segments: Sequence[Segment], copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """The same copies for a buffer in which the segments have another order.

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
    """The flat part of the arena that travels in place; None where elements must be rearranged."""
    if len(copies) != 1 or copies[0].stop != num_elements or not copies[0].view.is_contiguous():
        return None
    return copies[0].view.view(-1)


@dataclass(frozen=True)
class Stack:
    """Copies of one shape, equally far apart in the buffer and in the arena: a single kernel."""

    start: int
    """Start of the first copy in the buffer."""
    strides: tuple[int, ...]
    """Strides in the buffer."""
    view: Tensor
    """The elements in the arena."""

    def in_buffer(self, buffer: Tensor) -> Tensor:
        """The elements of a flat buffer, in the shape of the view."""
        return buffer.as_strided(
            self.view.shape, self.strides, buffer.storage_offset() + self.start
        )


def stacked(copies: Sequence[Copy]) -> tuple[Stack, ...]:
    """All elements of the copies, in as few stacks as are found.

    Those of experts are stacked twice: a row-parallel matrix has a rectangle for each atom, and a
    layer has the same rectangles for each expert.
    """
    stacks = [Stack(copy.start, (*copy.view.shape[1:], 1), copy.view) for copy in copies]
    num_before = len(stacks) + 1
    while len(stacks) < num_before:
        num_before = len(stacks)
        stacks = [stack for alike in _by_shape(stacks) for stack in _progressions(alike)]
    return tuple(stacks)


def _by_shape(stacks: Sequence[Stack]) -> Iterable[list[Stack]]:
    found: dict[object, list[Stack]] = defaultdict(list)
    for stack in stacks:
        found[stack.view.shape, stack.strides, stack.view.stride()].append(stack)
    return found.values()


def _progressions(stacks: Sequence[Stack]) -> Iterator[Stack]:
    """Runs of equal steps in both places, each as one stack.

    Args:
        stacks: of one shape, in the order of the buffer.
    """
    steps = [_step(*pair) for pair in pairwise(stacks)]
    at = 0
    while at < len(stacks):
        first, last = stacks[at], at
        while last < len(steps) and steps[last] == steps[at] and steps[last][1] > 0:
            last += 1
        if last > at:
            in_buffer, in_arena = steps[at]
            shape = (last - at + 1, *first.view.shape)
            view = first.view.as_strided(shape, (in_arena, *first.view.stride()))
            first = Stack(first.start, (in_buffer, *first.strides), view)
        yield first
        at = last + 1


def _step(first: Stack, second: Stack) -> tuple[int, int]:
    """Elements between two stacks, in the buffer and in the arena."""
    in_arena = int(second.view.storage_offset() - first.view.storage_offset())
    return second.start - first.start, in_arena


def _part(copy: Copy, start: int, stop: int) -> Tensor:
    """Elements [start, stop) of the copy's run: whole rows where the rectangle has gaps."""
    if (start, stop) == (copy.start, copy.stop):
        return copy.view
    view = copy.view
    if view.is_contiguous():
        offset = view.storage_offset() + start - copy.start
        return view.as_strided((stop - start,), (1,), offset)
    first, first_rest = divmod(start - copy.start, view.size(1))
    last, last_rest = divmod(stop - copy.start, view.size(1))
    assert not first_rest
    assert not last_rest  # shards are cut between rows
    return view[first:last]


def _merged(copies: Iterable[Copy]) -> tuple[Copy, ...]:
    merged: list[Copy] = []
    for copy in copies:
        last = merged[-1] if merged else None
        if last is not None and last.stop == copy.start and _adjoin(last.view, copy.view):
            view = last.view.as_strided((copy.stop - last.start,), (1,))
            merged[-1] = Copy(last.start, copy.stop, view)
        else:
            merged.append(copy)
    return tuple(merged)


def _adjoin(first: Tensor, second: Tensor) -> bool:
    """True if both are without gaps and ``second`` begins where ``first`` ends."""
    if not (first.is_contiguous() and second.is_contiguous()):
        return False
    return bool(second.storage_offset() == first.storage_offset() + first.numel())
