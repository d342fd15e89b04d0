"""Groups of cp ranks that a strategy needs; waves in them cannot deadlock."""

import graphlib
import itertools
from collections.abc import Sequence

import pytest

from megatron.hydraulis.simulator.simulation import stage_program
from megatron.hydraulis.strategy import Strategy

Wave = Sequence[Sequence[int]]
"""The columns of each group."""
Operation = tuple[int, int, bool, tuple[int, ...] | None]
"""Stage, wave, whether it is a forward, and the columns of the group that runs it together."""


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("cp4", {(0, 1, 2, 3)}),
        ("cp4~", {(0, 1), (2, 3), (0, 1, 2, 3)}),
        ("cp3@2,0,1+tp1", {(2, 0, 1)}),
        ("cp2~@3,1+2*tp1", {(3, 1)}),
        ("tp2cp2~", {(0, 1), (2, 3), (0, 2), (1, 3)}),
        ("cp2~pp2", {(0, 1), (2, 3), (0, 2), (1, 3)}),
    ],
)
def test_groups_are_those_that_waves_may_use(text: str, groups: set[tuple[int, ...]]) -> None:
    found = Strategy.parse(text, 4).rank_groups
    assert set(found) == groups
    assert len(found) == len(groups)


@pytest.mark.parametrize(
    ("text", "num_ranks", "num_groups", "num_of_a_rank"),
    [
        ("cp8~", 8, 4 + 2 + 1, 3),
        ("cp64~", 64, 63, 6),
        ("tp2cp32~", 64, 32 + 2 * 31, 1 + 5),
        ("cp32~pp2", 64, 32 + 2 * 31, 1 + 5),
        ("2*tp8cp8~pp4", 512, 2 * (32 + 4 * 8 * 7 + 64), 1 + 3 + 1),
    ],
)
def test_the_number_of_groups_depends_only_on_the_ranks(
    text: str, num_ranks: int, num_groups: int, num_of_a_rank: int
) -> None:
    """cp - 1 groups for every stage and tp rank, of which a rank is in one of each size."""
    found = Strategy.parse(text, num_ranks).rank_groups
    assert len(found) == num_groups < 2 * num_ranks
    for rank in range(num_ranks):
        assert sum(rank in ranks for ranks in found) == num_of_a_rank


def waits_end(waves: Sequence[Wave], num_stages: int, *, skips: bool = False) -> bool:
    """Whether every operation of 1F1B can run, collectives of a group at once on all its columns.

    skips: a column runs the waves in which it is in a group, not all of them.
    """
    columns = sorted(set(itertools.chain(*(group for wave in waves for group in wave))))
    graph: graphlib.TopologicalSorter[Operation] = graphlib.TopologicalSorter()
    for column, stage in itertools.product(columns, range(num_stages)):
        group_in = [next((tuple(g) for g in wave if column in g), None) for wave in waves]
        mine = [i for i, group in enumerate(group_in) if group is not None or not skips]
        before: list[Operation] = []
        for is_forward, number in stage_program(stage, num_stages, len(mine)):
            what = (mine[number], is_forward, group_in[mine[number]])
            neighbour = stage - 1 if is_forward else stage + 1
            needed = [(neighbour, *what)] if 0 <= neighbour < num_stages else []
            graph.add((stage, *what), *before, *needed)
            before = [(stage, *what)]
    try:
        tuple(graph.static_order())
    except graphlib.CycleError:
        return False
    return True


SPLITS: list[Wave] = [
    [[0, 1, 2, 3]],
    [[0, 1], [2, 3]],
    [[0, 1], [2], [3]],
    [[0], [1], [2, 3]],
    [[0], [1], [2], [3]],
]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_waves_of_any_groups_do_not_deadlock(num_stages: int) -> None:
    for waves in itertools.product(SPLITS, repeat=4):
        assert waits_end(waves, num_stages)


def test_without_rows_of_padding_columns_would_deadlock() -> None:
    """Column 1 has nothing in the second wave: it would run ahead of column 0 and block it."""
    waves: list[Wave] = [[[0, 1]], [[0]], [[0, 1]]]
    assert not waits_end(waves, 2, skips=True)
    assert waits_end([[[0, 1]], [[0], [1]], [[0, 1]]], 2)
