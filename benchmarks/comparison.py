"""A comparison of two sides over paired steps: its figures, and their tables for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

from rich.table import Table

from benchmarks.command import figures_table
from benchmarks.paired_statistics import RatioEstimate, paired_ratio
from benchmarks.step_report import StepReport, Traffic

LOSS_TOLERANCE = 1e-4
"""Largest relative difference of the losses at which both sides still run the same training."""
PHASES = ("gather", "compute", "scatter", "optimizer", "other")
MS_PER_S = 1000.0
BYTES_PER_MB = 1e6


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
        return self._phases_ms(lambda reports, name: fmean(r.phase(name).wall_s for r in reports))

    @property
    def cpu_phases_ms(self) -> dict[str, float]:
        """Median over steps of the sum over ranks."""
        return self._phases_ms(lambda reports, name: sum(r.phase(name).cpu_s for r in reports))

    def _phases_ms(self, seconds: Callable[[Sequence[StepReport], str], float]) -> dict[str, float]:
        return {
            phase: median(MS_PER_S * seconds(step, phase) for step in self.steps)
            for phase in PHASES
        }

    @property
    def mean_traffic(self) -> Traffic:
        """Of a rank."""
        by_rank = [(t.parameters_bytes, t.gather_bytes, t.scatter_bytes) for t in self.traffic]
        return Traffic(*(round(fmean(values)) for values in zip(*by_rank, strict=True)))

    def to_json(self) -> dict[str, Any]:
        """Every step, and the summary."""
        return {
            "step_times_ms": self.step_times_ms,
            "cpu_times_ms": self.cpu_times_ms,
            "phases_ms": self.phases_ms,
            "cpu_phases_ms": self.cpu_phases_ms,
            **asdict(self.mean_traffic),
        }


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
            "step_time_ratio": asdict(self.step_time_ratio),
            "cpu_time_ratio": asdict(self.cpu_time_ratio),
            "hydraulis": self.ours.to_json(),
            "megatron": self.plain.to_json(),
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


def comparison_tables(comparisons: Sequence[Comparison]) -> Iterator[Table]:
    """Step times, where they go, and bytes."""
    yield _step_times(comparisons)
    yield _phases(comparisons)
    yield _traffic(comparisons)


def _step_times(comparisons: Sequence[Comparison]) -> Table:
    ratio = "H / M\n[95 %]"
    cpu_ratio = "H / M CPU\n[95 %]"
    table = figures_table(
        "One optimizer step: hydraulis (H) against plain megatron-core (M)",
        ("strategy",),
        ("H\nms", "M\nms", ratio, "H CPU\nms", "M CPU\nms", cpu_ratio, "pairs"),
        "Medians; a step's time is that of its slowest rank, its CPU time that of all ranks. "
        "Ratios: median over pairs, bootstrap interval.",
    )
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
    return table


def _phases(comparisons: Sequence[Comparison]) -> Table:
    table = figures_table(
        "Where the time goes: wall / CPU, ms",
        ("strategy", "side"),
        PHASES,
        "Wall: median over steps of the mean over ranks, waiting for other ranks included. CPU: of "
        "all ranks together. For plain megatron-core gather is ZeRO-1's parameter all-gather, "
        "scatter is finalize_model_grads (reduce-scatter, sequence-parallel norms, division).",
    )
    for strategy, name, side in _sides(comparisons, "megatron"):
        wall_ms, cpu_ms = side.phases_ms, side.cpu_phases_ms
        cells = [f"{wall_ms[phase]:.0f} / {cpu_ms[phase]:.0f}" for phase in PHASES]
        table.add_row(strategy, name, *cells)
    return table


def _traffic(comparisons: Sequence[Comparison]) -> Table:
    table = figures_table(
        "MB that a rank receives in one step (mean over ranks)",
        ("strategy", "side"),
        ("parameters held", "gather", "scatter"),
        "Hydraulis: from its transfer plans; ZeRO-1: P·(1 - 1/dp) by definition. Without the "
        "traffic of tensor and pipeline parallelism, equal on both sides.",
    )
    for strategy, name, side in _sides(comparisons, "megatron ZeRO-1"):
        traffic = side.mean_traffic
        amounts = (traffic.parameters_bytes, traffic.gather_bytes, traffic.scatter_bytes)
        table.add_row(strategy, name, *(f"{amount / BYTES_PER_MB:.2f}" for amount in amounts))
    return table


def _sides(
    comparisons: Sequence[Comparison], plain_name: str
) -> Iterator[tuple[str, str, SideSteps]]:
    for c in comparisons:
        yield c.strategy, "hydraulis", c.ours
        yield c.strategy, plain_name, c.plain
