"""Fit the constants of the layout model to measured layouts, and cross-validate them.

    python -m benchmarks.layout_calibration --layouts FILE [--no-cross-validation] [--json]

FILE has the columns that `predict-layouts` reads, `status` (anything but ok is out of memory) and
`step_time_s`. Prints the constants of layout_constants.py, the errors of every kernel, and those
of groups of layouts that are excluded from the fit. docs/cost-model.md explains the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares, minimize

from megatron.hydraulis.cost_model.device import DeviceConstants, device_constants
from megatron.hydraulis.cost_model.layout_constants import LAYOUT_CONSTANTS, LayoutConstants
from megatron.hydraulis.cost_model.layouts import (
    FixedLengthJob,
    Layout,
    rank_memory,
    step_time,
    usable_bytes,
)
from megatron.hydraulis.cost_model.predict_layouts_command import read_layouts
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.terminal import figures_table

MEASURED_SPREAD = 0.03
"""Relative spread of measured times that is a residual of 1."""
ROBUST_RESIDUAL = 1.5
"""Larger residuals count linearly instead of squared: a few rows are outliers."""
MEMORY_SPREAD_BYTES = 2e9
"""Bytes above the limit at which the odds of running out of memory are e to 1."""
MEMORY_CAP = 6.0
"""Distance from the limit, in spreads, beyond which a layout has no further influence."""

FIRST_SOFTWARE = ("torch", "fused", "flash_attentionv1.0.8")
LATER_SOFTWARE = ("flash_attention2", "flash_attention2 + RMS kernel")
WITH_NORM_KERNEL = LATER_SOFTWARE[1:]


Group = Mapping[str, object]
"""Layouts with these values of fields."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A constant to fit, with the prior distribution of its logarithm."""

    field: str
    expected: float
    spread: float
    """Of its logarithm."""
    kernels: tuple[str, ...] = ()
    """To which it applies; all if empty."""


# Expected values are counts or from data sheets; spreads are their uncertainty.
TIME_PARAMETERS = (
    Parameter("matmul_fraction", 1.1, 0.1),
    Parameter("layer_launch_s", 3e-4, 1.0),
    # Sequence parallelism saves 7/8 of this work at tp 8, which was 0.6 of a 22B layer's 19.6 ms
    # with fused kernels (arXiv 2205.05198, table 4): about 5 passes. Data of tp 1 and 2 without
    # sequence parallelism cannot distinguish this from other work that tp 2 does not speed up.
    Parameter("hidden_passes", 6.0, 0.25),
    Parameter("query_passes", 6.0, 0.7),
    Parameter("ffn_passes", 5.0, 0.5),
    Parameter("norm_passes", 20.0, 1.0),
    Parameter("logit_passes", 20.0, 0.4),
    Parameter("weight_passes", 2.0, 0.5),
    # A single degree of tp cannot distinguish messages from work that every tp rank repeats: stays
    # near published runs with tp 8 and sequence parallelism (arXiv 2205.05198, tables 4, 5).
    Parameter("tp_link_fraction", 0.45, 0.08),
    Parameter("tp_latency_s", 2e-5, 0.3),
    Parameter("score_passes", 6.0, 1.0, ("torch",)),
    Parameter("score_passes", 3.0, 1.0, ("fused",)),
    Parameter("attention_fraction", 0.74, 0.3, ("flash_attentionv1.0.8",)),
    Parameter("attention_fraction", 1.24, 0.1, LATER_SOFTWARE),
    Parameter("data_parallel_fraction", 0.2, 1.0, FIRST_SOFTWARE),
    # A 30B model on 256 GPUs reportedly loses 9 to 29 % to data parallelism: about 5 GB/s a GPU.
    Parameter("data_parallel_fraction", 0.2, 0.15, LATER_SOFTWARE),
    Parameter("pipeline_wait_micro_batches", 0.3, 1.0, FIRST_SOFTWARE),
    Parameter("pipeline_wait_micro_batches", 5.0, 1.0, ("flash_attention2",)),
    # Only eight rows, of one length and one depth of pipelines, determine it: deliberately low.
    Parameter("pipeline_wait_micro_batches", 4.0, 0.08, WITH_NORM_KERNEL),
)
MEMORY_PARAMETERS = (
    Parameter("hidden_states_kept", 5.0, 0.25),
    Parameter("norm_states_kept", 7.0, 0.4),
    Parameter("attention_states_kept", 6.0, 0.25),
    Parameter("ffn_states_kept", 4.0, 0.25),
    Parameter("working_layers", 1.0, 0.5),
    Parameter("logit_bytes_split", 8.0, 0.5),
    Parameter("logit_bytes_whole", 2.0, 1.0),
    Parameter("fragmentation", 1.04, 0.03),
    Parameter("reserve_bytes", 3e9, 0.4),
    Parameter("score_bytes", 8.0, 0.4, ("torch",)),
    Parameter("score_bytes", 5.0, 0.4, ("fused",)),
    Parameter("copied_hidden_states", 3.0, 0.6, ("flash_attentionv1.0.8",)),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured layout; step_time_s is None if it ran out of memory."""

    job: FixedLengthJob
    layout: Layout
    step_time_s: float | None


def read_measured(path: str) -> list[Measured]:
    """The rows of a file of measured layouts."""
    return [
        Measured(
            row.job,
            row.layout,
            float(row.cells["step_time_s"]) if row.cells["status"] == "ok" else None,
        )
        for row in read_layouts(path)
    ]


def with_values(
    constants: LayoutConstants, parameters: Sequence[Parameter], logarithms: np.ndarray
) -> LayoutConstants:
    """The constants with other values of the parameters, given as logarithms."""
    shared: dict[str, Any] = {}
    by_kernel: dict[str, dict[str, Any]] = {}
    for parameter, logarithm in zip(parameters, logarithms, strict=True):
        value = float(np.exp(logarithm))
        if not parameter.kernels:
            shared[parameter.field] = value
        for kernel in parameter.kernels:
            by_kernel.setdefault(kernel, {})[parameter.field] = value
    kernels = tuple(
        dataclasses.replace(kernel, **by_kernel.get(kernel.name, {}))
        for kernel in constants.kernels
    )
    return dataclasses.replace(constants, kernels=kernels, **shared)


def fit_times(
    measured: Sequence[Measured], device: DeviceConstants, constants: LayoutConstants
) -> LayoutConstants:
    """Constants of time by robust least squares on logarithms, regularised to expected values."""
    timed = [row for row in measured if row.step_time_s is not None]
    expected, spread = _expected(TIME_PARAMETERS)
    times_s = np.array([row.step_time_s for row in timed])

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        trial = with_values(constants, TIME_PARAMETERS, logarithms)
        predicted = [step_time(row.job, row.layout, device, trial).total_s for row in timed]
        errors = np.log(np.array(predicted) / times_s) / MEASURED_SPREAD
        return np.concatenate([errors, (logarithms - expected) / spread])

    fitted = least_squares(residuals, expected, loss="soft_l1", f_scale=ROBUST_RESIDUAL)
    return with_values(constants, TIME_PARAMETERS, fitted.x)


def fit_memory(
    measured: Sequence[Measured], device: DeviceConstants, constants: LayoutConstants
) -> LayoutConstants:
    """Constants of memory by logistic regression of fitting, regularised to expected values."""
    expected, spread = _expected(MEMORY_PARAMETERS)
    signs = np.array([1.0 if row.step_time_s is not None else -1.0 for row in measured])
    limit = usable_bytes(device, constants)

    def loss(logarithms: np.ndarray) -> float:
        trial = with_values(constants, MEMORY_PARAMETERS, logarithms)
        needed = [rank_memory(row.job, row.layout, trial).total_bytes for row in measured]
        margins = np.clip(signs * (limit - np.array(needed)) / MEMORY_SPREAD_BYTES, -MEMORY_CAP, 50)
        far = ((logarithms - expected) / spread) ** 2
        return float(np.sum(np.log1p(np.exp(-margins))) + 0.5 * np.sum(far))

    point = expected
    for _ in range(2):  # restart a simplex that has shrunk at a step of this loss
        options = {"maxiter": 3000, "maxfev": 3000, "adaptive": True}
        point = minimize(loss, point, method="Nelder-Mead", options=options).x
    return with_values(constants, MEMORY_PARAMETERS, point)


def _expected(parameters: Sequence[Parameter]) -> tuple[np.ndarray, np.ndarray]:
    expected = np.log([parameter.expected for parameter in parameters])
    return expected, np.array([parameter.spread for parameter in parameters])


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of times, and the number of wrong predictions whether layouts fit."""

    times: tuple[float, ...]
    num_wrong: int
    num_layouts: int

    @property
    def mape(self) -> float:
        """Mean absolute percentage error of the times."""
        return 100.0 * float(np.mean(np.abs(self.times))) if self.times else float("nan")

    @property
    def largest(self) -> float:
        """Largest absolute percentage error."""
        return 100.0 * max(map(abs, self.times), default=float("nan"))


def errors_of(
    measured: Sequence[Measured], device: DeviceConstants, constants: LayoutConstants
) -> Errors:
    """Errors of the model with these constants."""
    limit = usable_bytes(device, constants)
    times = tuple(
        step_time(row.job, row.layout, device, constants).total_s / row.step_time_s - 1.0
        for row in measured
        if row.step_time_s is not None
    )
    num_wrong = sum(
        (rank_memory(row.job, row.layout, constants).total_bytes <= limit)
        != (row.step_time_s is not None)
        for row in measured
    )
    return Errors(times, num_wrong, len(measured))


def belongs(layout: Layout, group: Group) -> bool:
    """Whether a layout has these values of fields."""
    return all(getattr(layout, field) == value for field, value in group.items())


def groups(measured: Sequence[Measured]) -> dict[str, Group]:
    """The groups that are excluded from a fit, one at a time, by name."""
    found: dict[str, Group] = {
        f"{field} {degree}": {field: degree} for degree in (1, 2) for field in ("tp", "pp")
    }
    for size in sorted({row.layout.micro_batch_size for row in measured}):
        found[f"micro-batch {size}"] = {"micro_batch_size": size}
    found["all with recomputation"] = {"recomputes_layers": True}
    found["all without recomputation"] = {"recomputes_layers": False}
    for name in sorted({row.layout.kernel for row in measured}):
        found[f"{name}, tp 2"] = {"kernel": name, "tp": 2}
        found[f"{name}, pp 2"] = {"kernel": name, "pp": 2}
        found[f"{name}, recomputation"] = {"kernel": name, "recomputes_layers": True}
    return found


def cross_validate(measured: Sequence[Measured], device: DeviceConstants) -> dict[str, Errors]:
    """Errors on each group with constants that were fitted without it."""
    found = {}
    for name, group in groups(measured).items():
        kept = [row for row in measured if not belongs(row.layout, group)]
        excluded = [row for row in measured if belongs(row.layout, group)]
        if kept and excluded:
            constants = fit_memory(kept, device, fit_times(kept, device, LAYOUT_CONSTANTS))
            found[name] = errors_of(excluded, device, constants)
    return found


def _table(title: str, rows: Mapping[str, Errors]) -> Table:
    table = figures_table(
        title, ("layouts",), ("with a time", "MAPE %", "largest %", "layouts", "fits wrong")
    )
    for name, errors in rows.items():
        table.add_row(
            name,
            str(len(errors.times)),
            f"{errors.mape:.1f}" if errors.times else "–",
            f"{errors.largest:.1f}" if errors.times else "–",
            str(errors.num_layouts),
            str(errors.num_wrong),
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, cross-validate, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layout_calibration")
    parser.add_argument("--layouts", required=True, help="CSV of measured layouts")
    parser.add_argument("--device", default="a100-80g", help="default: %(default)s")
    parser.add_argument("--no-cross-validation", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    namespace = parser.parse_args(argv)
    try:
        device = device_constants(namespace.device)
        measured = read_measured(namespace.layouts)
    except HydraulisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    constants = fit_memory(measured, device, fit_times(measured, device, LAYOUT_CONSTANTS))
    kernels = sorted({row.layout.kernel for row in measured})
    by_kernel = {
        name: errors_of([row for row in measured if row.layout.kernel == name], device, constants)
        for name in kernels
    } | {"all": errors_of(measured, device, constants)}
    left_out = {}
    if not namespace.no_cross_validation:
        left_out = cross_validate(measured, device)
    if namespace.json:
        report = {
            "constants": dataclasses.asdict(constants),
            "errors": {name: _to_json(errors) for name, errors in by_kernel.items()},
            "left_out": {name: _to_json(errors) for name, errors in left_out.items()},
        }
        json.dump(report, sys.stdout, indent=1)
        print()
        return 0
    console = Console(width=100)
    for parameter in (*TIME_PARAMETERS, *MEMORY_PARAMETERS):
        owner = constants.kernel(parameter.kernels[0]) if parameter.kernels else constants
        whose = ", ".join(parameter.kernels)
        console.print(
            f"{parameter.field:30} {getattr(owner, parameter.field):.4g}   {whose}", highlight=False
        )
    console.print(_table("fitted to all", by_kernel))
    if left_out:
        console.print(_table("excluded from the fit", left_out))
    return 0


def _to_json(errors: Errors) -> dict[str, float | int | None]:
    timed = bool(errors.times)
    return {
        "num_times": len(errors.times),
        "mape_percent": errors.mape if timed else None,
        "largest_percent": errors.largest if timed else None,
        "num_layouts": errors.num_layouts,
        "num_fits_wrong": errors.num_wrong,
    }


if __name__ == "__main__":
    sys.exit(main())
