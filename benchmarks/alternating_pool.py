"""What changing the strategy costs: an alternating pool against its two strategies kept.

Four jobs live at the same time, each in ranks of its own; only one works at a time, and their
blocks of iterations take turns, so that whatever else the machine does falls on all. `README.md`
says what this can and cannot show.

    python -m benchmarks.alternating_pool
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import counted_progress, import_on_cpu, positive, wide_console
from benchmarks.paired_statistics import RatioEstimate, paired_ratio
from benchmarks.rank_set import RankSet
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.strategy import Pool, Strategy

if TYPE_CHECKING:
    from benchmarks.iteration_block import BlockReport, PlannedIteration
    from benchmarks.step_report import Spent
    from benchmarks.workload import Workload

NUM_RANKS = 4
DEFAULT_PAIRS = ("4*tp1 / 2*tp2", "2*pp2 / 4*tp1")
DEFAULT_TOKENS = 2048
SEQUENCES_OF_A_MICRO_BATCH = (128, 80, 48)
"""Lengths in tokens: one longer than the others, as in a packed row."""
GOAL = 1.03
ALTERNATING, FIRST, SECOND = "alternating", "first", "second"
SIDES = ((ALTERNATING, True), (FIRST, True), (SECOND, True), (ALTERNATING, False))
"""Runs, and whether regrouping overlaps compute in them."""
ITERATIONS_PER_BLOCK = 4
"""Of every run; in turn of each strategy where it alternates."""
MS_PER_S = 1000.0
BYTES_PER_MB = 1e6
WIDTH = 110
"""Columns of the output where it is no terminal."""

BlockOfRanks = tuple["BlockReport", ...]
SideKey = tuple[str, bool]
"""One of `SIDES`."""


@dataclass(frozen=True)
class Alternation:
    """All blocks of a pair of strategies; block i of every run trains the same batches."""

    first: str
    second: str
    blocks: dict[SideKey, list[BlockOfRanks]]

    def times_ms(self, side: SideKey, *, cpu: bool = False) -> list[float]:
        """Of an iteration, by block: that of the slowest rank, or the CPU time of all ranks."""
        return [
            MS_PER_S
            / ITERATIONS_PER_BLOCK
            * (sum(r.spent.cpu_s for r in block) if cpu else max(r.spent.wall_s for r in block))
            for block in self.blocks[side]
        ]

    def ratio(self, overlap: bool, *, cpu: bool = False) -> RatioEstimate:
        """Alternating over the mean of the two static runs, which overlap."""
        first, second = (self.times_ms((run, True), cpu=cpu) for run in (FIRST, SECOND))
        static = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        return paired_ratio(self.times_ms((ALTERNATING, overlap), cpu=cpu), static)

    def worth_of_overlap(self, *, cpu: bool = False) -> RatioEstimate:
        """Time of the alternating pool without overlap over that with it."""
        without, with_it = (self.times_ms((ALTERNATING, o), cpu=cpu) for o in (False, True))
        return paired_ratio(without, with_it)

    def waits_ms(self, side: SideKey) -> tuple[float, float]:
        """For parameters and for gradients, an iteration, mean over ranks; median over blocks."""

        def of(kind: str) -> float:
            return median(
                MS_PER_S * fmean(_wait_s(report, kind) / ITERATIONS_PER_BLOCK for report in block)
                for block in self.blocks[side]
            )

        return of("gather"), of("scatter")

    @property
    def regroup_shares(self) -> tuple[float, float]:
        """Share of an iteration's wall and CPU time in regrouping, measured without overlap."""
        wall, cpu = [], []
        for block in self.blocks[ALTERNATING, False]:
            spent = [_regrouping(report) for report in block]
            wall.append(sum(s.wall_s for s in spent) / sum(r.spent.wall_s for r in block))
            cpu.append(sum(s.cpu_s for s in spent) / sum(r.spent.cpu_s for r in block))
        return median(wall), median(cpu)

    def regroup_bytes(self, run: str) -> float:
        """Received and sent by a rank in an iteration (mean)."""
        return fmean(
            i.regroup_bytes for report in self.blocks[run, True][0] for i in report.iterations
        )

    @property
    def overlap_changed_a_loss(self) -> bool:
        """Whether some loss of the alternating run differs in any bit without overlap."""
        with_it, without = (
            [i.loss for block in self.blocks[ALTERNATING, o] for i in block[0].iterations]
            for o in (True, False)
        )
        return with_it != without

    def to_json(self) -> dict[str, Any]:
        """Every block."""
        return {
            "first": self.first,
            "second": self.second,
            "ratio": {_overlap(o): str(self.ratio(o)) for o in (True, False)},
            "cpu_ratio": {_overlap(o): str(self.ratio(o, cpu=True)) for o in (True, False)},
            "worth_of_overlap": str(self.worth_of_overlap()),
            "runs": [
                {
                    "run": side[0],
                    "overlap": side[1],
                    "times_ms": self.times_ms(side),
                    "cpu_times_ms": self.times_ms(side, cpu=True),
                    "waits_ms": self.waits_ms(side),
                }
                for side in SIDES
            ],
            "regroup_shares": self.regroup_shares,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all pairs of strategies; exit status 1 if overlap changed a loss."""
    options = _parser().parse_args(arguments)
    console = wide_console(WIDTH)
    import_on_cpu(console)
    from benchmarks.workload import Workload

    workload = Workload(
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.hidden_size * 11 // 4,
        lengths=SEQUENCES_OF_A_MICRO_BATCH,
        num_micro_batches=options.tokens // sum(SEQUENCES_OF_A_MICRO_BATCH),
    )
    console.print(
        f"{workload.shape.num_parameters / 1e6:.1f} M parameters, {NUM_RANKS} gloo ranks on "
        f"{os.cpu_count()} cores, {workload.num_micro_batches} micro-batches of "
        f"{workload.num_tokens_per_micro_batch} tokens an iteration, fp32, torch "
        f"{torch.__version__}; load averages before: {_load()}"
    )
    found = []
    with counted_progress(console, "blocks") as progress:
        for first, second in options.pairs:
            task = progress.add_task(f"{first} / {second}", total=1 + options.blocks)
            found.append(
                alternate(
                    first,
                    second,
                    workload,
                    options.blocks,
                    limit_s=60.0 * options.minutes,
                    progress=progress,
                    task=task,
                )
            )
    console.print(f"Load averages after: {_load()}")
    for table in _tables(found):
        console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(_report(found, options), indent=1) + "\n")
        console.print(f"written to {options.json}")
    if any(alternation.overlap_changed_a_loss for alternation in found):
        console.print("[bold red]overlap changed a loss: the runs do not train alike")
        return 1
    return 0


def alternate(
    first: str,
    second: str,
    workload: Workload,
    num_blocks: int,
    *,
    limit_s: float = math.inf,
    progress: Progress,
    task: int,
) -> Alternation:
    """A block to warm up, then ``num_blocks`` of every run in turn, or as many as begin within
    ``limit_s``, but at least one."""
    from benchmarks.iteration_block import EngineRank

    strategies = tuple(Strategy.parse(text, NUM_RANKS, name=text) for text in (first, second))
    used = {ALTERNATING: strategies, FIRST: strategies[:1], SECOND: strategies[1:]}
    blocks: dict[SideKey, list[BlockOfRanks]] = {side: [] for side in SIDES}
    with ExitStack() as stack:
        ranks = {}
        for run, overlap in SIDES:
            pool = Pool(num_ranks=NUM_RANKS, ranks_per_node=NUM_RANKS, strategies=used[run])
            ranks[run, overlap] = stack.enter_context(
                RankSet(
                    f"{run}, {_overlap(overlap)}",
                    NUM_RANKS,
                    lambda pool=pool, overlap=overlap: EngineRank(  # type: ignore[misc]
                        workload, pool, overlap=overlap
                    ),
                )
            )
        end_s = time.monotonic() + limit_s
        for index in range(1 + num_blocks):
            if index > 1 and time.monotonic() > end_s:
                break
            plans = {run: block_plans(found, workload, index) for run, found in used.items()}
            # Another run comes first each time, so that none always finds the same caches.
            turn = index % len(SIDES)
            for side in SIDES[turn:] + SIDES[:turn]:
                blocks[side].append(tuple(ranks[side].call(plans[side[0]])))
            progress.advance(task)  # type: ignore[arg-type]
    return Alternation(first, second, {side: found[1:] for side, found in blocks.items()})


def block_plans(
    strategies: Sequence[Strategy], workload: Workload, index: int
) -> list[PlannedIteration]:
    """What a run does in a block: every iteration in the next strategy, starting over at the end.

    An iteration in a strategy is the same one in every run that has it there.
    """
    from benchmarks.iteration_block import PlannedIteration

    return [
        PlannedIteration.even(
            index * ITERATIONS_PER_BLOCK + i, strategies[i % len(strategies)], workload
        )
        for i in range(ITERATIONS_PER_BLOCK)
    ]


def _wait_s(report: BlockReport, kind: str) -> float:
    if kind == "scatter":
        return sum(i.scatter_wait_s for i in report.iterations)
    return sum(i.gather_wait_s for i in report.iterations) + report.last_gather.wall_s


def _regrouping(report: BlockReport) -> Spent:
    """In the phases that are nothing but regrouping where nothing overlaps."""
    return sum(
        (i.phases[p] for i in report.iterations for p in ("gather", "scatter") if p in i.phases),
        report.last_gather,
    )


def _overlap(overlap: bool) -> str:
    return "overlap" if overlap else "no overlap"


def _load() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def _cell(estimate: RatioEstimate) -> str:
    return str(estimate).replace("[", "\\[")


def _tables(found: Sequence[Alternation]) -> list[Table]:
    ratios = Table(title=f"An iteration of an alternating pool (goal: ratio at most {GOAL})")
    ratios.add_column("strategies")
    for column in (
        "first\nms",
        "second\nms",
        "alternating\nms",
        "alternating /\nmean of both\n\\[95 %]",
        "the same\nof CPU time\n\\[95 %]",
        "blocks",
    ):
        ratios.add_column(column, justify="right")
    for a in found:
        ratio = a.ratio(True)
        ratios.add_row(
            f"{a.first} / {a.second}",
            *(f"{median(a.times_ms((run, True))):.0f}" for run in (FIRST, SECOND, ALTERNATING)),
            _cell(ratio),
            _cell(a.ratio(True, cpu=True)),
            str(ratio.num_pairs),
        )
    ratios.caption = (
        f"Medians over blocks of {ITERATIONS_PER_BLOCK} iterations, same batches and micro-batches "
        "in all runs. Wall: slowest rank, the last gather included. CPU: all ranks. Ratios: median "
        "over blocks, bootstrap interval."
    )
    worth = Table(title="What regrouping takes, and what overlap is worth (alternating pool)")
    worth.add_column("strategies")
    for column in (
        "MB of a rank,\nfirst, second",
        "share of wall,\nof CPU time,\nno overlap",
        "waits, ms:\nno overlap",
        "waits, ms:\noverlap",
        "no overlap /\noverlap\n\\[95 %]",
        "the same\nof CPU time\n\\[95 %]",
    ):
        worth.add_column(column, justify="right")
    for a in found:
        wall, cpu = a.regroup_shares
        worth.add_row(
            f"{a.first} / {a.second}",
            ", ".join(f"{a.regroup_bytes(run) / BYTES_PER_MB:.1f}" for run in (FIRST, SECOND)),
            f"{wall:.1%}, {cpu:.1%}",
            *(
                " + ".join(f"{ms:.0f}" for ms in a.waits_ms((ALTERNATING, overlap)))
                for overlap in (False, True)
            ),
            _cell(a.worth_of_overlap()),
            _cell(a.worth_of_overlap(cpu=True)),
        )
    worth.caption = (
        "MB received and sent in an iteration. Shares: gather and scatter; wall time contains "
        "waiting for ranks that are still computing. Waits: gather + scatter, mean over ranks."
    )
    return [ratios, worth]


def _report(found: Sequence[Alternation], options: argparse.Namespace) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "num_ranks": NUM_RANKS,
        "torch": torch.__version__,
        "hidden_size": options.hidden_size,
        "tokens": options.tokens,
        "pairs": [alternation.to_json() for alternation in found],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alternating_pool",
        description="Iteration time of an alternating pool against its two strategies kept.",
    )
    parser.add_argument(
        "--pairs",
        nargs="+",
        type=_pair,
        default=[_pair(text) for text in DEFAULT_PAIRS],
        metavar="'A / B'",
        help=f"strategies on {NUM_RANKS} ranks to alternate between (default: "
        f"{', '.join(DEFAULT_PAIRS)})",
    )
    parser.add_argument(
        "--blocks",
        type=positive,
        default=20,
        help="measured blocks of every run (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="begin no more blocks of a pair of strategies after so long (default: no limit)",
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=DEFAULT_TOKENS,
        help="of a global batch (default: %(default)s)",
    )
    parser.add_argument(
        "--hidden-size", type=positive, default=256, help="of the model (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    return parser


def _pair(text: str) -> tuple[str, str]:
    parts = [part.strip() for part in text.split("/")]
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(
            f"two strategies with a slash between them, as '{DEFAULT_PAIRS[0]}', but got '{text}'"
        )
    for part in parts:
        try:
            Strategy.parse(part, NUM_RANKS)
        except HydraulisError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return parts[0], parts[1]


if __name__ == "__main__":
    sys.exit(main())
