"""What the profiler makes of the times of an iteration."""

import pytest

from megatron.hydraulis.profiler.measurements import GridPoint, MeasuredPoint
from megatron.hydraulis.profiler.rig import (
    RankIteration,
    makespan_ms,
    numbers_of_micro_batches,
    period_ms,
)
from megatron.hydraulis.runtime.spans import RecordedSpan
from megatron.hydraulis.strategy import Scheme, Strategy

TP1, TP2, PP2 = Scheme(1), Scheme(2), Scheme(1, pp=2)


def point(scheme: Scheme, time_ms: float) -> MeasuredPoint:
    return MeasuredPoint(
        scheme=str(scheme),
        point=GridPoint("mixture", (8,)),
        stage_ms=(time_ms,) * scheme.pp,
        forward_ms=time_ms / 3,
    )


def test_faster_replicas_get_micro_batches_until_the_slowest_ends() -> None:
    points = {TP1: point(TP1, 10.0), TP2: point(TP2, 25.0), PP2: point(PP2, 9.0)}
    # 4 of tp2 take 100 ms; 10 of pp2 take (10 + 1) * 9 ms.
    assert numbers_of_micro_batches(points) == {TP1: 10, TP2: 4, PP2: 10}


def test_a_much_slower_scheme_does_not_lengthen_the_profile() -> None:
    deep = Scheme(1, pp=40)
    points = {TP1: point(TP1, 20.0), TP2: point(TP2, 5000.0), deep: point(deep, 20.0)}
    # 4 of tp2 take as long as 1,000 of tp1; a pipeline needs two for each stage.
    assert numbers_of_micro_batches(points) == {TP1: 64, TP2: 4, deep: 80}


def test_only_inner_micro_batches_count() -> None:
    ends_ms = {0: 50, 1: 2, 2: 4, 3: 70}  # the first and the last one overlap regrouping
    spans = [
        RecordedSpan(name, 0, int(1e6 * ms), {"micro_batch": number})
        for name in ("forward", "backward")
        for number, ms in ends_ms.items()
    ]
    spans.append(RecordedSpan("optimizer", 0, int(5e6)))
    found = RankIteration.of(spans, 200.0, num_micro_batches=4)
    assert (found.micro_batch_ms, found.optimizer_ms, found.wall_ms) == (6.0, 5.0, 200.0)
    assert RankIteration.of([], 200.0, num_micro_batches=0).micro_batch_ms == 0.0


def test_the_period_contains_the_pauses_between_micro_batches() -> None:
    starts_ms = (0, 90, 100, 110, 125, 300)  # each takes 4 ms
    spans = [
        RecordedSpan("backward", int(1e6 * ms), int(1e6 * (ms + 4)), {"micro_batch": number})
        for number, ms in enumerate(starts_ms)
    ]
    assert period_ms(spans, range(1, 5)) == 10.0
    assert period_ms(spans, range(1, 2)) == 0.0


def test_the_makespan_is_that_of_the_slowest_replica() -> None:
    strategy = Strategy.parse("tp2+pp2+tp1", 5)
    numbers = {TP1: 6, TP2: 4, PP2: 4}
    times_ms = [10.0, 12.0, 9.0, 7.0, 5.0]
    ranks = [RankIteration(0.0, 0.0, time_ms) for time_ms in times_ms]
    # tp2: 4 * 11; pp2: (4 + 1) * 9; tp1: 6 * 5.
    assert makespan_ms(strategy, numbers, ranks) == pytest.approx(45.0)
