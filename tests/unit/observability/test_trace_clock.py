"""Clocks of ranks, compared by barriers of a simulated job."""

import random

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace_clock import BarrierStamps, clock_offsets


def job(
    offsets_ns: list[int], clocks: list[str], *, num_barriers: int = 8, seed: int = 0
) -> list[BarrierStamps]:
    """Stamps of ranks that enter and leave barriers at random times."""
    generator = random.Random(seed)
    before: list[list[int]] = [[] for _ in offsets_ns]
    after: list[list[int]] = [[] for _ in offsets_ns]
    true_ns = 10**12
    for _ in range(num_barriers):
        entries = [true_ns + generator.randrange(50_000) for _ in offsets_ns]
        for rank, offset in enumerate(offsets_ns):
            before[rank].append(entries[rank] + offset)
            after[rank].append(max(entries) + generator.randrange(20_000) + offset)
        true_ns += 1_000_000
    return [
        BarrierStamps(clock, tuple(b), tuple(a))
        for clock, b, a in zip(clocks, before, after, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_offsets_lie_within_their_bounds(seed: int) -> None:
    true = [0, 0, 7_000_000_000, 7_000_000_000, -123_456, -123_456]
    found = clock_offsets(job(true, ["a", "a", "b", "b", "c", "c"], seed=seed))
    for offset, wanted in zip(found, true, strict=True):
        assert abs(offset.offset_ns - wanted) <= offset.error_ns
        assert offset.error_ns <= 70_000
    assert found[0] == found[1]
    assert (found[1].offset_ns, found[1].error_ns) == (0, 0), "one clock needs no estimate"
    assert found[2] == found[3]
    assert found[4] == found[5]


def test_more_barriers_never_know_less() -> None:
    true, clocks = [0, 5_000], ["a", "b"]
    stamps = job(true, clocks, num_barriers=8, seed=3)
    few = [BarrierStamps(s.clock, s.before_ns[:2], s.after_ns[:2]) for s in stamps]
    assert clock_offsets(stamps)[1].error_ns <= clock_offsets(few)[1].error_ns


def test_stamps_are_checked() -> None:
    with pytest.raises(HydraulisError, match="take as many of both"):
        BarrierStamps("a", (1, 2), (3,))
    with pytest.raises(HydraulisError, match="exchange them anew"):
        clock_offsets([BarrierStamps("a", (1, 2), (3, 4)), BarrierStamps("b", (1,), (3,))])
