"""The same batch gives the same update under every strategy, on `cuda`: the engine's CUDA path on
several ranks of the stand-in, against the CPU's run of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cuda_stand_in.lone_ranks import log_of
from tests.cuda_stand_in.order import check_order, read_log
from tests.cuda_stand_in.pool import run_logged
from tests.distributed.test_accumulation import accumulate
from tests.distributed.test_experts import MODELS as EXPERT_MODELS
from tests.distributed.test_latent_attention import MODELS as LATENT_MODELS
from tests.support.bf16_error import MOST_OF_ONE_PROCESS, gradients_of, worst_ratio
from tests.support.comparison import assert_close
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    FP32_ATOL_OF_MAX,
    FP32_RTOL,
    MAIN_MODEL,
    SPLITS,
    assert_law,
    changing,
    law_job,
    law_reference,
    model_for,
    waves,
)
from tests.support.models import Job, RankRun, SmallModel, assemble, run_job

pytestmark = pytest.mark.distributed

FP32_MODEL = replace(MAIN_MODEL, dtype=torch.float32)
BF16_MODEL = replace(MAIN_MODEL, dtype=torch.bfloat16, hidden_size=64, core_attention="torch")
"""Heads of a size that torch's kernel for packed rows supports."""


def _of(text: str, **changes: Any) -> Callable[[SmallModel], Job]:
    num_layers = model_for(4, text).num_layers
    return lambda model: replace(law_job(4, text, replace(model, num_layers=num_layers)), **changes)


JOBS: dict[str, Callable[[SmallModel], Job]] = {
    "tp2+2*tp1": _of("tp2+2*tp1"),
    "tp2pp2": _of("tp2pp2"),
    "cp4~": lambda model: waves(list(SPLITS.values()), replace(model, num_layers=2)),
    "changing": lambda model: changing(("tp2+2*tp1", "cp2@2,0+tp2@3,1", "pp3:2,1,1+idle"), model),
    "cp4~fs": lambda model: replace(waves(list(SPLITS.values()), model), strategies=("cp4~fs",)),
    "changing with shared weights": lambda model: changing(
        ("tp2cp2fs", "2*cp2fs", "cp2fs@2,0+pp2@3,1"), model
    ),
    "pp2+tp2": _of("pp2+tp2"),
    "cp2+pp2": _of("cp2+pp2"),
    "tp2cp2": _of("tp2cp2"),
    "cp4": _of("cp4"),
    "cp2pp2": _of("cp2pp2"),
    "uneven layers": _of("pp3:1,1,2+tp1"),
    "uneven layers and tp": _of("tp2@0,3+pp2:1,3@1,2"),
    "idle ranks": _of("tp2+2*idle"),
    "idle rank of a pipeline": _of("pp3:2,1,1+idle"),
    "4*tp1": _of("4*tp1"),
    "tp4": _of("tp4"),
    "pp4": _of("pp4"),
    "owners chosen": _of("tp2@0,3+pp2@2,1", owners_for="tp2@0,3+pp2@2,1"),
    "without overlap": _of("tp2@0,3+pp2@2,1", overlap=False),
}
BY_DEFAULT = ("tp2+2*tp1", "tp2pp2", "cp4~", "changing", "cp4~fs", "changing with shared weights")
NAMES = [
    pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.nightly) for name in JOBS
]


@pytest.mark.parametrize("name", NAMES)
def test_in_fp32(name: str, tmp_path: Path) -> None:
    """One order contains all NCCL calls, too, with torch's default backend for NCCL."""
    _check_in_fp32(JOBS[name](FP32_MODEL), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["top 2, gathered", "shared experts and a gate", "balanced, with z-loss", "no norms"]
)
def test_experts_and_latents_in_fp32(name: str, tmp_path: Path) -> None:
    model = replace((EXPERT_MODELS | LATENT_MODELS)[name], dtype=torch.float32)
    _check_in_fp32(JOBS["changing"](replace(model, num_layers=4)), tmp_path)


WHOLE_EXPERTS: dict[str, tuple[int, Callable[[SmallModel], Job]]] = {
    "columns in two groups, gathered": (4, lambda model: law_job(4, "cp4ep2", model)),
    "columns in one group, by turns": (
        4,
        lambda model: changing(("tp2cp2ep4", "cp2ep2pp2", "tp2ep2+cp2"), model),
    ),
    "a wave 4+2+1+1, padding on a column": (
        8,
        lambda model: waves([[(0, 4), (4, 2), (6, 1), (7, 1)]], model, ep=8),
    ),
    "columns that share weights, by turns": (
        4,
        lambda model: changing(("cp4fsep2", "tp2cp2fsep4", "tp2cp2fsep2"), model),
    ),
    "a wave of columns that share weights": (
        8,
        lambda model: replace(
            waves([[(0, 4), (4, 2), (6, 1), (7, 1)]], model), strategies=("cp8~fsep4",)
        ),
    ),
}
"""Ranks, and the job of a model."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if number else ())
        for number, name in enumerate(WHOLE_EXPERTS)
    ],
)
def test_whole_experts_in_fp32(name: str, tmp_path: Path) -> None:
    """Columns of a stage share the calls of ep, so their calls have to have one order as well."""
    model = EXPERT_MODELS["top 2, gathered" if "gathered" in name else "balanced, with z-loss"]
    num_ranks, make = WHOLE_EXPERTS[name]
    _check_in_fp32(make(replace(model, dtype=torch.float32)), tmp_path, num_ranks)


def _check_in_fp32(job: Job, tmp_path: Path, num_ranks: int = 4) -> None:
    runs: list[RankRun] = pool_of(num_ranks, "cuda").run(run_logged, tmp_path, run_job, job)
    assert_law(job, runs)
    report = check_order([read_log(log_of(tmp_path, rank)) for rank in range(num_ranks)])
    assert not report.mismatches, str(report)
    assert not report.cycle, str(report)
    assert min(report.num_operations) > 0


@pytest.mark.parametrize("name", NAMES)
def test_in_bf16(name: str) -> None:
    job = JOBS[name](BF16_MODEL)
    on_cpu = replace(job.model, core_attention="sdpa")
    assert worst_ratio(job.model, gradients_of(job, 4, "cuda"), on_cpu) <= MOST_OF_ONE_PROCESS


@pytest.mark.nightly
@pytest.mark.parametrize("strategies", [("4*tp1",), ("4*tp1", "tp2pp2")])
def test_calls_accumulate(strategies: tuple[str, ...]) -> None:
    job = replace(law_job(4, strategies[0], FP32_MODEL), strategies=strategies)
    runs: list[RankRun] = pool_of(4, "cuda").run(accumulate, job)
    for i, expected in enumerate(law_reference(FP32_MODEL).parameters):
        found = assemble(runs, [run.parameters[i] for run in runs])
        assert_close(found, expected, rtol=FP32_RTOL, atol_of_max=FP32_ATOL_OF_MAX)
