"""Buckets of any lengths: every sequence in one, minimal rounding."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.planner.relaxation import LengthBucket, make_buckets

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=40)
BORDERS = st.lists(st.integers(1, 45), max_size=3)


def rounding_of(bucket: LengthBucket) -> int:
    """Tokens lost by rounding down."""
    return bucket.num_tokens - bucket.low * bucket.num_sequences


@given(LENGTHS, st.integers(1, 8), BORDERS)
def test_every_sequence_is_in_one_bucket(
    lengths: list[int], num_buckets: int, borders: list[int]
) -> None:
    buckets = make_buckets(lengths, num_buckets, borders=borders)
    assert len(buckets) <= num_buckets + len(set(borders))
    for bucket, following in itertools.pairwise(buckets):
        assert bucket.high < following.low
    rounding_tokens = 0
    for bucket in buckets:
        members = [length for length in lengths if bucket.low <= length <= bucket.high]
        # Its ends are lengths of the batch, so it rounds no more than necessary.
        assert {bucket.low, bucket.high} <= set(members)
        assert (bucket.num_sequences, bucket.num_tokens) == (len(members), sum(members))
        assert not any(bucket.low <= border < bucket.high for border in borders)
        rounding_tokens += sum(length - bucket.low for length in members)
    assert rounding_tokens == sum(map(rounding_of, buckets))
    assert sum(bucket.num_sequences for bucket in buckets) == len(lengths)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 4), BORDERS)
def test_no_other_buckets_round_less(
    lengths: list[int], num_buckets: int, borders: list[int]
) -> None:
    values = sorted(set(lengths))
    fixed = {
        place
        for place in range(1, len(values))
        if any(values[place - 1] <= border < values[place] for border in borders)
    }
    num_cuts = min(len(values), num_buckets + len(fixed)) - 1
    least_tokens = min(
        sum(
            length - max(low for low in (values[0], *(values[c] for c in cuts)) if low <= length)
            for length in lengths
        )
        for cuts in itertools.combinations(range(1, len(values)), num_cuts)
        if fixed <= set(cuts)
    )
    buckets = make_buckets(lengths, num_buckets, borders=borders)
    assert sum(map(rounding_of, buckets)) == least_tokens


@given(st.integers(300, 1200), st.integers(1, 2000), st.integers(2, 40))
def test_thousands_of_lengths_are_grouped_below_one_another(
    num_lengths: int, border: int, num_buckets: int
) -> None:
    # More different lengths than the dynamic program handles individually.
    lengths = [1 + place * place // 400 + place for place in range(num_lengths)]
    buckets = make_buckets(lengths, num_buckets, borders=[border])
    assert len(buckets) <= num_buckets + 1
    assert sum(bucket.num_sequences for bucket in buckets) == len(lengths)
    assert sum(bucket.num_tokens for bucket in buckets) == sum(lengths)
    assert not any(bucket.low <= border < bucket.high for bucket in buckets)
    for bucket, following in itertools.pairwise(buckets):
        assert bucket.high < following.low
