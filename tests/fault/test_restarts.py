"""A rank that is killed, frozen or raises: torchrun's agent starts the job again from the last
complete checkpoint, and the losses are those of a run that nothing happened to.

By default a rank is killed in every phase, and one is frozen; with HYPOTHESIS_PROFILE=nightly each
kind in every phase on every rank.
"""

from __future__ import annotations

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
from megatron.hydraulis.loop.batch_reader import PlannedBatch, PlannedData
from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW
from megatron.hydraulis.runtime import engine as engine_module
from megatron.hydraulis.runtime.regroup import EqualSharesRoute, OneStepRoute
from tests.support.changed_settings import with_settings
from tests.support.elastic_job import losses_of, run_elastic_job
from tests.support.forked_job import run_job
from tests.support.overlap_probes import InjectedFault
from tests.support.tiny_corpus import tiny_command, write_corpus

pytestmark = pytest.mark.fault

Phase = Literal["planning", "gather", "forward", "backward", "scatter", "optimizer", "save"]
Action = Literal["kill", "freeze", "raise"]
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
        number_of = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
        os.kill(os.getpid(), number_of[fault.action])

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

        def faulty(data: PlannedData) -> PlannedBatch:
            if data.reader.corpus.name == "train":
                self._step = data.reader.batches.iteration + 1
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

        def faulty(optimizer: ShardedAdamW, gradient_norm: float) -> Iterator[int]:
            for bucket in original(optimizer, gradient_norm):
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
STRATEGY = "pp2+tp1"
NUM_ITERATIONS = 4
TIMEOUT_S = 12.0
"""Of collectives: the time lost by a frozen rank. A loaded machine may take a second for one."""
NUM_SPARE_RESTARTS = 2
"""If a rank is so slow that the others consider it frozen, losses are the same anyway."""
FAULTS: dict[Action, tuple[Phase, ...]] = {
    "kill": PHASES,
    "freeze": PHASES if IS_NIGHTLY else ("scatter",),
    "raise": PHASES if IS_NIGHTLY else (),
}
FIRST_RANKS = range(NUM_RANKS) if IS_NIGHTLY else (1,)
"""Iteration of the first fault; the next rank fails in the next one."""


def command(prefix: str, folder: Path, *extra: str) -> list[str]:
    return tiny_command(
        prefix,
        folder / "run",
        *("--strategy", STRATEGY, "--split", "100,0,0", "--train-iters", str(NUM_ITERATIONS)),
        *("--save", str(folder / "save"), "--load", str(folder / "save"), "--save-interval", "1"),
        *("--exit-signal-handler", *extra),
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "tiny")


@pytest.fixture(scope="module")
def expected(prefix: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of a run without faults."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    run_job(command(prefix, folder), NUM_RANKS, folder / "output").assert_succeeded()
    losses = losses_of(folder / "run")
    assert sorted(losses) == list(range(1, NUM_ITERATIONS + 1))
    return losses


@pytest.mark.parametrize("first_rank", FIRST_RANKS)
@pytest.mark.parametrize("action", [action for action, phases in FAULTS.items() if phases])
@pytest.mark.timeout(600)
def test_the_job_goes_on_from_its_last_checkpoint(
    action: Action, first_rank: int, prefix: str, expected: dict[int, float], tmp_path: Path
) -> None:
    injector = FaultInjector(tmp_path)
    phases = FAULTS[action]
    for number, phase in enumerate(phases):
        # Every fault happens in another start of the job.
        step = 2 + number * (NUM_ITERATIONS - 2) // len(phases)
        injector.fail_at((first_rank + number) % NUM_RANKS, step, phase, action)

    def program(argv: Sequence[str]) -> None:
        injector.install()
        entry.main(argv)

    # If rank 0 is frozen while planning, the others wait in its store, not in a collective.
    extra = ("--plan-ahead", "0") if first_rank == 0 else ()
    outcome = run_elastic_job(
        command(prefix, tmp_path, *extra),
        NUM_RANKS,
        tmp_path / "output",
        program=with_settings(program, distributed_timeout_minutes=TIMEOUT_S / 60.0),
        max_restarts=len(phases) + NUM_SPARE_RESTARTS,
        timeout_s=60.0 + 60.0 * len(phases),
    )
    outcome.assert_succeeded()
    assert len(injector.happened) == len(phases)
    assert outcome.num_starts > len(phases)
    assert losses_of(tmp_path / "run") == expected
    output = outcome.output("[1-9]*")
    assert "loaded " in output
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text() == "4"
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
