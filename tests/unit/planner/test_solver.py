"""Bounds that duals prove, and programs that are solved one after another."""

import dataclasses

import numpy as np
import pytest

from megatron.hydraulis.planner.solver import (
    LinearModel,
    _proved_bound,
    solve,
    solve_series,
)
from tests.support.planning import sparse


@pytest.mark.parametrize(
    ("coefficients", "price", "proved"),
    [
        ([1.0, 2.0], 0.0, -10.0),
        ([1.0, 2.0], -1.0, -5.0),
        # A negative number in the row: no limit.
        ([1.0, -2.0], 0.0, -np.inf),
    ],
)
def test_rows_limit_columns(coefficients: list[float], price: float, proved: float) -> None:
    model = LinearModel(
        cost=np.array([-1.0, -2.0]),
        lower=np.zeros(2),
        upper=np.full(2, np.inf),
        matrix=sparse(np.array([coefficients])),
        row_lower=np.array([-np.inf]),
        row_upper=np.array([5.0]),
    )
    assert _proved_bound(model, np.array([price]))[0] == proved


def test_a_series_gives_the_optima_of_its_programs() -> None:
    model = LinearModel(
        cost=np.array([-1.0, -2.0]),
        lower=np.zeros(2),
        upper=np.ones(2),
        matrix=sparse(np.array([[1.0, 3.0]])),
        row_lower=np.array([-np.inf]),
        row_upper=np.array([9.0]),
    )
    uppers = [np.array(upper) for upper in ([1.0, 1.0], [1.0, 9.0], [9.0, 9.0], [2.0, 0.0])]
    series = solve_series(model, uppers)
    alone = [solve(dataclasses.replace(model, upper=upper)) for upper in uppers]
    assert [each.objective for each in series] == pytest.approx([-3.0, -19.0 / 3.0, -9.0, -2.0])
    assert [each.bound for each in series] == pytest.approx([each.bound for each in alone])
