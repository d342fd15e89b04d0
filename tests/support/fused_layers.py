"""Layers with the parameters of Transformer Engine's, on every device: norms fused with what
follows, with Transformer Engine's parameter names."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.hydraulis.runtime import model_building
from megatron.hydraulis.runtime.model_building import ModelDefinition
from tests.support.models import SmallModel


class FusedNormLinear(ColumnParallelLinear):
    """A column-parallel linear layer that begins with the norm; called as upstream's wrapper of
    Transformer Engine's ``LayerNormLinear`` is."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **named: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **named)
        self.normalization = config.normalization
        self.epsilon = config.layernorm_epsilon
        self.layer_norm_weight = torch.nn.Parameter(
            torch.empty(input_size, dtype=config.params_dtype)
        )
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(
                torch.empty(input_size, dtype=config.params_dtype)
            )

    def forward(self, hidden: torch.Tensor) -> Any:  # type: ignore[override]
        shape = self.layer_norm_weight.shape
        if self.normalization == "LayerNorm":
            normed = torch.nn.functional.layer_norm(
                hidden, shape, self.layer_norm_weight, self.layer_norm_bias, self.epsilon
            )
        else:
            normed = torch.nn.functional.rms_norm(
                hidden, shape, self.layer_norm_weight, self.epsilon
            )
        return super().forward(normed)


def fused_spec(model: SmallModel) -> ModuleSpec:
    """A layer with the structure of upstream's Transformer Engine layer."""
    spec: Any = get_gpt_layer_local_spec(
        qk_layernorm=model.qk_layernorm, normalization=model.normalization
    )
    attention = spec.submodules.self_attention.submodules
    return ModuleSpec(
        module=TransformerLayer,
        submodules=dataclasses.replace(
            spec.submodules,
            input_layernorm=IdentityOp,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=FusedNormLinear,
                    core_attention=DotProductAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=attention.q_layernorm,
                    k_layernorm=attention.k_layernorm,
                ),
            ),
            pre_mlp_layernorm=IdentityOp,
            mlp=ModuleSpec(
                module=MLP,
                submodules=MLPSubmodules(linear_fc1=FusedNormLinear, linear_fc2=RowParallelLinear),
            ),
        ),
    )


@dataclass(frozen=True)
class FusedSmallModel(SmallModel):
    """Catalogued with local layers, built with fused ones."""

    def definition(self) -> ModelDefinition:
        built: Any = fused_spec(self)
        if self.layer_pattern:
            layers = TransformerBlockSubmodules(layer_specs=[built])
            with patch.object(model_building, "upstream_layer_spec", lambda *_, **__: layers):
                built = model_building.hybrid_layer_spec(self.transformer(), use_te=True)
        return dataclasses.replace(super().definition(), built_layer_spec=built)
