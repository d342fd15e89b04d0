"""What waves gain in FlexSP's setting: 7B on 64 ranks, at most 192K tokens.

    python -m benchmarks.context_balance [--batches 8] [--json FILE]

Time and memory follow the published constants, on the eight frozen batches (README.md). *Groups of
64*: as few micro-batches as memory allows. *Equal groups*: groups of one width in step, the best
width for each batch, packed by best fit into as few rows as that finds; dealt longest first to as
many rows as are needed, by tokens; and searched as waves are. *Megatron's*: its scheduler for
groups of several widths (BalancedCPScheduler), which gets the same times. It runs the sequences of
a rank one by one, so that several need not fit into one row; in its favour, only one of them in a
wave pays a row's constant time. Waves: the certified planner's plan for ``cp64~``, with its bound.
CPU times are of one core.
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
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from benchmarks.command import (
    counted_progress,
    make_parser,
    positive,
    write_figures,
)
from benchmarks.inputs import DATA
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme
from megatron.hydraulis.planner.costs import GroupCost, SchemeCost, WaveCosts
from megatron.hydraulis.planner.greedy import best_fit
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.wave_packing import pack_waves
from megatron.hydraulis.simulator.schedulers import context_waves
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.terminal import figures_table, results_console

NUM_RANKS = 64
RANKS_PER_NODE = 8
USABLE_MB = 30 * 1024
MB_PER_GB = 1024
STATE_BYTES = 16
ACTIVATION_BYTES = 2
NUM_ALL_TO_ALLS = 8
"""Of a layer's hidden states, forward and backward: 4·2 in the published formula."""
BYTES_PER_MB = 2**20


def cost_profile(reference: Mapping[str, Any], model: str) -> ProfileCostModel:
    """The published time and memory model as a cost profile; a group of d ranks is a scheme cp d.

    ``(a1·Σs² + a2·Σs) / d + b1 + all-to-all`` ms; a rank has room for what 30 GB leave after
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
    megatron_s: float
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
        megatron_s=megatron_s(groups, lengths),
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


def megatron_s(groups: Sequence[GroupCost], lengths: Sequence[int]) -> float:
    """The waves of Megatron's scheduler."""
    by_size = {group.size: group for group in groups}

    def work_ms(length: int, size: int) -> float:
        return by_size[size].time_ms([length]) - by_size[size].coefficients.c_ms

    total_ms = 0.0
    for wave in context_waves(lengths, by_size[1].max_tokens, NUM_RANKS, work_ms):
        total_ms += by_size[1].coefficients.c_ms + max(
            math.fsum(work_ms(lengths[index], size) for index in indices) for size, indices in wave
        )
    return total_ms / 1e3


def flexsp_table(batches: Sequence[FlexspBatch]) -> Table:
    """Seconds by batch, and what waves take of the others."""
    of_batch = {
        "groups of 64": "static_s",
        "equal, best fit": "best_fit_s",
        "equal, dealt": "longest_first_s",
        "equal, searched": "searched_s",
        "Megatron's": "megatron_s",
        "waves": "waves_s",
        "bound": "bound_s",
    }
    table = figures_table(
        "FlexSP's setting, s",
        ("batch",),
        (*of_batch, "gap %", "CPU s"),
        caption="CPU s of the sum: the most of a batch.",
    )
    rows = [[getattr(batch, field) for field in of_batch.values()] for batch in batches]
    for index, (row, batch) in enumerate(zip(rows, batches, strict=True)):
        gap = f"{100 * (1 - batch.bound_s / batch.waves_s):.1f}"
        table.add_row(str(index), *(f"{value:.3f}" for value in row), gap, f"{batch.cpu_s:.2f}")
    sums = [math.fsum(column) for column in zip(*rows, strict=True)]
    table.add_section()
    gap = f"{100 * (1 - sums[6] / sums[5]):.1f}"
    worst = f"{max(batch.cpu_s for batch in batches):.2f}"
    table.add_row("sum", *(f"{value:.2f}" for value in sums), gap, worst)
    shares = (f"{sums[5] / value:.3f}" for value in sums[:5])
    table.add_row("waves over it", *shares, "", f"{sums[5] / sums[6]:.3f}", "", "")
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan the batches and print the table."""
    options = _parser().parse_args(arguments)
    console = results_console(120)
    reference = json.loads((DATA / "flexsp_reference.json").read_text("utf-8"))
    frozen = json.loads((DATA / "flexsp_batches.json").read_text("utf-8"))["batches"]
    profile = cost_profile(reference, "gpt-7b")
    # The solver's start is not a batch's.
    run_flexsp(profile, frozen[0][:20])
    with counted_progress(console) as progress:
        run = functools.partial(run_flexsp, profile)
        batches = [run(batch) for batch in progress.track(frozen[: options.batches])]
    console.print(flexsp_table(batches))
    write_figures(console, options.json, {"flexsp": [asdict(batch) for batch in batches]})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("context_balance", "What waves gain in FlexSP's setting.")
    parser.add_argument("--batches", type=positive, default=8, help="of FlexSP's, at most 8")
    return parser


if __name__ == "__main__":
    sys.exit(main())
