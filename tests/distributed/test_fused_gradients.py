"""Weight gradients that linear layers add to the arena equal those of autograd."""

from __future__ import annotations

import types
from dataclasses import dataclass, fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, assert_law, law_job
from tests.support.models import Job, RankRun, SmallModel, assemble, run_job
from tests.support.reference import is_vocabulary

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class FusedGradientModel(SmallModel):
    """A small model with upstream's fusion of gradient accumulation."""

    def transformer(self) -> TransformerConfig:
        """Upstream's configuration of the whole model."""
        config = super().transformer()
        config.gradient_accumulation_fusion = True
        return config


def with_fused_gradients(model: SmallModel) -> FusedGradientModel:
    """The same model with the fusion."""
    values = {field.name: getattr(model, field.name) for field in fields(SmallModel)}
    return FusedGradientModel(**values)


class KernelOfTorch(types.ModuleType):
    """apex's module: what its kernel computes, by torch, and how often."""

    def __init__(self) -> None:
        super().__init__("fused_weight_gradient_mlp_cuda")
        self.num_calls = 0

    def wgrad_gemm_accum_fp32(
        self, inputs: torch.Tensor, gradients: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        """(tokens, in) and (tokens, out) into (out, in), in fp32."""
        assert main_grad.dtype == torch.float32
        self.num_calls += 1
        main_grad.addmm_(gradients.float().t(), inputs.float())


def run_job_with_kernel(job: Job) -> tuple[RankRun, int]:
    """On every rank: `run_job` with a kernel of torch's in apex's place, and its calls."""
    kernel: Any = KernelOfTorch()
    with (
        patch.object(layers, "_grad_accum_fusion_available", True),
        patch.object(layers, "fused_weight_gradient_mlp_cuda", kernel, create=True),
        patch.object(layers.torch, "empty", _with_garbage),
    ):
        return run_job(job), kernel.num_calls


_EMPTY = torch.empty


def _with_garbage(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The tensor that upstream returns to autograd instead of a gradient must not be used."""
    made: torch.Tensor = _EMPTY(*args, **kwargs)
    return made.fill_(1e3) if made.is_floating_point() else made


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
