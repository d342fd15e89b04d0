"""Quality, speed and memory of the planner, and what its parts are worth, on one core.

    python -m benchmarks.planner

`README.md` says what the tables show; with the same seed everything but the times is the same on
any machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import planner_batches as batches_of
from benchmarks.command import wide_console
from benchmarks.planner_ablation import Ablation
from benchmarks.planner_batches import LengthDistribution
from benchmarks.planner_measure import (
    PlannedBatch,
    memory_uses,
    plan_alone,
    planned_batch,
    time_rounds,
    to_json,
)
from benchmarks.planner_tables import (
    ablation_table,
    instance_table,
    large_table,
    memory_table,
    quality_table,
)
from megatron.hydraulis.strategy import Pool

SECTIONS = ("instance-b", "wikipedia", "large", "memory", "ablation")
NUM_LARGE_SEEDS = 3
NUM_MEMORY_BATCHES = 50
MEMORY_BATCH_TOKENS = 20_000
MEMORY_BATCH_CUT_TOKENS = 7_808
FIRST_MARK = 1_000
PIPELINE_STRATEGY = "S6"
"""The choice of the strategy hides what packing is worth to pipelines: this one has no others."""


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
        """Print a section; its figures for JSON."""
        run = {
            "instance-b": self.measure_instance_b,
            "wikipedia": self.measure_wikipedia,
            "large": self.measure_large,
            "memory": self.measure_memory,
            "ablation": self.measure_ablation,
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
        return {**to_json(result), "first_plan_s": first_s, "first_plan_cpu_s": first_cpu_s}

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
        return [to_json(result) for result in results]

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
        return [{"cut_tokens": cut, **to_json(result)} for cut, result in rows]

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

    def measure_ablation(self) -> Any:
        """What each idea is worth."""
        ablation = Ablation(self._pool, self._model)
        on_instance_b = [ablation.results(self._instance_b)]
        pipelines = Pool.of(self._pool.strategy(PIPELINE_STRATEGY))
        on_pipelines = [Ablation(pipelines, self._model).results(self._instance_b)]
        task = self._progress.add_task("ablation", total=self._options.batches)
        on_wikipedia = []
        for seed in range(self._options.seed, self._options.seed + self._options.batches):
            batch = self._lengths.batch(seed, batches_of.BATCH_TOKENS)
            on_wikipedia.append(ablation.results(batch))
            self._progress.advance(task)
        self._progress.remove_task(task)
        figures = {}
        for title, results in (
            ("Ablation, instance B", on_instance_b),
            (f"Ablation, instance B, {pipelines.strategies[0]} only", on_pipelines),
            (f"Ablation, {len(on_wikipedia)} Wikipedia batches", on_wikipedia),
        ):
            self._console.print(ablation_table(results, title))
            figures[title] = [
                {method: asdict(result) for method, result in by_method.items()}
                for by_method in results
            ]
        return figures

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections asked for."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    core = max(os.sched_getaffinity(0)) if options.core is None else options.core
    os.sched_setaffinity(0, {core})
    console = wide_console()
    figures: dict[str, Any] = {}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        benchmark = Benchmark(options, console, progress)
        for section in options.sections:
            figures[section] = benchmark.run(section)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner",
        description="Quality, speed and memory of the planner on one core.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to measure"
    )
    parser.add_argument("--batches", type=int, default=30, help="batches from Wikipedia")
    parser.add_argument("--rounds", type=int, default=5, help="how often each batch is timed")
    parser.add_argument("--plans", type=int, default=10_000, help="plans of the memory section")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--core", type=int, help="core to run on; the last one if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
