"""The analytic model beside the measured profile of examples/."""

from pathlib import Path

from benchmarks.estimate_errors import COLUMNS, DEFAULT_PROFILE, median_error_percent, ratios
from megatron.hydraulis.cost_model import ProfileCostModel

ROOT = Path(__file__).parents[2]


def test_the_estimate_is_near_what_was_measured() -> None:
    found = ratios(ProfileCostModel.read(ROOT / DEFAULT_PROFILE))
    errors = {
        name: median_error_percent(column)
        for name, column in zip(COLUMNS, zip(*found.values(), strict=True), strict=True)
    }
    assert errors["b"] < 7.0
    assert errors["one sequence"] < 5.0
    assert errors["eight sequences"] < 5.0
    assert errors["a"] < 15.0
    assert errors["c"] < 25.0


def test_median_leaves_out_what_was_not_measured() -> None:
    assert abs(median_error_percent([None, 1.1, 0.7, 1.2]) - 20.0) < 1e-9
