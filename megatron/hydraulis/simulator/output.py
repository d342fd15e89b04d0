"""Results of a simulation for people: tables at most 100 columns wide, a picture, and spans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from megatron.hydraulis.observability.pictures import CATEGORY_COLORS, style_rows
from megatron.hydraulis.observability.trace import Span
from megatron.hydraulis.simulator.results import PARTS, WayResult
from megatron.hydraulis.simulator.simulation import IterationTasks, OperationTasks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PERCENT = 100.0
_MAX_STRATEGIES = 4
_HEADS = {
    "work": "work\n%",
    "fill": "fill\n%",
    "imbalance": "imb.\n%",
    "regroup": "regr.\n%",
    "planning": "plan.\n%",
}
_COLORS = {
    "work": CATEGORY_COLORS[0],
    "padding": CATEGORY_COLORS[3],
    "fill": CATEGORY_COLORS[5],
    "imbalance": "#d0d0d0",
    "regroup": CATEGORY_COLORS[1],
    "planning": CATEGORY_COLORS[2],
}
_WIDTH_INCHES = 9.0
_MARGIN_INCHES = 1.7
_ROW_INCHES = 0.42
_MAX_OVER_NEXT = 2.5
"""The bar of a way that is more times slower than the next one is cut off, so that the others stay
readable."""
_US_PER_MS = 1e3


def result_table(results: Sequence[WayResult], reference: WayResult, title: str) -> Table:
    """A row per way: throughput, speed-up over the reference, parts of the ranks' time."""
    table = _table(title)
    table.add_column("way", no_wrap=True)
    for name in (
        "tokens\n/s",
        "speed\nup",
        "iter.\ns",
        "±\ns",
        *(_HEADS[part] for part in PARTS),
        "pad.\n%",
        "slow.\n/mean",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        shares = result.shares
        table.add_row(
            result.name,
            f"{result.tokens_per_s:,.0f}",
            f"{reference.time_s / result.time_s:.2f}",
            f"{result.time_s / len(result.accounts):.3f}",
            "–" if result.error_s is None else f"{result.error_s:.3f}",
            *(f"{_PERCENT * shares[part]:.1f}" for part in PARTS),
            f"{_PERCENT * result.padding_fraction:.1f}",
            f"{result.imbalance:.3f}",
            style="bold" if result is results[-1] else None,
        )
    table.caption = (
        f"Speed-up over {reference.name!r}. ±: standard error of an iteration's mean time, which "
        "other batches would change. Shares of all ranks' time. work: forward and backward, "
        "also of padding; fill: waiting in the pipeline or for parameters; imb.: waiting for the "
        "slowest replica; regr.: scatter and update that are not hidden; plan.: waiting for the "
        "plan. pad.: share of padding in the computed tokens. slow./mean: time of the slowest "
        "replica over the mean of all."
    )
    return table


def strategy_use_table(results: Sequence[WayResult]) -> Table:
    """The strategies that each way used."""
    table = _table("Strategies")
    table.add_column("way", no_wrap=True)
    table.add_column("iterations with it: strategy", overflow="fold")
    table.add_column("a rank receives\nGB/iteration", justify="right")
    for result in results:
        uses = result.num_uses.most_common()
        # No line break between the number and the strategy.
        shown = [f"{num}x\u00a0{result.strategies[name]}" for name, num in uses[:_MAX_STRATEGIES]]
        if len(uses) > _MAX_STRATEGIES:
            shown.append(f"{len(uses) - _MAX_STRATEGIES} more")
        received = f"{result.received_bytes / 1e9:.2f}" if result.received_bytes else "–"
        table.add_row(result.name, ", ".join(shown), received)
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )


def results_figure(results: Sequence[WayResult], reference: WayResult, title: str) -> Figure:
    """A bar per way: the mean time of an iteration, divided into its parts.

    Work is divided into trained tokens and padding.
    """
    # Simulating needs no matplotlib, which takes long to import.
    from matplotlib.figure import Figure

    height = _MARGIN_INCHES + _ROW_INCHES * len(results)
    figure = Figure(figsize=(_WIDTH_INCHES, height), layout="constrained")
    axes = figure.subplots()
    longest_s = _longest_drawn_s([result.time_s / len(result.accounts) for result in results])
    for place, result in enumerate(results):
        _draw_way(axes, place, result, reference, longest_s)
    axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=9)
    axes.set_ylim(len(results) - 0.4, -0.6)
    axes.set_xlim(0.0, 1.22 * longest_s)
    style_rows(axes, "s per iteration, divided by what the ranks do in it", title)
    handles, labels = axes.get_legend_handles_labels()
    first = dict(zip(labels, handles, strict=True))
    figure.legend(
        first.values(),
        first.keys(),
        loc="outside lower center",
        ncols=len(_COLORS),
        fontsize=8,
        frameon=False,
    )
    return figure


def _longest_drawn_s(times_s: Sequence[float]) -> float:
    rising = sorted(times_s)
    for shorter_s, longer_s in zip(reversed(rising[:-1]), reversed(rising), strict=False):
        if longer_s <= _MAX_OVER_NEXT * shorter_s:
            return longer_s
    return rising[0]


def _draw_way(
    axes: Axes, place: int, result: WayResult, reference: WayResult, longest_s: float
) -> None:
    iteration_s = result.time_s / len(result.accounts)
    shares = result.shares
    padding = shares["work"] * result.padding_fraction
    parts = {"work": shares["work"] - padding, "padding": padding}
    parts |= {part: shares[part] for part in PARTS if part != "work"}
    is_cut = iteration_s > longest_s * (1.0 + 1e-9)
    drawn_s = longest_s if is_cut else iteration_s
    left_s = 0.0
    for part, share in parts.items():
        axes.barh(place, share * drawn_s, left=left_s, height=0.66, color=_COLORS[part], label=part)
        left_s += share * drawn_s
    text = f"{result.tokens_per_s:,.0f} tokens/s, {reference.time_s / result.time_s:.2f}x"
    if is_cut:
        text = f"… {iteration_s:,.1f} s: " + text
    axes.text(
        left_s - 0.01 * longest_s if is_cut else left_s + 0.01 * longest_s,
        place,
        text,
        va="center",
        ha="right" if is_cut else "left",
        fontsize=8,
        color="white" if is_cut else "black",
    )


def iteration_spans(iteration: IterationTasks, *, started_ms: float) -> list[Span]:
    """What every rank does in an iteration, by start.

    The spans have the names of measured ones and are not planned ones: the simulation takes the
    place of a run, so that tables, pictures and viewers of traces show it in the same way.

    started_ms: end of the previous iteration.
    """
    common = list(_common_spans(iteration, started_ms))
    ranks = range(iteration.work.strategy.num_ranks)
    spans = [replace(span, rank=rank) for rank in ranks for span in common]
    for replica in iteration.replicas:
        scheme = replica.replica.scheme
        for stage, operations in enumerate(replica.by_stage):
            own = list(_stage_spans(iteration, operations))
            for cp, tp in itertools.product(range(scheme.cp), range(scheme.tp)):
                rank = replica.replica.rank_at(stage, cp, tp)
                spans += [replace(span, rank=rank) for span in own]
    return sorted(spans, key=lambda span: (span.start_us, -span.end_us))


def _span(track: str, name: str, start_ms: float, end_ms: float, **detail: int | str) -> Span:
    """A span of rank 0, to be copied to all ranks that have it."""
    return Span(
        rank=0,
        track=track,
        name=name,
        start_us=start_ms * _US_PER_MS,
        end_us=end_ms * _US_PER_MS,
        detail=detail,
    )


def _stage_spans(iteration: IterationTasks, operations: list[OperationTasks]) -> Iterator[Span]:
    number = iteration.number
    free_ms = iteration.begin_ms
    for operation in operations:
        stage = operation.stage
        if operation.start_ms > free_ms:
            detail = {"iteration": number, "stage": stage}
            yield _span("compute", "pipeline wait", free_ms, operation.start_ms, **detail)
        yield _span(
            "compute",
            "forward" if operation.is_forward else "backward",
            operation.start_ms,
            operation.end_ms,
            iteration=number,
            micro_batch=operation.micro_batch,
            stage=stage,
            num_tokens=operation.num_tokens,
        )
        for earlier, later in zip(operation.tasks, operation.tasks[1:], strict=False):
            if later.start_ms > earlier.end_ms:
                yield _span("host", "gather wait", earlier.end_ms, later.start_ms, iteration=number)
        free_ms = operation.end_ms


def _common_spans(iteration: IterationTasks, started_ms: float) -> Iterator[Span]:
    """What all ranks do at the same time."""
    number, strategy = iteration.number, iteration.work.strategy.name
    begin_ms, end_ms = iteration.begin_ms, iteration.end_ms
    if begin_ms > started_ms:
        yield _span("host", "planning wait", started_ms, begin_ms, iteration=number)
    yield _span("iteration", "iteration", begin_ms, end_ms, iteration=number, strategy=strategy)
    collectives = [
        *(("gather", bucket.index, bucket.gather) for bucket in iteration.buckets),
        *(("scatter", bucket.index, bucket.scatter) for bucket in iteration.buckets),
    ]
    for name, index, task in collectives:
        yield _span("regroup", name, task.start_ms, task.end_ms, iteration=number, bucket=index)
    if iteration.buckets:
        updates = [bucket.update for bucket in iteration.buckets]
        first_ms = min(task.start_ms for task in updates)
        last_ms = max(task.end_ms for task in updates)
        yield _span("compute", "optimizer", first_ms, last_ms, iteration=number)
    if iteration.overhead is not None:
        task = iteration.overhead
        yield _span("regroup", "overhead", task.start_ms, task.end_ms, iteration=number)
