"""The fit of the layout model's constants finds known ones and agrees with measured layouts.

The measured layouts (arXiv 2311.05610) have a licence that keeps them out of this project: they
are read from a folder next to the repository.
"""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr

from benchmarks.layout_calibration import (
    MEMORY_PARAMETERS,
    TIME_PARAMETERS,
    Errors,
    Measured,
    belongs,
    errors_of,
    fit_times,
    read_measured,
    with_values,
)
from megatron.hydraulis.cost_model.layout_constants import LAYOUT_CONSTANTS
from megatron.hydraulis.cost_model.layouts import rank_memory, step_time, usable_bytes
from tests.support.fixed_length import A100, job, layout

MEASURED = Path(__file__).parents[3] / "shared" / "data" / "layouts_measured_a100.csv"
KERNELS = [kernel.name for kernel in LAYOUT_CONSTANTS.kernels]
needs_measured = pytest.mark.skipif(
    not MEASURED.exists(),
    reason=f"measured data whose licence keeps it out of this project: {MEASURED} is absent",
)


def synthetic(constants_factor: float = 1.0) -> list[Measured]:
    """A sweep with times of the model for other rates than those in the file."""
    other = dataclasses.replace(
        LAYOUT_CONSTANTS,
        tp_link_fraction=LAYOUT_CONSTANTS.tp_link_fraction / constants_factor,
        layer_launch_s=LAYOUT_CONSTANTS.layer_launch_s * constants_factor,
    )
    limit = usable_bytes(A100, other)
    rows = []
    for kernel, size, tp, pp, again in itertools.product(
        KERNELS, (1, 2, 4), (1, 2), (1, 2), (False, True)
    ):
        how = layout(size, tp, pp, kernel=kernel, recomputes_layers=again)
        fits = rank_memory(job(), how, other).total_bytes <= limit
        rows.append(
            Measured(job(), how, step_time(job(), how, A100, other).total_s if fits else None)
        )
    return rows


def test_a_fit_explains_synthetic_times() -> None:
    rows = synthetic(1.4)
    before = errors_of(rows, A100, LAYOUT_CONSTANTS)
    after = errors_of(rows, A100, fit_times(rows, A100, LAYOUT_CONSTANTS))
    assert before.mape > 1.5
    assert after.mape < 1.0
    assert after.num_wrong == 0


def test_parameters_are_constants_of_all_or_of_their_kernels() -> None:
    for parameters in (TIME_PARAMETERS, MEMORY_PARAMETERS):
        logarithms = np.log([parameter.expected for parameter in parameters])
        changed = with_values(LAYOUT_CONSTANTS, parameters, logarithms)
        for parameter in parameters:
            for name in KERNELS:
                mine = parameter.kernels == () or name in parameter.kernels
                owner = changed.kernel(name) if parameter.kernels else changed
                value = getattr(owner, parameter.field)
                if mine:
                    assert value == pytest.approx(parameter.expected)


def test_groups_contain_matching_layouts() -> None:
    how = layout(2, 2, 1)
    assert belongs(how, {"tp": 2})
    assert not belongs(how, {"tp": 2, "pp": 2})
    assert not belongs(how, {"kernel": "torch"})


def test_errors_of_nothing() -> None:
    assert np.isnan(Errors((), 0, 0).mape)


@needs_measured
def test_measured_times() -> None:
    rows = read_measured(str(MEASURED))
    assert len(rows) == 141
    for name in KERNELS:
        of_kernel = [row for row in rows if row.layout.kernel == name]
        errors = errors_of(of_kernel, A100, LAYOUT_CONSTANTS)
        assert errors.mape <= 5.0, name
        assert errors.largest <= 10.0, name
        _check_first([row for row in of_kernel if row.step_time_s is not None])
    predicted, measured = _times([row for row in rows if row.step_time_s is not None])
    assert spearmanr(predicted, measured).statistic >= 0.95


def _check_first(timed: list[Measured]) -> None:
    predicted, measured = _times(timed)
    assert measured[int(np.argmin(predicted))] <= 1.03 * min(measured)


def _times(timed: list[Measured]) -> tuple[list[float], list[float]]:
    predicted = [step_time(row.job, row.layout, A100, LAYOUT_CONSTANTS).total_s for row in timed]
    return predicted, [row.step_time_s for row in timed if row.step_time_s is not None]


@needs_measured
def test_measured_memory() -> None:
    errors = errors_of(read_measured(str(MEASURED)), A100, LAYOUT_CONSTANTS)
    assert errors.num_wrong <= 0.05 * errors.num_layouts


@needs_measured
@pytest.mark.parametrize("field", ["tp", "pp"])
def test_measured_layouts_excluded_from_the_fit(field: str) -> None:
    rows = read_measured(str(MEASURED))
    seen = [row for row in rows if not belongs(row.layout, {field: 2})]
    unseen = [row for row in rows if belongs(row.layout, {field: 2})]
    constants = fit_times(seen, A100, LAYOUT_CONSTANTS)
    assert errors_of(unseen, A100, constants).mape <= 10.0
