"""Step time of a static homogeneous strategy: our engine against plain megatron-core.

Both sides live at the same time, each in its own ranks; their steps alternate, so that other work
on the machine affects both. `README.md` says what this can and cannot show.

    python -m benchmarks.static_against_megatron
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from rich.progress import Progress, TaskID
from rich.table import Table

from benchmarks.command import (
    counted_progress,
    environment,
    make_parser,
    positive,
    use_cpu,
    write_figures,
)
from benchmarks.hydraulis_side import HydraulisSide
from benchmarks.paired_statistics import RatioEstimate, paired_ratio
from benchmarks.plain_megatron import PlainMegatronSide
from benchmarks.rank_set import RankSet
from benchmarks.step_report import StepReport, Traffic
from benchmarks.workload import Workload
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.terminal import figures_table, results_console

NUM_RANKS = 4
DEFAULT_STRATEGIES = ("4*tp1", "2*tp2", "2*pp2")
NUM_WARM_UPS = 3
"""Steps whose losses are compared before anything is measured: the third follows two updates."""
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
        """The time of the slowest rank, by step."""
        return [MS_PER_S * max(report.step.wall_s for report in step) for step in self.steps]

    @property
    def cpu_times_ms(self) -> list[float]:
        """The CPU time of all ranks together, by step."""
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
        """Mean over ranks."""
        by_rank = map(astuple, self.traffic)
        return Traffic(*(round(fmean(values)) for values in zip(*by_rank, strict=True)))

    def to_json(self) -> dict[str, Any]:
        """Every step, and the summary."""
        names = ("step_times_ms", "cpu_times_ms", "phases_ms", "cpu_phases_ms")
        return {name: getattr(self, name) for name in names} | asdict(self.mean_traffic)


@dataclass(frozen=True)
class Comparison:
    """Both sides of one strategy; step i of one is paired with step i of the other."""

    strategy: str
    ours: SideSteps
    plain: SideSteps
    loss_difference: float
    """Largest relative difference over the losses of the warm-up."""

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; exit status 1 if the losses of the two sides differ."""
    options = _parser().parse_args(arguments)
    console = results_console()
    use_cpu()
    workload = Workload()
    console.print(
        f"{workload.shape.num_parameters / 1e6:.1f} M parameters, {NUM_RANKS} gloo ranks on "
        f"{os.cpu_count()} cores, {workload.num_micro_batches} micro-batches of "
        f"{workload.num_tokens_per_micro_batch} tokens a step, fp32, torch {torch.__version__}"
    )
    comparisons = []
    with counted_progress("pairs") as progress:
        for text in options.strategies:
            task = progress.add_task(text, total=NUM_WARM_UPS + options.pairs)
            comparison = compare(text, workload, options, progress, task)
            comparisons.append(comparison)
            if comparison.loss_difference > LOSS_TOLERANCE:
                break
    if comparison.loss_difference > LOSS_TOLERANCE:
        console.print(
            f"[bold red]{comparison.strategy}: the two sides do not run the same training: over "
            f"the first {NUM_WARM_UPS} steps their losses differ by "
            f"{comparison.loss_difference:.1e} (relative; limit {LOSS_TOLERANCE:.0e}); nothing was "
            f"measured"
        )
        return 1
    console.print(
        f"The losses of the two sides over the first {NUM_WARM_UPS} steps differ by at most "
        f"{max(c.loss_difference for c in comparisons):.1e} (relative; limit {LOSS_TOLERANCE:.0e})."
    )
    for table in tables(comparisons):
        console.print(table)
    figures = environment() | {
        "num_ranks": NUM_RANKS,
        "plain_adamw": options.plain_adamw,
        "plain_overlap": options.plain_overlap,
        "comparisons": [c.to_json() for c in comparisons],
    }
    write_figures(console, options.json, figures)
    return 0


def compare(
    text: str, workload: Workload, options: argparse.Namespace, progress: Progress, task: TaskID
) -> Comparison:
    """Warm up, compare losses, measure pairs; stops after the warm-up if losses differ."""
    scheme = Strategy.parse(text, NUM_RANKS).replicas[0].scheme
    make_plain = partial(
        PlainMegatronSide,
        workload,
        tp=scheme.tp,
        pp=scheme.pp,
        overlaps_gradients=options.plain_overlap,
        has_fused_adamw=options.plain_adamw == "fused",
    )
    with (
        RankSet(f"plain megatron-core, {text}", NUM_RANKS, make_plain) as plain,
        RankSet(f"hydraulis, {text}", NUM_RANKS, partial(HydraulisSide, workload, text)) as ours,
    ):
        sides = {"ours": ours, "plain": plain}
        steps: dict[str, list[tuple[StepReport, ...]]] = {name: [] for name in sides}
        difference = float("inf")
        for iteration in range(NUM_WARM_UPS + options.pairs):
            # The first of a pair changes, so that neither side always finds the other's caches.
            for name in sorted(sides, reverse=iteration % 2 == 0):
                steps[name].append(tuple(sides[name].call(iteration)))
            progress.advance(task)
            if iteration + 1 == NUM_WARM_UPS:
                difference = loss_difference(steps["ours"], steps["plain"])
                if difference > LOSS_TOLERANCE:
                    break
        measured = {
            name: SideSteps(tuple(steps[name][NUM_WARM_UPS:]), tuple(side.call(None)))
            for name, side in sides.items()
        }
    return Comparison(text, measured["ours"], measured["plain"], difference)


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


def tables(comparisons: Sequence[Comparison]) -> Iterator[Table]:
    """Step times, time by phase, and bytes."""
    table = figures_table(
        "One optimizer step: hydraulis (H) against plain megatron-core (M)",
        ("strategy",),
        ("H\nms", "M\nms", "H / M\n[95 %]", "H CPU\nms", "M CPU\nms", "H / M CPU\n[95 %]", "pairs"),
        caption="Medians; a step's time is that of its slowest rank, its CPU time that of all "
        "ranks. Ratios: median over pairs, bootstrap interval.",
    )
    for c in comparisons:
        table.add_row(
            c.strategy,
            f"{median(c.ours.step_times_ms):.0f}",
            f"{median(c.plain.step_times_ms):.0f}",
            str(c.step_time_ratio).replace(" [", "\n["),
            f"{median(c.ours.cpu_times_ms):.0f}",
            f"{median(c.plain.cpu_times_ms):.0f}",
            str(c.cpu_time_ratio).replace(" [", "\n["),
            str(c.step_time_ratio.num_pairs),
        )
    yield table
    sides = [
        (c.strategy, name, side)
        for c in comparisons
        for name, side in (("hydraulis", c.ours), ("megatron", c.plain))
    ]
    table = figures_table(
        "Time by phase: wall / CPU, ms",
        ("strategy", "side"),
        PHASES,
        caption="Wall: median over steps of the mean over ranks, waiting for other ranks "
        "included. CPU: of "
        "all ranks together. For plain megatron-core gather is ZeRO-1's parameter all-gather, "
        "scatter is finalize_model_grads (reduce-scatter, sequence-parallel norms, division).",
    )
    for strategy, name, side in sides:
        wall_ms, cpu_ms = side.phases_ms, side.cpu_phases_ms
        cells = [f"{wall_ms[phase]:.0f} / {cpu_ms[phase]:.0f}" for phase in PHASES]
        table.add_row(strategy, name, *cells)
    yield table
    table = figures_table(
        "MB that a rank receives in one step (mean over ranks)",
        ("strategy", "side"),
        ("parameters held", "gather", "scatter"),
        caption="Hydraulis: from its transfer plans; Megatron: ZeRO-1, P·(1 - 1/dp) by "
        "definition. Without "
        "the traffic of tensor and pipeline parallelism, which is the same on both sides.",
    )
    for strategy, name, side in sides:
        amounts = (f"{amount / BYTES_PER_MB:.2f}" for amount in astuple(side.mean_traffic))
        table.add_row(strategy, name, *amounts)
    yield table


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "static_against_megatron",
        "Step time of a static homogeneous strategy against plain megatron-core.",
    )
    parser.add_argument(
        "--strategies",
        nargs="+",
        type=_homogeneous,
        default=list(DEFAULT_STRATEGIES),
        metavar="SPEC",
        help=f"homogeneous strategies on {NUM_RANKS} ranks",
    )
    parser.add_argument(
        "--pairs", type=positive, default=20, help="measured pairs of steps per strategy"
    )
    parser.add_argument(
        "--plain-adamw",
        choices=("fused", "default"),
        default="fused",
        help="torch's fused AdamW kernel for plain megatron-core too, or the loop that it falls "
        "back to without Transformer Engine and apex",
    )
    parser.add_argument(
        "--plain-overlap",
        action="store_true",
        help="run plain megatron-core with --overlap-grad-reduce",
    )
    return parser


def _homogeneous(text: str) -> str:
    try:
        strategy = Strategy.parse(text, NUM_RANKS)
    except HydraulisError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not strategy.is_homogeneous or strategy.schemes[0].cp > 1:
        raise argparse.ArgumentTypeError(
            f"plain megatron-core runs one scheme with cp=1 on all ranks but '{text}' is something "
            f"else; use one like {', '.join(DEFAULT_STRATEGIES)}"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
