"""How unequal the micro-batches of a pipeline should be.

With equal micro-batches a replica of p stages and v micro-batches of total work X takes
``X·(1 + (p-1)/v)``. It takes less when the first and the last micro-batches are smaller than those
between: a small first one fills the pipeline sooner, a small last one drains it sooner. The
start and end times of 1F1B follow from the works t_k by additions and maxima, so the least time
over all shapes, given ``Σ t_k = X`` and ``t_k <= t_max``, is a linear program: its answer is the
shape to pack towards, and its dual gives lines

    T >= slope·X - relief·t_max

that hold for every packing of v micro-batches in every order. A line is found at X = 1 and holds
for all X, as time scales with work.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.cost_model.pipeline import FORWARD_SHARE
from megatron.hydraulis.planner.pipeline_program import PipelineColumns
from megatron.hydraulis.planner.solver import (
    LinearModel,
    Outcome,
    Solver,
    SolverError,
    SolverLimits,
    solve,
)

__all__ = [
    "MAX_SHAPED_MICRO_BATCHES",
    "Shape",
    "best_works_ms",
    "fill_bound_ms",
    "most_work_ms",
    "shapes",
]

MAX_SHAPED_MICRO_BATCHES = 24
"""Beyond, the fill is a few percent of the time at most and the linear programs grow."""

# Largest micro-batch over the mean one at which shapes are computed. From about 1.6 on a larger
# one gains nothing in any pipeline.
_LARGEST_OVER_MEAN = (1.1, 1.25, math.inf)
# Above, almost equal micro-batches are left out: the programs take longer and differ less.
_MANY_MICRO_BATCHES = 12
# HiGHS's tolerances are 1e-7 on numbers around 1; a bound has to give them away.
_SAFETY = 1e-6
# Numbers of stages and micro-batches whose shapes are kept.
_MAX_CACHED = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Shares of the work, and the bound that goes with them.

    For every packing with total work X and largest micro-batch t_max (ms, constant cost
    included): ``T >= slope·X - relief·t_max``.
    """

    shares: tuple[float, ...]
    """Of each micro-batch in its order; they add up to 1."""
    slope: float
    relief: float

    def bound_ms[T: (float, NDArray[np.float64])](self, total_ms: T, largest_ms: float) -> T:
        """The line at a total work, or at many, and a largest micro-batch."""
        return self.slope * total_ms - self.relief * largest_ms


@functools.lru_cache(maxsize=_MAX_CACHED)
def shapes(
    num_stages: int, num_micro_batches: int, forward_share: float = FORWARD_SHARE
) -> tuple[Shape, ...]:
    """From almost equal micro-batches to quite unequal ones, equal ones last.

    For one stage and above MAX_SHAPED_MICRO_BATCHES there are just the equal ones, whose line is
    weak but holds. Computed when first asked for and then kept, as it depends on nothing else.

    Raises SolverError when a linear program has no answer; nothing is kept then.
    """
    equal = Shape((1.0 / num_micro_batches,) * num_micro_batches, slope=1.0, relief=0.0)
    if num_stages == 1 or num_micro_batches > MAX_SHAPED_MICRO_BATCHES:
        return (equal,)
    if num_micro_batches == 1:
        return (Shape((1.0,), slope=float(num_stages), relief=0.0),)
    ratios = _LARGEST_OVER_MEAN[1 if num_micro_batches > _MANY_MICRO_BATCHES else 0 :]
    return (
        *(
            _best_shape(
                num_stages, num_micro_batches, min(1.0, ratio / num_micro_batches), forward_share
            )
            for ratio in ratios
        ),
        equal,
    )


def fill_bound_ms(
    num_stages: int, num_micro_batches: int, total_ms: float, largest_ms: float
) -> float:
    """Least time of num_micro_batches with this total work, none above largest_ms."""
    return max(
        shape.bound_ms(total_ms, largest_ms) for shape in shapes(num_stages, num_micro_batches)
    )


def most_work_ms(
    num_stages: int, num_micro_batches: int, time_ms: float, largest_ms: float
) -> float:
    """Most total work that num_micro_batches, none above largest_ms, can do in a time."""
    return min(
        (time_ms + shape.relief * largest_ms) / shape.slope
        for shape in shapes(num_stages, num_micro_batches)
    )


def _best_shape(
    num_stages: int, num_micro_batches: int, largest: float, forward_share: float
) -> Shape:
    """The best shape with no share above largest."""
    model = _model(num_stages, np.zeros(num_micro_batches), 1.0, largest, forward_share)
    solution = solve(model, SolverLimits())
    if solution.outcome is not Outcome.OPTIMAL:
        raise SolverError(f"no shape of {num_micro_batches} micro-batches on {num_stages} stages")
    assert solution.values is not None  # an optimal linear program has both
    assert solution.column_duals is not None
    shares = np.maximum(solution.values[:num_micro_batches], 0.0)
    # A share at its largest costs -dual per unit of t_max; other reduced costs are not negative.
    relief = -float(np.minimum(solution.column_duals[:num_micro_batches], 0.0).sum())
    return Shape(
        tuple(float(share) for share in shares / shares.sum()),
        slope=max(1.0, solution.objective + relief * largest - _SAFETY),
        relief=relief,
    )


def best_works_ms(
    num_stages: int,
    least_ms: Sequence[float],
    total_ms: float,
    largest_ms: float,
    solver: Solver,
) -> list[float] | None:
    """Works of micro-batches, in their order, of least 1F1B time for a total work.

    least_ms: shape (num_micro_batches,), what each takes at least, together at most total_ms;
    largest_ms: what each takes at most. None when the solver has no answer, which it remembers.
    """
    scale = 1.0 / total_ms
    model = _model(num_stages, np.array(least_ms) * scale, 1.0, largest_ms * scale, FORWARD_SHARE)
    solution = solver.solve(model, SolverLimits())
    if not solution.is_usable or solution.values is None:
        return None
    return [float(share) * total_ms for share in solution.values[: len(least_ms)]]


def _model(
    num_stages: int,
    least: NDArray[np.float64],
    total: float,
    largest: float,
    forward_share: float,
) -> LinearModel:
    """Least 1F1B time over the works of micro-batches between least and largest."""
    num_micro_batches = len(least)
    columns = PipelineColumns(num_stages, num_micro_batches)
    lower = np.zeros(columns.num)
    lower[:num_micro_batches] = least
    upper = np.full(columns.num, np.inf)
    upper[:num_micro_batches] = np.maximum(least, largest)
    rows = [*columns.rows(forward_share), columns.total_work()]
    cost = np.zeros(columns.num)
    cost[columns.backward(0, num_micro_batches - 1)] = 1.0
    row_lower = np.zeros(len(rows))
    row_upper = np.full(len(rows), np.inf)
    row_lower[-1] = row_upper[-1] = total
    return LinearModel(
        cost=cost,
        lower=lower,
        upper=upper,
        matrix=np.vstack(rows),
        row_lower=row_lower,
        row_upper=row_upper,
    )
