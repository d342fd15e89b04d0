"""The figures of the planner's benchmark as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import fmean, median, quantiles

from rich.table import Table

from benchmarks.planner_ablation import METHODS, PARTS, MethodResult
from benchmarks.planner_batches import PublishedResult
from benchmarks.planner_measure import BYTES_PER_MB, MemoryUse, PlannedBatch

_PERCENT = 100.0


def instance_table(result: PlannedBatch, published: PublishedResult) -> Table:
    """Every strategy alone on instance B, ours against the published planner's plan."""
    table = _table(
        "Instance B, every strategy planned alone, ms",
        ("strategy",),
        ("bound", "ours", "gap %", "published", "ours / published"),
    )
    for name, (bound_ms, time_ms) in result.alone_ms.items():
        theirs_ms = published.plan_ms[name]
        table.add_row(
            name,
            f"{bound_ms:.1f}",
            f"{time_ms:.1f}",
            f"{_gap(bound_ms, time_ms):.2f}",
            f"{theirs_ms:.1f}",
            f"{time_ms / theirs_ms:.3f}",
            style="bold" if name == result.strategy else None,
        )
    table.caption = (
        f"Choice: {result.strategy}, {result.time_ms:.1f} ms. The published planner's choice: "
        f"{published.chosen}, {published.plan_ms[published.chosen]:.1f} ms."
    )
    return table


def quality_table(results: Sequence[PlannedBatch], title: str) -> Table:
    """Quality and time over many batches."""
    table = _table(title, ("",), ("best", "quartile", "median", "quartile", "worst"))
    table.add_row("predicted time / bound", *_spread((r.ratio for r in results), 4))
    others = [r.best_other for r in results]
    table.add_row("best other strategy's plan / choice", *_spread(others, 4, is_best_largest=True))
    walls = [r.quietest_s for r in results]
    table.add_row("wall time, quietest round, s", *_spread(walls, 3))
    table.add_row("wall time, all rounds, s", *_spread((s for r in results for s in r.wall_s), 3))
    table.add_row("CPU time, all rounds, s", *_spread((s for r in results for s in r.cpu_s), 3))
    chosen = Counter(r.strategy for r in results)
    table.caption = (
        f"{len(results)} batches of {_range(r.num_sequences for r in results)} sequences, "
        f"{len(results[0].wall_s)} rounds. Chosen: "
        + ", ".join(f"{name} {num}x" for name, num in sorted(chosen.items()))
        + "."
    )
    return table


def large_table(results: Sequence[tuple[int, PlannedBatch]], title: str) -> Table:
    """One row per batch; each with the length at which its documents are cut."""
    table = _table(
        title,
        (),
        ("cut at", "seed", "sequences", "time ms", "bound ms", "gap %", "wall s", "CPU s"),
    )
    table.add_column("status")
    for cut_tokens, r in results:
        table.add_row(
            str(cut_tokens),
            str(r.seed),
            str(r.num_sequences),
            f"{r.time_ms:.1f}",
            f"{r.bound_ms:.1f}",
            f"{_gap(r.bound_ms, r.time_ms):.2f}",
            f"{min(r.wall_s):.2f}-{max(r.wall_s):.2f}",
            f"{min(r.cpu_s):.2f}-{max(r.cpu_s):.2f}",
            r.status,
        )
    table.caption = f"Wall and CPU time: least and most of {len(results[0][1].wall_s)} rounds."
    return table


def memory_table(uses: Sequence[MemoryUse]) -> Table:
    """The process after some numbers of plans."""
    table = _table("Memory of one process", (), ("plans", "resident MB", "Python blocks"))
    for use in uses:
        table.add_row(
            str(use.num_plans), f"{use.resident_bytes / BYTES_PER_MB:.1f}", str(use.num_blocks)
        )
    return table


def ablation_table(results: Sequence[dict[str, MethodResult]], title: str) -> Table:
    """Iteration time, speed-up over the first method and where a rank's time goes."""
    short = {"micro-batch cost": "cost c", "pipeline fill": "fill"}
    table = _table(
        title,
        ("", "strategy"),
        ("ms", "speed-up", *(f"{short.get(part, part)} %" for part in PARTS)),
    )
    for method in METHODS:
        of_method = [by_method[method] for by_method in results]
        chosen = Counter(result.strategy for result in of_method)
        speed_ups = [
            by_method[METHODS[0]].time_ms / by_method[method].time_ms for by_method in results
        ]
        shares = [
            fmean(_PERCENT * result.parts_ms[part] / result.time_ms for result in of_method)
            for part in PARTS
        ]
        names = (
            f"{name} {num}x" if len(results) > 1 else name for name, num in chosen.most_common()
        )
        table.add_row(
            method,
            ", ".join(names),
            f"{median(result.time_ms for result in of_method):.0f}",
            f"{median(speed_ups):.2f}",
            *(f"{share:.1f}" for share in shares),
        )
    table.caption = (
        "Shares of the iteration time, mean over ranks"
        + (" and batches; times and speed-ups are medians." if len(results) > 1 else ".")
        + " cost c: constant cost of micro-batches; idle: waiting for the slowest replica."
    )
    return table


def _gap(bound_ms: float, time_ms: float) -> float:
    return _PERCENT * (1.0 - bound_ms / time_ms)


def _spread(values: Iterable[float], digits: int, *, is_best_largest: bool = False) -> list[str]:
    """From the best to the worst."""
    rising = sorted(values)
    low, middle, high = (
        quantiles(rising, n=4, method="inclusive") if len(rising) > 1 else rising * 3
    )
    spread = [rising[0], low, middle, high, rising[-1]]
    return [f"{value:.{digits}f}" for value in (spread[::-1] if is_best_largest else spread)]


def _range(values: Iterable[int]) -> str:
    found = sorted(values)
    return f"{found[0]} to {found[-1]}"


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    for name in texts:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table
