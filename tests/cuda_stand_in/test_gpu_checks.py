"""`scripts/gpu_checks.sh` from end to end: every step runs, and its figures are in the file."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.gpu import runner
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.checks import steps
from benchmarks.gpu.runner import NO_MEANING
from benchmarks.gpu.sizes import SMALL
from tests.cuda_stand_in.jobs import run_job
from tests.cuda_stand_in.launch import environment
from tests.support.forked_ranks import IN_MEMORY

pytestmark = pytest.mark.distributed

ROOT = Path(__file__).resolve().parents[2]
VALUES_IN_RANKS = Path(__file__).parent / "values_in_ranks"
HANG_S = 300.0
"""Ranks of a job start at different times on a busy machine."""
OPTIONS = ("--small", "--stand-in")
LITTLE_MEMORY_BYTES = 40 * 2**20
"""Of a device: less than three buffers of preflight."""


def command(*flags: str) -> list[str]:
    """The script with toy models."""
    script = ["bash", "scripts/gpu_checks.sh"]
    if not (ROOT / ".venv").is_dir():  # the environment is somewhere else
        script = [sys.executable, "-m", "benchmarks.gpu"]
    return [*script, *OPTIONS, *flags]


def results_of(folder: Path, status: int, printed: str) -> dict[str, Any]:
    """The content of the one file, to which the status and the last line fit."""
    files = list(folder.glob("*.json"))
    assert len(files) == 1, printed
    found: dict[str, Any] = json.loads(files[0].read_text())
    assert status == int(found["failed"]), printed
    assert f"Please send this file back, whatever it says: {files[0]}" in printed
    return found


def run_script(results: Path, num_gpus: int) -> tuple[dict[str, Any], str]:
    """The content of the file, and what the script has printed."""
    exchange = tempfile.mkdtemp(prefix="exchange_", dir=IN_MEMORY)
    settings = environment(
        devices=num_gpus,
        exchange=Path(exchange),
        timeout_s=HANG_S,
        HYDRAULIS_WITHOUT_TE=1,
    )
    settings["PYTHONPATH"] = os.pathsep.join([str(VALUES_IN_RANKS), settings["PYTHONPATH"]])
    try:
        ended = subprocess.run(
            command("--minutes", "120", "--results", str(results)),
            cwd=ROOT,
            env=settings,
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(exchange)
    return results_of(results, ended.returncode, ended.stdout + ended.stderr), ended.stdout


def main_with_forks(argv: Sequence[str]) -> None:
    """The checks, with forks of this process as programs: it has imported torch and Megatron."""
    with patch.object(runner, "_start", _fork):
        raise SystemExit(main(argv))


def _fork(argv: Sequence[str], variables: Mapping[str, str], log: Path) -> Any:
    """Replaces `runner._start`; multiprocessing's object has the methods of `subprocess.Popen`."""
    process = multiprocessing.get_context("fork").Process(
        target=_be_program, args=(argv, variables, log)
    )
    process.start()
    return process._popen  # type: ignore[attr-defined]


def _be_program(argv: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
    """``python ARGV`` in a fork."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    os.environ.update(variables)
    option, module, *sys.argv[1:] = argv
    assert option == "-m"
    runpy.run_module(module, run_name="__main__", alter_sys=True)


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
    found, printed = run_script(tmp_path, num_gpus)
    print(printed)
    assert_complete(found, num_gpus)
    assert not found["failed"]


def test_the_script_takes_the_flags() -> None:
    without_te = os.environ | {"HYDRAULIS_WITHOUT_TE": "1"}
    ended = subprocess.run(
        command("--help"), cwd=ROOT, env=without_te, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "--minutes M" in ended.stdout


def test_a_broken_step_shows_its_log_and_the_others_run(tmp_path: Path) -> None:
    """A device with little memory: too little to exchange 16 MiB, enough for the toys."""
    results = tmp_path / "results"
    outcome = run_job(
        [
            *(*OPTIONS, "--minutes", "1.5", "--results", str(results)),
            *("--steps", "preflight", "order-1", "attention"),
        ],
        1,
        tmp_path,
        program=main_with_forks,
        settings={"STAND_IN_DEVICES": 1, "STAND_IN_MEMORY_BYTES": LITTLE_MEMORY_BYTES},
        timeout_s=110.0,
    )
    (status,), printed = outcome.statuses, outcome.stdout
    found = results_of(results, status, printed + outcome.stderr)
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
