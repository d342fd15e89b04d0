"""Every error is reported, by as few ranks as possible."""

import signal
import socket
import time

import pytest

from megatron.hydraulis.errors import (
    ConfigurationError,
    DataError,
    HydraulisError,
    NonFiniteLossError,
    PlanError,
    StrategyError,
    UpstreamVersionError,
)
from megatron.hydraulis.loop.faults import heed_signals, report_error, seconds_before_report

ALL = (
    HydraulisError,
    ConfigurationError,
    StrategyError,
    PlanError,
    DataError,
    NonFiniteLossError,
    UpstreamVersionError,
)


def seconds(kind: type[HydraulisError], rank: int, local_rank: int, have_met: bool) -> float:
    return seconds_before_report(
        kind("wrong"), rank=rank, local_rank=local_rank, ranks_have_met=have_met
    )


@pytest.mark.parametrize("kind", ALL)
def test_before_ranks_meet_the_first_rank_of_every_node_reports(kind: type[HydraulisError]) -> None:
    assert seconds(kind, rank=0, local_rank=0, have_met=False) == 0.0
    assert seconds(kind, rank=8, local_rank=0, have_met=False) == 0.0
    assert seconds(kind, rank=9, local_rank=1, have_met=False) > 0.0


@pytest.mark.parametrize("kind", [HydraulisError, DataError, UpstreamVersionError])
def test_after_they_met_a_rank_reports_its_own_error(kind: type[HydraulisError]) -> None:
    assert seconds(kind, rank=3, local_rank=3, have_met=True) == 0.0


@pytest.mark.parametrize("kind", [ConfigurationError, StrategyError, NonFiniteLossError, PlanError])
def test_after_they_met_rank_0_reports_a_common_error(kind: type[HydraulisError]) -> None:
    assert seconds(kind, rank=0, local_rank=0, have_met=True) == 0.0
    later = seconds(kind, rank=8, local_rank=0, have_met=True)
    assert 0.0 < later < seconds(kind, rank=9, local_rank=1, have_met=True)


def test_a_shared_error_is_reported_by_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataError, "is_shared", True)
    assert seconds(DataError, rank=0, local_rank=0, have_met=True) == 0.0
    assert seconds(DataError, rank=3, local_rank=3, have_met=True) > 0.0


def test_signals_end_the_run_after_the_iteration_and_a_second_interrupt_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    received: list[int] = []
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
        heed_signals(signal.SIGUSR2)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        heed_signals(signal.SIGTERM)
        for number in numbers:
            signal.raise_signal(number)
        assert received == list(numbers)
        assert capfd.readouterr().err.startswith("SIGINT: the run ends after this iteration")
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        heed_signals(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "as started in the background"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_rank_that_was_not_ended_reports_with_host_and_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setenv("RANK", "58")
    monkeypatch.setenv("LOCAL_RANK", "2")
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        report_error(PlanError("the plan has another digest; start anew"), ranks_have_met=True)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(slept) == 1
    printed = capsys.readouterr().err
    assert printed == "error: node7, rank 58: the plan has another digest; start anew\n"


def test_rank_0_needs_no_name_and_notes_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    error = DataError("no documents")
    report_error(error, ranks_have_met=False)
    assert capsys.readouterr().err == "error: no documents\n"
    error.add_note("rank 0, phase 'scatter', strategy 'short'")
    report_error(error, ranks_have_met=True)
    printed = capsys.readouterr().err
    assert printed == "error: no documents (rank 0, phase 'scatter', strategy 'short')\n"
