"""The figures of `benchmarks.prediction_error` out of known records."""

import pytest

from benchmarks.prediction_error import figures
from tests.unit.observability.run_folders import make_record


def test_errors_are_medians_over_iterations() -> None:
    times_s = ((1.0, 1.0), (1.1, 1.0), (1.2, 1.0), (2.6, 2.0), (0.4, 0.5))
    records = [
        make_record(number, iteration_time_s=measured_s, predicted_time_s=predicted_s)
        for number, (measured_s, predicted_s) in enumerate(times_s, start=1)
    ]
    errors = figures("run", "2*tp1", records)
    assert errors.num_iterations == 5
    assert errors.median == pytest.approx(0.2)
    assert errors.worst == pytest.approx(0.3)
    assert errors.median_signed == pytest.approx(0.1)
    assert errors.spread == pytest.approx((1.2 - 1.0) / 1.1)
