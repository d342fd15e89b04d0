"""Fit the constants of time to measured layouts and a cost profile, and cross-validate them.

    python -m benchmarks.layout_calibration --layouts FILE [--no-cross-validation] [--json]

FILE is a CSV of Llamas trained with other software: seq_len, world_size, micro_batch_size, tp, pp,
gbs (sequences a step), sequence_parallel, act_ckpt, kernel, layers, hidden, ffn, vocab, status
(anything but ok is out of memory) and step_time_s. The profile is that of a 32B model on 64 A800.
Prints the constants of `KernelConstants`, of device.py and of the other software, the errors of
every kernel, and those of groups of layouts that are excluded from the fit. Constants of memory are
counts and not fitted. docs/cost-model.md explains the model.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from benchmarks.inputs import COST_PROFILE, MODEL, llama_shape
from megatron.hydraulis.cost_model import AnalyticCostModel, ModelShape, ProfileCostModel
from megatron.hydraulis.cost_model.analytic import KERNELS, KernelConstants
from megatron.hydraulis.cost_model.device import DeviceConstants, device_constants
from megatron.hydraulis.cost_model.layer_memory import LayerMemory
from megatron.hydraulis.cost_model.layouts import FixedLengthJob, Layout, cost_model_of
from megatron.hydraulis.cost_model.overlap import CostTerm
from megatron.hydraulis.cost_model.pipeline import StageCosts, equal_micro_batches_time_ms
from megatron.hydraulis.cost_model.regrouping import FP32_BYTES
from megatron.hydraulis.frozen import StageLayers
from megatron.hydraulis.strategy import Scheme
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
HEAD_SIZE = 128
MS_PER_S = 1e3


BF16_BYTES = 2
# Gradients in bf16 twice (reduce-scatter, all-gather), parameters once.
DATA_PARALLEL_BYTES = 6
OPTIMIZER_BYTES = 3 * FP32_BYTES
HIDDEN_STATES = 2
"""That a layer of other software keeps besides: residuals and dropout's output."""
LOGIT_BYTES = 16
"""Of an entry of the logits, which every tp rank gathers: logits and their gradient in bf16, and in
fp32 their copy, its log-softmax and the gradient of it."""
RESERVE_BYTES = 2.5e9
"""Context, communicators and libraries."""
VISIBLE_MEMORY = 81252 * 2**20 / 80e9
"""Bytes that CUDA shows of a device over the nominal ones: 81,252 MiB of 80 GB."""
KERNEL_S = 10.4e-6
"""Of these measurements, whose host's time adds up: 0.68 ms a layer."""
WAIT_TOKENS = 2048
"""Length of sequences up to which waits grow with it: that of the measured layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Software(KernelConstants):
    """Differences of other software, which ran 141 layouts of a 13B on 64 A100 (arXiv 2311.05610).

    Replicas add up gradients, in bf16, by all-reduce and gather parameters (ZeRO-1) instead of
    regrouping. What it keeps in memory are counts of its operations.
    """

    logit_products: float = 3.0
    tp_link_share: float = 0.593
    launch_share: float = 0.326
    """Constant cost of a layer, over that of the profile's software."""
    norm_passes: float = 48.5
    """Hidden states that norms move without a kernel, in bf16 rows."""
    attention_share: float = 1.0
    """Rate of attention without stored scores for long sequences, over the device's."""
    score_passes: float = 0.0
    """How often the forward of attention that stores its scores moves one of them, as in bf16."""
    network_share: float = 1.0
    """Of what the network's links reach in this program: messages between stages and replicas."""
    reduce_share: float = 1.0
    """Of that: messages between replicas."""
    wait_micro_batches: float
    """What a pipeline loses in a step besides filling and draining, as a number of micro-batches of
    sequences of at most WAIT_TOKENS. The cause is unknown."""
    wait_share: float = 1.0
    """Most that it loses, as a share of its micro-batches."""
    norm_states: float = 6.0
    """Hidden states that norms without a kernel keep: of both an fp32 copy and the normalised
    input."""
    attention_states: float = 2.0
    """Kept states as wide as the queries, besides: those before the rotation."""
    score_bytes: float = 0.0
    """Kept of a stored score: softmax's output and mask. As much is needed for a layer at work."""


# Target of the fit: data parallelism costs a 30B model 9 to 29 % on 256 GPUs.
_LATER = Software(network_share=0.227, wait_micro_batches=7.79)
_FIRST = Software(reduce_share=0.0787, wait_micro_batches=0.3)
SOFTWARE: Mapping[str, KernelConstants] = {
    "hydraulis": KERNELS,
    "torch": replace(_FIRST, score_passes=17.1, score_bytes=8.0),
    "fused": replace(_FIRST, score_passes=8.32, score_bytes=8.0),
    # Copies of query, key and value too.
    "flash_attentionv1.0.8": replace(_FIRST, attention_share=0.527, attention_states=5.0),
    "flash_attention2": _LATER,
    # With few micro-batches, published sweeps show next to no wait with this kernel.
    "flash_attention2 + RMS kernel": replace(
        _LATER, norm_passes=0.0, norm_states=0.0, wait_micro_batches=4.08, wait_share=0.125
    ),
}
"""By kernel. Three ran in one generation of their authors' software, two in a later one."""
NAMES = OURS, *OTHER_SOFTWARE = tuple(SOFTWARE)
FIRST_SOFTWARE, LATER_SOFTWARE = OTHER_SOFTWARE[:3], OTHER_SOFTWARE[3:]
WITHOUT_NORM_KERNEL, WITH_NORM_KERNEL = OTHER_SOFTWARE[:4], OTHER_SOFTWARE[4:]


Group = Mapping[str, object]
"""Layouts with these values of fields."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A constant to fit, with the prior distribution of its logarithm."""

    field: str
    expected: float
    spread: float
    """Of its logarithm."""
    kernels: Sequence[str] = ()
    """To whose software it belongs; to the device if empty."""


# Expected values are counts or from data sheets; spreads are their uncertainty.
PARAMETERS = (
    # With passes through memory alone the fit moves 27 rows of the MLP's width, not 5.
    Parameter("product_share", 0.95, 0.15, NAMES),
    Parameter("kernel_s", 19e-6, 1.0),
    Parameter("network_fraction", 0.6, 0.3),
    Parameter("launch_share", 0.6, 1.0, OTHER_SOFTWARE),
    # Sequence parallelism saves 7/8 of this work at tp 8, which was 0.6 of a 22B layer's 19.6 ms
    # with fused kernels (arXiv 2205.05198, table 4): about 5 passes. Data of tp 1 and 2 without
    # sequence parallelism cannot distinguish this from other work that tp 2 does not speed up.
    Parameter("hidden_passes", 6.0, 0.25, NAMES),
    Parameter("query_passes", 6.0, 0.2, NAMES),
    Parameter("ffn_passes", 5.0, 0.2, NAMES),
    Parameter("norm_passes", 20.0, 1.0, WITHOUT_NORM_KERNEL),
    Parameter("logit_passes", 20.0, 0.2, NAMES),
    Parameter("weight_passes", 2.0, 0.5, NAMES),
    Parameter("network_latencies", 10.0, 0.5, NAMES),
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
    """The fitted constants."""

    device: DeviceConstants
    software: Mapping[str, KernelConstants] = field(default_factory=lambda: SOFTWARE)

    def with_values(self, logarithms: np.ndarray) -> Constants:
        """The constants with other values of PARAMETERS, given as logarithms."""
        device, software = self.device, dict(self.software)
        for parameter, value in zip(PARAMETERS, np.exp(logarithms).tolist(), strict=True):
            change = {parameter.field: value}
            if not parameter.kernels:
                device = replace(device, **change)
            for name in parameter.kernels:
                software[name] = replace(software[name], **change)
        return Constants(device, software)

    def software_of(self, row: Measured) -> Software:
        """The software that a layout ran with."""
        software = self.software[row.kernel]
        assert isinstance(software, Software)
        return software

    def value(self, parameter: Parameter) -> float:
        """The value of a parameter."""
        owner = self.software[parameter.kernels[0]] if parameter.kernels else self.device
        return float(getattr(owner, parameter.field))


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured layout; step_time_s is None if it ran out of memory."""

    job: FixedLengthJob
    layout: Layout
    kernel: str
    step_time_s: float | None

    def belongs(self, group: Group) -> bool:
        """True if the layout has these values."""
        return group.items() <= (dataclasses.asdict(self.layout) | {"kernel": self.kernel}).items()


def read_measured(path: str) -> list[Measured]:
    """The rows of a file of measured layouts."""
    with open(path, newline="", encoding="utf-8") as file:
        return [_measured(row) for row in csv.DictReader(file)]


def _measured(row: Mapping[str, str]) -> Measured:
    hidden = int(row["hidden"])
    shape = llama_shape(
        num_layers=int(row["layers"]),
        hidden_size=hidden,
        ffn_hidden_size=int(row["ffn"]),
        num_attention_heads=hidden // HEAD_SIZE,
        num_query_groups=hidden // HEAD_SIZE,
        vocab_size=int(row["vocab"]),
    )
    return Measured(
        FixedLengthJob(
            shape=shape,
            num_ranks=int(row["world_size"]),
            sequence_tokens=int(row["seq_len"]),
            num_sequences=int(row["gbs"]),
        ),
        Layout(
            micro_batch_size=int(row["micro_batch_size"]),
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            sequence_parallel=row["sequence_parallel"] == "True",
            recomputes_layers=row["act_ckpt"] == "every_layer",
        ),
        row["kernel"],
        float(row["step_time_s"]) if row["status"] == "ok" else None,
    )


@dataclass(frozen=True, kw_only=True)
class OtherCostModel(AnalyticCostModel):
    """The cost model with the kernels and messages of other software."""

    other: Software

    def attention(self, scheme: Scheme) -> CostTerm:
        """Whole squares if scores are stored: all are computed, and half of them are masked."""
        if not self.other.score_passes:
            return 1.0 / self.other.attention_share * super().attention(scheme)
        assert self.device.kernels is not None
        rate = self.peak_flops_per_s * self.device.kernels.product.peak_fraction
        moved = self.other.score_passes * BF16_BYTES * self.shape.num_attention_heads / scheme.tp
        compute_s = 2 * (2 * self.shape.score_size / scheme.tp) / rate
        return CostTerm(compute_s + moved / self.device.memory_bytes_per_s)

    def stage_terms(
        self, scheme: Scheme, layers: StageLayers, *, is_last: bool
    ) -> dict[str, CostTerm]:
        """The backward does not compute stored scores again."""
        terms = super().stage_terms(scheme, layers, is_last=is_last)
        if self.other.score_passes:
            terms["attention"] = layers.number * (3.0 * self.attention(scheme))
        return terms

    def boundary(self, scheme: Scheme) -> CostTerm:
        """Replicas come before stages in the order of ranks."""
        term, cluster = super().boundary(scheme), self.cluster
        if scheme.pp == 1:
            return term
        near, far = (cluster.point_to_point(num) for num in (scheme.num_ranks, cluster.num_ranks))
        share = self.other.network_share if far is cluster.inter_node else 1.0
        per_token_s = term.per_token_s * near.bytes_per_s / (far.bytes_per_s * share)
        return CostTerm(0.0, per_token_s, 2 * far.latency_s)


def step_time_s(row: Measured, device: DeviceConstants, software: Software) -> float:
    """Predicted time of a step: 1F1B, the wait of the pipeline and messages between replicas."""
    job, layout = row.job, row.layout
    changed = replace(device, kernel_s=device.kernel_s * software.launch_share)
    of_layout = cost_model_of(job, layout, changed)
    model = OtherCostModel(
        shape=job.shape,
        device=changed,
        cluster=of_layout.cluster,
        sequence_parallel=layout.sequence_parallel,
        recompute=of_layout.recompute,
        kernels=replace(software, hidden_passes=software.hidden_passes + software.norm_passes),
        other=software,
    )
    stages = StageCosts(model, job.shape).coefficients(layout.scheme)
    stages_ms = [each.time_ms([job.sequence_tokens] * layout.micro_batch_size) for each in stages]
    num_micro_batches = layout.num_micro_batches(job)
    num_waited = min(
        software.wait_micro_batches * min(1.0, WAIT_TOKENS / job.sequence_tokens),
        software.wait_share * num_micro_batches,
        (layout.pp - 1.0) * (num_micro_batches - 1),  # as long as if stages took turns
    )
    share = stages[0].forward_share
    busy_ms = equal_micro_batches_time_ms(stages_ms, num_micro_batches, share)
    busy_s = (busy_ms + max(stages_ms) * num_waited) / MS_PER_S
    return busy_s + data_parallel_s(job, layout, device, software)


def data_parallel_s(
    job: FixedLengthJob, layout: Layout, device: DeviceConstants, software: Software
) -> float:
    """The time of the fullest stage; ranks that add up the same gradients share their node's
    network."""
    shape, dp = job.shape, layout.dp(job)
    num_layers = layout.scheme.layers_per_stage(shape.num_layers)[0]
    num_ends = 1 if layout.pp > 1 else 2
    num_parameters = num_layers * shape.num_parameters_per_layer
    num_parameters += num_ends * shape.num_embedding_parameters
    num_bytes = DATA_PARALLEL_BYTES * num_parameters / layout.tp * (dp - 1) / dp
    num_together = max(1, min(job.ranks_per_node // layout.tp, dp))
    share = device.link_fraction * software.network_share * software.reduce_share
    return num_bytes / (num_together * device.inter_node.bytes_per_s * share)


def fits(row: Measured, device: DeviceConstants, software: Software) -> bool:
    """True if the fullest rank fits in memory.

    It holds its state and, at one moment, what micro-batches keep, a layer at work and the logits.
    Weights, gradients and a share of the optimizer's state (ZeRO-1) are all of its state.
    """
    job, layout, scheme = row.job, row.layout, row.layout.scheme
    memory = cost_model_of(job, layout, device).memory
    layer = LayerMemory(model=memory, scheme=scheme)
    scores = software.score_bytes * job.sequence_tokens * job.shape.num_attention_heads / layout.tp
    more = (HIDDEN_STATES + software.norm_states) * layer.hidden_part
    more += software.attention_states * (layer.query + layer.key) / 2
    more += layer.mlp + scores  # the output of an activation without a fused kernel
    num_tokens = layout.micro_batch_size * job.sequence_tokens
    num_tokens += -num_tokens % scheme.token_quantum
    bytes_per_parameter = 2 * BF16_BYTES + OPTIMIZER_BYTES / layout.dp(job)
    for stage, num_layers in enumerate(scheme.layers_per_stage(job.shape.num_layers)):
        num_parameters = memory.role_bytes(scheme, stage) / (BF16_BYTES + FP32_BYTES)
        most_in_flight = layout.pp - stage
        kept = memory.activation_bytes(scheme, stage, 1) / most_in_flight
        kept += 0.0 if layout.recomputes_layers else num_layers * more
        kept *= min(layout.num_micro_batches(job), most_in_flight)
        kept += layer.again(num_layers) + layout.recomputes_layers * more
        kept += layer.hidden + layer.mlp + scores
        kept += LOGIT_BYTES * job.shape.vocab_size * (stage == layout.pp - 1)
        peak = bytes_per_parameter * num_parameters + kept * num_tokens
        if peak > VISIBLE_MEMORY * device.memory_bytes - RESERVE_BYTES:
            return False
    return True


def profile_ratios(constants: Constants, profile: ProfileCostModel) -> np.ndarray:
    """Predicted over profiled times of PROFILE_LENGTHS, of all schemes without cp."""
    links = device_constants("a800-80g").cluster(NUM_PROFILE_RANKS, RANKS_PER_NODE)
    model = AnalyticCostModel(
        shape=ModelShape.read(MODEL),
        device=constants.device,
        cluster=links,
        kernels=constants.software[OURS],
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
        return step_time_s(row, device, software)

    def residuals(logarithms: np.ndarray) -> np.ndarray:
        trial = constants.with_values(logarithms)
        predicted = np.array(
            [predicted_s(row, trial.device, trial.software_of(row)) for row in timed]
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
    """Errors of times, of predictions whether layouts fit, and of the layouts that are chosen."""

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
    found = []
    for row in measured:
        of_row = row, constants.device, constants.software_of(row)
        found.append((step_time_s(*of_row), fits(*of_row), row.step_time_s))
    timed = [(predicted_s, time_s) for predicted_s, _, time_s in found if time_s is not None]
    fitting = [(predicted_s, time_s) for predicted_s, does_fit, time_s in found if does_fit]
    chosen_s = min(fitting)[1] if fitting else None
    regret = None if chosen_s is None else chosen_s / min(time_s for _, time_s in timed) - 1.0
    return Errors(
        times=tuple(predicted_s / time_s - 1.0 for predicted_s, time_s in timed),
        rank_correlation=float(spearmanr(timed).statistic) if len(timed) > 2 else float("nan"),
        num_layouts=len(measured),
        num_wrong=sum(does_fit != (time_s is not None) for _, does_fit, time_s in found),
        num_false_fits=sum(does_fit and time_s is None for _, does_fit, time_s in found),
        chosen_fails=bool(fitting) and chosen_s is None,
        regret=regret,
    )


def groups(measured: Sequence[Measured]) -> dict[str, Group]:
    """The groups that are excluded from a fit, one at a time, by name."""
    found: dict[str, Group] = {
        f"{field} {degree}": {field: degree} for degree in (1, 2) for field in ("tp", "pp")
    }
    for size in sorted({row.layout.micro_batch_size for row in measured}):
        found[f"micro-batch {size}"] = {"micro_batch_size": size}
    found["all with recomputation"] = {"recomputes_layers": True}
    found["all without recomputation"] = {"recomputes_layers": False}
    for name in sorted({row.kernel for row in measured}):
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
        kept = [row for row in measured if not row.belongs(group)]
        excluded = [row for row in measured if row.belongs(group)]
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
    before = Constants(replace(device_constants(namespace.device), kernel_s=KERNEL_S))
    measured = read_measured(namespace.layouts)
    profile = ProfileCostModel.read(COST_PROFILE)
    constants = fit_times(measured, profile, before)
    kernels = sorted({row.kernel for row in measured})
    by_kernel = {
        name: errors_of([row for row in measured if row.kernel == name], constants)
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
