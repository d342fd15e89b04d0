"""Memory of a rank in every iteration, for pools of 1, 3 and 7 strategies.

A rank is to need what the iteration's strategy needs: neither the sum over the pool nor the most of
any strategy. `README.md` says what is measured.

    python -m benchmarks.pool_memory
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import import_on_cpu, wide_console
from benchmarks.rank_set import RankSet
from megatron.hydraulis.strategy import Pool, Strategy

if TYPE_CHECKING:
    from benchmarks.iteration_block import PlannedIteration
    from benchmarks.workload import Workload

NUM_RANKS = 4
STRATEGIES = ("tp4", "2*tp2", "4*tp1", "pp4", "tp2+2*idle", "tp2+pp2", "pp2@3,0+tp2@1,2")
"""From the smallest parts of a model to the whole of it on every rank, with ranks that idle."""
POOL_SIZES = (1, 3, 7)
NUM_CYCLES = 2
"""Of all strategies of a pool: in the first one models are built, the last one counts."""
BYTES_PER_MB = 1e6
WIDTH = 110
"""Columns of the output where it is no terminal."""


@dataclass(frozen=True)
class IterationMemory:
    """Of one rank in one iteration, in bytes."""

    needed: int
    """Parameters and gradients of the rank's role in the strategy."""
    arenas: int
    """Storage of both arenas at their largest: the next strategy's parameters included."""
    staging: int
    """Of both slots, after the iteration."""
    shards: int
    """Parameters, gradients and moments that the rank owns, whatever the strategy."""
    resident: int
    """Of the process after the iteration, as the kernel counts it, less what it had as a fork."""
    peak_resident: int
    """The most during the iteration, by the same count: activations and messages included."""


class MemoryRank:
    """One rank; callable with an iteration and the strategy of the next one. Collective."""

    def __init__(self, workload: Workload, pool: Pool) -> None:
        from benchmarks.iteration_block import EngineRank

        self._at_fork = _status_bytes("VmRSS")
        self._rank = EngineRank(workload, pool)
        self._largest_arenas = 0
        memory = self._rank.engine.memory
        for name in ("size_parameters", "size_gradients", "release_gradients_unless"):
            setattr(memory, name, self._watched(getattr(memory, name)))

    def __call__(self, step: tuple[PlannedIteration, str]) -> IterationMemory:
        iteration, next_strategy = step
        engine = self._rank.engine
        gc.collect()
        give_back_freed_memory()
        self._largest_arenas = 0
        reset_peak()
        outcome = engine.train_step(
            iteration.strategy,
            self._rank.micro_batches(iteration),
            self._rank.forward_step,
            next_strategy=next_strategy,
        )
        assert outcome.updated
        engine.finish_regrouping()
        arena = engine.setting(iteration.strategy).arena
        item_bytes = engine.dtype.itemsize + engine.shards.gradients.element_size()
        shards, optimizer = engine.shards, engine.optimizer
        return IterationMemory(
            needed=0 if arena is None else arena.num_elements * item_bytes,
            arenas=self._largest_arenas,
            staging=engine.staging.num_bytes,
            shards=sum(
                tensor.nbytes
                for tensor in (
                    shards.parameters,
                    shards.gradients,
                    optimizer.exp_avg,
                    optimizer.exp_avg_sq,
                )
            ),
            resident=_status_bytes("VmRSS") - self._at_fork,
            peak_resident=_status_bytes("VmHWM") - self._at_fork,
        )

    def _watched(self, resize: Callable[[int], None]) -> Callable[[int], None]:
        memory = self._rank.engine.memory

        def call(num_elements: int) -> None:
            self._largest_arenas = max(self._largest_arenas, memory.num_bytes)
            resize(num_elements)
            self._largest_arenas = max(self._largest_arenas, memory.num_bytes)

        return call


@dataclass(frozen=True)
class PoolMemory:
    """The last cycle of a pool: by strategy, of every rank."""

    num_strategies: int
    by_strategy: dict[str, tuple[IterationMemory, ...]]

    def worst_rank(self, strategy: str, what: str) -> int:
        """Of the rank that has most of it."""
        return max(getattr(memory, what) for memory in self.by_strategy[strategy])

    def mean(self, strategy: str, what: str) -> float:
        """Over ranks."""
        return fmean(getattr(memory, what) for memory in self.by_strategy[strategy])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all pools, print the tables."""
    options = _parser().parse_args(arguments)
    console = wide_console(WIDTH)
    import_on_cpu(console)
    from benchmarks.workload import Workload

    workload = Workload(
        hidden_size=options.hidden_size,
        ffn_hidden_size=options.hidden_size * 3,
        num_micro_batches=NUM_RANKS,  # one each where every rank is a replica
    )
    console.print(
        f"{workload.shape.num_parameters / 1e6:.1f} M parameters, {NUM_RANKS} gloo ranks, "
        f"{workload.num_micro_batches} micro-batches of {workload.num_tokens_per_micro_batch} "
        f"tokens an iteration, fp32, torch {torch.__version__}"
    )
    with Progress(console=console) as progress:
        total = NUM_CYCLES * sum(POOL_SIZES)
        task = progress.add_task("iterations", total=total)
        pools = [
            measure(workload, STRATEGIES[:size], advance=lambda: progress.advance(task))
            for size in POOL_SIZES
        ]
    for table in _tables(pools):
        console.print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(_report(pools), indent=1) + "\n")
        console.print(f"written to {options.json}")
    return 0


def measure(workload: Workload, texts: Sequence[str], *, advance: Callable[[], None]) -> PoolMemory:
    """A pool's iterations, each in the next strategy, every strategy as often."""
    from benchmarks.iteration_block import PlannedIteration

    strategies = tuple(Strategy.parse(text, NUM_RANKS, name=text) for text in texts)
    pool = Pool(num_ranks=NUM_RANKS, ranks_per_node=NUM_RANKS, strategies=strategies)
    found: dict[str, tuple[IterationMemory, ...]] = {}
    with RankSet(f"pool of {len(texts)}", NUM_RANKS, lambda: MemoryRank(workload, pool)) as ranks:
        for number in range(NUM_CYCLES * len(strategies)):
            strategy, following = (strategies[(number + i) % len(strategies)] for i in (0, 1))
            step = (PlannedIteration.even(number, strategy, workload), following.name)
            found[strategy.name] = tuple(ranks.call(step))
            advance()
    return PoolMemory(len(texts), found)


def give_back_freed_memory() -> None:
    """To the kernel, what the allocator keeps of what was freed: it would hide what is needed."""
    ctypes.CDLL(None).malloc_trim(0)  # glibc, malloc_trim(3)


def reset_peak() -> None:
    """Let the kernel count the peak of this process's resident memory anew (Linux, proc(5))."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(key: str) -> int:
    """A memory figure of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024  # the kernel's kB are KiB
    raise OSError(f"/proc/self/status has no {key}; this benchmark needs Linux")


def _tables(pools: Sequence[PoolMemory]) -> list[Table]:
    arenas = Table(title="Arenas of a rank, MB: needed by the strategy, and had in each pool")
    arenas.add_column("strategy")
    arenas.add_column("needed,\nby rank", justify="right")
    for pool in pools:
        arenas.add_column(f"pool of {pool.num_strategies},\nby rank", justify="right")
    for strategy in pools[-1].by_strategy:
        needed = pools[-1].by_strategy[strategy]
        arenas.add_row(
            strategy,
            " ".join(f"{m.needed / BYTES_PER_MB:.1f}" for m in needed),
            *(
                " ".join(f"{m.arenas / BYTES_PER_MB:.1f}" for m in pool.by_strategy[strategy])
                if strategy in pool.by_strategy
                else "-"
                for pool in pools
            ),
        )
    arenas.caption = (
        "Storage of parameters and gradients, the most between the iteration's beginning and its "
        "end, when the next strategy's parameters have been gathered."
    )
    peaks = Table(title="Peak of a rank in an iteration, MB")
    peaks.add_column("strategy")
    for pool in pools:
        for what in ("resident", "staging"):
            peaks.add_column(f"{what},\npool of {pool.num_strategies}", justify="right")
    for strategy in pools[-1].by_strategy:
        cells = []
        for pool in pools:
            for what in ("peak_resident", "staging"):
                cells.append(
                    f"{pool.worst_rank(strategy, what) / BYTES_PER_MB:.1f}"
                    if strategy in pool.by_strategy
                    else "-"
                )
        peaks.add_row(strategy, *cells)
    shards = fmean(m.shards for m in pools[0].by_strategy[STRATEGIES[0]])
    peaks.caption = (
        "Of the rank that has most. Resident: the process's peak, after freed memory was given "
        "back to the kernel, less what it had when it was forked: arenas, staging, activations, "
        f"messages, the {shards / BYTES_PER_MB:.1f} MB of shards and optimizer state, and what "
        "libraries keep."
    )
    return [arenas, peaks]


def _report(pools: Sequence[PoolMemory]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "torch": torch.__version__,
        "pools": [
            {
                "num_strategies": pool.num_strategies,
                "by_strategy": {
                    name: [asdict(memory) for memory in ranks]
                    for name, ranks in pool.by_strategy.items()
                },
            }
            for pool in pools
        ],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool_memory",
        description="Memory of a rank in every iteration, for pools of 1, 3 and 7 strategies.",
    )
    parser.add_argument(
        "--hidden-size", type=int, default=512, help="of the model (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
