"""Plans and planning times of two versions of the package on the same batches.

    python -m benchmarks.planner_ablation --before REVISION

Each version has one process for all batches (`planner_ablation_worker`), and they take turns, so
that other work on the machine affects both.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks import inputs
from benchmarks.command import figures_table, make_parser, positive, wide_console, write_figures
from megatron.hydraulis.strategy import Pool

_NUM_BATCHES = 210
_NUM_HARD_GROUPS = 2
_LONG_TOKENS = 4096
"""Least length in the hard batches: few sequences, all long, so that no single one decides."""
_EQUAL = 1e-9
"""Times that differ by a smaller share are equal."""
_PERCENT = 100.0


@dataclass(frozen=True, slots=True)
class _Case:
    """A batch to plan with both versions."""

    group: str
    pool: str
    """A pool file."""
    lengths: list[int]


def _cases(folder: Path) -> list[_Case]:
    """Large and tiny batches for many strategies and for one, then 40 hard ones.

    Their pool files are written to the folder.
    """
    model, pool = inputs.cost_model(), inputs.pool()
    documents = inputs.LengthDistribution()
    pools = {
        "64 ranks, S0-S6": pool,
        "S1 alone": Pool.of(pool.strategy("S1")),
        "S6 alone": Pool.of(pool.strategy("S6")),
        "1,024 ranks": inputs.large_pool(),
    }
    files, longest = {}, {}
    for number, (name, of_name) in enumerate(pools.items()):
        path = folder / f"pool_{number}.json"
        path.write_text(json.dumps(of_name.to_json()), encoding="utf-8")
        files[name] = str(path)
        schemes = [s for strategy in of_name.strategies for s in strategy.schemes]
        longest[name] = min(inputs.CONTEXT_TOKENS, max(map(model.max_tokens, schemes)))
    cases: list[_Case] = []

    def add(group: str, pool_name: str, batches: Iterable[list[int]]) -> None:
        cases.extend(_Case(f"{pool_name}: {group}", files[pool_name], batch) for batch in batches)

    every, *alone, large = pools
    wikipedia = [documents.batch(seed, inputs.BATCH_TOKENS) for seed in range(30)]
    add("Wikipedia, instance B", every, [*wikipedia, inputs.instance_b()])
    for num in (6, 8, 20, 64):
        add(f"{num} sequences", every, (documents.draw(seed, num) for seed in range(30)))
    for name in alone:
        few = (documents.draw(seed, 5 + seed, longest[name]) for seed in range(20))
        add("5 to 24 sequences", name, few)
    s6 = alone[-1]
    tokens = inputs.BATCH_TOKENS
    add("Wikipedia", s6, (documents.batch(seed, tokens, longest[s6]) for seed in range(10)))
    tokens = inputs.LARGE_BATCH_TOKENS
    cuts = inputs.LARGE_CUTS_TOKENS
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
            [sys.executable, str(Path(__file__).with_name("planner_ablation_worker.py"))],
            env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def plan(self, case: _Case) -> dict[str, Any]:
        """The answer of the process."""
        request = {
            "pool": case.pool,
            "cost_profile": str(inputs.COST_PROFILE),
            "lengths": case.lengths,
        }
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
    """The folder of a version: an existing one, or a git revision unpacked."""
    if Path(version).is_dir():
        yield Path(version).resolve()
        return
    tree = folder / f"tree_{version}"
    tree.mkdir()
    archive = subprocess.run(
        ["git", "archive", version, "megatron"],
        cwd=inputs.ROOT,
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
    table = figures_table(
        f"plans of {before} against {after}",
        ("batches",),
        ("number", "slower", "faster", "sum %", "worst %", "gap %", "CPU s", "ratio"),
        "Predicted times, after against before: plans that are slower or faster, change of their "
        "sum and of the worst plan. Largest gap and total CPU time, before and after.",
    )
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in found:
        groups.setdefault(result["group"], []).append(result)
    rows = [*groups.items()]
    everything = f"the first {_NUM_BATCHES}"
    rows.insert(len(groups) - _NUM_HARD_GROUPS, (everything, list(found[:_NUM_BATCHES])))
    for name, results in rows:
        table.add_row(name, *_version_row(results), style="bold" if name == everything else None)
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
    parser = make_parser(
        "planner_ablation", "Plan 210 batches with two versions of the package, in turn."
    )
    version = "git revision, or a folder with megatron/hydraulis"
    parser.add_argument("--before", required=True, metavar="VERSION", help=version)
    parser.add_argument("--after", default=str(inputs.ROOT), metavar="VERSION", help=version)
    parser.add_argument(
        "--rounds", type=positive, default=3, help="how often each batch is planned"
    )
    options = parser.parse_args(arguments)
    found = compare(options.before, options.after, options.rounds)
    console = wide_console(140)
    console.print(_version_table(found, options.before, options.after))
    write_figures(console, options.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
