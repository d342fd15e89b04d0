"""Save and load of four ranks, against plain torch.save and plain megatron-core.

The state is the same in size: fp32 parameters and two moments. Ours and torch's are those of one
engine, each rank writing what it owns; megatron-core writes a model with tp = 2 and its distributed
optimizer's state, fully reshardable, by its own writer. All write to the same disk and fsync.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from benchmarks.command import (
    counted_progress,
    figures_table,
    import_on_cpu,
    make_parser,
    positive,
    wide_console,
    write_figures,
)
from benchmarks.paired_statistics import RatioEstimate, paired_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.workload import Workload

NUM_RANKS = 4
GOAL_STALL = 0.05
"""Most of an asynchronous save's duration for which training may stand still."""
COMPUTE_S = 0.1
"""Of an iteration of the training that a save runs beside: ranks sleep, as they do while a GPU
computes."""
NUM_BEFORE = 5
"""Iterations before a save, to compare with."""
BYTES_PER_MB = 1e6
STALL = "stall / asynchronous save"


@dataclass(frozen=True)
class Measured:
    """One round; times of the slowest rank, after a barrier and up to one."""

    save_s: float
    load_s: float
    async_save_s: float
    async_stall_s: float
    async_lost_s: float
    torch_save_s: float
    torch_load_s: float
    megatron_save_s: float
    megatron_load_s: float


@dataclass(frozen=True)
class Beside:
    """A save beside training, as one rank sees it."""

    save_s: float
    """From its begin until the checkpoint is complete."""
    stall_s: float
    """Of that, inside the saver's calls, where training stands still."""
    lost_s: float
    """By how much longer its iterations took than they usually do, stalls included: an update
    copies every page that it shares with the fork, and forks take cores."""


class OurSide:
    """One rank of the engine; callable with what to do."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        from megatron.hydraulis.checkpoint.folder import CheckpointFolder
        from megatron.hydraulis.checkpoint.names import stored_parameters
        from megatron.hydraulis.checkpoint.saving import CheckpointSaver
        from tests.support.checkpoints import fill_moments, make_engine

        self._folder = folder
        self._engine = make_engine(workload.definition(), ("2*tp2",))
        fill_moments(self._engine)
        stored = stored_parameters(self._engine.definition)
        self._savers = {
            beside: CheckpointSaver(
                CheckpointFolder(folder), self._engine, stored, log=_quiet, asynchronous=beside
            )
            for beside in (False, True)
        }

    def __call__(self, what: str) -> Any:
        return _timed(getattr(self, what))

    def save(self) -> None:
        """In line."""
        from tests.support.checkpoints import saved_state

        self._savers[False].save(saved_state(self._engine, 1))

    def load(self) -> None:
        """What `save` wrote; checksums compared."""
        from megatron.hydraulis.checkpoint.loading import load_checkpoint

        load_checkpoint(self._folder / "iter_0000001", self._engine, {})

    def save_beside(self) -> Beside:
        """By a fork, beside iterations of which some run before, to compare with."""
        from tests.support.checkpoints import saved_state

        saver, state = self._savers[True], saved_state(self._engine, 2)
        usual_s = statistics.median(self._iteration() for _ in range(NUM_BEFORE))
        start_s = time.perf_counter()
        saver.save(state)
        stall_s = time.perf_counter() - start_s
        num_iterations = 0
        while saver.is_saving:
            self._iteration()
            num_iterations += 1
            poll_s = time.perf_counter()
            saver.poll()
            stall_s += time.perf_counter() - poll_s
        save_s = time.perf_counter() - start_s
        return Beside(save_s, stall_s, max(0.0, save_s - num_iterations * usual_s))

    def _iteration(self) -> float:
        """Of training: computes, updates all of the state, waits for the others; its time (s)."""
        import torch.distributed as dist

        start_s = time.perf_counter()
        time.sleep(COMPUTE_S)
        for flat in self._state:
            flat.mul_(1.0)
        dist.barrier()
        return time.perf_counter() - start_s

    def torch_save(self) -> None:
        """A file a rank, with nothing in it but the flat shards."""
        import torch

        with self._file.open("wb") as file:
            torch.save(self._state, file)
            file.flush()
            os.fsync(file.fileno())

    def torch_load(self) -> None:
        """Into the flat shards."""
        import torch

        for mine, saved in zip(self._state, torch.load(self._file, weights_only=True), strict=True):
            mine.copy_(saved)

    @property
    def _state(self) -> list[Tensor]:
        engine = self._engine
        return [engine.shards.parameters, engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq]

    @property
    def _file(self) -> Path:
        return self._folder / f"rank{self._engine.rank}.pt"


class MegatronSide:
    """One rank of plain megatron-core, trained for a step so that there is state."""

    def __init__(self, workload: Workload, folder: Path) -> None:
        from tests.support.plain_checkpoints import PlainMegatron

        self._folder = folder
        self._plain = PlainMegatron(tp=2, pp=1, workload=workload)
        self._plain.train(range(1))

    def __call__(self, what: str) -> Any:
        return _timed(getattr(self, what))

    def save(self) -> None:
        """By upstream's writer."""
        self._plain.save(self._folder / "checkpoint", 1, "fully_reshardable")

    def load(self) -> None:
        """By upstream's reader."""
        self._plain.load(self._folder / "checkpoint")


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    import torch.distributed as dist

    dist.barrier()
    start_s = time.perf_counter()
    result = action()
    dist.barrier()
    return time.perf_counter() - start_s, result


def _quiet(message: str) -> None:
    """The benchmark prints its own figures."""


def measure(workload: Workload, root: Path, num_rounds: int, advance: Any) -> Any:
    """(rounds, bytes of each kind); interleaved, the first of the rounds is for warming up."""
    from benchmarks.rank_set import RankSet

    ours, plain = root / "ours", root / "megatron"
    for folder in (ours, plain):
        folder.mkdir()
    rounds = []
    with (
        RankSet("ours", NUM_RANKS, lambda: OurSide(workload, ours)) as our_ranks,
        RankSet("megatron-core", NUM_RANKS, lambda: MegatronSide(workload, plain)) as plain_ranks,
    ):

        def time_s(ranks: RankSet, what: str) -> float:
            return max(answer[0] for answer in ranks.call(what))

        for _ in range(num_rounds + 1):
            shutil.rmtree(plain / "checkpoint", ignore_errors=True)
            save_s, torch_save_s = time_s(our_ranks, "save"), time_s(our_ranks, "torch_save")
            beside = our_ranks.call("save_beside")
            megatron_save_s = time_s(plain_ranks, "save")
            measured = Measured(
                save_s=save_s,
                load_s=time_s(our_ranks, "load"),
                async_save_s=max(answer[1].save_s for answer in beside),
                async_stall_s=max(answer[1].stall_s for answer in beside),
                async_lost_s=max(answer[1].lost_s for answer in beside),
                torch_save_s=torch_save_s,
                torch_load_s=time_s(our_ranks, "torch_load"),
                megatron_save_s=megatron_save_s,
                megatron_load_s=time_s(plain_ranks, "load"),
            )
            rounds.append(measured)
            advance()
    sizes = {
        "ours": _num_bytes(ours / "iter_0000001"),
        "torch.save": sum(path.stat().st_size for path in ours.glob("*.pt")),
        "megatron-core": _num_bytes(plain / "checkpoint"),
    }
    return rounds, sizes


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def ratios(rounds: Sequence[Measured]) -> dict[str, RatioEstimate]:
    """Paired by round."""

    def of(numerator: str, denominator: str) -> RatioEstimate:
        return paired_ratio(
            [getattr(each, numerator) for each in rounds],
            [getattr(each, denominator) for each in rounds],
        )

    return {
        "save / torch.save": of("save_s", "torch_save_s"),
        "load / torch.load": of("load_s", "torch_load_s"),
        "save / megatron-core's": of("save_s", "megatron_save_s"),
        "load / megatron-core's": of("load_s", "megatron_load_s"),
        STALL: of("async_stall_s", "async_save_s"),
        "stall / save in line": of("async_stall_s", "save_s"),
        "lost / asynchronous save": of("async_lost_s", "async_save_s"),
    }


def tables(rounds: Sequence[Measured], sizes: dict[str, int]) -> list[Table]:
    """Times with their spread, then ratios."""
    times = figures_table(
        f"{NUM_RANKS} ranks, {len(rounds)} rounds: s, median [least, most]",
        ("",),
        ("save", "load", "MB"),
    )

    def spread(name: str) -> str:
        values = [getattr(each, name) for each in rounds]
        return f"{statistics.median(values):.3f} \\[{min(values):.3f}, {max(values):.3f}]"

    for name, save, load in (
        ("ours", "save_s", "load_s"),
        ("torch.save", "torch_save_s", "torch_load_s"),
        ("megatron-core", "megatron_save_s", "megatron_load_s"),
    ):
        size = f"{sizes[name] / BYTES_PER_MB:.1f}"
        times.add_row(name, spread(save), spread(load), size)
    times.add_row("ours, beside training", spread("async_save_s"), "", "")
    times.add_row("of which training waits", spread("async_stall_s"), "", "")
    times.add_row("lost in all, with slower iterations", spread("async_lost_s"), "", "")
    related = figures_table("Ratios: median over rounds, bootstrap interval", ("",), ("[95 %]",))
    for name, estimate in ratios(rounds).items():
        related.add_row(name, str(estimate).replace("[", "\\["))
    return [times, related]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures."""
    options = _parser().parse_args(arguments)
    console = wide_console()
    import_on_cpu(console)
    from benchmarks.workload import Workload

    workload = Workload(
        num_layers=options.layers, hidden_size=384, ffn_hidden_size=1024, vocab_size=8192
    )
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as root,
        counted_progress(console, "rounds") as progress,
    ):
        task = progress.add_task("save and load", total=options.rounds + 1)
        rounds, sizes = measure(
            workload, Path(root), options.rounds, lambda: progress.advance(task)
        )
    first, *rounds = rounds
    for table in tables(rounds, sizes):
        console.print(table)
    stall = ratios(rounds)[STALL]
    console.print(
        "A run's first asynchronous save stalls it for "
        f"{first.async_stall_s:.3f} s of {first.async_save_s:.3f} s.\n"
        f"Goal: training stands still for at most {GOAL_STALL:.0%} of an asynchronous save's "
        f"duration; it is {stall.median:.1%}."
    )
    figures = {"bytes": sizes, "first": asdict(first), "rounds": [asdict(each) for each in rounds]}
    write_figures(console, options.json, figures)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("checkpoints", "Save and load of four ranks, against two others.")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="measured rounds")
    parser.add_argument("--layers", type=positive, default=6, metavar="N", help="of the model")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="on the disk to write to")
    return parser


if __name__ == "__main__":
    sys.exit(main())
