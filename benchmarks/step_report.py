"""A rank's report of one step, and the clock that splits its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Spent:
    """Time that one rank spent on something."""

    wall_s: float
    """Waiting included."""
    cpu_s: float
    """Of the whole process, gloo's threads included: least disturbed by other work."""

    def __add__(self, other: Spent) -> Spent:
        return Spent(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s)

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s)


NOTHING_SPENT = Spent(0.0, 0.0)


@dataclass(frozen=True)
class StepReport:
    """One rank's measurements of one optimizer step."""

    step: Spent
    """From the moment all ranks were ready."""
    phases: dict[str, Spent]
    """Disjoint parts of ``step``; the rest is *other*."""
    loss: float
    """Per token over the global batch, before the update; NaN on ranks that do not know it."""
    gradient_norm: float
    waits_s: float = 0.0
    """How long compute waited for regrouping; of our engine only."""

    def phase(self, name: str) -> Spent:
        """One of the phases, or ``other``."""
        if name != "other":
            return self.phases[name]
        return self.step - sum(self.phases.values(), NOTHING_SPENT)


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank receives from others in one step, without model-parallel traffic."""

    parameters_bytes: int
    """Held by the rank, in the dtype it computes in."""
    gather_bytes: int
    scatter_bytes: int


class StepClock:
    """Times one step and named phases in it; an inner phase does not count for the outer one."""

    def __init__(self) -> None:
        self._phases: dict[str, Spent] = {}
        self._inner = [NOTHING_SPENT]
        """For the step and each open phase: time in the phases directly inside it."""
        self._start = NOTHING_SPENT

    def start_step(self) -> None:
        """Begin a new step."""
        self._phases = {}
        self._start = spent_now()

    def report(self, *, loss: float, gradient_norm: float, waits_s: float = 0.0) -> StepReport:
        """End the step."""
        spent = spent_now() - self._start
        return StepReport(spent, self._phases, loss, gradient_norm, waits_s)

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Add the time of the block to ``phase``."""
        start = spent_now()
        self._inner.append(NOTHING_SPENT)
        try:
            yield
        finally:
            elapsed = spent_now() - start
            own = elapsed - self._inner.pop()
            self._phases[phase] = self._phases.get(phase, NOTHING_SPENT) + own
            self._inner[-1] += elapsed

    def time_method(self, owner: Any, name: str, phase: str) -> None:
        """Adds the time of every later call of ``owner.name`` to ``phase``."""
        setattr(owner, name, self.timed(phase, getattr(owner, name)))

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, with its time added to ``phase``."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.measure(phase):
                return function(*args, **kwargs)

        return call


def finish_device() -> None:
    """Wait until the device has done everything, so that the host's clock counts it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def spent_now() -> Spent:
    """Wall and CPU time of this process so far."""
    return Spent(time.perf_counter(), time.process_time())
