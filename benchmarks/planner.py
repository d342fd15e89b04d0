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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from benchmarks import inputs
from benchmarks.command import counted_progress, make_parser, write_figures
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.planner.costs import SchemeCost
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

    num_sequences: int
    strategy: str
    time_ms: float
    bound_ms: float
    cpu_s: list[float] = field(default_factory=list)
    """By round, of the whole process: on a busy machine the steadier figure."""
    alone_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By strategy that can hold the batch: bound and time of its plan when it is the whole pool."""

    @property
    def gap_percent(self) -> float:
        """(time - bound) / time."""
        return _gap_percent(self.bound_ms, self.time_ms)


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
        """Every strategy against the published planner."""
        batch, published = inputs.instance_b(), inputs.published_result()
        planner = CertifiedPlanner(self._pool, self._model)
        result = _planned(planner, batch)
        self._plan_alone(batch, result)
        result.cpu_s.extend(_cpu_s(planner, batch) for _ in range(self._options.rounds))
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
        self._console.print(f"All strategies together: CPU {min(result.cpu_s):.3f} s.")
        return asdict(result)

    def wikipedia(self) -> Any:
        """Quality and time over many batches."""
        cases = [
            inputs.PoolCase(
                str(seed), self._model, self._pool, self._lengths.batch(seed, inputs.BATCH_TOKENS)
            )
            for seed in self._seeds(self._options.batches)
        ]
        return self._pool_cases(cases, f"Wikipedia, {inputs.BATCH_TOKENS} tokens, S0 to S6")

    def large(self) -> Any:
        """One strategy on 1,024 ranks."""
        pool = inputs.large_pool()
        cases = [
            inputs.PoolCase(
                f"cut at {cut}, {seed}",
                self._model,
                pool,
                self._lengths.batch(seed, inputs.LARGE_BATCH_TOKENS, cut),
            )
            for cut in inputs.LARGE_CUTS_TOKENS
            for seed in self._seeds(NUM_LARGE_SEEDS)
        ]
        return self._pool_cases(cases, f"1,024 ranks: {inputs.LARGE_STRATEGY}")

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

    def forms(self) -> Any:
        """Costs of several forms, against the plan by the first form alone."""
        columns = ("sequences", "time ms", "gap %", "by one form", "CPU s", "of one form")
        table = figures_table("Rings of four forms and a host", ("case",), columns)
        cases, figures = list(inputs.ring_cases(self._options.seed)), []
        num_rounds = self._options.rounds
        for case in self._progress.track(cases, description="forms"):
            rows = [replace(r, coefficients=r.coefficients.forms[0]) for r in case.profile.schemes]
            models = (case.profile, replace(case.profile, schemes=tuple(rows)))
            planners = [CertifiedPlanner(case.pool, model) for model in models]
            rounds = [[_cpu_s(each, case.batch) for each in planners] for _ in range(num_rounds)]
            cpu_s = np.min(rounds, axis=0)
            result = _planned(planners[0], case.batch)
            one_form_ms = _makespan_ms(planners[1].plan(case.batch), case.profile)
            figures.append((result.time_ms, result.gap_percent, one_form_ms, *cpu_s))
            table.add_row(
                case.name,
                str(result.num_sequences),
                f"{result.time_ms:.1f}",
                f"{result.gap_percent:.2f}",
                f"{one_form_ms / result.time_ms:.3f} ×",
                *(f"{each_s:.3f}" for each_s in cpu_s),
            )
        sums, gaps = np.sum(figures, axis=0), [gap for _, gap, *_ in figures]
        table.caption = (
            f"Plans by one form take {sums[2] / sums[0]:.3f} × as long; gaps: median "
            f"{np.median(gaps):.2f} %, largest {max(gaps):.2f} %; CPU time "
            f"{sums[3] / sums[4]:.2f} ×."
        )
        self._console.print(table)
        return figures

    def _pool_cases(
        self, cases: Sequence[inputs.PoolCase], title: str, *, goal_percent: float = 2.0
    ) -> Any:
        table = figures_table(
            title, ("case",), ("strategies", "sequences", "time ms", "gap %", "CPU s")
        )
        table.add_column("choice")
        results = []
        for case in self._progress.track(cases, description=title):
            planner = CertifiedPlanner(case.pool, case.profile)
            result = _planned(planner, case.batch)
            result.cpu_s.append(_cpu_s(planner, case.batch))
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
            f"{goal_percent:g} %, median {np.median(gaps):.2f} %, largest {max(gaps):.2f} %; "
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


SECTIONS = {
    "instance-b": Benchmark.instance_b,
    "wikipedia": Benchmark.wikipedia,
    "large": Benchmark.large,
    "pools": Benchmark.pools,
    "many": Benchmark.many,
    "waves": Benchmark.waves,
    "forms": Benchmark.forms,
}


def _planned(planner: Planner, batch: Sequence[int]) -> PlannedBatch:
    """Plan a batch once: what is the same in every round."""
    plan = planner.plan(batch)
    bound_ms, time_ms = _bound_and_time_ms(plan)
    return PlannedBatch(
        num_sequences=len(batch),
        strategy=plan.strategy,
        time_ms=time_ms,
        bound_ms=bound_ms,
    )


def _cpu_s(planner: Planner, batch: Sequence[int]) -> float:
    start_s = time.process_time()
    planner.plan(batch)
    return time.process_time() - start_s


def _bound_and_time_ms(plan: IterationPlan) -> tuple[float, float]:
    assert plan.dispatch is not None  # these planners report on every plan
    return MS_PER_S * plan.dispatch.bound_s, MS_PER_S * plan.predicted_time_s


def _makespan_ms(plan: IterationPlan, cost_model: CostModel) -> float:
    """Time of the slowest replica of a plan by another cost model than that which made it."""
    costs = [(r, cost_model.coefficients(r.scheme), r.scheme.pp) for r in plan.replicas]
    return max(
        SchemeCost(times, 0, pp).replica_time_ms(replica.times_ms(cost_model.coefficients))
        for replica, times, pp in costs
    )


def _gap_percent(bound_ms: float, time_ms: float) -> float:
    return 100.0 * (1.0 - bound_ms / time_ms)


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
