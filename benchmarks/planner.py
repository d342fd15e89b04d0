"""Quality, speed and memory of the planner on one core.

    python -m benchmarks.planner

`README.md` says what the tables show. With the same seed everything but the times is the same on
any machine.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import planner_batches as batches_of
from benchmarks.command import (
    counted_progress,
    figures_table,
    make_parser,
    wide_console,
    write_figures,
)
from benchmarks.planner_batches import LengthDistribution, PublishedResult
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.strategy import Pool

SECTIONS = ("instance-b", "wikipedia", "large", "memory")
NUM_LARGE_SEEDS = 3
NUM_MEMORY_BATCHES = 50
MEMORY_BATCH_TOKENS = 20_000
MEMORY_BATCH_CUT_TOKENS = 7_808
FIRST_MARK = 1_000


class Benchmark:
    """The sections of the benchmark; each prints its tables and returns its figures."""

    def __init__(self, options: argparse.Namespace, console: Console, progress: Progress) -> None:
        self._options = options
        self._console = console
        self._progress = progress
        self._model = batches_of.cost_model()
        self._pool = batches_of.pool()
        self._lengths = LengthDistribution()
        self._instance_b = batches_of.instance_b()

    def run(self, section: str) -> Any:
        """Print a section; returns its figures for JSON."""
        run = {
            "instance-b": self.measure_instance_b,
            "wikipedia": self.measure_wikipedia,
            "large": self.measure_large,
            "memory": self.measure_memory,
        }
        return run[section]()

    def measure_instance_b(self) -> Any:
        """Every strategy against the published planner; the first plan of the process."""
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        result = planned_batch(self._instance_b, self._pool, self._model)
        first_s = time.perf_counter() - start_s
        first_cpu_s = time.process_time() - start_cpu_s
        plan_alone(self._instance_b, result, self._pool, self._model)
        self._time([self._instance_b], [result], "instance B", self._options.rounds)
        self._console.print(instance_table(result, batches_of.published_result()))
        self._console.print(
            f"All strategies together: wall {min(result.wall_s):.3f} to "
            f"{max(result.wall_s):.3f} s, CPU {min(result.cpu_s):.3f} to "
            f"{max(result.cpu_s):.3f} s; the first plan of the process: wall {first_s:.3f} s, "
            f"CPU {first_cpu_s:.3f} s."
        )
        return {**asdict(result), "first_plan_s": first_s, "first_plan_cpu_s": first_cpu_s}

    def measure_wikipedia(self) -> Any:
        """Quality and time over many batches."""
        seeds = range(self._options.seed, self._options.seed + self._options.batches)
        batches = [self._lengths.batch(seed, batches_of.BATCH_TOKENS) for seed in seeds]
        results = []
        task = self._progress.add_task("Wikipedia, every strategy", total=len(batches))
        for seed, batch in zip(seeds, batches, strict=True):
            result = planned_batch(batch, self._pool, self._model, seed=seed)
            plan_alone(batch, result, self._pool, self._model)
            results.append(result)
            self._progress.advance(task)
        self._progress.remove_task(task)
        self._time(batches, results, "Wikipedia", self._options.rounds)
        title = (
            f"Wikipedia, {batches_of.BATCH_TOKENS} tokens a batch, cut at "
            f"{batches_of.CONTEXT_TOKENS}: 7 strategies on 64 ranks"
        )
        self._console.print(quality_table(results, title))
        return [asdict(result) for result in results]

    def measure_large(self) -> Any:
        """One strategy on 1,024 ranks."""
        pool = batches_of.large_pool()
        seeds = range(self._options.seed, self._options.seed + NUM_LARGE_SEEDS)
        cases = [(cut, seed) for cut in batches_of.LARGE_CUTS_TOKENS for seed in seeds]
        batches = [
            self._lengths.batch(seed, batches_of.LARGE_BATCH_TOKENS, cut) for cut, seed in cases
        ]
        results = [
            planned_batch(batch, pool, self._model, seed=seed)
            for batch, (_, seed) in zip(batches, cases, strict=True)
        ]
        self._time(batches, results, "1,024 ranks", self._options.rounds, pool=pool)
        title = f"1,024 ranks, {batches_of.LARGE_BATCH_TOKENS} tokens: {batches_of.LARGE_STRATEGY}"
        rows = [(cut, result) for (cut, _), result in zip(cases, results, strict=True)]
        self._console.print(large_table(rows, title))
        return [{"cut_tokens": cut, **asdict(result)} for cut, result in rows]

    def measure_memory(self) -> Any:
        """Many plans in one process."""
        batches = [
            self._lengths.batch(seed, MEMORY_BATCH_TOKENS, MEMORY_BATCH_CUT_TOKENS)
            for seed in range(self._options.seed, self._options.seed + NUM_MEMORY_BATCHES)
        ]
        last = self._options.plans
        marks = sorted({min(FIRST_MARK, last), *range(FIRST_MARK, last, 3 * FIRST_MARK), last})
        task = self._progress.add_task("memory", total=last)
        uses = list(
            memory_uses(
                batches, self._pool, self._model, marks, lambda: self._progress.advance(task)
            )
        )
        self._progress.remove_task(task)
        self._console.print(memory_table(uses))
        return [asdict(use) for use in uses]

    def _time(
        self,
        batches: Sequence[Sequence[int]],
        results: Sequence[PlannedBatch],
        name: str,
        num_rounds: int,
        *,
        pool: Pool | None = None,
    ) -> None:
        task = self._progress.add_task(f"{name}, wall time", total=num_rounds * len(batches))
        time_rounds(
            batches,
            results,
            self._pool if pool is None else pool,
            self._model,
            num_rounds,
            lambda: self._progress.advance(task),
        )
        self._progress.remove_task(task)


# ---------------------------------------------------------------- measuring

MS_PER_S = 1e3
BYTES_PER_MB = 1e6
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """One batch, planned several times."""

    seed: int | None
    """None for instance B."""
    num_sequences: int
    longest_tokens: int
    strategy: str
    time_ms: float
    bound_ms: float
    status: str
    wall_s: list[float] = field(default_factory=list)
    """Of every round."""
    cpu_s: list[float] = field(default_factory=list)
    """Of every round, of the whole process: on a busy machine the steadier figure."""
    alone_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By strategy that can hold the batch: bound and time of its plan when it is the whole pool."""

    @property
    def ratio(self) -> float:
        """Time over bound of the chosen strategy."""
        return self.time_ms / self.bound_ms

    @property
    def best_other(self) -> float:
        """Least time of any other strategy's plan, over that of the choice."""
        return min(
            (time_ms for name, (_, time_ms) in self.alone_ms.items() if name != self.strategy),
            default=float("inf"),
        ) / (self.time_ms)

    @property
    def quietest_s(self) -> float:
        """Least time over all rounds: the machine may have been busy in the others."""
        return min(self.wall_s)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of the process after a number of plans."""

    num_plans: int
    resident_bytes: int
    num_blocks: int
    """Blocks that Python's allocator holds."""


def planned_batch(
    batch: Sequence[int], pool: Pool, model: CostModel, *, seed: int | None = None
) -> PlannedBatch:
    """Plan a batch once, for what does not change from round to round."""
    plan = CertifiedPlanner(pool, model).plan(batch)
    assert plan.dispatch is not None  # the certified planner reports on every plan
    return PlannedBatch(
        seed=seed,
        num_sequences=len(batch),
        longest_tokens=max(batch),
        strategy=plan.strategy,
        time_ms=MS_PER_S * plan.predicted_time_s,
        bound_ms=MS_PER_S * plan.dispatch.bound_s,
        status=plan.dispatch.status,
    )


def time_rounds(
    batches: Sequence[Sequence[int]],
    planned: Sequence[PlannedBatch],
    pool: Pool,
    model: CostModel,
    num_rounds: int,
    advance: Callable[[], None],
) -> None:
    """Plan all batches once a round, so that whatever else the machine does falls on all."""
    planner = CertifiedPlanner(pool, model)
    for _ in range(num_rounds):
        for batch, result in zip(batches, planned, strict=True):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            planner.plan(batch)
            result.wall_s.append(time.perf_counter() - start_s)
            result.cpu_s.append(time.process_time() - start_cpu_s)
            advance()


def plan_alone(batch: Sequence[int], result: PlannedBatch, pool: Pool, model: CostModel) -> None:
    """Plan a batch with every strategy that can hold it, one at a time."""
    explanation = CertifiedPlanner(pool, model).explain(batch)
    for strategy, outcome in zip(pool.strategies, explanation.strategies, strict=True):
        if outcome.bound_s is not None:
            plan = CertifiedPlanner(Pool.of(strategy), model).plan(batch)
            result.alone_ms[strategy.name] = _bound_and_time_ms(plan)


def memory_uses(
    batches: Sequence[Sequence[int]],
    pool: Pool,
    model: CostModel,
    marks: Sequence[int],
    advance: Callable[[], None],
) -> Iterator[MemoryUse]:
    """Plan batches in turn, and look at the process after these numbers of plans."""
    planner = CertifiedPlanner(pool, model)
    for number in range(1, max(marks) + 1):
        planner.plan(batches[number % len(batches)], iteration=number)
        advance()
        if number in marks:
            gc.collect()
            yield MemoryUse(number, _resident_bytes(), sys.getallocatedblocks())


def _bound_and_time_ms(plan: IterationPlan) -> tuple[float, float]:
    assert plan.dispatch is not None  # the certified planner reports on every plan
    return MS_PER_S * plan.dispatch.bound_s, MS_PER_S * plan.predicted_time_s


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES


# ---------------------------------------------------------------- tables

_PERCENT = 100.0


def instance_table(result: PlannedBatch, published: PublishedResult) -> Table:
    """Every strategy alone on instance B, ours against the published planner's plan."""
    table = figures_table(
        "Instance B, every strategy planned alone, ms",
        ("strategy",),
        ("bound", "ours", "gap %", "published", "ours / published"),
    )
    for name, (bound_ms, time_ms) in result.alone_ms.items():
        theirs_ms = published.plan_ms[name]
        table.add_row(
            name,
            f"{bound_ms:.1f}",
            f"{time_ms:.1f}",
            f"{_gap(bound_ms, time_ms):.2f}",
            f"{theirs_ms:.1f}",
            f"{time_ms / theirs_ms:.3f}",
            style="bold" if name == result.strategy else None,
        )
    table.caption = (
        f"Choice: {result.strategy}, {result.time_ms:.1f} ms. The published planner's choice: "
        f"{published.chosen}, {published.plan_ms[published.chosen]:.1f} ms."
    )
    return table


def quality_table(results: Sequence[PlannedBatch], title: str) -> Table:
    """Quality and time over many batches."""
    table = figures_table(title, ("",), ("best", "quartile", "median", "quartile", "worst"))
    table.add_row("predicted time / bound", *_spread((r.ratio for r in results), 4))
    others = [r.best_other for r in results]
    table.add_row("best other strategy's plan / choice", *_spread(others, 4, is_best_largest=True))
    walls = [r.quietest_s for r in results]
    table.add_row("wall time, quietest round, s", *_spread(walls, 3))
    table.add_row("wall time, all rounds, s", *_spread((s for r in results for s in r.wall_s), 3))
    table.add_row("CPU time, all rounds, s", *_spread((s for r in results for s in r.cpu_s), 3))
    chosen = Counter(r.strategy for r in results)
    table.caption = (
        f"{len(results)} batches of {_range(r.num_sequences for r in results)} sequences, "
        f"{len(results[0].wall_s)} rounds. Chosen: "
        + ", ".join(f"{name} {num}x" for name, num in sorted(chosen.items()))
        + "."
    )
    return table


def large_table(results: Sequence[tuple[int, PlannedBatch]], title: str) -> Table:
    """One row per batch; each with the length at which its documents are cut."""
    table = figures_table(
        title,
        (),
        ("cut at", "seed", "sequences", "time ms", "bound ms", "gap %", "wall s", "CPU s"),
    )
    table.add_column("status")
    for cut_tokens, r in results:
        table.add_row(
            str(cut_tokens),
            str(r.seed),
            str(r.num_sequences),
            f"{r.time_ms:.1f}",
            f"{r.bound_ms:.1f}",
            f"{_gap(r.bound_ms, r.time_ms):.2f}",
            f"{min(r.wall_s):.2f}-{max(r.wall_s):.2f}",
            f"{min(r.cpu_s):.2f}-{max(r.cpu_s):.2f}",
            r.status,
        )
    table.caption = f"Wall and CPU time: least and most of {len(results[0][1].wall_s)} rounds."
    return table


def memory_table(uses: Sequence[MemoryUse]) -> Table:
    """The process after some numbers of plans."""
    table = figures_table("Memory of one process", (), ("plans", "resident MB", "Python blocks"))
    for use in uses:
        table.add_row(
            str(use.num_plans), f"{use.resident_bytes / BYTES_PER_MB:.1f}", str(use.num_blocks)
        )
    return table


def _gap(bound_ms: float, time_ms: float) -> float:
    return _PERCENT * (1.0 - bound_ms / time_ms)


def _spread(values: Iterable[float], digits: int, *, is_best_largest: bool = False) -> list[str]:
    """From the best to the worst."""
    rising = sorted(values)
    low, middle, high = (
        quantiles(rising, n=4, method="inclusive") if len(rising) > 1 else rising * 3
    )
    spread = [rising[0], low, middle, high, rising[-1]]
    return [f"{value:.{digits}f}" for value in (spread[::-1] if is_best_largest else spread)]


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return f"{found[0]} to {found[-1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections asked for."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    core = max(os.sched_getaffinity(0)) if options.core is None else options.core
    os.sched_setaffinity(0, {core})
    console = wide_console()
    figures: dict[str, Any] = {}
    with counted_progress(console) as progress:
        benchmark = Benchmark(options, console, progress)
        for section in options.sections:
            figures[section] = benchmark.run(section)
    write_figures(console, options.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("planner", "Quality, speed and memory of the planner on one core.")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to measure"
    )
    parser.add_argument("--batches", type=int, default=30, help="batches from Wikipedia")
    parser.add_argument("--rounds", type=int, default=5, help="how often each batch is timed")
    parser.add_argument("--plans", type=int, default=10_000, help="plans of the memory section")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--core", type=int, help="core to run on; the last one if not given")
    return parser


if __name__ == "__main__":
    sys.exit(main())
