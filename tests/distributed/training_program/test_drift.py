"""``--report-drift``: the times of a real run are compared with the profile, updates stay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.hydraulis.cost_model import Coefficients, ProfileCostModel
from megatron.hydraulis.cost_model.profile import ProfiledScheme
from megatron.hydraulis.strategy import Scheme
from tests.support.training_run import Launch

pytestmark = pytest.mark.distributed


def test_drift_is_named_with_a_trace_too(launch: Launch, tmp_path: Path) -> None:
    row = ProfiledScheme(
        scheme=Scheme(),
        # No machine can match it.
        coefficients=Coefficients(a_ms_per_token2=0.0, b_ms_per_token=0.0, c_ms=1e5),
        max_tokens=96,
    )
    profile = ProfileCostModel(device="none", source="made up", date="2026-01-02", schemes=(row,))
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.to_json()))
    flags = (
        "--cost-profile",
        str(path),
        "--max-tokens-per-micro-batch",
        "96",
        "--train-iters",
        "7",
    )
    run = launch("2*tp1", 2, *flags, "--report-drift", "0.1", "--trace", str(tmp_path / "trace"))
    assert "cost profile: tp1 takes 0.00 times the predicted time" in run.outcome.ranks[0].stdout
    assert "cost profile: tp1" not in run.outcome.ranks[1].stdout
    assert (tmp_path / "trace" / "trace.json").exists()
    assert run.losses == launch("2*tp1", 2, *flags).losses
