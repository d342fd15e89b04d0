"""The greedy dispatch: who gets what, ties included."""

import pytest

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.planner.costs import SchemeCost
from megatron.hydraulis.planner.greedy import dispatch


def cost(b: float, c: float = 0.0, *, max_tokens: int = 100, num_stages: int = 1) -> SchemeCost:
    return SchemeCost(Coefficients(0.0, b, c), max_tokens, num_stages)


def test_longest_processing_time_first() -> None:
    lengths = [50, 40, 30, 30, 20, 10]
    assert dispatch(range(6), lengths, [cost(1.0)] * 2) == [[0, 3, 5], [1, 2, 4]]


def test_a_sequence_goes_where_it_ends_first_not_where_least_has_been_done() -> None:
    slow, fast = cost(3.0), cost(1.0)
    assert dispatch(range(3), [20, 20, 20], [slow, fast]) == [[2], [0, 1]]


def test_only_replicas_that_hold_a_sequence_are_asked() -> None:
    narrow, wide = cost(1.0, max_tokens=30), cost(5.0, max_tokens=60)
    shares = dispatch(range(4), [60, 31, 30, 29], [narrow, wide, narrow])
    assert shares == [[2], [0, 1], [3]]


def test_another_micro_batch_counts_before_it_is_packed() -> None:
    """Its constant cost comes with the token that no longer fits."""
    near_full, roomy = cost(1.0, 50.0, max_tokens=40), cost(1.2, 50.0, max_tokens=90)
    shares = dispatch(range(3), [40, 40, 5], [near_full, roomy])
    assert shares == [[0], [1, 2]]


def test_a_long_sequence_fills_a_pipeline() -> None:
    """On three stages it takes three times its work, so a slower single stage ends first."""
    pipeline, single = cost(1.0, num_stages=3), cost(2.0)
    assert dispatch([0], [60], [pipeline, single]) == [[], [0]]


def test_fewer_sequences_than_replicas() -> None:
    assert dispatch([0], [7], [cost(1.0)] * 3) == [[0], [], []]
    assert dispatch([], [], [cost(1.0)] * 2) == [[], []]


def test_a_sequence_that_fits_nowhere_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="sequence 1 of 101 tokens fits no replica"):
        dispatch([1, 0], [5, 101], [cost(1.0)])
