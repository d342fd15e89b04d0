"""How the program ends when something was raised, before and after ranks have met."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megatron.hydraulis.errors import DataError
from megatron.hydraulis.loop import entry

EndWith = Callable[..., None]


class EndedAtOnceError(BaseException):
    """In the place of `os._exit`."""


@pytest.fixture
def end_with(monkeypatch: pytest.MonkeyPatch) -> EndWith:
    """Runs the program, in which an error is raised."""

    def end_with(error: BaseException, *, ranks_have_met: bool, rank: int = 0) -> None:
        def fail(*_: object) -> None:
            raise error

        def end(status: int) -> None:
            raise EndedAtOnceError(status)

        monkeypatch.setattr(entry, "_run", fail)
        monkeypatch.setattr(dist, "is_initialized", lambda: ranks_have_met)
        monkeypatch.setattr(os, "_exit", end)
        monkeypatch.setenv("RANK", str(rank))
        entry.main([])

    return end_with


def test_an_error_of_ours_is_told_in_a_line(
    end_with: EndWith, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks_have_met, how in ((False, SystemExit), (True, EndedAtOnceError)):
        with pytest.raises(how) as ended:
            end_with(DataError("too short"), ranks_have_met=ranks_have_met)
        assert ended.value.args == (entry.EXIT_STATUS_OF_ERROR,)
        assert capsys.readouterr().err == "error: too short\n"


def test_another_error_ends_the_process_at_once_where_ranks_may_wait(
    end_with: EndWith, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError, match="no such thing"):
        end_with(ZeroDivisionError("no such thing"), ranks_have_met=False)
    assert capsys.readouterr().err == "", "Python prints it"
    with pytest.raises(EndedAtOnceError) as ended:
        end_with(ZeroDivisionError("no such thing"), ranks_have_met=True, rank=3)
    assert ended.value.args == (1,)
    told = capsys.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith(
        f"ZeroDivisionError: no such thing\nmet on {socket.gethostname()}, rank 3\n"
    )


@pytest.mark.parametrize("ranks_have_met", [False, True])
@pytest.mark.parametrize("request_to_end", [SystemExit(7), KeyboardInterrupt()])
def test_requests_to_end_are_passed_on(
    request_to_end: BaseException, ranks_have_met: bool, end_with: EndWith
) -> None:
    with pytest.raises(type(request_to_end)) as ended:
        end_with(request_to_end, ranks_have_met=ranks_have_met)
    assert ended.value is request_to_end


@pytest.mark.parametrize(
    ("who", "variable"),
    [("Slurm", "SLURM_RESTART_COUNT"), ("torchrun", "TORCHELASTIC_RESTART_COUNT")],
)
def test_a_run_that_is_started_again_and_does_not_go_on_says_so(
    who: str, variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(count: str, *, save: str | None = None, loads: bool = False) -> str:
        monkeypatch.setenv(variable, count)
        entry._warn_of_restart(save=save, loads=loads)
        return capsys.readouterr().err

    for other in entry.RESTART_COUNTS.values():
        monkeypatch.delenv(other, raising=False)
    assert told("0") == told("2", loads=True) == ""
    assert told("2").startswith(f"warning: {who} has ")
    assert "(restart 2)" in told("2")
    assert "give --save DIR --load DIR to go on" in told("2")
    assert "give --load here to go on" in told("2", save="here")
