"""Threads of the view: spans of one track that overlap stand in lanes below one another."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.hydraulis.observability.trace_events import TRACKS, Span

MAX_LANES = 100
"""Lanes of a track before thread ids of the next one begin."""


@dataclass
class _Lane:
    thread_id: int
    number: int
    end_us: float


class LaneAssigner:
    """Gives every span the first lane of its track that is free from its start on.

    A viewer draws spans of one thread as nested calls, and draws those that overlap otherwise
    wrongly or not at all.
    """

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, bool, str], list[_Lane]] = {}
        self._processes: set[tuple[int, bool]] = set()

    def assign(self, span: Span) -> tuple[int, int | None, bool]:
        """(thread id, number of the lane if it is new, whether its process is new too)."""
        track = TRACKS.index(span.track) if span.track in TRACKS else len(TRACKS)
        lanes = self._lanes.setdefault((span.rank, span.is_planned, span.track), [])
        for lane in lanes:
            if lane.end_us <= span.start_us:
                lane.end_us = span.end_us
                return lane.thread_id, None, False
        thread_id = 1 + track * MAX_LANES + len(lanes)
        lanes.append(_Lane(thread_id, len(lanes), span.end_us))
        process = (span.rank, span.is_planned)
        is_new_process = process not in self._processes
        self._processes.add(process)
        return thread_id, len(lanes) - 1, is_new_process
