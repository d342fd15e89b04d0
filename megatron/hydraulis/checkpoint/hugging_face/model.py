"""What a checkpoint's arguments and a Hugging Face configuration both say about a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron.hydraulis.checkpoint.model_arguments import NEVER_ON_HERE
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape

__all__ = ["HuggingFaceModel", "RopeScaling", "model_flags", "model_from_arguments"]

Family = Literal["llama", "qwen2", "qwen3"]

_NO_COUNTERPART = (
    "Llama, Qwen2 and Qwen3 have no counterpart; only models of these families can be exported"
)
_REQUIRED: Mapping[str, tuple[object, str]] = {
    "normalization": ("RMSNorm", "--normalization"),
    "position_embedding_type": ("rope", "--position-embedding-type"),
    "softmax_type": ("vanilla", "--softmax-type"),
    "swiglu": (True, "--swiglu"),
    "rotary_percent": (1.0, "--rotary-percent"),
}
"""Arguments of upstream that must have one value, and their flags."""
_MUST_BE_OFF = (*NEVER_ON_HERE, "rotary_interleaved", "spec")
"""Arguments of upstream that make another computation unless they are false, empty or absent."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """A change of the rotary frequencies."""

    kind: Literal["llama3", "linear"]
    """Frequency scaling of Llama 3 with its usual limits, or positions divided by the factor."""
    factor: float

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a factor that is none, or that no flag can say."""
        if not 0.0 < self.factor < float("inf"):
            raise ConfigurationError(
                f"model: the factor of rope scaling must be positive and finite but is "
                f"{self.factor}; correct it"
            )
        if self.kind == "linear" and self.factor != int(self.factor):
            raise ConfigurationError(
                f"model: positions can be stretched by a whole factor only "
                f"(--rotary-seq-len-interpolation-factor) but it is {self.factor}; such a model "
                "has no counterpart in Megatron"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceModel:
    """A model that Megatron and Hugging Face compute alike.

    RMSNorm, rotary positions over whole heads, a gated MLP with SiLU. Raises ConfigurationError for
    sizes that make no model, and for a combination that no family has.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Size of one head."""
    vocab_size: int
    """Tokens, without padding."""
    max_position_embeddings: int
    norm_epsilon: float
    rotary_base: int
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool
    has_linear_biases: bool = False
    """In every linear layer but the output layer."""
    has_qkv_biases: bool = False
    """In the projections to query, key and value; always with `has_linear_biases`."""
    has_qk_norms: bool = False

    def __post_init__(self) -> None:
        """Check sizes and family."""
        if self.has_linear_biases and not self.has_qkv_biases:
            raise ConfigurationError(
                "model: with biases in every linear layer query, key and value have them too but "
                "has_qkv_biases is False; set it"
            )
        ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            kv_channels=self.kv_channels,
            vocab_size=self.vocab_size,
            gated_mlp=True,
            tied_embeddings=self.tied_embeddings,
        )
        for name in ("max_position_embeddings", "rotary_base", "norm_epsilon"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise ConfigurationError(
                    f"model: {name} must be positive and finite but is {value}; correct it"
                )
        if self.has_qk_norms and self.has_qkv_biases:
            raise ConfigurationError(
                "model: norms of queries and keys (--qk-layernorm) come without biases in Qwen3 "
                f"but this model has both, for which {_NO_COUNTERPART}"
            )
        if self.family == "llama" and self.hidden_size % self.num_attention_heads:
            raise ConfigurationError(
                f"model: Llama's --hidden-size is a multiple of its attention heads but is "
                f"{self.hidden_size} with {self.num_attention_heads} heads, for which "
                f"{_NO_COUNTERPART}"
            )

    @property
    def family(self) -> Family:
        """The one that has these biases and norms."""
        if self.has_qk_norms:
            return "qwen3"
        return "qwen2" if self.has_qkv_biases and not self.has_linear_biases else "llama"

    def to_arguments(self) -> dict[str, Any]:
        """As attributes of upstream's arguments."""
        scaling = self.rope_scaling
        is_llama3 = scaling is not None and scaling.kind == "llama3"
        is_linear = scaling is not None and scaling.kind == "linear"
        return {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "ffn_hidden_size": self.ffn_hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "group_query_attention": True,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.kv_channels,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": self.rotary_base,
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
            "rotary_seq_len_interpolation_factor": (
                int(scaling.factor) if scaling is not None and is_linear else None
            ),
            "use_rope_scaling": is_llama3,
            "rope_scaling_factor": scaling.factor if scaling is not None and is_llama3 else 8.0,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_epsilon,
            "swiglu": True,
            "add_bias_linear": self.has_linear_biases,
            "add_qkv_bias": self.has_qkv_biases,
            "qk_layernorm": self.has_qk_norms,
            "untie_embeddings_and_output_weights": not self.tied_embeddings,
        }


def model_from_arguments(
    arguments: Mapping[str, Any], what: str, *, vocab_size: int
) -> HuggingFaceModel:
    """The model that upstream's arguments describe.

    Args:
        arguments: attributes of upstream's arguments, as a checkpoint stores them.
        what: name of the checkpoint, for errors.
        vocab_size: tokens, without padding.

    Raises ConfigurationError for what the three families do not have.
    """
    for name, (value, flag) in _REQUIRED.items():
        if arguments.get(name, value) != value:
            raise ConfigurationError(
                f"{what}: {flag} must be {value} but is {arguments[name]}, for which "
                f"{_NO_COUNTERPART}"
            )
    for name in _MUST_BE_OFF:
        if arguments.get(name):
            raise ConfigurationError(
                f"{what}: was trained with {name} = {arguments[name]}, for which {_NO_COUNTERPART}"
            )
    heads = _integer(arguments, "num_attention_heads", what)
    has_linear_biases = bool(_value(arguments, "add_bias_linear", what))
    is_grouped = arguments.get("group_query_attention", True)
    return HuggingFaceModel(
        num_layers=_integer(arguments, "num_layers", what),
        hidden_size=_integer(arguments, "hidden_size", what),
        ffn_hidden_size=_integer(arguments, "ffn_hidden_size", what),
        num_attention_heads=heads,
        num_query_groups=_integer(arguments, "num_query_groups", what) if is_grouped else heads,
        kv_channels=_integer(arguments, "kv_channels", what),
        vocab_size=vocab_size,
        max_position_embeddings=_integer(arguments, "max_position_embeddings", what),
        norm_epsilon=_number(arguments, _epsilon_name(arguments), what),
        rotary_base=_integer(arguments, "rotary_base", what),
        rope_scaling=_rope_scaling(arguments, what),
        tied_embeddings=not _value(arguments, "untie_embeddings_and_output_weights", what),
        has_linear_biases=has_linear_biases,
        has_qkv_biases=has_linear_biases or bool(arguments.get("add_qkv_bias", False)),
        has_qk_norms=bool(arguments.get("qk_layernorm", False)),
    )


def model_flags(model: HuggingFaceModel) -> list[str]:
    """Flags that make the training program build this model, each with its value."""
    scaling = model.rope_scaling
    flags = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_hidden_size}",
        f"--num-attention-heads {model.num_attention_heads}",
        f"--group-query-attention --num-query-groups {model.num_query_groups}",
        f"--kv-channels {model.kv_channels}",
        f"--vocab-size {model.vocab_size}",
        f"--max-position-embeddings {model.max_position_embeddings}",
        "--position-embedding-type rope",
        f"--rotary-base {model.rotary_base}",
        "--normalization RMSNorm",
        f"--norm-epsilon {model.norm_epsilon!r}",
        "--swiglu",
    ]
    if scaling is not None and scaling.kind == "llama3":
        flags.append(f"--use-rope-scaling --rope-scaling-factor {scaling.factor!r}")
    elif scaling is not None:
        flags.append(f"--rotary-seq-len-interpolation-factor {int(scaling.factor)}")
    if not model.has_linear_biases:
        flags.append("--disable-bias-linear")
        if model.has_qkv_biases:
            flags.append("--add-qkv-bias")
    if model.has_qk_norms:
        flags.append("--qk-layernorm")
    if not model.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


def _epsilon_name(arguments: Mapping[str, Any]) -> str:
    """Upstream's earlier versions call it as their flag."""
    return "norm_epsilon" if "norm_epsilon" in arguments else "layernorm_epsilon"


def _rope_scaling(arguments: Mapping[str, Any], what: str) -> RopeScaling | None:
    interpolation = arguments.get("rotary_seq_len_interpolation_factor")
    is_llama3 = bool(arguments.get("use_rope_scaling", False))
    if is_llama3 and interpolation is not None:
        raise ConfigurationError(
            f"{what}: --use-rope-scaling and --rotary-seq-len-interpolation-factor "
            f"{interpolation} were both given, for which {_NO_COUNTERPART}"
        )
    if is_llama3:
        return RopeScaling("llama3", _number(arguments, "rope_scaling_factor", what))
    if interpolation is not None:
        return RopeScaling(
            "linear", _number(arguments, "rotary_seq_len_interpolation_factor", what)
        )
    return None


def _value(arguments: Mapping[str, Any], name: str, what: str) -> Any:
    if arguments.get(name) is None:
        raise ConfigurationError(
            f"{what}: its arguments must say {name} but do not; save the checkpoint again by a "
            "program that stores its arguments"
        )
    return arguments[name]


def _integer(arguments: Mapping[str, Any], name: str, what: str) -> int:
    value = _value(arguments, name, what)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigurationError(
            f"{what}: {name} must be a whole number but is {value!r}; save the checkpoint again"
        )
    return value


def _number(arguments: Mapping[str, Any], name: str, what: str) -> float:
    value = _value(arguments, name, what)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigurationError(
            f"{what}: {name} must be a number but is {value!r}; save the checkpoint again"
        )
    return float(value)
