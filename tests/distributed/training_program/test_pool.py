"""Several strategies in one run: the losses of one strategy, log and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.loop.entry import EXIT_STATUS_OF_ERROR
from tests.support.forked_job import run_job
from tests.support.tiny_corpus import tiny_command
from tests.support.training_log import log_lines, validation_losses
from tests.support.training_run import MAIN_FLAGS, ROUNDING, TRAIN_ITERS, Launch, Run

pytestmark = pytest.mark.distributed


def _write(path: Path, content: dict[str, Any]) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def _pool(path: Path, num_ranks: int, **strategies: str) -> str:
    entries = [{"name": name, "replicas": text} for name, text in strategies.items()]
    return _write(
        path, {"num_ranks": num_ranks, "ranks_per_node": num_ranks, "strategies": entries}
    )


@pytest.fixture(scope="module")
def scheduled_run(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three strategies in turn, one of which leaves ranks idle, and owners chosen for another."""
    path = tmp_path_factory.mktemp("pool") / "pool.json"
    pool = _pool(path, 4, short="4*tp1", mixed="tp2+pp2", idle="tp2@3,1+2*idle")
    schedule = ("--strategy-schedule", "mixed, idle, short")
    owners = ("--regroup-owners-for", "mixed")
    return launch(None, 4, "--strategy-pool", pool, *schedule, *owners, *MAIN_FLAGS)


def test_a_schedule_of_strategies_gives_the_losses_of_one(
    scheduled_run: Run, main_run: Run
) -> None:
    assert scheduled_run.losses == pytest.approx(main_run.losses, rel=ROUNDING)
    assert [r.grad_norm for r in scheduled_run.records] == pytest.approx(
        [r.grad_norm for r in main_run.records], rel=20 * ROUNDING
    )
    # Evaluation is planned over the whole pool.
    validated, expected = (
        validation_losses(run.outcome.stdout) for run in (scheduled_run, main_run)
    )
    assert validated == pytest.approx(expected, rel=ROUNDING)


def test_plans_log_and_records_name_the_scheduled_strategies(scheduled_run: Run) -> None:
    names = ["mixed", "idle", "short", "mixed"]
    assert [plan.strategy for plan in scheduled_run.plans] == names
    assert [line.strategy for line in scheduled_run.lines] == names
    assert [record.strategy for record in scheduled_run.records] == names
    assert [len(record.idle_fraction) for record in scheduled_run.records] == [2, 1, 4, 2]
    table = scheduled_run.outcome.ranks[3].stdout
    for row in ("iterations of mixed", "switches of strategy", "plan wait", "plan gap"):
        assert row in table
    config = json.loads((scheduled_run.run_dir / "config.json").read_text())
    assert [strategy["strategy"] for strategy in config["strategies"]] == [
        *("4*tp1", "tp2+pp2", "tp2@3,1+2*idle"),
    ]
    assert config["strategies"][2]["idle_ranks"] == [0, 2]


def test_a_batch_that_the_forced_strategy_cannot_hold_ends_the_job(
    corpus_prefix: str, tmp_path: Path
) -> None:
    entries = [
        {"name": "narrow", "replicas": "2*tp1", "max_tokens": {"tp1": 60}},
        {"name": "wide", "replicas": "tp2"},
    ]
    content = {"num_ranks": 2, "ranks_per_node": 2, "strategies": entries}
    pool = _write(tmp_path / "pool.json", content)
    argv = tiny_command(
        corpus_prefix,
        tmp_path / "run",
        *("--strategy-pool", pool, "--strategy-schedule", "wide,narrow", "--train-iters", "2"),
        *("--global-batch-size", "64"),
        without=["--max-tokens-per-micro-batch"],
    )
    outcome = run_job(argv, 2, tmp_path / "output")
    assert not outcome.timed_out
    assert outcome.statuses[0] == EXIT_STATUS_OF_ERROR
    assert outcome.statuses[1] != 0
    (error,) = (line for line in outcome.ranks[0].stderr.splitlines() if line.startswith("error: "))
    for words in ("iteration 2", "'narrow'", "at most 60 tokens", "has 96"):
        assert words in error


def test_strategies_that_cannot_run_are_skipped_and_plans_cut_short_are_counted(
    launch: Launch, tmp_path: Path
) -> None:
    pool = _pool(tmp_path / "pool.json", 2, wide="tp2", pair="2*tp1")
    times = {"cp": 1, "pp": 1, "a_ms_per_token2": 1e-6, "b_ms_per_token": 1e-3, "c_ms": 1.0}
    rows = [{"tp": 1, "max_tokens": 128, **times}, {"tp": 2, "max_tokens": 0, **times}]
    head = {"device": "none", "source": "made up", "date": "2026-01-01", "schemes": rows}
    profile = _write(tmp_path / "profile.json", head)
    run = launch(
        None,
        2,
        *("--strategy-pool", pool, "--cost-profile", profile, "--plan-time-limit", "1e-9"),
        without=["--max-tokens-per-micro-batch"],
    )
    warnings = [
        line for line in run.outcome.stderr.splitlines() if line.startswith("warning: strategy")
    ]
    assert len(warnings) == 1
    assert "'wide' is skipped" in warnings[0]
    assert f"on tp2 it holds 0 by the cost profile {profile}" in warnings[0]
    assert {record.strategy for record in run.records} == {"pair"}
    assert [record.plan_status for record in run.records] == ["time limit"] * TRAIN_ITERS
    assert [record.num_marked_plans for record in run.records] == [1, 2, 3, 4]
    assert f"{TRAIN_ITERS} time limit" in run.outcome.stdout


def test_a_proposed_pool_trains_and_is_that_of_the_next_start(
    corpus_prefix: str, tmp_path: Path
) -> None:
    flags = ("--strategy-pool", "auto", "--train-iters", "2", "--seed", "11")
    argv = tiny_command(corpus_prefix, tmp_path / "run", *flags)
    first, second = (run_job(argv, 2, tmp_path / name) for name in ("first", "second"))
    for outcome in (first, second):
        assert outcome.statuses == (0, 0), outcome.ranks[0].stderr
    path = tmp_path / "run" / "auto_pool.json"
    assert f"kept in {path}" in first.ranks[0].stdout
    assert f"strategy pool: {path}, proposed at an earlier start" in second.ranks[0].stdout
    losses = [[line.lm_loss for line in log_lines(outcome.stdout)] for outcome in (first, second)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
