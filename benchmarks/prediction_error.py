"""Profile, plan, train: predicted against measured iteration times.

Three real programs, one after the other, each on the same number of ranks of this machine: the
command ``profile``, then ``pretrain_gpt.py`` with the profile that it wrote, on sequences of a long
tail. Every iteration of the run has the time that its plan predicted before it ran and the time
that it took; the figure is the median of ``|measured / predicted - 1|``. Nothing is fitted to the
run.

With --pool it compares the gain of a proposed pool instead, see `pool_gain.py`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks import pool_gain
from benchmarks.command import make_parser, torchrun, write_figures
from megatron.hydraulis.observability.records import IterationRecord, read_metrics
from megatron.hydraulis.terminal import figures_table, results_console
from tests.support.tiny_corpus import write_corpus

SEQ_LENGTH = 1024
VOCAB_SIZE = 1024
NUM_DOCUMENTS = 4000
# Log-normal: most documents are short, some reach the limit.
MEDIAN_TOKENS, SIGMA = 90, 1.1
MODEL_FLAGS = (
    *("--num-layers", "4", "--hidden-size", "128", "--ffn-hidden-size", "256"),
    *("--num-attention-heads", "8", "--group-query-attention", "--num-query-groups", "4"),
    *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear"),
    *("--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(VOCAB_SIZE - 1)),
)
LIMIT_FLAGS = ("--seq-length", str(SEQ_LENGTH), "--max-tokens-per-micro-batch", "1024")
NUM_FIRST_LEFT_OUT = 2
"""Iterations that also build models and start the planner."""


@dataclass(frozen=True)
class RunErrors:
    """Prediction errors of one training run."""

    strategy: str
    num_iterations: int
    median: float
    worst: float
    median_signed: float
    """Measured / predicted - 1: positive where iterations take longer than predicted."""
    spread: float
    """Of measured times at equal predicted time: the interquartile range of measured / predicted,
    over its median. No prediction can be better than about half of it."""
    load: tuple[float, float, float]
    """Of the machine, over 1, 5 and 15 minutes, when the run ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything and print a table; returns the exit status."""
    parser = make_parser("prediction_error", "Profile, plan, train: how far predictions are off.")
    parser.add_argument("--num-ranks", type=int, default=2, metavar="N", help="number of ranks")
    parser.add_argument(
        "--strategies", nargs="+", metavar="SPEC", help="one run each; if not given, N*tp1 and tpN"
    )
    parser.add_argument("--iterations", type=int, default=24, metavar="N", help="of each run")
    parser.add_argument("--global-batch-tokens", type=int, default=8192, metavar="N")
    parser.add_argument(
        "--pool", action="store_true", help="instead: the gain of a proposed pool, in turn"
    )
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep profile and runs here")
    arguments = parser.parse_args(argv)
    num_ranks = arguments.num_ranks
    strategies = arguments.strategies or [f"{num_ranks}*tp1", f"tp{num_ranks}"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.pool:
            return pool_gain.run(folder, MODEL_FLAGS, arguments)
        corpus = _write_corpus(folder)
        found = [_errors_of(strategy, folder, corpus, arguments) for strategy in strategies]
    console = results_console()
    table = figures_table(
        f"{datetime.date.today()}, {num_ranks} ranks on {os.cpu_count()} cores",
        ("run",),
        ("iterations", "median", "worst", "signed", "spread", "load"),
    )
    for errors in found:
        table.add_row(
            errors.strategy,
            str(errors.num_iterations),
            f"{errors.median:.1%}",
            f"{errors.worst:.1%}",
            f"{errors.median_signed:+.1%}",
            f"{errors.spread:.1%}",
            " ".join(f"{value:.1f}" for value in errors.load),
        )
    console.print(table)
    write_figures(console, arguments.json, [vars(errors) for errors in found])
    return 0


def _errors_of(
    strategy: str, folder: Path, corpus: str, arguments: argparse.Namespace
) -> RunErrors:
    """Make a profile for a strategy, then train with it."""
    name = "".join(c if c.isalnum() else "_" for c in strategy)
    profile = folder / f"{name}.json"
    lengths = folder / "lengths.json"
    torchrun(
        arguments.num_ranks,
        *("-m", "megatron.hydraulis", "profile", "--out", str(profile)),
        *("--lengths", str(lengths), "--", *MODEL_FLAGS, *LIMIT_FLAGS, "--strategy", strategy),
    )
    run_dir = folder / name
    torchrun(
        arguments.num_ranks,
        *("pretrain_gpt.py", *MODEL_FLAGS, *LIMIT_FLAGS, "--strategy", strategy),
        *("--data-path", corpus, "--split", "100,0,0", "--run-dir", str(run_dir)),
        *("--cost-profile", str(profile), "--train-iters", str(arguments.iterations)),
        *("--global-batch-tokens", str(arguments.global_batch_tokens)),
        *("--lr", "1e-3", "--min-lr", "1e-4"),
    )
    return figures(strategy, read_metrics(run_dir)[NUM_FIRST_LEFT_OUT:])


def figures(strategy: str, records: Sequence[IterationRecord]) -> RunErrors:
    """The errors of the records of a run; all of them have a predicted time."""
    ratios = [record.iteration_time_s / record.predicted_time_s for record in records]
    errors = [abs(ratio - 1.0) for ratio in ratios]
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    return RunErrors(
        strategy=strategy,
        num_iterations=len(records),
        median=statistics.median(errors),
        worst=max(errors),
        median_signed=middle - 1.0,
        spread=(high - low) / middle,
        load=os.getloadavg(),
    )


def _write_corpus(folder: Path) -> str:
    """Documents with a long tail, and the lengths of their sequences."""
    draw = random.Random(1)
    lengths = [
        max(2, min(SEQ_LENGTH, round(draw.lognormvariate(np.log(MEDIAN_TOKENS), SIGMA))))
        for _ in range(NUM_DOCUMENTS)
    ]
    (folder / "lengths.json").write_text(json.dumps(lengths))
    return write_corpus(folder / "corpus", lengths, num_tokens=VOCAB_SIZE - 1)


if __name__ == "__main__":
    sys.exit(main())
