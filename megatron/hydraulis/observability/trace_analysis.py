"""Questions to a trace, and what each rank did with its time: busy, waiting, idle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace import Span

WORK = ("forward", "backward", "optimizer")
WAITS = ("pipeline wait", "gather wait", "scatter wait", "planning wait")
TRANSFERS = ("gather", "scatter")


@dataclass(frozen=True)
class Spans:
    """Some spans of a trace, by their start.

    For example: whether a scatter overlaps with the backward pass of rank 2 in iteration 5::

        rank = Spans.of(read_trace(folder)).where(rank=2, iteration=5, is_planned=False)
        rank.where(name="scatter").first_start_us < rank.where(name="backward").last_end_us

    The three times raise HydraulisError if there is no span.
    """

    spans: tuple[Span, ...] = ()

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Spans:
        return cls(tuple(sorted(spans, key=lambda span: (span.start_us, -span.end_us))))

    def where(self, **wanted: int | str | bool) -> Spans:
        """Those whose fields (``rank``, ``name``, ``track``, ``is_planned``) or details
        (``iteration``, ``micro_batch``, ``stage``, ``bucket``, …) have these values."""
        return Spans(
            tuple(
                span
                for span in self.spans
                if all(_value(span, key) == value for key, value in wanted.items())
            )
        )

    def named(self, *names: str) -> Spans:
        """Those with one of these names."""
        return Spans(tuple(span for span in self.spans if span.name in names))

    def __or__(self, other: Spans) -> Spans:
        return Spans.of((*self.spans, *other.spans))

    def between(self, start_us: float, end_us: float) -> Spans:
        """The parts of the spans within a window."""
        return Spans(
            tuple(
                dataclasses.replace(
                    span, start_us=max(span.start_us, start_us), end_us=min(span.end_us, end_us)
                )
                for span in self.spans
                if span.start_us < end_us and span.end_us > start_us
            )
        )

    def values(self, key: str) -> list[int | str]:
        """A field or detail of each span, in their order; spans without it are skipped."""
        return [value for span in self.spans if (value := _value(span, key)) is not None]

    @property
    def first_start_us(self) -> float:
        return min(span.start_us for span in self._required())

    @property
    def last_end_us(self) -> float:
        return max(span.end_us for span in self._required())

    @property
    def total_us(self) -> float:
        """Time in which at least one of the spans runs."""
        total_us, until_us = 0.0, float("-inf")
        for span in self.spans:
            total_us += max(0.0, span.end_us - max(span.start_us, until_us))
            until_us = max(until_us, span.end_us)
        return total_us

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def _required(self) -> tuple[Span, ...]:
        if not self.spans:
            raise HydraulisError(
                "the trace has no such span whose time could be asked for; use fewer conditions in "
                "where()"
            )
        return self.spans


def _value(span: Span, key: str) -> int | str | bool | None:
    if key in ("rank", "name", "track", "is_planned"):
        value: int | str | bool = getattr(span, key)
        return value
    return span.detail.get(key)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShares:
    """Times of one rank in its traced iterations, in us; evaluation between them is left out.

    ``busy_us + wait_us + idle_us`` is ``window_us``.
    """

    rank: int
    window_us: float
    forward_us: float
    backward_us: float
    busy_us: float
    """Time of forward, backward and optimizer without the waits within them."""
    wait_us: float
    """Time spent waiting for a pipeline neighbour, for regrouping or for a plan."""
    transfer_us: float
    """Time with a transfer of parameters or gradients in progress."""
    hidden_us: float
    """The part of ``transfer_us`` in which the rank is busy."""
    planned_us: float
    """Forward and backward by the plans."""

    @property
    def idle_us(self) -> float:
        return max(0.0, self.window_us - self.busy_us - self.wait_us)


def rank_shares(spans: Spans) -> list[RankShares]:
    """Shares of every rank with measured spans, by rank."""
    measured, planned = spans.where(is_planned=False), spans.where(is_planned=True)
    ranks = sorted({span.rank for span in measured})
    return [
        _shares_of_rank(rank, measured.where(rank=rank), planned.where(rank=rank)) for rank in ranks
    ]


def _shares_of_rank(rank: int, measured: Spans, planned: Spans) -> RankShares:
    windows = [_window(measured, whole) for whole in measured.where(name="iteration")]
    parts = [measured.between(start_us, end_us) for start_us, end_us in windows]
    return RankShares(
        rank=rank,
        window_us=sum(end_us - start_us for start_us, end_us in windows),
        forward_us=sum(part.where(name="forward").total_us for part in parts),
        backward_us=sum(part.where(name="backward").total_us for part in parts),
        busy_us=sum(_busy_us(part) for part in parts),
        wait_us=sum(part.named(*WAITS).total_us for part in parts),
        transfer_us=sum(part.named(*TRANSFERS).total_us for part in parts),
        hidden_us=sum(_hidden_us(part) for part in parts),
        planned_us=sum(span.duration_us for span in planned.named("forward", "backward")),
    )


def _window(measured: Spans, whole: Span) -> tuple[float, float]:
    """Start and end of an iteration, with the wait for its plan."""
    number = int(whole.detail["iteration"])
    waits = measured.where(name="planning wait", iteration=number)
    return min([whole.start_us, *(wait.start_us for wait in waits)]), whole.end_us


def _busy_us(spans: Spans) -> float:
    work, waits = spans.named(*WORK), spans.named(*WAITS)
    return (work | waits).total_us - waits.total_us


def _hidden_us(spans: Spans) -> float:
    """Time of transfers without what is outside work and waits, and without what is in waits."""
    work, waits, transfers = (spans.named(*names) for names in (WORK, WAITS, TRANSFERS))
    alone_us = (work | waits | transfers).total_us - (work | waits).total_us
    waited_for_us = waits.total_us + transfers.total_us - (waits | transfers).total_us
    return max(0.0, transfers.total_us - alone_us - waited_for_us)
