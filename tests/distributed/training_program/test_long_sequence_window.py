"""Long sequences that wait for others: resumed bit by bit, and under another strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler
from megatron.hydraulis.loop.entry import EXIT_STATUS_OF_ERROR
from tests.distributed.training_program.test_checkpoint_resume import lengths_of
from tests.support.forked_job import run_job
from tests.support.tiny_corpus import SEQ_LENGTH, tiny_command
from tests.support.training_run import ROUNDING, SEED, SPLIT, TRAIN_ITERS, Launch, Run

pytestmark = pytest.mark.distributed

WINDOW, SAVED_AT, BUDGET = 2, 3, 3 * SEQ_LENGTH
FLAGS = ("--global-batch-tokens", str(BUDGET), "--long-sequence-window", str(WINDOW))


def start(launch: Launch, strategy: str, *flags: str) -> Run:
    num_ranks = 1 if strategy == "tp1" else 2
    return launch(strategy, num_ranks, *FLAGS, *flags, without=("--global-batch-size",))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def whole(launch: Launch, saved: Path) -> Run:
    return start(launch, "2*tp1", "--save", str(saved), "--save-interval", str(SAVED_AT))


def test_batches_are_those_of_the_sampler(whole: Run, training_corpus: Corpus) -> None:
    def lengths(window: int) -> dict[int, list[int]]:
        sampler = LengthSampler(
            training_corpus.lengths,
            training_corpus.groups,
            seed=SEED,
            sizes=BatchSizes.constant(num_tokens=BUDGET),
            long_sequence_window=window,
        )
        found = {}
        for iteration in range(TRAIN_ITERS):
            if iteration == SAVED_AT and window:
                assert sampler.num_held, "a checkpoint without held sequences proves nothing"
            found[iteration] = sorted(sampler.next_batch().lengths)
        return found

    assert lengths_of(whole) == lengths(WINDOW) != lengths(0)
    assert "may wait for others, at most 2 iterations" in whole.outcome.ranks[0].stdout


@pytest.mark.parametrize("strategy", ["2*tp1", "tp2", "tp1"])
def test_a_resumed_run_is_that_in_one_piece(
    launch: Launch, whole: Run, saved: Path, strategy: str
) -> None:
    resumed = start(launch, strategy, "--load", str(saved), "--ckpt-step", str(SAVED_AT))
    before = lengths_of(whole)
    assert lengths_of(resumed) == {i: before[i] for i in range(SAVED_AT, TRAIN_ITERS)}
    assert resumed.losses == pytest.approx(whole.losses[SAVED_AT:], rel=ROUNDING)
    if strategy == "2*tp1":
        assert resumed.losses == whole.losses[SAVED_AT:]


def test_another_window_is_a_change_to_be_allowed(
    launch: Launch, whole: Run, saved: Path, corpus_prefix: str, tmp_path: Path
) -> None:
    argv = tiny_command(
        *(corpus_prefix, tmp_path / "run", "--strategy", "tp1", "--seed", str(SEED)),
        *("--split", SPLIT, "--train-iters", str(TRAIN_ITERS), *FLAGS[:2]),
        *("--load", str(saved), "--ckpt-step", str(SAVED_AT)),
        without=("--global-batch-size",),
    )
    outcome = run_job(argv, 1, tmp_path / "output")
    assert outcome.statuses == (EXIT_STATUS_OF_ERROR,)
    assert "--long-sequence-window 2 -> 0" in outcome.stderr
    allowed = start(
        launch,
        *("tp1", "--long-sequence-window", "0", "--allow-changed-settings"),
        *("--load", str(saved), "--ckpt-step", str(SAVED_AT)),
    )
    assert len(allowed.losses) == TRAIN_ITERS - SAVED_AT
