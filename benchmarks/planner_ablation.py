"""Plans and planning times of two versions of the package on the same batches.

    python -m benchmarks.planner_ablation --before REVISION

Each version has one process for all batches (`planner_ablation_worker`), and they take turns, so
that other work on the machine affects both. The exit status is 1 if a plan of a random pool is more
than 0.5 % slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from benchmarks import inputs
from benchmarks.command import make_parser, positive, write_figures
from megatron.hydraulis.strategy import Pool
from megatron.hydraulis.terminal import figures_table, results_console

NUM_BATCHES = 210
"""Without the hard ones, which come last."""
LONG_TOKENS = 4096
"""Least length in the hard batches: few sequences, all long, so that no single one decides."""
POOLS = "random pools"
PIPELINED = "pipelined pools"
"""Groups that the guard covers begin with these words."""
PIPELINED_SEEDS = (1, 2, 3)
MOST_SLOWER = 0.005
"""Share by which a plan of a random pool may be slower."""
EQUAL = 1e-9
"""Times that differ by a smaller share are equal."""
PERCENT = 100.0

Case = tuple[str, dict[str, Any]]
"""The name of its group, and the request to the workers."""


def cases(folder: Path) -> list[Case]:
    """Large and tiny batches for many strategies and for one, then 40 hard ones.

    Their files are written to the folder.
    """
    model, pool = inputs.cost_model(), inputs.pool()
    documents = inputs.LengthDistribution()
    every, s1, s6, large = "64 ranks, S0-S6", "S1 alone", "S6 alone", "1,024 ranks"
    pools = {
        every: pool,
        s1: Pool.of(pool.strategy("S1")),
        s6: Pool.of(pool.strategy("S6")),
        large: inputs.large_pool(),
    }
    longest = {}
    for name, of_name in pools.items():
        (folder / f"{name}.json").write_text(json.dumps(of_name.to_json()), encoding="utf-8")
        limits = (model.max_tokens(s) for each in of_name.strategies for s in each.schemes)
        longest[name] = min(inputs.CONTEXT_TOKENS, max(limits))
    cost_profile = folder / "cost_profile.json"
    _write_profile(cost_profile, json.loads(inputs.COST_PROFILE.read_text(encoding="utf-8")))
    found: list[Case] = []

    def add(group: str, pool_name: str, batches: Iterable[list[int]]) -> None:
        files = {
            "pool": str(folder / f"{pool_name}.json"),
            "cost_profile": str(cost_profile),
        }
        found.extend((f"{pool_name}: {group}", {**files, "lengths": batch}) for batch in batches)

    wikipedia = [documents.batch(seed, inputs.BATCH_TOKENS) for seed in range(30)]
    add("Wikipedia, instance B", every, [*wikipedia, inputs.instance_b()])
    for num in (6, 8, 20, 64):
        add(f"{num} sequences", every, (documents.draw(seed, num) for seed in range(30)))
    for name in (s1, s6):
        few = (documents.draw(seed, 5 + seed, longest[name]) for seed in range(20))
        add("5 to 24 sequences", name, few)
    tokens = inputs.BATCH_TOKENS
    add("Wikipedia", s6, (documents.batch(seed, tokens, longest[s6]) for seed in range(10)))
    tokens, cuts = inputs.LARGE_BATCH_TOKENS, inputs.LARGE_CUTS_TOKENS
    add("Wikipedia", large, (documents.batch(s, tokens, cut) for cut in cuts for s in range(3)))
    assert len(found) == NUM_BATCHES
    for name in (s1, s6):
        few = (
            documents.draw(seed, 5 + seed, longest[name], shortest_tokens=LONG_TOKENS)
            for seed in range(20)
        )
        add("5 to 24 long sequences", name, few)
    return found


def guard_cases(folder: Path) -> list[Case]:
    """Pools of 8 to 47 random strategies: 27 as in `benchmarks.planner`, and 54 with 7B and 13B.

    In those two every pool has pipelines.
    """
    pipelined = inputs.POOL_PROFILES[:2]
    drawn = [(POOLS, each) for each in inputs.pool_cases(0)]
    for seed in PIPELINED_SEEDS:
        drawn += [
            (f"{PIPELINED}, {case.name.split()[0]}", case)
            for case in inputs.pool_cases(seed, pipelined)
        ]
    found: list[Case] = []
    for index, (group, case) in enumerate(drawn):
        pool, cost_profile = folder / f"pool_{index}.json", folder / f"profile_{index}.json"
        pool.write_text(json.dumps(case.pool.to_json()), encoding="utf-8")
        _write_profile(cost_profile, case.profile.to_json())
        files = {"pool": str(pool), "cost_profile": str(cost_profile)}
        found.append((group, {**files, "lengths": case.batch}))
    return found


def _write_profile(path: Path, profile: dict[str, Any]) -> None:
    """Writes the profile without what older versions do not know and the planner can do without."""
    kept = {key: value for key, value in profile.items() if key not in ("model", "num_ranks")}
    kept["version"] = 1
    kept["schemes"] = [
        {key: value for key, value in row.items() if key != "forward_share"}
        for row in profile["schemes"]
    ]
    path.write_text(json.dumps(kept), encoding="utf-8")


def tree_of(version: str, folder: Path) -> Path:
    """The folder of a version: an existing one, or a git revision unpacked below ``folder``."""
    if Path(version).is_dir():
        return Path(version).resolve()
    tree = folder / f"tree_{version}"
    tree.mkdir()
    archive = ["git", "archive", version, "megatron"]
    content = subprocess.run(archive, cwd=inputs.ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=content, check=True)
    return tree


def worker(tree: Path) -> subprocess.Popen[str]:
    """A process that plans with the package of this tree."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("planner_ablation_worker.py"))],
        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        cwd=tree,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def ask(process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
    """The worker's answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(request) + "\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


SECTIONS = {"batches": cases, "pools": guard_cases}


def compare(
    before: str, after: str, num_rounds: int, sections: Sequence[str]
) -> list[dict[str, Any]]:
    """Every batch planned by both versions in turn; CPU times are the least of all rounds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        versions = {"before": before, "after": after}
        workers = {side: worker(tree_of(each, folder)) for side, each in versions.items()}
        requests = [case for section in sections for case in SECTIONS[section](folder)]
        found: list[dict[str, Any]] = [{"group": group} for group, _ in requests]
        for _ in range(num_rounds):
            for (_, request), result in zip(requests, found, strict=True):
                for side, process in workers.items():
                    answer = ask(process, request)
                    cpu_s = result.get(side, answer)["cpu_s"]
                    result[side] = answer | {"cpu_s": min(cpu_s, answer["cpu_s"])}
        for process in workers.values():
            process.communicate()
    return found


def version_table(found: Sequence[dict[str, Any]], before: str, after: str) -> Table:
    """One row for each group of batches, and one for the first 210 batches."""
    table = figures_table(
        f"plans of {before} against {after}",
        ("batches",),
        ("number", "slower", "faster", "mean %", "sum %", "worst %", "gap %", "CPU s", "ratio"),
        caption="Predicted times, after against before: plans that are slower or faster, mean "
        "change, change of their sum and of the worst plan. Largest gap and total CPU time, before "
        "and after.",
    )
    groups = list(dict.fromkeys(result["group"] for result in found))
    rows = {name: [result for result in found if result["group"] == name] for name in groups}
    if len(found) > NUM_BATCHES:
        rows[f"the first {NUM_BATCHES}"] = list(found[:NUM_BATCHES])
    for name, results in rows.items():

        def of(key: str, results: list[dict[str, Any]] = results) -> np.ndarray:
            """Shape (2, number of batches): before, after."""
            return np.array([[r[side][key] for r in results] for side in ("before", "after")])

        time_ms, cpu_s = of("time_ms"), of("cpu_s").sum(axis=1)
        ratios = time_ms[1] / time_ms[0]
        totals = time_ms.sum(axis=1)
        gaps = PERCENT * (1.0 - of("bound_ms") / time_ms).max(axis=1)
        table.add_row(
            name,
            str(len(results)),
            str((ratios > 1.0 + EQUAL).sum()),
            str((ratios < 1.0 - EQUAL).sum()),
            f"{PERCENT * (ratios.mean() - 1.0):+.4f}",
            f"{PERCENT * (totals[1] / totals[0] - 1.0):+.4f}",
            f"{PERCENT * (ratios.max() - 1.0):+.3f}",
            f"{gaps[0]:.2f} -> {gaps[1]:.2f}",
            f"{cpu_s[0]:.2f} -> {cpu_s[1]:.2f}",
            f"{cpu_s[1] / cpu_s[0]:.3f}",
            style=None if name in groups else "bold",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two versions."""
    parser = make_parser(
        "planner_ablation", "Plan the same batches with two versions of the package, in turn."
    )
    version = "git revision, or a folder with megatron/hydraulis"
    parser.add_argument("--before", required=True, metavar="VERSION", help=version)
    parser.add_argument("--after", default=str(inputs.ROOT), metavar="VERSION", help=version)
    parser.add_argument(
        "--rounds", type=positive, default=3, help="how often each batch is planned"
    )
    parser.add_argument(
        "--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="what to plan"
    )
    options = parser.parse_args(arguments)
    found = compare(options.before, options.after, options.rounds, options.sections)
    console = results_console(140)
    console.print(version_table(found, options.before, options.after))
    write_figures(console, options.json, found)
    slower = slower_pools(found)
    for result in slower:
        ratio = result["after"]["time_ms"] / result["before"]["time_ms"]
        console.print(f"{result['group']}: {PERCENT * (ratio - 1.0):.2f} % slower")
    return 1 if slower else 0


def slower_pools(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The plans of random pools that break the guard."""
    return [
        result
        for result in found
        if result["group"].startswith((POOLS, PIPELINED))
        and result["after"]["time_ms"] > (1.0 + MOST_SLOWER) * result["before"]["time_ms"]
    ]


if __name__ == "__main__":
    sys.exit(main())
