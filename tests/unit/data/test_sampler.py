import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from megatron.core.datasets import helpers_cpp

from megatron.hydraulis.data.sampler import (
    MAX_WAITING_SEQUENCES,
    BatchSizes,
    EvaluationSampler,
    LengthSampler,
    SequenceGroup,
    epoch_permutation,
    largest_deficit,
)
from megatron.hydraulis.errors import ConfigurationError, DataError

LENGTHS = np.array([3, 9, 1, 4, 7, 2, 2, 8, 5, 6], dtype=np.int64)
ONE_GROUP = (SequenceGroup(0, 10, 10),)
PERMUTATIONS = (
    [8, 4, 3, 6, 2, 1, 0, 5, 9, 7],
    [3, 6, 5, 0, 1, 4, 9, 2, 7, 8],
    [7, 9, 6, 1, 4, 8, 3, 2, 5, 0],
    [8, 5, 1, 6, 7, 9, 0, 4, 3, 2],
)
TWO_GROUPS = (SequenceGroup(0, 4, 3.0), SequenceGroup(4, 6, 1.0))


def sampler(
    lengths: npt.NDArray[np.int64] = LENGTHS,
    groups: tuple[SequenceGroup, ...] = ONE_GROUP,
    *,
    seed: int = 7,
    global_batch_size: int | None = None,
    global_batch_tokens: int | None = None,
) -> LengthSampler:
    sizes = BatchSizes.constant(num_sequences=global_batch_size, num_tokens=global_batch_tokens)
    return LengthSampler(lengths, groups, seed=seed, sizes=sizes)


def evaluation(groups: tuple[SequenceGroup, ...] = ONE_GROUP, **size: int) -> EvaluationSampler:
    return EvaluationSampler(LENGTHS, groups, sizes=BatchSizes.constant(**size))


def ids(source: LengthSampler | EvaluationSampler, num_batches: int) -> list[int]:
    return [i for _ in range(num_batches) for i in source.next_batch().sequence_ids]


def epochs(source: LengthSampler) -> list[int]:
    return [group["epoch"] for group in source.state_dict()["order"]["groups"]]


def num_drawn(source: LengthSampler) -> int:
    """Sequences in the batches so far, and those that wait."""
    groups = source.state_dict()["order"]["groups"]
    return sum(group["epoch"] * group["num_sequences"] + group["position"] for group in groups)


def test_every_epoch_is_another_permutation() -> None:
    source = sampler(global_batch_size=5)
    first, second = ids(source, 2), ids(source, 2)
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert epochs(source) == [2]


def test_the_order_never_changes() -> None:
    # Checkpoints rely on it: a change of these numbers breaks every run that resumes.
    assert epoch_permutation(7, 0, 0, 10).tolist() == PERMUTATIONS[0]
    assert epoch_permutation(7, 0, 1, 10).tolist() == PERMUTATIONS[1]
    assert epoch_permutation(7, 1, 0, 10).tolist() == PERMUTATIONS[2]
    assert epoch_permutation(8, 0, 0, 10).tolist() == PERMUTATIONS[3]


def test_batch_carries_the_lengths_of_its_sequences() -> None:
    batch = sampler(global_batch_size=4).next_batch()
    assert batch.lengths == tuple(LENGTHS[list(batch.sequence_ids)])
    assert batch.num_sequences == 4
    assert batch.num_tokens == sum(batch.lengths)


def test_order_does_not_depend_on_how_batches_are_cut() -> None:
    assert ids(sampler(global_batch_size=1), 40) == ids(sampler(global_batch_size=8), 5)


def test_order_does_not_depend_on_the_lengths() -> None:
    others = LENGTHS[::-1].copy()
    assert ids(sampler(others, global_batch_size=4), 9) == ids(sampler(global_batch_size=4), 9)


def test_seed_changes_the_order() -> None:
    assert ids(sampler(global_batch_size=5), 2) != ids(sampler(global_batch_size=5, seed=8), 2)


def test_drawing_does_not_change_numpys_global_state() -> None:
    np.random.seed(3)
    expected = np.random.random()
    np.random.seed(3)
    ids(sampler(global_batch_size=3), 9)
    assert np.random.random() == expected


def test_blend_draws_by_weight_and_each_group_by_epochs() -> None:
    source = sampler(groups=TWO_GROUPS, global_batch_size=8)
    drawn = ids(source, 6)
    first, second = [i for i in drawn if i < 4], [i for i in drawn if i >= 4]
    assert (len(first), len(second)) == (36, 12)
    for start in range(0, 36, 4):
        assert sorted(first[start : start + 4]) == [0, 1, 2, 3]
    assert sorted(second[:6]) == sorted(second[6:]) == [4, 5, 6, 7, 8, 9]
    assert epochs(source) == [9, 2]


def test_token_budget_is_filled_first_fit() -> None:
    drawn_lengths = [6, 6, 3, 9, 2, 1, 4, 2]
    order = epoch_permutation(7, 0, 0, 8)
    lengths = np.empty(8, dtype=np.int64)
    lengths[order] = drawn_lengths
    source = sampler(lengths, (SequenceGroup(0, 8, 8),), seed=7, global_batch_tokens=10)

    def places(ids: Sequence[int]) -> list[int]:
        return [order.tolist().index(i) for i in ids]

    assert places(source.next_batch().sequence_ids) == [0, 2, 5]  # 1, 3 and 4 wait
    assert places(source.state_dict()["waiting"]) == [1, 3, 4]
    assert places(source.next_batch().sequence_ids) == [1, 4, 7]
    assert places(source.state_dict()["waiting"]) == [3, 6]
    assert places(source.next_batch().sequence_ids) == [3, 5]  # the 1 of a new epoch
    assert places(source.state_dict()["waiting"])[0] == 6


def test_full_queue_closes_the_batch() -> None:
    lengths = np.array([6] * 40 + [1], dtype=np.int64)
    groups = (SequenceGroup(0, 41, 41),)
    source = sampler(lengths, groups, global_batch_tokens=10, seed=0)
    batch = source.next_batch()
    assert 6 <= batch.num_tokens <= 10
    assert len(source.state_dict()["waiting"]) == MAX_WAITING_SEQUENCES
    assert num_drawn(source) == batch.num_sequences + MAX_WAITING_SEQUENCES


def test_sequence_as_large_as_the_budget() -> None:
    lengths = np.array([5, 5, 5], dtype=np.int64)
    source = sampler(lengths, (SequenceGroup(0, 3, 3),), global_batch_tokens=5)
    assert [source.next_batch().num_sequences for _ in range(4)] == [1, 1, 1, 1]


def test_resume_with_another_kind_of_batch_loses_nothing() -> None:
    order = ids(sampler(global_batch_size=1), 60)
    by_tokens = sampler(global_batch_tokens=12)
    seen = ids(by_tokens, 3)
    state = by_tokens.state_dict()
    assert state["waiting"]
    by_size = sampler(global_batch_size=4)
    by_size.load_state_dict(state)
    drawn = num_drawn(by_tokens)
    first = list(by_size.next_batch().sequence_ids)
    assert first[: len(state["waiting"])] == state["waiting"][:4]
    rest = max(0, 4 - len(state["waiting"]))
    assert sorted(seen + state["waiting"]) == sorted(order[:drawn])
    assert first[4 - rest :] == order[drawn : drawn + rest]


def test_long_sequences_that_an_earlier_version_held_come_next() -> None:
    source = sampler(global_batch_tokens=12)
    source.next_batch()
    state = source.state_dict()
    held = source.next_batch().sequence_ids[:2]
    resumed = sampler(global_batch_tokens=12)
    resumed.load_state_dict({**state, "held": list(held), "held_since": 0})
    assert resumed.state_dict()["waiting"] == [*held, *state["waiting"]]
    assert resumed.next_batch().sequence_ids[0] == held[0]


def test_state_is_a_copy() -> None:
    source = sampler(global_batch_tokens=12)
    source.next_batch()
    state = source.state_dict()
    before = json.dumps(state)
    ids(source, 5)
    assert json.dumps(state) == before


def test_state_of_another_seed_or_corpus_is_refused() -> None:
    state = sampler(global_batch_size=3).state_dict()
    with pytest.raises(ConfigurationError, match="resume with --seed 7"):
        sampler(global_batch_size=3, seed=8).load_state_dict(state)
    with pytest.raises(DataError, match=r"\[10\] .* \[4, 6\]"):
        sampler(groups=TWO_GROUPS, global_batch_size=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "neither of --global-batch-size and --global-batch-tokens"),
        ({"global_batch_size": 2, "global_batch_tokens": 20}, "give one"),
        ({"global_batch_size": 0}, "--global-batch-size is 0"),
        ({"global_batch_tokens": 8}, "9 tokens .* --global-batch-tokens 8"),
        ({"global_batch_size": 2, "seed": -1}, "seed .* 0 .* -1"),
    ],
)
def test_refused_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sampler(**settings)


def test_empty_corpus() -> None:
    with pytest.raises(DataError, match=r"one sequence .* 0;"):
        sampler(np.empty(0, dtype=np.int64), (), global_batch_size=2)


def test_evaluation_visits_everything_and_restarts_in_the_same_order() -> None:
    source = evaluation(num_sequences=5)
    drawn = ids(source, 4)
    assert sorted(drawn[:10]) == sorted(drawn[10:]) == list(range(10))
    source.reset()
    assert source.state_dict()["num_batches"] == 0
    assert ids(source, 4) == drawn
    assert ids(evaluation(num_sequences=4), 5) == drawn


def test_evaluation_is_shuffled_by_a_fixed_seed() -> None:
    # A change of it makes validation losses incomparable with those of earlier runs.
    assert ids(evaluation(num_sequences=10), 1) == [0, 8, 9, 3, 7, 5, 1, 2, 6, 4]


def test_a_short_evaluation_samples_the_whole_dataset() -> None:
    lengths = np.ones(10_000, dtype=np.int64)
    source = EvaluationSampler(
        lengths, (SequenceGroup(0, 10_000, 1.0),), sizes=BatchSizes.constant(num_sequences=100)
    )
    tenths = {i // 1000 for i in ids(source, 1)}
    assert tenths == set(range(10))


def test_evaluation_of_a_blend_draws_by_weight() -> None:
    drawn = ids(evaluation(TWO_GROUPS, num_sequences=8), 1)
    assert sum(i < 4 for i in drawn) == 6


def test_evaluation_within_a_token_budget_resumes() -> None:
    source = evaluation(num_tokens=10)
    ids(source, 3)
    state = source.state_dict()
    expected = ids(source, 4)
    source.load_state_dict(state)
    assert ids(source, 4) == expected


def draws(weights: tuple[float, ...], count: int) -> list[int]:
    num_drawn = [0] * len(weights)
    order = []
    for _ in range(count):
        order.append(largest_deficit(weights, num_drawn))
        num_drawn[order[-1]] += 1
    return order


@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.25), (3.0, 1.0), (1.0, 7.0, 8.0), (1.0,)])
def test_same_order_as_megatrons_blended_dataset(weights: tuple[float, ...]) -> None:
    count = 200
    dataset_index = np.zeros(count, dtype=np.int16)
    sample_index = np.zeros(count, dtype=np.int64)
    shares = np.array(weights) / sum(weights)
    helpers_cpp.build_blending_indices(
        dataset_index, sample_index, shares, len(weights), count, False
    )
    assert draws(weights, count) == dataset_index.tolist()


def test_shares_hold_in_every_range() -> None:
    weights = (0.61, 0.3, 0.09)
    order = np.array(draws(weights, 1000))
    for end in (1, 10, 100, 333, 1000):
        for dataset, weight in enumerate(weights):
            assert abs((order[:end] == dataset).sum() - weight * end) < 2


@pytest.mark.parametrize(("size", "weight"), [(0, 1.0), (3, 0.0), (3, float("nan"))])
def test_a_group_has_sequences_and_weight(size: int, weight: float) -> None:
    with pytest.raises(ConfigurationError):
        SequenceGroup(0, size, weight)
