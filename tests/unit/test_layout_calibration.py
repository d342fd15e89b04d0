"""The fit of the layout model's constants finds known ones and agrees with measured layouts.

The measured layouts (arXiv 2311.05610) have a licence that keeps them out of this project: they
are read from a folder next to the repository.
"""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.inputs import COST_PROFILE
from benchmarks.layout_calibration import (
    PARAMETERS,
    Constants,
    Errors,
    Measured,
    belongs,
    errors_of,
    fit_times,
    groups,
    profile_ratios,
    read_measured,
)
from megatron.hydraulis.cost_model import ProfileCostModel
from megatron.hydraulis.cost_model.layouts import predict_layout
from tests.support.fixed_length import A100, KERNELS, job, layout

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "layouts_measured_a100.csv"
OTHERS = KERNELS[1:]
CONSTANTS = Constants(A100)
PROFILE = ProfileCostModel.read(COST_PROFILE)
needs_measured = pytest.mark.skipif(
    not MEASURED.exists(),
    reason=f"measured data whose licence keeps it out of this project: {MEASURED} is absent",
)


def synthetic(factor: float) -> list[Measured]:
    """A sweep with times of the model for other constants."""
    logarithms = np.log([CONSTANTS.value(parameter) for parameter in PARAMETERS])
    is_other = [each.field == "launch_share" for each in PARAMETERS]
    other = CONSTANTS.with_values(logarithms + np.log(factor) * np.array(is_other))
    rows = []
    for kernel, size, tp, pp, again in itertools.product(
        OTHERS, (1, 4), (1, 2), (1, 2), (False, True)
    ):
        how = layout(size, tp, pp, kernel=kernel, recomputes_layers=again)
        found = predict_layout(job(), how, other.device, other.software[kernel])
        rows.append(Measured(job(), how, found.time.total_s if found.fits else None))
    return rows


def test_a_fit_explains_synthetic_times() -> None:
    rows = synthetic(2.0)
    before = errors_of(rows, CONSTANTS)
    after = errors_of(rows, fit_times(rows, PROFILE, CONSTANTS))
    assert before.mape > 1.5
    assert after.mape < 1.0
    assert after.num_wrong == 0
    assert not after.chosen_fails
    assert after.rank_correlation > 0.99


def test_parameters_are_constants_of_the_device_or_of_their_software() -> None:
    changed = CONSTANTS.with_values(np.log([parameter.expected for parameter in PARAMETERS]))
    for parameter in PARAMETERS:
        assert changed.value(parameter) == pytest.approx(parameter.expected)
    assert changed.software["torch"].norm_passes != changed.software[KERNELS[-1]].norm_passes


def test_a_layout_that_ran_out_of_memory_is_a_failed_choice() -> None:
    row = Measured(job(), layout(1, 2), 30.0)
    slower = Measured(job(), layout(4, 2, 2), 31.0)
    choice = errors_of([row, slower], CONSTANTS)
    assert (choice.chosen_fails, choice.regret) == (False, 0.0)
    failed = errors_of([dataclasses.replace(row, step_time_s=None), slower], CONSTANTS)
    assert (failed.chosen_fails, failed.regret, failed.num_false_fits) == (True, None, 1)
    worse = errors_of([dataclasses.replace(row, step_time_s=62.0), slower], CONSTANTS)
    assert worse.regret == pytest.approx(1.0)


def test_groups_contain_matching_layouts() -> None:
    how = layout(2, 2, 1)
    assert belongs(how, {"tp": 2})
    assert not belongs(how, {"tp": 2, "pp": 2})
    assert not belongs(how, {"kernel": "torch"})


def test_errors_of_nothing() -> None:
    assert np.isnan(Errors((), 0.0, 0, 0, 0, False, None).mape)


def test_the_cost_profile_of_32b() -> None:
    errors = np.abs(profile_ratios(CONSTANTS, PROFILE) - 1.0)
    assert np.median(errors) <= 0.015
    assert np.sort(errors)[-2] <= 0.07  # one scheme has an outlier at 16,384 tokens


@needs_measured
def test_measured_layouts() -> None:
    rows = read_measured(str(MEASURED))
    assert len(rows) == 141
    for name in OTHERS:
        errors = errors_of([row for row in rows if row.layout.kernel == name], CONSTANTS)
        assert errors.mape <= 4.0, name
        assert errors.largest <= 9.0, name
        assert errors.rank_correlation >= 0.84, name
        assert errors.regret is not None, name
        assert errors.regret <= 0.03, name
    errors = errors_of(rows, CONSTANTS)
    assert errors.rank_correlation >= 0.98
    assert errors.num_wrong <= 0.03 * errors.num_layouts


@needs_measured
@pytest.mark.parametrize("name", ["tp 2", "pp 2"])
def test_measured_layouts_excluded_from_the_fit(name: str) -> None:
    rows = read_measured(str(MEASURED))
    group = groups(rows)[name]
    constants = fit_times(
        [row for row in rows if not belongs(row.layout, group)], PROFILE, CONSTANTS
    )
    errors = errors_of([row for row in rows if belongs(row.layout, group)], constants)
    assert errors.mape <= 8.0
    assert errors.rank_correlation >= 0.9
    assert errors.regret is not None
    assert errors.regret <= 0.03
