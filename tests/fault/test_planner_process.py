"""Training gets its plans if the planner process is killed, stopped or stuck in the solver."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner import ahead as process_module
from megatron.hydraulis.planner.ahead import LookAheadPlanner, PlannerProcess, PlannerProcessHung
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.planning import TableCostModel

LENGTHS = (100, 200, 3000, 800)
# For a process that will certainly not answer.
SHORT_S = 0.2
HOURS_S = 1e4


def greedy() -> GreedyPlanner:
    return GreedyPlanner(Pool.of(Strategy.parse("tp2+2*tp1", 4)), TableCostModel())


@dataclass
class Moody:
    """Hangs or dies on batches of some lengths, except in the process that made it."""

    slept_on: tuple[int, ...] = ()
    killed_by: tuple[int, ...] = ()
    home: int = field(default_factory=os.getpid)

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        if os.getpid() != self.home:
            if tuple(lengths) == self.slept_on:
                time.sleep(HOURS_S)
            if tuple(lengths) == self.killed_by:
                os.kill(os.getpid(), signal.SIGSEGV)
        return GREEDY.plan(lengths, iteration=iteration)


GREEDY = greedy()


class Forbidden:
    """Plans only in a child process: in the training process it would kill training."""

    def __init__(self, planner: Moody) -> None:
        self.planner = planner

    def plan(self, lengths: Sequence[int], *, iteration: int = 0) -> IterationPlan:
        assert os.getpid() != self.planner.home
        return self.planner.plan(lengths, iteration=iteration)


@pytest.fixture
def ahead() -> Iterator[LookAheadPlanner]:
    look_ahead = LookAheadPlanner(greedy())
    yield look_ahead
    look_ahead.close()


def process_of(look_ahead: LookAheadPlanner) -> PlannerProcess:
    process = look_ahead._process
    assert process is not None
    return process


def stop(look_ahead: LookAheadPlanner) -> subprocess.Popen[bytes]:
    """Stop the process; its successors wait longer, so that a slow machine changes nothing."""
    process = process_of(look_ahead)
    os.kill(process.pid, signal.SIGSTOP)
    process._answer_limit_s = SHORT_S
    return process._process


def test_a_stopped_process_is_replaced_and_no_plan_is_missing(
    ahead: LookAheadPlanner, caplog: pytest.LogCaptureFixture
) -> None:
    ahead.submit(0, LENGTHS)
    ahead.take(0)
    stopped = stop(ahead)
    for iteration in (1, 2):
        ahead.submit(iteration, LENGTHS)
    assert [ahead.take(iteration)[0].parse().iteration for iteration in (1, 2)] == [1, 2]
    assert (ahead.num_restarts, ahead.is_lost) == (1, False)
    assert stopped.returncode == -signal.SIGKILL  # it is not left behind
    assert "has not answered for 0.2 s and iteration 2 waits for its plan" in caplog.text
    assert "it is restarted" in caplog.text
    stop(ahead)
    ahead.submit(3, LENGTHS)
    assert ahead.take(3)[0].digest == greedy().plan(LENGTHS, iteration=3).digest
    assert ahead.is_lost
    assert "again: planning continues in the training process with GreedyPlanner" in caplog.text


def test_a_killed_process_after_a_stopped_one_ends_planning_ahead(ahead: LookAheadPlanner) -> None:
    stop(ahead)
    ahead.submit(0, LENGTHS)
    assert ahead.take(0)[0].parse().iteration == 0
    os.kill(process_of(ahead).pid, signal.SIGKILL)
    ahead.submit(1, LENGTHS)
    assert ahead.take(1)[0].parse().iteration == 1
    assert ahead.is_lost


def test_a_planner_stuck_in_its_solver_does_not_plan_in_the_training_process() -> None:
    planner = Forbidden(Moody(slept_on=LENGTHS))
    ahead = LookAheadPlanner(planner, stand_in=greedy(), grace_s=SHORT_S)
    for iteration in range(2):
        ahead.submit(iteration, LENGTHS)
    plans = [ahead.take(iteration)[0].parse() for iteration in range(2)]
    assert [plan.iteration for plan in plans] == [0, 1]
    assert {plan.dispatch.status for plan in plans if plan.dispatch is not None} == {"greedy"}
    assert ahead.is_lost


def test_a_planner_whose_solver_crashes_does_not_plan_in_the_training_process() -> None:
    planner = Forbidden(Moody(killed_by=LENGTHS))
    ahead = LookAheadPlanner(planner, stand_in=greedy())
    ahead.submit(0, LENGTHS)
    assert ahead.take(0)[0].parse().num_sequences == len(LENGTHS)
    assert ahead.is_lost
    assert ahead.num_restarts == 1


def test_planning_without_a_process_uses_the_planner_directly() -> None:
    with_limit = LookAheadPlanner(greedy(), in_process=False, stand_in=Forbidden(Moody()))
    with_limit.submit(0, LENGTHS)
    assert with_limit.take(0)[0].parse().num_sequences == len(LENGTHS)
    assert not with_limit.is_lost


def test_two_processes_are_lost_before_other_ranks_stop_waiting() -> None:
    process = process_of(ahead := LookAheadPlanner(greedy(), timeout_s=60.0))
    assert process._answer_limit_s is not None
    assert 2 * process._answer_limit_s < 60.0
    ahead.close()


def test_the_wait_follows_from_the_time_limit() -> None:
    process = process_of(ahead := LookAheadPlanner(greedy(), time_limit_s=2.5, grace_s=40.0))
    assert process._answer_limit_s == 42.5
    ahead.close()


def test_answers_to_earlier_requests_restart_the_timeout() -> None:
    process = PlannerProcess(Moody(slept_on=LENGTHS), answer_limit_s=60.0)
    process.request(0, (5, 6))
    process.request(1, LENGTHS)
    assert process.result(0).parse().num_tokens == 11
    process._answer_limit_s = SHORT_S
    with pytest.raises(PlannerProcessHung, match="iteration 2 waits for its plan"):
        process.result(1)
    process.kill()


def test_requests_to_a_stopped_process_do_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe holds 64 KiB, a few large batches: training must not stop at the next one."""
    monkeypatch.setattr(process_module, "SECONDS_TO_STOP", SHORT_S)
    process = PlannerProcess(greedy())
    os.kill(process.pid, signal.SIGSTOP)
    for iteration in range(8):
        process.request(iteration, range(10_000, 20_000))
    process.close()
    assert process._process.returncode == -signal.SIGKILL


def test_an_error_is_not_planned_again_after_a_restart(ahead: LookAheadPlanner) -> None:
    ahead.submit(0, [9000])
    ahead.submit(1, LENGTHS)
    with pytest.raises(PlanError, match="9000"):
        ahead.take(0)
    os.kill(process_of(ahead).pid, signal.SIGKILL)
    assert ahead.take(1)[0].parse().iteration == 1
    assert not ahead._open


def test_a_planner_process_does_not_outlive_training() -> None:
    """Even while it is planning: its open files, here standard error, are closed."""
    script = (
        "import os, signal\n"
        "from megatron.hydraulis.planner.ahead import PlannerProcess\n"
        "from tests.fault.test_planner_process import LENGTHS, Moody\n"
        "process = PlannerProcess(Moody(slept_on=LENGTHS))\n"
        "process.request(0, (5, 6))\n"
        "process.request(1, LENGTHS)\n"
        "print(process.result(0).parse().num_tokens, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    training = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    output, errors = training.communicate(timeout=300.0)
    assert (output, errors) == ("11\n", "")
    assert training.returncode == -signal.SIGKILL


def test_the_planner_process_has_a_lower_priority_than_the_ranks() -> None:
    process = PlannerProcess(greedy())
    try:
        process.request(0, LENGTHS)
        process.result(0)
        here = os.getpriority(os.PRIO_PROCESS, 0)
        # 19 is the lowest priority there is.
        wanted = min(here + process_module.NICENESS, 19)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == wanted
        # What a launcher or a terminal sends to the rank's group does not reach it.
        assert os.getsid(process.pid) == process.pid != os.getsid(0)
    finally:
        process.close()
