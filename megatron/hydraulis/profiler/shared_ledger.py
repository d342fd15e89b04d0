"""Measurements of a job: rank 0 keeps the file, every rank knows what is in it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron.hydraulis.profiler.grid import GridPoint
from megatron.hydraulis.profiler.measurements import (
    MeasuredPoint,
    MeasuredStrategy,
    Measurements,
)

__all__ = ["SharedLedger"]


class SharedLedger:
    """A `survey.Ledger`. Collective: construction and `begin`.

    Args:
        file: on rank 0; None on the others.
    """

    def __init__(self, file: Measurements | None) -> None:
        self._file = file
        found = None if file is None else (dict(file.points), dict(file.strategies))
        self._points, self.strategies = _from_rank_0(found)

    def find(self, scheme: str, point: GridPoint) -> MeasuredPoint | None:
        """A result that is there."""
        found: MeasuredPoint | None = self._points.get((scheme, point.lengths))
        return found

    def begin(self, scheme: str, point: GridPoint) -> bool:
        """Whether to measure the point now; see `Measurements.begin`."""
        answer = None
        if self._file is not None:
            may_begin = self._file.begin(scheme, point)
            answer = (may_begin, self._file.points.get((scheme, point.lengths)))
        may_begin, ended = _from_rank_0(answer)
        if ended is not None:
            self._points[scheme, point.lengths] = ended
        return bool(may_begin)

    def add(self, point: MeasuredPoint) -> None:
        """Keep a result, which every rank has."""
        self._points[point.scheme, point.point.lengths] = point
        if self._file is not None:
            self._file.add_point(point)

    def add_strategy(self, strategy: MeasuredStrategy) -> None:
        """Keep a result, which every rank has."""
        self.strategies[strategy.name] = strategy
        if self._file is not None:
            self._file.add_strategy(strategy)


def _from_rank_0(value: Any) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
