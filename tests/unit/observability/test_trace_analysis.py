"""Queries of a trace, the table of shares, the picture."""

from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.trace import Span, Spans, TraceWriter, rank_file, rank_shares
from tests.support.trace_probes import overlaps


def span(name: str, start_us: float, end_us: float, track: str = "compute", **more: Any) -> Span:
    detail = {"iteration": 1} | more.pop("detail", {})
    fields: dict[str, Any] = {"rank": 0} | more
    return Span(track=track, name=name, start_us=start_us, end_us=end_us, detail=detail, **fields)


SPANS = [
    span("iteration", 0, 100, "iteration", detail={"strategy": "tp1"}),
    span("gather", 0, 30, "regroup", detail={"bucket": 0}),
    span("gather wait", 10, 20, "host"),
    span("forward", 10, 40, detail={"micro_batch": 0}),
    span("pipeline wait", 40, 55),
    span("backward", 55, 90, detail={"micro_batch": 0}),
    span("scatter", 80, 100, "regroup", detail={"bucket": 0}),
    span("forward", 0, 12, is_planned=True, detail={"micro_batch": 0}),
    span("backward", 12, 36, is_planned=True, detail={"micro_batch": 0}),
]


def test_shares_of_a_rank() -> None:
    (shares,) = rank_shares(Spans.of(SPANS))
    assert shares.window_us == 100
    assert (shares.forward_us, shares.backward_us, shares.planned_us) == (30, 35, 36)
    assert shares.wait_us == 25
    assert shares.busy_us == 55, "forward and backward less the wait within"
    assert shares.idle_us == 20
    assert shares.transfer_us == 50
    assert shares.hidden_us == 10 + 10, "20 to 30 during forward, 80 to 90 during backward"


def test_queries() -> None:
    spans = Spans.of(SPANS)
    measured = spans.where(is_planned=False)
    assert (
        measured.where(name="scatter").first_start_us < measured.where(name="backward").last_end_us
    )
    assert measured.where(bucket=0).values("name") == ["gather", "scatter"]
    assert spans.where(iteration=2).values("name") == []
    assert overlaps(spans.where(track="regroup")) == []
    overlap = overlaps(measured.named("forward", "gather"))
    assert [(a.name, b.name) for a, b in overlap] == [("gather", "forward")]
    assert measured.named("forward", "gather").total_us == 40
    with pytest.raises(HydraulisError, match="no such span"):
        _ = spans.where(rank=5).first_start_us


def test_the_command_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    TraceWriter(rank_file(tmp_path, 0)).write(SPANS)  # a run that never closed its file
    assert main(["trace", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "55%" in printed
    assert "25%" in printed
    assert str(tmp_path / "trace.json") in printed
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert main(["trace", str(tmp_path), "--iteration", "9"]) == 2
    assert "iteration 9 is not in the trace" in capsys.readouterr().err
