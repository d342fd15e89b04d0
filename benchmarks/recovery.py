"""Time from the death of a rank to the next iteration: torchrun, four ranks, one gets SIGKILL.

The complete program: the launcher notices the death, ends the other ranks and starts all again,
which imports torch and Megatron; the ranks meet, load the last checkpoint and continue. In a real
run the iterations since that checkpoint have to be repeated as well: on average half of
--save-interval.
"""

from __future__ import annotations

import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.command import make_parser, positive, write_figures
from megatron.hydraulis.terminal import figures_table, results_console
from tests.support.tiny_corpus import tiny_command, write_corpus

ROOT = Path(__file__).parent.parent
NUM_RANKS = 4
ITERATION = re.compile(r" iteration +(\d+)/")
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Recovery:
    """One death; seconds since the signal."""

    noticed_s: float
    """The launcher has reported that a rank failed."""
    started_s: float
    """Its new ranks run."""
    loaded_s: float
    """The last checkpoint has been loaded."""
    iteration_s: float
    """The next iteration has been logged."""


class Job:
    """A job under torchrun; its lines are kept with their time."""

    def __init__(self, argv: Sequence[str], num_ranks: int) -> None:
        self._lines: list[tuple[float, str]] = []
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(num_ranks), "--max-restarts", "1000"]
        self.process = subprocess.Popen(
            [*launcher, str(ROOT / "pretrain_gpt.py"), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def ranks(self) -> list[psutil.Process]:
        """Its processes that run the program, the newest last."""
        children = psutil.Process(self.process.pid).children()
        mine = [child for child in children if "pretrain_gpt.py" in " ".join(child.cmdline())]
        return sorted(mine, key=lambda child: child.create_time())

    def wait_for(self, matches: Callable[[str], bool], since_s: float) -> float:
        """The time of the first such line after a time. Raises RuntimeError if none comes."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for at_s, line in list(self._lines):
                if at_s > since_s and matches(line):
                    return at_s
            if self.process.poll() is not None:
                break
            time.sleep(0.01)
        tail = "\n".join(line for _, line in self._lines[-40:])
        raise RuntimeError(f"the job ended or hung:\n{tail}")

    def end(self) -> None:
        """Kill launcher and ranks."""
        for process in (*psutil.Process(self.process.pid).children(recursive=True), self.process):
            process.kill()
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append((time.monotonic(), line.rstrip()))


def measure(job: Job, rounds: int, report: Callable[[str], None]) -> list[Recovery]:
    """In each round kill a rank and wait for the next iteration."""
    found = []
    since_s = 0.0
    for number in range(rounds):
        # A few iterations, so that there is a checkpoint and the start is over.
        for _ in range(5):
            since_s = job.wait_for(lambda line: ITERATION.search(line) is not None, since_s)
        before = {rank.pid for rank in job.ranks()}
        victim = job.ranks()[number % NUM_RANKS]
        killed_s = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        noticed_s = job.wait_for(lambda line: "failed (exitcode: -9)" in line, killed_s)
        while len({rank.pid for rank in job.ranks()} - before) < NUM_RANKS:
            time.sleep(0.01)
        started_s = time.monotonic()
        loaded_s = job.wait_for(lambda line: line.startswith("loaded "), killed_s)
        since_s = job.wait_for(lambda line: ITERATION.search(line) is not None, loaded_s)
        found.append(
            Recovery(*(at_s - killed_s for at_s in (noticed_s, started_s, loaded_s, since_s)))
        )
        report(f"round {number + 1}: next iteration after {found[-1].iteration_s:.1f} s")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser("recovery", "Time from the death of a rank to the next iteration.")
    parser.add_argument("--rounds", type=positive, default=3, help="deaths")
    options = parser.parse_args(argv)
    console = results_console()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save = str(folder / "save")
        job = Job(
            tiny_command(
                write_corpus(folder / "tiny"),
                folder / "run",
                *("--strategy", "tp2+2*tp1", "--split", "100,0,0", "--train-iters", "1000000"),
                *("--save", save, "--load", save, "--save-interval", "1", "--keep-last", "2"),
            ),
            NUM_RANKS,
        )
        try:
            found = measure(job, options.rounds, console.print)
        finally:
            job.end()
    table = figures_table("Recovery, s", ("from SIGKILL until",), ("median", "least", "most"))
    names = {
        "noticed_s": "torchrun has noticed",
        "started_s": "new ranks run",
        "loaded_s": "the checkpoint is loaded",
        "iteration_s": "the next iteration is done",
    }
    for key, label in names.items():
        values = [getattr(each, key) for each in found]
        figures = (statistics.median(values), min(values), max(values))
        table.add_row(label, *(f"{figure:.2f}" for figure in figures))
    console.print(table)
    write_figures(console, options.json, [asdict(each) for each in found])


if __name__ == "__main__":
    main()
