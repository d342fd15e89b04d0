"""Recomputed activations and balanced layers in the training program."""

from __future__ import annotations

import json

import pytest

from tests.support.training_log import validation_losses
from tests.support.training_run import MAIN_FLAGS, ROUNDING, Launch

pytestmark = pytest.mark.distributed


def test_they_change_no_loss(launch: Launch) -> None:
    # A vocabulary padded so far that the output layer takes as long as two layers.
    model = ("--num-layers", "4", "--make-vocab-size-divisible-by", "2048", *MAIN_FLAGS)
    plain = launch("tp1", 1, *model)
    run = launch(
        "pp2+tp2",
        4,
        *("--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1", "--balance-pipeline-layers", *model),
    )
    assert run.losses == pytest.approx(plain.losses, rel=ROUNDING)
    assert [r.grad_norm for r in run.records] == pytest.approx(
        [r.grad_norm for r in plain.records], rel=20 * ROUNDING
    )
    validated, expected = (validation_losses(one.outcome.stdout) for one in (run, plain))
    assert validated == pytest.approx(expected, rel=ROUNDING)
    config = json.loads((run.run_dir / "config.json").read_text())
    assert config["settings"]["recompute_granularity"] == "full"
    (strategy,) = config["strategies"]
    pipeline = strategy["replicas"][0]
    layers = pipeline["layers_per_stage"]
    assert pipeline["scheme"] == f"pp2:{layers[0]},{layers[1]}"
    assert layers[0] > layers[1]
    assert {record.strategy for record in run.records} == {strategy["strategy"]}
