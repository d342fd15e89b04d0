"""Dynamic strategies against the best static one on real ranks of a CPU, for information.

A cost profile is measured on these ranks first; then both sides train the same batches, block by
block in turn. `README.md` says what this can and cannot show: it is not what a cluster gains.

    python -m benchmarks.dynamic_on_cpu
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.command import import_on_cpu, wide_console
from benchmarks.emulated_cluster import LENGTHS_FILE, static_strategies
from benchmarks.emulated_figures import ratio_of_totals
from benchmarks.rank_set import RankSet
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.profiler.grid import GridPoint, grid
from megatron.hydraulis.profiler.measurements import MeasuredPoint, MeasuredStrategy
from megatron.hydraulis.profiler.results import fit_points, profile_of
from megatron.hydraulis.profiler.settings import filling_strategy
from megatron.hydraulis.simulator.batches import read_corpus_lengths, sample_batches
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

if TYPE_CHECKING:
    from benchmarks.iteration_block import BlockReport
    from benchmarks.workload import Workload

NUM_RANKS = 4
STRATEGIES = ("4*tp1", "tp2+2*tp1", "2*tp2", "tp4")
TOKENS_OF_A_RANK = 512
"""Limit of a micro-batch for each rank that shares it: a made-up memory, so that the longest
sequences need tp4."""
CONTEXT_WINDOW_TOKENS = TOKENS_OF_A_RANK * NUM_RANKS
LENGTH_DIVISOR = 4
"""Wikipedia's lengths are divided by it: their tail then passes the context window."""
BATCH_TOKENS = 4096
ITERATIONS_PER_BLOCK = 5
SHORT_TOKENS = 64
NUM_SIZES = 3
"""Of micro-batches that the profile is fitted to; see `profiler.grid`."""
DYNAMIC, STATIC = "dynamic", "static"
TIMES_SEED = 0
WIDTH = 110
"""Columns of the output where it is no terminal."""

Lengths = tuple[int, ...]
Request = tuple[Scheme, GridPoint] | tuple[Strategy, dict[Scheme, MeasuredPoint]]


class ProfilingRank:
    """One rank that measures micro-batches and strategies; collective."""

    def __init__(self, workload: Workload, pool: Pool, filling: dict[Scheme, Strategy]) -> None:
        from benchmarks.iteration_block import pin_to_core
        from benchmarks.workload import WEIGHT_SEED
        from megatron.hydraulis.profiler.rig import EngineRig, Repeats
        from megatron.hydraulis.runtime.engine import Engine

        pin_to_core(dist.get_rank(), dist.get_world_size())
        self._rig = EngineRig(
            lambda spans: Engine(
                workload.definition(), pool, workload.optimizer, seed=WEIGHT_SEED, spans=spans
            ),
            {str(scheme): strategy for scheme, strategy in filling.items()},
            Repeats(num_warmup=1, num_measured=3),
            vocab_size=workload.vocab_size,
            seed=TIMES_SEED,
        )

    def __call__(self, request: Request) -> MeasuredPoint | MeasuredStrategy:
        what, detail = request
        if isinstance(what, Strategy):
            assert isinstance(detail, dict)
            return self._rig.run_strategy(what, detail)
        assert isinstance(detail, GridPoint)
        outcome = self._rig.run_point(str(what), detail)
        return MeasuredPoint(
            scheme=str(what),
            point=detail,
            stage_ms=outcome.stage_ms,
            forward_ms=outcome.forward_ms,
            peak_bytes=outcome.peak_bytes,
        )


@dataclass(frozen=True)
class Side:
    """One side's blocks; block i of both sides trains the same batches."""

    name: str
    what: str
    plans: tuple[IterationPlan, ...]
    walls_s: tuple[float, ...]
    """Of each block: of the slowest rank."""
    cpus_s: tuple[float, ...]
    """Of each block: of all ranks."""

    @property
    def predicted_s(self) -> list[float]:
        """Of each block."""
        size = ITERATIONS_PER_BLOCK
        starts = range(0, len(self.plans), size)
        return [sum(p.predicted_time_s for p in self.plans[at : at + size]) for at in starts]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure a profile, plan all batches, run both sides in turn, print the figures."""
    options = _parser().parse_args(arguments)
    console = wide_console(WIDTH)
    import_on_cpu(console)
    from benchmarks.workload import Workload

    workload = Workload(
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.hidden_size * 2,
        lengths=(CONTEXT_WINDOW_TOKENS,),
    )
    pool = Pool(
        num_ranks=NUM_RANKS,
        ranks_per_node=NUM_RANKS,
        strategies=tuple(Strategy.parse(text, NUM_RANKS, name=text) for text in STRATEGIES),
    )
    batches = _batches(options.iterations, options.seed)
    console.print(
        f"{workload.shape.num_parameters / 1e6:.1f} M parameters, {NUM_RANKS} gloo ranks, pinned, "
        f"on {os.cpu_count()} cores, fp32, torch {torch.__version__}; {len(batches)} batches of "
        f"{fmean(map(len, batches)):.0f} sequences and {fmean(map(sum, batches)):,.0f} tokens "
        f"(mean); limit {TOKENS_OF_A_RANK} tokens a rank; load averages before: {_load()}"
    )
    with _progress(console) as progress:
        profile, fits = measure_profile(workload, pool, progress)
        console.print(_profile_table(profile, fits))
        plans = plan_sides(pool, profile, batches)
        sides = run_sides(workload, pool, plans, progress)
    console.print(f"Load averages after: {_load()}")
    console.print(_table(sides))
    _tell_ratio(console, sides)
    if options.json is not None:
        options.json.write_text(json.dumps(_report(sides, profile), indent=1) + "\n")
        console.print(f"written to {options.json}")
    return 0


def measure_profile(
    workload: Workload, pool: Pool, progress: Progress
) -> tuple[ProfileCostModel, dict[Scheme, str]]:
    """Micro-batches up to the limit of each scheme, then each strategy's overhead."""
    schemes = sorted({s for strategy in pool.strategies for s in strategy.schemes}, key=str)
    filling = {scheme: filling_strategy(scheme, NUM_RANKS, NUM_RANKS) for scheme in schemes}
    engine_pool = Pool.of(*{s.name: s for s in (*filling.values(), *pool.strategies)}.values())
    points = {
        scheme: grid(
            TOKENS_OF_A_RANK * scheme.tp,
            longest=TOKENS_OF_A_RANK * scheme.tp,
            short=SHORT_TOKENS,
            num_sizes=NUM_SIZES,
        )
        for scheme in schemes
    }
    total = sum(map(len, points.values())) + len(pool.strategies)
    task = progress.add_task("profile: measurements", total=total)
    measured: dict[Scheme, list[MeasuredPoint]] = {}
    strategies: list[MeasuredStrategy] = []
    with RankSet(
        "profile", NUM_RANKS, lambda: ProfilingRank(workload, engine_pool, filling)
    ) as ranks:
        for scheme in schemes:
            measured[scheme] = []
            for point in points[scheme]:
                measured[scheme].append(ranks.call((scheme, point))[0])
                progress.advance(task)
        typical = {scheme: found[len(found) // 2] for scheme, found in measured.items()}
        for strategy in pool.strategies:
            strategies.append(ranks.call((strategy, typical))[0])
            progress.advance(task)
    profile = profile_of(
        measured,
        strategies,
        device=f"{NUM_RANKS} ranks on {os.cpu_count()} cores",
        source="benchmarks.dynamic_on_cpu",
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        setup={"tokens_of_a_rank": TOKENS_OF_A_RANK},
    )
    fits = {}
    for scheme, found in measured.items():
        fit = fit_points(found)
        assert fit is not None
        fits[scheme] = f"{fit.median_residual:.1%}, {fit.worst_residual:.1%}"
    return profile, fits


def plan_sides(
    pool: Pool, profile: ProfileCostModel, batches: Sequence[Lengths]
) -> dict[str, list[IterationPlan]]:
    """Balanced plans of both sides; the static strategy is the one predicted to be fastest."""

    def balanced(of: Pool) -> list[IterationPlan]:
        planner = CertifiedPlanner(of, profile)
        return [planner.plan(lengths, iteration=i) for i, lengths in enumerate(batches)]

    able = static_strategies(pool, profile, CONTEXT_WINDOW_TOKENS)
    static = min(
        (balanced(Pool.of(strategy)) for strategy in able),
        key=lambda plans: sum(plan.predicted_time_s for plan in plans),
    )
    return {DYNAMIC: balanced(pool), STATIC: static}


def run_sides(
    workload: Workload, pool: Pool, plans: dict[str, list[IterationPlan]], progress: Progress
) -> list[Side]:
    """All blocks of both sides in turn, each side on ranks of its own."""
    from benchmarks.iteration_block import EngineRank, PlannedIteration

    size = ITERATIONS_PER_BLOCK
    starts = range(0, len(plans[DYNAMIC]), size)
    pools = {DYNAMIC: pool, STATIC: Pool.of(pool.strategy(plans[STATIC][0].strategy))}
    task = progress.add_task("blocks of both sides", total=len(starts))
    reports: dict[str, list[list[BlockReport]]] = {name: [] for name in plans}

    def make_rank(name: str) -> EngineRank:
        return EngineRank(workload, pools[name], is_pinned=True)

    with (
        RankSet(DYNAMIC, NUM_RANKS, lambda: make_rank(DYNAMIC)) as dynamic,
        RankSet(STATIC, NUM_RANKS, lambda: make_rank(STATIC)) as static,
    ):
        ranks = {DYNAMIC: dynamic, STATIC: static}
        for name in plans:  # every strategy once, to warm up
            used = {plan.strategy: plan for plan in plans[name]}
            ranks[name].call([PlannedIteration.of_plan(plan) for plan in used.values()])
        for number, start in enumerate(starts):
            for name in sorted(plans, reverse=number % 2 == 0):
                block = [PlannedIteration.of_plan(p) for p in plans[name][start : start + size]]
                reports[name].append(ranks[name].call(block))
            progress.advance(task)
    what = {
        DYNAMIC: f"{len(pool.strategies)} strategies",
        STATIC: str(pools[STATIC].strategies[0]),
    }
    return [
        Side(
            name,
            what[name],
            tuple(plans[name]),
            tuple(max(r.spent.wall_s for r in block) for block in reports[name]),
            tuple(sum(r.spent.cpu_s for r in block) for block in reports[name]),
        )
        for name in plans
    ]


def _batches(num_batches: int, seed: int) -> list[Lengths]:
    lengths = np.maximum(1, read_corpus_lengths(LENGTHS_FILE) // LENGTH_DIVISOR)
    return sample_batches(
        lengths,
        longest=CONTEXT_WINDOW_TOKENS,
        batch_tokens=BATCH_TOKENS,
        num_batches=num_batches,
        seed=seed,
    )


def _profile_table(profile: ProfileCostModel, fits: dict[Scheme, str]) -> Table:
    table = Table(title="Cost profile, measured with all ranks at work")
    table.add_column("scheme")
    for column in (
        "a, ms/token²",
        "b, ms/token",
        "c, ms",
        "limit, tokens",
        "residual:\nmedian, worst",
    ):
        table.add_column(column, justify="right")
    for row in profile.schemes:
        c = row.coefficients
        table.add_row(
            str(row.scheme),
            f"{c.a_ms_per_token2:.2e}",
            f"{c.b_ms_per_token:.3f}",
            f"{c.c_ms:.1f}",
            str(row.max_tokens),
            fits[row.scheme],
        )
    return table


def _table(sides: Sequence[Side]) -> Table:
    table = Table(title="Both sides, same batches")
    table.add_column("side")
    for column in (
        "tokens/s",
        "predicted\ntokens/s",
        "iteration\ns",
        "measured /\npredicted \\[95 %]",
        "CPU s an\niteration",
        "iterations by strategy",
    ):
        table.add_column(column, justify="right")
    for side in sides:
        num = len(side.plans)
        tokens = _num_tokens(side)
        used = Counter(plan.strategy for plan in side.plans)
        table.add_row(
            f"{side.name}: {side.what}",
            f"{tokens / sum(side.walls_s):,.0f}",
            f"{tokens / sum(side.predicted_s):,.0f}",
            f"{sum(side.walls_s) / num:.2f}",
            str(ratio_of_totals(side.walls_s, side.predicted_s)).replace("[", "\\["),
            f"{sum(side.cpus_s) / num:.2f}",
            ", ".join(f"{name} {count}x" for name, count in used.most_common()),
        )
    return table


def _tell_ratio(console: Console, sides: Sequence[Side]) -> None:
    dynamic, static = sides
    wall = ratio_of_totals(static.walls_s, dynamic.walls_s)
    cpu = ratio_of_totals(static.cpus_s, dynamic.cpus_s)
    single = [a / b for a, b in zip(static.walls_s, dynamic.walls_s, strict=True)]
    predicted = sum(static.predicted_s) / sum(dynamic.predicted_s)
    console.print(
        f"tokens/s, dynamic over static: {wall} measured over {wall.num_pairs} blocks of "
        f"{ITERATIONS_PER_BLOCK} iterations (single blocks {min(single):.2f} to "
        f"{max(single):.2f}), {predicted:.3f} predicted; CPU time, static over dynamic: {cpu}. "
        f"A waiting rank gives its core away here: this is saved work, not a makespan.",
        markup=False,
    )


def _num_tokens(side: Side) -> int:
    return sum(
        sum(batch.lengths)
        for plan in side.plans
        for replica in plan.replicas
        for batch in replica.micro_batches
    )


def _load() -> str:
    return ", ".join(f"{load:.1f}" for load in os.getloadavg())


def _report(sides: Sequence[Side], profile: ProfileCostModel) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "cost_profile": profile.to_json(),
        "sides": [
            {
                "name": side.name,
                "what": side.what,
                "strategies": [plan.strategy for plan in side.plans],
                "walls_s": side.walls_s,
                "cpus_s": side.cpus_s,
                "predicted_s": side.predicted_s,
            }
            for side in sides
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.dynamic_on_cpu",
        description="Dynamic strategies against the best static one on real ranks of a CPU.",
    )
    parser.add_argument(
        "--iterations",
        type=_blocks,
        default=60,
        help=f"batches, each run once by both sides, a multiple of {ITERATIONS_PER_BLOCK} "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--hidden-size", type=int, default=128, help="of the model (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the batches (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    return parser


def _blocks(text: str) -> int:
    value = int(text)
    if value < 1 or value % ITERATIONS_PER_BLOCK:
        raise argparse.ArgumentTypeError(
            f"must be a multiple of {ITERATIONS_PER_BLOCK} but is {value}"
        )
    return value


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
    )


if __name__ == "__main__":
    sys.exit(main())
