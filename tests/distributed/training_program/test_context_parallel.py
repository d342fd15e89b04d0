"""Context parallelism in the training program: the same losses, and what plans and log say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.training_log import validation_losses
from tests.support.training_run import MAIN_FLAGS, ROUNDING, Launch, Run

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def context_run(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Strategies with cp, one beside a pipeline, and one without, in turn."""
    strategies = {"ring": "tp2cp2", "mixed": "cp2+pp2", "short": "4*tp1"}
    pool = tmp_path_factory.mktemp("pool") / "pool.json"
    entries = [{"name": name, "replicas": text} for name, text in strategies.items()]
    pool.write_text(json.dumps({"num_ranks": 4, "ranks_per_node": 4, "strategies": entries}))
    schedule = ("--strategy-schedule", ",".join(strategies))
    return launch(None, 4, "--strategy-pool", str(pool), *schedule, *MAIN_FLAGS)


def test_losses_are_those_without_context_parallelism(context_run: Run, main_run: Run) -> None:
    assert context_run.losses == pytest.approx(main_run.losses, rel=ROUNDING)
    assert [r.grad_norm for r in context_run.records] == pytest.approx(
        [r.grad_norm for r in main_run.records], rel=20 * ROUNDING
    )
    validated, expected = (
        validation_losses(run.outcome.stdout) for run in (context_run, main_run)
    )
    assert validated == pytest.approx(expected, rel=ROUNDING)
