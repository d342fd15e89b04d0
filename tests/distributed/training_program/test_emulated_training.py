"""benchmarks.emulated_training: the whole program with modelled times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import emulated_training
from tests.support.training_run import TRAIN_ITERS, Launch

pytestmark = pytest.mark.distributed

SCALE = 0.25
C_MS = 400.0
A800 = Path(__file__).parents[3] / "examples" / "cost_profile_llama32b_a800.json"


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
        program=emulated_training.main,
        without=["--max-tokens-per-micro-batch"],
    )
    assert len(run.records) == TRAIN_ITERS
    for record, plan in zip(run.records, run.plans, strict=True):
        # A plan's tokens and times are those of whole rows, although only their beginnings are run.
        assert record.num_tokens == plan.num_tokens > 40
        assert record.predicted_time_s == plan.predicted_time_s
        assert plan.predicted_time_s > SCALE * C_MS / 1e3
    # A single iteration may take less on the rank that writes records, if that starts it last.
    measured_s = sum(record.iteration_time_s for record in run.records)
    assert measured_s > 0.9 * sum(plan.predicted_time_s for plan in run.plans)
    notices = [
        line
        for line in run.outcome.stderr.splitlines()
        if line.startswith("warning: emulated device: forward and backward")
    ]
    assert len(notices) == 1
    assert "modelled for imagined (made up, 2026-01-01) times 0.25" in notices[0]
    assert "losses" in notices[0]
    (note,) = json.loads((run.run_dir / "config.json").read_text())["notes"]
    assert "losses" in note


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--emulate-scale", "nan"], "scaled by a positive number but the factor is nan"),
        (["--cost-profile=other.json"], "no --cost-profile"),
        (["--memory-trial", "on"], "no --memory-trial on"),
        (["--memory-trial=on"], "no --memory-trial on"),
    ],
)
def test_flags_that_contradict_an_emulated_device_are_refused(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        emulated_training.main(["--emulate-device", str(A800), *flags])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_a_rank_with_a_device_does_not_emulate_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit):
        emulated_training.main(["--emulate-device", str(A800)])
    assert "set CUDA_VISIBLE_DEVICES=''" in capsys.readouterr().err
