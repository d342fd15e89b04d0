"""A model as the ``config.json`` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.hydraulis.checkpoint.hugging_face.families import (
    BIASES,
    FAMILIES,
    LEFT_OUT,
    PREDICTIONS,
    WINDOWED_LAYERS,
    ExpertNames,
    Family,
)
from megatron.hydraulis.checkpoint.hugging_face.model import (
    Experts,
    HuggingFaceModel,
    Latents,
    Yarn,
    layers_without_rope,
    without_nulls,
)
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import JsonObject, read_json
from megatron.hydraulis.ranges import check_range

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
_LLAMA3: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3's scaling as fixed in Megatron (0.19.2, `RotaryEmbedding._apply_scaling`)."""
_SIZES_OF_YARN = {
    "rotary_scaling_factor": "factor",
    "yarn_original_max_position_embeddings": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_correction_range_round_to_int": "truncate",
}
"""Fields of `Yarn`, and their names in ``config.json``."""
_SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
_SIZES_OF_LATENTS = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Whole numbers: their names here and in ``config.json``."""
_NUMBER = "num_local_experts"
"""Name that transformers (5.23) writes for the number of experts of some families."""
_NUM_PREDICTING = "num_nextn_predict_layers"
_PARTIAL = "partial_rotary_factor"
_ORIGINAL = "original_max_position_embeddings"
_LIMIT = "swiglu_limit"
_FULL_ATTENTION = "full_attention"
_WINDOWED_ATTENTION = "sliding_attention"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def config_of(model: HuggingFaceModel, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``, in the form that transformers 4 and 5 both read.

    Args:
        dtype: of the tensors, by torch's name.
    """
    family = model.of_family
    rope_scaling: dict[str, Any] | None = None
    if (factor := model.rope_scaling_factor) is not None:
        rope_scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    elif (factor := model.rotary_seq_len_interpolation_factor) is not None:
        rope_scaling = {"rope_type": "linear", "factor": factor}
    elif (yarn := model.yarn) is not None:
        stretching = {key: getattr(yarn, name) for name, key in _SIZES_OF_YARN.items()}
        rope_scaling = {"rope_type": "yarn", **stretching}
        rope_scaling |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": model.family,
        **{key: getattr(model, name) for name, key in _SIZES.items()},
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        family.norm_epsilon_key: model.layernorm_epsilon,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        # A checkpoint does not know its tokenizer; the families' defaults would be a guess.
        **dict.fromkeys(TOKEN_IDS),
        **family.settings,
    }
    if model.has_value_head:
        head = family.architecture.replace("CausalLM", "TokenClassification")
        config |= {"architectures": [head], "num_labels": 1}
    if BIASES in family.may_have:
        config |= dict.fromkeys(("attention_bias", "mlp_bias"), model.add_bias_linear)
    if "--rotary-percent" in family.parts:
        config[_PARTIAL] = model.rotary_percent
    if "--window-size" in family.parts:
        config["sliding_window"] = model.window_tokens
    if WINDOWED_LAYERS in family.parts:
        kinds = _FULL_ATTENTION, _WINDOWED_ATTENTION
        config["layer_types"] = [kinds[is_windowed] for is_windowed in model.window_attn_skip_freq]
    if model.quick_geglu:
        config[_LIMIT] = model.activation_func_clamp_value
    if "--no-rope-freq" in family.parts:
        config["no_rope_layers"] = [1 - skips for skips in model.no_rope_freq]
    if family.qkv_bias_key is not None:
        config[family.qkv_bias_key] = model.add_qkv_bias
    if (experts := model.experts) is not None and (names := family.experts) is not None:
        config |= _config_of_experts(experts, names)
    if PREDICTIONS in family.parts:
        config[_NUM_PREDICTING] = model.mtp_num_layers
    if (latents := model.latents) is not None:
        del config["head_dim"]  # which transformers derives from these
        config |= {key: getattr(latents, name) for name, key in _SIZES_OF_LATENTS.items()}
    return config


def _config_of_experts(experts: Experts, names: ExpertNames) -> dict[str, Any]:
    width, layers = experts.moe_ffn_hidden_size, experts.moe_layer_freq
    shared_width = experts.moe_shared_expert_intermediate_size or 0
    config: dict[str, Any] = {
        names.number: experts.num_experts,
        names.ffn_hidden_size: width,
        "num_experts_per_tok": experts.moe_router_topk,
    }
    if names.normalizes is None:
        config |= {
            "norm_topk_prob": not experts.moe_router_pre_softmax,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [i for i, has in enumerate(layers) if not has],
        }
    if names.shared_ffn_hidden_size is not None:
        config[names.shared_ffn_hidden_size] = shared_width
    if names.num_shared is not None:
        config[names.num_shared] = shared_width // width
        config["routed_scaling_factor"] = experts.moe_router_topk_scaling_factor or 1.0
    if names.num_dense_layers is not None:
        config[names.num_dense_layers] = layers.count(0)
    if names.chooses_groups:
        config["n_group"] = experts.moe_router_num_groups or 1
        config["topk_group"] = experts.moe_router_group_topk or 1
    return config


def model_from_config(content: Any, what: str) -> HuggingFaceModel:
    """The model that a parsed ``config.json`` describes.

    Raises ConfigurationError for what Megatron's model does not have.
    """
    config = without_nulls(content, what)
    name = config.text("model_type")
    if name not in FAMILIES:
        of_it = f", which has {LEFT_OUT[name]}" if name in LEFT_OUT else ""
        raise ConfigurationError(
            f"{what}: only the model types {', '.join(sorted(FAMILIES))} can be imported but this "
            f"one is {name!r}{of_it}; import a model of these"
        )
    family = FAMILIES[name]
    _only(config, "architectures", [family.architecture])
    if config.has("quantization_config"):
        content_of_it = config.value("quantization_config")
        method = content_of_it.get("quant_method") if isinstance(content_of_it, Mapping) else None
        fix = "convert them to bf16, or take the model without quantization"
        if method == "mxfp4":
            fix = (
                'convert them: python -c "from transformers import AutoModelForCausalLM as M, '
                "Mxfp4Config as C; M.from_pretrained('FOLDER', dtype='bfloat16', "
                "quantization_config=C(dequantize=True)).save_pretrained('NEW')\""
            )
        raise ConfigurationError(
            f"{what}: weights must not be quantized but quantization_config says "
            f"{method or content_of_it!r}; {fix}"
        )
    for key, value in ({"hidden_act": "silu"} | dict(family.settings)).items():
        _only(config, key, value)
    sizes: dict[str, Any] = {name: config.integer(key) for name, key in _SIZES.items()}
    num_layers, heads = sizes["num_layers"], sizes["num_attention_heads"]
    check_range("--num-layers", num_layers, f"{what}: num_hidden_layers")
    types = config.array("layer_types") if config.has("layer_types") else []
    windowed_layers: tuple[int, ...] = ()
    if WINDOWED_LAYERS in family.parts:
        windowed_layers = _windowed_layers(config, family, types, num_layers)
    elif any(kind != _FULL_ATTENTION for kind in types):
        raise _wrong(config, "layer_types", [_FULL_ATTENTION, "…"])
    has_biases = BIASES in family.needs
    if BIASES in family.may_have:
        has_biases = config.flag("attention_bias", default=False)
        if config.flag("mlp_bias", default=False) != has_biases:
            raise _wrong(config, "mlp_bias", f"attention_bias, which is {has_biases}")
    num_query_groups = heads
    if family.needs_groups or config.has("num_key_value_heads"):
        num_query_groups = config.integer("num_key_value_heads")
    latents = None
    if "--multi-latent-attention" in family.parts:
        keys = _SIZES_OF_LATENTS.items()
        is_given = {name: config.has(key) or name != "q_lora_rank" for name, key in keys}
        latents = Latents(**{name: config.integer(key) for name, key in keys if is_given[name]})
        kv_channels = latents.qk_head_dim + latents.qk_pos_emb_head_dim
    elif family.needs_head_dim or config.has("head_dim"):
        kv_channels = config.integer("head_dim")
    elif heads < 1 or sizes["hidden_size"] % heads:
        raise _wrong(config, "hidden_size", f"a multiple of {heads} attention heads")
    else:
        kv_channels = sizes["hidden_size"] // heads
    window_tokens = None
    skips_rope: tuple[int, ...] = ()
    if "--window-size" in family.parts:
        # Null, which is a value here, stands for no window.
        window_tokens = family.window_tokens if "sliding_window" not in content else None
        if config.has("sliding_window"):
            window_tokens = config.integer("sliding_window")
    if "--no-rope-freq" in family.parts:
        skips_rope = _no_rope_layers(config, family, num_layers)
    has_qkv_biases = has_biases or "--add-qkv-bias" in family.marks
    if family.qkv_bias_key is not None:
        has_qkv_biases = config.flag(family.qkv_bias_key, default=True)
    is_tied = config.flag("tie_word_embeddings", default=family.tied_embeddings)
    return HuggingFaceModel(
        **sizes,
        num_query_groups=num_query_groups,
        kv_channels=kv_channels,
        layernorm_epsilon=config.number(family.norm_epsilon_key, default=family.norm_epsilon),
        **_rope(config, family),
        untie_embeddings_and_output_weights=not is_tied,
        add_bias_linear=has_biases,
        add_qkv_bias=has_qkv_biases,
        qk_layernorm="--qk-layernorm" in family.parts,
        window_tokens=window_tokens,
        window_attn_skip_freq=windowed_layers,
        no_rope_freq=skips_rope,
        squared_relu="--squared-relu" in family.parts,
        **(_gpt_oss(config) if "--quick-geglu" in family.parts else {}),
        experts=_experts(config, family, num_layers),
        latents=latents,
    )


def read_model(path: Path) -> tuple[HuggingFaceModel, str | None]:
    """The model of a Hugging Face folder, or of its ``config.json``, and the dtype of its weights
    by torch's name, if it says so. Raises ConfigurationError."""
    if path.is_dir():
        check_no_adapter(path)
        path = path / CONFIG_NAME
    content = read_json(path, "config", ConfigurationError)
    model = model_from_config(content, str(path))
    return model, content.get("dtype") or content.get("torch_dtype")


def check_no_adapter(folder: Path) -> None:
    """Raise ConfigurationError for peft's folder of an adapter, without its model."""
    path = folder / ADAPTER_CONFIG_NAME
    if path.is_file() and not (folder / CONFIG_NAME).exists():
        base = read_json(path, "adapter", ConfigurationError).get("base_model_name_or_path")
        raise ConfigurationError(
            f"{folder}: a model has {CONFIG_NAME} but this is an adapter of {base or 'a model'}; "
            f"run hydraulis import-hf MODEL OUT --adapter {folder}, which prints how to train it on"
        )


def num_predicting_layers(content: Any, what: str) -> int:
    """Layers of multi-token prediction after the others."""
    num_layers = without_nulls(content, what).integer(_NUM_PREDICTING, default=0)
    if num_layers:
        check_range("--num-layers", num_layers, f"{what}: {_NUM_PREDICTING}")
    return num_layers


def _experts(config: JsonObject, family: Family, num_layers: int) -> Experts | None:
    names = family.experts
    if names is None:
        return None
    layers = [1] * num_layers
    is_normalized = names.normalizes
    if names.num_dense_layers is not None:
        num_dense = config.integer(names.num_dense_layers)
        layers = [int(i >= num_dense) for i in range(num_layers)]
    elif is_normalized is None:
        is_normalized = config.flag("norm_topk_prob", default=False)
        step = config.integer("decoder_sparse_step", default=1)
        if step < 1:
            raise _wrong(config, "decoder_sparse_step", "at least 1 layer")
        dense = config.integers("mlp_only_layers") if config.has("mlp_only_layers") else ()
        layers = [int((i + 1) % step == 0 and i not in dense) for i in range(num_layers)]
    if not any(layers):
        key = names.num_dense_layers or "mlp_only_layers"
        raise _wrong(config, key, "some of the layers that could have experts")
    width = config.integer(names.ffn_hidden_size)
    shared = num_groups = groups_per_token = scale = None
    if names.shared_ffn_hidden_size is not None:
        shared = config.integer(names.shared_ffn_hidden_size)
    elif names.num_shared is not None:
        shared = config.integer(names.num_shared) * width
        scale = config.number("routed_scaling_factor")
    if names.chooses_groups:
        num_groups, groups_per_token = config.integer("n_group"), config.integer("topk_group")
        if groups_per_token == num_groups:  # all, which limits nothing
            num_groups = groups_per_token = None
    has_sigmoid_scores = "--moe-router-score-function" in family.parts
    return Experts(
        num_experts=config.integer(names.number if config.has(names.number) else _NUMBER),
        moe_router_topk=config.integer("num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        moe_layer_freq=tuple(layers),
        moe_router_pre_softmax=not is_normalized,
        moe_router_score_function="sigmoid" if has_sigmoid_scores else "softmax",
        moe_router_enable_expert_bias="--moe-router-enable-expert-bias" in family.parts,
        moe_router_num_groups=num_groups,
        moe_router_group_topk=groups_per_token,
        moe_router_topk_scaling_factor=None if scale == 1.0 else scale,
        moe_shared_expert_intermediate_size=shared or None,
        moe_shared_expert_gate=names.shared_ffn_hidden_size is not None,
    )


def _gpt_oss(config: JsonObject) -> dict[str, Any]:
    """What GPT-OSS has besides experts and windows."""
    return {
        "softmax_type": "learnable",
        "quick_geglu": True,
        "glu_linear_offset": 1.0,
        "activation_func_clamp_value": config.number(_LIMIT, default=7.0),
    }


def _no_rope_layers(config: JsonObject, family: Family, num_layers: int) -> tuple[int, ...]:
    """SmolLM3's list has 1 for a layer with positions, and may be longer than the model."""
    if not config.has("no_rope_layers"):
        interval = config.integer("no_rope_layer_interval", default=family.no_rope_layer_interval)
        if interval < 1:
            raise config.error(
                f"no_rope_layer_interval must be at least 1 layer but is {interval}; correct it"
            )
        return layers_without_rope(interval, num_layers)
    has_rope = config.array("no_rope_layers")
    if len(has_rope) < num_layers or any(each not in (0, 1) for each in has_rope):
        raise _wrong(config, "no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return layers_without_rope([1 - each for each in has_rope[:num_layers]], num_layers)


def _rope(config: JsonObject, family: Family) -> dict[str, Any]:
    """The model's rotary fields: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters``."""
    content: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.has(key):
            if not isinstance(config.value(key), Mapping):
                raise _wrong(config, key, "an object")
            content |= config.value(key)
    kinds = {content.pop("type", None), content.pop("rope_type", None)} - {None}
    rope = without_nulls(content, f"{config.what}, rope")
    theta = config.number("rope_theta", default=family.rope_theta)
    theta = rope.number("rope_theta", default=theta)
    if theta != int(theta):
        raise _wrong(config, "rope_theta", "a whole number", theta)
    percent = config.number(_PARTIAL, default=family.rotary_percent)
    percent = rope.number(_PARTIAL, default=percent)
    if percent != 1.0 and "--rotary-percent" not in family.parts:
        raise _wrong(config, _PARTIAL, 1.0, percent)
    kind = kinds.pop() if len(kinds) == 1 else "default" if not kinds else str(kinds)
    fields: dict[str, Any] = {"rotary_base": int(theta), "rotary_percent": percent}
    is_latent = "--multi-latent-attention" in family.parts
    known = ("default", "yarn") if is_latent else ("default", "linear", "llama3", "yarn")
    if kind not in known:
        raise _wrong(config, "rope_type", " or ".join(known), kind)
    if kind == "llama3":
        fields["rope_scaling_factor"] = rope.number("factor")
        for key, value in _LLAMA3.items():
            if rope.number(key) != value:
                raise _wrong(rope, key, value)
    elif kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = rope.number("factor")
    elif kind == "yarn":
        fields["yarn"] = _yarn(rope, is_latent=is_latent)
    elif family.has_yarn:
        raise _wrong(config, "rope_parameters", "YaRN, as transformers has it by default", kind)
    rope.check_all_read()
    return fields


def _windowed_layers(
    config: JsonObject, family: Family, types: Sequence[object], num_layers: int
) -> tuple[int, ...]:
    """1 for a layer with a window and 0 for the others."""
    others = _FULL_ATTENTION if family.alternates else _WINDOWED_ATTENTION
    kinds = types or [_WINDOWED_ATTENTION, others] * num_layers
    if len(kinds) < num_layers or not set(kinds) <= {_WINDOWED_ATTENTION, _FULL_ATTENTION}:
        raise _wrong(
            config, "layer_types", f"one of two kinds of attention for {num_layers} layers"
        )
    return tuple(int(kind == _WINDOWED_ATTENTION) for kind in kinds[:num_layers])


def _yarn(rope: JsonObject, *, is_latent: bool) -> Yarn:
    """transformers rotates with a scale of 1 if one of the two scales is absent or 0."""
    mscale, all_dims = (rope.number(key, default=0.0) for key in ("mscale", "mscale_all_dim"))
    if all_dims and not mscale:
        raise _wrong(rope, "mscale", "given with mscale_all_dim", mscale)
    yarn = Yarn(
        rotary_scaling_factor=rope.number("factor"),
        mscale=mscale if all_dims else 1.0,
        mscale_all_dim=all_dims,
        yarn_original_max_position_embeddings=rope.integer(_ORIGINAL),
        yarn_beta_fast=rope.number("beta_fast", default=Yarn.yarn_beta_fast),
        yarn_beta_slow=rope.number("beta_slow", default=Yarn.yarn_beta_slow),
        yarn_correction_range_round_to_int=rope.flag("truncate", default=True),
    )
    for name, key in _SIZES_OF_YARN.items() if is_latent else ():
        if name.startswith("yarn_") and getattr(yarn, name) != getattr(Yarn, name):
            raise _wrong(rope, key, getattr(Yarn, name))
    return yarn


def _wrong(config: JsonObject, key: str, only: object, value: object = None) -> ConfigurationError:
    value = config.value(key) if value is None else value
    return ConfigurationError(
        f"{config.what}: {key} can only be {only} but is {value!r}, for which Megatron's model has "
        "no counterpart; import another model"
    )


def _only(config: JsonObject, key: str, only: object) -> None:
    """Refuse another value; absent stands for the usual one."""
    if config.has(key) and config.value(key) != only:
        raise _wrong(config, key, only)
