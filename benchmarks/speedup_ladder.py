"""What each idea is worth: padding, packing, dispatch, packing of equal work, dynamic strategies.

Simulated for a 32B model on 64 devices; `README.md` says what is assumed.

    python -m benchmarks.speedup_ladder
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress
from rich.table import Table

from benchmarks import planner_batches as batches_of
from benchmarks.command import (
    counted_progress,
    figures_table,
    make_parser,
    positive,
    wide_console,
    write_figures,
)
from benchmarks.paired_statistics import ratio_of_totals
from megatron.hydraulis.cost_model.context import ContextCosts
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.simulator.batches import read_corpus_lengths, sample_batches
from megatron.hydraulis.simulator.costs import RegroupCosts
from megatron.hydraulis.simulator.output import result_table, strategy_use_table
from megatron.hydraulis.simulator.results import SimulationSettings, WayResult, simulate_way
from megatron.hydraulis.simulator.ways import (
    BALANCED,
    CP_ONLY,
    DISPATCH,
    FIXED_ROWS,
    PACKING,
    PADDING,
    PER_BATCH,
    POOL,
    WAYS,
    Ways,
)

PUBLISHED = (1.32, 2.66)
"""Least and largest speed-up over existing systems that arXiv 2412.07894 reports, on its devices,
for its models and corpora."""
LADDER = (
    (PADDING, "padding"),
    (FIXED_ROWS, "packing, rows padded up"),
    (PACKING, "packing, without padding"),
    (DISPATCH, "+ dispatch by work"),
    (BALANCED, "+ packing of equal work"),
    (POOL, "+ dynamic strategies"),
)
BESIDE = ((PER_BATCH, "best homogeneous per batch"), (CP_ONLY, "cp only"))
NUM_DOCUMENTS = 1_000_000
DEVICE = "a800-80g"

MEDIAN_TOKENS = 500.0
TAIL_EXPONENT = 1.5
"""Of the share of documents longer than s, s to the power of minus this."""
SIGMA = 1.15
"""Of the logarithm of lengths, in the body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongTail:
    """Lengths of web documents by a law, since there is no list of them.

    A lognormal body and a Pareto tail, as generative models of file sizes and web documents have it
    (M. Mitzenmacher, Internet Mathematics 1(2), 2004; A. B. Downey, MASCOTS 2001). The tail begins
    where both densities, and the slopes of their logarithms, are equal.

    The parameters are chosen, not fitted: a mean of about 1,200 tokens before the cut, the order of
    a cleaned page of Common Crawl, and a tail of infinite variance, so that a few documents of tens
    of thousands of tokens hold a visible share of all tokens.
    """

    median_tokens: float = MEDIAN_TOKENS
    sigma: float = SIGMA
    tail_exponent: float = TAIL_EXPONENT

    @property
    def tail_tokens(self) -> float:
        """Where the tail begins: the slope is ``-1 - log(s/median)/sigma²`` in the body and
        ``-1 - exponent`` in the tail."""
        return self.median_tokens * math.exp(self.tail_exponent * self.sigma**2)

    def quantiles(self, probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Lengths in tokens that a share of documents is not above: shape of probabilities."""
        normal = NormalDist()
        border = self.tail_exponent * self.sigma
        body = normal.cdf(border)
        # With equal densities at the border the tail holds density · s / exponent.
        tail = normal.pdf(border) / (self.sigma * self.tail_exponent)
        mass = probabilities * (body + tail)
        in_tail = mass > body
        lengths = np.empty_like(probabilities)
        lengths[~in_tail] = [
            self.median_tokens * math.exp(self.sigma * normal.inv_cdf(float(share)))
            for share in np.clip(mass[~in_tail], 1e-12, None)
        ]
        left = (body + tail - mass[in_tail]) / tail
        lengths[in_tail] = self.tail_tokens * left ** (-1.0 / self.tail_exponent)
        return lengths

    def corpus(self, num_documents: int) -> npt.NDArray[np.int64]:
        """Lengths of a corpus with just this distribution: shape (num_documents,), rising."""
        middles = (np.arange(num_documents) + 0.5) / num_documents
        return np.maximum(1, np.rint(self.quantiles(middles))).astype(np.int64)


@dataclass(frozen=True)
class Corpus:
    """Lengths of its documents, in tokens."""

    name: str
    lengths: npt.NDArray[np.int64]


def corpora(median_tokens: float, tail_exponent: float) -> list[Corpus]:
    """What batches are drawn from."""
    law = LongTail(median_tokens=median_tokens, tail_exponent=tail_exponent)
    return [
        Corpus("CommonCrawl-like", law.corpus(NUM_DOCUMENTS)),
        Corpus("Wikipedia", read_corpus_lengths(batches_of.DATA / "wikipedia_lengths.csv")),
    ]


def simulate(
    corpus: Corpus, options: argparse.Namespace, progress: Progress
) -> tuple[Ways, list[WayResult]]:
    """All ways on batches of a corpus."""
    pool, profile = batches_of.pool(), batches_of.cost_model()
    shape = ModelShape.read(batches_of.ROOT / "examples" / "model_llama32b.json")
    device = device_constants(options.device)
    cluster = device.cluster(pool.num_ranks, pool.ranks_per_node)
    regroup = RegroupCosts(
        shape,
        cluster,
        num_atoms=pool.tp_lcm,
        memory_bytes_per_s=device.memory_bytes_per_s,
        link_fraction=device.link_fraction,
    )
    setting = SimulationSettings(
        shape=shape if options.regroup else None,
        regroup=regroup if options.regroup else None,
        kept=range(0),
    )
    task = progress.add_task(corpus.name, total=None)
    ways = Ways(
        batches=sample_batches(
            corpus.lengths,
            longest=batches_of.CONTEXT_TOKENS,
            num_batches=options.iterations,
            seed=options.seed,
            batch_tokens=batches_of.BATCH_TOKENS,
        ),
        pool=pool,
        profile=profile,
        context_costs=ContextCosts(
            profile=profile, shape=shape, cluster=cluster, link_fraction=device.link_fraction
        ),
        seq_length=batches_of.CONTEXT_TOKENS,
        shape=shape,
        advance=lambda: progress.advance(task),
    )
    results = []
    for way in WAYS:
        progress.update(task, description=f"{corpus.name}: {way}")
        try:
            result = simulate_way(way, ways.candidates(way), setting)
        except PlanError as error:
            if way != CP_ONLY:
                raise
            progress.console.print(f"{way!r} is skipped: {error}", markup=False)
            continue
        assert result is not None  # 4*tp16 holds the limit
        results.append(result)
    progress.remove_task(task)
    return ways, results


def ladder_table(corpus: Corpus, results: Sequence[WayResult]) -> Table:
    """A step a row: what it adds, and what it comes to."""
    by_name = {result.name: result for result in results}
    low, high = PUBLISHED
    table = figures_table(
        f"{corpus.name}: what each step is worth",
        ("step",),
        ("s / iteration", "step", "over packing [95 %]", "pool over it [95 %]"),
        f"Intervals: bootstrap over batches. arXiv 2412.07894 reports {low} to {high} over "
        "existing systems, which are static or choose among homogeneous strategies.",
    )
    last: WayResult | None = None
    for way, text in (*LADDER, *BESIDE):
        if way == BESIDE[0][0]:
            table.add_section()
            last = None
        if way not in by_name:
            continue
        result = by_name[way]
        table.add_row(
            text,
            f"{result.time_s / len(result.accounts):.3f}",
            "–" if last is None else f"{last.time_s / result.time_s:.2f}",
            _ratio(by_name[PACKING], result),
            _ratio(result, by_name[POOL]),
            style="bold" if way == POOL else None,
        )
        last = None if way in (CP_ONLY, PER_BATCH) else result
    return table


def _ratio(slower: WayResult, faster: WayResult) -> str:
    estimate = ratio_of_totals(
        [each.time_ms for each in slower.accounts], [each.time_ms for each in faster.accounts]
    )
    return f"{estimate.median:.2f} \\[{estimate.low:.2f}, {estimate.high:.2f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate both corpora and print the ladders."""
    options = _parser().parse_args(arguments)
    console = wide_console()
    figures: dict[str, Any] = {}
    with counted_progress(console, "batches") as progress:
        for corpus in corpora(options.median, options.tail_exponent):
            ways, results = simulate(corpus, options, progress)
            by_name = {result.name: result for result in results}
            num = len(ways.batches)
            cut = np.minimum(corpus.lengths, batches_of.CONTEXT_TOKENS)
            console.print(
                f"\n{corpus.name}: documents of {corpus.lengths.mean():,.0f} tokens on average, "
                f"median {np.median(corpus.lengths):,.0f}, 99th percentile "
                f"{np.percentile(corpus.lengths, 99):,.0f}, cut at {cut.max():,}. {num} batches "
                f"of {sum(map(sum, ways.batches)) / num:,.0f} tokens.\n"
            )
            console.print(ladder_table(corpus, results))
            title = f"{corpus.name}: where the time goes"
            console.print(result_table(results, by_name[PACKING], title))
            console.print(strategy_use_table(results))
            figures[corpus.name] = [result.to_json(by_name[PACKING]) for result in results]
    write_figures(console, options.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "speedup_ladder", "What each idea is worth, simulated for a 32B model on 64 devices."
    )
    parser.add_argument("--iterations", type=positive, default=100, help="batches of each corpus")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument(
        "--median", type=float, default=MEDIAN_TOKENS, help="of the law's body, in tokens"
    )
    parser.add_argument(
        "--tail-exponent", type=float, default=TAIL_EXPONENT, help="of the law's tail"
    )
    parser.add_argument(
        "--regroup",
        action="store_true",
        help="with regrouping and update, from bytes and the device's links; without, an iteration "
        "is forward and backward alone, as in the profile",
    )
    parser.add_argument("--device", default=DEVICE, help="whose links carry what is exchanged")
    return parser


if __name__ == "__main__":
    sys.exit(main())
