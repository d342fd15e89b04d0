"""What each rank did with its time: at work, waiting, idle."""

from __future__ import annotations

import io
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from megatron.hydraulis.observability.trace_events import Span
from megatron.hydraulis.observability.trace_query import Spans

__all__ = ["RankShares", "rank_shares", "shares_table"]

WORK = ("forward", "backward", "optimizer")
WAITS = ("pipeline wait", "gather wait", "scatter wait", "planning wait")
TRANSFERS = ("gather", "scatter")

TABLE_WIDTH = 100
_US_PER_MS = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShares:
    """Times of one rank in its traced iterations, all in us; evaluation between them is left out.

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
    windows = [_window(measured, whole) for whole in measured.where(name="iteration")]
    parts = [
        (end_us - start_us, measured.between(start_us, end_us)) for start_us, end_us in windows
    ]
    return RankShares(
        rank=rank,
        window_us=sum(window_us for window_us, _ in parts),
        forward_us=sum(part.where(name="forward").total_us for _, part in parts),
        backward_us=sum(part.where(name="backward").total_us for _, part in parts),
        busy_us=sum(_busy_us(part) for _, part in parts),
        wait_us=sum(part.named(*WAITS).total_us for _, part in parts),
        transfer_us=sum(part.named(*TRANSFERS).total_us for _, part in parts),
        hidden_us=sum(_hidden_us(part) for _, part in parts),
        planned_us=sum(span.duration_us for span in planned.named("forward", "backward")),
    )


def _window(measured: Spans, whole: Span) -> tuple[float, float]:
    """Start and end of an iteration, the wait for its plan included."""
    number = int(whole.detail["iteration"])
    waits = measured.where(name="planning wait", iteration=number)
    return min([whole.start_us, *(wait.start_us for wait in waits)]), whole.end_us


def _busy_us(spans: Spans) -> float:
    work, waits = spans.named(*WORK), spans.named(*WAITS)
    return (work | waits).total_us - waits.total_us


def _hidden_us(spans: Spans) -> float:
    """Of the transfers' time: not what lies outside work and waits, nor what lies in waits."""
    work, waits, transfers = (spans.named(*names) for names in (WORK, WAITS, TRANSFERS))
    alone_us = (work | waits | transfers).total_us - (work | waits).total_us
    waited_for_us = waits.total_us + transfers.total_us - (waits | transfers).total_us
    return max(0.0, transfers.total_us - alone_us - waited_for_us)
