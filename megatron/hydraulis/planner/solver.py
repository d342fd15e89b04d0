"""One guarded way to run HiGHS.

A failure of the solver ends here as an outcome, never as an exception: the caller has a plan and
keeps it. An answer is trusted as far as it can be checked: rows, limits and cost are recomputed,
and the bound is computed from the duals. The limit counts simplex iterations, which are the same on
every machine; the wall clock is a safety net, and a run that it ended is marked OVERRUN.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import enum
import logging
import math
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_NUM_THREADS = 1
# An answer that breaks a row by more than this share of its size is refused.
_FEASIBILITY_TOLERANCE = 1e-5
# Between equal objectives and bounds: other order of summation, HiGHS's tolerances.
_OBJECTIVE_TOLERANCE = 1e-6
# HiGHS's own default is 1e-7, on a scaled model.
_DUAL_TOLERANCE = 1e-6
# Between a linear program's optimum and what its duals prove, as a share of their sum.
_PROOF_TOLERANCE = 1e-6
# Simplex iterations after which a run stops.
_NUM_ITERATIONS = 20_000
# Wall clock. Programs here take milliseconds, so load alone does not reach it. It is less than
# ahead.GRACE_S, so a single program does not make a planner process count as hung.
_GUARD_S = 30.0


class SolverError(RuntimeError):
    """A program that planning depends on has no answer."""


class Outcome(enum.Enum):
    """Outcome of a run."""

    OPTIMAL = "optimal"
    LIMIT = "limit"
    """The iteration limit was reached: no answer."""
    OVERRUN = "overrun"
    """The time limit was reached; the answer is dropped, as another machine may give another."""
    FAILED = "failed"
    """An exception, a status that these models cannot have, or an answer that is proved wrong."""


@dataclass(frozen=True, slots=True)
class SparseMatrix:
    """The numbers of a matrix that are not 0, row by row: most are 0 in these programs."""

    rows: IntArray
    """Shape (num_entries,), like columns and values; rising."""
    columns: IntArray
    values: FloatArray
    shape: tuple[int, int]

    def times(self, vector: FloatArray) -> FloatArray:
        """A·x, shape (num_rows,)."""
        terms = self.values * vector[self.columns]
        return np.bincount(self.rows, terms, self.shape[0])

    def transposed_times(self, vector: FloatArray) -> FloatArray:
        """y·A, shape (num_columns,)."""
        terms = self.values * vector[self.rows]
        return np.bincount(self.columns, terms, self.shape[1])

    def magnitude(self) -> SparseMatrix:
        """|A|."""
        return dataclasses.replace(self, values=np.abs(self.values))


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearModel:
    """Minimise ``cost·x`` with ``lower <= x <= upper`` and ``row_lower <= A·x <= row_upper``."""

    cost: FloatArray
    """Shape (num_columns,)."""
    lower: FloatArray
    upper: FloatArray
    matrix: SparseMatrix
    """A."""
    row_lower: FloatArray
    row_upper: FloatArray


class ProgramBuilder:
    """A program under construction: columns and rows are added one by one, or many at once."""

    def __init__(self) -> None:
        self._lower, self._upper, self._cost = array("d"), array("d"), array("d")
        self._columns_of_rows, self._values = array("q"), array("d")
        self._nums_in_rows: list[int] = []
        self._limits: list[tuple[float, float]] = []

    def column(self, *, lower: float = 0.0, upper: float = math.inf, cost: float = 0.0) -> int:
        """Add a column; returns its index."""
        self._lower.append(lower)
        self._upper.append(upper)
        self._cost.append(cost)
        return len(self._cost) - 1

    def columns(self, uppers: Iterable[float], *, cost: float = 0.0) -> range:
        """Add a column from 0 to each of these limits; returns their indices."""
        first = len(self._cost)
        self._upper.extend(uppers)
        new = range(first, len(self._upper))
        self._lower.extend(0.0 for _ in new)
        self._cost.extend(cost for _ in new)
        return new

    def row(self, entries: Mapping[int, float], lower: float, upper: float) -> None:
        """Add a row; entries: coefficients by column."""
        self._columns_of_rows.extend(entries)
        self._values.extend(entries.values())
        self._nums_in_rows.append(len(entries))
        self._limits.append((lower, upper))

    def rows(self, columns: Sequence[int], values: FloatArray, lower: float, upper: float) -> None:
        """Add rows in the same columns; values: coefficients, shape (num_rows, num_columns)."""
        num_rows = len(values)
        self._columns_of_rows.extend(array("q", columns) * num_rows)
        self._values.frombytes(values.tobytes())
        self._nums_in_rows += [len(columns)] * num_rows
        self._limits += [(lower, upper)] * num_rows

    def model(self) -> LinearModel:
        """The program."""
        lower, upper, cost = map(np.array, (self._lower, self._upper, self._cost))
        num_rows = len(self._limits)
        rows = np.repeat(np.arange(num_rows), self._nums_in_rows)
        columns, values = np.array(self._columns_of_rows), np.array(self._values)
        some = values != 0.0
        matrix = SparseMatrix(rows[some], columns[some], values[some], (num_rows, len(cost)))
        row_lower, row_upper = (np.array(limits) for limits in zip(*self._limits, strict=True))
        return LinearModel(
            cost=cost,
            lower=lower,
            upper=upper,
            matrix=matrix,
            row_lower=row_lower,
            row_upper=row_upper,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Result of a run. Unless it is OPTIMAL, values is None and the bound is -inf."""

    outcome: Outcome
    values: FloatArray | None = None
    objective: float = math.inf
    bound: float = -math.inf
    """Lower bound of the cost of any feasible x."""
    column_duals: FloatArray | None = None
    """Reduced costs."""


def solve(
    model: LinearModel,
    *,
    num_iterations: int = _NUM_ITERATIONS,
    guard_s: float = _GUARD_S,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> Solution:
    """Solve a linear program. Never raises. Iterations end a run; guard_s is a safety net."""
    if guard_s <= 0.0:
        return Solution(outcome=Outcome.OVERRUN)
    start_s = clock()
    try:
        highs = _new_highs(model, num_iterations, guard_s, seed)
        highs.run()
        solution = _solution(highs, model)
    except Exception as error:  # Planning continues with the plan so far.
        logger.warning("the solver failed and its answer is not used: %r", error)
        return Solution(outcome=Outcome.FAILED)
    if solution.outcome is not Outcome.OPTIMAL and clock() - start_s > guard_s:
        return Solution(outcome=Outcome.OVERRUN)
    return solution


def solve_series(model: LinearModel, uppers: Iterable[FloatArray]) -> list[Solution]:
    """Solve a linear program for several upper limits of its columns. Never raises.

    Each starts from the optimum before it, which takes a fraction of the iterations. The last
    solution is FAILED if not all have an answer.
    """
    found: list[Solution] = []
    highs = None
    try:
        for upper in uppers:
            limited = dataclasses.replace(model, upper=upper)
            if highs is None:
                highs = _new_highs(limited)
            else:
                num = len(upper)
                highs.changeColsBounds(num, np.arange(num, dtype=np.int32), model.lower, upper)
            highs.run()
            found.append(_solution(highs, limited))
    except Exception as error:  # As in solve.
        logger.warning("the solver failed and its answer is not used: %r", error)
        found.append(Solution(outcome=Outcome.FAILED))
    return found


class Deadline:
    """Wall-clock time at which planning has to end; limit_s counts from now, None for no end."""

    def __init__(
        self, limit_s: float | None, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._end_s = math.inf if limit_s is None else clock() + limit_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._end_s - self._clock())

    @property
    def is_over(self) -> bool:
        return self.remaining_s <= 0.0


class Solver:
    """Runs programs until a deadline, and remembers failures."""

    def __init__(self, deadline: Deadline, *, seed: int = 0) -> None:
        self.deadline = deadline
        self.trouble: Outcome | None = None
        """The first FAILED or OVERRUN of a run."""
        self._seed = seed

    def solve(self, model: LinearModel) -> Solution:
        """Works as the function solve does, but not beyond the deadline."""
        guard_s = min(_GUARD_S, self.deadline.remaining_s)
        solution = solve(model, guard_s=guard_s, seed=self._seed)
        if solution.outcome in (Outcome.FAILED, Outcome.OVERRUN) and self.trouble is None:
            self.trouble = solution.outcome
        return solution


def _new_highs(
    model: LinearModel,
    num_iterations: int = _NUM_ITERATIONS,
    guard_s: float = _GUARD_S,
    seed: int = 0,
) -> highspy.Highs:
    options: dict[str, bool | int | float | str] = {
        "output_flag": False,
        "threads": _NUM_THREADS,
        "random_seed": seed,
        "time_limit": guard_s,
        "presolve": "off",  # it costs more than it saves, as the programs are small
        "simplex_iteration_limit": num_iterations,
    }
    highs = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in options.items():
        if highs.setOptionValue(name, value) != highspy.HighsStatus.kOk:
            raise RuntimeError(f"HiGHS refuses the option {name} = {value}")
    if highs.passModel(_to_highs(model)) == highspy.HighsStatus.kError:
        raise RuntimeError("HiGHS refuses the model")
    return highs


def _to_highs(model: LinearModel) -> highspy.HighsLp:
    program = highspy.HighsLp()
    program.num_col_ = len(model.cost)
    program.num_row_ = len(model.row_lower)
    program.col_cost_ = model.cost
    program.col_lower_ = model.lower
    program.col_upper_ = model.upper
    program.row_lower_ = model.row_lower
    program.row_upper_ = model.row_upper
    matrix = model.matrix
    counts = np.bincount(matrix.rows, minlength=matrix.shape[0])
    program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    program.a_matrix_.index_ = matrix.columns.astype(np.int32)
    program.a_matrix_.value_ = matrix.values
    return program


def _outcome(highs: highspy.Highs) -> Outcome:
    status = highs.getModelStatus()
    kinds = highspy.HighsModelStatus
    if status == kinds.kTimeLimit:
        return Outcome.OVERRUN
    if status == kinds.kOptimal:
        return Outcome.OPTIMAL
    if status == kinds.kIterationLimit:
        return Outcome.LIMIT
    # Every model here has an answer and a finite optimum.
    raise RuntimeError(f"HiGHS ends with the status {highs.modelStatusToString(status)}")


def _solution(highs: highspy.Highs, model: LinearModel) -> Solution:
    """The checked answer of a run that has ended."""
    outcome = _outcome(highs)
    if outcome is not Outcome.OPTIMAL:
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


def _checked_objective(model: LinearModel, values: FloatArray, claimed: float) -> float:
    """Cost of an answer; RuntimeError if it breaks a row or a limit."""
    excess = _worst_excess(model, values)
    if not excess <= _FEASIBILITY_TOLERANCE:
        raise RuntimeError(f"HiGHS breaks a row or a limit by {excess:.2g} of its size")
    objective = float(model.cost @ values)
    scale = 1.0 + float(np.abs(model.cost) @ np.abs(values))
    if not abs(objective - claimed) <= _OBJECTIVE_TOLERANCE * scale:
        raise RuntimeError(f"HiGHS claims {claimed:.9g} for what costs {objective:.9g}")
    return objective


def _worst_excess(model: LinearModel, values: FloatArray) -> float:
    """Largest violation of a row or a column's limits, as a share of its size; NaN stays NaN."""
    rows = model.matrix.times(values)
    scale = 1.0 + model.matrix.magnitude().times(np.abs(values))
    of_rows = np.maximum(model.row_lower - rows, rows - model.row_upper) / scale
    of_columns = np.maximum(model.lower - values, values - model.upper) / (1.0 + np.abs(values))
    return float(np.concatenate(([0.0], of_rows, of_columns)).max())


def _implied_upper(model: LinearModel) -> FloatArray:
    """Upper limits of columns, including those implied by single rows without negative numbers."""
    if (model.lower < 0.0).any():
        return model.upper
    matrix = model.matrix
    is_bounding = np.isfinite(model.row_upper)
    is_bounding[matrix.rows[matrix.values < 0.0]] = False
    some = is_bounding[matrix.rows] & (matrix.values > 0.0)
    upper: FloatArray = model.upper.copy()
    most = model.row_upper[matrix.rows[some]] / matrix.values[some]
    np.minimum.at(upper, matrix.columns[some], most)
    return upper


def _proved_bound(model: LinearModel, row_duals: FloatArray) -> tuple[float, float]:
    """Lower bound that prices of the rows prove for a linear program, and the size of the sum.

    For any prices y and reduced costs ``d = cost - yA`` no x costs less than the sum of the least
    ``y_i·(A·x)_i`` and ``d_j·x_j`` that the limits allow. A price or reduced cost within HiGHS's
    tolerance of 0 counts as 0 where the limit is infinite.
    """
    tolerance = _DUAL_TOLERANCE * (1.0 + float(np.abs(model.cost).max(initial=0.0)))
    row_limits = np.where(row_duals > 0.0, model.row_lower, model.row_upper)
    prices = np.where((np.abs(row_duals) <= tolerance) & np.isinf(row_limits), 0.0, row_duals)
    reduced = model.cost - model.matrix.transposed_times(prices)
    limits = np.where(reduced > 0.0, model.lower, model.upper)
    reduced = np.where((np.abs(reduced) <= tolerance) & np.isinf(limits), 0.0, reduced)
    if (np.isinf(limits) & (reduced < 0.0)).any():
        # HiGHS's tolerance applies to its scaled model; here the error may be larger.
        limits = np.where(reduced > 0.0, model.lower, _implied_upper(model))
    terms = np.concatenate(
        (
            prices * np.where(prices == 0.0, 0.0, row_limits),
            reduced * np.where(reduced == 0.0, 0.0, limits),
        )
    )
    scale = 1.0 + float(np.abs(terms[np.isfinite(terms)]).sum())
    return float(terms.sum()), scale


@contextlib.contextmanager
def native_prints_to_stderr() -> Iterator[None]:
    """Keeps lines that HiGHS prints despite its options out of a command's standard output."""
    native = ctypes.CDLL(None)
    sys.stdout.flush()
    native.fflush(None)
    stdout, stderr = 1, 2
    output = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        yield
    finally:
        native.fflush(None)
        os.dup2(output, stdout)
        os.close(output)
