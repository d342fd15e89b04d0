"""Small layouts, calculated by hand."""

import dataclasses

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.transfer.canonical import (
    Block,
    CanonicalLayout,
    Contribution,
    ParameterSpec,
    Piece,
    Unit,
)

LAYER = Unit.layer(0)
FC1 = ParameterSpec("fc1", (8, 3), LAYER, Contribution.SHARDED, tp_dim=0, parts=(4, 4))
FC2 = ParameterSpec("fc2", (3, 4), LAYER, Contribution.SHARDED, tp_dim=1)
NORM = ParameterSpec("norm", (3,), LAYER, Contribution.REPLICATED, decays=False)
Q_NORM = ParameterSpec("q_norm", (2,), LAYER, Contribution.PARTIAL, decays=False)


def build(*parameters: ParameterSpec, num_atoms: int = 2, num_ranks: int = 1) -> CanonicalLayout:
    return CanonicalLayout.build(parameters, num_atoms=num_atoms, num_ranks=num_ranks)


def num_owned(layout: CanonicalLayout, rank: int) -> int:
    """Elements of the rank's shards over all buckets."""
    return sum(stop - start for start, stop in (b.shard_range(rank) for b in layout.buckets))


def test_a_bucket_s_order_is_that_of_contributions_then_that_given() -> None:
    layout = build(NORM, FC2, Q_NORM, FC1)
    assert [p.name for p in layout.parameters] == ["fc2", "fc1", "q_norm", "norm"]
    assert layout.num_elements == 12 + 24 + 2 + 3


def test_units_come_in_the_order_of_the_pipeline() -> None:
    units = [Unit.output(), Unit.layer(1), Unit.layer(0), Unit.embedding(), Unit.first_stage()]
    layout = build(*(dataclasses.replace(FC2, name=unit.name, unit=unit) for unit in units))
    assert [bucket.unit for bucket in layout.buckets] == units[::-1]


def test_two_stacked_halves_are_cut_apart() -> None:
    """SwiGLU's gate and up: TP rank 1 of 2 has rows 2, 3 of the gate and 6, 7 of the whole."""
    layout = build(FC1)
    pieces = layout.buckets[0].pieces
    assert [(p.part, p.atom, p.num_rows, p.row_length) for p in pieces] == [
        (0, 0, 2, 3),
        (0, 1, 2, 3),
        (1, 0, 2, 3),
        (1, 1, 2, 3),
    ]
    assert [layout.global_rectangle(p) for p in pieces] == [(0, 0), (2, 0), (4, 0), (6, 0)]
    held = [p for p in pieces if layout.holds(p, tp=2, tp_rank=1)]
    assert held == [pieces[1], pieces[3]]
    assert [layout.block(p, 2, 1) for p in held] == [Block(0, 0, 2, 3, 3), Block(0, 6, 2, 3, 3)]


def test_parts_of_unequal_sizes_are_cut_apart() -> None:
    """Queries of a recurrent layer and twice as many values: TP rank 1 of 2 has rows 1 and 4, 5."""
    spec = ParameterSpec("in", (6, 3), LAYER, Contribution.SHARDED, tp_dim=0, parts=(2, 4))
    layout = build(spec)
    held = [p for p in layout.buckets[0].pieces if layout.holds(p, tp=2, tp_rank=1)]
    assert [layout.global_rectangle(p) for p in held] == [(1, 0), (4, 0)]
    assert [layout.block(p, 2, 1) for p in held] == [Block(0, 0, 1, 3, 3), Block(0, 3, 2, 3, 3)]


def test_a_column_cut_gives_strided_blocks() -> None:
    layout = build(FC2, num_atoms=4)
    third = layout.buckets[0].pieces[2]
    assert third == Piece(0, 0, 2, 0, 3, 1)
    assert layout.global_rectangle(third) == (0, 2)
    assert layout.block(third, tp=2, tp_rank=1) == Block(0, 0, 3, 1, 2)
    assert layout.block(third, tp=1, tp_rank=0) == Block(0, 2, 3, 1, 4)


def test_borders_of_shards_are_at_the_rows_nearest_to_equal_shares() -> None:
    layout = build(FC1, num_ranks=5)
    # 24 elements: shares end at 4.8, 9.6, 14.4, 19.2; rows at multiples of 3.
    assert layout.buckets[0].shard_borders == (0, 3, 9, 15, 18, 24)
    assert [num_owned(layout, rank) for rank in range(5)] == [3, 6, 6, 3, 6]


def test_more_ranks_than_rows_leave_some_without_a_shard() -> None:
    layout = build(Q_NORM, num_ranks=5)
    owned = [num_owned(layout, rank) for rank in range(5)]
    assert sum(owned) == 2
    assert sorted(owned) == [0, 0, 0, 1, 1]


def test_embedding_and_output_are_cut_to_the_cap_but_layers_are_not() -> None:
    parameters = [
        dataclasses.replace(FC2, name=unit.name, unit=unit, shape=(10, 4))
        for unit in (Unit.embedding(), LAYER, Unit.output())
    ]
    layout = CanonicalLayout.build(parameters, num_atoms=2, num_ranks=1, bucket_cap_elements=16)
    assert [(b.unit, b.num_elements) for b in layout.buckets] == [
        *[(Unit.embedding(), size) for size in (12, 12, 16)],
        (LAYER, 40),
        *[(Unit.output(), size) for size in (12, 12, 16)],
    ]
    assert [b.index for b in layout.buckets] == list(range(7))


def test_a_cap_below_a_row_makes_no_empty_bucket() -> None:
    embedding = dataclasses.replace(FC2, unit=Unit.embedding())
    layout = CanonicalLayout.build([embedding], num_atoms=2, num_ranks=3, bucket_cap_elements=1)
    assert [bucket.num_elements for bucket in layout.buckets] == [4, 4, 4]


def test_local_shapes() -> None:
    assert FC1.local_shape(2) == (4, 3)
    assert FC2.local_shape(4) == (3, 1)
    assert NORM.local_shape(4) == (3,)


@pytest.mark.parametrize(
    ("parameter", "num_atoms", "message"),
    [
        (FC1, 3, r"'fc1': 4 \+ 4 entries along dim 0 do not cut into 3 equal atoms each"),
        (FC2, 8, "'fc2': 4 entries along dim 1 do not cut into 8 equal atoms each"),
    ],
)
def test_dims_that_do_not_cut_into_atoms_are_refused(
    parameter: ParameterSpec, num_atoms: int, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(parameter, num_atoms=num_atoms)


def test_duplicate_names_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="named twice: norm"):
        build(NORM, Q_NORM, NORM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": ()}, "has no elements"),
        ({"shape": (0, 3)}, "has no elements"),
        ({"tp_dim": None}, "exactly the cut parameters are SHARDED"),
        ({"contribution": Contribution.PARTIAL}, "exactly the cut parameters are SHARDED"),
        ({"parts": (4, 5)}, "its parts are all of its 8 rows but have 4, 5"),
        ({"tp_dim": 1}, "only dim 0, or dim 1 of a matrix of one part"),
        ({"tp_dim": 1, "parts": (), "shape": (2, 2, 2)}, "only dim 0, or dim 1 of a matrix"),
    ],
)
def test_parameters_that_cannot_be_regrouped_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dataclasses.replace(FC1, **changes)  # type: ignore[arg-type]
