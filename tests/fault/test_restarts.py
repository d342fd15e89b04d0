"""A rank that is killed, frozen or raises: torchrun's agent starts the job again from the last
complete checkpoint, and the losses are those of a run that nothing happened to. A node that is
lost: the others continue without it. Ranks that leave and return between starts: 4, then 2, then 3
ranks train one run.

By default a rank is killed in every phase, and one is frozen; with HYPOTHESIS_PROFILE=nightly each
kind in every phase on every rank. Most of the time is waiting for what will not come, so the jobs
of the default list run at the same time.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import pytest

from megatron.hydraulis.checkpoint import saving
from megatron.hydraulis.loop import entry
from megatron.hydraulis.loop.planned_data import PlannedData, RankBatch
from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW
from megatron.hydraulis.runtime import engine as engine_module
from megatron.hydraulis.runtime.regroup import EqualSharesRoute, OneStepRoute
from tests.support.changed_settings import with_settings
from tests.support.elastic_job import ElasticJob, losses_of
from tests.support.forked_job import run_job
from tests.support.overlap_probes import InjectedFault
from tests.support.tiny_corpus import tiny_command, write_corpus
from tests.support.training_run import ROUNDING

pytestmark = pytest.mark.fault

Phase = Literal["planning", "gather", "forward", "backward", "scatter", "optimizer", "save"]
Action = Literal["kill", "freeze", "raise", "lose the node"]
PHASES: tuple[Phase, ...] = (
    "planning",
    "gather",
    "forward",
    "backward",
    "scatter",
    "optimizer",
    "save",
)


@dataclass(frozen=True)
class Fault:
    """Kind of fault, and where it happens."""

    rank: int
    step: int
    """Iteration, counted from 1; a later one if the rank has nothing to do in it."""
    phase: Phase
    action: Action

    def __str__(self) -> str:
        return f"{self.action} rank {self.rank} in {self.phase} of iteration {self.step}"


class FaultInjector:
    """Faults of one job: ``FaultInjector(folder).fail_at(1, step=3, phase="save")``.

    Installed in a rank's process before the program begins, it lets a phase of one iteration kill
    the process, freeze it or raise; once, even if the job is started again.

    Args:
        folder: of this job only; its files record which faults have happened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._faults: list[Fault] = []
        self._step = 0
        self._armed: Fault | None = None

    def fail_at(self, rank: int, step: int, phase: Phase, action: Action = "kill") -> FaultInjector:
        """Add a fault."""
        self._faults.append(Fault(rank, step, phase, action))
        return self

    @property
    def happened(self) -> list[str]:
        """The faults that have happened so far, as text."""
        return sorted(path.read_text() for path in self._folder.glob("fault*"))

    def install(self) -> None:
        """Into this process, permanently. At most one fault happens in each start of the job."""
        self._armed = next((f for f in self._faults if not self._marker(f).exists()), None)
        self._install_planning()
        for route in (OneStepRoute, EqualSharesRoute):
            self._before(route, "gather", "gather")
            self._before(route, "scatter", "scatter")
        self._install_forward_and_backward()
        self._install_optimizer()
        self._install_save()

    def _at(self, phase: Phase) -> None:
        """Called in the phase: fail if a fault is due."""
        fault = self._armed
        if fault is None or (fault.rank, fault.phase) != (_rank(), phase):
            return
        if self._step < fault.step or self._marker(fault).exists():
            return
        self._marker(fault).write_text(str(fault))
        print(f"FAULT {fault}", flush=True)
        if fault.action == "raise":
            raise InjectedFault(f"injected in {phase}")
        if fault.action == "lose the node":
            os.killpg(0, signal.SIGKILL)  # of the agent
        os.kill(os.getpid(), signal.SIGSTOP if fault.action == "freeze" else signal.SIGKILL)

    def _marker(self, fault: Fault) -> Path:
        return self._folder / f"fault{self._faults.index(fault)}"

    def _before(self, owner: Any, name: str, phase: Phase) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            self._at(phase)
            return original(*args, **kwargs)

        setattr(owner, name, faulty)

    def _install_planning(self) -> None:
        original = PlannedData.next_batch

        def faulty(data: PlannedData) -> RankBatch:
            if data.corpus.name == "train":
                self._step = data.batches.iteration + 1
                self._at("planning")
            return original(data)

        PlannedData.next_batch = faulty  # type: ignore[assignment, method-assign]

    def _install_forward_and_backward(self) -> None:
        original = engine_module.run_micro_batches

        def run(role: Any, batches: Any, forward_step: Callable[..., Any], **named: Any) -> Any:
            if named.get("forward_only"):
                return original(role, batches, forward_step, **named)

            def faulty_step(*args: Any, **kwargs: Any) -> Any:
                self._at("forward")
                output, loss = forward_step(*args, **kwargs)
                output.register_hook(lambda gradient: self._at("backward"))
                return output, loss

            return original(role, batches, faulty_step, **named)

        engine_module.run_micro_batches = run

    def _install_optimizer(self) -> None:
        original = ShardedAdamW.step_by_bucket

        def faulty(optimizer: ShardedAdamW, *args: Any) -> Iterator[int]:
            for bucket in original(optimizer, *args):
                self._at("optimizer")  # with one bucket updated, the others not yet
                yield bucket

        ShardedAdamW.step_by_bucket = faulty  # type: ignore[assignment, method-assign]

    def _install_save(self) -> None:
        original = saving.write_file

        def faulty(
            folder: Path, rank: int, pieces: Any, objects: Any, goes_on: Callable[[], bool]
        ) -> Any:
            num_asked = 0

            def asked() -> bool:
                nonlocal num_asked
                num_asked += 1
                if num_asked == 2:
                    self._at("save")  # with one tensor of the file written
                return goes_on()

            return original(folder, rank, pieces, objects, asked)

        saving.write_file = faulty  # type: ignore[assignment]


def _rank() -> int:
    return int(os.environ["RANK"])


IS_NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
NUM_RANKS = 3
STRATEGY, ELASTIC_STRATEGY = "pp2+tp1", "tp2+tp1"
NUM_ITERATIONS = 4
TIMEOUT_S = 45.0
"""The timeout of collectives: the time lost by a frozen rank. If all jobs start again on one slow
core, a planner's process needs 20 s until the first plan."""
NUM_SPARE_RESTARTS = 2
"""If a rank is so slow that the others consider it frozen, losses are the same anyway."""
FAULTS: dict[Action, tuple[Phase, ...]] = {
    "freeze": PHASES if IS_NIGHTLY else ("scatter",),
    "kill": PHASES,
    "raise": PHASES if IS_NIGHTLY else (),
}
FIRST_RANKS = range(NUM_RANKS) if IS_NIGHTLY else (1,)

ELASTIC_POOL = {"short": "4*tp1", "mixed": "tp2+2*tp1", "wide": "tp2pp2"}
NUM_ELASTIC_ITERATIONS = 6

Case = tuple[Action, int]
"""Kind of fault, and the rank that fails first or the node that is lost."""
CASES: list[Case] = [
    (action, first_rank)
    for action, phases in FAULTS.items()
    if phases
    for first_rank in FIRST_RANKS
]
LOST: Case = ("lose the node", 2)  # node 0 has the rendezvous


def command(prefix: str, folder: Path, *extra: str, strategy: str = STRATEGY) -> list[str]:
    return tiny_command(
        prefix,
        folder / "run",
        *("--strategy", strategy, "--split", "100,0,0", "--train-iters", str(NUM_ITERATIONS)),
        *("--save", str(folder / "save"), "--load", str(folder / "save"), "--save-interval", "1"),
        *extra,
    )


@dataclass(frozen=True)
class FaultyJob:
    """A job that runs, with its faults."""

    job: ElasticJob
    injector: FaultInjector
    folder: Path


Start = Callable[[Case], FaultyJob]


def start_faulty(action: Action, first_rank: int, prefix: str, folder: Path) -> FaultyJob:
    """A job with a fault of this kind in each of its phases, each in another start of the job."""
    injector = FaultInjector(folder)
    phases = FAULTS[action]
    for number, phase in enumerate(phases):
        step = 2 + number * (NUM_ITERATIONS - 2) // len(phases)
        injector.fail_at((first_rank + number) % NUM_RANKS, step, phase, action)

    def program(argv: Sequence[str]) -> None:
        injector.install()
        entry.main(argv)

    # If rank 0 is frozen while planning, the others wait in its store, not in a collective.
    extra = ("--plan-ahead", "0") if first_rank == 0 else ()
    job = ElasticJob(
        command(prefix, folder, "--exit-signal-handler", *extra),
        NUM_RANKS,
        folder / "output",
        program=with_settings(program, distributed_timeout_minutes=TIMEOUT_S / 60.0),
        max_restarts=len(phases) + NUM_SPARE_RESTARTS,
    )
    return FaultyJob(job, injector, folder)


def start_that_loses_a_node(action: Action, lost_node: int, prefix: str, folder: Path) -> FaultyJob:
    """Three nodes of a rank each; one of them is lost in iteration 3."""
    injector = FaultInjector(folder)

    def program(argv: Sequence[str]) -> None:
        if os.environ["NODE_NUMBER"] == str(lost_node):
            injector.fail_at(_rank(), 3, "forward", action).install()
        entry.main(argv)

    elastic = ("--elastic", "--ranks-per-node", str(NUM_RANKS))
    job = ElasticJob(
        command(prefix, folder, *elastic, strategy=ELASTIC_STRATEGY),
        1,
        folder / "output",
        program=program,
        max_restarts=3,
        num_nodes=NUM_RANKS,
    )
    return FaultyJob(job, injector, folder)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tiny")


@pytest.fixture(scope="module")
def start(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Starts a case's job; those of the default list run from now on."""
    running: dict[Case, FaultyJob] = {}

    def start(case: Case) -> FaultyJob:
        if case not in running:
            starts = start_that_loses_a_node if case == LOST else start_faulty
            running[case] = starts(*case, prefix, tmp_path_factory.mktemp("faulty"))
        return running[case]

    for case in () if IS_NIGHTLY else (*CASES, LOST):
        start(case)
    yield start
    for each in running.values():
        each.job.close()


def losses_without_faults(prefix: str, folder: Path, *, strategy: str) -> dict[int, float]:
    job = run_job(command(prefix, folder, strategy=strategy), NUM_RANKS, folder / "output")
    job.assert_succeeded()
    losses = losses_of(folder / "run")
    assert sorted(losses) == list(range(1, NUM_ITERATIONS + 1))
    return losses


@pytest.fixture(scope="module")
def expected(
    prefix: str, start: Start, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[int, float]]:
    """Losses by strategy and iteration, found while jobs of `start` run."""
    return {
        strategy: losses_without_faults(prefix, tmp_path_factory.mktemp("alone"), strategy=strategy)
        for strategy in (STRATEGY, ELASTIC_STRATEGY)
    }


@pytest.mark.usefixtures("start")
def test_four_two_three_ranks_train_one_run(tmp_path: Path, prefix: str) -> None:
    """One command line; the jobs with faults run meanwhile."""
    pool = tmp_path / "pool.json"
    entries = [{"name": name, "replicas": text} for name, text in ELASTIC_POOL.items()]
    pool.write_text(json.dumps({"num_ranks": 4, "ranks_per_node": 4, "strategies": entries}))

    def elastic_command(folder: Path, *extra: str) -> list[str]:
        return tiny_command(
            prefix,
            folder / "run",
            *("--strategy-pool", str(pool), "--elastic", "--split", "100,0,0"),
            *("--train-iters", str(NUM_ELASTIC_ITERATIONS), *extra),
        )

    alone = tmp_path / "alone"
    run_job(elastic_command(alone), 4, alone / "output").assert_succeeded()
    expected = losses_of(alone / "run")
    assert len(expected) == NUM_ELASTIC_ITERATIONS

    folder = tmp_path / "changing"
    save = str(folder / "save")
    argv = elastic_command(
        folder, "--save", save, "--load", save, "--save-interval", "2", "--exit-interval", "2"
    )
    outputs = {}
    for num_ranks in (4, 2, 3):
        outcome = run_job(argv, num_ranks, folder / f"on_{num_ranks}")
        outcome.assert_succeeded()
        outputs[num_ranks] = outcome.stdout + outcome.stderr
    found = losses_of(folder / "run")
    assert found == pytest.approx(expected, rel=ROUNDING)

    assert "the strategies are for 4 ranks" not in outputs[4]
    for num_ranks, lines in {
        2: (
            "the strategies are for 4 ranks but there are 2",
            "strategy 'short': 4*tp1 becomes 2*tp1",
            "strategy 'mixed': tp2+2*tp1 becomes tp2",
            "strategy 'wide' is skipped: its tp2pp2 needs 4 ranks",
            "it was written by 4 ranks, now 2 go on",
        ),
        3: (
            "the strategies are for 4 ranks but there are 3",
            "strategy 'mixed': tp2+2*tp1 becomes tp2+tp1",
            "it was written by 2 ranks, now 3 go on",
        ),
    }.items():
        for line in lines:
            assert line in outputs[num_ranks], line


@pytest.mark.parametrize(("action", "first_rank"), CASES)
@pytest.mark.timeout(600)
def test_the_job_goes_on_from_its_last_checkpoint(
    action: Action, first_rank: int, start: Start, expected: dict[str, dict[int, float]]
) -> None:
    started = start((action, first_rank))
    num_faults = len(FAULTS[action])
    (outcome,) = started.job.outcomes(60.0 + 60.0 * num_faults)
    outcome.assert_succeeded()
    assert len(started.injector.happened) == num_faults
    assert outcome.num_starts > num_faults
    # On a loaded machine a plan may be the greedy planner's, as its process did not answer in time.
    found = losses_of(started.folder / "run", rel=ROUNDING)
    assert found == pytest.approx(expected[STRATEGY], rel=ROUNDING)
    output = outcome.output("[1-9]*")
    assert "loaded " in output
    latest = started.folder / "save" / "latest_checkpointed_iteration.txt"
    assert latest.read_text() == str(NUM_ITERATIONS)
    if action == "freeze":
        # Before collectives timed out, a waiting rank named the rank that it waited for.
        output = outcome.output("0*stderr")
        reports = [line for line in output.splitlines() if line.startswith("hang: ")]
        if first_rank == 0:  # its process holds the store to which ranks report their phases
            assert reports
            assert all("missing: rank 0, in whose process it is" in line for line in reports)
        else:
            (report,) = reports
            # A rank that waits for it in the pipeline may be missing, too, but is not silent.
            _, missing = report.split("missing: ")
            assert re.findall(r"rank (\d+), silent for ", missing) == [str(first_rank)]
            assert "of iteration 2 (strategy 'pp2+tp1'" in report


@pytest.mark.timeout(600)
def test_the_others_continue_without_a_lost_node(
    start: Start, expected: dict[str, dict[int, float]]
) -> None:
    started = start(LOST)
    nodes = started.job.outcomes(400.0)
    ends = "\n".join(node.ends_of_output() for node in nodes)
    assert len(started.injector.happened) == 1, ends
    for number, node in enumerate(nodes):
        if number != LOST[1]:
            node.assert_succeeded()
    found = losses_of(started.folder / "run", rel=ROUNDING)
    assert found == pytest.approx(expected[ELASTIC_STRATEGY], rel=ROUNDING)
    output = "".join(node.output("[1-9]*") for node in nodes)
    assert "strategy 'tp2+tp1': tp2+tp1 becomes tp2" in output
    assert "it was written by 3 ranks, now 2 go on" in output
