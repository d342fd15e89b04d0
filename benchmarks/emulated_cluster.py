"""Dynamic strategies against the best static one, on an emulated cluster, by wall clock.

Forward and backward of each micro-batch take the time that a cost profile gives them; the rest is
real. One set of ranks runs all sides in turn, iteration by iteration, on the same batches.
`README.md` says what this can and cannot show.

    python -m benchmarks.emulated_cluster
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.command import (
    counted_progress,
    environment,
    make_parser,
    positive,
    use_cpu,
    write_figures,
)
from benchmarks.emulated_device import (
    EmulatedBatch,
    EmulatedDevice,
    EmulatedForwardStep,
    EmulationCount,
)
from benchmarks.inputs import (
    BATCH_TOKENS,
    CONTEXT_TOKENS,
    COST_PROFILE,
    DATA,
    WIKIPEDIA,
    llama_shape,
)
from benchmarks.paired_statistics import RatioEstimate, ratio_of_totals
from benchmarks.rank_set import RankSet
from benchmarks.workload import DATA_SEED, WEIGHT_SEED, Workload
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.lengths.batches import sample_batches
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.library.batches import RankShare, TokenSequence
from megatron.hydraulis.planner.costs import SchemeCost
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.replica_plan import MicroBatch, ReplicaPlan
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.simulator.work import fixed_length_shares
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.terminal import figures_table, results_console

TOKENS_PER_RANK = BATCH_TOKENS / 64
"""Of a global batch: 200,000 tokens on the 64 devices that the profile was measured on."""
DYNAMIC, BALANCED, FIXED = "dynamic", "static, balanced", "static, fixed"
RANKS_AT_FULL_TIME = 16
"""Number of ranks for which the modelled times suffice; the tiny tensors of more ranks need more
time."""
PREDICTION_GOAL = 0.05
"""Largest relative difference between predicted and measured time of an iteration."""
WIDTH_PER_ATOM = 4
"""Of the tiny model: channels of a head, of which there are as many as the largest tp."""
MS_PER_S = 1000.0

Lengths = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One iteration to run."""

    plan: IterationPlan
    sleeps: bool = True
    """Whether to take the modelled times; a warm-up step does not."""


@dataclass(frozen=True)
class StepResult:
    """One rank's measurements of an iteration."""

    wall_s: float
    """From the moment all ranks were ready until loss and parameters were final."""
    cpu_s: float
    """Of the whole process."""
    count: EmulationCount


def tiny_model(pool: Pool) -> Workload:
    """The smallest model that every strategy of the pool can cut."""
    num_parts = pool.tp_lcm
    return Workload(
        shape=llama_shape(
            num_layers=math.lcm(*(scheme.pp for s in pool.strategies for scheme in s.schemes)),
            hidden_size=WIDTH_PER_ATOM * num_parts,
            ffn_hidden_size=WIDTH_PER_ATOM * num_parts,
            num_attention_heads=num_parts,
            num_query_groups=num_parts,
            vocab_size=WIDTH_PER_ATOM * num_parts,
        ),
        lengths=(max(scheme.tp for strategy in pool.strategies for scheme in strategy.schemes),),
    )


class EmulatedRank:
    """Callable with a `Step`; collective over the ranks of the pool."""

    def __init__(self, pool: Pool, device: EmulatedDevice) -> None:
        self._device = device
        self._model = tiny_model(pool)
        # Halves the number of tensor-parallel collectives, in each of which all processes switch.
        definition = dataclasses.replace(self._model.definition(), sequence_parallel=False)
        self._engine = RuntimeEngine(definition, pool, self._model.optimizer, seed=WEIGHT_SEED)
        for strategy in pool.strategies:
            self._engine.runtime_of(strategy.name)
        self._plain_step = make_forward_step()
        self._emulated_step = EmulatedForwardStep(make_forward_step())

    def __call__(self, step: Step) -> StepResult:
        batches = self._micro_batches(step.plan)
        before = dataclasses.replace(self._emulated_step.count)
        forward_step = self._emulated_step if step.sleeps else self._plain_step
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        outcome = self._engine.train_step(step.plan.strategy, batches, forward_step)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        assert outcome.updated
        return StepResult(wall_s, cpu_s, self._emulated_step.count - before)

    def _micro_batches(self, plan: IterationPlan) -> list[EmulatedBatch]:
        """Shortened rows of random tokens with the real lengths; none if this rank is idle."""
        mine = plan.replica_of(self._engine.rank)
        if mine is None:
            return []
        rng = np.random.default_rng((DATA_SEED, plan.iteration))
        vocab_size = self._model.shape.vocab_size

        def sequence_of(place: int) -> TokenSequence:
            return TokenSequence(rng.integers(0, vocab_size, size=plan.lengths[place] + 1))

        share = RankShare.of(plan, self._engine.rank, self._engine.device, sequence_of)
        return [self._device.shorten(row, mine.scheme) for row in share.micro_batches]


@dataclass(frozen=True)
class Iteration:
    """One iteration of one side."""

    strategy: str
    predicted_s: float
    measured_s: float
    """Of the slowest rank."""
    cpu_s: float
    """Of all ranks."""
    count: EmulationCount
    """Of all ranks."""


@dataclass(frozen=True)
class SideRun:
    """All iterations of one side; iteration i of every side trains the same batch."""

    name: str
    what: str
    """Strategies and packing."""
    iterations: tuple[Iteration, ...]

    @property
    def measured_s(self) -> list[float]:
        """Measured times by iteration."""
        return [iteration.measured_s for iteration in self.iterations]

    @property
    def predicted_s(self) -> list[float]:
        """Predicted times by iteration."""
        return [iteration.predicted_s for iteration in self.iterations]

    @property
    def prediction(self) -> RatioEstimate:
        """Measured over predicted time of the whole run."""
        return ratio_of_totals(self.measured_s, self.predicted_s)

    @property
    def prediction_errors(self) -> list[float]:
        """Relative differences of measurement and prediction, by iteration."""
        return [abs(i.measured_s / i.predicted_s - 1.0) for i in self.iterations]

    @property
    def count(self) -> EmulationCount:
        """The sum over all iterations."""
        return sum((i.count for i in self.iterations), EmulationCount())

    def to_json(self) -> dict[str, Any]:
        """Summary and every iteration."""
        estimate = self.prediction
        return {
            "name": self.name,
            "what": self.what,
            "mean_predicted_s": fmean(self.predicted_s),
            "mean_measured_s": fmean(self.measured_s),
            "measured_over_predicted": [estimate.value, estimate.low, estimate.high],
            "iterations": [asdict(iteration) for iteration in self.iterations],
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan all batches, run all sides in turn, print the figures."""
    options = _parser().parse_args(arguments)
    console = results_console()
    try:
        use_cpu()
        pool = Pool.read(options.pool or DATA / f"pool_{options.ranks}_ranks.json")
        if options.emulate_scale is None:
            options.emulate_scale = pool.num_ranks / RANKS_AT_FULL_TIME
        device = EmulatedDevice.read(options.emulate_device, options.emulate_scale)
        window = min(CONTEXT_TOKENS, _longest_held(pool, device.cost_model))
        batches = sample_batches(
            read_length_counts(WIKIPEDIA).cut(window, "truncate").sequences,
            sizes=BatchSizes.constant(num_tokens=int(TOKENS_PER_RANK * pool.num_ranks)),
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
    sides = run_sides(pool, device, plans, console)
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
        "speed_ups": {name: [e.value, e.low, e.high] for name, e in speed_ups.items()},
        "sides": [side.to_json() for side in sides],
    }
    write_figures(console, options.json, figures)
    return 0


def plan_sides(
    pool: Pool, cost_model: ProfileCostModel, batches: Sequence[Lengths], *, window_tokens: int
) -> dict[str, list[IterationPlan]]:
    """The plans of every side; a static side runs the strategy with the least predicted time."""
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
        if strategy.is_homogeneous and cost_model.max_tokens(strategy.schemes[0]) >= window
    ]


def fixed_length_plan(
    lengths: Sequence[int],
    strategy: Strategy,
    cost_model: CostModel,
    *,
    window_tokens: int,
    iteration: int = 0,
) -> IterationPlan:
    """Fixed-length packing on equal replicas: rows of about equal tokens, equally many on each.

    Padding costs nothing in these plans; `padded_time_s` is the time with rows padded to the
    context window. Rows with the same number of tokens differ in Σ s².

    Raises ValueError if replicas differ or cannot hold a row.
    """
    if not strategy.is_homogeneous:
        raise ValueError(
            f"rows are distributed evenly over equal replicas but these are {strategy}"
        )
    (scheme,) = strategy.schemes
    if cost_model.max_tokens(scheme) < window_tokens:
        raise ValueError(
            f"{scheme} holds {cost_model.max_tokens(scheme)} tokens but a row has {window_tokens}"
        )
    cost = SchemeCost(cost_model.coefficients(scheme), window_tokens, scheme.pp)
    shares = fixed_length_shares(lengths, window_tokens, len(strategy.replicas))
    replicas = []
    for replica, rows in zip(strategy.replicas, shares, strict=True):
        micro_batches = tuple(
            MicroBatch(tuple(row), tuple(lengths[i] for i in row)) for row in rows if row
        )
        time_s = cost.replica_time_ms([cost.time_ms(m.lengths) for m in micro_batches]) / MS_PER_S
        replicas.append(ReplicaPlan(scheme, replica.ranks, micro_batches, time_s))
    makespan_s = max(replica.predicted_time_s for replica in replicas)
    return IterationPlan(
        iteration=iteration,
        strategy=strategy.name,
        replicas=tuple(replicas),
        predicted_time_s=makespan_s + cost_model.overhead_ms(strategy) / MS_PER_S,
    )


def padded_time_s(plan: IterationPlan, cost_model: CostModel, *, window_tokens: int) -> float:
    """Predicted makespan of such a plan if every row is padded to the context window.

    Padding costs what tokens cost outside attention.
    """
    slowest_ms = 0.0
    for replica in plan.replicas:
        cost = SchemeCost(cost_model.coefficients(replica.scheme), 0, replica.scheme.pp)
        times_ms = [
            cost.coefficients.time_ms(m.lengths, window_tokens) for m in replica.micro_batches
        ]
        slowest_ms = max(slowest_ms, cost.replica_time_ms(times_ms))
    return slowest_ms / MS_PER_S


def run_sides(
    pool: Pool,
    device: EmulatedDevice,
    plans: dict[str, list[IterationPlan]],
    console: Console,
) -> list[SideRun]:
    """All iterations of all sides, in turn, on one set of ranks."""
    done: dict[str, list[Iteration]] = {name: [] for name in plans}
    used = {plan.strategy: plan for side in plans.values() for plan in side}
    num_batches = len(plans[DYNAMIC])
    with counted_progress("iterations") as progress:
        task = progress.add_task("starting ranks", total=num_batches * len(plans))
        with RankSet(
            "emulated cluster", pool.num_ranks, lambda: EmulatedRank(pool, device)
        ) as ranks:
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
                            count=sum((r.count for r in results), EmulationCount()),
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
    """Tokens of the longest sequence that a homogeneous strategy holds."""
    limits = [cost_model.max_tokens(s.schemes[0]) for s in pool.strategies if s.is_homogeneous]
    if not limits:
        raise HydraulisError(
            f"a comparison with a static strategy needs a homogeneous one but none of the pool's "
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
        caption="Means over iterations. Measured: slowest rank, from the moment all were ready, "
        "with regrouping and update, which are not predicted. Within, off by: single iterations. "
        "Overruns: forwards and backwards whose tiny tensors took longer than the modelled time. "
        "CPU: all ranks.",
    )
    for side in sides:
        errors = side.prediction_errors
        times.add_row(
            side.name,
            f"{fmean(side.predicted_s):.3f}",
            f"{fmean(side.measured_s):.3f}",
            str(side.prediction).replace(" [", "\n["),
            f"{sum(error <= PREDICTION_GOAL for error in errors)}/{len(errors)}",
            f"{max(errors):.1%}",
            f"{side.count.num_overruns}/{side.count.num_operations}",
            f"{fmean(i.cpu_s for i in side.iterations):.2f}",
        )
    speed = figures_table(
        "Time of a static side over that of the dynamic strategies",
        ("side",),
        ("measured\n[95 %]", "predicted"),
        caption="Of the total time of all batches; intervals: bootstrap over batches. Fixed rows "
        f"are measured without padding; the last line, not run, pads them to {window:,} tokens.",
    )
    dynamic = sides[0]
    for side in sides[1:]:
        measured = ratio_of_totals(side.measured_s, dynamic.measured_s)
        predicted = ratio_of_totals(side.predicted_s, dynamic.predicted_s)
        speed.add_row(side.name, str(measured), f"{predicted.value:.3f}")
    padded_s = [padded_time_s(p, cost_model, window_tokens=window) for p in plans[FIXED]]
    padded = ratio_of_totals(padded_s, dynamic.predicted_s)
    speed.add_row(f"{FIXED}, padded rows", "-", f"{padded.value:.3f}")
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
        default=COST_PROFILE,
        metavar="COST_PROFILE",
        help="times of the device",
    )
    parser.add_argument(
        "--emulate-scale",
        type=float,
        metavar="X",
        help="seconds here for each second of the device; if not given, ranks / "
        f"{RANKS_AT_FULL_TIME}, because the tiny tensors of more ranks take longer",
    )
    parser.add_argument(
        "--iterations", type=positive, default=20, help="batches, each run once by every side"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    return parser


if __name__ == "__main__":
    sys.exit(main())
