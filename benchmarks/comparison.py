"""A comparison of two sides over paired steps: its figures, and their tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table

from benchmarks.paired_statistics import RatioEstimate, paired_ratio
from benchmarks.step_report import StepReport, Traffic

LOSS_TOLERANCE = 1e-4
"""Largest relative difference of the losses at which both sides still run the same training."""
PHASES = ("gather", "compute", "scatter", "optimizer", "other")
MS_PER_S = 1000.0


@dataclass(frozen=True)
class SideSteps:
    """One side's steps: for each step the reports of all ranks, and the traffic of all ranks."""

    steps: tuple[tuple[StepReport, ...], ...]
    traffic: tuple[Traffic, ...]

    @property
    def step_times_ms(self) -> list[float]:
        """Of every step: its slowest rank."""
        return [MS_PER_S * max(report.step.wall_s for report in step) for step in self.steps]

    @property
    def cpu_times_ms(self) -> list[float]:
        """Of every step: all ranks together."""
        return [MS_PER_S * sum(report.step.cpu_s for report in step) for step in self.steps]

    @property
    def phases_ms(self) -> dict[str, float]:
        """Median over steps of the mean over ranks; waiting counts where it happens."""
        return {
            phase: median(
                MS_PER_S * fmean(report.phase(phase).wall_s for report in step)
                for step in self.steps
            )
            for phase in PHASES
        }

    @property
    def cpu_phases_ms(self) -> dict[str, float]:
        """Median over steps of the sum over ranks."""
        return {
            phase: median(
                MS_PER_S * sum(report.phase(phase).cpu_s for report in step) for step in self.steps
            )
            for phase in PHASES
        }

    @property
    def mean_traffic(self) -> Traffic:
        """Of a rank."""
        return Traffic(
            parameters_bytes=round(fmean(t.parameters_bytes for t in self.traffic)),
            gather_bytes=round(fmean(t.gather_bytes for t in self.traffic)),
            scatter_bytes=round(fmean(t.scatter_bytes for t in self.traffic)),
        )


@dataclass(frozen=True)
class Comparison:
    """Both sides of one strategy; step i of one is paired with step i of the other."""

    strategy: str
    ours: SideSteps
    plain: SideSteps
    loss_difference: float
    """Largest relative difference over the warm-up's losses."""

    @property
    def step_time_ratio(self) -> RatioEstimate:
        """Ours over plain."""
        return paired_ratio(self.ours.step_times_ms, self.plain.step_times_ms)

    @property
    def cpu_time_ratio(self) -> RatioEstimate:
        """Ours over plain."""
        return paired_ratio(self.ours.cpu_times_ms, self.plain.cpu_times_ms)

    def to_json(self) -> dict[str, Any]:
        """Everything that the tables show, and every pair."""
        return {
            "strategy": self.strategy,
            "loss_difference": self.loss_difference,
            "step_time_ratio": _estimate_json(self.step_time_ratio),
            "cpu_time_ratio": _estimate_json(self.cpu_time_ratio),
            "hydraulis": _side_json(self.ours),
            "megatron": _side_json(self.plain),
        }


def loss_of_step(reports: Sequence[StepReport]) -> float:
    """The loss per token that the ranks agree on; ranks without the last stage do not know it."""
    known = [report.loss for report in reports if report.loss == report.loss]
    if not known:
        raise ValueError("no rank knows the loss of the step")
    return known[0]


def loss_difference(
    ours: Sequence[Sequence[StepReport]], plain: Sequence[Sequence[StepReport]]
) -> float:
    """Largest relative difference of the two sides' losses over the given steps."""
    return max(
        abs(loss_of_step(a) - loss_of_step(b)) / abs(loss_of_step(b))
        for a, b in zip(ours, plain, strict=True)
    )


def _estimate_json(estimate: RatioEstimate) -> dict[str, float]:
    return {
        "median": estimate.median,
        "low": estimate.low,
        "high": estimate.high,
        "num_pairs": estimate.num_pairs,
    }


def _side_json(side: SideSteps) -> dict[str, Any]:
    traffic = side.mean_traffic
    return {
        "step_times_ms": side.step_times_ms,
        "cpu_times_ms": side.cpu_times_ms,
        "phases_ms": side.phases_ms,
        "cpu_phases_ms": side.cpu_phases_ms,
        "parameters_bytes": traffic.parameters_bytes,
        "gather_bytes": traffic.gather_bytes,
        "scatter_bytes": traffic.scatter_bytes,
    }


BYTES_PER_MB = 1e6


def comparison_tables(comparisons: Sequence[Comparison]) -> Iterator[Table]:
    """Step times, where they go, and bytes."""
    yield _step_times(comparisons)
    yield _phases(comparisons)
    yield _traffic(comparisons)


def _step_times(comparisons: Sequence[Comparison]) -> Table:
    table = Table(title="One optimizer step: hydraulis (H) against plain megatron-core (M)")
    table.add_column("strategy")
    for column in (
        "H\nms",
        "M\nms",
        "H / M\n\\[95 %]",
        "H CPU\nms",
        "M CPU\nms",
        "H / M CPU\n\\[95 %]",
    ):
        table.add_column(column, justify="right")
    table.add_column("pairs", justify="right")
    for c in comparisons:
        table.add_row(
            c.strategy,
            f"{median(c.ours.step_times_ms):.0f}",
            f"{median(c.plain.step_times_ms):.0f}",
            str(c.step_time_ratio).replace(" [", "\n\\["),
            f"{median(c.ours.cpu_times_ms):.0f}",
            f"{median(c.plain.cpu_times_ms):.0f}",
            str(c.cpu_time_ratio).replace(" [", "\n\\["),
            str(c.step_time_ratio.num_pairs),
        )
    table.caption = (
        "Medians; a step's time is that of its slowest rank, its CPU time that of all ranks. "
        "Ratios: median over pairs, bootstrap interval."
    )
    return table


def _phases(comparisons: Sequence[Comparison]) -> Table:
    table = Table(title="Where the time goes: wall / CPU, ms")
    for column in ("strategy", "side"):
        table.add_column(column)
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for strategy, name, side in _sides(comparisons, "megatron"):
        wall_ms, cpu_ms = side.phases_ms, side.cpu_phases_ms
        cells = [f"{wall_ms[phase]:.0f} / {cpu_ms[phase]:.0f}" for phase in PHASES]
        table.add_row(strategy, name, *cells)
    table.caption = (
        "Wall: median over steps of the mean over ranks, waiting for other ranks included. CPU: of "
        "all ranks together. For plain megatron-core gather is ZeRO-1's parameter all-gather, "
        "scatter is finalize_model_grads (reduce-scatter, sequence-parallel norms, division)."
    )
    return table


def _traffic(comparisons: Sequence[Comparison]) -> Table:
    table = Table(title="MB that a rank receives in one step (mean over ranks)")
    for column in ("strategy", "side"):
        table.add_column(column)
    for column in ("parameters held", "gather", "scatter"):
        table.add_column(column, justify="right")
    for strategy, name, side in _sides(comparisons, "megatron ZeRO-1"):
        traffic = side.mean_traffic
        amounts = (traffic.parameters_bytes, traffic.gather_bytes, traffic.scatter_bytes)
        table.add_row(strategy, name, *(f"{amount / BYTES_PER_MB:.2f}" for amount in amounts))
    table.caption = (
        "Hydraulis: from its transfer plans; ZeRO-1: P·(1 - 1/dp) by definition. Without the "
        "traffic of tensor and pipeline parallelism, equal on both sides."
    )
    return table


def _sides(
    comparisons: Sequence[Comparison], plain_name: str
) -> Iterator[tuple[str, str, SideSteps]]:
    for c in comparisons:
        yield c.strategy, "hydraulis", c.ours
        yield c.strategy, plain_name, c.plain
