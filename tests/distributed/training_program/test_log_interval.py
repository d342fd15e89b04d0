"""A line of the log for several iterations, and the times of an iteration's parts."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.support.training_log import scalars
from tests.support.training_run import (
    BATCH_TOKENS,
    PRINTED,
    Launch,
    Run,
    floating_point_operations,
)

pytestmark = pytest.mark.distributed

TIMERS = ("forward-backward", "all-grads-sync", "params-all-gather", "optimizer")


@pytest.fixture(scope="module")
def interval_run(launch: Launch) -> Run:
    """Batches of varying size, one line for two iterations."""
    return launch(
        *("2*tp1", 2, "--global-batch-tokens", str(BATCH_TOKENS), "--log-interval", "2"),
        *("--timing-log-level", "1", "--log-timers-to-tensorboard"),
        without=["--global-batch-size"],
    )


def test_a_line_shows_means_over_its_iterations(interval_run: Run) -> None:
    lines, records, plans = interval_run.lines, interval_run.records, interval_run.plans
    # Upstream also prints the first iteration, which does not start a new interval.
    covered = {1: slice(0, 1), 2: slice(0, 2), 4: slice(2, 4)}
    assert [line.iteration for line in lines] == list(covered)
    for line in lines:
        its = records[covered[line.iteration]]
        assert line.lm_loss == pytest.approx(np.mean([r.lm_loss for r in its]), rel=PRINTED)
        assert line.num_tokens == round(np.mean([r.num_tokens for r in its]))
        assert line.global_batch_size == its[-1].num_sequences
        assert line.consumed_samples == its[-1].consumed_samples
    found = scalars(interval_run.run_dir)
    for iteration in (2, 4):
        operations = [floating_point_operations(plan) for plan in plans[covered[iteration]]]
        assert operations[0] != pytest.approx(operations[1], rel=1e-3)
        measured = found["throughput"][iteration] * found["iteration-time"][iteration] * 1e12 * 2
        assert measured == pytest.approx(np.mean(operations), rel=1e-5)


def test_times_of_the_parts_are_printed_and_written_on_request(
    interval_run: Run, budget_run: Run
) -> None:
    line = re.compile(r"^ +([a-z-]+) \.+: \(([\d.]+), ([\d.]+)\)$", re.MULTILINE)
    printed = line.findall(interval_run.outcome.stdout + interval_run.outcome.stderr)
    found = scalars(interval_run.run_dir)
    for name in TIMERS:
        times = [(float(least), float(most)) for known, least, most in printed if known == name]
        assert all(0 < least <= most for least, most in times), name
        if name == "params-all-gather":
            # Only if no earlier optimizer step knew the next strategy, as at the beginning.
            assert 1 <= len(times) <= len(interval_run.lines), name
            assert 1 in found[f"{name}-time"]
        else:
            assert len(times) == len(interval_run.lines), name
            assert sorted(found[f"{name}-time"]) == [1, 2, 4], name
        assert min(found[f"{name}-time"].values()) > 0, name
    quiet = budget_run.outcome.stdout + budget_run.outcome.stderr
    assert not any(known in TIMERS for known, _, _ in line.findall(quiet))
