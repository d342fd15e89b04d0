"""Small models whose linear layers add weight gradients to the arena by a fused kernel."""

from __future__ import annotations

import types
from dataclasses import dataclass, fields
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.support.models import Job, RankRun, SmallModel, run_job


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
