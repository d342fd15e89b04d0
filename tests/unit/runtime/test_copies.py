"""Copies between a buffer and the arena are few kernels, and move every element to its place."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.runtime.copies import Copy, stacked

NUM_EXPERTS, NUM_ATOMS, NUM_ROWS, ATOM_WIDTH = 128, 4, 6, 3
"""Of a layer: a flat matrix by rows and one cut by columns for each expert."""


def copies_of_experts(arena: torch.Tensor) -> list[Copy]:
    """The first matrix is one run; of the second each atom is a rectangle."""
    copies, at, size = [], 0, NUM_ROWS * ATOM_WIDTH * NUM_ATOMS
    for expert in range(NUM_EXPERTS):
        first = 2 * size * expert
        copies.append(Copy(at, at + size, arena[first : first + size]))
        at += size
        matrix = arena[first + size : first + 2 * size].view(NUM_ROWS, NUM_ATOMS * ATOM_WIDTH)
        for atom in matrix.split(ATOM_WIDTH, dim=1):
            copies.append(Copy(at, at + atom.numel(), atom))
            at += atom.numel()
    return copies


def moved(copies: list[Copy], arena: torch.Tensor) -> torch.Tensor:
    """The buffer that single copies fill."""
    buffer = torch.full((copies[-1].stop,), -1.0)
    for copy in copies:
        buffer[copy.start : copy.stop] = copy.view.reshape(-1)
    return buffer


def assert_moves_the_same(copies: list[Copy], arena: torch.Tensor) -> None:
    expected = moved(copies, arena)
    buffer = torch.full_like(expected, -1.0)
    for stack in stacked(copies):
        stack.in_buffer(buffer).copy_(stack.view)
    assert torch.equal(buffer, expected)
    before = arena.clone()
    arena.fill_(-1)
    for stack in stacked(copies):
        stack.view.copy_(stack.in_buffer(expected))
    for copy in copies:
        assert torch.equal(copy.view.reshape(-1), expected[copy.start : copy.stop])
    is_copied = arena != -1
    assert is_copied.sum() == sum(copy.stop - copy.start for copy in copies)
    assert torch.equal(arena[is_copied], before[is_copied])


def test_experts_of_a_layer_are_two_kernels() -> None:
    arena = torch.arange(2.0 * NUM_EXPERTS * NUM_ROWS * NUM_ATOMS * ATOM_WIDTH)
    copies = copies_of_experts(arena)
    assert len(copies) == NUM_EXPERTS * (1 + NUM_ATOMS)
    assert len(stacked(copies)) == 2
    assert_moves_the_same(copies, arena)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=14))
def test_any_copies_are_moved(drawn: list[tuple[int, int, bool]]) -> None:
    """Gaps in both places; a rectangle of 2 x 3 in rows of 5, or 6 elements in a row."""
    arena = torch.arange(40.0 * (len(drawn) + 1))
    copies, at, offset = [], 0, 0
    for gap_in_buffer, gap_in_arena, is_flat in drawn:
        at, offset = at + gap_in_buffer, offset + gap_in_arena
        shape, strides = ((6,), (1,)) if is_flat else ((2, 3), (5, 1))
        copies.append(Copy(at, at + 6, arena.as_strided(shape, strides, offset)))
        at, offset = at + 6, offset + 10
    if copies:
        assert_moves_the_same(copies, arena)
