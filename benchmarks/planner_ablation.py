"""Simpler ways to plan a batch, each with one idea more, and where a rank's time goes.

Every method is given the same pool, cost model and 1F1B recurrence, and takes the strategy that is
fastest for it. The sequences come in the order in which they were drawn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import planner_batches as batches_of
from benchmarks.command import positive, wide_console
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.costs import PoolCosts, SchemeCost
from megatron.hydraulis.planner.greedy import best_fit, dispatch
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.simulator.fixed_length import deal_fixed_rows, deal_padded
from megatron.hydraulis.strategy import Pool, Strategy

METHODS = ("padding only", "fixed-length packing", "greedy dispatch + fixed length", "full planner")
_PERCENT = 100.0
_EQUAL = 1e-9
"""Times that differ by a smaller share are equal."""
_NUM_BATCHES = 210
_NUM_HARD_GROUPS = 2
_LONG_TOKENS = 4096
"""Of the hard batches: few sequences, all so long that no single one decides."""
PARTS = ("work", "padding", "micro-batch cost", "pipeline fill", "idle")


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """On one stage, without the constant cost."""

    work_ms: float
    padding_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodResult:
    """One method on one batch."""

    strategy: str
    time_ms: float
    parts_ms: dict[str, float]
    """By part, mean over all ranks; they add up to the time."""


class Ablation:
    """All methods on the batches of one pool."""

    def __init__(self, pool: Pool, cost_model: CostModel) -> None:
        self._pool = pool
        self._costs = PoolCosts(pool, cost_model)
        self._planner = CertifiedPlanner(pool, cost_model)

    def results(self, batch: Sequence[int]) -> dict[str, MethodResult]:
        """By method."""
        return {
            METHODS[0]: self._best(batch, _padded),
            METHODS[1]: self._best(batch, _fixed_rows),
            METHODS[2]: self._best(batch, _greedy),
            METHODS[3]: self._full(batch),
        }

    def _best(
        self,
        batch: Sequence[int],
        method: Callable[[Sequence[int], list[SchemeCost]], list[list[_MicroBatch]] | None],
    ) -> MethodResult:
        results = []
        for strategy in self._costs.feasible_strategies(batch, iteration=0):
            costs = self._costs.replica_costs(strategy)
            replicas = method(batch, costs)
            if replicas is not None:
                results.append(_result(strategy, costs, replicas))
        return min(results, key=lambda result: result.time_ms)

    def _full(self, batch: Sequence[int]) -> MethodResult:
        plan = self._planner.plan(batch)
        strategy = self._pool.strategy(plan.strategy)
        costs = self._costs.replica_costs(strategy)
        replicas = [
            [_micro_batch(micro_batch.lengths, cost) for micro_batch in replica.micro_batches]
            for replica, cost in zip(plan.replicas, costs, strict=True)
        ]
        return _result(strategy, costs, replicas)


def _padded(batch: Sequence[int], costs: list[SchemeCost]) -> list[list[_MicroBatch]] | None:
    """Every sequence padded to the longest, as many to a micro-batch as fit, dealt in turn.

    Only for equal replicas: padded rows are all alike, so plain data parallelism deals them out.
    """
    if len(set(costs)) > 1:
        return None
    cost = costs[0]
    row_ms = cost.sequence_time_ms(max(batch))

    def row_batch(members: Sequence[int]) -> _MicroBatch:
        work_ms = math.fsum(cost.sequence_time_ms(batch[sequence]) for sequence in members)
        return _MicroBatch(work_ms, len(members) * row_ms - work_ms)

    dealt = deal_padded(batch, len(costs), cost.max_tokens)
    return [[row_batch(members) for members in replica] for replica in dealt]


def _fixed_rows(batch: Sequence[int], costs: list[SchemeCost]) -> list[list[_MicroBatch]] | None:
    """Packed by best fit into rows as long as the longest sequence, dealt in turn.

    What is left of a row is padding that costs b but looks at nothing. As many rows to a
    micro-batch as fit. Only for equal replicas, as above.
    """
    if len(set(costs)) > 1:
        return None
    cost, row_tokens = costs[0], max(batch)
    b_ms = cost.coefficients.b_ms_per_token

    def row_batch(rows: Sequence[Sequence[int]]) -> _MicroBatch:
        lengths = [batch[sequence] for row in rows for sequence in row]
        padding_ms = b_ms * (len(rows) * row_tokens - sum(lengths))
        return _MicroBatch(_micro_batch(lengths, cost).work_ms, padding_ms)

    dealt = deal_fixed_rows(batch, len(costs), cost.max_tokens, row_tokens)
    return [[row_batch(rows) for rows in replica] for replica in dealt]


def _greedy(batch: Sequence[int], costs: list[SchemeCost]) -> list[list[_MicroBatch]] | None:
    """Longest processing time first; every replica packs by best fit up to its limit of tokens.

    Micro-batches of equal size, not of equal work, in the order in which they were opened. Without
    padding: a packed row may end anywhere.
    """
    shares = dispatch(_longest_first(batch), batch, costs)
    return [
        [
            _micro_batch([batch[sequence] for sequence in members], cost)
            for members in best_fit(share, batch, cost.max_tokens)
        ]
        for share, cost in zip(shares, costs, strict=True)
    ]


def _longest_first(batch: Sequence[int]) -> list[int]:
    return sorted(range(len(batch)), key=lambda sequence: (-batch[sequence], sequence))


def _micro_batch(lengths: Sequence[int], cost: SchemeCost) -> _MicroBatch:
    return _MicroBatch(math.fsum(cost.sequence_time_ms(length) for length in lengths))


def _result(
    strategy: Strategy, costs: Sequence[SchemeCost], replicas: Sequence[Sequence[_MicroBatch]]
) -> MethodResult:
    times_ms = []
    for micro_batches, cost in zip(replicas, costs, strict=True):
        c_ms = cost.coefficients.c_ms
        busy_ms = [m.work_ms + m.padding_ms + c_ms for m in micro_batches]
        times_ms.append(pipeline_time_ms(busy_ms, cost.num_stages))
    makespan_ms = max(times_ms)
    parts_ms = dict.fromkeys(PARTS, 0.0)
    num_ranks = strategy.num_ranks
    for replica, micro_batches, cost, time_ms in zip(
        strategy.replicas, replicas, costs, times_ms, strict=True
    ):
        share = len(replica.ranks) / num_ranks
        work_ms = math.fsum(m.work_ms for m in micro_batches)
        padding_ms = math.fsum(m.padding_ms for m in micro_batches)
        cost_ms = len(micro_batches) * cost.coefficients.c_ms
        # Not below 0 by a rounding error.
        fill_ms = max(0.0, time_ms - work_ms - padding_ms - cost_ms)
        amounts_ms = (work_ms, padding_ms, cost_ms, fill_ms, makespan_ms - time_ms)
        for part, amount_ms in zip(PARTS, amounts_ms, strict=True):
            parts_ms[part] += share * amount_ms
    return MethodResult(strategy=strategy.name, time_ms=makespan_ms, parts_ms=parts_ms)


# ---------------------------------------------------------------- one version against another


@dataclass(frozen=True, slots=True)
class _Case:
    """A batch to plan with both versions."""

    group: str
    pool: str
    """A pool file."""
    lengths: list[int]


def _cases(folder: Path) -> list[_Case]:
    """Batches, large and tiny, for many strategies and for one; pool files go into folder.

    The 210 that the planner is judged by, then 40 hard ones.
    """
    model, pool = batches_of.cost_model(), batches_of.pool()
    documents = batches_of.LengthDistribution()
    pools = {
        "64 ranks, S0-S6": pool,
        "S1 alone": Pool.of(pool.strategy("S1")),
        "S6 alone": Pool.of(pool.strategy("S6")),
        "1,024 ranks": batches_of.large_pool(),
    }
    files, longest = {}, {}
    for number, (name, of_name) in enumerate(pools.items()):
        path = folder / f"pool_{number}.json"
        path.write_text(json.dumps(of_name.to_json()), encoding="utf-8")
        files[name] = str(path)
        schemes = [s for strategy in of_name.strategies for s in strategy.schemes]
        longest[name] = min(batches_of.CONTEXT_TOKENS, max(map(model.max_tokens, schemes)))
    cases: list[_Case] = []

    def add(group: str, pool_name: str, batches: Iterable[list[int]]) -> None:
        cases.extend(_Case(f"{pool_name}: {group}", files[pool_name], batch) for batch in batches)

    every, *alone, large = pools
    wikipedia = [documents.batch(seed, batches_of.BATCH_TOKENS) for seed in range(30)]
    add("Wikipedia, instance B", every, [*wikipedia, batches_of.instance_b()])
    for num in (6, 8, 20, 64):
        add(f"{num} sequences", every, (documents.draw(seed, num) for seed in range(30)))
    for name in alone:
        few = (documents.draw(seed, 5 + seed, longest[name]) for seed in range(20))
        add("5 to 24 sequences", name, few)
    s6 = alone[-1]
    tokens = batches_of.BATCH_TOKENS
    add("Wikipedia", s6, (documents.batch(seed, tokens, longest[s6]) for seed in range(10)))
    tokens = batches_of.LARGE_BATCH_TOKENS
    cuts = batches_of.LARGE_CUTS_TOKENS
    add("Wikipedia", large, (documents.batch(s, tokens, cut) for cut in cuts for s in range(3)))
    assert len(cases) == _NUM_BATCHES
    for name in alone:
        few = (
            documents.draw(seed, 5 + seed, longest[name], shortest_tokens=_LONG_TOKENS)
            for seed in range(20)
        )
        add("5 to 24 long sequences", name, few)
    return cases


class _Side:
    """A process that plans with one version of the package."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("plan_batches.py"))],
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def plan(self, case: _Case) -> dict[str, Any]:
        """What the process answers."""
        profile = str(batches_of.ROOT / "examples/cost_profile_llama32b_a800.json")
        request = {"pool": case.pool, "cost_profile": profile, "lengths": case.lengths}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@contextlib.contextmanager
def _tree(version: str, folder: Path) -> Iterator[Path]:
    """The folder of a version: one that exists, or that of a git revision, unpacked."""
    if Path(version).is_dir():
        yield Path(version).resolve()
        return
    tree = folder / f"tree_{version}"
    tree.mkdir()
    archive = subprocess.run(
        ["git", "archive", version, "megatron"],
        cwd=batches_of.ROOT,
        check=True,
        capture_output=True,
    )
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
    yield tree


def compare(before: str, after: str, num_rounds: int) -> list[dict[str, Any]]:
    """Every batch planned by both versions in turn; CPU times are the least of all rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with _tree(before, folder) as old, _tree(after, folder) as new:
            cases = _cases(folder)
            sides = {"before": _Side(old), "after": _Side(new)}
            found: list[dict[str, Any]] = [{"group": case.group} for case in cases]
            for _ in range(num_rounds):
                for case, result in zip(cases, found, strict=True):
                    for side, process in sides.items():
                        answer = process.plan(case)
                        earlier = result.get(side, answer)
                        answer["cpu_s"] = min(answer["cpu_s"], earlier["cpu_s"])
                        result[side] = answer
            for process in sides.values():
                process.close()
    return found


def _version_table(found: Sequence[dict[str, Any]], before: str, after: str) -> Table:
    table = Table(title=f"plans of {before} against {after}", title_justify="left")
    table.add_column("batches", overflow="fold")
    for name in ("number", "slower", "faster", "sum %", "worst %", "gap %", "CPU s", "ratio"):
        table.add_column(name, justify="right")
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in found:
        groups.setdefault(result["group"], []).append(result)
    rows = [*groups.items()]
    everything = f"the first {_NUM_BATCHES}"
    rows.insert(len(groups) - _NUM_HARD_GROUPS, (everything, list(found[:_NUM_BATCHES])))
    for name, results in rows:
        table.add_row(name, *_version_row(results), style="bold" if name == everything else None)
    table.caption = (
        "Predicted times, after against before: plans that are slower or faster, change of their "
        "sum and of the worst plan. Largest gap and CPU time of one plan after another, before "
        "and after."
    )
    return table


def _version_row(results: Sequence[dict[str, Any]]) -> list[str]:
    def of(side: str, key: str) -> list[float]:
        return [result[side][key] for result in results]

    ratios = [result["after"]["time_ms"] / result["before"]["time_ms"] for result in results]
    gaps = {
        side: max(1.0 - result[side]["bound_ms"] / result[side]["time_ms"] for result in results)
        for side in ("before", "after")
    }
    cpu_s = {side: math.fsum(of(side, "cpu_s")) for side in ("before", "after")}
    total = math.fsum(of("after", "time_ms")) / math.fsum(of("before", "time_ms"))
    return [
        str(len(results)),
        str(sum(ratio > 1.0 + _EQUAL for ratio in ratios)),
        str(sum(ratio < 1.0 - _EQUAL for ratio in ratios)),
        f"{_PERCENT * (total - 1.0):+.4f}",
        f"{_PERCENT * (max(ratios) - 1.0):+.3f}",
        f"{_PERCENT * gaps['before']:.2f} -> {_PERCENT * gaps['after']:.2f}",
        f"{cpu_s['before']:.2f} -> {cpu_s['after']:.2f}",
        f"{cpu_s['after'] / cpu_s['before']:.3f}",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two versions."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_ablation",
        description="Plan 210 batches with two versions of the package, alternating on one core.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    version = "git revision, or a folder with megatron/hydraulis"
    parser.add_argument("--before", required=True, metavar="VERSION", help=version)
    parser.add_argument("--after", default=str(batches_of.ROOT), metavar="VERSION", help=version)
    parser.add_argument(
        "--rounds", type=positive, default=3, help="how often each batch is planned"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    options = parser.parse_args(arguments)
    found = compare(options.before, options.after, options.rounds)
    wide_console(140).print(_version_table(found, options.before, options.after))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
