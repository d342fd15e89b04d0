"""Quality and speed of the planner on one core.

    python -m benchmarks.planner

`README.md` says what the tables show. With the same seed everything but the times is
the same on any machine.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks import inputs
from benchmarks.command import counted_progress, make_parser, write_figures
from megatron.hydraulis.planner.plan import IterationPlan, Planner
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.terminal import figures_table, results_console

NUM_LARGE_SEEDS = 3
MANY_SEQUENCES = 10_000
MS_PER_S = 1e3


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
    """By round."""
    cpu_s: list[float] = field(default_factory=list)
    """By round, of the whole process: on a busy machine the steadier figure."""
    alone_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By strategy that can hold the batch: bound and time of its plan when it is the whole pool."""

    @property
    def gap_percent(self) -> float:
        """(time - bound) / time."""
        return _gap_percent(self.bound_ms, self.time_ms)

    @property
    def best_other(self) -> float:
        """Least time of any other strategy's plan, over that of the chosen one."""
        others = (time_ms for name, (_, time_ms) in self.alone_ms.items() if name != self.strategy)
        return min(others, default=float("inf")) / self.time_ms


class Benchmark:
    """The sections; each prints its table and returns its figures for JSON."""

    def __init__(self, options: argparse.Namespace, console: Console, progress: Progress) -> None:
        self._options = options
        self._console = console
        self._progress = progress
        self._model = inputs.cost_model()
        self._pool = inputs.pool()
        self._lengths = inputs.LengthDistribution()

    def instance_b(self) -> Any:
        """Every strategy against the published planner; the first plan of the process."""
        batch, published = inputs.instance_b(), inputs.published_result()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        result = _planned(CertifiedPlanner(self._pool, self._model), batch)
        first_s, first_cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        self._plan_alone(batch, result)
        planner = CertifiedPlanner(self._pool, self._model)
        self._time_rounds(planner, [batch], [result], "instance B")
        table = figures_table(
            "Instance B, every strategy planned alone, ms",
            ("strategy",),
            ("bound", "ours", "gap %", "published", "ours / published"),
            caption=f"Choice: {result.strategy}, {result.time_ms:.1f} ms. The published planner's "
            f"choice: {published.chosen}, {published.plan_ms[published.chosen]:.1f} ms.",
        )
        for name, (bound_ms, time_ms) in result.alone_ms.items():
            theirs_ms = published.plan_ms[name]
            table.add_row(
                name,
                f"{bound_ms:.1f}",
                f"{time_ms:.1f}",
                f"{_gap_percent(bound_ms, time_ms):.2f}",
                f"{theirs_ms:.1f}",
                f"{time_ms / theirs_ms:.3f}",
                style="bold" if name == result.strategy else None,
            )
        self._console.print(table)
        self._console.print(
            f"All strategies together: wall {_range(result.wall_s, 3)} s, CPU "
            f"{_range(result.cpu_s, 3)} s; the first plan of the process: wall {first_s:.3f} s, "
            f"CPU {first_cpu_s:.3f} s."
        )
        return {**asdict(result), "first_plan_s": first_s, "first_plan_cpu_s": first_cpu_s}

    def wikipedia(self) -> Any:
        """Quality and time over many batches."""
        seeds = self._seeds(self._options.batches)
        batches = [self._lengths.batch(seed, inputs.BATCH_TOKENS) for seed in seeds]
        results = []
        planner = CertifiedPlanner(self._pool, self._model)
        numbered = list(zip(seeds, batches, strict=True))
        for seed, batch in self._progress.track(numbered, description="Wikipedia, all strategies"):
            results.append(_planned(planner, batch, seed))
            self._plan_alone(batch, results[-1])
        self._time_rounds(planner, batches, results, "Wikipedia")
        chosen = sorted(Counter(r.strategy for r in results).items())
        table = figures_table(
            f"Wikipedia, {inputs.BATCH_TOKENS} tokens a batch, cut at {inputs.CONTEXT_TOKENS}: "
            f"{len(self._pool.strategies)} strategies on {self._pool.num_ranks} ranks",
            ("",),
            ("best", "quartile", "median", "quartile", "worst"),
            caption=f"{len(results)} batches of {_range([r.num_sequences for r in results])} "
            f"sequences, {self._options.rounds} rounds. Chosen: "
            f"{', '.join(f'{name} {num}x' for name, num in chosen)}.",
        )
        best_others = _quartiles((r.best_other for r in results), 4)
        table.add_row(
            "predicted time / bound", *_quartiles((r.time_ms / r.bound_ms for r in results), 4)
        )
        table.add_row("best other strategy's plan / choice", *reversed(best_others))
        table.add_row(
            "wall time, quietest round, s", *_quartiles((min(r.wall_s) for r in results), 3)
        )
        for name, times_s in (
            ("wall time", [s for r in results for s in r.wall_s]),
            ("CPU time", [s for r in results for s in r.cpu_s]),
        ):
            table.add_row(f"{name}, all rounds, s", *_quartiles(times_s, 3))
        self._console.print(table)
        return [asdict(result) for result in results]

    def large(self) -> Any:
        """One strategy on 1,024 ranks."""
        planner = CertifiedPlanner(inputs.large_pool(), self._model)
        cases = [
            (cut, seed) for cut in inputs.LARGE_CUTS_TOKENS for seed in self._seeds(NUM_LARGE_SEEDS)
        ]
        batches = [self._lengths.batch(seed, inputs.LARGE_BATCH_TOKENS, cut) for cut, seed in cases]
        results = [
            _planned(planner, batch, seed) for batch, (_, seed) in zip(batches, cases, strict=True)
        ]
        self._time_rounds(planner, batches, results, "1,024 ranks")
        table = figures_table(
            f"1,024 ranks, {inputs.LARGE_BATCH_TOKENS} tokens: {inputs.LARGE_STRATEGY}",
            (),
            ("cut at", "seed", "sequences", "time ms", "bound ms", "gap %", "wall s", "CPU s"),
            caption=f"Wall and CPU time: least and most of {self._options.rounds} rounds.",
        )
        table.add_column("status")
        figures = []
        for (cut, seed), r in zip(cases, results, strict=True):
            table.add_row(
                str(cut),
                str(seed),
                str(r.num_sequences),
                f"{r.time_ms:.1f}",
                f"{r.bound_ms:.1f}",
                f"{r.gap_percent:.2f}",
                _range(r.wall_s, 2),
                _range(r.cpu_s, 2),
                r.status,
            )
            figures.append({"cut_tokens": cut, **asdict(r)})
        self._console.print(table)
        return figures

    def pools(self) -> Any:
        """Random pools of many strategies; one plan of each batch."""
        cases = list(inputs.pool_cases(self._options.seed))
        return self._pool_cases(cases, "Random pools")

    def many(self) -> Any:
        """Batches of many sequences."""
        batch = self._lengths.draw(self._options.seed, MANY_SEQUENCES)
        cases = [inputs.PoolCase("32B, S0 to S6", self._model, self._pool, batch)]
        # The last case of each profile: 64 ranks, 32K.
        for case in list(inputs.pool_cases(self._options.seed))[-1:-8:-3]:
            cases.append(replace(case, batch=batch))
        return self._pool_cases(cases, f"{MANY_SEQUENCES:,} sequences a batch")

    def waves(self) -> Any:
        """One replica of 64 ranks that runs waves, in FlexSP's setting."""
        cases = list(inputs.wave_cases(self._options.seed))
        return self._pool_cases(cases, "Waves in FlexSP's setting", goal_percent=5.0)

    def _pool_cases(
        self, cases: Sequence[inputs.PoolCase], title: str, *, goal_percent: float = 2.0
    ) -> Any:
        table = figures_table(
            title, ("case",), ("strategies", "sequences", "time ms", "gap %", "CPU s")
        )
        table.add_column("choice")
        results = []
        for case in self._progress.track(cases, description=title):
            start_cpu_s = time.process_time()
            result = _planned(CertifiedPlanner(case.pool, case.profile), case.batch)
            result.cpu_s.append(time.process_time() - start_cpu_s)
            results.append(result)
            table.add_row(
                case.name,
                str(len(case.pool.strategies)),
                str(result.num_sequences),
                f"{result.time_ms:.1f}",
                f"{result.gap_percent:.2f}",
                f"{result.cpu_s[0]:.2f}",
                result.strategy,
            )
        gaps = [result.gap_percent for result in results]
        table.caption = (
            f"{sum(gap <= goal_percent for gap in gaps)} of {len(gaps)} gaps are at most "
            f"{goal_percent:g} %, the largest is {max(gaps):.2f} %; "
            f"CPU time at most {max(r.cpu_s[0] for r in results):.2f} s."
        )
        self._console.print(table)
        return [
            {"case": case.name} | asdict(result)
            for case, result in zip(cases, results, strict=True)
        ]

    def _seeds(self, num: int) -> range:
        return range(self._options.seed, self._options.seed + num)

    def _plan_alone(self, batch: Sequence[int], result: PlannedBatch) -> None:
        """Plan a batch with every strategy that can hold it, one at a time."""
        explanation = CertifiedPlanner(self._pool, self._model).explain(batch)
        for strategy, outcome in zip(self._pool.strategies, explanation.strategies, strict=True):
            if outcome.bound_s is not None:
                plan = CertifiedPlanner(Pool.of(strategy), self._model).plan(batch)
                result.alone_ms[strategy.name] = _bound_and_time_ms(plan)

    def _time_rounds(
        self,
        planner: Planner,
        batches: Sequence[Sequence[int]],
        results: Sequence[PlannedBatch],
        name: str,
    ) -> None:
        """Plan all batches once a round, so that other work on the machine affects all of them."""
        rounds = range(self._options.rounds)
        for _ in self._progress.track(rounds, description=f"{name}, rounds"):
            for batch, result in zip(batches, results, strict=True):
                start_s, start_cpu_s = time.perf_counter(), time.process_time()
                planner.plan(batch)
                result.wall_s.append(time.perf_counter() - start_s)
                result.cpu_s.append(time.process_time() - start_cpu_s)


SECTIONS = {
    "instance-b": Benchmark.instance_b,
    "wikipedia": Benchmark.wikipedia,
    "large": Benchmark.large,
    "pools": Benchmark.pools,
    "many": Benchmark.many,
    "waves": Benchmark.waves,
}


def _planned(planner: Planner, batch: Sequence[int], seed: int | None = None) -> PlannedBatch:
    """Plan a batch once: what is the same in every round."""
    plan = planner.plan(batch)
    bound_ms, time_ms = _bound_and_time_ms(plan)
    assert plan.dispatch is not None  # these planners report on every plan
    return PlannedBatch(
        seed=seed,
        num_sequences=len(batch),
        longest_tokens=max(batch),
        strategy=plan.strategy,
        time_ms=time_ms,
        bound_ms=bound_ms,
        status=plan.dispatch.status,
    )


def _bound_and_time_ms(plan: IterationPlan) -> tuple[float, float]:
    assert plan.dispatch is not None  # these planners report on every plan
    return MS_PER_S * plan.dispatch.bound_s, MS_PER_S * plan.predicted_time_s


def _gap_percent(bound_ms: float, time_ms: float) -> float:
    return 100.0 * (1.0 - bound_ms / time_ms)


def _quartiles(values: Iterable[float], digits: int) -> list[str]:
    """The quartiles, from the least to the largest value."""
    found = np.quantile(list(values), (0.0, 0.25, 0.5, 0.75, 1.0))
    return [f"{value:.{digits}f}" for value in found]


def _range(values: Sequence[float], digits: int = 0) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections."""
    parser = make_parser("planner", "Quality and speed of the planner on one core.")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to measure"
    )
    parser.add_argument("--batches", type=int, default=30, help="batches from Wikipedia")
    parser.add_argument("--rounds", type=int, default=5, help="how often each batch is timed")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--core", type=int, help="core to run on; the last one if not given")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    core = max(os.sched_getaffinity(0)) if options.core is None else options.core
    os.sched_setaffinity(0, {core})
    console = results_console(140)
    with counted_progress("steps") as progress:
        benchmark = Benchmark(options, console, progress)
        figures = {section: SECTIONS[section](benchmark) for section in options.sections}
    write_figures(console, options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
