"""How the ranks of a job meet: what the launcher has set, who is missing, a port in use."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from megatron.hydraulis.errors import ConfigurationError, HydraulisError
from megatron.hydraulis.loop import startup

LIMIT = timedelta(seconds=0.5)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The environment of rank 0 of 2; returns its port, which is free."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        free = int(listener.getsockname()[1])
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(startup, "SECONDS_UNTIL_NOTICE", 0.1)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free),
    }.items():
        monkeypatch.setenv(name, value)
    return free


def test_a_rank_that_does_not_come_is_named_while_it_is_waited_for_and_at_the_end(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigurationError, match=f"meet at 127.0.0.1:{port} .* 1 did not come: 1;"):
        startup.meet(LIMIT)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rank 0 waits at 127.0.0.1:{port} for 1 of 2 ranks: 1; ")


def test_a_rank_says_that_rank_0_does_not_come(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(HydraulisError, match=f"waited 0 s for rank 0 at 127.0.0.1:{port}"):
        startup.meet(LIMIT)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"rank 1 waits for rank 0 at 127.0.0.1:{port}"


def test_a_port_in_use_is_an_error(port: int) -> None:
    with socket.socket() as listener:
        listener.bind(("", port))
        listener.listen()
        with pytest.raises(ConfigurationError, match=f"{port} of 127.0.0.1 but .*: in use; set"):
            startup.meet(LIMIT)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("WORLD_SIZE", "two", "WORLD_SIZE is a whole number of at least 1 .* is 'two'"),
        ("WORLD_SIZE", "0", "WORLD_SIZE is a whole number of at least 1 .* is '0'"),
        ("RANK", "-1", "RANK is a whole number of at least 0 .* is '-1'"),
        ("RANK", "2", "numbered from 0 to 1 as WORLD_SIZE is 2 but RANK is 2"),
        ("LOCAL_RANK", "", "LOCAL_RANK is a whole number"),
        ("MASTER_PORT", "29500x", "MASTER_PORT is a whole number"),
    ],
)
def test_what_a_launcher_sets_is_checked(
    name: str, value: str, says: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup.check_launcher_numbers()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=says):
        startup.check_launcher_numbers()


def test_a_process_without_a_launcher_is_told_how_to_start_ranks(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    startup.check_launched("train FLAGS")
    monkeypatch.delenv("MASTER_ADDR")
    startup.check_launcher_numbers()
    with pytest.raises(ConfigurationError, match="MASTER_ADDR is not set; run torchrun --standal"):
        startup.check_launched("train FLAGS")


def test_fewer_gpus_than_ranks_are_refused() -> None:
    startup.check_devices(8, 8)
    with pytest.raises(ConfigurationError, match=r"4 ranks and has 1 GPU.* CUDA_VISIBLE_DEVICES="):
        startup.check_devices(4, 1)
