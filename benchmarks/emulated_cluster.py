"""Dynamic strategies against the best static one, on an emulated cluster, by wall clock.

Forward and backward of each micro-batch take the time that a cost profile gives them; the rest is
real. One set of ranks runs all sides, iteration by iteration in turn, on the same batches.
`README.md` says what this can and cannot show.

    python -m benchmarks.emulated_cluster
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.command import (
    counted_progress,
    environment,
    figures_table,
    import_on_cpu,
    make_parser,
    positive,
    wide_console,
    write_figures,
)
from benchmarks.fixed_length import fixed_length_plan, padded_time_s
from benchmarks.paired_statistics import RatioEstimate, ratio_of_totals
from benchmarks.rank_set import RankSet, Worker
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.simulator.batches import read_corpus_lengths, sample_batches
from megatron.hydraulis.strategy import Pool, Strategy

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).parent / "data"
DEFAULT_PROFILE = ROOT / "examples" / "cost_profile_llama32b_a800.json"
LENGTHS_FILE = DATA / "wikipedia_lengths.csv"
CONTEXT_WINDOW_TOKENS = 32768
"""Longer sequences are cut here, or at what the largest replica holds if that is less."""
TOKENS_PER_RANK = 200_000 / 64
"""Of a global batch: the 200,000 tokens of the 64 devices that the profile was measured on."""
DYNAMIC, BALANCED, FIXED = "dynamic", "static, balanced", "static, fixed"
RANKS_AT_FULL_TIME = 16
"""So many ranks take the device's own times; more of them need more time for their tiny tensors."""

Lengths = tuple[int, ...]

PREDICTION_GOAL = 0.05
"""Largest relative difference between predicted and measured time of an iteration."""


@dataclass(frozen=True)
class Iteration:
    """One iteration of one side."""

    strategy: str
    predicted_s: float
    measured_s: float
    """Of the slowest rank."""
    cpu_s: float
    """Of all ranks."""
    num_operations: int
    """Forwards and backwards of micro-batches, on all ranks."""
    num_overruns: int
    """Those whose tiny tensors took longer than the modelled time."""
    overrun_s: float


@dataclass(frozen=True)
class SideRun:
    """All iterations of one side; iteration i of every side trains the same batch."""

    name: str
    what: str
    """In words: strategies and packing."""
    iterations: tuple[Iteration, ...]

    @property
    def measured_s(self) -> list[float]:
        """Of every iteration."""
        return [iteration.measured_s for iteration in self.iterations]

    @property
    def predicted_s(self) -> list[float]:
        """Of every iteration."""
        return [iteration.predicted_s for iteration in self.iterations]

    @property
    def prediction(self) -> RatioEstimate:
        """Measured over predicted time of the whole run."""
        return ratio_of_totals(self.measured_s, self.predicted_s)

    @property
    def prediction_errors(self) -> list[float]:
        """Relative difference between measurement and prediction, of every iteration."""
        return [abs(i.measured_s / i.predicted_s - 1.0) for i in self.iterations]

    @property
    def num_overruns(self) -> int:
        """Operations that took longer than modelled."""
        return sum(i.num_overruns for i in self.iterations)

    @property
    def num_operations(self) -> int:
        """All operations."""
        return sum(i.num_operations for i in self.iterations)

    def to_json(self) -> dict[str, Any]:
        """Summary and every iteration."""
        estimate = self.prediction
        return {
            "name": self.name,
            "what": self.what,
            "mean_predicted_s": math.fsum(self.predicted_s) / len(self.iterations),
            "mean_measured_s": math.fsum(self.measured_s) / len(self.iterations),
            "measured_over_predicted": [estimate.median, estimate.low, estimate.high],
            "iterations": [asdict(iteration) for iteration in self.iterations],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan all batches, run all sides in turn, print the figures."""
    options = _parser().parse_args(arguments)
    console = wide_console()
    try:
        import_on_cpu(console)
        from benchmarks.emulated_device import EmulatedDevice

        pool = Pool.read(options.pool or DATA / f"pool_{options.ranks}_ranks.json")
        if options.emulate_scale is None:
            options.emulate_scale = pool.num_ranks / RANKS_AT_FULL_TIME
        device = EmulatedDevice.read(options.emulate_device, options.emulate_scale)
        window = min(CONTEXT_WINDOW_TOKENS, _longest_held(pool, device.cost_model))
        batches = sample_batches(
            read_corpus_lengths(LENGTHS_FILE),
            longest=window,
            batch_tokens=int(TOKENS_PER_RANK * pool.num_ranks),
            num_batches=options.iterations,
            seed=options.seed,
        )
        with console.status(f"planning {len(batches)} batches"):
            plans = plan_sides(pool, device.cost_model, batches, window_tokens=window)
    except HydraulisError as error:
        console.print(f"[bold red]{error}")
        return 2
    console.print(device.notice)
    _describe(console, pool, batches, plans, window)
    sides = run_sides(pool, options, plans, console)
    for side in sides:
        console.print(f"{side.name}: {side.what}")
    for table in _tables(sides, plans, device.cost_model, window):
        console.print(table)
    dynamic, *static = sides
    speed_ups = {side.name: ratio_of_totals(side.measured_s, dynamic.measured_s) for side in static}
    figures = environment() | {
        "emulate_scale": options.emulate_scale,
        "seed": options.seed,
        "pool": pool.to_json(),
        "speed_ups": {name: [e.median, e.low, e.high] for name, e in speed_ups.items()},
        "sides": [side.to_json() for side in sides],
    }
    write_figures(console, options.json, figures)
    return 0


def plan_sides(
    pool: Pool, cost_model: ProfileCostModel, batches: Sequence[Lengths], *, window_tokens: int
) -> dict[str, list[IterationPlan]]:
    """The plans of every side; a static side runs its strategy that is predicted to be fastest."""
    planner = CertifiedPlanner(pool, cost_model)
    dynamic = [planner.plan(lengths, iteration=i) for i, lengths in enumerate(batches)]
    able = static_strategies(pool, cost_model, window_tokens)

    def balanced(strategy: Strategy) -> list[IterationPlan]:
        alone = CertifiedPlanner(Pool.of(strategy), cost_model)
        return [alone.plan(lengths, iteration=i) for i, lengths in enumerate(batches)]

    def fixed(strategy: Strategy) -> list[IterationPlan]:
        return [
            fixed_length_plan(
                lengths, strategy, cost_model, window_tokens=window_tokens, iteration=i
            )
            for i, lengths in enumerate(batches)
        ]

    def total_s(plans: list[IterationPlan]) -> float:
        return sum(plan.predicted_time_s for plan in plans)

    return {
        DYNAMIC: dynamic,
        BALANCED: min(map(balanced, able), key=total_s),
        FIXED: min(map(fixed, able), key=total_s),
    }


def static_strategies(pool: Pool, cost_model: ProfileCostModel, window: int) -> list[Strategy]:
    """Strategies of the pool that are homogeneous and hold the longest sequence."""
    return [
        strategy
        for strategy in pool.strategies
        if len(strategy.schemes) == 1
        and not strategy.idle_ranks
        and cost_model.max_tokens(strategy.schemes[0]) >= window
    ]


def run_sides(
    pool: Pool,
    options: argparse.Namespace,
    plans: dict[str, list[IterationPlan]],
    console: Console,
) -> list[SideRun]:
    """All iterations of all sides, in turn, on one set of ranks."""
    from benchmarks.emulated_device import EmulatedDevice
    from benchmarks.emulated_rank import EmulatedRank, Step

    device = EmulatedDevice.read(options.emulate_device, options.emulate_scale)

    def make_worker() -> Worker:
        return EmulatedRank(pool, device)

    done: dict[str, list[Iteration]] = {name: [] for name in plans}
    used = {plan.strategy: plan for side in plans.values() for plan in side}
    num_batches = len(plans[DYNAMIC])
    with counted_progress(console, "iterations") as progress:
        task = progress.add_task("starting ranks", total=num_batches * len(plans))
        with RankSet("emulated cluster", pool.num_ranks, make_worker) as ranks:
            progress.update(task, description="warming up")
            for plan in used.values():
                ranks.call(Step(plan, sleeps=False))
            progress.update(task, description="measuring")
            for index in range(num_batches):
                # Another side comes first each time.
                names = list(plans)[index % len(plans) :] + list(plans)[: index % len(plans)]
                for name in names:
                    plan = plans[name][index]
                    results = ranks.call(Step(plan))
                    done[name].append(
                        Iteration(
                            strategy=plan.strategy,
                            predicted_s=plan.predicted_time_s,
                            measured_s=max(r.wall_s for r in results),
                            cpu_s=sum(r.cpu_s for r in results),
                            num_operations=sum(r.count.num_operations for r in results),
                            num_overruns=sum(r.count.num_overruns for r in results),
                            overrun_s=sum(r.count.overrun_s for r in results),
                        )
                    )
                    progress.advance(task)
    what = {
        DYNAMIC: f"{len(pool.strategies)} strategies, certified planner",
        BALANCED: f"{_text(pool, plans[BALANCED])}, certified planner",
        FIXED: f"{_text(pool, plans[FIXED])}, rows of equal tokens",
    }
    return [SideRun(name, what[name], tuple(done[name])) for name in plans]


def _text(pool: Pool, plans: Sequence[IterationPlan]) -> str:
    return str(pool.strategy(plans[0].strategy))


def _longest_held(pool: Pool, cost_model: ProfileCostModel) -> int:
    """Most tokens of a sequence that some homogeneous strategy holds."""
    limits = [
        cost_model.max_tokens(s.schemes[0])
        for s in pool.strategies
        if len(s.schemes) == 1 and not s.idle_ranks
    ]
    if not limits:
        raise HydraulisError(
            f"a pool to compare with a static strategy needs a homogeneous one but none of its "
            f"{len(pool.strategies)} is; add one"
        )
    return max(limits)


def _describe(
    console: Console,
    pool: Pool,
    batches: Sequence[Lengths],
    plans: dict[str, list[IterationPlan]],
    window: int,
) -> None:
    chosen = Counter(plan.strategy for plan in plans[DYNAMIC])
    counts = ", ".join(f"{pool.strategy(name)} {count}x" for name, count in chosen.most_common())
    console.print(
        f"{pool.num_ranks} gloo ranks on {os.cpu_count()} cores; {len(batches)} batches of "
        f"{fmean(map(len, batches)):.0f} sequences and {fmean(map(sum, batches)):,.0f} tokens "
        f"(mean), documents cut at {window:,} tokens, longest {max(map(max, batches)):,}.\n"
        f"Dynamic plans use {counts}. Planned beforehand, in "
        f"{median(p.plan_time_s for p in plans[DYNAMIC]):.2f} s each (median); largest gap "
        f"{max(p.dispatch.gap for p in plans[DYNAMIC] if p.dispatch is not None):.1%}."
    )


def _tables(
    sides: Sequence[SideRun],
    plans: dict[str, list[IterationPlan]],
    cost_model: ProfileCostModel,
    window: int,
) -> list[Table]:
    times = figures_table(
        "An iteration: predicted and measured",
        ("side",),
        (
            "predicted\ns",
            "measured\ns",
            "meas. / pred.\n[95 %]",
            f"within\n{PREDICTION_GOAL:.0%}",
            "worst\noff by",
            "overruns",
            "CPU\ns",
        ),
        "Means over iterations. Measured: slowest rank, from the moment all were ready, with "
        "regrouping and update, which are not predicted. Within, off by: single iterations. "
        "Overruns: forwards and backwards whose tiny tensors took longer than the modelled time, "
        "of all. CPU: all ranks.",
    )
    for side in sides:
        errors = side.prediction_errors
        times.add_row(
            side.name,
            f"{fmean(side.predicted_s):.3f}",
            f"{fmean(side.measured_s):.3f}",
            str(side.prediction).replace(" [", "\n\\["),
            f"{sum(error <= PREDICTION_GOAL for error in errors)}/{len(errors)}",
            f"{max(errors):.1%}",
            f"{side.num_overruns}/{side.num_operations}",
            f"{fmean(i.cpu_s for i in side.iterations):.2f}",
        )
    speed = figures_table(
        "How much faster the dynamic strategies are: time of the side over theirs",
        ("side",),
        ("measured\n[95 %]", "predicted"),
        "Of the total time of all batches; intervals: bootstrap over batches. Padding of fixed "
        "rows costs nothing where measured; the last line, not run, pads each to "
        f"{window:,} tokens.",
    )
    dynamic = sides[0]
    for side in sides[1:]:
        measured = ratio_of_totals(side.measured_s, dynamic.measured_s)
        predicted = ratio_of_totals(side.predicted_s, dynamic.predicted_s)
        speed.add_row(side.name, str(measured).replace("[", "\\["), f"{predicted.median:.3f}")
    padded_s = [padded_time_s(p, cost_model, window_tokens=window) for p in plans[FIXED]]
    padded = ratio_of_totals(padded_s, dynamic.predicted_s)
    speed.add_row(f"{FIXED}, padded rows", "-", f"{padded.median:.3f}")
    return [times, speed]


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "emulated_cluster",
        "Dynamic strategies against the best static one, on an emulated cluster.",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        choices=(8, 16, 32),
        default=16,
        help="ranks of the cluster, all on this machine",
    )
    parser.add_argument(
        "--pool",
        type=Path,
        metavar="FILE",
        help="pool of strategies, instead of benchmarks/data/pool_RANKS_ranks.json",
    )
    parser.add_argument(
        "--emulate-device",
        type=Path,
        default=DEFAULT_PROFILE,
        metavar="COST_PROFILE",
        help="times of the device",
    )
    parser.add_argument(
        "--emulate-scale",
        type=float,
        metavar="X",
        help="seconds here for each second of the device; if not given, ranks / "
        f"{RANKS_AT_FULL_TIME}, since the tiny tensors of more ranks take longer",
    )
    parser.add_argument(
        "--iterations", type=positive, default=20, help="batches, each run once by every side"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    return parser


if __name__ == "__main__":
    sys.exit(main())
