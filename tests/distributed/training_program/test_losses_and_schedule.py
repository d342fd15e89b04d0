"""What the training program computes: losses, learning rates, batches by tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler
from megatron.hydraulis.strategy import Strategy
from tests.support.training_log import scalars, validation_losses
from tests.support.training_run import (
    BATCH_SIZE,
    BATCH_TOKENS,
    PRINTED,
    ROUNDING,
    SEED,
    TRAIN_ITERS,
    Launch,
    Run,
)

pytestmark = pytest.mark.distributed


def test_losses_fall(main_run: Run) -> None:
    assert main_run.losses[-1] < main_run.losses[0] - 0.1


@pytest.mark.parametrize("other", ["pipeline_run", "data_parallel_run"])
def test_strategies_print_the_same_losses(
    main_run: Run, other: str, request: pytest.FixtureRequest
) -> None:
    run: Run = request.getfixturevalue(other)
    assert run.losses == pytest.approx(main_run.losses, rel=ROUNDING)
    assert [r.grad_norm for r in run.records] == pytest.approx(
        [r.grad_norm for r in main_run.records], rel=20 * ROUNDING
    )
    validated, expected = (validation_losses(r.outcome.stdout) for r in (run, main_run))
    assert list(expected) == ["iteration 2", "iteration 4", "iteration 4 on validation set"]
    assert validated == pytest.approx(expected, rel=ROUNDING)


def test_validation_loss_is_a_mean_over_tokens(launch: Launch) -> None:
    flags = ("--train-iters", "1", "--lr", "1e-12", "--min-lr", "0", "--eval-interval", "1")
    halves = launch("tp1", 1, *flags, "--global-batch-size", "4", "--eval-iters", "2")
    whole = launch("tp1", 1, *flags, "--global-batch-size", "8", "--eval-iters", "1")
    found, wanted = (validation_losses(run.outcome.stdout) for run in (halves, whole))
    assert found["iteration 1"] == pytest.approx(wanted["iteration 1"], rel=PRINTED)


def test_learning_rates_are_upstreams(main_run: Run) -> None:
    optimizer = SimpleNamespace(
        param_groups=[{"lr": 0.0, "weight_decay": 0.0, "max_lr": 1e-2, "min_lr": 1e-3}]
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=2e-3,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=BATCH_SIZE,
        lr_decay_steps=TRAIN_ITERS * BATCH_SIZE,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=TRAIN_ITERS * BATCH_SIZE,
        wd_incr_style="constant",
    )
    wanted = [optimizer.param_groups[0]["lr"]]
    for _ in range(TRAIN_ITERS):
        scheduler.step(increment=BATCH_SIZE)
        wanted.append(optimizer.param_groups[0]["lr"])
    assert len(set(wanted)) == TRAIN_ITERS + 1
    # As upstream does: the line shows the rate after the step, which the next update uses.
    assert [record.learning_rate for record in main_run.records] == pytest.approx(wanted[1:])
    for rank in range(4):
        assert main_run.probed(rank)["learning_rates_used"] == pytest.approx(wanted[:-1])


def test_a_token_budget_counts_sequences_and_loses_none(
    budget_run: Run, training_corpus: Corpus
) -> None:
    sampler = LengthSampler(
        training_corpus.lengths,
        training_corpus.groups,
        seed=SEED,
        sizes=BatchSizes.constant(num_tokens=BATCH_TOKENS),
    )
    strategy = Strategy.parse("2*tp1", 2)
    num_consumed = 0
    for plan, line in zip(budget_run.plans, budget_run.lines, strict=True):
        batch = sampler.next_batch()
        plan.validate(batch.lengths, strategy, lambda scheme: 128)
        num_consumed += batch.num_sequences
        assert batch.num_tokens <= BATCH_TOKENS
        assert line.num_tokens == batch.num_tokens
        assert line.global_batch_size == batch.num_sequences
        assert line.consumed_samples == num_consumed
    assert len({line.global_batch_size for line in budget_run.lines}) > 1
    found = scalars(budget_run.run_dir)
    assert list(found["batch-size"].values()) == [
        line.global_batch_size for line in budget_run.lines
    ]
    assert list(found["lm loss vs samples"]) == [line.consumed_samples for line in budget_run.lines]
    rates = [line.learning_rate for line in budget_run.lines]
    assert rates == sorted(rates, reverse=True), "the schedule must count iterations"
    assert rates[-1] == pytest.approx(1e-3, rel=PRINTED)
