"""Quality and CPU time of a proposed pool, against the published strategies S0 to S6.

    python -m benchmarks.propose

The pool is proposed from batches of one seed; both pools then plan batches of other seeds. All
batches are drawn from Wikipedia lengths. One core.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from benchmarks import inputs
from benchmarks.command import make_parser, write_figures
from benchmarks.paired_statistics import ratio_of_totals
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.proposal.batches import draw_batches
from megatron.hydraulis.proposal.candidates import Candidates
from megatron.hydraulis.proposal.propose import Proposal, propose
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.terminal import figures_table, results_console

SECTIONS = ("small", "large")
RANKS_PER_NODE = 8
SMALL_NUM_RANKS = 64
HELD_OUT_SEED = 10_000
"""Of the first held-out batch; batches to propose from are drawn with --seed by another sampler."""


def proposed(
    num_ranks: int, num_tokens: int, options: argparse.Namespace
) -> tuple[Proposal, float]:
    """A proposal, and the CPU time that it took, s."""
    counts = read_length_counts(inputs.WIKIPEDIA).cut(inputs.CONTEXT_TOKENS, "truncate")
    batches = draw_batches(
        counts, BatchSizes.constant(num_tokens=num_tokens), options.proposal_batches, options.seed
    )
    model = inputs.cost_model()
    candidates = Candidates.of(model, num_ranks, RANKS_PER_NODE, batches=batches)
    begin_s = time.process_time()
    proposal = propose(
        candidates, model, batches, max_strategies=options.max_strategies, longest=counts.longest
    )
    return proposal, time.process_time() - begin_s


def plan_times_s(pool: Pool, num_tokens: int, num_batches: int) -> list[float]:
    """Predicted times of the plans of held-out batches."""
    lengths = inputs.LengthDistribution()
    planner = CertifiedPlanner(pool, inputs.cost_model())
    seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + num_batches)
    return [planner.plan(lengths.batch(seed, num_tokens)).predicted_time_s for seed in seeds]


def quality_table(times_s: dict[str, list[float]], num_tokens: int, title: str) -> Table:
    """Every pool against the first one."""
    first = next(iter(times_s.values()))
    table = figures_table(
        title,
        ("pool",),
        ("s an iteration", "tokens/s", "time / first [95 %]", "worst", "faster in"),
        caption=f"{len(first)} held-out batches, times of full plans. Ratio of total times, "
        f"bootstrap interval; worst: of a single batch.",
    )
    for name, of_pool in times_s.items():
        ratios = [mine / theirs for mine, theirs in zip(of_pool, first, strict=True)]
        table.add_row(
            name,
            f"{fmean(of_pool):.4f}",
            f"{num_tokens / fmean(of_pool):,.0f}",
            str(ratio_of_totals(of_pool, first)),
            f"{max(ratios):.4f}",
            f"{fmean(ratio < 1.0 for ratio in ratios):.0%}",
        )
    return table


def large_baseline() -> Pool:
    """S0 to S6 with sixteen times the replicas, and the strategy of the planner's benchmark."""
    num_times = inputs.LARGE_NUM_RANKS // SMALL_NUM_RANKS
    strategies = [
        Strategy.parse(
            "+".join([str(strategy)] * num_times),
            inputs.LARGE_NUM_RANKS,
            name=strategy.name,
            ranks_per_node=RANKS_PER_NODE,
        )
        for strategy in inputs.pool().strategies
    ]
    return Pool.of(*strategies, *inputs.large_pool().strategies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections."""
    options = _parser().parse_args(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    console = results_console()
    efforts = figures_table(
        "Proposals",
        ("job",),
        ("wall s", "CPU s", "strategies", "estimated", "bounds", "plans", "s an iteration"),
    )
    figures: dict[str, Any] = {}
    for section in options.sections:
        if section == "small":
            num_ranks, num_tokens = SMALL_NUM_RANKS, inputs.BATCH_TOKENS
            name, baseline, num_held_out = "S0–S6", inputs.pool(), options.batches
        else:
            num_ranks, num_tokens = inputs.LARGE_NUM_RANKS, inputs.LARGE_BATCH_TOKENS
            name, baseline = "S0–S6, 16 times", large_baseline()
            num_held_out = options.large_batches
        proposal, cpu_s = proposed(num_ranks, num_tokens, options)
        efforts.add_row(
            f"{num_ranks} ranks, {num_tokens:,} tokens",
            f"{proposal.seconds:.1f}",
            f"{cpu_s:.1f}",
            str(len(proposal.members)),
            str(proposal.num_mixes),
            str(proposal.num_bounds),
            str(proposal.num_plans),
            f"{proposal.mean_s:.4f}",
        )
        times_s = {
            name: plan_times_s(baseline, num_tokens, num_held_out),
            "proposed": plan_times_s(proposal.pool, num_tokens, num_held_out),
        }
        console.print(quality_table(times_s, num_tokens, f"{num_ranks} ranks"))
        for member in proposal.members:
            console.print(f"  {member.name} = {member.replicas}", highlight=False)
        figures[section] = {"proposal": proposal.to_json(), "cpu_s": cpu_s, "times_s": times_s}
    console.print(efforts)
    write_figures(console, options.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("propose", "Quality and time of proposed pools on one core.")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to measure"
    )
    parser.add_argument("--batches", type=int, default=40, help="held-out batches, 64 ranks")
    parser.add_argument(
        "--large-batches", type=int, default=4, help="held-out batches, 1,024 ranks"
    )
    parser.add_argument("--proposal-batches", type=int, default=32, help="to propose from")
    parser.add_argument("--max-strategies", type=int, default=7, help="of the proposed pool")
    parser.add_argument("--seed", type=int, default=1, help="of the batches to propose from")
    return parser


if __name__ == "__main__":
    sys.exit(main())
