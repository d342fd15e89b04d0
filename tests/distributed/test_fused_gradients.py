"""Weight gradients that linear layers add to the arena equal those of autograd."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.fused_gradients import run_job_with_kernel, with_fused_gradients
from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, assert_law, law_job
from tests.support.models import RankRun, assemble, run_job
from tests.support.reference import is_vocabulary

pytestmark = pytest.mark.distributed

FP32 = replace(MAIN_MODEL, num_layers=2, dtype=torch.float32)
BF16_TOLERANCE = 2**-6
"""Of a tensor's largest value: some roundings to bf16, of which the kernel leaves one out."""


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("text", ["tp2pp2", "tp2+2*tp1"])
def test_same_update_in_fp32(text: str, is_tied: bool) -> None:
    job = law_job(4, text, replace(FP32, tied=is_tied))
    answers: list[tuple[RankRun, int]] = pool_of(4).run(
        run_job_with_kernel, replace(job, model=with_fused_gradients(job.model))
    )
    assert all(num_calls > 0 for _, num_calls in answers)
    assert_law(job, [run for run, _ in answers])


def test_same_gradients_in_bf16() -> None:
    job = law_job(4, "tp2pp2", replace(FP32, dtype=torch.bfloat16))
    plain: list[RankRun] = pool_of(4).run(run_job, job)
    answers: list[tuple[RankRun, int]] = pool_of(4).run(
        run_job_with_kernel, replace(job, model=with_fused_gradients(job.model))
    )
    expected = assemble(plain, [run.gradients[0] for run in plain])
    found = assemble([run for run, _ in answers], [run.gradients[0] for run, _ in answers])
    for name, gradient in expected.items():
        rows = job.model.vocab_size if is_vocabulary(name) else len(gradient)
        largest = np.abs(gradient[:rows]).max()
        assert np.abs(found[name][:rows] - gradient[:rows]).max() <= BF16_TOLERANCE * largest, name
    assert any((found[name] != gradient).any() for name, gradient in expected.items())
