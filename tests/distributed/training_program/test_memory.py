"""Memory trials before training, and running out of memory during it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.hydraulis.loop import entry
from megatron.hydraulis.runtime.executor import loss_func
from tests.support.forked_job import run_job
from tests.support.training_run import MAIN_FLAGS, ROUNDING, Launch, Run

pytestmark = pytest.mark.distributed

FAILING_RANK = 2
NUM_CALLS_BEFORE = 2
"""In training; the check of the loss function makes one of them."""


def without_memory(argv: Sequence[str], *, num_failures: int) -> None:
    """The program with a loss function that runs out of memory a few times on one rank."""
    calls = [0]

    def loss(loss_mask: Tensor, output: Tensor) -> Any:
        calls[0] += torch.is_grad_enabled()
        fails = (
            torch.is_grad_enabled()
            and NUM_CALLS_BEFORE < calls[0] <= NUM_CALLS_BEFORE + num_failures
        )
        if fails and os.environ["RANK"] == str(FAILING_RANK):
            raise torch.OutOfMemoryError("CUDA out of memory. (made up)")
        return loss_func(loss_mask, output)

    entry.main(argv, entry.UserHooks(loss_func=loss))


once: Callable[[Sequence[str]], None] = partial(without_memory, num_failures=1)
always: Callable[[Sequence[str]], None] = partial(without_memory, num_failures=1000)


def test_an_iteration_that_runs_out_of_memory_is_planned_again(
    launch: Launch, main_run: Run
) -> None:
    run = launch("tp2+2*tp1", 4, *MAIN_FLAGS, program=once)
    assert run.losses == pytest.approx(main_run.losses, rel=ROUNDING)
    lines = [line for line in run.outcome.stdout.splitlines() if "planned again" in line]
    assert len(lines) == 1
    assert f"rank {FAILING_RANK} ran out of memory in micro-batch" in lines[0]
    assert "the memory model predicted" in lines[0]
    assert "limits are now tp1:" in lines[0]


def test_running_out_of_memory_again_ends_the_run(main_run: Run, tmp_path: Path) -> None:
    argv = [*main_run.argv, "--run-dir", str(tmp_path / "run"), "--plan-dir", str(tmp_path / "p")]
    outcome = run_job(argv, 4, tmp_path / "output", program=always)
    assert outcome.statuses.count(0) == 0
    assert "again after its limit was lowered" in outcome.stderr


def test_limits_below_the_longest_sequence_end_the_run(main_run: Run, tmp_path: Path) -> None:
    argv = [*main_run.argv, "--run-dir", str(tmp_path / "run"), "--plan-dir", str(tmp_path / "p")]
    argv += ["--strategy", "4*tp1"]
    outcome = run_job(argv, 4, tmp_path / "output", program=once)
    assert outcome.statuses.count(0) == 0
    assert "planned again" in outcome.stdout
    assert "error: " in outcome.stderr
    print(outcome.stderr[-1500:])


def test_a_trial_changes_no_loss(launch: Launch, main_run: Run) -> None:
    run = launch("tp2+2*tp1", 4, *MAIN_FLAGS, "--memory-trial", "on")
    assert run.losses == main_run.losses
    lines = [line for line in run.outcome.stdout.splitlines() if line.startswith("memory trial:")]
    assert len(lines) == 2, "one line a scheme"
    assert all("GiB" in line for line in lines)
