"""FlexSP's setting with its constants: what grouping the ranks by the batch gains.

Sequence-parallel groups of 1 to 64 of 64 ranks, 512 sequences an iteration, at most 192K tokens a
sequence; time and memory by the published model (`data/flexsp_reference.json`). `README.md` says
what is assumed.

    python -m benchmarks.flexsp
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress
from rich.table import Table

from benchmarks.command import wide_console
from benchmarks.long_tail import LongTail
from benchmarks.planner_batches import DATA
from megatron.hydraulis.cost_model.context import ContextCosts
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme
from megatron.hydraulis.simulator.results import SimulationSettings, WayResult, simulate_way
from megatron.hydraulis.simulator.simulation import ReplicaTasks
from megatron.hydraulis.simulator.ways import (
    BALANCED,
    CP_ONLY,
    PER_BATCH,
    Ways,
    context_group_pools,
)
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

NUM_RANKS = 64
RANKS_PER_NODE = 8
USABLE_MB = 30 * 1024
SEQ_LENGTH = 191_872
"""192K tokens, less what the reference drops: longer sequences are left out there."""
ROUNDED_TO = 128
NUM_SEQUENCES = 512
STATIC_WIDTH = 64
"""Of the published static baseline."""
MB_PER_GB = 1024
STATE_BYTES = 16
ACTIVATION_BYTES = 2
NUM_ALL_TO_ALLS = 8
"""Of a layer's hidden states, forward and backward: 4·2 in the published formula."""
BYTES_PER_MB = 2**20
MODELS = ("gpt-7b", "gpt-13b", "gpt-30b")
MS_PER_S = 1e3


@dataclass(frozen=True)
class Cell:
    """One model on one corpus."""

    model: str
    corpus: str
    batches: tuple[tuple[int, ...], ...]

    @property
    def key(self) -> str:
        """As the reference calls it."""
        return f"{self.model.removeprefix('gpt-')}-192K-{self.corpus}"


def cost_profile(reference: Mapping[str, Any], model: str) -> ProfileCostModel:
    """The published time and memory model as a cost profile; a group of d ranks is a scheme cp d.

    ``(a1·Σs² + a2·Σs) / d + b1 + all-to-all`` ms; a rank has room for what 30 GB leave beside
    ZeRO-3's states.
    """
    constants = reference["models"][model]
    states_mb = constants["P_192K"] * STATE_BYTES * MB_PER_GB / NUM_RANKS
    tokens_per_rank = (USABLE_MB - states_mb) / constants["act_MB_per_token"]
    mb_per_token = (
        NUM_ALL_TO_ALLS
        * constants["layers"]
        * constants["hidden"]
        * ACTIVATION_BYTES
        / BYTES_PER_MB
    )
    rows = []
    for width in (2**power for power in range(int(math.log2(NUM_RANKS)) + 1)):
        exchange_ms = 0.0
        if width > 1:
            exchange_ms = mb_per_token / width / reference["alltoall_MB_per_ms"][str(width)]
        rows.append(
            ProfiledScheme(
                scheme=Scheme(cp=width),
                coefficients=Coefficients(
                    constants["a1"] / width, constants["a2"] / width + exchange_ms, constants["b1"]
                ),
                max_tokens=int(tokens_per_rank * width),
            )
        )
    return ProfileCostModel(
        device="A100-40GB", source=reference["source"], date="2024", schemes=tuple(rows)
    )


def cells(reference: Mapping[str, Any], num_batches: int) -> list[Cell]:
    """The frozen Wikipedia batches for every model; CommonCrawl-like ones where they were used."""
    content = json.loads((DATA / "flexsp_batches.json").read_text("utf-8"))
    wikipedia = tuple(tuple(batch) for batch in content["batches"][:num_batches])
    published = reference["published_speedup_over"]
    found = [Cell(model, "wikipedia", wikipedia) for model in MODELS]
    for model in MODELS:
        cell = Cell(model, "commoncrawl", _long_tail_batches(num_batches))
        if any(cell.key in by_cell for by_cell in published.values()):
            found.append(cell)
    return found


def _long_tail_batches(num_batches: int) -> tuple[tuple[int, ...], ...]:
    """By the law of long_tail.py, rounded up and dropped as the published batches are."""
    corpus = LongTail().corpus(1_000_000)
    rounded = -(-corpus // ROUNDED_TO) * ROUNDED_TO
    kept = rounded[rounded <= SEQ_LENGTH]
    generator = np.random.default_rng(0)
    return tuple(
        tuple(int(length) for length in generator.choice(kept, size=NUM_SEQUENCES))
        for _ in range(num_batches)
    )


@dataclass(frozen=True)
class CellResult:
    """Seconds of all batches of a cell."""

    cell: Cell
    static: WayResult
    """Groups of 64."""
    best_static: WayResult
    per_batch: WayResult
    groups: WayResult

    def in_step_s(self, result: WayResult) -> float:
        """If all groups began their micro-batches together, as ZeRO-3's gathers make them."""
        return sum(
            sum(
                max(times_ms)
                for times_ms in itertools.zip_longest(
                    *(_falling_ms(replica) for replica in iteration.replicas), fillvalue=0.0
                )
            )
            for iteration in result.iterations
        ) / (MS_PER_S)


def _falling_ms(replica: ReplicaTasks) -> list[float]:
    """Times of a replica's micro-batches, longest first: then groups wait least for one another."""
    operations = replica.by_stage[0]
    by_batch: dict[int, float] = {}
    for operation in operations:
        by_batch[operation.micro_batch] = (
            by_batch.get(operation.micro_batch, 0.0) + operation.work_ms
        )
    return sorted(by_batch.values(), reverse=True)


def run_cell(cell: Cell, reference: Mapping[str, Any]) -> CellResult:
    """All ways on the batches of a cell."""
    profile = cost_profile(reference, cell.model)
    costs = ContextCosts(profile=profile)
    static = Strategy.parse(
        f"{NUM_RANKS // STATIC_WIDTH}*cp{STATIC_WIDTH}", NUM_RANKS, ranks_per_node=RANKS_PER_NODE
    )
    setting = SimulationSettings()

    def ways(pool: Pool, seq_length: int | None) -> Ways:
        return Ways(
            batches=cell.batches,
            pool=pool,
            profile=profile,
            context_costs=costs,
            seq_length=seq_length,
            plan_time_s=0.0,
        )

    def run(name: str, seq_length: int | None) -> WayResult:
        candidates = ways(Pool.of(static), seq_length).candidates(name)
        result = simulate_way(name, candidates, setting)
        assert result is not None  # a group of all ranks holds any sequence
        return result

    alone = ways(Pool.of(static), SEQ_LENGTH)
    of_64 = [
        candidate
        for candidate in alone.candidates(BALANCED)
        if candidate[1][0].strategy.schemes == static.schemes
    ]
    static_result = simulate_way(BALANCED, of_64, setting)
    assert static_result is not None
    # A batch needs groups for its own longest sequence alone, where every batch is grouped anew.
    return CellResult(
        cell,
        static=static_result,
        best_static=run(BALANCED, SEQ_LENGTH),
        per_batch=run(PER_BATCH, None),
        groups=_grouped(ways(Pool.of(static), None), setting),
    )


def _grouped(ways: Ways, setting: SimulationSettings) -> WayResult:
    """Groups of several widths, for each batch those that hold its longest sequence."""
    pools = context_group_pools(
        ways.context_costs,
        num_ranks=NUM_RANKS,
        ranks_per_node=RANKS_PER_NODE,
        longest=min(max(batch) for batch in ways.batches),
    )
    (pool,) = pools.values()
    works = ways.planned(pool, ways.context_costs, shortlists=True)
    result = simulate_way(CP_ONLY, [(ways.context_costs, works)], setting)
    assert result is not None
    return result


def gain_table(results: Sequence[CellResult], reference: Mapping[str, Any]) -> Table:
    """What groups gain over static ones and over the best equal ones of a batch."""
    published = reference["published_speedup_over"]
    table = Table(title="Groups of several widths: gain over", title_justify="left")
    table.add_column("cell", no_wrap=True)
    for name in (
        "groups\nof 64",
        "the same,\nin step",
        "best\nstatic",
        "best equal\nper batch",
        "the same,\nin step",
        "published,\nDeepSpeed",
        "published,\nMegatron",
    ):
        table.add_column(name, justify="right")
    for result in results:
        groups_s, groups_in_step_s = result.groups.time_s, result.in_step_s(result.groups)
        table.add_row(
            result.cell.key,
            f"{result.static.time_s / groups_s:.2f}",
            f"{result.in_step_s(result.static) / groups_in_step_s:.2f}",
            f"{result.best_static.time_s / groups_s:.2f}",
            f"{result.per_batch.time_s / groups_s:.2f}",
            f"{result.in_step_s(result.per_batch) / groups_in_step_s:.2f}",
            *(_shown(published[system].get(result.cell.key)) for system in published),
        )
    table.caption = (
        "In step: every group begins its next micro-batch when all have finished the last one, as "
        "under ZeRO-3; otherwise groups wait at the end of the iteration only."
    )
    return table


def time_table(results: Sequence[CellResult], reference: Mapping[str, Any]) -> Table:
    """Seconds, beside what the reference's solver predicts of the same batches."""
    predicted = reference["reference_solver_predictions_s"]
    table = Table(title="All batches of a cell, s", title_justify="left")
    table.add_column("cell", no_wrap=True)
    for name in (
        "groups of 64",
        "best static",
        "best equal per batch",
        "several widths",
        "in step",
    ):
        table.add_column(name, justify="right")
    for result in results:
        table.add_row(
            result.cell.key,
            *(
                f"{way.time_s:.2f}"
                for way in (result.static, result.best_static, result.per_batch, result.groups)
            ),
            f"{result.in_step_s(result.groups):.2f}",
        )
    table.add_section()
    table.add_row(
        "reference solver, 7b",
        f"{predicted['static_sp64']:.2f}",
        "–",
        f"{predicted['best_homogeneous_sp_per_batch']:.2f}",
        "–",
        f"{predicted['flexsp']:.2f}",
    )
    used = ", ".join(f"{num}x {name}" for name, num in results[0].groups.num_uses.most_common(4))
    table.caption = f"{results[0].cell.key} uses {used}. In step: of several widths."
    return table


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate all cells and print both tables."""
    options = _parser().parse_args(arguments)
    console = wide_console()
    reference = json.loads((DATA / "flexsp_reference.json").read_text("utf-8"))
    results = []
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for cell in progress.track(cells(reference, options.batches)):
            results.append(run_cell(cell, reference))
    console.print(gain_table(results, reference))
    console.print(time_table(results, reference))
    if options.json is not None:
        content = [
            {
                "cell": result.cell.key,
                "static_s": result.static.time_s,
                "best_static_s": result.best_static.time_s,
                "best_equal_per_batch_s": result.per_batch.time_s,
                "several_widths_s": result.groups.time_s,
                "several_widths_in_step_s": result.in_step_s(result.groups),
                "best_equal_per_batch_in_step_s": result.in_step_s(result.per_batch),
            }
            for result in results
        ]
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {options.json}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flexsp",
        description="FlexSP's setting with its constants: what grouping the ranks by batch gains.",
    )
    parser.add_argument(
        "--batches", type=int, default=8, help="of each cell, at most 8 (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
