"""The stand-in's device under torch's own CUDA build: memory, copies, events, errors, log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda_stand_in.device_probe import INVALID_VALUE, MIB, NOT_SUPPORTED
from tests.cuda_stand_in.launch import environment

MEMORY_BYTES = 256 * MIB
NUM_DEVICES = 3


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("device") / "log"


@pytest.fixture(scope="module")
def probe(log: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_stand_in.device_probe"],
        env=environment(
            devices=NUM_DEVICES, memory_bytes=MEMORY_BYTES, log=log, STAND_IN_LOG_KERNELS=1
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_devices_are_visible(probe: dict[str, Any]) -> None:
    assert probe["devices"] == NUM_DEVICES
    assert "A100" in probe["name"]


def test_the_allocator_counts_every_byte(probe: dict[str, Any]) -> None:
    memory = probe["memory"]
    assert memory["allocated"] == 97 * MIB
    assert memory["reserved"] == memory["used"] >= memory["allocated"]
    assert memory["total"] == MEMORY_BYTES
    assert memory["free"] == MEMORY_BYTES - memory["used"]
    assert memory["left"] == memory["used at the end"] == 0
    assert memory["peak"] == 97 * MIB


def test_a_full_device_is_out_of_memory(probe: dict[str, Any]) -> None:
    assert "Tried to allocate 160.00 MiB" in probe["memory"]["out of memory"]
    assert "total capacity of 256.00 MiB" in probe["memory"]["out of memory"]


def test_copies_move_values(probe: dict[str, Any]) -> None:
    assert probe["copies"] == {"equal": True, "zero": "cuda"}


def test_what_a_device_would_reject_is_an_error(probe: dict[str, Any]) -> None:
    assert probe["refusals"] == {
        "free of host memory": INVALID_VALUE,
        "free of an inner address": INVALID_VALUE,
        "copy to host memory as to a device": INVALID_VALUE,
        "copy to unmapped memory": INVALID_VALUE,
        "copy to the device": 0,
        "an unsupported function": NOT_SUPPORTED,
    }


def test_elapsed_times(probe: dict[str, Any]) -> None:
    assert 0.0 <= probe["events"]["ms"] < 1000.0
    assert probe["events"]["never recorded"] != "no error"
    assert probe["events"]["no timing"] != "no error"


def test_calls_are_logged(probe: dict[str, Any], log: Path) -> None:
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [int(number) for number, *_ in lines] == list(range(len(lines)))
    kinds = {line[1] for line in lines}
    assert {"MALLOC", "FREE", "PIN", "COPY", "KERNEL", "RECORD", "OOM"} <= kinds
    assert any("reduce_kernel" in line[-1] for line in lines if line[1] == "KERNEL")
