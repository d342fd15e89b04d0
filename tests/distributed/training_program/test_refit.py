"""``--refit-cost-profile``: times of a real run reach the planner, and the next run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.hydraulis.cost_model import Coefficients, ProfileCostModel
from megatron.hydraulis.cost_model.profile import ProfiledScheme
from megatron.hydraulis.observability.records import REFITTED_PROFILE_FILE_NAME
from megatron.hydraulis.strategy import Scheme
from tests.support.training_run import Launch

pytestmark = pytest.mark.distributed

STRATEGY, NUM_RANKS = "2*tp1", 2
NUM_ITERATIONS = 12
PROFILED_MS = 1e5
"""Of every micro-batch, by a profile that no machine can match."""
SMALL_BATCHES = ("--max-tokens-per-micro-batch", "96")


@pytest.fixture
def slow_profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    row = ProfiledScheme(
        scheme=Scheme(),
        coefficients=Coefficients(a_ms_per_token2=0.0, b_ms_per_token=0.0, c_ms=PROFILED_MS),
        max_tokens=96,
    )
    profile = ProfileCostModel(device="none", source="made up", date="2026-01-02", schemes=(row,))
    path.write_text(json.dumps(profile.to_json()))
    return path


@pytest.mark.parametrize("plan_ahead", [0, 2])
def test_plans_follow_measured_times_and_updates_do_not(
    launch: Launch, slow_profile: Path, plan_ahead: int
) -> None:
    flags = (
        *("--cost-profile", str(slow_profile), "--train-iters", str(NUM_ITERATIONS)),
        *("--plan-ahead", str(plan_ahead), *SMALL_BATCHES),
    )
    run = launch(STRATEGY, NUM_RANKS, *flags, "--refit-cost-profile")
    predicted_ms = [plan.predicted_time_s * 1e3 for plan in run.plans]
    # Until the refit every micro-batch is predicted to take minutes, as in the profile.
    assert min(predicted_ms[: 1 + plan_ahead]) >= PROFILED_MS
    assert predicted_ms[-1] < PROFILED_MS / 10
    output = run.outcome.ranks[0].stdout
    assert "cost profile: tp1 takes 0.00 times the profiled time" in output
    assert "cost profile: tp1" not in run.outcome.ranks[1].stdout
    refitted = ProfileCostModel.read(run.run_dir / REFITTED_PROFILE_FILE_NAME)
    assert refitted.max_tokens(Scheme()) == 96
    assert 0.0 < refitted.coefficients(Scheme()).time_ms([96]) < PROFILED_MS / 10

    plain = launch(STRATEGY, NUM_RANKS, *flags)
    assert min(plan.predicted_time_s * 1e3 for plan in plain.plans) >= PROFILED_MS
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    assert not (plain.run_dir / REFITTED_PROFILE_FILE_NAME).exists()


def test_with_a_trace(launch: Launch, tmp_path: Path) -> None:
    run = launch(
        "pp2", NUM_RANKS, "--refit-cost-profile", "--trace", str(tmp_path / "trace"), *SMALL_BATCHES
    )
    assert (tmp_path / "trace" / "trace.json").exists()
    assert (run.run_dir / REFITTED_PROFILE_FILE_NAME).exists()
