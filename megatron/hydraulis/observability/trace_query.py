"""Questions to a trace: when the first forward began, when the last backward ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace_events import Span

__all__ = ["Spans"]


@dataclass(frozen=True)
class Spans:
    """Some spans of a trace, by their start.

    For example: a scatter that overlaps with the backward pass of rank 2 in iteration 5::

        rank = Spans.of(read_trace(folder)).where(rank=2, iteration=5, is_planned=False)
        rank.where(name="scatter").first_start_us < rank.where(name="backward").last_end_us
    """

    spans: tuple[Span, ...]

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
        """The spans of both."""
        return Spans.of((*self.spans, *other.spans))

    def between(self, start_us: float, end_us: float) -> Spans:
        """What of the spans lies in a window."""
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
        """A field or detail of each span, in their order."""
        return [value for span in self.spans if (value := _value(span, key)) is not None]

    @property
    def first_start_us(self) -> float:
        """Raises HydraulisError where there is no span."""
        return min(span.start_us for span in self._some())

    @property
    def last_start_us(self) -> float:
        """Raises HydraulisError where there is no span."""
        return max(span.start_us for span in self._some())

    @property
    def first_end_us(self) -> float:
        """Raises HydraulisError where there is no span."""
        return min(span.end_us for span in self._some())

    @property
    def last_end_us(self) -> float:
        """Raises HydraulisError where there is no span."""
        return max(span.end_us for span in self._some())

    @property
    def total_us(self) -> float:
        """Time in which at least one of the spans runs."""
        total_us, until_us = 0.0, float("-inf")
        for span in self.spans:
            total_us += max(0.0, span.end_us - max(span.start_us, until_us))
            until_us = max(until_us, span.end_us)
        return total_us

    def overlaps(self) -> list[tuple[Span, Span]]:
        """Pairs of neighbours of which the second starts before the first has ended."""
        return [
            (earlier, later)
            for earlier, later in zip(self.spans, self.spans[1:], strict=False)
            if later.start_us < earlier.end_us
        ]

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def _some(self) -> tuple[Span, ...]:
        if not self.spans:
            raise HydraulisError(
                "the trace has no such span to ask for a time; ask for less with where()"
            )
        return self.spans


def _value(span: Span, key: str) -> int | str | bool | None:
    if key in ("rank", "name", "track", "is_planned"):
        value: int | str | bool = getattr(span, key)
        return value
    return span.detail.get(key)
