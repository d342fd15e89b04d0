"""What each rank did with its time: at work, waiting, idle."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron.hydraulis.observability.trace_query import Spans

__all__ = ["RankShares", "rank_shares", "shares_table"]

WORK = ("forward", "backward", "optimizer")
WAITS = ("pipeline wait", "gather wait", "scatter wait", "planning wait")
TRANSFERS = ("gather", "scatter")

TABLE_WIDTH = 100
_US_PER_MS = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShares:
    """Times of one rank between its first and its last measured span, all in us.

    ``busy_us + wait_us + idle_us`` is ``window_us``.
    """

    rank: int
    window_us: float
    forward_us: float
    backward_us: float
    busy_us: float
    """At work on forward, backward or optimizer, and not waiting in them."""
    wait_us: float
    """Waiting for a neighbour of the pipeline, for regrouping or for a plan."""
    transfer_us: float
    """With parameters or gradients on their way."""
    hidden_us: float
    """Of ``transfer_us``, with the rank busy at the same time."""
    planned_us: float
    """Forward and backward as the plans had them."""

    @property
    def idle_us(self) -> float:
        return max(0.0, self.window_us - self.busy_us - self.wait_us)


def rank_shares(spans: Spans) -> list[RankShares]:
    """Of every rank of a trace that has measured spans, by rank."""
    measured, planned = spans.where(is_planned=False), spans.where(is_planned=True)
    ranks = sorted({span.rank for span in measured})
    return [_of_rank(rank, measured.where(rank=rank), planned.where(rank=rank)) for rank in ranks]


def shares_table(shares: list[RankShares], num_iterations: int) -> str:
    """The table as plain text: a row a rank, times in ms per iteration."""
    table = Table(title="Time of each rank, ms per iteration", title_justify="left")
    columns = ("rank", "time", "forward", "backward", "planned", "busy", "wait", "idle")
    for name in (*columns, "regrouping", "of it hidden"):
        table.add_column(name, justify="right")
    for row in shares:
        table.add_row(
            str(row.rank),
            *(
                f"{time_us / _US_PER_MS / max(num_iterations, 1):,.1f}"
                for time_us in (row.window_us, row.forward_us, row.backward_us, row.planned_us)
            ),
            *(
                f"{time_us / row.window_us:.0%}" if row.window_us else "–"
                for time_us in (row.busy_us, row.wait_us, row.idle_us)
            ),
            f"{row.transfer_us / _US_PER_MS / max(num_iterations, 1):,.1f}",
            f"{row.hidden_us / row.transfer_us:.0%}" if row.transfer_us else "–",
        )
    text = io.StringIO()
    Console(file=text, width=TABLE_WIDTH, force_terminal=False, highlight=False).print(table)
    return text.getvalue()


def _of_rank(rank: int, measured: Spans, planned: Spans) -> RankShares:
    work, waits, transfers = (measured.named(*names) for names in (WORK, WAITS, TRANSFERS))
    wait_us = waits.total_us
    busy_us = (work | waits).total_us - wait_us
    # Of the transfers' time: what lies outside work and waits, and what lies within waits.
    alone_us = (work | waits | transfers).total_us - (work | waits).total_us
    waited_for_us = wait_us + transfers.total_us - (waits | transfers).total_us
    hidden_us = transfers.total_us - alone_us - waited_for_us
    return RankShares(
        rank=rank,
        window_us=measured.last_end_us - measured.first_start_us,
        forward_us=measured.where(name="forward").total_us,
        backward_us=measured.where(name="backward").total_us,
        busy_us=busy_us,
        wait_us=wait_us,
        transfer_us=transfers.total_us,
        hidden_us=max(0.0, hidden_us),
        planned_us=planned.named("forward", "backward").total_us,
    )
