"""The gain of a proposed pool over the best static strategy, predicted and measured.

`README.md` says how, and what it can and cannot show.

    python -m benchmarks.prediction_error --pool --num-ranks 4 --iterations 30
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.command import counted_progress, environment, torchrun, use_cpu, write_figures
from benchmarks.paired_statistics import RatioEstimate, difference_of_ratios, ratio_of_totals
from benchmarks.rank_set import RankSet
from benchmarks.workload import DATA_SEED
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.flags.arguments import Resolved, parse_arguments
from megatron.hydraulis.lengths.batches import sample_batches
from megatron.hydraulis.library.batches import RankShare, TokenSequence
from megatron.hydraulis.library.building import (
    build_engine,
    choose_core_attention,
    definition_of,
)
from megatron.hydraulis.library.planning import Planning, analytic_cost_model, read_cost_profile
from megatron.hydraulis.loop.drift import micro_batch_times_ms
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.profiler.command import training_defaults
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.spans import COMPUTE, HOST, MemoryRecorder
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.strategy.notation import parse_scheme
from megatron.hydraulis.terminal import figures_table, results_console

STATIC, POOL = SIDES = ("static", "pool")
SCHEMES = ("tp1", "tp2", "tp4")
"""That are profiled, and of which strategies are proposed."""
SEQ_LENGTH = 2048
RANK_BYTES = 95e6
"""Memory of a rank, by which the memory model limits micro-batches: tp4 alone holds the longest
sequences."""
# Most sequences are short, log-normal; one of a batch in two is longer than tp2 holds.
MEDIAN_TOKENS, SIGMA, MOST_SHORT_TOKENS = 90, 0.8, 448
LEAST_LONG_TOKENS, LONG_SHARE = 1200, 0.006
NUM_SEQUENCES = 20_000
NUM_SIZES = 5
"""Sizes of profiled micro-batches: the limit, its half, and so on."""
GOAL_POINTS = 3.0
"""Largest difference between predicted and measured gain, in points of a per cent."""
ITERATIONS_PER_CALL = 16
"""Iterations that ranks run without a pause."""
BATCH_SEED, PROPOSAL_SEED = 0, 1
"""Different, so that the pool is not proposed for the batches that measure it."""
MS_PER_S = 1e3
NS_PER_S = 1e9


@dataclass(frozen=True)
class RankTimes:
    """One rank's measurements of an iteration."""

    end_s: float
    """By a clock that all ranks share."""
    compute_s: float
    """Forward and backward without waits for other stages and for parameters."""
    regroup_wait_s: float
    optimizer_s: float


class TrainingRank:
    """One rank of the engine; callable with plans, which it runs as training does. Collective."""

    def __init__(self, resolved: Resolved) -> None:
        self._recorder = MemoryRecorder()
        self._recorder.tracks = frozenset({COMPUTE, HOST})
        core_attention = choose_core_attention(resolved, resolved.pool).name
        self._engine = build_engine(
            resolved,
            resolved.pool,
            definition_of(resolved, core_attention),
            AdamWSettings(lr=resolved.args.lr, clip_grad=resolved.args.clip_grad),
            spans=self._recorder,
        )
        for strategy in resolved.pool.strategies:
            self._engine.runtime_of(strategy.name)
        self._vocab_size = resolved.vocabulary.size
        self._forward_step = make_forward_step()

    def __call__(self, plans: Sequence[IterationPlan]) -> list[RankTimes]:
        batches = [self._micro_batches(plan) for plan in plans]
        followers = [*(plan.strategy for plan in plans[1:]), None]
        found = []
        for plan, mine, follower in zip(plans, batches, followers, strict=True):
            outcome = self._engine.train_step(
                plan.strategy, mine, self._forward_step, next_strategy=follower
            )
            end_s = time.perf_counter()
            assert outcome.updated
            spans = self._recorder.take()
            optimizer_ns = sum(s.end_ns - s.start_ns for s in spans if s.name == "optimizer")
            found.append(
                RankTimes(
                    end_s,
                    sum(micro_batch_times_ms(spans, len(mine))) / MS_PER_S,
                    outcome.gather_wait_s + outcome.scatter_wait_s,
                    optimizer_ns / NS_PER_S,
                )
            )
        self._engine.finish_regrouping()
        return found

    def _micro_batches(self, plan: IterationPlan) -> Sequence[PackedBatch]:
        """Random tokens, the same in every plan of a batch; nothing if this rank is idle."""
        rng = np.random.default_rng((DATA_SEED, plan.iteration))
        sequences = [
            TokenSequence(rng.integers(0, self._vocab_size, size=length + 1))
            for _, length in sorted(plan.lengths.items())
        ]
        engine = self._engine
        return RankShare.of(plan, engine.rank, engine.device, sequences.__getitem__).micro_batches


@dataclass(frozen=True)
class ReplicaTime:
    """Compute of a replica in an iteration."""

    scheme: str
    predicted_s: float
    """Sum of its micro-batches on one stage."""
    measured_s: float
    """On the rank with most."""


@dataclass(frozen=True)
class Iteration:
    """One iteration of one side."""

    strategy: str
    predicted_s: float
    predicted_overhead_s: float
    """Regrouping and optimizer, a part of it."""
    measured_s: float
    """From the end of the iteration before it."""
    replicas: tuple[ReplicaTime, ...]
    regroup_wait_s: float
    """Mean over ranks."""
    optimizer_s: float
    """Of the slowest rank."""

    @classmethod
    def of(
        cls,
        plan: IterationPlan,
        cost_model: CostModel,
        before: Sequence[RankTimes],
        times: Sequence[RankTimes],
    ) -> Iteration:
        """before, times: of all ranks, in the previous iteration and in this one."""
        return cls(
            strategy=plan.strategy,
            predicted_s=plan.predicted_time_s,
            predicted_overhead_s=plan.overhead_s,
            measured_s=max(t.end_s for t in times) - max(t.end_s for t in before),
            replicas=tuple(
                ReplicaTime(
                    str(replica.scheme),
                    sum(
                        cost_model.coefficients(replica.scheme).time_ms(micro_batch.lengths)
                        for micro_batch in replica.micro_batches
                    )
                    / MS_PER_S,
                    max(times[rank].compute_s for rank in replica.ranks),
                )
                for replica in plan.replicas
            ),
            regroup_wait_s=fmean(t.regroup_wait_s for t in times),
            optimizer_s=max(t.optimizer_s for t in times),
        )


@dataclass(frozen=True)
class PoolGain:
    """The gain of a pool over a static strategy."""

    pool: Pool
    static: str
    proposed: float
    """By ``propose``, on other batches."""
    limits_tokens: dict[str, int]
    """Of a micro-batch, by scheme."""
    iterations: dict[str, list[Iteration]]
    """By side; number i of both trains the same batch."""

    @property
    def predicted(self) -> RatioEstimate:
        """The static strategy's time of all batches over the pool's."""
        return ratio_of_totals(*self._times_s("predicted_s"))

    @property
    def measured(self) -> RatioEstimate:
        """The same of measured times."""
        return ratio_of_totals(*self._times_s("measured_s"))

    @property
    def gap(self) -> RatioEstimate:
        """Predicted - measured gain."""
        return difference_of_ratios(self._times_s("predicted_s"), self._times_s("measured_s"))

    def _times_s(self, times: str) -> tuple[list[float], list[float]]:
        static, pool = (
            [getattr(iteration, times) for iteration in self.iterations[side]] for side in SIDES
        )
        return static, pool


def run(folder: Path, model_flags: Sequence[str], arguments: argparse.Namespace) -> int:
    """Measure the gain in a folder and print it; returns the exit status."""
    gain = gain_of_pool(folder, model_flags, arguments)
    console = results_console()
    _print(console, gain)
    figures = environment() | {
        "pool": gain.pool.to_json(),
        "static": gain.static,
        "limits_tokens": gain.limits_tokens,
        "proposed": gain.proposed,
        **{name: asdict(getattr(gain, name)) for name in ("predicted", "measured", "gap")},
        "iterations": {side: list(map(asdict, found)) for side, found in gain.iterations.items()},
    }
    write_figures(console, arguments.json, figures)
    return 0


def sequence_lengths() -> list[int]:
    """Lengths of the corpus' sequences, in tokens."""
    rng = np.random.default_rng(DATA_SEED)
    short = rng.lognormal(np.log(MEDIAN_TOKENS), SIGMA, NUM_SEQUENCES)
    short = short.round().clip(2, MOST_SHORT_TOKENS).astype(int)
    long = rng.integers(LEAST_LONG_TOKENS, SEQ_LENGTH, NUM_SEQUENCES, endpoint=True)
    lengths: list[int] = np.where(rng.random(NUM_SEQUENCES) < LONG_SHARE, long, short).tolist()
    return lengths


def gain_of_pool(
    folder: Path, model_flags: Sequence[str], arguments: argparse.Namespace
) -> PoolGain:
    """Profile, propose, then train both sides in turn."""
    use_cpu()
    num_ranks, tokens = arguments.num_ranks, arguments.global_batch_tokens
    lengths_path, profile_path = folder / "lengths.json", folder / "profile.json"
    pool_path, both_path = folder / "pool.json", folder / "both.json"
    model_flags = [*model_flags, "--seq-length", str(SEQ_LENGTH)]
    flags = training_defaults(model_flags)
    lengths = sequence_lengths()
    lengths_path.write_text(json.dumps(lengths), encoding="utf-8")
    limits = _limits_of_memory([*flags, "--strategy", f"{num_ranks}*tp1"], num_ranks)
    profiles = []
    for name, limit in limits.items():
        path = folder / f"profile_{name}.json"
        torchrun(
            num_ranks,
            *("-m", "megatron.hydraulis", "profile", "--out", str(path), "--schemes", name),
            *("--max-tokens", str(limit), "--num-sizes", str(NUM_SIZES)),
            *("--lengths", str(lengths_path), "--", *model_flags),
        )
        profiles.append(ProfileCostModel.read(path))
    merged = replace(
        profiles[0],
        schemes=tuple(row for profile in profiles for row in profile.schemes),
        strategies=tuple(row for profile in profiles for row in profile.strategies),
    )
    profile_path.write_text(json.dumps(merged.to_json()), encoding="utf-8")
    command = [sys.executable, "-m", "megatron.hydraulis", "propose", "--json"]
    command += ["--lengths", str(lengths_path), "--cost-profile", str(profile_path)]
    command += ["--num-ranks", str(num_ranks), "--global-batch-tokens", str(tokens)]
    command += ["--schemes", "+".join(SCHEMES), "--seed", str(PROPOSAL_SEED)]
    command += ["--out", str(pool_path)]
    proposal = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    pool = Pool.read(pool_path)
    static = Strategy.parse(
        proposal["static"], num_ranks, ranks_per_node=pool.ranks_per_node, name=STATIC
    )
    both_path.write_text(json.dumps(Pool.of(*pool.strategies, static).to_json()), encoding="utf-8")
    resolved = _parsed(
        [*flags, "--strategy-pool", str(both_path), "--cost-profile", str(profile_path)], num_ranks
    )
    planning = Planning.of(resolved, device_constants("cpu"), read_cost_profile(resolved))
    batches = sample_batches(
        lengths,
        sizes=BatchSizes.constant(num_tokens=tokens),
        num_batches=arguments.iterations,
        seed=BATCH_SEED,
    )
    plans = {}
    for side, strategies in ((STATIC, Pool.of(static)), (POOL, pool)):
        planner = CertifiedPlanner(strategies, planning.cost_model, planning.limits)
        plans[side] = [planner.plan(batch, iteration=i) for i, batch in enumerate(batches)]
    return PoolGain(
        pool=pool,
        static=proposal["static"],
        proposed=proposal["static_s"] / proposal["mean_s"],
        limits_tokens=limits,
        iterations=_train(resolved, plans, planning.cost_model),
    )


def _limits_of_memory(flags: Sequence[str], num_ranks: int) -> dict[str, int]:
    """Tokens of a micro-batch by scheme, on ranks of RANK_BYTES."""
    device = replace(device_constants("cpu"), memory_bytes=RANK_BYTES, reserve_bytes=0.0)
    model = replace(analytic_cost_model(_parsed(flags, num_ranks), device), pool=None)
    return {name: model.max_tokens(parse_scheme(name, label="scheme")) for name in SCHEMES}


def _parsed(flags: Sequence[str], num_ranks: int) -> Resolved:
    return parse_arguments(flags, num_ranks=num_ranks, rank=0, needs_data=False)


def _train(
    resolved: Resolved, plans: dict[str, list[IterationPlan]], cost_model: CostModel
) -> dict[str, list[Iteration]]:
    """All iterations of both sides, each side first in every other pair."""
    turns = [
        (side, index)
        for index in range(len(plans[POOL]))
        for side in (SIDES if index % 2 == 0 else reversed(SIDES))
    ]
    found: dict[str, list[Iteration]] = {side: [] for side in SIDES}
    used = {plan.strategy: plan for side in SIDES for plan in plans[side]}
    with counted_progress("iterations") as progress:
        task = progress.add_task("training", total=len(turns))
        with RankSet("pool gain", resolved.pool.num_ranks, lambda: TrainingRank(resolved)) as ranks:
            ranks.call([*used.values()])
            for start in range(0, len(turns), ITERATIONS_PER_CALL):
                block = turns[start : start + ITERATIONS_PER_CALL]
                of_block = [plans[side][index] for side, index in block]
                # After a pause the first iteration is not counted.
                times = list(zip(*ranks.call([of_block[0], *of_block]), strict=True))
                for (side, index), before, after in zip(block, times[:-1], times[1:], strict=True):
                    plan = plans[side][index]
                    found[side].append(Iteration.of(plan, cost_model, before, after))
                progress.advance(task, len(block))
    return found


def _print(console: Console, gain: PoolGain) -> None:
    limits = ", ".join(f"{name} {tokens:,}" for name, tokens in gain.limits_tokens.items())
    members = ", ".join(f"{s.name} {s}" for s in gain.pool.strategies)
    console.print(f"Pool: {members}; static: {gain.static}. Tokens of a micro-batch: {limits}.")
    for table in (_times_table(gain), _replicas_table(gain)):
        console.print(table)
    console.print(
        f"gain of the pool on {gain.gap.num_pairs} batches [95 %]: predicted {gain.predicted}, "
        f"measured {gain.measured}; predicted - measured {100 * gain.gap.value:+.1f} points "
        f"[{100 * gain.gap.low:+.1f}, {100 * gain.gap.high:+.1f}] (goal: at most "
        f"{GOAL_POINTS:g}); predicted by propose, on other batches: {gain.proposed:.3f}"
    )


def _times_table(gain: PoolGain) -> Table:
    columns = (
        "batches",
        "predicted",
        "overhead",
        "measured",
        "waits",
        "optimizer",
        "meas. / pred.",
    )
    table = figures_table(
        "An iteration, mean, ms",
        ("side", "strategy"),
        columns,
        caption="Overhead: of the predicted time. Waits for regrouping: mean over ranks. "
        "Optimizer: slowest rank.",
    )
    for side in SIDES:
        found = gain.iterations[side]
        for name in sorted({iteration.strategy for iteration in found}):
            of_name = [iteration for iteration in found if iteration.strategy == name]
            times = [i.measured_s for i in of_name], [i.predicted_s for i in of_name]
            table.add_row(
                side,
                name,
                str(len(of_name)),
                *(
                    f"{MS_PER_S * fmean(getattr(iteration, time) for iteration in of_name):.0f}"
                    for time in (
                        *("predicted_s", "predicted_overhead_s", "measured_s"),
                        *("regroup_wait_s", "optimizer_s"),
                    )
                ),
                f"{ratio_of_totals(*times).value:.3f}",
            )
    return table


def _replicas_table(gain: PoolGain) -> Table:
    table = figures_table(
        "Compute of a replica in an iteration, median, ms",
        ("side", "strategy", "scheme"),
        ("replicas", "predicted", "measured", "meas. / pred."),
    )
    groups: dict[tuple[str, str, str], list[ReplicaTime]] = {}
    for side in SIDES:
        for iteration in gain.iterations[side]:
            for replica in iteration.replicas:
                if replica.predicted_s:
                    key = (side, iteration.strategy, replica.scheme)
                    groups.setdefault(key, []).append(replica)
    for key, replicas in groups.items():
        table.add_row(
            *key,
            str(len(replicas)),
            f"{MS_PER_S * median(r.predicted_s for r in replicas):.0f}",
            f"{MS_PER_S * median(r.measured_s for r in replicas):.0f}",
            f"{median(r.measured_s / r.predicted_s for r in replicas):.3f}",
        )
    return table
