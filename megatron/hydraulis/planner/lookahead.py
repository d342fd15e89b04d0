"""Plans made ahead of training, whatever becomes of the process that makes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.interface import Planner
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.process import (
    PlannerProcess,
    PlannerProcessDied,
    PlannerProcessHung,
)

__all__ = ["GRACE_S", "LookAheadPlanner"]

logger = logging.getLogger(__name__)

MAX_RESTARTS = 1
"""A planner process that dies or hangs is started again this often; then planning goes on in line.
"""
GRACE_S = 60.0
"""How much longer than its own time limit a plan may take before its process counts as hung.

A plan takes seconds at most. The rest is for an interpreter and a solver that are read from a slow
disk, and for a machine under load. Twice of it is less than the 300 s for which the other ranks
wait at a store that was given no other limit.
"""


class LookAheadPlanner:
    """Hands requests to a planner process and takes its plans in order.

    A process that dies or hangs is started anew once, with what it still owed; if that one is lost
    too, each plan is made when it is taken. Training never stops for it.

    Args:
        planner: what plans, in the process and in line.
        in_process: False plans in line from the beginning.
        stand_in: plans in line once the process is lost, since what killed or hung the planner
            there would do the same to training here. None for the planner itself, which is right
            for one that runs no native solver.
        time_limit_s: the planner's own limit for a plan, ``--plan-time-limit``; None where it ends
            by itself.
        grace_s: how long beyond it a plan is waited for.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        in_process: bool = True,
        stand_in: Planner | None = None,
        time_limit_s: float | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        self._planner = planner
        self._stand_in = planner if stand_in is None else stand_in
        self._answer_limit_s = (time_limit_s or 0.0) + grace_s
        self._owed: dict[int, tuple[int, ...]] = {}
        self._num_restarts = 0
        self._is_lost = False
        self._process = self._started() if in_process else None

    @property
    def is_in_line(self) -> bool:
        """Whether plans are made when they are taken."""
        return self._process is None

    @property
    def num_restarts(self) -> int:
        """How often the process was started again."""
        return self._num_restarts

    @property
    def is_lost(self) -> bool:
        """Whether the process died or hung once too often, so that the stand-in plans in line."""
        return self._is_lost

    def submit(self, iteration: int, lengths: Sequence[int]) -> None:
        """Ask for a plan that `take` will be called for later; never waits for the process."""
        self._owed[iteration] = tuple(lengths)
        if self._process is not None:
            try:
                self._process.request(iteration, lengths)
            except PlannerProcessDied as error:
                self._recover(error)

    def replace(self, planner: Planner, *, stand_in: Planner | None = None) -> None:
        """Plan what is submitted from now on with another planner; never waits for the process.

        After a restart of the process, what it still owed is planned with it as well.
        """
        self._planner = planner
        self._stand_in = planner if stand_in is None else stand_in
        if self._process is not None:
            self._process.replace(planner)

    def is_ready(self, iteration: int) -> bool:
        """Whether `take` would give a plan, or an error, of the process at once."""
        return self._process is not None and self._process.has_result(iteration)

    def take(self, iteration: int) -> tuple[IterationPlan, float]:
        """The plan of a submitted iteration, and the seconds waited for it.

        Raises:
            PlanError: as the planner.
        """
        start_s = time.perf_counter()
        while self._process is not None:
            try:
                plan = self._process.result(iteration)
            except (PlannerProcessDied, PlannerProcessHung) as error:
                self._recover(error)
                continue
            except PlanError:
                del self._owed[iteration]
                raise
            del self._owed[iteration]
            return plan, time.perf_counter() - start_s
        planner = self._stand_in if self._is_lost else self._planner
        plan = planner.plan(self._owed.pop(iteration), iteration=iteration)
        return plan, time.perf_counter() - start_s

    def close(self) -> None:
        """End the process; `take` plans in line from then on."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _started(self) -> PlannerProcess:
        return PlannerProcess(self._planner, answer_limit_s=self._answer_limit_s)

    def _recover(self, error: PlannerProcessDied | PlannerProcessHung) -> None:
        """Start again with all that is owed, or go on in line."""
        assert self._process is not None  # who else was lost?
        self._process.kill()
        self._process = None
        if self._num_restarts >= MAX_RESTARTS:
            self._is_lost = True
            logger.warning(
                "%s, again: planning goes on in line with training, by %s",
                error,
                type(self._stand_in).__name__,
            )
            return
        self._num_restarts += 1
        logger.warning("%s: it is started again", error)
        self._process = self._started()
        for iteration, lengths in self._owed.items():
            try:
                self._process.request(iteration, lengths)
            except PlannerProcessDied as second:
                self._recover(second)
                return
