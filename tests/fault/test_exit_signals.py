"""A warning signal: the run saves, exits with 0, and a restart gives the losses of one run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron.hydraulis.loop import entry
from tests.support.changed_settings import with_settings
from tests.support.elastic_job import losses_of
from tests.support.forked_job import Kill, run_job
from tests.support.tiny_corpus import tiny_command, write_corpus

pytestmark = pytest.mark.fault

NUM_RANKS = 2
NUM_ITERATIONS = 400


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_to_one_rank_saves_and_ends_all(number: signal.Signals, tmp_path: Path) -> None:
    save = tmp_path / "save"
    argv = tiny_command(
        write_corpus(tmp_path / "tiny"),
        tmp_path / "run",
        *("--strategy", "2*tp1", "--split", "100,0,0", "--train-iters", str(NUM_ITERATIONS)),
        *("--save", str(save), "--load", str(save), "--save-interval", "1000"),
        "--exit-signal-handler",
    )
    warned = Kill(rank=1, after="iteration        2/", number=number)
    warned_run = run_job(argv, NUM_RANKS, tmp_path / "output", kill=warned)
    warned_run.assert_succeeded()
    assert "Training finished" in warned_run.stdout
    last = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert 2 <= last < NUM_ITERATIONS
    again = [*argv, "--exit-interval", "1"]
    outcome = run_job(again, NUM_RANKS, tmp_path / "again")
    outcome.assert_succeeded()
    # The checkpoint has the last iteration before the signal, so no iteration is trained twice.
    assert sorted(losses_of(tmp_path / "run")) == list(range(1, last + 2))
    assert f"iter_{last:07d}: {last} iterations" in outcome.stdout
    # --save-interval saves as well.
    assert int((save / "latest_checkpointed_iteration.txt").read_text()) == last + 1


def test_a_time_limit_saves_and_ends(tmp_path: Path) -> None:
    save = tmp_path / "save"
    argv = tiny_command(
        write_corpus(tmp_path / "tiny"),
        tmp_path / "run",
        *("--strategy", "2*tp1", "--split", "100,0,0", "--train-iters", "100000"),
        *("--save", str(save), "--save-interval", "100000", "--exit-duration-in-mins", "1"),
    )
    program = with_settings(entry.main, exit_duration_in_mins=0.01)
    outcome = run_job(argv, NUM_RANKS, tmp_path / "output", program=program)
    outcome.assert_succeeded()
    last = int((save / "latest_checkpointed_iteration.txt").read_text())
    assert sorted(losses_of(tmp_path / "run")) == list(range(1, last + 1))
    assert "exiting program after" in outcome.stdout
