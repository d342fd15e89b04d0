"""Fit the constants of time to measured layouts and a cost profile, and cross-validate them.

    python -m benchmarks.layout_calibration --layouts FILE [--no-cross-validation] [--json]

FILE has the columns that `predict-layouts` reads, `status` (anything but ok is out of memory) and
`step_time_s`; the cost profile is that of a 32B model on 64 A800. Prints the constants of
software.py and device.py, the errors of every kernel, and those of groups of layouts that are
excluded from the fit. Constants of memory are counts and not fitted. docs/cost-model.md explains
the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from benchmarks.inputs import COST_PROFILE, MODEL
from megatron.hydraulis.cost_model import AnalyticCostModel, ModelShape, ProfileCostModel
from megatron.hydraulis.cost_model.device import DeviceConstants, device_constants
from megatron.hydraulis.cost_model.layouts import FixedLengthJob, Layout, predict_layout, step_time
from megatron.hydraulis.cost_model.predict_layouts_command import read_layouts
from megatron.hydraulis.cost_model.software import SOFTWARE, TRAINING, OtherTraining, Software
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.terminal import figures_table

MEASURED_SPREAD = 0.03
"""Relative spread of measured times that is a residual of 1."""
PROFILE_SPREAD = 0.06
"""Of times by a measured profile, which are not independent."""
ROBUST_RESIDUAL = 1.5
"""Larger residuals count linearly instead of squared: a few rows are outliers."""
PROFILE_LENGTHS = ((1024,), (512,) * 8, (4096,), (16384,))
"""Micro-batches for which profile and model are compared, in tokens."""
NUM_PROFILE_RANKS, RANKS_PER_NODE = 64, 8

FIRST_SOFTWARE = ("torch", "fused", "flash_attentionv1.0.8")
WITHOUT_NORM_KERNEL = (*FIRST_SOFTWARE, "flash_attention2")
WITH_NORM_KERNEL = ("flash_attention2 + RMS kernel",)
LATER_SOFTWARE = ("flash_attention2", *WITH_NORM_KERNEL)
OTHER_SOFTWARE = (*FIRST_SOFTWARE, *LATER_SOFTWARE)
NAMES = tuple(software.name for software in SOFTWARE)


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
    """To whose software it belongs; to the device if empty."""


# Expected values are counts or from data sheets; spreads are their uncertainty.
PARAMETERS = (
    Parameter("matmul_fraction", 0.8, 0.1),
    Parameter("attention_fraction", 0.62, 0.1),
    Parameter("layer_overhead_s", 1.25e-3, 1.0),
    Parameter("network_fraction", 0.6, 0.3),
    Parameter("launch_share", 0.6, 1.0, OTHER_SOFTWARE),
    # Sequence parallelism saves 7/8 of this work at tp 8, which was 0.6 of a 22B layer's 19.6 ms
    # with fused kernels (arXiv 2205.05198, table 4): about 5 passes. Data of tp 1 and 2 without
    # sequence parallelism cannot distinguish this from other work that tp 2 does not speed up.
    Parameter("hidden_passes", 6.0, 0.25, NAMES),
    Parameter("query_passes", 6.0, 0.7, NAMES),
    Parameter("ffn_passes", 5.0, 0.5, NAMES),
    Parameter("norm_passes", 20.0, 1.0, WITHOUT_NORM_KERNEL),
    Parameter("logit_passes", 20.0, 0.4, NAMES),
    Parameter("weight_passes", 2.0, 0.5, NAMES),
    Parameter("collective_latencies", 2.0, 0.3, NAMES),
    Parameter("tp_link_share", 0.75, 0.3, (TRAINING.name,)),
    # A single degree of tp cannot distinguish messages from work that every tp rank repeats: stays
    # near published runs with tp 8 and sequence parallelism (arXiv 2205.05198, tables 4, 5).
    Parameter("tp_link_share", 0.56, 0.08, OTHER_SOFTWARE),
    Parameter("score_passes", 6.0, 1.0, ("torch",)),
    Parameter("score_passes", 3.0, 1.0, ("fused",)),
    Parameter("attention_share", 0.6, 0.3, ("flash_attentionv1.0.8",)),
    Parameter("reduce_share", 0.25, 1.0, FIRST_SOFTWARE),
    # A 30B model on 256 GPUs reportedly loses 9 to 29 % to data parallelism: about 5 GB/s a GPU.
    Parameter("network_share", 0.25, 0.15, LATER_SOFTWARE),
    Parameter("wait_micro_batches", 0.3, 1.0, FIRST_SOFTWARE),
    Parameter("wait_micro_batches", 5.0, 1.0, ("flash_attention2",)),
    # Only eight rows, of one length and one depth of pipelines, determine it: deliberately low.
    Parameter("wait_micro_batches", 4.0, 0.08, WITH_NORM_KERNEL),
)


@dataclass(frozen=True)
class Constants:
    """What is fitted."""

    device: DeviceConstants
    software: Mapping[str, Software] = field(
        default_factory=lambda: {software.name: software for software in SOFTWARE}
    )
    """By name."""

    def with_values(self, logarithms: np.ndarray) -> Constants:
        """The constants with other values of PARAMETERS, given as logarithms."""
        device, software = self.device, dict(self.software)
        for parameter, value in zip(PARAMETERS, np.exp(logarithms).tolist(), strict=True):
            change = {parameter.field: value}
            if not parameter.kernels:
                device = replace(device, **change)
            for name in parameter.kernels:
                own = software[name]
                if own.other is not None and parameter.field in OtherTraining.__slots__:
                    change = {"other": replace(own.other, **{parameter.field: value})}
                software[name] = replace(own, **change)
        return Constants(device, software)

    def value(self, parameter: Parameter) -> float:
        """Of a parameter."""
        owner: Any = self.device
        if parameter.kernels:
            owner = self.software[parameter.kernels[0]]
            if parameter.field in OtherTraining.__slots__:
                owner = owner.other
        return float(getattr(owner, parameter.field))


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


def profile_ratios(constants: Constants, profile: ProfileCostModel) -> np.ndarray:
    """Predicted over profiled times of PROFILE_LENGTHS, of all schemes without cp."""
    links = device_constants("a800-80g").cluster(NUM_PROFILE_RANKS, RANKS_PER_NODE)
    model = AnalyticCostModel(
        shape=ModelShape.read(MODEL),
        device=constants.device,
        cluster=links,
        software=constants.software[TRAINING.name],
    )
    pairs = [
        (model.coefficients(row.scheme), row.coefficients)
        for row in profile.schemes
        if row.scheme.cp == 1
    ]
    return np.array(
        [
            predicted.time_ms(lengths) / profiled.time_ms(lengths)
            for predicted, profiled in pairs
            for lengths in PROFILE_LENGTHS
        ]
    )


def fit_times(
    measured: Sequence[Measured], profile: ProfileCostModel, constants: Constants
) -> Constants:
    """Constants of time by robust least squares on logarithms, regularised to expected values."""
    timed = [row for row in measured if row.step_time_s is not None]
    expected = np.log([parameter.expected for parameter in PARAMETERS])
    spread = np.array([parameter.spread for parameter in PARAMETERS])
    times_s = np.array([row.step_time_s for row in timed])

    @cache
    def predicted_s(row: Measured, device: DeviceConstants, software: Software) -> float:
        """Most derivatives are by constants that most rows do not depend on."""
        return step_time(row.job, row.layout, device, software).total_s

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        trial = constants.with_values(logarithms)
        predicted = np.array(
            [predicted_s(row, trial.device, trial.software[row.layout.kernel]) for row in timed]
        )
        return np.concatenate(
            [
                np.log(predicted / times_s) / MEASURED_SPREAD,
                np.log(profile_ratios(trial, profile)) / PROFILE_SPREAD,
                (logarithms - expected) / spread,
            ]
        )

    # Fractions are at most 1.
    most = [0.0 if each.field.endswith("_fraction") else np.inf for each in PARAMETERS]
    fitted = least_squares(
        residuals, expected, bounds=(-np.inf, most), loss="soft_l1", f_scale=ROBUST_RESIDUAL
    )
    return constants.with_values(fitted.x)


@dataclass(frozen=True, slots=True)
class Errors:
    """Of times, of predictions whether layouts fit, and of the layouts that would be chosen."""

    times: tuple[float, ...]
    """Relative."""
    rank_correlation: float
    """Spearman's, of predicted and measured times."""
    num_layouts: int
    num_wrong: int
    """Predicted to fit and out of memory, or the reverse."""
    num_false_fits: int
    chosen_fails: bool
    """Whether the fastest layout of those that are predicted to fit ran out of memory."""
    regret: float | None
    """Its excess over the fastest measured layout, relative; None if it has no time."""

    @property
    def mape(self) -> float:
        """Mean absolute percentage error of the times."""
        return 100.0 * float(np.mean(np.abs(self.times))) if self.times else float("nan")

    @property
    def largest(self) -> float:
        """Largest absolute percentage error."""
        return 100.0 * max(map(abs, self.times), default=float("nan"))


def errors_of(measured: Sequence[Measured], constants: Constants) -> Errors:
    """Errors of the model with these constants."""
    predictions = [
        predict_layout(row.job, row.layout, constants.device, constants.software[row.layout.kernel])
        for row in measured
    ]
    pairs = list(zip(measured, predictions, strict=True))
    timed = [(p.time.total_s, row.step_time_s) for row, p in pairs if row.step_time_s is not None]
    fitting = [(p.time.total_s, row.step_time_s) for row, p in pairs if p.fits]
    chosen_s = min(fitting)[1] if fitting else None
    regret = None if chosen_s is None else chosen_s / min(time_s for _, time_s in timed) - 1.0
    return Errors(
        times=tuple(predicted_s / time_s - 1.0 for predicted_s, time_s in timed),
        rank_correlation=float(spearmanr(timed).statistic) if len(timed) > 2 else float("nan"),
        num_layouts=len(measured),
        num_wrong=sum(p.fits != (row.step_time_s is not None) for row, p in pairs),
        num_false_fits=sum(p.fits and row.step_time_s is None for row, p in pairs),
        chosen_fails=bool(fitting) and chosen_s is None,
        regret=regret,
    )


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


def cross_validate(
    measured: Sequence[Measured], profile: ProfileCostModel, constants: Constants
) -> dict[str, Errors]:
    """Errors on each group with constants that were fitted without it."""
    found = {}
    for name, group in groups(measured).items():
        kept = [row for row in measured if not belongs(row.layout, group)]
        excluded = [row for row in measured if belongs(row.layout, group)]
        if kept and excluded:
            found[name] = errors_of(excluded, fit_times(kept, profile, constants))
    return found


_COLUMNS = ("times", "MAPE %", "largest %", "Spearman", "layouts", "fits wrong", "false fits")


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100.0 * share:.1f}"


def _table(title: str, rows: Mapping[str, Errors]) -> Table:
    table = figures_table(title, ("layouts",), (*_COLUMNS, "regret %"))
    for name, errors in rows.items():
        table.add_row(
            name,
            str(len(errors.times)),
            f"{errors.mape:.1f}" if errors.times else "–",
            f"{errors.largest:.1f}" if errors.times else "–",
            f"{errors.rank_correlation:.2f}" if len(errors.times) > 2 else "–",
            str(errors.num_layouts),
            str(errors.num_wrong),
            str(errors.num_false_fits),
            "out of memory" if errors.chosen_fails else _percent(errors.regret),
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
        before = Constants(device_constants(namespace.device))
        measured = read_measured(namespace.layouts)
    except HydraulisError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    profile = ProfileCostModel.read(COST_PROFILE)
    constants = fit_times(measured, profile, before)
    kernels = sorted({row.layout.kernel for row in measured})
    by_kernel = {
        name: errors_of([row for row in measured if row.layout.kernel == name], constants)
        for name in kernels
    } | {"all": errors_of(measured, constants)}
    left_out = {}
    if not namespace.no_cross_validation:
        left_out = cross_validate(measured, profile, before)
    if namespace.json:
        report = {
            "constants": {
                f"{parameter.field} of {', '.join(parameter.kernels) or 'the device'}": (
                    constants.value(parameter)
                )
                for parameter in PARAMETERS
            },
            "errors": {name: dataclasses.asdict(errors) for name, errors in by_kernel.items()},
            "left_out": {name: dataclasses.asdict(errors) for name, errors in left_out.items()},
        }
        json.dump(report, sys.stdout, indent=1)
        print()
        return 0
    console = Console(width=120)
    for parameter in PARAMETERS:
        whose = ", ".join(parameter.kernels) or "the device"
        console.print(
            f"{parameter.field:22} {constants.value(parameter):.4g}   {whose}", highlight=False
        )
    console.print(_table("fitted to all", by_kernel))
    errors = np.abs(profile_ratios(constants, profile) - 1.0)
    console.print(
        f"cost profile of 32B: median error {100 * np.median(errors):.1f} %, largest "
        f"{100 * errors.max():.1f} %"
    )
    if left_out:
        console.print(_table("excluded from the fit", left_out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
