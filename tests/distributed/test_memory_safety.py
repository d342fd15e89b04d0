"""Running out of memory in training, and memory trials before it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.gloo_pool import RankPool, pool_of
from tests.support.law import law_job
from tests.support.memory_probes import (
    BYTES_PER_TOKEN,
    IDLE_BYTES,
    Ended,
    TrialRun,
    error_without_memory,
    steps_without_memory,
    train_after_trial,
)

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("text", ["4*tp1", "tp2+2*tp1"])
def test_out_of_memory_on_one_rank_ends_the_iteration_on_no_other(text: str) -> None:
    job = law_job(4, text)
    plain = pool_of(4).run(steps_without_memory, job, -1, 0)
    runs: list[list[Ended]] = pool_of(4).run(steps_without_memory, job, 3, 0)
    for rank, ((first, second), (expected, _)) in enumerate(zip(runs, plain, strict=True)):
        assert not first.updated
        assert first.num_ranks_without_memory == 1
        assert (first.text is not None) == (rank == 3)
        assert second.updated
        assert second.num_ranks_without_memory == 0
        # The discarded try has no effect.
        np.testing.assert_array_equal(second.parameters, expected.parameters)
    text_of_failing = runs[3][0].text
    assert text_of_failing is not None
    assert "rank 3 ran out of memory in micro-batch 0 of strategy" in text_of_failing
    assert "tokens on tp1" in text_of_failing


@pytest.mark.parametrize(("text", "where"), [("tp2", "tp2"), ("cp2~", "2 cp ranks of cp2~")])
def test_out_of_memory_on_a_replica_of_several_ranks_ends_with_a_report(
    text: str, where: str
) -> None:
    # Separate ranks, because they end with operations in flight.
    pool = RankPool(2)
    try:
        errors = pool.run(error_without_memory, law_job(2, text))
    finally:
        pool.close()
    for rank, error in enumerate(errors):
        assert f"rank {rank} ran out of memory in micro-batch 0 of strategy '{text}'" in error
        assert f"tokens on {where}, with" in error
        assert "the rest of the replica" in error


@pytest.mark.parametrize("text", ["tp2pp2", "tp2+2*tp1", "cp4~"])
def test_a_trial_changes_no_bit_of_training(text: str) -> None:
    job = law_job(4, text)
    runs: list[list[TrialRun]] = [
        pool_of(4).run(train_after_trial, job, 96, 10**9, has_trial) for has_trial in (True, False)
    ]
    for tried, plain in zip(*runs, strict=True):
        assert tried.losses == plain.losses
        for mine, theirs in zip(tried.parameters, plain.parameters, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        assert all(promised == allowed for promised, allowed in tried.allowed.values())


def test_measured_memory_lowers_limits_equally_on_all_ranks() -> None:
    capacity = IDLE_BYTES + 50 * BYTES_PER_TOKEN
    runs = trial_of("tp2+2*tp1", capacity)
    assert runs[0].allowed == {"tp2+2*tp1: tp2": (96, 50), "tp2+2*tp1: tp1": (96, 50)}
    assert all(run.allowed == runs[0].allowed for run in runs)


def test_every_group_size_has_its_own_trial() -> None:
    """Of a limit that is the same for groups of 4, 2 and 1, a narrow group's rank holds most."""
    capacity = IDLE_BYTES + 50 * BYTES_PER_TOKEN
    runs: list[TrialRun] = pool_of(4).run(
        train_after_trial, law_job(4, "cp4~"), 96, capacity, True, None, True
    )
    assert runs[0].allowed == {
        "cp4~: cp4": (96, 96),  # 24 tokens a rank
        "cp4~: cp2": (96, 96),  # 48
        "cp4~: tp1": (96, 50),
    }
    assert all(run.allowed == runs[0].allowed for run in runs)


def test_out_of_memory_in_a_trial_lowers_the_limit() -> None:
    runs = trial_of("4*tp1", 10**9, fails_above=60)
    # 96 tokens do not fit, nor do three quarters of them, 72; 54 do.
    assert {run.allowed["4*tp1: tp1"] for run in runs} == {(96, 54)}


def trial_of(text: str, capacity: int, fails_above: int | None = None) -> list[TrialRun]:
    runs: list[TrialRun] = pool_of(4).run(
        train_after_trial, law_job(4, text), 96, capacity, True, fails_above
    )
    return runs
