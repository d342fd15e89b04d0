"""Save and load of four ranks: ours, plain torch.save, and plain megatron-core.

The state has the same size everywhere: fp32 parameters and two moments. Ours and torch's are those
of one engine, each rank writing what it owns; megatron-core writes a model with tp = 2 and its
distributed optimizer's state, fully reshardable, by its own writer. All write to the same disk and
call fsync.

    python -m benchmarks.checkpoints
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from benchmarks.command import (
    counted_progress,
    make_parser,
    positive,
    use_cpu,
    write_figures,
)
from benchmarks.inputs import llama_shape
from benchmarks.paired_statistics import RatioEstimate, paired_ratio
from benchmarks.rank_set import RankSet
from benchmarks.workload import Workload
from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.loading import load_checkpoint
from megatron.hydraulis.checkpoint.saving import CheckpointSaver
from megatron.hydraulis.terminal import figures_table, results_console
from tests.support.checkpoints import fill_moments, make_engine, saved_state
from tests.support.plain_checkpoints import PlainMegatron

NUM_RANKS = 4
STALL_GOAL = 0.05
"""Largest share of an asynchronous save for which training may be stalled."""
COMPUTE_S = 0.1
"""Of an iteration during an asynchronous save: ranks sleep, as they do while a GPU computes."""
NUM_BEFORE = 5
"""Iterations before a save, to compare with."""
BYTES_PER_MB = 1e6
STALL = "stall / asynchronous save"
RATIOS = {
    "save / torch.save": ("save_s", "torch_save_s"),
    "load / torch.load": ("load_s", "torch_load_s"),
    "save / megatron-core's": ("save_s", "megatron_save_s"),
    "load / megatron-core's": ("load_s", "megatron_load_s"),
    STALL: ("async_stall_s", "async_save_s"),
    "stall / synchronous save": ("async_stall_s", "save_s"),
    "lost / asynchronous save": ("async_lost_s", "async_save_s"),
}


@dataclass(frozen=True)
class Round:
    """Times of the slowest rank, from a barrier to a barrier."""

    save_s: float
    load_s: float
    async_save_s: float
    """From its begin until the checkpoint is complete."""
    async_stall_s: float
    """Time inside the saver's calls, when training is stalled."""
    async_lost_s: float
    """Extra time of the iterations during the save, stalls included: an update copies every page
    that a fork shares, and forks take cores."""
    torch_save_s: float
    torch_load_s: float
    megatron_save_s: float
    megatron_load_s: float


class OurSide:
    """One rank of the engine; callable with the name of a method, which it times."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._folder = folder
        self._engine = make_engine(workload.definition(), ("2*tp2",))
        fill_moments(self._engine)
        self._saver, self._async_saver = (
            CheckpointSaver(
                CheckpointFolder(folder),
                self._engine,
                log=lambda message: None,
                asynchronous=asynchronous,
            )
            for asynchronous in (False, True)
        )
        self._state: list[Tensor] = [
            self._engine.shards.parameters,
            self._engine.optimizer.exp_avg,
            self._engine.optimizer.exp_avg_sq,
        ]
        self._file = folder / f"rank{self._engine.rank}.pt"

    def __call__(self, method: str) -> tuple[float, Any]:
        return _timed(getattr(self, method))

    def save(self) -> None:
        """Synchronously."""
        self._saver.save(saved_state(self._engine, 1))

    def load(self) -> None:
        """The checkpoint of `save`; checksums are compared."""
        load_checkpoint(self._folder / "iter_0000001", self._engine, {})

    def save_asynchronously(self) -> tuple[float, float, float]:
        """Duration, stall and time lost (s) of a save during which iterations run."""
        saver, state = self._async_saver, saved_state(self._engine, 2)
        usual_s = statistics.median(self._iteration_s() for _ in range(NUM_BEFORE))
        start_s = time.perf_counter()
        saver.save(state)
        stall_s = time.perf_counter() - start_s
        num_iterations = 0
        while saver.is_saving:
            self._iteration_s()
            num_iterations += 1
            poll_s = time.perf_counter()
            saver.poll()
            stall_s += time.perf_counter() - poll_s
        save_s = time.perf_counter() - start_s
        return save_s, stall_s, max(0.0, save_s - num_iterations * usual_s)

    def _iteration_s(self) -> float:
        """Compute, update all of the state, wait for the other ranks; returns the time (s)."""
        start_s = time.perf_counter()
        time.sleep(COMPUTE_S)
        for flat in self._state:
            flat.mul_(1.0)
        dist.barrier()
        return time.perf_counter() - start_s

    def torch_save(self) -> None:
        """One file a rank, with nothing but the flat shards."""
        with self._file.open("wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        """Into the flat shards."""
        for mine, saved in zip(self._state, torch.load(self._file, weights_only=True), strict=True):
            mine.copy_(saved)


class MegatronSide:
    """One rank of plain megatron-core, trained for a step so that there is optimizer state."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        self._folder = folder
        self._plain = PlainMegatron(tp=2, pp=1, workload=workload)
        self._plain.train(range(1))

    def __call__(self, method: str) -> tuple[float, Any]:
        return _timed(getattr(self, method))

    def save(self) -> None:
        """Upstream's writer saves."""
        self._plain.save(self._folder / "checkpoint", 1, "fully_reshardable")

    def load(self) -> None:
        """Upstream's reader loads."""
        self._plain.load(self._folder / "checkpoint")


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    start_s = time.perf_counter()
    result = action()
    dist.barrier()
    return time.perf_counter() - start_s, result


def measure(
    workload: Workload, root: Path, num_rounds: int, advance: Callable[[], None]
) -> tuple[list[Round], dict[str, int]]:
    """Rounds, and bytes of each kind; interleaved. The first of the rounds is for warming up."""
    ours, plain = root / "ours", root / "megatron"
    for folder in (ours, plain):
        folder.mkdir()
    rounds = []
    with (
        RankSet("ours", NUM_RANKS, lambda: OurSide(workload, ours)) as our_ranks,
        RankSet("megatron-core", NUM_RANKS, lambda: MegatronSide(workload, plain)) as plain_ranks,
    ):

        def time_s(ranks: RankSet, method: str) -> float:
            return max(seconds for seconds, _ in ranks.call(method))

        for _ in range(num_rounds + 1):
            shutil.rmtree(plain / "checkpoint", ignore_errors=True)
            saves_s = time_s(our_ranks, "save"), time_s(our_ranks, "torch_save")
            by_rank = [times for _, times in our_ranks.call("save_asynchronously")]
            async_save_s, async_stall_s, async_lost_s = map(max, zip(*by_rank, strict=True))
            megatron_save_s = time_s(plain_ranks, "save")
            rounds.append(
                Round(
                    save_s=saves_s[0],
                    load_s=time_s(our_ranks, "load"),
                    async_save_s=async_save_s,
                    async_stall_s=async_stall_s,
                    async_lost_s=async_lost_s,
                    torch_save_s=saves_s[1],
                    torch_load_s=time_s(our_ranks, "torch_load"),
                    megatron_save_s=megatron_save_s,
                    megatron_load_s=time_s(plain_ranks, "load"),
                )
            )
            advance()
    files = {
        "ours": (ours / "iter_0000001").iterdir(),
        "torch.save": ours.glob("*.pt"),
        "megatron-core": (plain / "checkpoint").iterdir(),
    }
    sizes = {name: sum(path.stat().st_size for path in paths) for name, paths in files.items()}
    return rounds, sizes


def ratio(rounds: Sequence[Round], name: str) -> RatioEstimate:
    """One of RATIOS, paired by round."""
    above, below = ([getattr(each, field) for each in rounds] for field in RATIOS[name])
    return paired_ratio(above, below)


def tables(rounds: Sequence[Round], sizes: dict[str, int]) -> list[Table]:
    """Times with their spread, then ratios."""
    times = figures_table(
        f"{NUM_RANKS} ranks, {len(rounds)} rounds: s, median [least, most]",
        ("",),
        ("save", "load", "MB"),
    )

    def spread(name: str) -> str:
        values = [getattr(each, name) for each in rounds]
        return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"

    for name, save, load in (
        ("ours", "save_s", "load_s"),
        ("torch.save", "torch_save_s", "torch_load_s"),
        ("megatron-core", "megatron_save_s", "megatron_load_s"),
    ):
        times.add_row(name, spread(save), spread(load), f"{sizes[name] / BYTES_PER_MB:.1f}")
    times.add_row("ours, asynchronous", spread("async_save_s"), "", "")
    times.add_row("of which stall", spread("async_stall_s"), "", "")
    times.add_row("lost in all, with slower iterations", spread("async_lost_s"), "", "")
    ratios = figures_table("Ratios: median over rounds, bootstrap interval", ("",), ("[95 %]",))
    for name in RATIOS:
        ratios.add_row(name, str(ratio(rounds, name)))
    return [times, ratios]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = make_parser("checkpoints", "Save and load of four ranks, against two others.")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="measured rounds")
    parser.add_argument("--layers", type=positive, default=6, metavar="N", help="of the model")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="on the disk to write to")
    options = parser.parse_args(arguments)
    console = results_console()
    use_cpu()
    workload = Workload(
        shape=llama_shape(
            num_layers=options.layers, hidden_size=384, ffn_hidden_size=1024, vocab_size=8192
        )
    )
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as root,
        counted_progress("rounds") as progress,
    ):
        task = progress.add_task("save and load", total=options.rounds + 1)
        rounds, sizes = measure(
            workload, Path(root), options.rounds, lambda: progress.advance(task)
        )
    first, *rounds = rounds
    for table in tables(rounds, sizes):
        console.print(table)
    console.print(
        f"The first asynchronous save of a run stalls it for {first.async_stall_s:.3f} s of "
        f"{first.async_save_s:.3f} s.\n"
        f"Goal: a stall of at most {STALL_GOAL:.0%} of an asynchronous save; it is "
        f"{ratio(rounds, STALL).value:.1%}."
    )
    figures = {"bytes": sizes, "first": asdict(first), "rounds": [asdict(each) for each in rounds]}
    write_figures(console, options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
