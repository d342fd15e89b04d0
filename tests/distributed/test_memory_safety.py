"""Running out of memory in training, and memory trials before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.hydraulis.errors import OutOfMemoryError
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.memory_trial import StrategyTrial
from megatron.hydraulis.strategy import Scheme
from tests.support.gloo_pool import RankPool, pool_of
from tests.support.law import law_job
from tests.support.models import Job, build_engine, packs_of_rank, use_fp64_loss

pytestmark = pytest.mark.distributed

BYTES_PER_TOKEN = 1000
IDLE_BYTES = 5000


@dataclass
class StraightMeter:
    """Memory that grows with the tokens that forward steps have seen since the restart."""

    capacity: int
    counts_own_part: bool = False
    """Tokens of this rank's part of a row, not of the row."""
    most_tokens: int = 0

    def restart(self) -> int:
        self.most_tokens = 0
        return IDLE_BYTES

    def peak_bytes(self) -> int:
        return IDLE_BYTES + BYTES_PER_TOKEN * self.most_tokens

    def capacity_bytes(self) -> int:
        return self.capacity


class WatchedForwardStep:
    """Reports tokens to a meter; on one rank runs out of memory beyond a number of tokens."""

    def __init__(
        self, meter: StraightMeter | None = None, *, fails_above: int | None = None, rank: int = 0
    ) -> None:
        self._forward_step = make_forward_step()
        self._meter = meter
        self._fails_above = fails_above if dist.get_rank() == rank else None

    def __call__(self, data_iterator: Iterator[Any], model: torch.nn.Module) -> Any:
        batch = next(data_iterator)
        num_tokens = batch.tokens.size(-1) * batch.context_size
        if self._meter is not None:
            counted = batch.tokens.size(-1) if self._meter.counts_own_part else num_tokens
            self._meter.most_tokens = max(self._meter.most_tokens, counted)
        if self._fails_above is not None and num_tokens > self._fails_above:
            raise torch.OutOfMemoryError("CUDA out of memory. (made up)")
        return self._forward_step(iter([batch]), model)


@dataclass(frozen=True)
class Ended:
    """An iteration's end on one rank."""

    updated: bool
    num_ranks_without_memory: int
    text: str | None
    parameters: np.ndarray


def steps_without_memory(job: Job, failing_rank: int, fails_above: int) -> list[Ended]:
    """On every rank: two tries of the first iteration; memory runs out in the first only."""
    use_fp64_loss()
    engine = build_engine(job)
    strategy = engine.pool.strategies[0]
    mine = packs_of_rank(strategy, job.assignments[0], job.batches[0], engine.rank, 1)
    ends = []
    for limit in (fails_above, None):
        step = WatchedForwardStep(fails_above=limit, rank=failing_rank)
        outcome = engine.train_step(strategy.name, mine, step, next_strategy=strategy.name)
        ends.append(
            Ended(
                outcome.updated,
                outcome.num_ranks_without_memory,
                None if outcome.out_of_memory is None else outcome.out_of_memory.text,
                engine.shards.parameters.numpy().copy(),
            )
        )
    engine.close()
    return ends


def error_without_memory(job: Job) -> str:
    """On every rank of a replica with several ranks: the error of the rank without memory.

    All ranks fail in the same way, so that none waits.
    """
    engine = build_engine(job)
    strategy = engine.pool.strategies[0]
    mine = packs_of_rank(strategy, job.assignments[0], job.batches[0], engine.rank, 1)
    step = WatchedForwardStep(fails_above=0, rank=engine.rank)
    try:
        engine.train_step(strategy.name, mine, step)
    except OutOfMemoryError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class TrialRun:
    """Result of a memory trial on one rank."""

    allowed: dict[str, tuple[int, int]]
    """By scheme: the limit before and after."""
    parameters: tuple[np.ndarray, ...]
    losses: tuple[float, ...]


def train_after_trial(
    job: Job,
    limit: int,
    capacity: int,
    has_trial: bool,
    fails_above: int | None = None,
    counts_own_part: bool = False,
) -> TrialRun:
    """On every rank: all iterations of a job, with or without a trial of all strategies first."""
    use_fp64_loss()
    engine = build_engine(job)
    allowed: dict[str, tuple[int, int]] = {}
    before = torch.random.get_rng_state()
    if has_trial:
        meter = StraightMeter(capacity, counts_own_part)
        for strategy in engine.pool.strategies[: len(job.strategies)]:

            def limit_of(scheme: Scheme) -> int:
                return limit // scheme.token_quantum * scheme.token_quantum

            trial = StrategyTrial(
                engine=engine,
                strategy=strategy,
                forward_step=WatchedForwardStep(meter, fails_above=fails_above),
                meter=meter,
                longest_tokens=40,
                vocab_size=job.model.vocab_size,
            )
            for result in trial.results(limit_of):
                key = f"{result.strategy}: {result.scheme}"
                allowed[key] = (result.promised_tokens, result.allowed_tokens)
    assert torch.equal(before, torch.random.get_rng_state())
    parameters, losses = [], []
    for which, assignment, batch in zip(job.schedule, job.assignments, job.batches, strict=True):
        strategy = engine.pool.strategies[which]
        mine = packs_of_rank(strategy, assignment, batch, engine.rank, job.pad_multiple)
        outcome = engine.train_step(strategy.name, mine, make_forward_step())
        parameters.append(engine.shards.parameters.numpy().copy())
        losses.append(outcome.loss.mean)
    engine.close()
    return TrialRun(allowed, tuple(parameters), tuple(losses))


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
