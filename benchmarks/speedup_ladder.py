"""Speed-up by each idea: packing, dispatch, packing of equal work, dynamic strategies.

Simulated for a 32B model on 64 devices; `README.md` says what is assumed.

    python -m benchmarks.speedup_ladder
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.progress import Progress
from rich.table import Table
from scipy.stats import norm

from benchmarks import inputs
from benchmarks.command import (
    counted_progress,
    make_parser,
    positive,
    write_figures,
)
from benchmarks.paired_statistics import ratio_of_totals
from megatron.hydraulis.cost_model.context import ContextCosts
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.regrouping import RegroupCosts
from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.lengths.counts import read_length_counts
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.simulator.batches import sample_batches
from megatron.hydraulis.simulator.output import result_table, strategy_use_table
from megatron.hydraulis.simulator.results import SimulationSettings, WayResult, simulate_way
from megatron.hydraulis.simulator.ways import (
    BALANCED,
    CEILING,
    CONTEXT_WAYS,
    DISPATCH,
    FIXED_ROWS,
    MEGATRON_PACKING,
    PACKING,
    PADDING,
    PER_BATCH,
    POOL,
    WAYS,
    Ways,
)
from megatron.hydraulis.terminal import figures_table, results_console

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
OTHERS = (
    (PER_BATCH, "best homogeneous per batch"),
    *((way, way) for way in (MEGATRON_PACKING, *CONTEXT_WAYS, CEILING)),
)
NUM_DOCUMENTS = 1_000_000
DEVICE = "a800-80g"

MEDIAN_TOKENS = 500.0
TAIL_EXPONENT = 1.5
"""Of the share of documents longer than s, s to the power of minus this."""
SIGMA = 1.15
"""Of the logarithm of lengths, in the body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LongTail:
    """A distribution of the lengths of web documents: a lognormal body and a Pareto tail.

    Generative models of file sizes and web documents have this form (M. Mitzenmacher, Internet
    Mathematics 1(2), 2004; A. B. Downey, MASCOTS 2001). The tail begins where both densities, and
    the slopes of their logarithms, are equal.

    The parameters are chosen, not fitted: a mean of about 1,200 tokens before the cut, the order of
    a cleaned page of Common Crawl, and a tail of infinite variance, so that a few documents of tens
    of thousands of tokens hold a visible share of all tokens.
    """

    median_tokens: float = MEDIAN_TOKENS
    sigma: float = SIGMA
    tail_exponent: float = TAIL_EXPONENT

    @property
    def tail_tokens(self) -> float:
        """Start of the tail: the slope is ``-1 - log(s/median)/sigma²`` in the body and
        ``-1 - exponent`` in the tail."""
        return self.median_tokens * math.exp(self.tail_exponent * self.sigma**2)

    def quantiles(self, probabilities: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Quantiles of the length in tokens; the shape is that of probabilities."""
        border = self.tail_exponent * self.sigma
        body = norm.cdf(border)
        # With equal densities at the border the tail holds density · s / exponent.
        tail = norm.pdf(border) / (self.sigma * self.tail_exponent)
        mass = probabilities * (body + tail)
        left = np.maximum(body + tail - mass, 1e-12) / tail
        return np.where(
            mass > body,
            self.tail_tokens * left ** (-1.0 / self.tail_exponent),
            self.median_tokens * np.exp(self.sigma * norm.ppf(np.clip(mass, 1e-12, body))),
        )

    def corpus(self, num_documents: int) -> npt.NDArray[np.int64]:
        """Lengths of a corpus with this distribution: shape (num_documents,), rising."""
        middles = (np.arange(num_documents) + 0.5) / num_documents
        return np.maximum(1, np.rint(self.quantiles(middles))).astype(np.int64)


@dataclass(frozen=True)
class Corpus:
    """Lengths of its documents, in tokens."""

    name: str
    lengths: npt.NDArray[np.int64]


def corpora(median_tokens: float, tail_exponent: float) -> list[Corpus]:
    """The corpora that batches are drawn from."""
    distribution = LongTail(median_tokens=median_tokens, tail_exponent=tail_exponent)
    return [
        Corpus("CommonCrawl-like", distribution.corpus(NUM_DOCUMENTS)),
        Corpus("Wikipedia", read_length_counts(inputs.WIKIPEDIA).sequences),
    ]


def simulate(
    corpus: Corpus, options: argparse.Namespace, progress: Progress
) -> tuple[Ways, list[WayResult]]:
    """All ways on batches of a corpus."""
    pool, profile = inputs.pool(), inputs.cost_model()
    shape = ModelShape.read(inputs.MODEL)
    device = device_constants(options.device)
    cluster = device.cluster(pool.num_ranks, pool.ranks_per_node)
    if options.regroup:
        regroup = RegroupCosts.of(shape, device, cluster, num_atoms=pool.tp_lcm)
        profile = profile.with_regrouping(regroup, pool.strategies)
    setting = SimulationSettings(
        shape=shape if options.regroup else None, regroup=profile.regroup, kept=range(0)
    )
    task = progress.add_task(corpus.name, total=None)
    ways = Ways(
        batches=sample_batches(
            np.minimum(corpus.lengths, inputs.CONTEXT_TOKENS),
            num_batches=options.iterations,
            seed=options.seed,
            sizes=BatchSizes.constant(num_tokens=inputs.BATCH_TOKENS),
        ),
        pool=pool,
        profile=profile,
        context_costs=ContextCosts(
            profile=profile, shape=shape, cluster=cluster, link_fraction=device.link_fraction
        ),
        seq_length=inputs.CONTEXT_TOKENS,
        shape=shape,
        advance=lambda: progress.advance(task),
    )
    results = []
    for way in WAYS:
        progress.update(task, description=f"{corpus.name}: {way}")
        try:
            result = simulate_way(way, ways.candidates(way), setting)
        except PlanError as error:
            if way not in CONTEXT_WAYS:
                raise
            progress.console.print(f"{way!r} is skipped: {error}", markup=False)
            continue
        assert result is not None  # 4*tp16 holds the limit
        results.append(result)
    progress.remove_task(task)
    return ways, results


def ladder_table(corpus: Corpus, results: Sequence[WayResult]) -> Table:
    """One row a step: its speed-up, and the total."""
    by_name = {result.name: result for result in results}
    low, high = PUBLISHED
    table = figures_table(
        f"{corpus.name}: speed-up by step",
        ("step",),
        ("s / iteration", "step", "over packing [95 %]", "pool over it [95 %]"),
        caption=f"Intervals: bootstrap over batches. arXiv 2412.07894 reports {low} to {high} over "
        "existing systems, which are static or choose among homogeneous strategies.",
    )
    last: WayResult | None = None
    for way, text in (*LADDER, *OTHERS):
        if way == OTHERS[0][0]:
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
        last = None if (way, text) in OTHERS else result
    return table


def _ratio(slower: WayResult, faster: WayResult) -> str:
    estimate = ratio_of_totals(
        [each.time_ms for each in slower.accounts], [each.time_ms for each in faster.accounts]
    )
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate both corpora and print the ladders."""
    options = _parser().parse_args(arguments)
    console = results_console()
    figures: dict[str, Any] = {}
    with counted_progress(console, "batches") as progress:
        for corpus in corpora(options.median, options.tail_exponent):
            ways, results = simulate(corpus, options, progress)
            by_name = {result.name: result for result in results}
            num = len(ways.batches)
            cut = np.minimum(corpus.lengths, inputs.CONTEXT_TOKENS)
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
        "speedup_ladder", "Speed-up by each idea, simulated for a 32B model on 64 devices."
    )
    parser.add_argument("--iterations", type=positive, default=100, help="batches of each corpus")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument(
        "--median", type=float, default=MEDIAN_TOKENS, help="of CommonCrawl-like lengths, in tokens"
    )
    parser.add_argument("--tail-exponent", type=float, default=TAIL_EXPONENT, help="of their tail")
    parser.add_argument(
        "--regroup",
        action="store_true",
        help="add regrouping and update, by bytes and links of the device; by default an iteration "
        "is forward and backward only, as in the profile",
    )
    parser.add_argument("--device", default=DEVICE, help="device whose links are used")
    return parser


if __name__ == "__main__":
    sys.exit(main())
