"""Waves: how evenly they load the ranks, and what they gain in FlexSP's setting.

    python -m benchmarks.context_balance [--seeds 8] [--json FILE]

**Balance.** Lengths are log-normal with σ 1.5 and a mean of an eighth of the limit, clipped to it;
a sequence costs l² + 12·h·l with h = 4096. Our reading of the rest: a rank holds so many tokens at
a time, padding to 2·cp included, so a sequence of l tokens needs l / tokens ranks, rounded up to a
power of two; a group shares its sequences evenly; the makespan is the sum over waves of the slowest
rank. *Ideal* is all work over all ranks. Nothing here charges for communication, so that one group
of all ranks would be ideal: groups are therefore held to what their longest sequence needs, or to
twice that, as Megatron widens groups to fill empty ranks. Both are told. Beside them Megatron's own
scheduler (BalancedCPScheduler), given the same cost; it runs the sequences of a rank one by one, so
that it need not fit several into one row.

**FlexSP's setting.** 7B on 64 ranks, at most 192K tokens, time and memory by the published
constants, the eight frozen batches (README.md). *Groups of 64*: as few micro-batches as memory
allows. *Equal groups*: groups of one width in step, the best width for each batch, packed by best
fit into as few rows as that finds; dealt longest first to as many rows as have to be, by tokens;
and searched as waves are. Waves: the certified planner's plan for ``cp64~``, with its bound. Times
are CPU time on one core.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks.command import (
    counted_progress,
    figures_table,
    import_on_cpu,
    make_parser,
    positive,
    wide_console,
    write_figures,
)
from benchmarks.planner_batches import DATA
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme
from megatron.hydraulis.planner.costs import GroupCost, SchemeCost, WaveCosts
from megatron.hydraulis.planner.greedy import best_fit
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.wave_bounds import simple_bound_ms
from megatron.hydraulis.planner.wave_packing import pack_waves
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

HIDDEN_SIZE = 4096
LINEAR_COST = 12 * HIDDEN_SIZE
"""Of a token, in units of attention's cost of a token pair."""
SIGMA = 1.5
MEAN_SHARE = 8
WIDENINGS = (0, 1)
"""Doublings of a group's size beyond what its longest sequence needs."""

# FlexSP's setting
NUM_RANKS = 64
RANKS_PER_NODE = 8
USABLE_MB = 30 * 1024
MB_PER_GB = 1024
STATE_BYTES = 16
ACTIVATION_BYTES = 2
NUM_ALL_TO_ALLS = 8
"""Of a layer's hidden states, forward and backward: 4·2 in the published formula."""
BYTES_PER_MB = 2**20


@dataclass(frozen=True)
class Setting:
    """Ranks and batch of one measurement."""

    num_ranks: int
    limit: int
    rank_tokens: int
    num_sequences: int
    megatron: float
    """Makespan over ideal of the best of Megatron's schedulers, as given."""
    goal: float

    @property
    def name(self) -> str:
        """Ranks, limit, tokens per rank, sequences."""
        thousands = f"{self.limit // 1024}k/{self.rank_tokens // 1024}k"
        return f"{self.num_ranks}/{thousands}/{self.num_sequences}"

    def lengths(self, seed: int) -> list[int]:
        """A batch."""
        generator = np.random.default_rng(seed)
        mean = self.limit / MEAN_SHARE
        drawn = generator.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, self.num_sequences)
        return [int(length) for length in np.clip(drawn, 1, self.limit)]

    def waves(self, most_doublings: int) -> WaveCosts:
        """What groups cost and hold."""
        groups = []
        size = 1
        while size <= self.num_ranks:
            times = Coefficients(1.0 / size, LINEAR_COST / size, 0.0)
            groups.append(GroupCost(size, times, self.rank_tokens * size))
            size *= 2
        return WaveCosts(tuple(groups), most_doublings=most_doublings)


SETTINGS = (
    Setting(8, 8 * 1024, 2 * 1024, 64, megatron=1.060, goal=1.04),
    Setting(32, 32 * 1024, 4 * 1024, 256, megatron=1.056, goal=1.02),
    Setting(64, 128 * 1024, 8 * 1024, 512, megatron=1.042, goal=1.02),
)


def work(length: int) -> int:
    """Cost of a sequence."""
    return length * length + LINEAR_COST * length


@dataclass(frozen=True)
class Balance:
    """Of one batch."""

    makespan: float
    """Over ideal."""
    bound: float
    """Over ideal: no waves are below."""
    num_waves: int
    cpu_s: float


def balance(setting: Setting, seed: int, most_doublings: int) -> Balance:
    """Waves of a batch, without a solver."""
    lengths = setting.lengths(seed)
    waves = setting.waves(most_doublings)
    cost = SchemeCost(waves.mean_coefficients, waves.most_tokens, 1, waves=waves)
    begin_s = time.process_time()
    packing = pack_waves(range(len(lengths)), lengths, cost)
    cpu_s = time.process_time() - begin_s
    ideal = sum(map(work, lengths)) / setting.num_ranks
    bound = simple_bound_ms(waves, lengths) / ideal
    return Balance(packing.time_ms / ideal, bound, len(packing.micro_batches), cpu_s)


def megatron_balance(setting: Setting, seed: int) -> float:
    """Makespan over ideal of Megatron's scheduler on the same batch."""
    # Needs torch, so that it comes after import_on_cpu.
    from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler

    class Ranks:
        """All that the scheduler asks of a process group."""

        def size(self) -> int:
            return setting.num_ranks

    class Scheduler(BalancedCPScheduler):  # type: ignore[misc]
        """With the cost of this benchmark."""

        def get_total_workload(self, seq_length: int, cp_size: int | None = None) -> float:
            return work(seq_length) / (cp_size or self.gpus_needed(seq_length))

    lengths = setting.lengths(seed)
    scheduler = Scheduler(setting.rank_tokens, Ranks())
    _, by_wave = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    makespan = 0.0
    for by_rank in by_wave:
        num_ranks_of: dict[int, int] = {}
        for members in by_rank:
            for sequence in members:
                num_ranks_of[sequence] = num_ranks_of.get(sequence, 0) + 1
        makespan += max(
            sum(work(lengths[sequence]) / num_ranks_of[sequence] for sequence in members)
            for members in by_rank
        )
    return makespan / (sum(map(work, lengths)) / setting.num_ranks)


def cost_profile(reference: Mapping[str, Any], model: str) -> ProfileCostModel:
    """The published time and memory model as a cost profile; a group of d ranks is a scheme cp d.

    ``(a1·Σs² + a2·Σs) / d + b1 + all-to-all`` ms; a rank has room for what 30 GB leave beside
    ZeRO-3's states.
    """
    constants = reference["models"][model]
    states_mb = constants["P_192K"] * STATE_BYTES * MB_PER_GB / NUM_RANKS
    tokens_per_rank = (USABLE_MB - states_mb) / constants["act_MB_per_token"]
    mb_per_token = (
        NUM_ALL_TO_ALLS
        * constants["layers"]
        * constants["hidden"]
        * ACTIVATION_BYTES
        / BYTES_PER_MB
    )
    rows = []
    for width in (2**power for power in range(int(math.log2(NUM_RANKS)) + 1)):
        exchange_ms = 0.0
        if width > 1:
            exchange_ms = mb_per_token / width / reference["alltoall_MB_per_ms"][str(width)]
        rows.append(
            ProfiledScheme(
                scheme=Scheme(cp=width),
                coefficients=Coefficients(
                    constants["a1"] / width, constants["a2"] / width + exchange_ms, constants["b1"]
                ),
                max_tokens=int(tokens_per_rank * width),
            )
        )
    return ProfileCostModel(
        device="A100-40GB", source=reference["source"], date="2024", schemes=tuple(rows)
    )


@dataclass(frozen=True)
class FlexspBatch:
    """Times of one batch, s."""

    static_s: float
    best_fit_s: float
    longest_first_s: float
    searched_s: float
    waves_s: float
    bound_s: float
    cpu_s: float


def run_flexsp(profile: ProfileCostModel, lengths: Sequence[int]) -> FlexspBatch:
    """One batch by all methods."""
    strategy = Strategy.parse(f"cp{NUM_RANKS}~", NUM_RANKS, ranks_per_node=RANKS_PER_NODE)
    planner = CertifiedPlanner(Pool.of(strategy), profile)
    begin_s = time.process_time()
    plan = planner.plan(lengths)
    cpu_s = time.process_time() - begin_s
    assert plan.dispatch is not None  # the planner always reports
    groups = tuple(
        GroupCost(size, profile.coefficients(Scheme(cp=size)), profile.max_tokens(Scheme(cp=size)))
        for size in (2**power for power in range(NUM_RANKS.bit_length()))
    )
    equal = [group for group in groups if group.max_tokens >= max(lengths)]
    return FlexspBatch(
        static_s=in_step_s(groups[-1], lengths, rows_by_best_fit),
        best_fit_s=min(in_step_s(group, lengths, rows_by_best_fit) for group in equal),
        longest_first_s=min(in_step_s(group, lengths, rows_longest_first) for group in equal),
        searched_s=min(_searched_s(groups, group.size, lengths) for group in equal),
        waves_s=plan.predicted_time_s,
        bound_s=plan.dispatch.bound_s,
        cpu_s=cpu_s,
    )


def in_step_s(
    group: GroupCost,
    lengths: Sequence[int],
    rows_of: Callable[[GroupCost, Sequence[int]], list[list[int]]],
) -> float:
    """Groups of one width, each with a row at a time, the longest rows together."""
    falling = sorted(map(group.time_ms, rows_of(group, lengths)), reverse=True)
    return math.fsum(falling[:: NUM_RANKS // group.size]) / 1e3


def rows_by_best_fit(group: GroupCost, lengths: Sequence[int]) -> list[list[int]]:
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    packed = best_fit(order, lengths, group.max_tokens)
    return [[lengths[i] for i in row] for row in packed]


def rows_longest_first(group: GroupCost, lengths: Sequence[int]) -> list[list[int]]:
    """As many rows as fill whole steps and hold everything, dealt by tokens."""
    num_groups = NUM_RANKS // group.size
    num_steps = -(-sum(lengths) // (num_groups * group.max_tokens))
    while True:
        rows: list[tuple[int, int, list[int]]] = [(0, i, []) for i in range(num_steps * num_groups)]
        for length in sorted(lengths, reverse=True):
            tokens, place, members = rows[0]
            heapq.heapreplace(rows, (tokens + length, place, [*members, length]))
        if max(tokens for tokens, _, _ in rows) <= group.max_tokens:
            return [members for _, _, members in rows]
        num_steps += 1


def _searched_s(groups: tuple[GroupCost, ...], size: int, lengths: Sequence[int]) -> float:
    waves = WaveCosts(tuple(g if g.size == size else replace(g, max_tokens=0) for g in groups))
    cost = SchemeCost(waves.mean_coefficients, waves.most_tokens, 1, waves=waves)
    return pack_waves(range(len(lengths)), lengths, cost).time_ms / 1e3


def balance_table(
    found: dict[tuple[Setting, int], list[Balance]], megatron: dict[Setting, list[float]]
) -> Table:
    """Makespan over ideal, median and worst over the seeds."""
    table = figures_table(
        "Makespan over ideal: median, worst",
        ("ranks/limit/rank/sequences",),
        ("needed width", "up to twice", "Megatron's, here", "best of 3, given", "goal", "CPU s"),
        "\n".join([*(verdict(found, each) for each in WIDENINGS), "CPU s: the most of a batch."]),
    )
    for setting in SETTINGS:
        of = [found[setting, doublings] for doublings in WIDENINGS]
        table.add_row(
            setting.name,
            *(_median_and_worst([one.makespan for one in by_seed]) for by_seed in of),
            _median_and_worst(megatron[setting]),
            f"{setting.megatron:.3f}",
            f"{setting.goal:.2f}",
            f"{max(one.cpu_s for by_seed in of for one in by_seed):.2f}",
        )
    return table


def verdict(found: dict[tuple[Setting, int], list[Balance]], doublings: int) -> str:
    """Which goals the medians reach with groups as wide as needed, or up to twice as wide."""
    words = []
    for setting in SETTINGS:
        median = float(np.median([one.makespan for one in found[setting, doublings]]))
        misses = "reaches" if median <= setting.goal else "misses"
        words.append(f"{setting.num_ranks} ranks {median:.3f} {misses} {setting.goal:.2f}")
    width = "No wider than needed" if doublings == 0 else "Up to twice as wide"
    return f"{width}: {', '.join(words)}."


def flexsp_table(batches: Sequence[FlexspBatch]) -> Table:
    """Seconds by batch, and what waves take of the others."""
    names = ("groups of 64", "equal, best fit", "equal, dealt", "equal, searched", "waves", "bound")
    table = figures_table(
        "FlexSP's setting, s",
        ("batch",),
        (*names, "gap %", "CPU s"),
        "CPU s of the sum: the most of a batch.",
    )
    rows = [
        (b.static_s, b.best_fit_s, b.longest_first_s, b.searched_s, b.waves_s, b.bound_s)
        for b in batches
    ]
    for index, (row, batch) in enumerate(zip(rows, batches, strict=True)):
        gap = f"{100 * (1 - batch.bound_s / batch.waves_s):.1f}"
        table.add_row(str(index), *(f"{value:.3f}" for value in row), gap, f"{batch.cpu_s:.2f}")
    sums = [math.fsum(column) for column in zip(*rows, strict=True)]
    table.add_section()
    gap = f"{100 * (1 - sums[5] / sums[4]):.1f}"
    worst = f"{max(batch.cpu_s for batch in batches):.2f}"
    table.add_row("sum", *(f"{value:.2f}" for value in sums), gap, worst)
    shares = (f"{sums[4] / value:.3f}" for value in sums[:4])
    table.add_row("waves over it", *shares, "", f"{sums[4] / sums[5]:.3f}", "", "")
    return table


def _median_and_worst(values: Sequence[float]) -> str:
    return f"{float(np.median(values)):.4f}, {max(values):.4f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure both and print the tables."""
    options = _parser().parse_args(arguments)
    console = wide_console(120)
    import_on_cpu(console)
    reference = json.loads((DATA / "flexsp_reference.json").read_text("utf-8"))
    frozen = json.loads((DATA / "flexsp_batches.json").read_text("utf-8"))["batches"]
    profile = cost_profile(reference, "gpt-7b")
    seeds = range(options.seeds)
    # The solver's start is not a batch's.
    run_flexsp(profile, frozen[0][:20])
    with counted_progress(console) as progress:
        found = {
            (setting, doublings): [balance(setting, seed, doublings) for seed in seeds]
            for setting in progress.track(SETTINGS)
            for doublings in WIDENINGS
        }
        megatron = {
            setting: [megatron_balance(setting, seed) for seed in seeds]
            for setting in progress.track(SETTINGS)
        }
        run = functools.partial(run_flexsp, profile)
        batches = [run(batch) for batch in progress.track(frozen[: options.batches])]
    console.print(balance_table(found, megatron))
    console.print(flexsp_table(batches))
    figures = {
        "balance": [
            {
                "setting": setting.name,
                "doublings": doublings,
                "makespan": [one.makespan for one in by_seed],
                "bound": [one.bound for one in by_seed],
                "megatron": megatron[setting],
                "cpu_s": [one.cpu_s for one in by_seed],
            }
            for (setting, doublings), by_seed in found.items()
        ],
        "flexsp": [batch.__dict__ for batch in batches],
    }
    write_figures(console, options.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "context_balance",
        "How evenly waves load the ranks, and what they gain in FlexSP's setting.",
    )
    parser.add_argument("--seeds", type=positive, default=8, help="batches of each setting")
    parser.add_argument("--batches", type=positive, default=8, help="of FlexSP's, at most 8")
    return parser


if __name__ == "__main__":
    sys.exit(main())
