"""How long `simulate` takes: 100 iterations on 64 ranks, all ways, regrouping, trace and pictures.

The command runs as a user starts it: one thread a process, planning in as many as there are cores.

    python -m benchmarks.simulate_time
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from benchmarks import planner_batches as batches_of
from benchmarks.command import counted_progress, positive, wide_console

GOAL_S = 30.0
"""Wall time that 100 iterations are to stay below."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one run of the command."""

    cpu_s: float
    """User and system time."""
    wall_s: float
    num_ways: int
    """That it simulated."""


def command(num_iterations: int, out: Path) -> list[str]:
    """The command of docs/metrics.md."""
    examples = batches_of.ROOT / "examples"
    return [
        *(sys.executable, "-m", "megatron.hydraulis", "simulate", "--json"),
        *("--lengths", str(batches_of.DATA / "wikipedia_lengths.csv")),
        *("--cost-profile", str(examples / "cost_profile_llama32b_a800.json")),
        *("--pool", str(examples / "pool_64_ranks.json")),
        *("--model", str(examples / "model_llama32b.json"), "--device", "a800-80g"),
        *("--global-batch-tokens", str(batches_of.BATCH_TOKENS)),
        *("--seq-length", str(batches_of.CONTEXT_TOKENS)),
        *("--iterations", str(num_iterations), "--out", str(out)),
    ]


def measure(num_iterations: int) -> Timing:
    """Run the command once; CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start_s = time.perf_counter()
        done = subprocess.run(
            command(num_iterations, Path(folder)),
            cwd=batches_of.ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
        )
        wall_s = time.perf_counter() - start_s
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Timing(cpu_s, wall_s, len(json.loads(done.stdout)["ways"]))


def table(num_iterations: int, timings: Sequence[Timing]) -> Table:
    """Median and range of the runs."""
    found = Table(
        title=f"simulate, {num_iterations} iterations on 64 ranks, {timings[0].num_ways} ways, "
        f"{len(timings)} runs",
        title_justify="left",
    )
    for name in ("", "median, s", "least", "most"):
        found.add_column(name, justify="right" if name else "left")
    for name, times_s in (
        ("CPU time", [each.cpu_s for each in timings]),
        ("wall time", [each.wall_s for each in timings]),
    ):
        numbers = (statistics.median(times_s), min(times_s), max(times_s))
        found.add_row(name, *(f"{number:.1f}" for number in numbers))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command some times and print how long it took."""
    options = _parser().parse_args(arguments)
    console = wide_console()
    timings = []
    with counted_progress(console, "runs") as progress:
        for _ in progress.track(range(options.repeats), description="simulate"):
            timings.append(measure(options.iterations))
    console.print(table(options.iterations, timings))
    console.print(f"Goal: 100 iterations in less than {GOAL_S:g} s.")
    if options.json is not None:
        content = {"iterations": options.iterations, "runs": [asdict(each) for each in timings]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulate_time",
        description="How long simulate takes, all ways, regrouping and pictures included.",
    )
    parser.add_argument(
        "--iterations", type=positive, default=100, metavar="N", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="runs (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
