"""Measures what starting a job costs a rank as the job grows: CPU time, store traffic, groups.

Ranks are forks of a process that has imported everything and run the training program up to the end
of its first iteration: all ranks of a job together, by gloo, or a few ranks alone, with a backend
whose collectives do nothing, up to their first gather. So a rank of a job of any size can be
measured. Rank 0 comes first and plans for the others.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.table import Table

from benchmarks.command import (
    environment,
    make_parser,
    positive,
    use_cpu,
    write_figures,
)
from megatron.hydraulis.terminal import figures_table, results_console
from tests.support.counted_store import CountedStore

SEQUENCES_PER_RANK = 1
RANKS_PER_NODE = 8
TIMEOUT_S = 1500.0


@dataclass(frozen=True)
class RankStart:
    """The start of one rank."""

    rank: int
    cpu_s: dict[str, float]
    """By phase, in their order; of all threads of the process."""
    num_requests: dict[str, int]
    """To the job's store, by whose key it is and kind."""
    num_bytes: dict[str, int]
    """Keys and values of these requests."""
    num_groups: int
    """Process groups that this rank is in."""
    num_groups_of_job: int
    private_bytes: int
    """Memory that the rank does not share with the process that it is a fork of."""


class Meter:
    """CPU time by phase, and requests to the store, of this rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._last_s = time.process_time()
        self._cpu_s: dict[str, float] = {}
        self.store: CountedStore | None = None

    def mark(self, phase: str) -> None:
        """End a phase."""
        now_s = time.process_time()
        self._cpu_s[phase] = self._cpu_s.get(phase, 0.0) + now_s - self._last_s
        self._last_s = now_s

    def write(self, engine: Any) -> None:
        """Write the file of this rank."""
        assert self.store is not None
        groups = engine.groups._groups.values()
        start = RankStart(
            rank=engine.rank,
            cpu_s=self._cpu_s,
            num_requests=dict(self.store.num_requests),
            num_bytes=dict(self.store.num_bytes),
            num_groups=sum(isinstance(group, dist.ProcessGroup) for group in groups) + 2,
            num_groups_of_job=engine.groups.num_created,
            private_bytes=_private_bytes(),
        )
        path = self._folder / f"start{engine.rank}.json"
        path.write_text(json.dumps(asdict(start)), encoding="utf-8")


def measured_program(folder: Path, argv: Sequence[str], *, alone: bool) -> None:
    """The training program on one rank, measured up to the end of its first iteration."""
    from megatron.hydraulis.loop import entry
    from megatron.hydraulis.loop.job import UserHooks
    from megatron.hydraulis.runtime import engine

    meter = Meter(folder)
    real_meet, real_init, real_registry = entry.meet, dist.init_process_group, engine.GroupRegistry

    def meet(timeout: timedelta) -> tuple[dist.Store, int, int]:
        meter.mark("flags, cost model, data")
        if alone:
            rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            store: dist.Store = dist.FileStore(str(folder / "store"), num_ranks)
        else:
            store, rank, num_ranks = real_meet(timeout)
        meter.store = CountedStore(store)
        meter.mark("meeting")
        return meter.store, rank, num_ranks

    def init_process_group(backend: str, **options: Any) -> None:
        real_init("fake" if alone else backend, **options)
        meter.mark("group of all ranks")

    class Registry(real_registry):  # type: ignore[misc, valid-type]
        def __init__(self, *positional: Any, **named: Any) -> None:
            meter.mark("upstream's preparations")
            super().__init__(*positional, **named)
            meter.mark("groups of the pool")

    class MeasuredEngine(engine.RuntimeEngine):
        is_measured = False

        def __init__(self, *positional: Any, **named: Any) -> None:
            super().__init__(*positional, **named)
            meter.mark("catalogue, layout, shards")

        def forward_backward(self, strategy_name: str, *positional: Any, **named: Any) -> Any:
            if not self.is_measured:
                meter.mark("first plan")
                for strategy in self.pool.strategies:
                    self.runtime_of(strategy.name)
                meter.mark("transfer plans, models")
                if alone:
                    meter.write(self)
                    os._exit(0)
            return super().forward_backward(strategy_name, *positional, **named)

        def optim_step(self, *positional: Any, **named: Any) -> Any:
            outcome = super().optim_step(*positional, **named)
            if not self.is_measured:
                self.is_measured = True
                meter.mark("first iteration")
                meter.write(self)
            return outcome

    entry.meet = meet  # type: ignore[assignment]
    entry.dist.init_process_group = init_process_group  # type: ignore[assignment]
    engine.GroupRegistry = Registry  # type: ignore[misc]
    if alone:
        dist.all_gather_object = _all_gather_object  # type: ignore[assignment]
    entry.main(argv, UserHooks(engine=MeasuredEngine))


def _all_gather_object(gathered: list[Any], own: Any, group: Any = None) -> None:
    gathered[:] = [own] * len(gathered)


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(private)


def strategies_of(num_ranks: int) -> dict[str, str]:
    """Strategies like those of examples/pool_64_ranks.json for a multiple of 16 ranks."""
    return {
        "tp16": f"{num_ranks // 16}*tp16",
        "mixed": f"tp8+{(num_ranks - 8) // 4}*tp4",
        "pipelines": f"{num_ranks // 8}*tp4pp2",
        "waves": f"{num_ranks // 8}*tp2cp4~",
    }


def command_of(num_ranks: int, folder: Path) -> list[str]:
    """The program's flags; writes corpus and pool."""
    from tests.support.tiny_corpus import tiny_command, write_corpus

    pool = {
        "num_ranks": num_ranks,
        "ranks_per_node": RANKS_PER_NODE,
        "strategies": [
            {"name": name, "replicas": text} for name, text in strategies_of(num_ranks).items()
        ],
    }
    (folder / "pool.json").write_text(json.dumps(pool), encoding="utf-8")
    num_documents = 4 * SEQUENCES_PER_RANK * num_ranks
    corpus = write_corpus(folder / "tiny", [8 + 5 * (i % 17) for i in range(num_documents)])
    return tiny_command(
        corpus,
        folder / "run",
        *("--strategy-pool", str(folder / "pool.json"), "--ranks-per-node", str(RANKS_PER_NODE)),
        *("--split", "100,0,0"),
        *("--num-layers", "4", "--hidden-size", "64", "--ffn-hidden-size", "64"),
        *("--num-attention-heads", "16", "--num-query-groups", "16"),
        *("--global-batch-size", str(SEQUENCES_PER_RANK * num_ranks), "--train-iters", "2"),
        *("--distributed-timeout-minutes", "20"),
    )


def measure(num_ranks: int, ranks: Sequence[int] | None) -> list[RankStart]:
    """The starts of these ranks, alone; of all ranks, together, if None."""
    from tests.support.forked_job import run_job
    from tests.support.forked_ranks import IN_MEMORY

    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        folder = Path(name)
        argv = command_of(num_ranks, folder)
        program = partial(measured_program, folder, alone=ranks is not None)
        # One after another if alone, as rank 0 leaves its plan in the store.
        for started in [None] if ranks is None else [[rank] for rank in ranks]:
            run_job(
                argv,
                num_ranks,
                folder / "output",
                program=program,
                started=started,
                timeout_s=TIMEOUT_S,
            ).assert_succeeded()
        files = sorted(folder.glob("start*.json"))
        return sorted(
            (RankStart(**json.loads(path.read_text())) for path in files), key=lambda s: s.rank
        )


def figures_of(starts: Sequence[RankStart]) -> dict[str, float]:
    """Figures of a rank: the median of ranks other than 0, and rank 0 where it differs."""
    first, *others = starts
    figures: dict[str, float] = {}
    for phase, cpu_s in first.cpu_s.items():
        figures[f"CPU ms, {phase}"] = 1e3 * statistics.median(s.cpu_s[phase] for s in others)
        if phase == "first plan":
            figures[f"CPU ms, {phase}, rank 0"] = 1e3 * cpu_s
    kinds = sorted({kind for start in starts for kind in start.num_requests})
    for what, of in (("requests", "num_requests"), ("bytes", "num_bytes")):
        for kind in kinds:
            median = statistics.median(getattr(start, of).get(kind, 0) for start in others)
            figures[f"store {what}, {kind}"] = median
            if getattr(first, of).get(kind, 0) != median:
                figures[f"store {what}, {kind}, rank 0"] = getattr(first, of).get(kind, 0)
    figures["groups that a rank is in, at most"] = max(start.num_groups for start in starts)
    figures["groups of the job"] = first.num_groups_of_job
    figures["private MB"] = 1e-6 * statistics.median(start.private_bytes for start in others)
    return figures


def ranks_alone(num_ranks: int) -> list[int]:
    """Ranks of a job that are measured alone: with rank 0, of the first and last replicas."""
    return [0, 1, num_ranks // 2 + 1, num_ranks - 1]


def multiple_of_16(text: str) -> int:
    """A number of ranks, for argparse."""
    value = positive(text)
    if value % 16:
        raise argparse.ArgumentTypeError(f"must be a multiple of 16 but is {value}")
    return value


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser("startup", "What starting a job costs a rank as the job grows.")
    for name, sizes, text in (
        ("--together", [16, 32, 64], "jobs of which all ranks run"),
        ("--alone", [64, 256, 1024], "jobs of which a few ranks run, each alone"),
    ):
        parser.add_argument(
            name, type=multiple_of_16, nargs="*", default=sizes, metavar="N", help=text
        )
    options = parser.parse_args(argv)
    console = results_console()
    use_cpu()
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # the backend `fake`
    found: dict[str, dict[int, dict[str, float]]] = {"together": {}, "alone": {}}
    jobs = [("together", n) for n in options.together] + [("alone", n) for n in options.alone]
    for kind, num_ranks in jobs:
        start_s = time.monotonic()
        ranks = ranks_alone(num_ranks) if kind == "alone" else None
        found[kind][num_ranks] = figures_of(measure(num_ranks, ranks))
        console.print(f"{kind}, {num_ranks} ranks: {time.monotonic() - start_s:.0f} s")
    for kind, by_size in found.items():
        if by_size:
            console.print(_table(kind, by_size))
    write_figures(console, options.json, {"environment": environment(), "figures": found})


def _table(kind: str, by_size: dict[int, dict[str, float]]) -> Table:
    sizes = sorted(by_size)
    names = list(dict.fromkeys(name for size in sizes for name in by_size[size]))
    table = figures_table(f"Ranks {kind}", ("of a rank",), [*map(str, sizes), "grows as N^"])
    for name in names:
        values = [by_size[size].get(name, 0.0) for size in sizes]
        exponent = ""
        if len(sizes) > 1 and values[0] > 0 and values[-1] > 0:
            exponent = f"{math.log(values[-1] / values[0], sizes[-1] / sizes[0]):.2f}"
        table.add_row(name, *(f"{value:,.0f}" for value in values), exponent)
    return table


if __name__ == "__main__":
    main()
