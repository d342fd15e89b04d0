"""`scripts/gpu_checks.sh` from end to end: every step runs, and its figures are in the file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.checks import steps
from benchmarks.gpu.runner import NO_MEANING
from benchmarks.gpu.sizes import SMALL
from tests.cuda_stand_in.launch import environment
from tests.support.forked_ranks import IN_MEMORY

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
VALUES_IN_RANKS = Path(__file__).parent / "values_in_ranks"
HANG_S = 300.0
"""Ranks of a job start at different times on a busy machine."""
LITTLE_MEMORY_BYTES = 40 * 2**20
"""Of a device: less than three buffers of preflight."""


def run_checks(
    tmp_path: Path, num_gpus: int, *flags: str, memory_bytes: int | None = None
) -> tuple[dict[str, Any], str]:
    """The script with toy models; what the one file holds, and what the script has printed."""
    exchange = tempfile.mkdtemp(prefix="exchange_", dir=IN_MEMORY)
    settings = environment(
        devices=num_gpus,
        memory_bytes=memory_bytes,
        exchange=Path(exchange),
        timeout_s=HANG_S,
        HYDRAULIS_WITHOUT_TE=1,
    )
    settings["PYTHONPATH"] = os.pathsep.join([str(VALUES_IN_RANKS), settings["PYTHONPATH"]])
    command = ["bash", "scripts/gpu_checks.sh"]
    if not (ROOT / ".venv").is_dir():  # the environment is somewhere else
        command = [sys.executable, "-m", "benchmarks.gpu"]
    options = ("--small", "--stand-in", "--minutes", "120", "--results", str(tmp_path))
    try:
        ended = subprocess.run(
            [*command, *options, *flags], cwd=ROOT, env=settings, capture_output=True, text=True
        )
    finally:
        shutil.rmtree(exchange)
    files = list(tmp_path.glob("*.json"))
    assert len(files) == 1, ended.stdout + ended.stderr
    found = json.loads(files[0].read_text())
    assert ended.returncode == int(found["failed"]), ended.stdout + ended.stderr
    assert f"Please send this file back, whatever it says: {files[0]}" in ended.stdout
    return found, ended.stdout


def assert_complete(found: dict[str, Any], num_gpus: int) -> None:
    """All steps ran that can, each gave its figures, and nothing that has a meaning failed."""
    expected = steps(SMALL, num_gpus, peak_flops_per_s=1.0, profile_path=Path("profile.json"))
    assert [step["name"] for step in found["steps"]] == [step.name for step in expected]
    for step, wanted in zip(found["steps"], expected, strict=True):
        what = json.dumps(step, indent=1)
        assert step["status"] == ("not run" if wanted.why_not else "done"), what
        for row, figure in zip(step["figures"], wanted.figures, strict=True):
            assert row["key"] == figure.key
            if wanted.why_not:
                assert row["why"] == wanted.why_not
            elif row["key"] == "products":
                assert row["why"] == "left out with toy sizes"
            elif row["key"].endswith("te"):
                assert "Transformer Engine is not installed" in row["why"], what
            else:
                assert row["value"] is not None, what
                allowed = [NO_MEANING] if figure.is_of_device else ["pass", "measured"]
                assert row["verdict"] in allowed, what
    assert_machine(found, num_gpus)


def assert_machine(found: dict[str, Any], num_gpus: int) -> None:
    """The file says what the checks ran on."""
    machine = found["machine"]
    assert len(machine["devices"]) == num_gpus
    for key in ("torch", "cuda", "nccl", "driver", "megatron-core", "topology", "settings"):
        assert machine[key], key
    assert found["commit"]
    assert "What was checked" in found["table"][0]


@pytest.mark.nightly
@pytest.mark.parametrize("num_gpus", [1, 2, 4, 8])
def test_every_step_runs_and_gives_figures(num_gpus: int, tmp_path: Path) -> None:
    found, printed = run_checks(tmp_path, num_gpus)
    print(printed)
    assert_complete(found, num_gpus)
    assert not found["failed"]


@pytest.mark.timeout(600)  # three programs that import torch and Megatron
def test_a_broken_step_shows_its_log_and_the_others_run(tmp_path: Path) -> None:
    """A device with little memory: too little to exchange 16 MiB, enough for the toys."""
    flags = ("--steps", "preflight", "order-1", "attention")
    found, printed = run_checks(tmp_path, 1, *flags, memory_bytes=LITTLE_MEMORY_BYTES)
    preflight, order, attention = found["steps"]
    assert preflight["status"] == "failed"
    assert any("OutOfMemoryError" in tail for tail in preflight["log_tails"].values())
    assert (order["status"], order["why"]) == ("not run", "it needs 2 GPUs and there is 1")
    assert attention["status"] == "done", json.dumps(attention, indent=1)
    (kernel,) = [row for row in attention["figures"] if row["key"] == "torch"]
    assert kernel["verdict"] == NO_MEANING
    assert kernel["value"] > 0.0
    assert len(kernel["details"]["rows"]) == len(SMALL.attention_packs)
    assert found["failed"]
    assert "FAIL: the step failed" in printed
    assert_machine(found, 1)
