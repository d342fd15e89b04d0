"""``config.json`` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel, RopeScaling
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import JsonObject

__all__ = ["CONFIG_NAME", "config_of", "model_from_config"]

CONFIG_NAME = "config.json"
ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LLAMA3: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron (0.19.2, `RotaryEmbedding._apply_scaling`) has fixed of Llama 3's scaling."""
_DEFAULT_ROPE_THETA = 10000.0
"""These two are what transformers (5.23) takes for all three families where nothing is said."""
_DEFAULT_RMS_NORM_EPS = 1e-6
_PARTIAL = "partial_rotary_factor"
_NOT_HERE = "Megatron's model has no counterpart; import another model"


def config_of(model: HuggingFaceModel, dtype: str) -> dict[str, Any]:
    """The configuration, in the form that transformers 4 and 5 both read.

    Args:
        model: the model.
        dtype: of the tensors, by torch's name.
    """
    family = model.family
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": _rope_config(model.rope_scaling),
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        # A checkpoint does not know its tokenizer; the families' defaults would be a guess.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "llama":
        config |= {"attention_bias": model.has_linear_biases, "mlp_bias": model.has_linear_biases}
    else:
        config["use_sliding_window"] = False
    if family == "qwen3":
        config["attention_bias"] = False
    return config


def model_from_config(content: Any, what: str) -> HuggingFaceModel:
    """The model that a parsed ``config.json`` describes.

    Raises ConfigurationError for what Megatron's model does not have.
    """
    config = _Config(content, what)
    family = _family(config)
    config.refuse_unless("hidden_act", "silu")
    config.refuse_unless("use_sliding_window", False)
    config.refuse_unless("quantization_config", None)
    layer_types = config.optional("layer_types")
    if layer_types is not None and set(layer_types) != {"full_attention"}:
        raise config.wrong("layer_types", layer_types, "['full_attention', …]")
    attention_bias = _flag(config, "attention_bias") if family != "qwen2" else False
    mlp_bias = _flag(config, "mlp_bias") if family == "llama" else False
    if family == "qwen3" and attention_bias:
        raise config.wrong("attention_bias", True, "false")
    if attention_bias != mlp_bias:
        raise config.wrong("mlp_bias", mlp_bias, f"attention_bias, which is {attention_bias}")
    heads = config.json.integer("num_attention_heads")
    hidden_size = config.json.integer("hidden_size")
    return HuggingFaceModel(
        num_layers=config.json.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=config.json.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=_num_query_groups(config, family, heads),
        kv_channels=_head_dim(config, family, hidden_size, heads),
        vocab_size=config.json.integer("vocab_size"),
        max_position_embeddings=config.json.integer("max_position_embeddings"),
        norm_epsilon=_number(config, "rms_norm_eps", _DEFAULT_RMS_NORM_EPS),
        **_rope(config),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        has_linear_biases=mlp_bias,
        has_qkv_biases=family == "qwen2" or mlp_bias,
        has_qk_norms=family == "qwen3",
    )


class _Config:
    """A configuration whose keys may be absent or null."""

    def __init__(self, content: Any, what: str) -> None:
        self.json = JsonObject(content, what, ConfigurationError)

    def optional(self, key: str) -> Any:
        return self.json.value(key) if self.json.has(key) else None

    def wrong(self, key: str, value: object, only: object) -> ConfigurationError:
        return ConfigurationError(
            f"{self.json.what}: {key} can only be {only} but is {value!r}, for which {_NOT_HERE}"
        )

    def refuse_unless(self, key: str, only: object) -> None:
        """Null and absent stand for what is usual."""
        value = self.optional(key)
        if value is not None and value != only:
            raise self.wrong(key, value, only)


def _family(config: _Config) -> str:
    family = config.json.text("model_type")
    known = ", ".join(ARCHITECTURES)
    if family not in ARCHITECTURES:
        raise ConfigurationError(
            f"{config.json.what}: only the model types {known} can be imported but this one is "
            f"{family!r}; import a model of these"
        )
    architectures = config.optional("architectures")
    if architectures is not None and architectures != [ARCHITECTURES[family]]:
        raise config.wrong("architectures", architectures, [ARCHITECTURES[family]])
    return family


def _num_query_groups(config: _Config, family: str, heads: int) -> int:
    # Llama's first configurations do not have it, and mean one for each head.
    if family == "llama" and config.optional("num_key_value_heads") is None:
        return heads
    return config.json.integer("num_key_value_heads")


def _head_dim(config: _Config, family: str, hidden_size: int, heads: int) -> int:
    # Qwen3's default is a number of its own, which a later version might change.
    if family == "qwen3" or config.optional("head_dim") is not None:
        return config.json.integer("head_dim")
    if heads < 1 or hidden_size % heads:
        raise config.wrong("hidden_size", hidden_size, f"a multiple of {heads} attention heads")
    return hidden_size // heads


def _rope(config: _Config) -> dict[str, Any]:
    """Base and scaling: ``rope_theta`` and ``rope_scaling``, or both in ``rope_parameters``."""
    content = dict(_rope_object(config, "rope_parameters") | _rope_object(config, "rope_scaling"))
    what = f"{config.json.what}, rope"
    theta = content.pop("rope_theta", None)
    if theta is None:
        theta = _number(config, "rope_theta", _DEFAULT_ROPE_THETA)
    base = JsonObject({"rope_theta": theta}, what, ConfigurationError).number("rope_theta")
    if base != int(base):
        raise config.wrong("rope_theta", base, "a whole number")
    for part in (content.pop(_PARTIAL, None), config.optional(_PARTIAL)):
        if part is not None and part != 1.0:
            raise config.wrong(_PARTIAL, part, 1.0)
    kinds = {content.pop("type", None), content.pop("rope_type", None)} - {None}
    kind = kinds.pop() if len(kinds) == 1 else "default" if not kinds else str(kinds)
    rest = JsonObject(content, what, ConfigurationError)
    scaling = None
    if kind == "llama3":
        scaling = RopeScaling("llama3", rest.number("factor"))
        for key, value in _LLAMA3.items():
            if rest.number(key) != value:
                raise config.wrong(f"{key} of rope scaling", rest.value(key), value)
    elif kind == "linear":
        scaling = RopeScaling("linear", rest.number("factor"))
    elif kind != "default":
        raise config.wrong("rope_type", kind, "'default', 'linear' or 'llama3'")
    rest.check_all_read()
    return {"rotary_base": int(base), "rope_scaling": scaling}


def _rope_object(config: _Config, key: str) -> dict[str, Any]:
    content = config.optional(key)
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise config.wrong(key, content, "an object")
    return content


def _rope_config(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    limits = _LLAMA3 if scaling.kind == "llama3" else {}
    return {"rope_type": scaling.kind, "factor": scaling.factor, **limits}


def _flag(config: _Config, key: str) -> bool:
    return False if config.optional(key) is None else config.json.flag(key)


def _number(config: _Config, key: str, default: float) -> float:
    return default if config.optional(key) is None else config.json.number(key)
