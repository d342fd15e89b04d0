"""The figures of `scripts/gpu_checks.sh` that need Transformer Engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.kernels import WAYS
from tests.cuda_stand_in.jobs import run_job
from tests.cuda_stand_in.test_gpu_checks import OPTIONS, main_with_forks, results_of

pytestmark = pytest.mark.timeout(900)


def main_with_computed_kernels(argv: Sequence[str]) -> None:
    """`main_with_forks` without cuDNN's kernel, which torch prefers and nobody computes."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    main_with_forks(argv)


def test_kernels_are_as_exact_as_torch_s(tmp_path: Path) -> None:
    results = tmp_path / "results"
    outcome = run_job(
        [*OPTIONS, "--minutes", "14", "--results", str(results), "--steps", "kernels"],
        1,
        tmp_path,
        program=main_with_computed_kernels,
        settings={"STAND_IN_DEVICES": 1},
        timeout_s=860.0,
    )
    (status,), printed = outcome.statuses, outcome.stdout
    found = results_of(results, status, printed + outcome.stderr)
    (step,) = found["steps"]
    assert step["status"] == "done", json.dumps(step, indent=1)
    for figure in step["figures"]:
        assert figure["verdict"] == "pass", json.dumps(figure, indent=1)
    of_te = {figure["key"] for figure in step["figures"] if figure["key"].endswith("te")}
    assert of_te == {"te", *(f"engine {way}" for way in WAYS if way.endswith("te"))}
