"""Results of a simulation as tables for people, at most 100 columns wide."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from megatron.hydraulis.simulator.results import PARTS, WayResult

__all__ = ["result_table", "strategy_use_table"]

_PERCENT = 100.0
_MAX_STRATEGIES = 4
_HEADS = {
    "work": "work\n%",
    "fill": "fill\n%",
    "imbalance": "imbal.\n%",
    "regroup": "regr.\n%",
    "planning": "plan.\n%",
}


def result_table(results: Sequence[WayResult], reference: WayResult, title: str) -> Table:
    """A row a way: throughput, speed-up over the reference and where the time of the ranks goes."""
    table = _table(title)
    table.add_column("way", no_wrap=True)
    for name in (
        "tokens/s",
        "speed-\nup",
        "iter. s",
        *(_HEADS[part] for part in PARTS),
        "pad.\n%",
        "slowest\n/ mean",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for result in results:
        shares = result.shares
        table.add_row(
            result.name,
            f"{result.tokens_per_s:,.0f}",
            f"{reference.time_s / result.time_s:.2f}",
            f"{result.time_s / len(result.accounts):.3f}",
            *(f"{_PERCENT * shares[part]:.1f}" for part in PARTS),
            f"{_PERCENT * result.padding_fraction:.1f}",
            f"{result.imbalance:.3f}",
            style="bold" if result is results[-1] else None,
        )
    table.caption = (
        f"Speed-up over {reference.name!r}. Shares of all ranks' time. work: forward, backward, "
        "padding's included; fill: pipelines filling and draining, parameters not there yet; "
        "imbal.: done before the slowest replica; regr.: scatter and update that nothing hides; "
        "plan.: no plan yet. pad.: padding, of all tokens computed. slowest / mean: of the "
        "replicas' times."
    )
    return table


def strategy_use_table(results: Sequence[WayResult]) -> Table:
    """What strategies each way used."""
    table = _table("Strategies")
    table.add_column("way", no_wrap=True)
    table.add_column("iterations with it: strategy", overflow="fold")
    table.add_column("a rank receives\nGB/iteration", justify="right")
    for result in results:
        uses = result.num_uses.most_common()
        # Never broken between the number and the strategy.
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
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
