"""How the program ends after an error, before and after ranks have met."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.loop import entry

EndWith = Callable[..., None]


class EndedAtOnceError(BaseException):
    """Replaces `os._exit`."""


@pytest.fixture
def end_with(monkeypatch: pytest.MonkeyPatch) -> EndWith:
    """Runs the program, which raises an error."""

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


def test_an_error_of_ours_is_one_line(
    end_with: EndWith, capsys: pytest.CaptureFixture[str]
) -> None:
    for ranks_have_met, how in ((False, SystemExit), (True, EndedAtOnceError)):
        with pytest.raises(how) as ended:
            end_with(DataError("too short"), ranks_have_met=ranks_have_met)
        assert ended.value.args == (entry.EXIT_STATUS_OF_ERROR,)
        assert capsys.readouterr().err == "error: too short\n"


def test_another_error_ends_the_process_at_once_if_ranks_may_wait(
    end_with: EndWith, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ZeroDivisionError, match="no such thing"):
        end_with(ZeroDivisionError("no such thing"), ranks_have_met=False)
    assert capsys.readouterr().err == "", "Python prints it"
    with pytest.raises(EndedAtOnceError) as ended:
        end_with(ZeroDivisionError("no such thing"), ranks_have_met=True, rank=3)
    assert ended.value.args == (1,)
    printed = capsys.readouterr().err
    assert printed.startswith("Traceback")
    assert printed.endswith(f"no such thing\nmet on {socket.gethostname()}, rank 3\n")


@pytest.mark.parametrize("ranks_have_met", [False, True])
def test_a_request_to_end_is_passed_on(ranks_have_met: bool, end_with: EndWith) -> None:
    with pytest.raises(SystemExit) as ended:
        end_with(SystemExit(7), ranks_have_met=ranks_have_met)
    assert ended.value.args == (7,)


@pytest.mark.parametrize("ranks_have_met", [False, True])
def test_an_interrupt_ends_every_rank_and_rank_0_says_so(
    ranks_have_met: bool, end_with: EndWith, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, num_lines in ((0, 1), (1, 0)):
        with pytest.raises(EndedAtOnceError) as ended:
            end_with(KeyboardInterrupt(), ranks_have_met=ranks_have_met, rank=rank)
        assert ended.value.args == (130,)
        told = capsys.readouterr().err
        assert len(told.splitlines()) == num_lines
        assert told.startswith("interrupted: ") == (rank == 0)


def test_a_lost_connection_is_one_line_with_its_place(
    end_with: EndWith, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    error = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:39. GLHF\nmore")
    error.add_note("phase 'scatter' of iteration 3")
    with pytest.raises(EndedAtOnceError) as ended:
        end_with(error, ranks_have_met=True)
    assert ended.value.args == (1,)
    assert len(slept) == 1, "so that the launcher ends the others first"
    told = capsys.readouterr().err
    assert told.startswith(f"{socket.gethostname()}, rank 0: another rank is gone: Connection ")
    assert " [127.0.0.1]:39 (phase 'scatter' of iteration 3); " in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("who", "variable"),
    [("Slurm", "SLURM_RESTART_COUNT"), ("torchrun", "TORCHELASTIC_RESTART_COUNT")],
)
def test_a_restarted_run_without_a_checkpoint_warns(
    who: str, variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def warning(count: str, *, save: str | None = None, loads: bool = False) -> str:
        monkeypatch.setenv(variable, count)
        entry._warn_of_restart(save=save, loads=loads)
        return capsys.readouterr().err

    for other in entry.RESTART_COUNTS.values():
        monkeypatch.delenv(other, raising=False)
    assert warning("0") == warning("2", loads=True) == ""
    assert warning("2").startswith(f"warning: {who} has ")
    assert "(restart 2)" in warning("2")
    assert "give --save DIR --load DIR to go on" in warning("2")
    assert "give --load here to go on" in warning("2", save="here")


def test_hardware_queues_follow_the_strategies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = tmp_path / "pool.json"

    def queues(*words: str, given: str = "") -> str:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
        entry.set_hardware_queues(["--lr", "1", *words])
        return os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]

    assert queues() == queues("--strategy", "8*tp1") == queues("--strategy=cp4+4*pp2") == "32"
    assert queues("--strategy", "6*tp1+tp2") == queues("--strategy=tp16") == "1"
    assert queues("--strategy-pool", "auto") == queues("--tensor-model-parallel-size", "2") == "1"
    for replicas, number in (("tp4+4*tp1", "1"), ("8*tp1", "32")):
        pool.write_text(f'{{"strategies": [{{"name": "S0", "replicas": "{replicas}"}}]}}')
        assert queues("--strategy-pool", str(pool)) == queues("--pool", str(pool)) == number
    assert queues("--strategy", "tp8", given="8") == "8"
    assert queues("--strategy-pool", "--strategy") == "32"  # which parsing refuses


@pytest.mark.parametrize(("schemes", "number"), [(("cp2", "tp2"), "1"), (("cp4~fs", "pp2"), "32")])
def test_profiles_are_measured_with_the_hardware_queues_of_training(
    schemes: tuple[str, ...], number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "")
    monkeypatch.setenv("WORLD_SIZE", "many")  # an error, before anything is measured
    assert main(["profile", "--out", "p", "--schemes", *schemes, "--", "--lr", "1"]) == 2
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == number
