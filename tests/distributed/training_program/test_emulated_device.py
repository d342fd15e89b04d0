"""--emulate-device: the whole program on modelled times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.training_run import TRAIN_ITERS, Launch

pytestmark = pytest.mark.distributed

SCALE = 0.25
C_MS = 400.0


def _row(tp: int, pp: int) -> dict[str, Any]:
    times = {"a_ms_per_token2": 1e-5, "b_ms_per_token": 1e-2, "c_ms": C_MS}
    return {"tp": tp, "cp": 1, "pp": pp, **times, "max_tokens": 512}


def test_iterations_take_at_least_their_modelled_time_and_keep_their_tokens(
    launch: Launch, tmp_path: Path
) -> None:
    profile = tmp_path / "profile.json"
    head = {"device": "imagined", "source": "made up", "date": "2026-01-01"}
    profile.write_text(json.dumps(head | {"schemes": [_row(1, 1), _row(1, 2)]}))
    run = launch(
        *("tp1+pp2", 3, "--emulate-device", str(profile), "--emulate-scale", str(SCALE)),
        without=["--max-tokens-per-micro-batch"],
    )
    assert len(run.records) == TRAIN_ITERS
    for record, plan in zip(run.records, run.plans, strict=True):
        # Neither tokens nor times of a plan know that only the beginnings of rows are run.
        assert record.num_tokens == plan.num_tokens > 40
        assert record.predicted_time_s == plan.predicted_time_s
        assert plan.predicted_time_s > SCALE * C_MS / 1e3
        assert record.iteration_time_s >= record.predicted_time_s
    notices = [
        line
        for line in run.outcome.stderr.splitlines()
        if line.startswith("warning: emulated device: forward and backward")
    ]
    assert len(notices) == 1
    assert "modelled for imagined (made up, 2026-01-01) times 0.25" in notices[0]
    assert "losses" in notices[0]
