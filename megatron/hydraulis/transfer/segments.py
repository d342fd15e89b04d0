"""Between the order in which transfers travel and canonical order.

`all_to_all_single` lays its buffers out by partner: what rank 0 sends, then what rank 1 sends. A
rank holds its part of a bucket in canonical order. The two agree for a one-step transfer whose
owners come in the order of their shares, and disagree for permuted owners and for the second step
of a `TwoStepPlan`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.transfer.plan import Transfer, TransferPlan
from megatron.hydraulis.transfer.ranges import Range


@dataclass(frozen=True)
class Segment:
    """Neighbouring elements that lie next to each other in both of two flat buffers."""

    transfer_start: int
    """First element in the buffer that the collective fills or sends."""
    canonical_start: int
    """First element in the rank's part of the bucket, in canonical order and without gaps."""
    num_elements: int


def arrival_segments(plan: TransferPlan, rank: int) -> tuple[Segment, ...]:
    """Where what ``rank`` receives of a *gather* belongs, by rising ``canonical_start``.

    Copy ``num_elements`` from ``transfer_start`` of the received buffer, which holds the transfers
    by rising source, to ``canonical_start`` of what the rank holds of the bucket. A single segment
    means that the buffer is in canonical order already and may be received in place.

    Raises:
        PlanError: an element arrives twice, as in a scatter, whose arrivals are added up instead.
    """
    return _segments(plan.received_by(rank), f"rank {rank} receives")


def departure_segments(plan: TransferPlan, rank: int) -> tuple[Segment, ...]:
    """From where ``rank`` takes what it sends in a *scatter*, by rising ``canonical_start``.

    The mirror image of `arrival_segments`: copy from ``canonical_start`` of what the rank
    contributes to ``transfer_start`` of the buffer to send, which holds the transfers by rising
    destination. A single segment means that the contributions may be sent in place.

    Raises:
        PlanError: an element leaves twice, as in a gather.
    """
    return _segments(plan.sent_by(rank), f"rank {rank} sends")


def merged(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same segments in the same order, neighbours in both buffers made one."""
    found: list[Segment] = []
    for segment in segments:
        if found and _adjoin(found[-1], segment):
            before = found[-1]
            size = before.num_elements + segment.num_elements
            found[-1] = Segment(before.transfer_start, before.canonical_start, size)
        else:
            found.append(segment)
    return tuple(found)


def located_ranges(transfers: Iterable[Transfer]) -> list[tuple[Range, int]]:
    """Every range of the transfers and where it starts in their buffer, in the buffer's order."""
    located, at = [], 0
    for transfer in transfers:
        for r in transfer.ranges:
            located.append((r, at))
            at += r.num_elements
    return located


def _segments(transfers: Iterable[Transfer], what: str) -> tuple[Segment, ...]:
    segments, canonical_start, last_stop = [], 0, 0
    for r, at in sorted(located_ranges(transfers)):
        if r.start < last_stop:
            raise PlanError(
                f"{what} element {r.start} twice, which has no canonical order; ask for the "
                "arrivals of a gather or the departures of a scatter"
            )
        last_stop = r.stop
        segments.append(Segment(at, canonical_start, r.num_elements))
        canonical_start += r.num_elements
    return merged(segments)


def _adjoin(first: Segment, second: Segment) -> bool:
    return (
        first.transfer_start + first.num_elements == second.transfer_start
        and first.canonical_start + first.num_elements == second.canonical_start
    )
