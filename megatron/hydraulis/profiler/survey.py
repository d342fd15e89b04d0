"""Goes over the grid of every scheme: what is measured, what is left out, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.hydraulis.profiler.grid import GridPoint
from megatron.hydraulis.profiler.measurements import MeasuredPoint

__all__ = ["Ledger", "PointOutcome", "Rig", "Survey", "expected_peak_bytes"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PointOutcome:
    """What a rig found; the same on every rank."""

    stage_ms: tuple[float, ...] = ()
    forward_ms: float = 0.0
    peak_bytes: int = 0
    why_not: str = ""


class Rig(Protocol):
    """Runs micro-batches of one scheme. Collective over the ranks of the job."""

    def run_point(self, scheme: str, point: GridPoint) -> PointOutcome:
        """Measure a micro-batch on every replica at once."""
        ...


class Ledger(Protocol):
    """Where results are kept: `Measurements` on rank 0, its echo on the others."""

    def find(self, scheme: str, point: GridPoint) -> MeasuredPoint | None:
        """A result that is there."""
        ...

    def begin(self, scheme: str, point: GridPoint) -> bool:
        """Whether to measure the point now."""
        ...

    def add(self, point: MeasuredPoint) -> None:
        """Keep a result."""
        ...


class Survey:
    """Measures the points of each scheme by rising size until one does not fit.

    Args:
        rig: measures.
        ledger: keeps, and knows what an earlier run found.
        limit_bytes: memory that a rank may take; a point that is expected to take more, by those
            before it, is not tried: on a CPU it would be the end of the process.
        told: called with each result and whether it is new.
    """

    def __init__(
        self,
        rig: Rig,
        ledger: Ledger,
        *,
        limit_bytes: int | None = None,
        told: Callable[[MeasuredPoint, bool], None] = lambda point, is_new: None,
    ) -> None:
        self._rig = rig
        self._ledger = ledger
        self._limit_bytes = limit_bytes
        self._told = told

    def run(self, scheme: str, points: Iterable[GridPoint]) -> list[MeasuredPoint]:
        """All points of a scheme; once one does not fit, those of as many tokens or more do not.

        Points come by rising size.
        """
        results: list[MeasuredPoint] = []
        too_many: int | None = None
        for point in points:
            found = self._ledger.find(scheme, point)
            is_new = found is None
            if found is None:
                found = self._measure(scheme, point, results, too_many)
            results.append(found)
            if not found.fits and too_many is None:
                too_many = point.num_tokens
            self._told(found, is_new)
        return results

    def _measure(
        self,
        scheme: str,
        point: GridPoint,
        before: Sequence[MeasuredPoint],
        too_many: int | None,
    ) -> MeasuredPoint:
        why_not = ""
        if too_many is not None and point.num_tokens >= too_many:
            why_not = f"{too_many} tokens do not fit"
        expected = expected_peak_bytes(before, point.num_tokens)
        limit = self._limit_bytes
        if not why_not and limit is not None and expected is not None and expected > limit:
            why_not = (
                f"expected to take {expected / 1e9:.3g} GB of the {limit / 1e9:.3g} GB of a rank"
            )
        if why_not:
            result = MeasuredPoint(scheme=scheme, point=point, why_not=why_not)
        elif not self._ledger.begin(scheme, point):
            ended = self._ledger.find(scheme, point)
            assert ended is not None  # begin has noted why it was not begun
            return ended
        else:
            outcome = self._rig.run_point(scheme, point)
            result = MeasuredPoint(
                scheme=scheme,
                point=point,
                stage_ms=outcome.stage_ms,
                forward_ms=outcome.forward_ms,
                peak_bytes=outcome.peak_bytes,
                why_not=outcome.why_not,
            )
        self._ledger.add(result)
        return result


def expected_peak_bytes(before: Sequence[MeasuredPoint], num_tokens: int) -> float | None:
    """Peak memory of a micro-batch by the two largest sizes measured before it.

    Memory grows linearly with the tokens. None where fewer than two sizes are known.
    """
    peaks: dict[int, int] = {}
    for point in before:
        if point.fits:
            size = point.point.num_tokens
            peaks[size] = max(point.peak_bytes, peaks.get(size, 0))
    if len(peaks) < 2:
        return None
    smaller, larger = sorted(peaks)[-2:]
    slope = max(0.0, (peaks[larger] - peaks[smaller]) / (larger - smaller))
    return peaks[larger] + slope * (num_tokens - larger)
