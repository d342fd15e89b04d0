"""The grid of micro-batches: sizes, packings, refusals."""

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.profiler.measurements import (
    FEW_TOKENS,
    MANY_MEDIUM,
    MANY_SHORT,
    MIXTURE,
    SAMPLED,
    SINGLE_LONG,
    GridPoint,
    grid,
)


def test_sizes_are_halves_and_packings_differ_only_in_squares() -> None:
    points = grid(1024, longest=1024, short=64, num_sizes=3)
    assert points[0] == GridPoint(FEW_TOKENS, (64,))
    sizes = [point.num_tokens for point in points]
    # Medium sequences of 256 tokens are not shorter than the smallest size.
    assert sizes == [64] + [256] * 3 + [512] * 4 + [1024] * 4
    largest = {point.packing: point for point in points if point.num_tokens == 1024}
    assert largest[SINGLE_LONG].lengths == (1024,)
    assert largest[MANY_SHORT].lengths == (64,) * 16
    assert largest[MANY_MEDIUM].lengths == (256,) * 4
    assert largest[MIXTURE].lengths == (512, *(64,) * 8)
    squares = [point.sum_of_squares for point in points if point.num_tokens == 1024]
    assert squares == sorted(set(squares))


def test_no_sequence_is_longer_than_the_longest() -> None:
    points = grid(1000, longest=300, short=50, num_sizes=4)
    assert max(max(point.lengths) for point in points) == 300
    assert {point.num_tokens for point in points} == {1000, 500, 250, 125, 50}


def test_equal_packings_are_measured_once_and_sizes_end_at_a_short_sequence() -> None:
    points = grid(64, longest=64, short=32, num_sizes=9)
    assert {point.num_tokens for point in points} == {64, 32}
    assert len({point.lengths for point in points}) == len(points)


def test_lengths_of_a_corpus_fill_every_size_and_depend_on_the_seed() -> None:
    def sampled(seed: int) -> list[tuple[int, ...]]:
        points = grid(512, longest=200, short=32, num_sizes=2, sample_from=(7, 90, 400), seed=seed)
        return [point.lengths for point in points if point.packing == SAMPLED]

    assert sampled(1) == sampled(1) != sampled(2)
    assert [sum(lengths) for lengths in sampled(1)] == [256, 512]
    for lengths in sampled(1):
        # Longer ones come at the longest, and the last one is cut to fit.
        assert sum(length not in (7, 90, 200) for length in lengths) <= 1


@pytest.mark.parametrize("wrong", [{"short": 65}, {"longest": 31}])
def test_refusals(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="grid of a profile"):
        grid(64, **{"longest": 64, "short": 32, "num_sizes": 2} | wrong)  # type: ignore[arg-type]
