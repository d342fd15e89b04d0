"""Which of upstream's arguments make the model, so that a run must have those of its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MODEL_ARGUMENTS", "NEVER_ON_HERE", "model_differences", "model_of"]

MODEL_ARGUMENTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "swiglu",
    "normalization",
    "layernorm_epsilon",
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_interleaved",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "softmax_type",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
)
"""Attributes of upstream's arguments that make another model of the same tensors, or other
tensors."""

NEVER_ON_HERE = (
    "activation_func_clamp_value",
    "apply_layernorm_1p",
    "apply_residual_connection_post_layernorm",
    "attention_output_gate",
    "experimental_attention_variant",
    "glu_linear_offset",
    "heterogeneous_layers_config_encoded_json",
    "heterogeneous_layers_config_path",
    "layernorm_zero_centered_gamma",
    "linear_attention_freq",
    "mtp_num_layers",
    "multi_latent_attention",
    "no_rope_freq",
    "num_experts",
    "qk_l2_norm",
    "quick_geglu",
    "softmax_scale",
    "squared_relu",
    "use_mup",
    "window_size",
)
"""Attributes that make another computation unless they are false, empty or absent; no flag of this
program sets them, but plain Megatron's runs may."""

_EARLIER_NAMES = {"norm_epsilon": "layernorm_epsilon"}
"""Of earlier versions of upstream -> today's."""


def model_of(args: Any) -> dict[str, Any]:
    """What makes the model, of upstream's arguments; of `NEVER_ON_HERE` what is on all the same."""
    told = dict(vars(args))
    for earlier, name in _EARLIER_NAMES.items():
        if earlier in told:
            told.setdefault(name, told[earlier])
    model = {name: told[name] for name in MODEL_ARGUMENTS if name in told}
    if not told.get("group_query_attention", True):
        model["num_query_groups"] = told["num_attention_heads"]
    if not model.get("use_rope_scaling", True):
        model.pop("rope_scaling_factor", None)  # without effect
    return model | {name: told[name] for name in NEVER_ON_HERE if told.get(name)}


def model_differences(saved: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """What is another model there than here, both as `model_of` has it, possibly with more.

    What only one of them tells is no difference, as a checkpoint of another program may tell less,
    unless it is of `NEVER_ON_HERE`.
    """
    differences = [
        f"{name} is {saved[name]} there and {value} here"
        for name, value in here.items()
        if name in saved and saved[name] != value
    ]
    return differences + [
        f"{name} is {saved[name]} there and off here"
        for name in NEVER_ON_HERE
        if name in saved and name not in here
    ]
