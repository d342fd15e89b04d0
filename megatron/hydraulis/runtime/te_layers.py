"""Layers of Transformer Engine as roles are built of them: on `meta`, under the model's own names.

The model is catalogued by its local layers: names, shapes, canonical order and initial values of
parameters do not depend on which layers run, and neither do checkpoints. A layer of Transformer
Engine has the same parameters under other names, because each norm is fused with the linear layer
behind it; `canonical_name` leads back. The norm behind the last layer stays torch's.

Its fused accumulation adds to ``weight.main_grad``, as that of local layers does.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = [
    "canonical_name",
    "on_meta",
    "te_attention_wrapper",
    "te_layer_spec",
    "te_replacements",
]

_NAME_OF_FUSED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Beginning of a fused norm's parameter in a layer -> of the norm that stands by itself."""


def canonical_name(name: str) -> str:
    """The name that a parameter has in the local form of its layer."""
    for fused, alone in _NAME_OF_FUSED.items():
        before, found, after = name.partition(f".{fused}")
        if found:
            return f"{before}.{alone}{after}"
    return name


def te_layer_spec(config: TransformerConfig) -> ModuleSpec:
    """Upstream's layer of Transformer Engine's modules. Needs Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
    )

    return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)


@functools.cache
def te_replacements() -> dict[Any, Any]:
    """Upstream's wrappers -> what builds them on `meta`; empty without Transformer Engine."""
    from megatron.core.extensions import transformer_engine as wrappers

    if not wrappers.HAVE_TE:
        return {}
    built_on_meta = (
        wrappers.TELayerNormColumnParallelLinear,
        wrappers.TEColumnParallelLinear,
        wrappers.TERowParallelLinear,
        wrappers.TELinear,
        wrappers.TENorm,
    )
    return {wrapper: on_meta(wrapper) for wrapper in built_on_meta}


def te_attention_wrapper() -> Any:
    """What upstream's specs name as Transformer Engine's core attention; None without it."""
    from megatron.core.extensions import transformer_engine as wrappers

    return wrappers.TEDotProductAttention if wrappers.HAVE_TE else None


def on_meta(wrapper: Any) -> Any:
    """A builder of upstream's wrapper, with its signature, that allocates nothing.

    Upstream's wrappers name a device: the CPU where a role's configuration asks for initialisation
    there, as local modules need it to be built on `meta`, whose context a named device overrides.
    They get a copy that says `meta`. It is a class where the wrapper is one, since upstream asks
    what its modules are instances of.
    """
    if "__new__" in vars(wrapper):  # a function in the clothes of a class

        class BuiltOnMeta:
            def __new__(cls, config: TransformerConfig, *args: Any, **named: Any) -> Any:
                return wrapper(_saying_meta(config), *args, **named)

        return BuiltOnMeta

    class ModuleOnMeta(wrapper):  # type: ignore[misc]
        def __init__(self, *args: Any, config: TransformerConfig, **named: Any) -> None:
            super().__init__(*args, config=_saying_meta(config), **named)

    ModuleOnMeta.__name__ = ModuleOnMeta.__qualname__ = wrapper.__name__
    return ModuleOnMeta


def _saying_meta(config: TransformerConfig) -> TransformerConfig:
    told = copy.copy(config)
    told.use_cpu_initialization = False
    told.init_model_with_meta_device = True
    return told
