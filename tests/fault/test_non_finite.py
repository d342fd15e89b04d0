"""Non-finite gradients: updates are skipped on all ranks, up to a limit."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.hydraulis.checkpoint.manifest import Manifest
from megatron.hydraulis.loop import entry
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import loss_func
from tests.support.forked_job import run_job
from tests.support.tiny_corpus import tiny_command, write_corpus
from tests.support.training_log import log_lines

pytestmark = pytest.mark.fault

NUM_RANKS, CULPRIT = 2, 1
FIRST_BAD = 2
NUM_ALLOWED = 2


def _program(argv: Sequence[str]) -> None:
    """Training whose gradients on one rank are NaN from the second iteration on; every rank
    prints what it owns before each iteration."""
    iterations: list[int] = []

    class PrintingEngine(RuntimeEngine):
        def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
            iterations.append(0)
            state = hashlib.sha256()
            for flat in (
                self.shards.parameters,
                self.optimizer.exp_avg,
                self.optimizer.exp_avg_sq,
                self.optimizer.num_steps.reshape(1),
            ):
                state.update(flat.contiguous().numpy().tobytes())
            rate = self.optimizer.param_groups[0]["lr"]
            print("STATE", json.dumps([len(iterations), state.hexdigest(), rate]))
            return super().forward_backward(*args, **kwargs)

    def loss(mask: torch.Tensor, output: torch.Tensor) -> Any:
        if len(iterations) >= FIRST_BAD and os.environ["RANK"] == str(CULPRIT):
            output = output + torch.sqrt(output - output)  # 0 with an infinite gradient
        return loss_func(mask, output)

    entry.main(argv, entry.UserHooks(loss_func=loss, engine=PrintingEngine))


def test_updates_are_skipped_and_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    save = tmp_path / "save"
    argv = tiny_command(
        write_corpus(tmp_path / "tiny"),
        tmp_path / "run",
        *("--strategy", "2*tp1", "--split", "100,0,0", "--train-iters", "100"),
        *("--skip-nan-iterations", "--max-skipped-in-a-row", str(NUM_ALLOWED)),
        *("--save", str(save), "--save-interval", "3"),
    )
    outcome = run_job(argv, NUM_RANKS, tmp_path / "output", program=_program)
    assert not outcome.timed_out
    assert outcome.ranks[0].status == entry.EXIT_STATUS_OF_ERROR, outcome.stderr
    for rank in outcome.ranks.values():
        states = [json.loads(line) for line in re.findall(r"^STATE (.*)$", rank.stdout, re.M)]
        by_iteration = {iteration: rest for iteration, *rest in states}
        assert sorted(by_iteration) == [1, 2, 3, 4]
        assert by_iteration[1] != by_iteration[2]
        assert by_iteration[2] == by_iteration[3] == by_iteration[4]
    assert [(line.num_skipped, line.num_nan) for line in log_lines(outcome.stdout)] == [
        (0, 0),
        (1, 0),
        (1, 0),
    ]
    warnings = re.findall(r"^warning: iteration (\d+) is skipped: .*$", outcome.stdout, re.M)
    assert warnings == ["2", "3"]
    (error,) = re.findall(r"^error: .*$", outcome.stderr, re.M)
    assert "iteration 4: the gradient norm is nan, the loss is finite" in error
    assert "iteration 3 in a row and --max-skipped-in-a-row is 2" in error
    # Eight sequences of the batch, each with its place in the data.
    assert len(re.findall(r"\d+ \(", error)) == 8
    # The count survives restarts; otherwise a job that its launcher restarts would never end.
    state = Manifest.read(save / "iter_0000003").state
    assert (state["num_skipped"], state["num_skipped_in_a_row"]) == (2, 2)
