import dataclasses
from functools import partial
from typing import Any

import pytest
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.catalogue import catalogue
from megatron.hydraulis.runtime.model_building import (
    adaptable_layer_spec,
    build_role_model,
    global_name,
    on_meta,
    upstream_layer_spec,
)
from megatron.hydraulis.runtime.process_groups import local_collection
from megatron.hydraulis.transfer.role import Role
from tests.support.fused_layers import FusedNormLinear, FusedSmallModel
from tests.support.gloo_pool import prepare_parent
from tests.support.models import SmallModel


@pytest.mark.parametrize(
    ("built", "canonical"),
    [
        (
            "decoder.layers.3.self_attention.linear_qkv.layer_norm_weight",
            "decoder.layers.3.input_layernorm.weight",
        ),
        (
            "decoder.layers.3.mlp.linear_fc1.layer_norm_bias",
            "decoder.layers.3.pre_mlp_layernorm.bias",
        ),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc1.weight"),
        ("decoder.final_layernorm.weight", "decoder.final_layernorm.weight"),
        (
            "decoder.layers.3.self_attention.linear_kv_up_proj.layer_norm_weight",
            "decoder.layers.3.self_attention.kv_layernorm.weight",
        ),
        (
            "decoder.layers.3.mlp.experts.linear_fc2.weight12",
            "decoder.layers.3.mlp.experts.local_experts.16.linear_fc2.weight",
        ),
    ],
)
def test_names(built: str, canonical: str) -> None:
    """On a rank whose first expert is number 4."""
    assert global_name(built, Role(1, 0, 0, 4, 4, False, experts=(4, 20))) == canonical


@pytest.mark.parametrize("bias", [False, True])
def test_catalogue_is_that_of_local_layers_and_covers_what_is_built(bias: bool) -> None:
    prepare_parent()
    options: dict[str, Any] = {
        "normalization": "LayerNorm" if bias else "RMSNorm",
        "bias": bias,
        "qk_layernorm": True,
    }
    fused = FusedSmallModel(**options).definition()
    catalogued = catalogue(fused)
    assert [entry.spec for entry in catalogued] == [
        entry.spec for entry in catalogue(SmallModel(**options).definition())
    ]
    role = Role(1, 0, 1, 2, 4, False)  # layers 1 and 2 of 4
    model: Any = build_role_model(fused, role, local_collection())
    built = {global_name(name, role): tuple(p.shape) for name, p in model.named_parameters()}
    expected = {
        entry.spec.name: entry.spec.shape
        for entry in catalogued
        if entry.spec.name.startswith(("decoder.layers.1.", "decoder.layers.2."))
    }
    assert built == expected
    assert isinstance(model.decoder.layers[0].mlp.linear_fc1, FusedNormLinear)
    assert all(parameter.is_meta for parameter in model.parameters())


class Module:
    """A wrapper like upstream's, which names a device."""

    def __init__(self, size: int, *, config: TransformerConfig) -> None:
        self.size, self.config = size, config


class Norm:
    """Like upstream's norm, a function written as a class."""

    def __new__(cls, config: TransformerConfig, size: int) -> Any:
        return Module(size, config=config)


@pytest.mark.parametrize("wrapper", [Module, Norm])
def test_wrappers_build_on_meta(wrapper: Any) -> None:
    config = SmallModel().transformer()
    config.use_cpu_initialization = True
    built = on_meta(wrapper)(config=config, size=3)
    assert isinstance(built, Module)
    assert built.size == 3
    assert not built.config.use_cpu_initialization
    assert built.config.init_model_with_meta_device
    assert config.use_cpu_initialization  # local modules read it


def test_without_apex_only_their_layers_add_to_gradients() -> None:
    transformer = SmallModel().transformer()
    transformer.gradient_accumulation_fusion = True
    definition = dataclasses.replace(SmallModel().definition(), transformer=transformer)
    config = definition.role_config(Role(1, 0, 0, 4, 4, True))
    assert not config.gradient_accumulation_fusion
    assert on_meta(Module)(config=config, size=3).config.gradient_accumulation_fusion


def test_adapters_keep_routed_experts_of_transformer_engine_alone() -> None:
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 16, "moe_layer_freq": (0, 1)}
    shared = {"moe_shared_expert_intermediate_size": 24}
    transformer = SmallModel(num_layers=2, variant=tuple((experts | shared).items())).transformer()
    local: Any = upstream_layer_spec(transformer, use_te=False)
    dense, sparse = local.layer_specs
    own = sparse.submodules.mlp.keywords["submodules"]
    of_te = [
        dataclasses.replace(
            layer, submodules=dataclasses.replace(layer.submodules, mlp=mlp, self_attention="TE's")
        )
        for layer, mlp in (
            (dense, "TE's"),
            (sparse, partial(MoELayer, submodules=MoESubmodules("TE's", "TE's"))),
        )
    ]
    found: Any = adaptable_layer_spec(local, dataclasses.replace(local, layer_specs=of_te))
    assert found.layer_specs[0] == dense
    built = found.layer_specs[1].submodules
    assert built.self_attention == sparse.submodules.self_attention
    assert built.mlp.func is MoELayer
    assert built.mlp.keywords["submodules"] == dataclasses.replace(own, experts="TE's")
    assert adaptable_layer_spec(dense, local) == dense


def test_adapters_of_fused_layers_are_refused() -> None:
    prepare_parent()
    fused = FusedSmallModel(lora_targets=("q_proj",)).definition()
    with pytest.raises(ConfigurationError, match=r"linear_qkv' is FusedNormLinear; use the local"):
        build_role_model(fused, Role(1, 0, 0, 4, 4, False), local_collection())
