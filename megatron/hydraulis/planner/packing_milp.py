"""Packing of one replica as an integer program, from a packing in hand.

For one stage the question is whether one micro-batch less would do: the least largest number of
tokens of that many micro-batches, against the limit. For a pipeline the program holds the starts
and ends of 1F1B itself, so its optimum is the least time for that number of micro-batches, order
included.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.pipeline_program import PipelineColumns
from megatron.hydraulis.planner.solver import LinearModel, Solution, Solver, SolverLimits

__all__ = ["PackingAnswer", "largest_tokens", "shortest_pipeline"]

_LIMITS = SolverLimits(num_nodes=200, relative_gap=1e-4)


@dataclass(frozen=True, slots=True)
class PackingAnswer:
    """Best packing and bound for a number of micro-batches."""

    micro_batches: list[list[int]] | None
    """In their order, as places in the given lengths; None without an answer."""
    bound: float
    """Tokens of the largest micro-batch, or time in ms: no packing of this many is below."""


def largest_tokens(
    lengths: Sequence[int], num_micro_batches: int, start: Sequence[Sequence[int]], solver: Solver
) -> PackingAnswer:
    """The least largest number of tokens over num_micro_batches.

    lengths: of the share, by falling length; start: a packing into at most as many, as places in
    lengths.
    """
    n, v = len(lengths), num_micro_batches
    tokens = np.array(lengths, dtype=np.float64)
    rows = np.zeros((n + v, n * v + 1))
    for i in range(n):
        rows[i, i * v : (i + 1) * v] = 1.0
    for k in range(v):
        rows[n + k, k : n * v : v] = tokens
        rows[n + k, -1] = -1.0
    upper = np.ones(n * v + 1)
    upper[-1] = np.inf
    # Micro-batches are alike: the i-th longest sequence need not go beyond the i-th.
    for i in range(min(n, v)):
        upper[i * v + i + 1 : (i + 1) * v] = 0.0
    cost = np.zeros(n * v + 1)
    cost[-1] = 1.0
    model = LinearModel(
        cost=cost,
        lower=np.zeros(n * v + 1),
        upper=upper,
        matrix=rows,
        row_lower=np.concatenate((np.ones(n), np.full(v, -np.inf))),
        row_upper=np.concatenate((np.ones(n), np.zeros(v))),
        is_integral=np.append(np.ones(n * v, dtype=bool), False),
    )
    by_longest = sorted(start, key=min)
    first = _places(by_longest, n, v)
    first = np.append(first, max(sum(lengths[i] for i in share) for share in start))
    return _answer(solver.solve(model, _LIMITS, start=first), n, v)


def shortest_pipeline(
    lengths: Sequence[int],
    cost: SchemeCost,
    start: Sequence[Sequence[int]],
    solver: Solver,
) -> PackingAnswer:
    """The least time of a pipeline with as many micro-batches as the start has.

    lengths: of the share; start: its packing in hand, in order, as places in lengths.
    """
    n, v = len(lengths), len(start)
    columns = PipelineColumns(cost.num_stages, v)
    num_columns = columns.num + n * v
    precedences = columns.rows()
    rows = [np.append(row, np.zeros(n * v)) for row in precedences]
    row_lower, row_upper = [0.0] * len(rows), [np.inf] * len(rows)
    for k in range(v):
        # Work of a micro-batch, and its tokens.
        work, room = np.zeros(num_columns), np.zeros(num_columns)
        work[k] = 1.0
        for i, length in enumerate(lengths):
            work[columns.num + i * v + k] = -cost.sequence_time_ms(length)
            room[columns.num + i * v + k] = length
        rows += [work, room]
        row_lower += [cost.coefficients.c_ms, -np.inf]
        row_upper += [cost.coefficients.c_ms, float(cost.max_tokens)]
    for i in range(n):
        once = np.zeros(num_columns)
        once[columns.num + i * v : columns.num + (i + 1) * v] = 1.0
        rows.append(once)
        row_lower.append(1.0)
        row_upper.append(1.0)
    is_integral = np.zeros(num_columns, dtype=bool)
    is_integral[columns.num :] = True
    objective = np.zeros(num_columns)
    objective[columns.backward(0, v - 1)] = 1.0
    model = LinearModel(
        cost=objective,
        lower=np.zeros(num_columns),
        upper=np.where(is_integral, 1.0, np.inf),
        matrix=np.vstack(rows),
        row_lower=np.array(row_lower),
        row_upper=np.array(row_upper),
        is_integral=is_integral,
    )
    times_ms = [cost.coefficients.time_ms(lengths[i] for i in share) for share in start]
    first = np.concatenate((columns.ends_ms(times_ms), _places(start, n, v)))
    return _answer(solver.solve(model, _LIMITS, start=first), n, v, offset=columns.num)


def _places(start: Sequence[Sequence[int]], n: int, v: int) -> NDArray[np.float64]:
    values = np.zeros((n, v))
    for k, share in enumerate(start):
        values[list(share), k] = 1.0
    return values.ravel()


def _answer(solution: Solution, n: int, v: int, *, offset: int = 0) -> PackingAnswer:
    if not solution.is_usable or solution.values is None:
        return PackingAnswer(None, solution.bound)
    places = np.rint(solution.values[offset : offset + n * v]).reshape(n, v)
    packed = [[int(i) for i in np.nonzero(places[:, k])[0]] for k in range(v)]
    return PackingAnswer([share for share in packed if share], solution.bound)
