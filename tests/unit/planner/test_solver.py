"""Dual bounds of a linear program whose columns are limited only by its rows."""

import numpy as np
import pytest

from megatron.hydraulis.planner.solver import LinearModel, _proved_bound


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
        matrix=np.array([coefficients]),
        row_lower=np.array([-np.inf]),
        row_upper=np.array([5.0]),
    )
    assert _proved_bound(model, np.array([price]))[0] == proved
