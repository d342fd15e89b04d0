"""Planning ahead in a separate process, also if the process dies."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron.hydraulis.cost_model import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner import ahead as process_module
from megatron.hydraulis.planner.ahead import LookAheadPlanner, PlannerProcess, PlannerProcessDied
from megatron.hydraulis.planner.plan import IterationPlan, PlanText
from megatron.hydraulis.planner.planners import GreedyPlanner, RecordedPlans, plan_path, write_plan
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.planning import LLAMA_7B

LENGTHS = (100, 200, 3000, 800)


class ClumsyPlanner:
    """Dies, like a crashing solver, on batches with certain lengths."""

    def __init__(self, planner: GreedyPlanner, deadly: Sequence[int], parent: int) -> None:
        self.planner = planner
        self.deadly = tuple(deadly)
        self.parent = parent

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        if tuple(lengths) == self.deadly and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.planner.plan(lengths, iteration=iteration)


@pytest.fixture(scope="module")
def planner() -> GreedyPlanner:
    device = device_constants("a100-80")
    pool = Pool.of(Strategy.parse("tp4+4*tp1", 8), Strategy.parse("2*tp4", 8))
    model = AnalyticCostModel(
        shape=LLAMA_7B,
        device=device,
        cluster=device.cluster(8, 8),
    )
    return GreedyPlanner(pool, model, Limits(model, 8192))


@pytest.fixture
def ahead(planner: GreedyPlanner) -> Iterator[LookAheadPlanner]:
    look_ahead = LookAheadPlanner(planner)
    yield look_ahead
    look_ahead.close()


def kill(look_ahead: LookAheadPlanner) -> None:
    process = look_ahead._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process._process.wait()


def test_plans_of_the_process_equal_those_of_the_planner(
    ahead: LookAheadPlanner, planner: GreedyPlanner
) -> None:
    batches = [(*LENGTHS, 10 + i) for i in range(4)]
    for iteration, lengths in enumerate(batches):
        ahead.submit(iteration, lengths)
    for iteration, lengths in enumerate(batches):
        plan, wait_s = ahead.take(iteration)
        assert plan.digest == planner.plan(lengths, iteration=iteration).digest
        assert wait_s >= 0


def test_a_plan_error_is_raised_where_the_plan_is_taken(ahead: LookAheadPlanner) -> None:
    ahead.submit(0, [9000])
    ahead.submit(1, LENGTHS)
    with pytest.raises(PlanError, match="9000"):
        ahead.take(0)
    assert ahead.take(1)[0].parse().iteration == 1
    assert not ahead.is_lost


def test_a_killed_process_is_started_again_and_no_plan_is_missing(ahead: LookAheadPlanner) -> None:
    ahead.submit(0, LENGTHS)
    ahead.take(0)
    kill(ahead)
    for iteration in (1, 2):
        ahead.submit(iteration, LENGTHS)
    assert [ahead.take(iteration)[0].parse().iteration for iteration in (1, 2)] == [1, 2]
    assert ahead.num_restarts == 1
    assert not ahead.is_lost
    kill(ahead)
    for iteration in (3, 4):
        ahead.submit(iteration, LENGTHS)
    assert [ahead.take(iteration)[0].parse().iteration for iteration in (3, 4)] == [3, 4]
    assert ahead.is_lost


def test_a_batch_that_kills_every_process_is_planned_in_line(planner: GreedyPlanner) -> None:
    ahead = LookAheadPlanner(ClumsyPlanner(planner, LENGTHS, os.getpid()))
    ahead.submit(0, (5, 6))
    ahead.submit(1, LENGTHS)
    assert ahead.take(0)[0].parse().num_tokens == 11
    assert ahead.take(1)[0].parse().num_tokens == sum(LENGTHS)
    assert ahead.is_lost
    assert ahead.num_restarts == 1


def test_a_dead_process_is_distinguished_from_a_busy_one(
    planner: GreedyPlanner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a loaded machine its interpreter may still be starting.
    monkeypatch.setattr(process_module, "SECONDS_TO_STOP", 300.0)
    process = PlannerProcess(planner)
    process.close()
    with pytest.raises(PlannerProcessDied, match="status 0 before it planned iteration 8"):
        process.result(7)


def test_the_process_imports_neither_torch_nor_megatron_core() -> None:
    code = (
        "import sys, megatron.hydraulis.planner.ahead;"
        "print([m for m in ('torch', 'megatron.core', 'megatron.training') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_recorded_plans_are_replayed(planner: GreedyPlanner, tmp_path: Path) -> None:
    plans = [planner.plan((*LENGTHS, 5 + i), iteration=i) for i in range(2)]
    for iteration, plan in enumerate(plans):
        write_plan(tmp_path / "plans", iteration, plan, range(90, 90 + plan.num_sequences))
    recorded = RecordedPlans(tmp_path / "plans")
    for iteration, plan in enumerate(plans):
        found = recorded.plan((*LENGTHS, 5 + iteration), iteration=iteration)
        assert found.digest == plan.digest
        assert found.sequence_ids == tuple(range(90, 90 + plan.num_sequences))
    without_ids = plan_path(tmp_path / "plans", 1)
    without_ids.write_text(PlanText.of(plans[1]).text)  # as earlier versions wrote them
    assert recorded.plan((*LENGTHS, 6), iteration=1) == plans[1]
    with pytest.raises(PlanError, match="2 ids of"):
        write_plan(tmp_path / "plans", 0, plans[0], (1, 2))
    with pytest.raises(PlanError, match="is for other sequences than this run samples"):
        recorded.plan((*LENGTHS, 6), iteration=0)
    with pytest.raises(PlanError, match=r"iteration 3: .* was not recorded"):
        recorded.plan(LENGTHS, iteration=2)
    plan_path(tmp_path / "plans", 0).write_text('{"half')
    with pytest.raises(PlanError, match=r"iteration 1: .* cannot be read"):
        recorded.plan((*LENGTHS, 5), iteration=0)
    with pytest.raises(PlanError, match=r"there is no iteration_\*\.json in it"):
        RecordedPlans(tmp_path)
