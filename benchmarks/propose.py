"""What proposed pools gain in many jobs, and the CPU time of the proposals.

    python -m benchmarks.propose [--sections cases long]

cases: what ``hydraulis advise`` finds for the published 7B and 32B profiles and for estimates of a
13B and an 8B on A100 and H100, on 16, 32 and 64 ranks with contexts of 8K, 16K and 32K. long: for
estimates with contexts of 128K and 256K. All batches are drawn from Wikipedia lengths. One core.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import inputs
from benchmarks.command import make_parser, write_figures
from megatron.hydraulis.advise.command import advise
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.estimate_command import estimated_profile
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.profile import BY_RULE
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.proposal.propose import ProposalRequest
from megatron.hydraulis.proposal.verdict import Setting, without_plans
from megatron.hydraulis.simulator.ways import FIXED_ROWS, MEGATRON_CP
from megatron.hydraulis.terminal import StrategyText, figures_table, results_console

RANKS_PER_NODE = 8
LLAMA_8B = inputs.llama_shape(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14_336,
    num_attention_heads=32,
    num_query_groups=8,
    vocab_size=128_256,
)
SIZES = {
    "13B": inputs.LLAMA_13B,
    "8B": LLAMA_8B,
    "7B": replace(LLAMA_8B, ffn_hidden_size=11_008, num_query_groups=32, vocab_size=30_592),
    "32B": ModelShape.read(inputs.MODEL),
    "70B": replace(
        LLAMA_8B, num_layers=80, hidden_size=8192, ffn_hidden_size=28_672, num_attention_heads=64
    ),
    "30B-A3B": ModelShape.read(inputs.QWEN3_30B_A3B),
}
"""Of Llama 2 13B, Llama 3 8B and 70B, the published 7B and 32B, and Qwen3-30B-A3B."""
CASE_TOKENS_PER_RANK, LEAST_SEQUENCES = 6_250, 2
"""Of a global batch, which has room for as many of the longest sequences at least."""
CASE_MODELS = ("7B A800", "32B A800", "13B a100-80g", "13B h100-80g", "8B a100-80g", "8B h100-80g")
LONG_CASES = (
    ("8B h100-80g", 16, 131_072),
    ("8B h100-80g", 64, 262_144),
    ("8B b200", 16, 262_144),
    ("32B h100-80g", 64, 262_144),
    ("32B b200", 64, 131_072),
    ("70B h100-80g", 128, 131_072),
    ("30B-A3B h100-80g", 64, 131_072),
    ("30B-A3B b200", 64, 262_144),
)
"""Models with their devices, ranks and contexts in tokens."""
EXPERTS = "30B-A3B"


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """The figures that `advise` finds for one job."""

    name: str
    gains: dict[str, tuple[float, ...]]
    """Of the pool over the best without one, over Megatron's dynamic cp and over rows of fixed
    length: shape (3,), as expected and in the corners of what is assumed."""
    of_ceiling: float
    """Time that no plan can beat over the pool's."""
    static: str
    pool: str
    cpu_s: float


def case_costs(name: str, num_ranks: int) -> JobCosts:
    """Published or estimated, with all widths of cp."""
    size, device_name = name.split()
    if device_name == "A800":
        profile = inputs.published_profile(name, num_ranks)
        device = device_constants("a800-80g")
    else:
        device = device_constants(device_name)
    model = AnalyticCostModel(
        shape=SIZES[size],
        device=device,
        cluster=device.cluster(num_ranks, RANKS_PER_NODE),
        cp_comm_type="auto",
        has_te_layers=True,
        groups_experts=size == EXPERTS,  # as the commands with --moe-grouped-gemm
        fuses_rope=True,
        has_te_attention=True,
    )
    if device_name != "A800":
        profile = estimated_profile(model)
    return JobCosts.of(profile, model).with_widths()


def run_case(
    name: str, num_ranks: int, context_tokens: int, options: argparse.Namespace
) -> CaseResult:
    """Advice for one job."""
    begin_s = time.process_time()
    costs = case_costs(name, num_ranks)
    # A static strategy must hold the longest sequence.
    held = max(
        row.scheme.rounded_down(row.max_tokens)
        for row in costs.profile.schemes
        if num_ranks % row.scheme.num_ranks == 0
    )
    request = ProposalRequest(
        corpus=read_length_counts(inputs.WIKIPEDIA),
        sizes=BatchSizes.constant(
            num_tokens=max(CASE_TOKENS_PER_RANK * num_ranks, LEAST_SEQUENCES * context_tokens)
        ),
        seq_length=min(context_tokens, held),
        num_ranks=num_ranks,
        ranks_per_node=RANKS_PER_NODE,
        num_batches=options.case_batches,
        max_strategies=options.max_strategies,
        seed=options.seed,
    )
    advice = advise(request, costs)
    cpu_s, verdict = time.process_time() - begin_s, advice.verdict
    readings = [
        (costs, verdict.baseline, verdict.gain),
        *((costs.at_corner(c.corner), c.baseline, c.gain) for c in verdict.corners),
    ]
    gains: dict[str, list[float]] = {way: [] for way in ("baseline", MEGATRON_CP, FIXED_ROWS)}
    for there, baseline, gain in readings:
        settings, pool_s = list(Setting.all_of(there)), baseline.time_s / gain
        gains["baseline"].append(gain)
        for way, of_way in ((MEGATRON_CP, settings), (FIXED_ROWS, settings[:1])):
            found = [without_plans(request, each, advice.proposal.pool, way) for each in of_way]
            gains[way].append(min((b.time_s for b in found if b), default=math.inf) / pool_s)
    return CaseResult(
        name=f"{name}, {num_ranks}, {context_tokens // 1024}K",
        gains={way: tuple(of_way) for way, of_way in gains.items()},
        of_ceiling=advice.ceiling_s / advice.pool.time_s(BY_RULE),
        static=advice.static.text,
        pool=advice.pool.text,
        cpu_s=cpu_s,
    )


def case_table(results: Sequence[CaseResult]) -> Table:
    """Gains of every case, and their means."""
    table = figures_table(
        "gain of the pool, × (with the range of what is assumed)",
        ("model, ranks, context", "best without a pool", "pool"),
        (*results[0].gains, "of ceiling", "CPU s"),
        caption="Baseline: the best without a pool, as advise compares; the others: the best of "
        "this way. Of ceiling: share of the speed that no plan exceeds.",
    )
    for result in results:
        numbers = [f"{g[0]:.3f} ({min(g):.2f} – {max(g):.2f})" for g in result.gains.values()]
        last = (f"{result.of_ceiling:.3f}", f"{result.cpu_s:.0f}")
        static, pool = StrategyText(result.static), StrategyText(result.pool)
        table.add_row(result.name, static, pool, *numbers, *last)
    means = [fmean(r.gains[way][0] for r in results) for way in results[0].gains]
    of_ceiling = fmean(result.of_ceiling for result in results)
    table.add_row("mean", "", "", *(f"{mean:.3f}" for mean in (*means, of_ceiling)), "")
    return table


def run_cases(
    cases: Iterable[tuple[str, int, int]], options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """The cases, printed as they come, and their table."""
    results = []
    for case in cases:
        results.append(run_case(*case, options))
        console.print(results[-1], highlight=False)
    console.print(case_table(results))
    return [asdict(result) for result in results]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections."""
    options = _parser().parse_args(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    console = results_console()
    contexts = inputs.POOL_CONTEXTS_TOKENS
    cases = {
        "cases": itertools.product(options.case_models, options.case_ranks, contexts),
        "long": LONG_CASES,
    }
    figures = {name: run_cases(cases[name], options, console) for name in options.sections}
    write_figures(console, options.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("propose", "Quality and time of proposed pools on one core.")
    parser.add_argument(
        "--sections", nargs="+", choices=("cases", "long"), default=["cases"], help="what to run"
    )
    parser.add_argument("--max-strategies", type=int, default=7, help="of the proposed pool")
    parser.add_argument("--case-batches", type=int, default=8, help="batches of a case")
    parser.add_argument(
        "--case-models",
        nargs="+",
        choices=(*CASE_MODELS, f"{EXPERTS} h100-80g"),
        default=list(CASE_MODELS),
        help="of cases",
    )
    parser.add_argument(
        "--case-ranks", nargs="+", type=int, default=list(inputs.POOL_RANKS), help="of cases"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the batches to propose from")
    return parser


if __name__ == "__main__":
    sys.exit(main())
