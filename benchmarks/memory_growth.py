"""Resident memory of every process of a training job, iteration after iteration.

The complete program under torchrun: a tiny model, 8 sequences a batch, iterations of milliseconds.
What a process keeps of every iteration shows here long before it shows in a real run.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil

from benchmarks.command import make_parser, positive, write_figures
from benchmarks.recovery import ITERATION, Job
from megatron.hydraulis.terminal import figures_table, results_console
from tests.support.tiny_corpus import SEQ_LENGTH, tiny_command, write_corpus

NUM_RANKS = 2
LOG_INTERVAL = 100
NUM_DOCUMENTS, MEAN_TOKENS = 2_000, 20
NUM_ROWS = 10
"""Of the table."""
KIB = 1024


def resident_kib(job: Job) -> dict[str, int]:
    """Of the launcher, the largest rank and the planner process."""
    kib = {"launcher": 0, "rank": 0, "planner": 0}
    launcher = psutil.Process(job.process.pid)
    for process in (launcher, *launcher.children(recursive=True)):
        words = process.cmdline()
        if "megatron.hydraulis.planner.ahead" in words:
            name = "planner"
        else:
            name = "launcher" if process == launcher else "rank"
        kib[name] = max(kib[name], process.memory_info().rss // KIB)
    return kib


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser("memory_growth", "Resident memory of a job's processes over a long run.")
    parser.add_argument("--iterations", type=positive, default=10_000, metavar="N")
    parser.add_argument("--strategy", default="pp2", metavar="SPEC", help="of two ranks")
    options = parser.parse_args(argv)
    console = results_console()
    drawn = np.random.default_rng(0).geometric(1 / MEAN_TOKENS, size=NUM_DOCUMENTS)
    found: dict[int, dict[str, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        prefix = write_corpus(Path(name) / "tiny", np.minimum(SEQ_LENGTH, drawn + 2).tolist())
        flags = ("--strategy", options.strategy, "--split", "100,0,0", "--lr-warmup-iters", "1")
        lengths = ("--train-iters", str(options.iterations), "--log-interval", str(LOG_INTERVAL))
        job = Job(tiny_command(prefix, Path(name) / "run", *flags, *lengths), NUM_RANKS)
        try:
            since_s = 0.0
            for iteration in range(LOG_INTERVAL, options.iterations, LOG_INTERVAL):
                since_s = job.wait_for(lambda line: ITERATION.search(line) is not None, since_s)
                found[iteration] = resident_kib(job)
        finally:
            job.end()
    table = figures_table("Resident MiB", (), ("iterations", "launcher", "largest rank", "planner"))
    for iteration in list(found)[:: max(1, len(found) // NUM_ROWS)]:
        table.add_row(f"{iteration:,}", *(f"{kib / KIB:.1f}" for kib in found[iteration].values()))
    console.print(table)
    write_figures(console, options.json, found)


if __name__ == "__main__":
    main()
