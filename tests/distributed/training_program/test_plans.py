"""Plans made ahead, in line and replayed give the same run, and no rank waits forever."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.hydraulis.loop import entry
from megatron.hydraulis.planner.planners import CertifiedPlanner
from tests.support.forked_job import run_job
from tests.support.training_run import Launch, Run

pytestmark = pytest.mark.distributed

STRATEGY = "2*tp1"


@pytest.fixture(scope="module")
def ahead_run(launch: Launch) -> Run:
    return launch(STRATEGY, 2)


def digests(folder: Path) -> list[str]:
    """Recorded plans without their planning times."""
    plans = []
    for path in sorted(folder.glob("iteration_*.json")):
        plan = json.loads(path.read_text())
        plan.pop("plan_time_s", None)
        for stage in ("dispatch", "packing"):
            if plan.get(stage):
                plan[stage].pop("seconds", None)
        plans.append(json.dumps(plan, sort_keys=True))
    return plans


def test_planning_in_line_gives_the_same_plans_and_losses(launch: Launch, ahead_run: Run) -> None:
    in_line = launch(STRATEGY, 2, "--plan-ahead", "0")
    assert digests(in_line.plan_dir) == digests(ahead_run.plan_dir) != []
    assert in_line.losses == ahead_run.losses


def test_recorded_plans_are_replayed_without_a_planner(
    launch: Launch, ahead_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*args: object, **kwargs: object) -> None:
        raise AssertionError("a replayed run asked the planner")

    monkeypatch.setattr(CertifiedPlanner, "plan", plan)
    replayed = launch(STRATEGY, 2, "--replay-plans", str(ahead_run.plan_dir))
    assert replayed.losses == ahead_run.losses
    assert digests(replayed.plan_dir) == digests(ahead_run.plan_dir)


def test_a_planner_that_crashes_ends_the_job_on_every_rank(
    launch: Launch, ahead_run: Run, tmp_path: Path
) -> None:
    def crashing(argv: Sequence[str]) -> None:
        def plan(self: object, lengths: object, *, iteration: int = 0) -> None:
            raise ZeroDivisionError("no such thing")

        CertifiedPlanner.plan = plan  # type: ignore[assignment, method-assign]  # in a forked process
        entry.main(argv)

    argv = [
        str(tmp_path / "run") if word == str(ahead_run.run_dir) else word
        for word in ahead_run.argv
        if word not in ("--plan-dir", str(ahead_run.plan_dir))
    ]
    outcome = run_job(
        [*argv, "--plan-ahead", "0"], 2, tmp_path / "output", program=crashing, ends_others=False
    )
    assert not outcome.timed_out
    assert all(status != 0 for status in outcome.statuses)
    assert "ZeroDivisionError: no such thing" in outcome.stderr


def test_the_wait_for_a_plan_is_recorded(ahead_run: Run) -> None:
    assert len(ahead_run.records) == len(ahead_run.lines) > 1
    # The first plan waits for the process to start; later ones are ready.
    first, *others = (record.plan_wait_s for record in ahead_run.records)
    assert min(others) < first
    assert all(record.plan_fetch_s > 0.0 for record in ahead_run.records)


def test_a_row_quantum_changes_rows_and_no_losses(launch: Launch, ahead_run: Run) -> None:
    rounded = launch("cp2~", 2, "--row-quantum-tokens", "32")
    assert rounded.losses == pytest.approx(ahead_run.losses, rel=1e-6)
    plans = [json.loads(path.read_text()) for path in sorted(rounded.plan_dir.glob("*.json"))]
    sizes = {
        row
        for plan in plans
        for micro_batch in plan["replicas"][0]["micro_batches"]
        for row in micro_batch["rows"]
    }
    limit = max(sizes)
    assert {size for size in sizes if size % 32} <= {limit, limit // 2}
    before = ahead_run.records
    assert all(
        record.padding_fraction > other.padding_fraction
        for record, other in zip(rounded.records, before, strict=True)
    )
    replayed = launch("cp2~", 2, "--replay-plans", str(rounded.plan_dir))
    assert replayed.losses == rounded.losses
    assert digests(replayed.plan_dir) == digests(rounded.plan_dir)
