"""What ``propose`` finds, how long it takes, and what its pool is worth beside S0 to S6.

    python -m benchmarks.propose

The pool is proposed from batches of one seed and judged by full plans on batches of other seeds,
drawn from the Wikipedia lengths as the planner's benchmark draws them. One core.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from benchmarks import planner_batches as batches_of
from benchmarks.command import figures_table, make_parser, wide_console, write_figures
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.proposal.batches import BatchSize, draw_batches
from megatron.hydraulis.proposal.candidates import Candidates
from megatron.hydraulis.proposal.propose import Proposal, propose
from megatron.hydraulis.strategy import Pool, Strategy

SECTIONS = ("small", "large")
RANKS_PER_NODE = 8
SMALL_NUM_RANKS = 64
HELD_OUT_SEED = 10_000
"""Of the first held-out batch; batches to propose from have the seed of --seed, by another law."""
_RESAMPLES = 2000

FloatArray = npt.NDArray[np.float64]


def proposed(
    num_ranks: int, num_tokens: int, options: argparse.Namespace
) -> tuple[Proposal, float]:
    """A proposal, and the CPU time that it took, s."""
    lengths = read_length_counts(batches_of.DATA / "wikipedia_lengths.csv")
    counts = lengths.cut(batches_of.CONTEXT_TOKENS, "truncate")
    batches = draw_batches(
        counts, BatchSize(num_tokens=num_tokens), options.proposal_batches, options.seed
    )
    model = batches_of.cost_model()
    candidates = Candidates.of(model, num_ranks, RANKS_PER_NODE)
    begin_s = time.process_time()
    proposal = propose(
        candidates, model, batches, max_strategies=options.max_strategies, longest=counts.longest
    )
    return proposal, time.process_time() - begin_s


def plan_times_s(pool: Pool, num_tokens: int, num_batches: int) -> FloatArray:
    """Predicted times of the plans of held-out batches, shape (num_batches,)."""
    lengths = batches_of.LengthDistribution()
    planner = CertifiedPlanner(pool, batches_of.cost_model())
    seeds = range(HELD_OUT_SEED, HELD_OUT_SEED + num_batches)
    times = [planner.plan(lengths.batch(seed, num_tokens)).predicted_time_s for seed in seeds]
    return np.array(times)


def interval(ratios: FloatArray) -> tuple[float, float]:
    """95 % bootstrap interval of the mean of paired ratios, from a fixed seed."""
    generator = np.random.default_rng(0)
    means = generator.choice(ratios, (_RESAMPLES, len(ratios))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def quality_table(times_s: dict[str, FloatArray], num_tokens: int, title: str) -> Table:
    """Every pool against the first one, batch by batch."""
    num_batches = len(next(iter(times_s.values())))
    table = figures_table(
        title,
        ("pool",),
        ("s an iteration", "tokens/s", "time / first", "[95 %]", "worst", "faster in"),
        f"{num_batches} held-out batches, times of full plans. Interval: mean ratio.",
    )
    first = next(iter(times_s.values()))
    for name, of_pool in times_s.items():
        ratios = of_pool / first
        low, high = interval(ratios)
        table.add_row(
            name,
            f"{of_pool.mean():.4f}",
            f"{num_tokens / of_pool.mean():,.0f}",
            f"{of_pool.mean() / first.mean():.4f}",
            f"\\[{low:.4f}, {high:.4f}]",
            f"{ratios.max():.4f}",
            f"{100 * (of_pool < first).mean():.0f} %",
        )
    return table


def effort_table(rows: Sequence[tuple[str, Proposal, float]]) -> Table:
    """What proposals cost."""
    table = figures_table(
        "Proposals",
        ("job",),
        ("wall s", "CPU s", "strategies", "estimated", "bounds", "plans", "s an iteration"),
    )
    for name, proposal, cpu_s in rows:
        table.add_row(
            name,
            f"{proposal.seconds:.1f}",
            f"{cpu_s:.1f}",
            str(len(proposal.members)),
            str(proposal.num_mixes),
            str(proposal.num_bounds),
            str(proposal.num_plans),
            f"{proposal.mean_s:.4f}",
        )
    return table


def large_baseline() -> Pool:
    """S0 to S6 sixteen times over, and the strategy of the planner's benchmark."""
    small = batches_of.pool()
    num_times = batches_of.LARGE_NUM_RANKS // SMALL_NUM_RANKS
    strategies = []
    for strategy in small.strategies:
        text = "+".join([str(strategy)] * num_times)
        strategies.append(
            Strategy.parse(
                text,
                batches_of.LARGE_NUM_RANKS,
                name=strategy.name,
                ranks_per_node=RANKS_PER_NODE,
            )
        )
    return Pool.of(*strategies, *batches_of.large_pool().strategies)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections asked for."""
    options = _parser().parse_args(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    console = wide_console()
    efforts: list[tuple[str, Proposal, float]] = []
    figures: dict[str, Any] = {}
    for section in options.sections:
        if section == "small":
            num_ranks, num_tokens = SMALL_NUM_RANKS, batches_of.BATCH_TOKENS
            baseline, num_held_out = batches_of.pool(), options.batches
        else:
            num_ranks, num_tokens = batches_of.LARGE_NUM_RANKS, batches_of.LARGE_BATCH_TOKENS
            baseline, num_held_out = large_baseline(), options.large_batches
        proposal, cpu_s = proposed(num_ranks, num_tokens, options)
        efforts.append((f"{num_ranks} ranks, {num_tokens:,} tokens", proposal, cpu_s))
        times_s = {
            "S0–S6" if section == "small" else "S0–S6, 16 times": plan_times_s(
                baseline, num_tokens, num_held_out
            ),
            "proposed": plan_times_s(proposal.pool, num_tokens, num_held_out),
        }
        console.print(quality_table(times_s, num_tokens, f"{num_ranks} ranks"))
        for member in proposal.members:
            console.print(f"  {member.name} = {member.replicas}", highlight=False)
        figures[section] = {
            "proposal": proposal.to_json(),
            "cpu_s": cpu_s,
            "times_s": {name: of_pool.tolist() for name, of_pool in times_s.items()},
        }
    console.print(effort_table(efforts))
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
