"""What is refused in every model, and norms whose weights begin at 0."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.experts import RouterState
from megatron.hydraulis.runtime.model_building import PackedNorm
from tests.support.models import SmallModel


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout"])
def test_dropout_is_refused_whoever_builds_the_model(name: str) -> None:
    definition = SmallModel().definition()
    transformer = replace(definition.transformer, **{name: 0.1})
    with pytest.raises(ConfigurationError, match=r"dropout is 0\.1, but dropout masks depend"):
        replace(definition, transformer=transformer)


def test_a_router_whose_losses_depend_on_packing_is_refused() -> None:
    router = TopKRouter.__new__(TopKRouter)
    torch.nn.Module.__init__(router)
    model = SmallModel(variant=(("num_moe_experts", 4),))
    state = RouterState(model.transformer(), torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=r"but mlp is a TopKRouter; use .*SequenceRouter"):
        state.attach(torch.nn.ModuleDict({"mlp": router}))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norms_around_one_use_weights_that_bf16_cannot_add_to_one(normalization: str) -> None:
    model = SmallModel(
        normalization=normalization,
        variant=(("layernorm_zero_centered_gamma", True),),
        dtype=torch.bfloat16,
    )
    norm = PackedNorm(model.transformer(), 1024).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(0.0035)
    given = torch.randn(64, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = norm(given).detach()
    assert found.dtype == torch.bfloat16
    if normalization == "RMSNorm":
        plain = F.rms_norm(given.double(), (1024,), None, norm.eps)
    else:
        plain = F.layer_norm(given.double(), (1024,), None, None, norm.eps)
    factor = float((found.double() * plain).sum() / plain.square().sum())
    assert factor == pytest.approx(1.0035, abs=2e-4)
