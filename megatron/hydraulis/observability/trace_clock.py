"""How far the clocks of ranks are apart, from stamps taken around barriers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.errors import HydraulisError

__all__ = ["BarrierStamps", "ClockOffset", "clock_offsets"]


@dataclass(frozen=True, slots=True)
class BarrierStamps:
    """What one rank's clock read around a few barriers of all ranks."""

    clock: str
    """Ranks that name the same clock read the same one: those of one booted machine."""
    before_ns: tuple[int, ...]
    after_ns: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.before_ns or len(self.before_ns) != len(self.after_ns):
            raise HydraulisError(
                f"clocks are compared by stamps before and after each barrier, but there are "
                f"{len(self.before_ns)} before and {len(self.after_ns)} after; take as many of both"
            )


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A rank's clock minus rank 0's at the same moment."""

    offset_ns: int
    error_ns: int
    """The true offset is no further away than this; 0 for the same clock."""


def clock_offsets(stamps: Sequence[BarrierStamps]) -> list[ClockOffset]:
    """Offset of every rank's clock to that of rank 0.

    No rank leaves a barrier before every rank has entered it. With d the offset of rank r, each
    barrier therefore says ``before_r - after_0 <= d <= after_r - before_0``; the offset is the
    middle of what all barriers leave, as in NTP (RFC 5905). Ranks of one machine share a clock,
    and what all of them know of it.
    """
    reference = stamps[0]
    bounds: dict[str, tuple[int, int]] = {}
    for own in stamps:
        if len(own.before_ns) != len(reference.before_ns):
            raise HydraulisError(
                f"all ranks pass the same barriers, but one has stamps of {len(own.before_ns)} and "
                f"rank 0 of {len(reference.before_ns)}; exchange them anew"
            )
        lower = max(b - a for b, a in zip(own.before_ns, reference.after_ns, strict=True))
        upper = min(a - b for a, b in zip(own.after_ns, reference.before_ns, strict=True))
        known = bounds.get(own.clock, (lower, upper))
        bounds[own.clock] = (max(lower, known[0]), min(upper, known[1]))
    bounds[reference.clock] = (0, 0)
    return [
        ClockOffset((lower + upper) // 2, max(0, upper - lower + 1) // 2)
        for lower, upper in (bounds[own.clock] for own in stamps)
    ]
