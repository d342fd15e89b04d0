import json
from collections import Counter

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hydraulis.data.sampler import (
    MAX_WAITING_SEQUENCES,
    BatchSizes,
    LengthSampler,
    SequenceGroup,
)

length_lists = st.lists(st.integers(1, 60), min_size=1, max_size=40)
seeds = st.integers(0, 2**32)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[npt.NDArray[np.int64], tuple[SequenceGroup, ...]]:
    """Lengths, and one to three groups that partition them."""
    parts = draw(st.lists(length_lists, min_size=1, max_size=3))
    weights = draw(
        st.lists(st.floats(0.05, 20, allow_nan=False), min_size=len(parts), max_size=len(parts))
    )
    groups, first = [], 0
    for part, weight in zip(parts, weights, strict=True):
        groups.append(SequenceGroup(first, len(part), weight))
        first += len(part)
    return np.array([n for part in parts for n in part], dtype=np.int64), tuple(groups)


@settings(deadline=None)
@given(corpora(), seeds, st.integers(0, 80), st.integers(1, 25))
def test_token_budget_conserves_sequences(
    corpus: tuple[npt.NDArray[np.int64], tuple[SequenceGroup, ...]],
    seed: int,
    spare: int,
    num_batches: int,
) -> None:
    lengths, groups = corpus
    budget = int(lengths.max()) + spare
    sampler = LengthSampler(
        lengths, groups, seed=seed, sizes=BatchSizes.constant(num_tokens=budget)
    )
    consumed: list[int] = []
    for _ in range(num_batches):
        oldest = sampler.state_dict()["waiting"][:1]
        batch = sampler.next_batch()
        assert 0 < batch.num_tokens <= budget
        assert batch.lengths == tuple(lengths[list(batch.sequence_ids)])
        assert list(batch.sequence_ids[: len(oldest)]) == oldest
        consumed.extend(batch.sequence_ids)
    state = sampler.state_dict()
    waiting = state["waiting"]
    assert len(waiting) <= MAX_WAITING_SEQUENCES
    drawn_of = [g["epoch"] * g["num_sequences"] + g["position"] for g in state["order"]["groups"]]
    assert sum(drawn_of) == len(consumed) + len(waiting)

    one_by_one = LengthSampler(
        lengths, groups, seed=seed, sizes=BatchSizes.constant(num_sequences=1)
    )
    drawn = [one_by_one.next_batch().sequence_ids[0] for _ in range(len(consumed) + len(waiting))]
    assert Counter(drawn) == Counter(consumed) + Counter(waiting)


@settings(deadline=None)
@given(corpora(), seeds, st.integers(0, 80), st.integers(0, 12), st.booleans())
def test_resume_continues_the_stream(
    corpus: tuple[npt.NDArray[np.int64], tuple[SequenceGroup, ...]],
    seed: int,
    spare: int,
    num_before: int,
    by_tokens: bool,
) -> None:
    lengths, groups = corpus

    def fresh() -> LengthSampler:
        if by_tokens:
            budget = int(lengths.max()) + spare
            return LengthSampler(
                lengths, groups, seed=seed, sizes=BatchSizes.constant(num_tokens=budget)
            )
        return LengthSampler(
            lengths, groups, seed=seed, sizes=BatchSizes.constant(num_sequences=spare + 1)
        )

    uninterrupted, resumed = fresh(), fresh()
    for _ in range(num_before):
        uninterrupted.next_batch()
    resumed.next_batch()
    resumed.load_state_dict(json.loads(json.dumps(uninterrupted.state_dict())))
    assert resumed.state_dict()["num_batches"] == num_before
    for _ in range(5):
        assert resumed.next_batch() == uninterrupted.next_batch()


@settings(deadline=None)
@given(st.lists(length_lists, min_size=1, max_size=4), seeds)
def test_an_unweighted_blend_visits_everything_once_an_epoch(
    parts: list[list[int]], seed: int
) -> None:
    groups, first = [], 0
    for part in parts:
        groups.append(SequenceGroup(first, len(part), len(part)))
        first += len(part)
    lengths = np.array([n for part in parts for n in part], dtype=np.int64)
    sampler = LengthSampler(
        lengths, groups, seed=seed, sizes=BatchSizes.constant(num_sequences=first)
    )
    for _ in range(3):
        assert sorted(sampler.next_batch().sequence_ids) == list(range(first))
