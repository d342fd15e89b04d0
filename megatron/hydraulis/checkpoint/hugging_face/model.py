"""A model as Megatron's arguments, as a Hugging Face ``config.json``, and as tensors of both.

All differences of layout between the two are about rows, so one table serves both directions:

- Megatron's ``linear_qkv`` stacks, for each query group, the rows of the group's query heads, of
  its key head and of its value head; Hugging Face has three matrices, heads in order.
- Megatron's ``linear_fc1`` stacks gate and up.
- Megatron's vocabulary may be padded.

Rotary positions are the same: both rotate the first half of a head against the second half.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.hydraulis.checkpoint.byte_progress import size_text
from megatron.hydraulis.checkpoint.manifest import OFF_BY_DEFAULT
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, listed
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.model_shape import ModelShape

Family = Literal["llama", "qwen2", "qwen3"]

CONFIG_NAME = "config.json"
_ARCHITECTURES: Mapping[str, str] = {
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
_DEFAULT_RMS_NORM_EPS = 1e-6
"""Defaults of transformers (5.23) for all three families."""
_DEFAULT_LLAMA3_FACTOR = 8.0
"""Megatron's default of ``--rope-scaling-factor``."""
_PARTIAL = "partial_rotary_factor"

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
_REQUIRED: Mapping[str, tuple[object, str]] = {
    "normalization": ("RMSNorm", "--normalization"),
    "position_embedding_type": ("rope", "--position-embedding-type"),
    "softmax_type": ("vanilla", "--softmax-type"),
    "swiglu": (True, "--swiglu"),
    "rotary_percent": (1.0, "--rotary-percent"),
}
"""Arguments of Megatron that must have one value, and their flags."""
_MUST_BE_OFF = (*OFF_BY_DEFAULT, "rotary_interleaved", "spec")
"""Arguments of Megatron that change what is computed unless they are false, empty or absent."""
_NO_COUNTERPART = (
    "Llama, Qwen2 and Qwen3 have no counterpart; only models of these families can be exported"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceModel:
    """A model that Megatron and Hugging Face compute in the same way.

    RMSNorm, rotary positions over whole heads, a gated MLP with SiLU. Raises ConfigurationError for
    impossible sizes, and for a combination that no family has.
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

    def __post_init__(self) -> None:
        """Check sizes and family."""
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
        for name in (
            "max_position_embeddings",
            "rotary_base",
            "norm_epsilon",
            "llama3_factor",
            "interpolation_factor",
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
        """The family that has these biases and norms."""
        if self.has_qk_norms:
            return "qwen3"
        return "qwen2" if self.has_qkv_biases and not self.has_linear_biases else "llama"

    def to_arguments(self) -> dict[str, Any]:
        """The model as Megatron's arguments."""
        stretch = self.interpolation_factor
        return {name: getattr(self, name) for name in _SIZES} | {
            "group_query_attention": True,
            "vocab_size": self.vocab_size,
            "position_embedding_type": "rope",
            "rotary_percent": 1.0,
            "rotary_interleaved": False,
            "rotary_seq_len_interpolation_factor": None if stretch is None else int(stretch),
            "use_rope_scaling": self.llama3_factor is not None,
            "rope_scaling_factor": self.llama3_factor or _DEFAULT_LLAMA3_FACTOR,
            "normalization": "RMSNorm",
            "layernorm_epsilon": self.norm_epsilon,
            "swiglu": True,
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
    )


def model_flags(model: HuggingFaceModel) -> list[str]:
    """Flags of the training program for this model, each with its value."""
    flags = [f"--{name.replace('_', '-')} {getattr(model, name)}" for name in _SIZES]
    flags += [
        "--group-query-attention",
        f"--vocab-size {model.vocab_size}",
        "--position-embedding-type rope",
        "--normalization RMSNorm",
        f"--norm-epsilon {model.norm_epsilon!r}",
        "--swiglu",
    ]
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
        "hidden_act": "silu",
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": float(model.rotary_base),
        "rope_scaling": rope_scaling,
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
    config = _without_nulls(content, what)
    family = config.text("model_type")
    if family not in _ARCHITECTURES:
        raise ConfigurationError(
            f"{what}: only the model types {', '.join(_ARCHITECTURES)} can be imported but this "
            f"one is {family!r}; import a model of these"
        )
    _only(config, "architectures", [_ARCHITECTURES[family]])
    _only(config, "hidden_act", "silu")
    _only(config, "use_sliding_window", False)
    _only(config, "quantization_config", None)
    if config.has("layer_types") and set(config.array("layer_types")) != {"full_attention"}:
        raise _wrong(config, "layer_types", ["full_attention", "…"])
    has_biases = False
    if family == "llama":
        has_biases = config.flag("attention_bias", default=False)
        if config.flag("mlp_bias", default=False) != has_biases:
            raise _wrong(config, "mlp_bias", f"attention_bias, which is {has_biases}")
    elif family == "qwen3":
        _only(config, "attention_bias", False)
    heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    num_query_groups = heads
    # Llama's first configurations do not have it, and mean one group for each head.
    if family != "llama" or config.has("num_key_value_heads"):
        num_query_groups = config.integer("num_key_value_heads")
    # Qwen3's default is a fixed number, which a later version might change.
    if family == "qwen3" or config.has("head_dim"):
        kv_channels = config.integer("head_dim")
    elif heads < 1 or hidden_size % heads:
        raise _wrong(config, "hidden_size", f"a multiple of {heads} attention heads")
    else:
        kv_channels = hidden_size // heads
    return HuggingFaceModel(
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=config.integer("intermediate_size"),
        num_attention_heads=heads,
        num_query_groups=num_query_groups,
        kv_channels=kv_channels,
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings"),
        norm_epsilon=config.number("rms_norm_eps", default=_DEFAULT_RMS_NORM_EPS),
        **_rope(config),
        tied_embeddings=config.flag("tie_word_embeddings", default=False),
        has_linear_biases=has_biases,
        has_qkv_biases=family == "qwen2" or has_biases,
        has_qk_norms=family == "qwen3",
    )


def _rope(config: JsonObject) -> dict[str, Any]:
    """The model's rotary fields: ``rope_theta`` and ``rope_scaling``, or ``rope_parameters``."""
    content: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        if config.has(key):
            if not isinstance(config.value(key), Mapping):
                raise _wrong(config, key, "an object")
            content |= config.value(key)
    kinds = {content.pop("type", None), content.pop("rope_type", None)} - {None}
    rope = _without_nulls(content, f"{config.what}, rope")
    theta = config.number("rope_theta", default=_DEFAULT_ROPE_THETA)
    theta = rope.number("rope_theta", default=theta)
    if theta != int(theta):
        raise _wrong(config, "rope_theta", "a whole number", theta)
    _only(rope, _PARTIAL, 1.0)
    _only(config, _PARTIAL, 1.0)
    kind = kinds.pop() if len(kinds) == 1 else "default" if not kinds else str(kinds)
    fields: dict[str, Any] = {"rotary_base": int(theta)}
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
    yield whole("model.norm.weight", f"{FINAL_NORM}.weight")
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
        f"{FINAL_NORM}.weight": (model.hidden_size,),
    }
    if not model.tied_embeddings:
        shapes[OUTPUT] = shapes[EMBEDDING]
    return shapes


def layer_shapes(model: HuggingFaceModel) -> dict[str, tuple[int, ...]]:
    """Shapes of Megatron's tensors of one layer, by key without the layer's number."""
    hidden = model.hidden_size
    query = model.num_attention_heads * model.kv_channels
    qkv = query + 2 * model.num_query_groups * model.kv_channels
    shapes: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.layer_norm_weight": (hidden,),
        "self_attention.linear_qkv.weight": (qkv, hidden),
        "self_attention.linear_proj.weight": (hidden, query),
        "mlp.linear_fc1.layer_norm_weight": (hidden,),
        "mlp.linear_fc1.weight": (2 * model.ffn_hidden_size, hidden),
        "mlp.linear_fc2.weight": (hidden, model.ffn_hidden_size),
    }
    if model.has_qkv_biases:
        shapes["self_attention.linear_qkv.bias"] = (qkv,)
    if model.has_linear_biases:
        shapes["self_attention.linear_proj.bias"] = (hidden,)
        shapes["mlp.linear_fc1.bias"] = (2 * model.ffn_hidden_size,)
        shapes["mlp.linear_fc2.bias"] = (hidden,)
    if model.has_qk_norms:
        shapes["self_attention.q_layernorm.weight"] = (model.kv_channels,)
        shapes["self_attention.k_layernorm.weight"] = (model.kv_channels,)
    return shapes


def _layer_rows(model: HuggingFaceModel, layer: int) -> Iterator[TensorRows]:
    ffn = model.ffn_hidden_size
    split: dict[str, dict[str, _Runs]] = {
        "self_attention.linear_qkv": _qkv_runs(model),
        "mlp.linear_fc1": {"mlp.gate_proj": ((0, ffn),), "mlp.up_proj": ((ffn, 2 * ffn),)},
    }
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
    num_query_rows = model.num_attention_heads // model.num_query_groups * size
    starts = [group * (num_query_rows + 2 * size) for group in range(model.num_query_groups)]
    ends = [start + num_query_rows for start in starts]
    return {
        "self_attn.q_proj": tuple(zip(starts, ends, strict=True)),
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
            f"{len(wanted)} tensors; only Llama, Qwen2 and Qwen3 models can be converted"
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
