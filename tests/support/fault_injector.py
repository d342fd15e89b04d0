"""Faults as small objects: ``FaultInjector(folder).fail_at(1, step=3, phase="save")``.

Installed in a rank's process before the program begins, it lets a phase of one iteration kill the
process, freeze it or raise; once, also when the job is started again.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Literal

from megatron.hydraulis.checkpoint import saving
from megatron.hydraulis.loop.batch_reader import PlannedBatch, PlannedData
from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW
from megatron.hydraulis.runtime import engine as engine_module
from megatron.hydraulis.runtime.regroup import EqualSharesRoute, OneStepRoute
from tests.support.overlap_probes import InjectedFault

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
    """Faults of one job.

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
