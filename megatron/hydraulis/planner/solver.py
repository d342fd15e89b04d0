"""One guarded way to run HiGHS.

Everything that can go wrong with a solver ends here as an outcome, never as an exception: the
caller has a plan in hand and keeps it. An answer is believed as far as it can be checked: rows,
limits, whole numbers and costs are computed anew, the bound of a linear program from its duals, and
a start shows what can be reached at least. Limits count nodes and simplex iterations, which are the
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
# A start that keeps rows this well is a proof of what can be reached.
_START_TOLERANCE = 1e-9
# Objectives and bounds of the same thing, summed up in another order or within HiGHS's tolerances.
_OBJECTIVE_TOLERANCE = 1e-6
# HiGHS's own default is 1e-7, on a scaled model.
_DUAL_TOLERANCE = 1e-6
# How far a linear program's optimum may be above what its duals prove, as a share of their sum.
_PROOF_TOLERANCE = 1e-6


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
    """An exception, a status that these models cannot have, or an answer that is proved wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverLimits:
    """When to stop. Nodes and iterations decide; guard_s only saves from a solver gone astray."""

    num_nodes: int = 1000
    num_iterations: int = 20_000
    """Simplex iterations of a linear program."""
    relative_gap: float = 1e-4
    guard_s: float = 30.0
    """Wall clock. The programs here take milliseconds, so that load alone does not get there, and a
    single program gone astray ends before a planner process counts as hung (lookahead.GRACE_S)."""
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
        """As the function solve; the guard ends at the deadline at the latest.

        After an overrun integer programs are not run any more: the next one may take as long.
        """
        if self.trouble is Outcome.OVERRUN and model.is_integral is not None:
            return Solution(outcome=Outcome.OVERRUN)
        guard_s = min(limits.guard_s, self.deadline.remaining_s)
        limits = dataclasses.replace(limits, guard_s=guard_s, seed=self._seed)
        solution = solve(model, limits, start=start)
        if solution.outcome in (Outcome.FAILED, Outcome.OVERRUN) and self.trouble is None:
            self.trouble = solution.outcome
        return solution


def _run(
    model: LinearModel, limits: SolverLimits, start: Sequence[float] | FloatArray | None
) -> Solution:
    # Linear programs are small here: presolving costs more than it saves.
    for presolve in ("choose", "off") if model.is_integral is not None else ("off",):
        highs = _ended_highs(model, limits, start, presolve)
        # Undoing its own presolve, HiGHS may leave a row broken by just more than its tolerance.
        if highs.getModelStatus() != highspy.HighsModelStatus.kSolveError:
            break
    outcome = _outcome(highs)
    if outcome is Outcome.OVERRUN:
        return Solution(outcome=outcome)
    if model.is_integral is None:
        return _linear_solution(highs, model, outcome)
    solution = _integer_solution(highs, model, outcome)
    if start is not None:
        solution = _not_worse_than(np.asarray(start, dtype=np.float64), solution, model, limits)
    return solution


def _ended_highs(
    model: LinearModel,
    limits: SolverLimits,
    start: Sequence[float] | FloatArray | None,
    presolve: str,
) -> highspy.Highs:
    """HiGHS after its run."""
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in _options(model, limits, presolve):
        if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise RuntimeError(f"HiGHS refuses the option {name} = {value}")
    if highs.passModel(_to_highs(model)) == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS refuses the model")
    if start is not None:
        first = highspy.HighsSolution()
        first.col_value = [float(value) for value in start]
        highs.setSolution(first)
    highs.run()
    return highs


def _options(
    model: LinearModel, limits: SolverLimits, presolve: str
) -> list[tuple[str, bool | int | float | str]]:
    options: list[tuple[str, bool | int | float | str]] = [
        ("output_flag", False),
        ("threads", _NUM_THREADS),
        ("random_seed", limits.seed),
        ("time_limit", limits.guard_s),
        ("presolve", presolve),
    ]
    if model.is_integral is None:
        options.append(("simplex_iteration_limit", limits.num_iterations))
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


def _outcome(highs: highspy.Highs) -> Outcome:
    status = highs.getModelStatus()
    kinds = highspy.HighsModelStatus
    if status == kinds.kTimeLimit:
        return Outcome.OVERRUN
    if status == kinds.kOptimal:
        return Outcome.OPTIMAL
    if status in (kinds.kIterationLimit, kinds.kSolutionLimit):
        return Outcome.LIMIT
    # Every model here has an answer and a finite optimum.
    raise RuntimeError(f"HiGHS ends with the status {highs.modelStatusToString(status)}")


def _linear_solution(highs: highspy.Highs, model: LinearModel, outcome: Outcome) -> Solution:
    if outcome is Outcome.LIMIT:
        return Solution(outcome=outcome)
    answer = highs.getSolution()
    values = np.array(answer.col_value, dtype=np.float64)
    objective = _checked_objective(model, values, highs.getInfo().objective_function_value)
    proved, scale = _proved_bound(model, np.array(answer.row_dual, dtype=np.float64))
    if not objective - proved <= _PROOF_TOLERANCE * scale:
        raise RuntimeError(
            f"HiGHS calls {objective:.9g} the optimum but its duals prove {proved:.9g}"
        )
    return Solution(
        outcome=outcome,
        values=values,
        objective=objective,
        bound=min(objective, proved),
        column_duals=np.array(answer.col_dual, dtype=np.float64),
    )


def _integer_solution(highs: highspy.Highs, model: LinearModel, outcome: Outcome) -> Solution:
    info = highs.getInfo()
    bound = float(info.mip_dual_bound)
    values = np.array(highs.getSolution().col_value, dtype=np.float64)
    if math.isnan(bound):
        raise RuntimeError("HiGHS gives no number for a bound")
    if len(values) != len(model.cost) or not math.isfinite(info.objective_function_value):
        if outcome is Outcome.OPTIMAL:
            raise RuntimeError(f"HiGHS gives {len(values)} values for {len(model.cost)} columns")
        return Solution(outcome=outcome, bound=bound)
    objective = _checked_objective(model, values, info.objective_function_value)
    if bound > _with_slack(objective):
        raise RuntimeError(f"HiGHS gives {objective:.9g} for what it bounds by {bound:.9g}")
    return Solution(
        outcome=outcome, values=values, objective=objective, bound=min(bound, objective)
    )


def _not_worse_than(
    start: FloatArray, solution: Solution, model: LinearModel, limits: SolverLimits
) -> Solution:
    """The solution, or the start where a limit came before HiGHS had anything as good.

    Raises RuntimeError when the start proves that bound or optimum are wrong.
    """
    if max(_worst_excess(model, start), _worst_fraction(model, start)) > _START_TOLERANCE:
        return solution
    objective = float(model.cost @ start)
    if solution.bound > _with_slack(objective):
        raise RuntimeError(
            f"HiGHS claims the bound {solution.bound:.9g} but the start costs {objective:.9g}"
        )
    if solution.objective <= _with_slack(objective):
        return solution
    excess = solution.objective - objective
    if solution.outcome is Outcome.OPTIMAL and excess > limits.relative_gap * abs(
        solution.objective
    ):
        raise RuntimeError(
            f"HiGHS calls {solution.objective:.9g} the optimum but its start costs {objective:.9g}"
        )
    return dataclasses.replace(
        solution, values=start, objective=objective, bound=min(solution.bound, objective)
    )


def _with_slack(objective: float) -> float:
    return objective + _OBJECTIVE_TOLERANCE * (1.0 + abs(objective))


def _checked_objective(model: LinearModel, values: FloatArray, claimed: float) -> float:
    """What an answer costs; RuntimeError when it breaks what it was asked to keep."""
    excess = _worst_excess(model, values)
    if not excess <= _FEASIBILITY_TOLERANCE:
        raise RuntimeError(f"HiGHS breaks a row or a limit by {excess:.2g} of its size")
    if _worst_fraction(model, values) > _INTEGRALITY_TOLERANCE:
        raise RuntimeError("HiGHS gives a fraction for a whole number")
    objective = float(model.cost @ values)
    scale = 1.0 + float(np.abs(model.cost) @ np.abs(values))
    if not abs(objective - claimed) <= _OBJECTIVE_TOLERANCE * scale:
        raise RuntimeError(f"HiGHS claims {claimed:.9g} for what costs {objective:.9g}")
    return objective


def _worst_excess(model: LinearModel, values: FloatArray) -> float:
    """By how much of its size a row or the limit of a column is broken most; NaN stays NaN."""
    rows = model.matrix @ values
    scale = 1.0 + np.abs(model.matrix) @ np.abs(values)
    of_rows = np.maximum(model.row_lower - rows, rows - model.row_upper) / scale
    of_columns = np.maximum(model.lower - values, values - model.upper) / (1.0 + np.abs(values))
    return float(np.concatenate(([0.0], of_rows, of_columns)).max())


def _worst_fraction(model: LinearModel, values: FloatArray) -> float:
    """How far a column that takes whole numbers only is from one at most."""
    if model.is_integral is None:
        return 0.0
    whole = values[model.is_integral]
    return float(np.abs(whole - np.rint(whole)).max(initial=0.0))


def _implied_upper(model: LinearModel) -> FloatArray:
    """Upper limits of columns, also those that follow from one row of no negative number."""
    if (model.lower < 0.0).any():
        return model.upper
    is_bounding = np.isfinite(model.row_upper) & (model.matrix >= 0.0).all(axis=1)
    rows, most = model.matrix[is_bounding], model.row_upper[is_bounding, None]
    by_rows = np.divide(most, rows, out=np.full(rows.shape, np.inf), where=rows > 0.0)
    upper: FloatArray = np.minimum(model.upper, by_rows.min(axis=0, initial=np.inf))
    return upper


def _proved_bound(model: LinearModel, row_duals: FloatArray) -> tuple[float, float]:
    """What prices of the rows prove of a linear program's optimum, and the size of the sum.

    For any prices y and reduced costs ``d = cost - yA`` no x costs less than the sum of the least
    ``y_i·(A·x)_i`` and ``d_j·x_j`` that the limits allow. A price or reduced cost within HiGHS's
    tolerance of 0 counts as 0 where the limit is infinite.
    """
    tolerance = _DUAL_TOLERANCE * (1.0 + float(np.abs(model.cost).max(initial=0.0)))
    row_limits = np.where(row_duals > 0.0, model.row_lower, model.row_upper)
    prices = np.where((np.abs(row_duals) <= tolerance) & np.isinf(row_limits), 0.0, row_duals)
    reduced = model.cost - prices @ model.matrix
    limits = np.where(reduced > 0.0, model.lower, model.upper)
    reduced = np.where((np.abs(reduced) <= tolerance) & np.isinf(limits), 0.0, reduced)
    if (np.isinf(limits) & (reduced < 0.0)).any():
        # HiGHS's tolerance is one of its scaled model; here it may be more than that.
        limits = np.where(reduced > 0.0, model.lower, _implied_upper(model))
    terms = np.concatenate(
        (
            prices * np.where(prices == 0.0, 0.0, row_limits),
            reduced * np.where(reduced == 0.0, 0.0, limits),
        )
    )
    scale = 1.0 + float(np.abs(terms[np.isfinite(terms)]).sum())
    return float(terms.sum()), scale
