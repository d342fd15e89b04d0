"""Training by samples, with batches that grow, in one piece and resumed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler
from megatron.hydraulis.loop.entry import EXIT_STATUS_OF_ERROR
from tests.distributed.training_program.test_checkpoint_resume import lengths_of
from tests.support.forked_job import run_job
from tests.support.tiny_corpus import SEQ_LENGTH, tiny_command
from tests.support.training_run import PRINTED, ROUNDING, SEED, SPLIT, Launch, Run

pytestmark = pytest.mark.distributed

STOPPED_AT = 3
SAMPLES, WARMUP, DECAY = 70, 10, 50
IN_SEQUENCES = (
    *("--train-samples", str(SAMPLES), "--rampup-batch-size", "4", "4", "24"),
    *("--global-batch-size", "16", "--lr-decay-samples", str(DECAY)),
    *("--lr-warmup-samples", str(WARMUP)),
    *("--decoupled-lr", "2e-2", "--decoupled-min-lr", "0"),
    *("--eval-interval", "6", "--eval-iters", "1", "--eval-global-batch-size", "4"),
)
SIZES_IN_SEQUENCES = [4, 4, 8, 12, 16, 16]
"""60 samples: one more batch would lead beyond the end."""

ROWS, WARMUP_ROWS = 14, 3
IN_TOKENS = (
    *("--train-samples", str(ROWS), "--step-batch-size-schedule", "0:1 200:2 500:4"),
    *("--global-batch-tokens", str(4 * SEQ_LENGTH), "--lr-warmup-samples", str(WARMUP_ROWS)),
)
STEPS_IN_TOKENS = ((0, SEQ_LENGTH), (2 * SEQ_LENGTH, 2 * SEQ_LENGTH), (5 * SEQ_LENGTH, 384))


def rates(increments: list[float], *, warmup: int, decay: int, lr: float) -> list[float]:
    """Learning rates after each batch by upstream's schedule over samples."""
    group: dict[str, Any] = {}
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),  # type: ignore[arg-type]
        init_lr=0.0,
        max_lr=lr,
        min_lr=1e-3,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=decay,
        wd_incr_style="constant",
    )
    found = []
    for increment in increments:
        scheduler.step(increment)  # type: ignore[arg-type]
        found.append(group["lr"])
    return found


def rates_of(run: Run, unit: str, *, lr: float = 1e-2) -> list[float]:
    """The rates for the batches of a run."""
    if unit == "sequences":
        increments = [float(record.num_sequences) for record in run.records]
        return rates(increments, warmup=WARMUP, decay=DECAY, lr=lr)
    increments = [record.num_tokens / SEQ_LENGTH for record in run.records]
    return rates(increments, warmup=WARMUP_ROWS, decay=ROWS, lr=lr)


def start(launch: Launch, strategy: str, *flags: str) -> Run:
    without = ("--train-iters", "--global-batch-size")
    return launch(strategy, 1 if strategy == "tp1" else 2, *flags, without=without)


@pytest.fixture(scope="module", params=["sequences", "tokens"])
def unit(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def flags(unit: str) -> tuple[str, ...]:
    return IN_SEQUENCES if unit == "sequences" else IN_TOKENS


@pytest.fixture(scope="module")
def saved(unit: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(unit)


@pytest.fixture(scope="module")
def whole(launch: Launch, flags: tuple[str, ...], saved: Path) -> Run:
    return start(launch, "2*tp1", *flags, "--save", str(saved), "--save-interval", "3")


def test_sizes_end_and_rates(whole: Run, unit: str, training_corpus: Corpus) -> None:
    records = whole.records
    if unit == "sequences":
        assert [record.num_sequences for record in records] == SIZES_IN_SEQUENCES
        assert {line.train_iters for line in whole.lines} == {len(SIZES_IN_SEQUENCES)}
    else:
        sampler = LengthSampler(
            training_corpus.lengths,
            training_corpus.groups,
            seed=SEED,
            sizes=BatchSizes(STEPS_IN_TOKENS, in_tokens=True),
        )
        consumed: list[int] = []
        while sum(consumed) < ROWS * SEQ_LENGTH:
            consumed.append(sampler.next_batch().num_tokens)
        assert [record.num_tokens for record in records] == consumed
        assert consumed[0] <= SEQ_LENGTH < 2 * SEQ_LENGTH < max(consumed) <= 4 * SEQ_LENGTH
        assert whole.lines[-1].train_iters == len(consumed)
    wanted = rates_of(whole, unit)
    assert [record.learning_rate for record in records] == pytest.approx(wanted, rel=1e-12)
    assert [line.learning_rate for line in whole.lines] == pytest.approx(wanted, rel=PRINTED)
    assert [line.global_batch_size for line in whole.lines] == [r.num_sequences for r in records]
    assert (
        f"training: {SAMPLES if unit == 'sequences' else '1,344'} {unit}, " in whole.outcome.stdout
    )
    assert "setting training iterations" not in whole.outcome.stdout, "upstream's is not true"


def test_iterations_end_training_in_batches_that_grow(launch: Launch, tmp_path: Path) -> None:
    """The rates are those of a batch of one size, before and after a restart."""
    ends = ("--train-iters", "7", "--lr-warmup-iters", "2", *IN_SEQUENCES[2:8])
    save = ("--save", str(tmp_path), "--save-interval", "4")
    whole = start(launch, "2*tp1", *ends, *save)
    assert [record.num_sequences for record in whole.records] == [4, 4, 8, 12, 16, 16, 16]
    wanted = rates([1.0] * 7, warmup=2, decay=7, lr=1e-2)
    assert [record.learning_rate for record in whole.records] == pytest.approx(wanted, rel=1e-12)
    resumed = start(launch, "tp2", *ends, "--load", str(tmp_path), "--ckpt-step", "4")
    assert [record.learning_rate for record in resumed.records] == pytest.approx(wanted[4:])
    assert resumed.losses == pytest.approx(whole.losses[4:], rel=ROUNDING)
    _, _, changed = resumed.outcome.stdout.partition("settings since")
    options = [line.split()[0] for line in changed.splitlines()[1:] if line.startswith("  --")]
    assert options == ["--save-interval", "--plan-dir", "--strategy"], "none that nobody gave"


@pytest.mark.parametrize("strategy", ["2*tp1", "tp2"])
def test_a_run_that_is_stopped_inside_the_growth_resumes_as_in_one_piece(
    launch: Launch, flags: tuple[str, ...], saved: Path, whole: Run, strategy: str
) -> None:
    load = ("--load", str(saved), "--ckpt-step", str(STOPPED_AT))
    resumed = start(launch, strategy, *flags, *load)
    before = whole.records[STOPPED_AT:]
    assert [record.iteration for record in resumed.records] == [r.iteration for r in before]
    assert [record.learning_rate for record in resumed.records] == [
        record.learning_rate for record in before
    ]
    same = lengths_of(whole)
    assert lengths_of(resumed) == {i: same[i] for i in range(STOPPED_AT, len(whole.records))}
    assert [record.consumed_samples for record in resumed.records] == [
        record.consumed_samples for record in before
    ]
    if strategy == "2*tp1":
        assert resumed.losses == whole.losses[STOPPED_AT:]
    assert resumed.losses == pytest.approx(whole.losses[STOPPED_AT:], rel=ROUNDING)
    assert [record.grad_norm for record in resumed.records] == pytest.approx(
        [record.grad_norm for record in before], rel=20 * ROUNDING
    )


@pytest.mark.parametrize("unit", ["sequences"], indirect=True)
def test_another_size_trains_the_samples_that_are_left(
    launch: Launch, whole: Run, saved: Path
) -> None:
    size, before = 18, SIZES_IN_SEQUENCES[:STOPPED_AT]
    without_ramp = (*IN_SEQUENCES[:2], *IN_SEQUENCES[6:])
    other = ("--global-batch-size", str(size), "--allow-changed-settings")
    load = ("--load", str(saved), "--ckpt-step", str(STOPPED_AT))
    resumed = start(launch, "tp1", *without_ramp, *other, *load)
    sizes = [record.num_sequences for record in resumed.records]
    assert sizes == [size] * ((SAMPLES - sum(before)) // size)


def test_a_schedule_in_samples_is_not_taken_for_one_in_iterations(
    saved: Path, whole: Run, corpus_prefix: str, tmp_path: Path
) -> None:
    argv = tiny_command(
        *(corpus_prefix, tmp_path / "run", "--strategy", "tp1", "--seed", str(SEED)),
        *("--split", SPLIT, "--global-batch-tokens", str(4 * SEQ_LENGTH), "--train-iters", "9"),
        *("--load", str(saved), "--allow-changed-settings", "--override-opt-param-scheduler"),
        without=("--global-batch-size",),
    )
    outcome = run_job(argv, 1, tmp_path / "output")
    assert outcome.statuses == (EXIT_STATUS_OF_ERROR,)
    assert "counts samples but that of this run counts iterations; give --train-samples" in (
        outcome.stderr
    )


@pytest.mark.parametrize("option", ["override", "use-checkpoint"])
def test_the_schedule_of_flags_or_checkpoint_is_used(
    launch: Launch, unit: str, flags: tuple[str, ...], saved: Path, whole: Run, option: str
) -> None:
    load = ("--load", str(saved), "--ckpt-step", str(STOPPED_AT))
    other = ("--lr", "5e-3", f"--{option}-opt-param-scheduler")
    resumed = start(launch, "tp1", *flags, *load, *other)
    lr = 1e-2 if option == "use-checkpoint" else 5e-3
    wanted = rates_of(whole, unit, lr=lr)[STOPPED_AT:]
    assert [record.learning_rate for record in resumed.records] == pytest.approx(wanted)
