"""Gradients that travel in bf16 and are added up in a wide dtype, in a model of fp64, whose own
rounding errors are far smaller."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.support.bf16_error import (
    MOST_OF_ONE_PROCESS,
    Gradients,
    assert_little_is_added,
    differences,
    gradients_of,
)
from tests.support.comparison import assert_same
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    FP32_SETTINGS,
    FP64_SETTINGS,
    FP64_TOLERANCE,
    MAIN_MODEL,
    SPLITS,
    changing,
    law_job,
    waves,
)
from tests.support.models import Job, RankRun, SmallModel, build_engine, run_job

pytestmark = pytest.mark.distributed

TIED = replace(MAIN_MODEL, tied=True, qk_layernorm=True, bias=True)
JOBS = {
    "one rank each": law_job(4, "4*tp1", MAIN_MODEL),
    "one rank each, relays": replace(law_job(4, "4*tp1", MAIN_MODEL), ranks_per_node=2),
    "mixed tp": law_job(4, "tp2+2*tp1", MAIN_MODEL),
    "mixed tp, relays": replace(law_job(4, "tp2+2*tp1", MAIN_MODEL), ranks_per_node=2),
    "pipeline": law_job(4, "pp2+tp2", MAIN_MODEL),
    "pipeline of tp": law_job(4, "tp2pp2", MAIN_MODEL),
    "tied embeddings and partial sums": law_job(4, "tp2@0,3+pp2@2,1", TIED),
    "cp": law_job(4, "2*cp2", MAIN_MODEL),
    "shared weights": law_job(4, "cp2fs+tp2", MAIN_MODEL),
    "waves of shared weights": law_job(4, "cp4~fs", MAIN_MODEL),
    "waves": waves(list(SPLITS.values()), MAIN_MODEL),
    "changing": changing(("tp2+2*tp1", "cp2@2,0+tp2@3,1", "pp3:2,1,1+idle")),
    "owners chosen": replace(
        law_job(4, "tp2@0,3+pp2@2,1", MAIN_MODEL), owners_for="tp2@0,3+pp2@2,1"
    ),
    "without overlap": replace(law_job(4, "tp2@0,3+pp2@2,1", MAIN_MODEL), overlap=False),
}
EVERY_RANK_HOLDS_ALL = ("one rank each", "one rank each, relays", "cp", "waves")


LEAST_OF_ONE_PROCESS = 0.5
"""With less, something was not rounded."""
MOST_WITHOUT_RELAYS, MOST_WITH_RELAYS = 1.2, 1.6
"""Of everything, where chance is small: more than one rounding of a contribution, or two over
relays or among columns that share weights, which make √2, are more."""
STILL = replace(FP64_SETTINGS, lr=0.0)
"""Parameters stay as they are: otherwise an iteration's errors move those of the next one."""


@cache
def one_process(model: SmallModel, gradient_dtype: torch.dtype | None) -> Gradients:
    return of(law_job(1, "tp1", model), gradient_dtype)


def of(job: Job, gradient_dtype: torch.dtype | None = torch.bfloat16) -> Gradients:
    num_ranks = 1 if job.strategies == ("tp1",) else 4
    return gradients_of(replace(job, settings=STILL, gradient_dtype=gradient_dtype), num_ranks)


def errors(model: SmallModel, gradients: Gradients) -> list[dict[str, float]]:
    return [differences(*pair) for pair in zip(gradients, one_process(model, None), strict=True)]


def test_one_process_rounds_the_sum_of_its_micro_batches_once() -> None:
    exact = one_process(MAIN_MODEL, None)
    found = one_process(MAIN_MODEL, torch.bfloat16)
    job = law_job(1, "tp1", MAIN_MODEL)
    for i, (rounded, mean) in enumerate(zip(found, exact, strict=True)):
        divisor = job.weight_sum(i)
        expected = {
            name: torch.from_numpy(value * divisor).bfloat16().double().numpy() / divisor
            for name, value in mean.items()
        }
        assert_same(rounded, expected, FP64_TOLERANCE)


@pytest.mark.parametrize("name", JOBS)
def test_strategies_add_little_to_the_rounding_of_one_process(name: str) -> None:
    job = JOBS[name]
    alone = errors(job.model, one_process(job.model, torch.bfloat16))
    for found, of_one in zip(errors(job.model, of(job)), alone, strict=True):
        ratios = {kind: found[kind] / error for kind, error in of_one.items()}
        is_rounded_twice = job.ranks_per_node is not None or "fs" in job.strategies[0]
        most = MOST_WITH_RELAYS if is_rounded_twice else MOST_WITHOUT_RELAYS
        assert LEAST_OF_ONE_PROCESS < ratios["everything"] <= most
        assert max(ratios.values()) <= MOST_OF_ONE_PROCESS, ratios


@pytest.mark.parametrize("name", ["one rank each", "mixed tp, relays"])
def test_with_bf16_parameters_they_add_little_to_the_error_of_one_process(name: str) -> None:
    model = replace(MAIN_MODEL, dtype=torch.bfloat16)
    job = replace(JOBS[name], model=model, settings=FP32_SETTINGS, gradient_dtype=torch.bfloat16)
    assert_little_is_added(model, gradients_of(job, 4))


def scatter_bytes(job: Job) -> tuple[int, int]:
    """On every rank: received and sent in an iteration of the first strategy."""
    traffic = build_engine(job).runtime_of(job.strategies[0]).regrouper.traffic
    return traffic.scatter_received_bytes, traffic.scatter_sent_bytes


@pytest.mark.parametrize("name", JOBS)
def test_scatters_carry_half_the_bytes_of_fp32(name: str) -> None:
    job = replace(JOBS[name], model=replace(JOBS[name].model, dtype=torch.float32))
    in_fp32 = pool_of(4).run(scatter_bytes, job)
    in_bf16 = pool_of(4).run(scatter_bytes, replace(job, gradient_dtype=torch.bfloat16))
    for wide, narrow in zip(in_fp32, in_bf16, strict=True):
        assert sum(narrow) > 0
        if name in EVERY_RANK_HOLDS_ALL:  # fp32 shares are padded
            assert 0.9 * sum(wide) < 2 * sum(narrow) <= sum(wide)
        else:
            assert [2 * num_bytes for num_bytes in narrow] == list(wide)


def test_norm_and_clipping_are_those_of_fp32_shards() -> None:
    job = replace(JOBS["mixed tp"], gradient_dtype=torch.bfloat16)
    runs: list[RankRun] = pool_of(4).run(run_job, job)
    for i, norm in enumerate(runs[0].norms):
        squares = sum(float(np.square(run.gradients[i]).sum()) for run in runs)
        assert norm == pytest.approx(squares**0.5, rel=1e-12)
        assert norm > job.settings.clip_grad
