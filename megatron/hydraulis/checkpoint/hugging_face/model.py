"""A model as Megatron's arguments, as a Hugging Face ``config.json``, and as tensors of both.

All differences of layout between the two are about rows, so one table serves both directions:

- Megatron's ``linear_qkv`` stacks, for each query group, the rows of the group's query heads, of
  its key head and of its value head; Hugging Face has three matrices, heads in order.
- Megatron's ``linear_fc1`` stacks gate and up.
- Megatron's vocabulary may be padded.
- Qwen3-Next puts the gate of each query head behind it, Megatron all gates of a group behind the
  group's queries.

Rotary positions are the same: both rotate the first half of a head against the second half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.hydraulis.checkpoint.byte_progress import size_text
from megatron.hydraulis.checkpoint.manifest import OFF_BY_DEFAULT, known_settings
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, listed
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.model_shape import ModelShape

Family = Literal["llama", "mistral", "nemotron", "qwen2", "qwen3", "qwen3_next", "smollm3"]

CONFIG_NAME = "config.json"
_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
_WITH_BIASES = ("llama", "nemotron", "smollm3")
"""Families that may have biases in all linear layers of a block."""
_ROTARY_PERCENT: Mapping[str, float] = {"nemotron": 0.5, "qwen3_next": 0.25}
"""Families that may rotate a part of each head, and the part by default."""
_LLAMA3: Mapping[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron (0.19.2, `RotaryEmbedding._apply_scaling`) has fixed of Llama 3's scaling."""
_DEFAULT_ROPE_THETA = 10000.0
_ROPE_THETA_OF_SMOLLM3 = 2e6
_DEFAULT_RMS_NORM_EPS = 1e-6
_LAYER_NORM_EPS_OF_NEMOTRON = 1e-5
_WINDOW_OF_MISTRAL = 4096
_INTERVAL_OF_SMOLLM3 = 4
"""Defaults of transformers (5.23), for all families where none is named."""
_DEFAULT_LLAMA3_FACTOR = 8.0
"""Megatron's default of ``--rope-scaling-factor``."""
_PARTIAL = "partial_rotary_factor"
_FULL_ATTENTION = "full_attention"

_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "rotary_base",
)
"""Whole numbers that are called the same in Megatron's arguments and here."""
_SOME_FAMILIES_HAVE = (
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
    "no_rope_freq",
    "squared_relu",
    "window_size",
)
_MUST_BE_OFF = (
    *(name for name in OFF_BY_DEFAULT if name not in _SOME_FAMILIES_HAVE),
    *("rotary_interleaved", "spec"),
)
"""Arguments of Megatron that change what is computed unless they are false, empty or absent."""
_FAMILIES = "Llama, Mistral, Nemotron, Qwen2, Qwen3, dense Qwen3-Next and SmolLM3"
_NO_COUNTERPART = f"{_FAMILIES} have no counterpart; only such models can be exported"


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceModel:
    """A model that Megatron and Hugging Face compute in the same way.

    RMSNorm, rotary positions and a gated MLP with SiLU, unless a field says otherwise. Raises
    ConfigurationError for impossible sizes, and for a combination that no family has.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Size of one head."""
    vocab_size: int
    """Number of tokens, without padding."""
    max_position_embeddings: int
    norm_epsilon: float
    rotary_base: int
    llama3_factor: float | None = None
    """Factor of Llama 3's scaling of rotary frequencies, with its usual limits."""
    interpolation_factor: float | None = None
    """Positions are divided by it; a whole number, since the flag takes no other."""
    tied_embeddings: bool
    has_linear_biases: bool = False
    """In every linear layer but the output layer."""
    has_qkv_biases: bool = False
    """In the projections to query, key and value; always with `has_linear_biases`."""
    has_qk_norms: bool = False
    window_tokens: int | None = None
    """To which a token attends in every layer, itself included; None for all before it."""
    layers_without_rope: tuple[int, ...] = ()
    """1 for a layer without positions and 0 for the others, as --no-rope-freq; empty if all have
    them."""
    has_squared_relu: bool = False
    """An MLP without gate and with squared ReLU, and LayerNorm around one: Nemotron."""
    has_output_gate: bool = False
    """A gate on attention's output, and RMSNorm around one: Qwen3-Next."""
    rotary_percent: float = 1.0
    """Part of each head that is rotated."""

    def __post_init__(self) -> None:
        """Check sizes and family."""
        self.shape()
        for name in (
            "max_position_embeddings",
            "rotary_base",
            "norm_epsilon",
            "llama3_factor",
            "interpolation_factor",
            "window_tokens",
            "rotary_percent",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(
                    f"model: {name} must be positive and finite but is {value}; correct it"
                )
        stretch = self.interpolation_factor
        if stretch is not None and self.llama3_factor is not None:
            raise ConfigurationError(
                "model: --use-rope-scaling and --rotary-seq-len-interpolation-factor "
                f"{stretch:g} were both given, for which {_NO_COUNTERPART}"
            )
        if stretch is not None and stretch != int(stretch):
            raise ConfigurationError(
                f"model: positions can be stretched by a whole factor only "
                f"(--rotary-seq-len-interpolation-factor) but it is {stretch}; such a model has no "
                "counterpart in Megatron"
            )
        self._check_family()
        if self.family == "llama" and self.hidden_size % self.num_attention_heads:
            raise ConfigurationError(
                f"model: Llama's --hidden-size is a multiple of its attention heads but is "
                f"{self.hidden_size} with {self.num_attention_heads} heads, for which "
                f"{_NO_COUNTERPART}"
            )

    def shape(self, vocab_multiple: int = 1) -> ModelShape:
        """Its sizes, with the vocabulary padded to a multiple."""
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            kv_channels=self.kv_channels,
            vocab_size=-(-self.vocab_size // vocab_multiple) * vocab_multiple,
            gated_mlp=not self.has_squared_relu,
            tied_embeddings=self.tied_embeddings,
            output_gate=self.has_output_gate,
            num_windowed_layers=self.num_layers if self.window_tokens else 0,
            window_tokens=self.window_tokens or 0,
        )

    def _check_family(self) -> None:
        family = self.family
        found = {
            "--qk-layernorm": self.has_qk_norms,
            "biases": self.has_qkv_biases,
            "--window-size": self.window_tokens is not None,
            "--no-rope-freq": bool(self.layers_without_rope),
            "--squared-relu": self.has_squared_relu,
            "--attention-output-gate": self.has_output_gate,
            f"--rotary-percent {self.rotary_percent:g}": self.rotary_percent != 1.0,
        }
        may_have = {
            "llama": "biases",
            "mistral": "--window-size",
            "nemotron": "--squared-relu --rotary-percent biases",
            "qwen2": "biases",
            "qwen3": "--qk-layernorm",
            "qwen3_next": "--attention-output-gate --qk-layernorm --rotary-percent",
            "smollm3": "--no-rope-freq biases",
        }[family].split()
        named = [what for what, is_there in found.items() if is_there]
        others = [what for what in named if what.split()[0] not in may_have]
        lacks_norms = family == "qwen3_next" and not self.has_qk_norms
        has_part_of_biases = self.has_qkv_biases != self.has_linear_biases and family != "qwen2"
        if others or lacks_norms or has_part_of_biases:
            has = " and ".join(may_have)
            if family in _WITH_BIASES:
                has = has.replace("biases", "biases in all linear layers")
            raise ConfigurationError(
                f"model: {_ARCHITECTURES[family].removesuffix('ForCausalLM')} has {has} but this "
                f"model {' and '.join(named)}, for which {_NO_COUNTERPART}"
            )

    @property
    def family(self) -> Family:
        """The only family that may have these parts."""
        if self.has_squared_relu:
            return "nemotron"
        if self.has_output_gate:
            return "qwen3_next"
        if self.layers_without_rope:
            return "smollm3"
        if self.window_tokens is not None:
            return "mistral"
        if self.has_qk_norms:
            return "qwen3"
        return "qwen2" if self.has_qkv_biases and not self.has_linear_biases else "llama"

    @property
    def norms_around_one(self) -> bool:
        """Whether norms multiply by one more than their weights."""
        return self.has_squared_relu or self.has_output_gate

    @property
    def normalization(self) -> str:
        """Megatron's name of the norms."""
        return "LayerNorm" if self.has_squared_relu else "RMSNorm"

    def to_arguments(self) -> dict[str, Any]:
        """The model as Megatron's arguments."""
        stretch = self.interpolation_factor
        return {name: getattr(self, name) for name in _SIZES} | {
            "group_query_attention": True,
            "vocab_size": self.vocab_size,
            "position_embedding_type": "rope",
            "rotary_percent": self.rotary_percent,
            "rotary_interleaved": False,
            "rotary_seq_len_interpolation_factor": None if stretch is None else int(stretch),
            "use_rope_scaling": self.llama3_factor is not None,
            "rope_scaling_factor": self.llama3_factor or _DEFAULT_LLAMA3_FACTOR,
            "normalization": self.normalization,
            "layernorm_epsilon": self.norm_epsilon,
            "layernorm_zero_centered_gamma": self.norms_around_one,
            "swiglu": not self.has_squared_relu,
            "squared_relu": self.has_squared_relu,
            "attention_output_gate": self.has_output_gate,
            "window_size": None if self.window_tokens is None else (self.window_tokens - 1, 0),
            "no_rope_freq": list(self.layers_without_rope) or None,
            "add_bias_linear": self.has_linear_biases,
            "add_qkv_bias": self.has_qkv_biases,
            "qk_layernorm": self.has_qk_norms,
            "untie_embeddings_and_output_weights": not self.tied_embeddings,
        }


# --- Megatron's arguments -----------------------------------------------------------------------


def model_from_arguments(
    arguments: Mapping[str, Any], what: str, *, vocab_size: int
) -> HuggingFaceModel:
    """The model that Megatron's arguments describe.

    Args:
        arguments: attributes of Megatron's arguments, as a checkpoint stores them.
        what: name of the checkpoint, for errors.
        vocab_size: number of tokens, without padding.

    Raises ConfigurationError for what none of the families has.
    """
    arguments = known_settings(arguments)
    has_squared_relu = bool(arguments.get("squared_relu"))
    has_output_gate = bool(arguments.get("attention_output_gate"))
    required: dict[str, tuple[object, str]] = {
        "normalization": ("LayerNorm" if has_squared_relu else "RMSNorm", "--normalization"),
        "layernorm_zero_centered_gamma": (
            has_squared_relu or has_output_gate,
            "--apply-layernorm-1p",
        ),
        "position_embedding_type": ("rope", "--position-embedding-type"),
        "softmax_type": ("vanilla", "--softmax-type"),
        "swiglu": (not has_squared_relu, "--swiglu"),
    }
    for name, (value, flag) in required.items():
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

    given = _without_nulls(arguments, f"{what}, arguments of the run")
    is_grouped = arguments.get("group_query_attention", True)
    sizes = {n: given.integer(n) for n in _SIZES if n != "num_query_groups" or is_grouped}
    sizes.setdefault("num_query_groups", sizes["num_attention_heads"])
    has_llama3 = bool(arguments.get("use_rope_scaling"))
    interpolation = "rotary_seq_len_interpolation_factor"
    has_linear_biases = bool(given.value("add_bias_linear"))
    # Earlier versions of Megatron name it as their flag does.
    epsilon_name = "norm_epsilon" if "norm_epsilon" in arguments else "layernorm_epsilon"
    return HuggingFaceModel(
        **sizes,
        vocab_size=vocab_size,
        norm_epsilon=given.number(epsilon_name),
        llama3_factor=given.number("rope_scaling_factor") if has_llama3 else None,
        interpolation_factor=given.number(interpolation) if given.has(interpolation) else None,
        tied_embeddings=not given.value("untie_embeddings_and_output_weights"),
        has_linear_biases=has_linear_biases,
        has_qkv_biases=has_linear_biases or bool(arguments.get("add_qkv_bias")),
        has_qk_norms=bool(arguments.get("qk_layernorm")),
        window_tokens=_window_tokens(arguments.get("window_size")),
        layers_without_rope=_layers_without_rope(
            arguments.get("no_rope_freq"), sizes["num_layers"]
        ),
        has_squared_relu=has_squared_relu,
        has_output_gate=has_output_gate,
        rotary_percent=given.number("rotary_percent", default=1.0),
    )


def _window_tokens(window_size: Sequence[int] | None) -> int | None:
    """Tokens of a window of Megatron's, which counts those before a token."""
    return None if window_size is None or window_size[0] < 0 else window_size[0] + 1


def _layers_without_rope(frequency: int | Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """A period or a list of Megatron's; empty if all layers have positions."""
    if not frequency:
        return ()
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(1, num_layers + 1)]
    return tuple(frequency) if any(frequency) else ()


def model_flags(model: HuggingFaceModel) -> list[str]:
    """Flags of the training program for this model, each with its value."""
    flags = [f"--{name.replace('_', '-')} {getattr(model, name)}" for name in _SIZES]
    flags += [
        "--group-query-attention",
        f"--vocab-size {model.vocab_size}",
        "--position-embedding-type rope",
        f"--normalization {model.normalization}",
        f"--norm-epsilon {model.norm_epsilon!r}",
        "--squared-relu" if model.has_squared_relu else "--swiglu",
    ]
    if model.norms_around_one:
        flags.append("--apply-layernorm-1p")
    if model.has_output_gate:
        flags.append("--attention-output-gate")
    if model.window_tokens is not None:
        flags.append(f"--window-size {model.window_tokens - 1},0")
    if model.layers_without_rope:
        flags.append(f"--no-rope-freq '{list(model.layers_without_rope)}'".replace(", ", ","))
    if model.rotary_percent != 1.0:
        flags.append(f"--rotary-percent {model.rotary_percent!r}")
    if model.llama3_factor is not None:
        flags.append(f"--use-rope-scaling --rope-scaling-factor {model.llama3_factor!r}")
    if model.interpolation_factor is not None:
        flags.append(f"--rotary-seq-len-interpolation-factor {int(model.interpolation_factor)}")
    if not model.has_linear_biases:
        flags.append("--disable-bias-linear")
        if model.has_qkv_biases:
            flags.append("--add-qkv-bias")
    if model.has_qk_norms:
        flags.append("--qk-layernorm")
    if not model.tied_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


# --- config.json --------------------------------------------------------------------------------


def config_of(model: HuggingFaceModel, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``, in the form that transformers 4 and 5 both read.

    Args:
        model: the model.
        dtype: of the tensors, by torch's name.
    """
    family = model.family
    rope_scaling: dict[str, Any] | None = None
    if model.llama3_factor is not None:
        rope_scaling = {"rope_type": "llama3", "factor": model.llama3_factor, **_LLAMA3}
    elif model.interpolation_factor is not None:
        rope_scaling = {"rope_type": "linear", "factor": model.interpolation_factor}
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "hidden_act": "relu2" if model.has_squared_relu else "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "norm_eps" if model.has_squared_relu else "rms_norm_eps": model.norm_epsilon,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": rope_scaling,
        "tie_word_embeddings": model.tied_embeddings,
        "attention_dropout": 0.0,
        "torch_dtype": dtype,
        # A checkpoint does not know its tokenizer; the families' defaults would be a guess.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family in _WITH_BIASES:
        config |= {"attention_bias": model.has_linear_biases, "mlp_bias": model.has_linear_biases}
    if family in _ROTARY_PERCENT:
        config[_PARTIAL] = model.rotary_percent
    if family in ("qwen2", "qwen3", "smollm3"):
        config["use_sliding_window"] = False
    if family in ("qwen3", "qwen3_next"):
        config["attention_bias"] = False
    if family == "mistral":
        config["sliding_window"] = model.window_tokens
    if family == "smollm3":
        config["no_rope_layers"] = [1 - skips for skips in model.layers_without_rope]
    if family == "qwen3_next":
        config["layer_types"] = [_FULL_ATTENTION] * model.num_layers
        config["mlp_only_layers"] = list(range(model.num_layers))
    return config


def model_from_config(content: Any, what: str) -> HuggingFaceModel:
    """The model that a parsed ``config.json`` describes.

    Raises ConfigurationError for what Megatron's model does not have.
    """
    config = _without_nulls(content, what)
    family = config.text("model_type")
    if family not in _ARCHITECTURES:
        raise ConfigurationError(
            f"{what}: only the model types {', '.join(_ARCHITECTURES)} can be imported but this "
            f"one is {family!r}; import a model of these"
        )
    is_nemotron = family == "nemotron"
    _only(config, "architectures", [_ARCHITECTURES[family]])
    _only(config, "hidden_act", "relu2" if is_nemotron else "silu")
    _only(config, "use_sliding_window", False)
    _only(config, "quantization_config", None)
    num_layers = config.integer("num_hidden_layers")
    types = config.array("layer_types") if config.has("layer_types") else []
    if family == "qwen3_next":
        if sorted(config.integers("mlp_only_layers")) != list(range(num_layers)):
            raise _wrong(config, "mlp_only_layers", "all layers, without experts")
        types = config.array("layer_types")
    if any(kind != _FULL_ATTENTION for kind in types):
        raise _wrong(config, "layer_types", [_FULL_ATTENTION, "…"])
    has_biases = False
    if family in _WITH_BIASES:
        has_biases = config.flag("attention_bias", default=False)
        if config.flag("mlp_bias", default=False) != has_biases:
            raise _wrong(config, "mlp_bias", f"attention_bias, which is {has_biases}")
    elif family != "qwen2":
        _only(config, "attention_bias", False)
    heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    num_query_groups = heads
    # Configurations of these may not have it, and mean one group for each head.
    if family not in ("llama", "nemotron") or config.has("num_key_value_heads"):
        num_query_groups = config.integer("num_key_value_heads")
    # The default of these is a fixed number, which a later version might change.
    if family in ("qwen3", "qwen3_next") or config.has("head_dim"):
        kv_channels = config.integer("head_dim")
    elif heads < 1 or hidden_size % heads:
        raise _wrong(config, "hidden_size", f"a multiple of {heads} attention heads")
    else:
        kv_channels = hidden_size // heads
    window_tokens = None
    # Null, which is a value here, stands for no window.
    if family == "mistral" and ("sliding_window" not in content or config.has("sliding_window")):
        window_tokens = config.integer("sliding_window", default=_WINDOW_OF_MISTRAL)
    return HuggingFaceModel(
        num_layers=num_layers,
        hidden_size=hidden_size,
        ffn_hidden_size=config.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=num_query_groups,
        kv_channels=kv_channels,
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        norm_epsilon=(
            config.number("norm_eps", default=_LAYER_NORM_EPS_OF_NEMOTRON)
            if is_nemotron
            else config.number("rms_norm_eps", default=_DEFAULT_RMS_NORM_EPS)
        ),
        **_rope(config, family),
        tied_embeddings=config.flag("tie_word_embeddings", default=family == "smollm3"),
        has_linear_biases=has_biases,
        has_qkv_biases=family == "qwen2" or has_biases,
        has_qk_norms=family in ("qwen3", "qwen3_next"),
        window_tokens=window_tokens,
        layers_without_rope=_no_rope_layers(config, num_layers) if family == "smollm3" else (),
        has_squared_relu=is_nemotron,
        has_output_gate=family == "qwen3_next",
    )


def _no_rope_layers(config: JsonObject, num_layers: int) -> tuple[int, ...]:
    """SmolLM3's list has 1 for a layer with positions, and may be longer than the model."""
    if not config.has("no_rope_layers"):
        interval = config.integer("no_rope_layer_interval", default=_INTERVAL_OF_SMOLLM3)
        if interval < 1:
            raise config.error(
                f"no_rope_layer_interval must be at least 1 layer but is {interval}; correct it"
            )
        return _layers_without_rope(interval, num_layers)
    has_rope = config.array("no_rope_layers")
    if len(has_rope) < num_layers or any(each not in (0, 1) for each in has_rope):
        raise _wrong(config, "no_rope_layers", f"0 or 1 for each of {num_layers} layers")
    return _layers_without_rope([1 - each for each in has_rope[:num_layers]], num_layers)


def _rope(config: JsonObject, family: str) -> dict[str, Any]:
    """The model's rotary fields: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters``."""
    content: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.has(key):
            if not isinstance(config.value(key), Mapping):
                raise _wrong(config, key, "an object")
            content |= config.value(key)
    kinds = {content.pop("type", None), content.pop("rope_type", None)} - {None}
    rope = _without_nulls(content, f"{config.what}, rope")
    default = _ROPE_THETA_OF_SMOLLM3 if family == "smollm3" else _DEFAULT_ROPE_THETA
    theta = config.number("rope_theta", default=default)
    theta = rope.number("rope_theta", default=theta)
    if theta != int(theta):
        raise _wrong(config, "rope_theta", "a whole number", theta)
    percent = config.number(_PARTIAL, default=_ROTARY_PERCENT.get(family, 1.0))
    percent = rope.number(_PARTIAL, default=percent)
    if percent != 1.0 and family not in _ROTARY_PERCENT:
        raise _wrong(config, _PARTIAL, 1.0, percent)
    kind = kinds.pop() if len(kinds) == 1 else "default" if not kinds else str(kinds)
    fields: dict[str, Any] = {"rotary_base": int(theta), "rotary_percent": percent}
    if kind == "llama3":
        fields["llama3_factor"] = rope.number("factor")
        for key, value in _LLAMA3.items():
            if rope.number(key) != value:
                raise _wrong(rope, key, value)
    elif kind == "linear":
        fields["interpolation_factor"] = rope.number("factor")
    elif kind != "default":
        raise _wrong(config, "rope_type", "'default', 'linear' or 'llama3'", kind)
    rope.check_all_read()
    return fields


def _without_nulls(content: Any, what: str) -> JsonObject:
    """In these files null means absent."""
    if isinstance(content, Mapping):
        content = {key: value for key, value in content.items() if value is not None}
    return JsonObject(content, what, ConfigurationError)


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


# --- tensors ------------------------------------------------------------------------------------

EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT = "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm"

_Runs = tuple[tuple[int, int], ...]

_WHOLE_NAMES = {
    "self_attention.linear_qkv.layer_norm": "input_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "mlp.linear_fc1.layer_norm": "post_attention_layernorm",
    "mlp.linear_fc2": "mlp.down_proj",
}
"""Modules whose tensors Hugging Face has in one piece."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor of Hugging Face's as rows of one of Megatron's."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    """Hugging Face's; the first dim counts the rows."""
    key: str
    """Megatron's, without the layer's number: ``mlp.linear_fc2.weight``."""
    layer: int | None
    """None outside of layers."""
    runs: _Runs
    """(first row, end) of each run of rows in Megatron's tensor, in Hugging Face's order."""


def tensor_rows(model: HuggingFaceModel) -> Iterator[TensorRows]:
    """Every tensor of the model in Hugging Face's form, layer by layer.

    Those that make one of Megatron's tensors follow one another.
    """
    outer = outer_shapes(model)

    def whole(name: str, key: str) -> TensorRows:
        return TensorRows(name, outer[key], key, None, ((0, outer[key][0]),))

    yield whole("model.embed_tokens.weight", EMBEDDING)
    for layer in range(model.num_layers):
        yield from _layer_rows(model, layer)
    for kind in _norm_kinds(model):
        yield whole(f"model.norm.{kind}", f"{FINAL_NORM}.{kind}")
    if not model.tied_embeddings:
        yield whole("lm_head.weight", OUTPUT)


def outer_shapes(model: HuggingFaceModel, padded_size: int | None = None) -> dict[str, Any]:
    """Shapes of Megatron's tensors outside of layers, by key.

    Args:
        model: the model.
        padded_size: rows of the vocabulary; without padding if None.
    """
    num_tokens = model.vocab_size if padded_size is None else padded_size
    shapes: dict[str, Any] = {
        EMBEDDING: (num_tokens, model.hidden_size),
        **{f"{FINAL_NORM}.{kind}": (model.hidden_size,) for kind in _norm_kinds(model)},
    }
    if not model.tied_embeddings:
        shapes[OUTPUT] = shapes[EMBEDDING]
    return shapes


def layer_shapes(model: HuggingFaceModel) -> dict[str, tuple[int, ...]]:
    """Shapes of Megatron's tensors of one layer, by key without the layer's number."""
    hidden = model.hidden_size
    query = model.num_attention_heads * model.kv_channels
    num_query_matrices = 2 if model.has_output_gate else 1
    qkv = num_query_matrices * query + 2 * model.num_query_groups * model.kv_channels
    fc1 = (1 if model.has_squared_relu else 2) * model.ffn_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.weight": (qkv, hidden),
        "self_attention.linear_proj.weight": (hidden, query),
        "mlp.linear_fc1.weight": (fc1, hidden),
        "mlp.linear_fc2.weight": (hidden, model.ffn_hidden_size),
    }
    for kind in _norm_kinds(model):
        shapes[f"self_attention.linear_qkv.layer_norm_{kind}"] = (hidden,)
        shapes[f"mlp.linear_fc1.layer_norm_{kind}"] = (hidden,)
    if model.has_qkv_biases:
        shapes["self_attention.linear_qkv.bias"] = (qkv,)
    if model.has_linear_biases:
        shapes["self_attention.linear_proj.bias"] = (hidden,)
        shapes["mlp.linear_fc1.bias"] = (fc1,)
        shapes["mlp.linear_fc2.bias"] = (hidden,)
    if model.has_qk_norms:
        shapes["self_attention.q_layernorm.weight"] = (model.kv_channels,)
        shapes["self_attention.k_layernorm.weight"] = (model.kv_channels,)
    return shapes


def _norm_kinds(model: HuggingFaceModel) -> tuple[str, ...]:
    """Parameters of a norm outside of attention."""
    return ("weight", "bias") if model.has_squared_relu else ("weight",)


def _layer_rows(model: HuggingFaceModel, layer: int) -> Iterator[TensorRows]:
    ffn = model.ffn_hidden_size
    split: dict[str, dict[str, _Runs]] = {
        "self_attention.linear_qkv": _qkv_runs(model),
        "mlp.linear_fc1": {"mlp.gate_proj": ((0, ffn),), "mlp.up_proj": ((ffn, 2 * ffn),)},
    }
    if model.has_squared_relu:
        split["mlp.linear_fc1"] = {"mlp.up_proj": ((0, ffn),)}
    for key, shape in layer_shapes(model).items():
        # "….linear_qkv.weight" as well as "….linear_qkv.layer_norm_weight"
        kind = "bias" if key.endswith("bias") else "weight"
        module = key.removesuffix(kind).rstrip("._")
        parts = split.get(module)
        if parts is None:
            parts = {_WHOLE_NAMES[module]: ((0, shape[0]),)}
        for name, runs in parts.items():
            num_rows = sum(end - first for first, end in runs)
            full_name = f"model.layers.{layer}.{name}.{kind}"
            yield TensorRows(full_name, (num_rows, *shape[1:]), key, layer, runs)


def _qkv_runs(model: HuggingFaceModel) -> dict[str, _Runs]:
    size = model.kv_channels
    num_heads = model.num_attention_heads // model.num_query_groups
    num_query_rows = num_heads * size * (2 if model.has_output_gate else 1)
    starts = [group * (num_query_rows + 2 * size) for group in range(model.num_query_groups)]
    ends = [start + num_query_rows for start in starts]
    queries = list(zip(starts, ends, strict=True))
    if model.has_output_gate:
        queries = [
            (start + row, start + row + size)
            for start in starts
            for head in range(num_heads)
            for row in (head * size, (num_heads + head) * size)
        ]
    return {
        "self_attn.q_proj": tuple(queries),
        "self_attn.k_proj": tuple((end, end + size) for end in ends),
        "self_attn.v_proj": tuple((end + size, end + 2 * size) for end in ends),
    }


# --- conversion ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Converted:
    """What ``import-hf`` or ``export-hf`` has converted."""

    checkpoint: Path
    """Folder of the checkpoint itself."""
    model: HuggingFaceModel
    dtype_name: str
    """Torch's name of the dtype, such as ``bfloat16``."""
    num_bytes: int
    """Size of all tensors."""

    def __str__(self) -> str:
        model = self.model
        return (
            f"{model.family}, {model.num_layers} layers, {model.vocab_size} tokens, "
            f"{size_text(self.num_bytes)} of {self.dtype_name}"
        )


def check_tensors[Dtype](
    model: HuggingFaceModel,
    source: Path,
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[tuple[int, ...], Dtype]],
    fix: str,
) -> Dtype:
    """Check that a source of tensors has exactly those of a model; returns their common dtype.

    Args:
        model: the model.
        source: for messages.
        wanted: shapes by name.
        found: shapes and dtypes by name.
        fix: end of the message about damage.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
        ConfigurationError: there are tensors of another model, or of several dtypes.
    """
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise CheckpointError(
            f"{source}: a {model.family} model of this configuration has {len(wanted)} tensors but "
            f"{listed(missing)} of them are missing; {fix}"
        )
    unknown = sorted(found.keys() - wanted.keys())
    if unknown:
        raise ConfigurationError(
            f"{source}: {listed(unknown)} have no counterpart, since a {model.family} model has "
            f"{len(wanted)} tensors; only models of {_FAMILIES} can be converted"
        )
    differences = [
        f"{name} is {found[name][0]} instead of {shape}"
        for name, shape in wanted.items()
        if found[name][0] != shape
    ]
    if differences:
        raise CheckpointError(
            f"{source}: tensors must have the shapes that the configuration and a vocabulary of "
            f"{model.vocab_size} tokens give but {listed(differences)}; {fix}"
        )
    dtypes = {dtype: name for name, (_, dtype) in found.items()}
    if len(dtypes) > 1:
        raise ConfigurationError(
            f"{source}: all tensors must be of one dtype but "
            f"{', '.join(f'{name} is of {dtype}' for dtype, name in dtypes.items())}; save the "
            "model in one dtype"
        )
    return next(iter(dtypes))
