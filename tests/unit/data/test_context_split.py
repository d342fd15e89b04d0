import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.data.packed_batch import (
    chunk_multiple,
    gathered_places,
    local_places,
    local_stretches,
    padded_length,
    row_segments,
    zigzag_chunks,
)

SIZES = st.sampled_from([1, 2, 4, 8])
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=8)


def test_written_out() -> None:
    assert row_segments([5, 1], pad_multiple=2, context_size=2) == ([5, 1, 4], [8, 4, 4])
    assert local_places([8, 4, 4], 2, 0).tolist() == [0, 1, 6, 7, 8, 11, 12, 15]
    assert local_places([8, 4, 4], 2, 1).tolist() == [2, 3, 4, 5, 9, 10, 13, 14]
    assert local_stretches(8, 2, 0) == [(0, 2), (6, 8)]


def test_a_group_of_one_does_not_split() -> None:
    assert row_segments([5, 1], pad_multiple=4) == ([5, 1, 2], [5, 1, 2])
    assert row_segments([3, 1], pad_multiple=4) == ([3, 1], [3, 1])
    assert local_places([5, 1, 2], 1, 0).tolist() == list(range(8))
    assert local_stretches(5, 1, 0) == [(0, 5)]


@given(lengths=LENGTHS, size=SIZES, tp=st.sampled_from([1, 2, 3]))
def test_parts_are_equal_and_cover_the_row(lengths: list[int], size: int, tp: int) -> None:
    segments, padded = row_segments(lengths, pad_multiple=tp, context_size=size)
    total = sum(padded)
    assert total % (tp * chunk_multiple(size)) == 0
    assert total - sum(padded[: len(lengths)]) < tp * chunk_multiple(size)
    assert segments[: len(lengths)] == lengths
    assert padded[: len(lengths)] == [padded_length(length, size) for length in lengths]
    assert all(0 <= p - n < chunk_multiple(size) for n, p in zip(segments, padded, strict=True))
    parts = [local_places(padded, size, rank) for rank in range(size)]
    assert {len(part) for part in parts} == {total // size}
    assert gathered_places(padded, size).tolist() == np.concatenate(parts).tolist()
    assert sorted(gathered_places(padded, size).tolist()) == list(range(total))


@given(lengths=LENGTHS, size=st.sampled_from([2, 4, 8]))
def test_every_rank_has_the_same_causal_work(lengths: list[int], size: int) -> None:
    _, padded = row_segments(lengths, context_size=size)
    borders = np.cumsum([0, *padded])
    for start, stop in itertools.pairwise(borders):
        work = set()
        for rank in range(size):
            places = local_places(padded, size, rank)
            mine = places[(start <= places) & (places < stop)] - start
            stretches = local_stretches(int(stop - start), size, rank)
            assert mine.tolist() == [i for a, b in stretches for i in range(a, b)]
            work.add(int((mine + 1).sum()))
        assert len(work) == 1


def test_refused_numbers() -> None:
    with pytest.raises(ValueError, match="context_size is at least 1 but is 0"):
        chunk_multiple(0)
    with pytest.raises(ValueError, match="context_rank 2 is not in a group of 2"):
        zigzag_chunks(2, 2)
