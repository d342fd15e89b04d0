"""What proposed pools gain in many jobs, and the CPU time of the proposals.

    python -m benchmarks.propose [--sections cases]

cases: what ``hydraulis advise`` finds for the published 7B and 32B profiles and for estimates of a
13B and an 8B on A100 and H100, on 16, 32 and 64 ranks with contexts of 8K, 16K and 32K. All batches
are drawn from Wikipedia lengths. One core.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
from megatron.hydraulis.cost_model.profile import BY_RULE, NOTHING_HIDDEN
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.proposal.propose import ProposalRequest
from megatron.hydraulis.terminal import figures_table, results_console

RANKS_PER_NODE = 8
SIZES = {
    "13B": inputs.LLAMA_13B,
    "8B": inputs.llama_shape(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14_336,
        num_attention_heads=32,
        num_query_groups=8,
        vocab_size=128_256,
    ),
    "7B": inputs.llama_shape(
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=11_008,
        num_attention_heads=32,
        num_query_groups=32,
        vocab_size=30_592,
    ),
    "30B-A3B": ModelShape.read(inputs.QWEN3_30B_A3B),
}
"""Of Llama 2 13B, Llama 3 8B, the published 7B and Qwen3-30B-A3B."""
DEVICES = ("a100-80g", "h100-80g")
SECTIONS = ("cases",)
CASE_TOKENS_PER_RANK = 6_250
"""Of a global batch."""
CASE_MODELS = ("7B A800", "32B A800", *(f"{m} {d}" for m in ("13B", "8B") for d in DEVICES))
EXPERT_MODELS = ("30B-A3B h100-80g",)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """The figures that `advise` finds for one job."""

    name: str
    gains: dict[str, tuple[float, float]]
    """Of the pool over the best balanced static strategy and over rows of fixed length, by how
    regrouping counts."""
    of_ceiling: float
    """Time that no plan can beat over the pool's, by the rule."""
    of_bound: float
    """Makespan that no plan of the profile's schemes can beat over the pool's."""
    most: float
    """Makespan of the best static strategy over that bound: no plan gains more."""
    regrouping: float
    """Share of regrouping and optimizer in the pool's time, by the rule."""
    static: str
    pool: str
    cpu_s: float


def case_costs(name: str, num_ranks: int) -> JobCosts:
    """Published or estimated, with all widths of cp."""
    size, device_name = name.split()
    if device_name == "A800":
        profile = inputs.published_profile(name, num_ranks)
        device = device_constants("a800-80g")
        shape = ModelShape.read(inputs.MODEL) if size == "32B" else SIZES[size]
    else:
        shape, device = SIZES[size], device_constants(device_name)
    cluster = device.cluster(num_ranks, RANKS_PER_NODE)
    has_experts = name in EXPERT_MODELS  # as the commands with --moe-grouped-gemm
    model = AnalyticCostModel(
        shape=shape,
        device=device,
        cluster=cluster,
        cp_comm_type="auto",
        has_te_layers=True,
        groups_experts=has_experts,
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
        sizes=BatchSizes.constant(num_tokens=CASE_TOKENS_PER_RANK * num_ranks),
        seq_length=min(context_tokens, held),
        num_ranks=num_ranks,
        ranks_per_node=RANKS_PER_NODE,
        num_batches=options.case_batches,
        max_strategies=options.max_strategies,
        seed=options.seed,
    )
    advice = advise(request, costs)
    return CaseResult(
        name=f"{name}, {num_ranks}, {context_tokens // 1024}K",
        gains={
            kind: (advice.gain(advice.static, kind), advice.gain(advice.fixed_rows, kind))
            for kind in advice.kinds
        },
        of_ceiling=advice.ceiling_s / advice.pool.time_s(BY_RULE),
        of_bound=advice.bound_s / advice.pool.makespan_s,
        most=advice.static.makespan_s / advice.bound_s,
        regrouping=advice.pool.regroup_s[BY_RULE] / advice.pool.time_s(BY_RULE),
        static=advice.static.text,
        pool=advice.pool.text,
        cpu_s=time.process_time() - begin_s,
    )


def case_table(results: Sequence[CaseResult]) -> Table:
    """Gains of every case, and their means."""
    columns = [
        f"{over}, {kind}" for kind in (NOTHING_HIDDEN, BY_RULE) for over in ("static", "fixed")
    ]
    table = figures_table(
        "gain of the pool, ×",
        ("model, ranks, context", "best static", "pool"),
        (*columns, "of ceiling", "of bound", "most", "regrouping", "CPU s"),
        caption="static: the best without a pool, as advise compares; fixed: the best layout "
        "with rows of fixed length. Of ceiling: share of the speed that no plan exceeds. "
        "Of bound: the same, if schemes hold what memory allows and micro-batches have their "
        "constant times; without regrouping. Most: gain over static at that bound. "
        "Regrouping: with the optimizer, share of the pool's time.",
    )
    rows = []
    for result in results:
        gains = [*result.gains[NOTHING_HIDDEN], *result.gains[BY_RULE]]
        rows.append((*gains, result.of_ceiling, result.of_bound, result.most, result.regrouping))
        numbers = (*(f"{value:.3f}" for value in rows[-1]), f"{result.cpu_s:.0f}")
        table.add_row(result.name, result.static, result.pool, *numbers)
    table.add_section()
    for label, of_column in (("mean", fmean), ("least", min)):
        columns_of = zip(*rows, strict=True)
        table.add_row(label, "", "", *(f"{of_column(column):.3f}" for column in columns_of), "")
    return table


def run_cases(options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """All chosen cases, printed as they come, and their table."""
    results = []
    for name, num_ranks, context_tokens in itertools.product(
        options.case_models, options.case_ranks, inputs.POOL_CONTEXTS_TOKENS
    ):
        results.append(run_case(name, num_ranks, context_tokens, options))
        last = results[-1]
        line = {kind: [round(gain, 3) for gain in gains] for kind, gains in last.gains.items()}
        console.print(f"{last.name}: {line}, {last.of_ceiling:.3f} of the ceiling", highlight=False)
    console.print(case_table(results))
    return [asdict(result) for result in results]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections."""
    options = _parser().parse_args(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    console = results_console()
    figures = {section: run_cases(options, console) for section in options.sections}
    write_figures(console, options.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("propose", "Quality and time of proposed pools on one core.")
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to measure"
    )
    parser.add_argument("--max-strategies", type=int, default=7, help="of the proposed pool")
    parser.add_argument("--case-batches", type=int, default=8, help="batches of a case")
    parser.add_argument(
        "--case-models",
        nargs="+",
        choices=(*CASE_MODELS, *EXPERT_MODELS),
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
