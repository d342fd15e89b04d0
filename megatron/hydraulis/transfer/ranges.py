"""Ranges of a bucket in canonical order, and their algebra.

A *run of ranges* is ascending and disjoint; what the functions return never touch each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.hydraulis.errors import PlanError


@dataclass(frozen=True, order=True)
class Range:
    """Elements [start, stop) of a bucket in canonical order."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise PlanError(f"range [{self.start}, {self.stop}) is empty or negative")

    @property
    def num_elements(self) -> int:
        """Length of the range."""
        return self.stop - self.start


def num_elements(ranges: Iterable[Range]) -> int:
    """Elements of all ranges."""
    return sum(r.stop - r.start for r in ranges)


def union(runs: Iterable[Iterable[Range]]) -> tuple[Range, ...]:
    """Every element that is in some run, once."""
    merged: list[Range] = []
    for r in sorted(r for run in runs for r in run):
        if merged and r.start <= merged[-1].stop:
            if r.stop > merged[-1].stop:
                merged[-1] = Range(merged[-1].start, r.stop)
        else:
            merged.append(r)
    return tuple(merged)


def intersection(first: Sequence[Range], second: Sequence[Range]) -> tuple[Range, ...]:
    """Every element that is in both runs; one pass over each."""
    found: list[Range] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i].start, second[j].start)
        stop = min(first[i].stop, second[j].stop)
        if start < stop:
            if found and found[-1].stop == start:
                found[-1] = Range(found[-1].start, stop)
            else:
                found.append(Range(start, stop))
        if first[i].stop < second[j].stop:
            i += 1
        else:
            j += 1
    return tuple(found)


def clip(ranges: Sequence[Range], start: int, stop: int) -> tuple[Range, ...]:
    """The part of a run that lies in [start, stop), which may be empty."""
    return intersection(ranges, (Range(start, stop),)) if start < stop else ()
