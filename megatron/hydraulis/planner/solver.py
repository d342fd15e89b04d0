"""One guarded way to run HiGHS.

Everything that can go wrong with a solver ends here as an outcome, never as an exception: the
caller has a plan in hand and keeps it. Limits count nodes and simplex iterations, which are the
same on every machine; the wall clock is a safety net, and a run that it ended is marked OVERRUN,
so that nobody takes its answer for a reproducible one.
"""

import dataclasses
import enum
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Deadline",
    "LinearModel",
    "Outcome",
    "Solution",
    "Solver",
    "SolverError",
    "SolverLimits",
    "solve",
]

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]

_NUM_THREADS = 1
# HiGHS's own default: how far an integer variable may be from a whole number.
_INTEGRALITY_TOLERANCE = 1e-6
# A start or an answer that breaks a row by more than this share of its size is no answer.
_FEASIBILITY_TOLERANCE = 1e-5


class SolverError(RuntimeError):
    """A program without which planning cannot go on has no answer."""


class Outcome(enum.Enum):
    """How a run ended."""

    OPTIMAL = "optimal"
    LIMIT = "limit"
    """The node or iteration limit came first; answer and bound hold all the same."""
    OVERRUN = "overrun"
    """The wall clock came first: the answer is dropped, being no other machine's."""
    FAILED = "failed"
    """An exception, a status that these models cannot have, or an answer that breaks a row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverLimits:
    """When to stop. Nodes and iterations decide; guard_s only saves from a solver gone astray."""

    num_nodes: int = 1000
    num_iterations: int = 20_000
    """Simplex iterations of a linear program."""
    relative_gap: float = 1e-4
    guard_s: float = 10.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearModel:
    """Minimise ``cost·x`` with ``lower <= x <= upper`` and ``row_lower <= A·x <= row_upper``."""

    cost: FloatArray
    """Shape (num_columns,)."""
    lower: FloatArray
    upper: FloatArray
    matrix: FloatArray
    """A, dense: shape (num_rows, num_columns)."""
    row_lower: FloatArray
    row_upper: FloatArray
    is_integral: NDArray[np.bool_] | None = None
    """Which columns take whole numbers only; None for a linear program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """What a run gave. Without an answer, values is None and the bound is minus infinity."""

    outcome: Outcome
    values: FloatArray | None = None
    objective: float = math.inf
    bound: float = -math.inf
    """No feasible x costs less."""
    column_duals: FloatArray | None = None
    """Reduced costs of a linear program."""

    @property
    def is_usable(self) -> bool:
        """Whether there is an answer that any machine would give."""
        return self.outcome in (Outcome.OPTIMAL, Outcome.LIMIT) and self.values is not None


def solve(
    model: LinearModel,
    limits: SolverLimits,
    *,
    start: Sequence[float] | FloatArray | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Solution:
    """Solve a linear or mixed-integer program, from a start if there is one. Never raises."""
    if limits.guard_s <= 0.0:
        return Solution(outcome=Outcome.OVERRUN)
    start_s = clock()
    try:
        solution = _run(model, limits, start)
    except Exception as error:  # Whatever it is, training goes on with the plan in hand.
        logger.warning("the solver failed and its plan stays out: %r", error)
        return Solution(outcome=Outcome.FAILED)
    if solution.outcome is not Outcome.OPTIMAL and clock() - start_s > limits.guard_s:
        return Solution(outcome=Outcome.OVERRUN)
    return solution


class Deadline:
    """The wall clock's say: when planning has to end with what it has.

    Args:
        limit_s: seconds from now on; None for no end.
        clock: seconds, rising.
    """

    def __init__(
        self, limit_s: float | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._end_s = math.inf if limit_s is None else clock() + limit_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, at most none."""
        return max(0.0, self._end_s - self._clock())

    @property
    def is_over(self) -> bool:
        """Whether no time is left."""
        return self.remaining_s <= 0.0


class Solver:
    """Runs programs until a deadline, and remembers what went wrong."""

    def __init__(self, deadline: Deadline, *, seed: int = 0) -> None:
        self.deadline = deadline
        self.trouble: Outcome | None = None
        """FAILED or OVERRUN once a run ended so; the first of them."""
        self._seed = seed

    def solve(
        self,
        model: LinearModel,
        limits: SolverLimits,
        *,
        start: Sequence[float] | FloatArray | None = None,
    ) -> Solution:
        """As the function solve; the guard ends at the deadline at the latest."""
        guard_s = min(limits.guard_s, self.deadline.remaining_s)
        limits = dataclasses.replace(limits, guard_s=guard_s, seed=self._seed)
        solution = solve(model, limits, start=start)
        if solution.outcome in (Outcome.FAILED, Outcome.OVERRUN) and self.trouble is None:
            self.trouble = solution.outcome
        return solution


def _run(
    model: LinearModel, limits: SolverLimits, start: Sequence[float] | FloatArray | None
) -> Solution:
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in _options(model, limits):
        if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise RuntimeError(f"HiGHS refuses the option {name} = {value}")
    if highs.passModel(_to_highs(model)) == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS refuses the model")
    if start is not None:
        first = highspy.HighsSolution()
        first.col_value = [float(value) for value in start]
        highs.setSolution(first)
    highs.run()
    return _solution(highs, model)


def _options(
    model: LinearModel, limits: SolverLimits
) -> list[tuple[str, bool | int | float | str]]:
    options: list[tuple[str, bool | int | float | str]] = [
        ("output_flag", False),
        ("threads", _NUM_THREADS),
        ("random_seed", limits.seed),
        ("time_limit", limits.guard_s),
    ]
    if model.is_integral is None:
        # The programs are small: presolving costs more than it saves.
        options += [("presolve", "off"), ("simplex_iteration_limit", limits.num_iterations)]
    else:
        options += [
            ("mip_max_nodes", limits.num_nodes),
            ("mip_rel_gap", limits.relative_gap),
        ]
    return options


def _to_highs(model: LinearModel) -> highspy.HighsLp:
    program = highspy.HighsLp()
    program.num_col_ = len(model.cost)
    program.num_row_ = len(model.row_lower)
    program.col_cost_ = model.cost
    program.col_lower_ = model.lower
    program.col_upper_ = model.upper
    program.row_lower_ = model.row_lower
    program.row_upper_ = model.row_upper
    rows, columns = np.nonzero(model.matrix)
    counts = np.bincount(rows, minlength=len(model.row_lower))
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    program.a_matrix_.index_ = columns.astype(np.int32)
    program.a_matrix_.value_ = model.matrix[rows, columns]
    if model.is_integral is not None:
        program.integrality_ = [
            highspy.HighsVarType.kInteger if integral else highspy.HighsVarType.kContinuous
            for integral in model.is_integral
        ]
    return program


def _solution(highs: highspy.Highs, model: LinearModel) -> Solution:
    status = highs.getModelStatus()
    info = highs.getInfo()
    kinds = highspy.HighsModelStatus
    if status == kinds.kTimeLimit:
        return Solution(outcome=Outcome.OVERRUN)
    if status == kinds.kOptimal:
        outcome = Outcome.OPTIMAL
    elif status in (kinds.kIterationLimit, kinds.kSolutionLimit):
        outcome = Outcome.LIMIT
    else:
        # Every model here has an answer and a finite optimum.
        raise RuntimeError(f"HiGHS ends with the status {highs.modelStatusToString(status)}")
    answer = highs.getSolution()
    if model.is_integral is None:
        if outcome is Outcome.LIMIT:
            return Solution(outcome=outcome)
        values = np.array(answer.col_value)
        _check_answer(model, values)
        objective = float(info.objective_function_value)
        return Solution(
            outcome=outcome,
            values=values,
            objective=objective,
            bound=objective,
            column_duals=np.array(answer.col_dual),
        )
    bound = float(info.mip_dual_bound)
    values = np.array(answer.col_value)
    if len(values) != len(model.cost) or not math.isfinite(info.objective_function_value):
        return Solution(outcome=outcome, bound=bound)
    _check_answer(model, values)
    return Solution(
        outcome=outcome,
        values=values,
        objective=float(info.objective_function_value),
        bound=bound,
    )


def _check_answer(model: LinearModel, values: FloatArray) -> None:
    """Raise RuntimeError when an answer breaks what it was asked to keep."""
    rows = model.matrix @ values
    scale = 1.0 + np.abs(model.matrix) @ np.abs(values)
    excess = np.maximum(model.row_lower - rows, rows - model.row_upper) / scale
    if excess.size and float(excess.max()) > _FEASIBILITY_TOLERANCE:
        raise RuntimeError(f"HiGHS breaks a row by {float(excess.max()):.2g} of its size")
    if model.is_integral is not None:
        whole = values[model.is_integral]
        if whole.size and float(np.abs(whole - np.rint(whole)).max()) > _INTEGRALITY_TOLERANCE:
            raise RuntimeError("HiGHS gives a fraction for a whole number")
