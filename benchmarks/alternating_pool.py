"""The cost of changing the strategy: an alternating pool against runs that keep one strategy.

Three jobs live at the same time, each in its own ranks, and their blocks of iterations take turns,
so that other work on the machine affects all. `README.md` says what this can and cannot show.

An overlapped gather belongs to the iteration before it as much as to the one after it. So in a
block every iteration announces the next one's strategy, the last one that of the block's first, and
the clock stops when that gather has arrived: a block has as many gathers as iterations.

    python -m benchmarks.alternating_pool
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import (
    counted_progress,
    environment,
    make_parser,
    positive,
    use_cpu,
    write_figures,
)
from benchmarks.inputs import llama_shape
from benchmarks.paired_statistics import RatioEstimate, paired_ratio
from benchmarks.rank_set import RankSet
from benchmarks.step_report import Spent, spent_now
from benchmarks.workload import DATA_SEED, WEIGHT_SEED, Workload
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.terminal import figures_table, results_console

NUM_RANKS = 4
DEFAULT_PAIRS = ("4*tp1 / 2*tp2", "2*pp2 / 4*tp1")
NUM_TOKENS = 2048
"""Of a global batch."""
SEQUENCES_OF_A_MICRO_BATCH = (128, 80, 48)
"""Lengths in tokens: one longer than the others, as in a packed row."""
GOAL = 1.03
RUNS = ALTERNATING, FIRST, SECOND = "alternating", "first", "second"
ITERATIONS_PER_BLOCK = 4
MS_PER_S = 1000.0
BYTES_PER_MB = 1e6
WIDTH = 110
"""Columns of the output if it is not a terminal."""


@dataclass(frozen=True)
class EvenIteration:
    """What every rank runs: packed random tokens, equally many micro-batches on every replica.

    Equal numbers have equal tokens.
    """

    number: int
    strategy: str
    num_micro_batches: int
    """Of each replica."""


@dataclass(frozen=True)
class BlockReport:
    """One rank's measurements of a block."""

    spent: Spent
    """From the moment all ranks were ready until the last gather had arrived."""
    waits_s: tuple[float, float]
    """For gathers and for scatters."""
    regroup_bytes: int


class EngineRank:
    """One rank of the engine; callable with the iterations of a block, collective."""

    def __init__(self, workload: Workload, pool: Pool) -> None:
        self._pool = pool
        self._workload = workload
        self._engine = Engine(workload.definition(), pool, workload.optimizer, seed=WEIGHT_SEED)
        for strategy in pool.strategies:
            self._engine.runtime_of(strategy.name)
        self._forward_step = make_forward_step()

    def __call__(self, block: Sequence[EvenIteration]) -> BlockReport:
        engine = self._engine
        batches = [self._micro_batches(iteration) for iteration in block]
        followers = [*block[1:], block[0]]
        engine.gather(block[0].strategy)
        engine.finish_regrouping()
        dist.barrier()
        start = spent_now()
        outcomes = [
            engine.train_step(
                iteration.strategy, mine, self._forward_step, next_strategy=follower.strategy
            )
            for iteration, mine, follower in zip(block, batches, followers, strict=True)
        ]
        last_gather_s = -time.perf_counter()
        engine.finish_regrouping()
        last_gather_s += time.perf_counter()
        assert all(outcome.updated for outcome in outcomes)
        return BlockReport(
            spent_now() - start,
            (
                last_gather_s + sum(outcome.gather_wait_s for outcome in outcomes),
                sum(outcome.scatter_wait_s for outcome in outcomes),
            ),
            sum(outcome.regroup_bytes for outcome in outcomes),
        )

    def _micro_batches(self, iteration: EvenIteration) -> list[PackedBatch]:
        """The micro-batches of this rank's replica; none if the rank is idle."""
        for index, replica in enumerate(self._pool.strategy(iteration.strategy).replicas):
            if self._engine.rank in replica.ranks:
                rng = np.random.default_rng((DATA_SEED, iteration.number, index))
                lengths, vocab_size = self._workload.lengths, self._workload.shape.vocab_size
                return [
                    pack(
                        [rng.integers(0, vocab_size, size=n + 1) for n in lengths],
                        replica.scheme.tp,
                    )
                    for _ in range(iteration.num_micro_batches)
                ]
        return []


@dataclass(frozen=True)
class Alternation:
    """All blocks of a pair of strategies; block i of every run trains the same batches."""

    first: str
    second: str
    blocks: dict[str, list[tuple[BlockReport, ...]]]
    """By run: for each block the reports of all ranks."""

    def times_ms(self, run: str, *, cpu: bool = False) -> list[float]:
        """Time of an iteration by block: that of the slowest rank, or the CPU time of all ranks."""
        return [
            MS_PER_S
            / ITERATIONS_PER_BLOCK
            * (sum(r.spent.cpu_s for r in block) if cpu else max(r.spent.wall_s for r in block))
            for block in self.blocks[run]
        ]

    def ratio(self, *, cpu: bool = False) -> RatioEstimate:
        """Alternating over the mean of the two static runs."""
        first, second = (self.times_ms(run, cpu=cpu) for run in (FIRST, SECOND))
        static = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
        return paired_ratio(self.times_ms(ALTERNATING, cpu=cpu), static)

    def waits_ms(self, run: str) -> tuple[float, float]:
        """Waits for gather and scatter in an iteration: mean over ranks, median over blocks."""
        gather, scatter = (
            median(
                MS_PER_S / ITERATIONS_PER_BLOCK * fmean(r.waits_s[kind] for r in block)
                for block in self.blocks[run]
            )
            for kind in (0, 1)
        )
        return gather, scatter

    def regroup_bytes(self, run: str) -> float:
        """Bytes that a rank receives and sends in an iteration (mean)."""
        return fmean(r.regroup_bytes for r in self.blocks[run][0]) / ITERATIONS_PER_BLOCK

    def to_json(self) -> dict[str, Any]:
        """Every block."""
        return {
            "first": self.first,
            "second": self.second,
            "ratio": str(self.ratio()),
            "cpu_ratio": str(self.ratio(cpu=True)),
            "runs": [
                {
                    "run": run,
                    "times_ms": self.times_ms(run),
                    "cpu_times_ms": self.times_ms(run, cpu=True),
                    "waits_ms": self.waits_ms(run),
                }
                for run in RUNS
            ],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all pairs of strategies."""
    options = _parser().parse_args(arguments)
    console = results_console(WIDTH)
    use_cpu()
    workload = Workload(
        shape=llama_shape(),
        lengths=SEQUENCES_OF_A_MICRO_BATCH,
        num_micro_batches=NUM_TOKENS // sum(SEQUENCES_OF_A_MICRO_BATCH),
    )
    console.print(
        f"{workload.shape.num_parameters / 1e6:.1f} M parameters, {NUM_RANKS} gloo ranks on "
        f"{os.cpu_count()} cores, {workload.num_micro_batches} micro-batches of "
        f"{workload.num_tokens_per_micro_batch} tokens an iteration, fp32, torch "
        f"{torch.__version__}; load averages before: {_load()}"
    )
    found = []
    with counted_progress("blocks") as progress:
        for first, second in options.pairs:
            found.append(alternate(first, second, workload, options, progress))
    console.print(f"Load averages after: {_load()}")
    console.print(_table(found))
    figures = environment() | {
        "num_ranks": NUM_RANKS,
        "hidden_size": workload.shape.hidden_size,
        "tokens": NUM_TOKENS,
        "pairs": [alternation.to_json() for alternation in found],
    }
    write_figures(console, options.json, figures)
    return 0


def alternate(
    first: str, second: str, workload: Workload, options: argparse.Namespace, progress: Progress
) -> Alternation:
    """A block to warm up, then the blocks of every run in turn, at least one."""
    task = progress.add_task(f"{first} / {second}", total=1 + options.blocks)
    strategies = tuple(Strategy.parse(text, NUM_RANKS, name=text) for text in (first, second))
    used = {ALTERNATING: strategies, FIRST: strategies[:1], SECOND: strategies[1:]}
    blocks: dict[str, list[tuple[BlockReport, ...]]] = {run: [] for run in RUNS}
    with ExitStack() as stack:
        ranks = {}
        for run in RUNS:
            pool = Pool(num_ranks=NUM_RANKS, ranks_per_node=NUM_RANKS, strategies=used[run])
            ranks[run] = stack.enter_context(
                RankSet(run, NUM_RANKS, lambda pool=pool: EngineRank(workload, pool))  # type: ignore[misc]
            )
        end_s = time.monotonic() + 60.0 * options.minutes
        for index in range(1 + options.blocks):
            if index > 1 and time.monotonic() > end_s:
                break
            # Another run comes first each time, so that none always finds the same caches.
            turn = index % len(RUNS)
            for run in RUNS[turn:] + RUNS[:turn]:
                plans = block_plans(used[run], workload, index)
                blocks[run].append(tuple(ranks[run].call(plans)))
            progress.advance(task)
    return Alternation(first, second, {run: found[1:] for run, found in blocks.items()})


def block_plans(
    strategies: Sequence[Strategy], workload: Workload, index: int
) -> list[EvenIteration]:
    """The iterations of a run in a block, with the strategies round robin.

    The same iteration in the same strategy has the same micro-batches in every run.
    """
    return [
        EvenIteration(
            index * ITERATIONS_PER_BLOCK + i,
            strategies[i % len(strategies)].name,
            workload.micro_batches_per_replica(len(strategies[i % len(strategies)].replicas)),
        )
        for i in range(ITERATIONS_PER_BLOCK)
    ]


def _load() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def _table(found: Sequence[Alternation]) -> Table:
    columns = (
        "first\nms",
        "second\nms",
        "alternating\nms",
        "alternating /\nmean of both\n[95 %]",
        "CPU time\n[95 %]",
        "blocks",
        "MB of a rank,\nfirst, second",
        "waits\nms",
    )
    table = figures_table(
        f"An iteration of an alternating pool (goal: ratio at most {GOAL})",
        ("strategies",),
        columns,
        caption=f"Medians over blocks of {ITERATIONS_PER_BLOCK} iterations, same batches and "
        f"micro-batches "
        "in all runs. Wall: slowest rank, the last gather included. CPU: all ranks. Ratios: median "
        "over blocks, bootstrap interval. MB: received and sent in an iteration. Waits of the "
        "alternating run: gather + scatter, mean over ranks.",
    )
    for a in found:
        table.add_row(
            f"{a.first} / {a.second}",
            *(f"{median(a.times_ms(run)):.0f}" for run in (FIRST, SECOND, ALTERNATING)),
            *(str(a.ratio(cpu=cpu)) for cpu in (False, True)),
            str(a.ratio().num_pairs),
            ", ".join(f"{a.regroup_bytes(run) / BYTES_PER_MB:.1f}" for run in (FIRST, SECOND)),
            " + ".join(f"{ms:.0f}" for ms in a.waits_ms(ALTERNATING)),
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "alternating_pool",
        "Iteration time of a pool that alternates between two strategies, against keeping either.",
    )
    parser.add_argument(
        "--pairs",
        nargs="+",
        type=_pair,
        default=[_pair(text) for text in DEFAULT_PAIRS],
        metavar="'A / B'",
        help=f"strategies on {NUM_RANKS} ranks to alternate between",
    )
    parser.add_argument("--blocks", type=positive, default=20, help="measured blocks of every run")
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="minutes after which a pair of strategies begins no more blocks",
    )
    return parser


def _pair(text: str) -> tuple[str, str]:
    parts = [part.strip() for part in text.split("/")]
    if len(parts) != 2:
        raise argparse.ArgumentTypeError(
            f"a pair is two strategies separated by '/', such as '{DEFAULT_PAIRS[0]}', not '{text}'"
        )
    for part in parts:
        try:
            Strategy.parse(part, NUM_RANKS)
        except HydraulisError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return parts[0], parts[1]


if __name__ == "__main__":
    sys.exit(main())
