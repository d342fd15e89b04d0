"""The figures of a comparison as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from rich.table import Table

from benchmarks.comparison import PHASES, Comparison, SideSteps

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
