"""Batches planned by several processes."""

import multiprocessing
import os
import random
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError, PlanError
from megatron.hydraulis.simulator.ways import (
    FEWEST_BATCHES_PER_PROCESS,
    BatchPlanning,
    TimedPlan,
)
from megatron.hydraulis.strategy import Pool, Strategy
from tests.unit.simulator.test_ways import pool, profile

NUM_PROCESSES = 2
NUM_BATCHES = NUM_PROCESSES * FEWEST_BATCHES_PER_PROCESS + 1


def batches() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randint(2, 90) for _ in range(12)] for _ in range(NUM_BATCHES)]


def without_times(timed: Sequence[TimedPlan]) -> list[tuple[object, ...]]:
    plans = [each.plan for each in timed]
    return [(plan.iteration, plan.strategy, plan.replicas, plan.predicted_time_s) for plan in plans]


class DyingCostModel(ProfileCostModel):
    """Kills the process that plans with it."""

    def overhead_ms(self, strategy: Strategy, times: CostModel | None = None) -> float:
        assert multiprocessing.parent_process() is not None
        os.kill(os.getpid(), signal.SIGKILL)
        return 0.0


def test_plans_do_not_depend_on_the_number_of_processes() -> None:
    def plans_of(planning: BatchPlanning) -> list[TimedPlan]:
        return list(planning.plans(pool(), Limits(profile()), batches()))

    alone = plans_of(BatchPlanning())
    before = multiprocessing.active_children()
    with BatchPlanning(NUM_PROCESSES) as planning:
        several = plans_of(planning)
        children = set(multiprocessing.active_children()).difference(before)
        assert len(children) == NUM_PROCESSES
        for child in children:  # before they import anything, too
            status = Path(f"/proc/{child.pid}/status").read_text()
            blocked = int(re.findall(r"SigBlk:\s*(\w+)", status)[0], 16)
            assert blocked >> (signal.SIGINT - 1) & 1
    assert without_times(several) == without_times(alone)
    assert [each.plan.iteration for each in alone] == list(range(NUM_BATCHES))
    assert min(each.cpu_s for each in several) > 0.0
    assert len(multiprocessing.active_children()) == len(before)


def test_a_batch_that_fits_nowhere_is_an_error_in_any_process() -> None:
    too_long = Pool.of(Strategy.parse("4*tp1", 4, name="short"))
    with (
        BatchPlanning(NUM_PROCESSES) as planning,
        pytest.raises(PlanError, match="sequence"),
    ):
        list(planning.plans(too_long, Limits(profile()), [*batches(), [90]]))


def test_a_killed_process_is_an_error() -> None:
    found = profile()
    dying = DyingCostModel(
        device="d", source="s", date="t", schemes=found.schemes, strategies=found.strategies
    )
    with (
        BatchPlanning(NUM_PROCESSES) as planning,
        pytest.raises(PlanError, match="one of 2 planning processes was killed"),
    ):
        list(planning.plans(pool(), Limits(dying), batches()))


def test_no_process() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 process but has 0"):
        BatchPlanning(0)
