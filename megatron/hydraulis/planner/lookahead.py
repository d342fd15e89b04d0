"""Plans made ahead of training, whatever becomes of the process that makes them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from megatron.hydraulis.planner.interface import Planner
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.process import PlannerProcess, PlannerProcessDied

__all__ = ["LookAheadPlanner"]

logger = logging.getLogger(__name__)

MAX_RESTARTS = 1
"""A planner process that dies is started again this often; then planning goes on in line."""


class LookAheadPlanner:
    """Hands requests to a planner process and takes its plans in order.

    A process that dies is started anew once, with what it still owed; if that one dies too, each
    plan is made when it is taken. Training never stops for it.

    Args:
        planner: what plans, in the process and in line.
        in_process: False plans in line from the beginning.
    """

    def __init__(self, planner: Planner, *, in_process: bool = True) -> None:
        self._planner = planner
        self._owed: dict[int, tuple[int, ...]] = {}
        self._num_restarts = 0
        self._process = PlannerProcess(planner) if in_process else None

    @property
    def is_in_line(self) -> bool:
        """Whether plans are made when they are taken."""
        return self._process is None

    @property
    def num_restarts(self) -> int:
        """How often the process was started again."""
        return self._num_restarts

    def submit(self, iteration: int, lengths: Sequence[int]) -> None:
        """Ask for a plan that `take` will be called for later."""
        self._owed[iteration] = tuple(lengths)
        if self._process is not None:
            try:
                self._process.request(iteration, lengths)
            except PlannerProcessDied as error:
                self._recover(error)

    def take(self, iteration: int) -> tuple[IterationPlan, float]:
        """The plan of a submitted iteration, and the seconds waited for it.

        Raises:
            PlanError: as the planner.
        """
        start_s = time.perf_counter()
        while self._process is not None:
            try:
                plan = self._process.result(iteration)
            except PlannerProcessDied as error:
                self._recover(error)
                continue
            del self._owed[iteration]
            return plan, time.perf_counter() - start_s
        plan = self._planner.plan(self._owed.pop(iteration), iteration=iteration)
        return plan, time.perf_counter() - start_s

    def close(self) -> None:
        """End the process; `take` plans in line from then on."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _recover(self, error: PlannerProcessDied) -> None:
        """Start again with all that is owed, or go on in line."""
        self.close()
        if self._num_restarts >= MAX_RESTARTS:
            logger.warning("%s, again: planning goes on in line with training", error)
            return
        self._num_restarts += 1
        logger.warning("%s: it is started again", error)
        self._process = PlannerProcess(self._planner)
        for iteration, lengths in self._owed.items():
            try:
                self._process.request(iteration, lengths)
            except PlannerProcessDied as second:
                self._recover(second)
                return
