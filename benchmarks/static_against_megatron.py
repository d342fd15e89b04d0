"""Step time of our static homogeneous strategy against plain megatron-core, paired.

Both sides live at the same time, each in ranks of its own; only one works at a time, and their
steps alternate, so that whatever else the machine does falls on both. `README.md` says what this
can and cannot show.

    python -m benchmarks.static_against_megatron
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from rich.progress import Progress

from benchmarks.command import (
    counted_progress,
    environment,
    import_on_cpu,
    make_parser,
    positive,
    wide_console,
    write_figures,
)
from benchmarks.comparison import (
    LOSS_TOLERANCE,
    Comparison,
    SideSteps,
    comparison_tables,
    loss_difference,
)
from benchmarks.rank_set import RankSet, Worker
from benchmarks.step_report import StepReport
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.strategy import Strategy

if TYPE_CHECKING:
    from benchmarks.workload import Workload

NUM_RANKS = 4
DEFAULT_STRATEGIES = ("4*tp1", "2*tp2", "2*pp2")
NUM_WARM_UPS = 3
"""Steps whose losses are compared before anything is measured: the third follows two updates."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; exit status 1 if the two sides do not train alike."""
    options = _parser().parse_args(arguments)
    console = wide_console()
    import_on_cpu(console)
    from benchmarks.workload import Workload

    workload = Workload()
    console.print(
        f"{workload.shape.num_parameters / 1e6:.1f} M parameters, {NUM_RANKS} gloo ranks on "
        f"{os.cpu_count()} cores, {workload.num_micro_batches} micro-batches of "
        f"{workload.num_tokens_per_micro_batch} tokens a step, fp32, torch {torch.__version__}"
    )
    comparisons = []
    with counted_progress(console, "pairs") as progress:
        for text in options.strategies:
            task = progress.add_task(text, total=NUM_WARM_UPS + options.pairs)
            comparison = compare(text, workload, options, progress=progress, task=task)
            if comparison.loss_difference > LOSS_TOLERANCE:
                break
            comparisons.append(comparison)
    if comparison.loss_difference > LOSS_TOLERANCE:
        console.print(
            f"[bold red]{comparison.strategy}: the two sides do not train alike: over the first "
            f"{NUM_WARM_UPS} steps their losses differ by {comparison.loss_difference:.1e} "
            f"(relative), more than {LOSS_TOLERANCE:.0e}; their times cannot be compared"
        )
        return 1
    console.print(
        f"Both sides train alike: over the {NUM_WARM_UPS} warm-up steps (two updates) their losses "
        f"differ by at most {max(c.loss_difference for c in comparisons):.1e} (relative; limit "
        f"{LOSS_TOLERANCE:.0e})."
    )
    for table in comparison_tables(comparisons):
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
    text: str,
    workload: Workload,
    options: argparse.Namespace,
    *,
    progress: Progress,
    task: int,
) -> Comparison:
    """Warm up, compare losses, measure pairs; stops after the warm-up where losses differ."""
    with (
        RankSet(
            f"plain megatron-core, {text}", NUM_RANKS, _plain(text, workload, options)
        ) as plain,
        RankSet(f"hydraulis, {text}", NUM_RANKS, _ours(text, workload)) as ours,
    ):
        sides = {"ours": ours, "plain": plain}
        steps: dict[str, list[tuple[StepReport, ...]]] = {name: [] for name in sides}
        difference = float("inf")
        for iteration in range(NUM_WARM_UPS + options.pairs):
            # The first of a pair changes, so that neither side always finds the other's caches.
            for name in sorted(sides, reverse=iteration % 2 == 0):
                steps[name].append(tuple(sides[name].call(iteration)))
            progress.advance(task)  # type: ignore[arg-type]
            if iteration + 1 == NUM_WARM_UPS:
                difference = loss_difference(steps["ours"], steps["plain"])
                if difference > LOSS_TOLERANCE:
                    break
        traffic = {name: tuple(side.call(None)) for name, side in sides.items()}
    measured = {name: SideSteps(tuple(steps[name][NUM_WARM_UPS:]), traffic[name]) for name in sides}
    return Comparison(text, measured["ours"], measured["plain"], difference)


def _plain(text: str, workload: Workload, options: argparse.Namespace) -> Callable[[], Worker]:
    from benchmarks.plain_megatron import PlainMegatronSide

    scheme = Strategy.parse(text, NUM_RANKS).replicas[0].scheme
    return lambda: PlainMegatronSide(
        workload,
        tp=scheme.tp,
        pp=scheme.pp,
        overlaps_gradients=options.plain_overlap,
        has_fused_adamw=options.plain_adamw == "fused",
    )


def _ours(text: str, workload: Workload) -> Callable[[], Worker]:
    from benchmarks.hydraulis_side import HydraulisSide

    return lambda: HydraulisSide(workload, text)


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
        help="give plain megatron-core its --overlap-grad-reduce",
    )
    return parser


def _homogeneous(text: str) -> str:
    try:
        strategy = Strategy.parse(text, NUM_RANKS)
    except HydraulisError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    schemes = {replica.scheme for replica in strategy.replicas}
    if len(schemes) != 1 or strategy.idle_ranks or next(iter(schemes)).cp > 1:
        raise argparse.ArgumentTypeError(
            f"plain megatron-core runs one scheme on all ranks, here with cp=1; '{text}' is "
            f"something else: give one like {', '.join(DEFAULT_STRATEGIES)}"
        )
    return text


if __name__ == "__main__":
    sys.exit(main())
