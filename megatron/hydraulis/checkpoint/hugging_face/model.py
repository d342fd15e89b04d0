"""A model that Hugging Face has, too, by the names of Megatron's arguments for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from typing import Any

from megatron.hydraulis.checkpoint.hugging_face.families import BIASES, FAMILIES, Family
from megatron.hydraulis.checkpoint.manifest import OFF_BY_DEFAULT, known_settings
from megatron.hydraulis.cost_model.model_arguments import NOT_OF_LATENTS
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.model_shape import ModelShape, layers_with_experts, windowed_layers

_DEFAULT_LLAMA3_FACTOR = 8.0
"""Megatron's default of ``--rope-scaling-factor``."""
_SCORES = ("softmax", "sigmoid")
"""Values of ``--moe-router-score-function``, the default first."""
_SOME_FAMILIES_HAVE = (
    "activation_func_clamp_value",
    "glu_linear_offset",
    "layernorm_zero_centered_gamma",
    "moe_router_enable_expert_bias",
    "mtp_num_layers",
    "multi_latent_attention",
    "no_rope_freq",
    "num_experts",
    "quick_geglu",
    "squared_relu",
    "window_attn_skip_freq",
    "window_size",
)
_MUST_BE_OFF = (
    *(name for name in OFF_BY_DEFAULT if name not in _SOME_FAMILIES_HAVE),
    *("rotary_interleaved", "spec", "moe_apply_probs_on_input", "moe_latent_size"),
)
"""Arguments of Megatron that change what is computed unless they are false, empty or absent."""
FAMILY_NAMES = ", ".join(sorted(family.name for family in FAMILIES.values()))
NO_COUNTERPART = f"{FAMILY_NAMES} have no counterpart; only such models can be exported"


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model, by Megatron's arguments."""

    num_experts: int
    moe_router_topk: int
    """Experts that a token passes."""
    moe_ffn_hidden_size: int
    moe_layer_freq: tuple[int, ...]
    """1 for a layer with experts and 0 for the others."""
    moe_router_pre_softmax: bool = False
    """Whether the softmax is over all experts, so that a token's weights sum to less than 1."""
    moe_router_score_function: str = _SCORES[0]
    moe_router_enable_expert_bias: bool = False
    """Whether biases, which are no weights, are added to the scores before the choice."""
    moe_router_num_groups: int | None = None
    """Groups of experts of which a token chooses some first."""
    moe_router_group_topk: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    """Factor of the weights of a token's experts."""
    moe_shared_expert_intermediate_size: int | None = None
    """Width of the experts that all tokens pass; None without them."""
    moe_shared_expert_gate: bool = False

    def __post_init__(self) -> None:
        """Check what `ModelShape` does not know."""
        if self.moe_router_score_function not in _SCORES:
            raise ConfigurationError(
                f"model: --moe-router-score-function must be {' or '.join(_SCORES)} but is "
                f"{self.moe_router_score_function}, for which {NO_COUNTERPART}"
            )
        if self.moe_router_topk == 1 and not self.moe_router_pre_softmax:
            raise ConfigurationError(
                "model: the weights of a token's experts sum to 1 (norm_topk_prob) but a token "
                "passes 1 expert, whose router would learn nothing and has no counterpart in "
                "Megatron; set norm_topk_prob to false, or import another model"
            )
        num_chosen, num_groups = self.moe_router_group_topk, self.moe_router_num_groups
        if num_chosen is None or num_groups is None:
            return
        if (
            num_groups < 1
            or self.num_experts % num_groups
            or num_chosen > num_groups
            or self.moe_router_topk > num_chosen * (self.num_experts // num_groups)
        ):
            raise ConfigurationError(
                f"model: groups share the experts evenly and hold a token's but there are "
                f"{self.num_experts} experts and {num_groups} groups, {num_chosen} of them for the "
                f"{self.moe_router_topk} experts of a token; correct them"
            )
        if self.moe_router_topk != 2 * num_chosen:
            raise ConfigurationError(
                f"model: DeepSeek-V3 scores groups by their best 2 experts but Megatron by as many "
                f"as a token has in each group, and {self.moe_router_topk} experts in {num_chosen} "
                f"groups are not 2 each; use no groups"
            )


@dataclass(frozen=True, kw_only=True)
class Latents:
    """The sizes of latent attention, by Megatron's arguments."""

    kv_lora_rank: int
    q_lora_rank: int | None = None
    """None if one matrix projects queries."""
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Stretching of rotary positions (arXiv 2309.00071), by Megatron's arguments.

    Those called ``yarn_…`` are fixed in latent attention.
    """

    rotary_scaling_factor: float
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    yarn_original_max_position_embeddings: int = 4096
    """Positions that were not stretched."""
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_correction_range_round_to_int: bool = True

    def __post_init__(self) -> None:
        """Check that transformers scales in the same way: not at all by one of the scales alone."""
        has_one = bool(self.mscale) != bool(self.mscale_all_dim)
        if has_one and (self.mscale, self.mscale_all_dim) != (1.0, 0.0):
            raise ConfigurationError(
                f"model: YaRN has both scales, or --mscale 1 and --mscale-all-dim 0, but they are "
                f"{self.mscale:g} and {self.mscale_all_dim:g}, for which {NO_COUNTERPART}"
            )

    def to_arguments(self, *, of_latents: bool) -> dict[str, Any]:
        """Megatron's arguments for it."""
        arguments = asdict(self)
        if not of_latents:
            return arguments
        return {name: value for name, value in arguments.items() if not name.startswith("yarn_")}


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel:
    """A model that Megatron and Hugging Face compute in the same way.

    RMSNorm, rotary positions and a gated MLP with SiLU, unless a field says otherwise. Fields that
    are called as Megatron's arguments hold the same. Raises ConfigurationError for impossible
    sizes, and for a combination that no family has.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Width of an MLP; without effect if all layers have experts."""
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    """Size of one head."""
    vocab_size: int
    """Number of tokens, without padding."""
    max_position_embeddings: int
    layernorm_epsilon: float
    rotary_base: int
    rope_scaling_factor: float | None = None
    """Factor of Llama 3's scaling of rotary frequencies, with its usual limits; None without it."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Positions are divided by it; a whole number, since the flag takes no other."""
    untie_embeddings_and_output_weights: bool
    add_bias_linear: bool
    """Whether every linear layer but the output layer has biases."""
    add_qkv_bias: bool = False
    """Whether projections to query, key and value have biases; always with `add_bias_linear`."""
    qk_layernorm: bool = False
    window_tokens: int | None = None
    """Tokens to which one attends in a layer with a window, itself included; None without any."""
    window_attn_skip_freq: tuple[int, ...] = ()
    """1 for a layer with a window and 0 for the others; empty if all have one."""
    softmax_type: str = "vanilla"
    """``learnable`` if the softmax has an offset for each head."""
    no_rope_freq: tuple[int, ...] = ()
    """1 for a layer without positions and 0 for the others; empty if all have them."""
    squared_relu: bool = False
    """An MLP without gate and with squared ReLU, and LayerNorm around one: Nemotron."""
    quick_geglu: bool = False
    """An MLP with a sigmoid of 1.702 x in place of SiLU's."""
    glu_linear_offset: float = 0.0
    """Added to the linear half of such an MLP."""
    activation_func_clamp_value: float | None = None
    """Limit of both halves, of the gate from above only."""
    rotary_percent: float = 1.0
    """Part of each head that is rotated."""
    experts: Experts | None = None
    latents: Latents | None = None
    yarn: Yarn | None = None
    mtp_num_layers: int = 0
    """Layers of multi-token prediction behind the others, each like the last of them."""
    has_value_head: bool = False
    """Whether it gives a value of each token instead of logits."""

    def __post_init__(self) -> None:
        """Check sizes and family."""
        self.shape()
        for name in (
            "max_position_embeddings",
            "rotary_base",
            "layernorm_epsilon",
            "rope_scaling_factor",
            "rotary_seq_len_interpolation_factor",
            "window_tokens",
            "rotary_percent",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigurationError(
                    f"model: {name} must be positive and finite but is {value}; correct it"
                )
        stretch = self.rotary_seq_len_interpolation_factor
        scalings = {
            "--use-rope-scaling": self.rope_scaling_factor,
            "--rotary-seq-len-interpolation-factor": stretch,
            "--multi-latent-attention": self.latents,
            "--position-embedding-type yarn": None if self.latents else self.yarn,
        }
        given = [option for option, value in scalings.items() if value is not None]
        if len(given) > 1:
            raise ConfigurationError(
                "model: positions are stretched in one way, those of latent attention by YaRN, "
                f"but {' and '.join(given)} were given, for which {NO_COUNTERPART}"
            )
        if stretch is not None and stretch != int(stretch):
            raise ConfigurationError(
                f"model: positions can be stretched by a whole factor only "
                f"(--rotary-seq-len-interpolation-factor) but it is {stretch}; such a model has no "
                "counterpart in Megatron"
            )
        self._check_family()

    def shape(self, vocab_multiple: int = 1) -> ModelShape:
        """Its sizes, with the vocabulary padded to a multiple."""
        further_sizes: dict[str, Any] = {}
        num_windowed = sum(self.window_attn_skip_freq or (1,) * self.num_layers)
        if self.latents is not None:
            rank = self.latents.q_lora_rank or 0
            further_sizes = asdict(self.latents) | {"q_lora_rank": rank}
        if (experts := self.experts) is not None:
            further_sizes |= {
                "num_experts": experts.num_experts,
                "num_expert_layers": sum(experts.moe_layer_freq),
                "num_first_mlp_layers": (*experts.moe_layer_freq, 1).index(1),
                "experts_per_token": experts.moe_router_topk,
                "expert_ffn_hidden_size": experts.moe_ffn_hidden_size,
                "shared_expert_ffn_hidden_size": experts.moe_shared_expert_intermediate_size or 0,
            }
        return ModelShape(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.ffn_hidden_size,
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            kv_channels=self.kv_channels,
            vocab_size=-(-self.vocab_size // vocab_multiple) * vocab_multiple,
            gated_mlp=not self.squared_relu,
            tied_embeddings=not self.untie_embeddings_and_output_weights,
            num_windowed_layers=num_windowed if self.window_tokens else 0,
            window_tokens=self.window_tokens or 0,
            num_predictions=self.mtp_num_layers,
            **further_sizes,
        )

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Megatron's flags, with values, for the parts that not all families have."""
        of_families = {part for family in FAMILIES.values() for part in family.parts}
        flags = [flag for flag in model_flags(self) if flag.split()[0] in of_families]
        if not self.add_bias_linear:
            return tuple(flags)
        return (BIASES, *(flag for flag in flags if flag != "--add-qkv-bias"))

    @cached_property
    def family(self) -> str:
        """Its model type: the only family that may have these parts."""
        return next(name for name, each in FAMILIES.items() if each.marks <= self._names_of_parts)

    @property
    def of_family(self) -> Family:
        """The family's row."""
        return FAMILIES[self.family]

    def __str__(self) -> str:
        return f"a {self.family} model of {self.num_layers} layers and {self.vocab_size} tokens"

    @property
    def _names_of_parts(self) -> set[str]:
        return {part if part == BIASES else part.split()[0] for part in self.parts}

    def _check_family(self) -> None:
        family, parts = self.of_family, self._names_of_parts
        if self.latents is None and (
            (family.has_yarn and self.yarn is None) or (self.yarn and self.rotary_percent != 1.0)
        ):
            raise ConfigurationError(
                f"model: YaRN rotates all channels of a head, and {family.name} "
                f"{'always' if family.has_yarn else 'may'} has it, but this model has "
                f"--position-embedding-type {'yarn' if self.yarn else 'rope'} and --rotary-percent "
                f"{self.rotary_percent:g}, for which {NO_COUNTERPART}"
            )
        if not family.marks | family.needs <= parts <= family.parts:
            has = " and ".join(sorted(family.parts)) or "none of these"
            raise ConfigurationError(
                f"model: {family.name} has {has} but this model {' and '.join(self.parts)}, for "
                f"which {NO_COUNTERPART}"
            )
        if family.has_whole_heads and self.hidden_size % self.num_attention_heads:
            raise ConfigurationError(
                f"model: {family.name}'s --hidden-size is a multiple of its attention heads but is "
                f"{self.hidden_size} with {self.num_attention_heads} heads, for which "
                f"{NO_COUNTERPART}"
            )
        experts, names = self.experts, family.experts
        if experts is None or names is None:
            return
        layers, shared = list(experts.moe_layer_freq), experts.moe_shared_expert_intermediate_size
        has_other_order = names.num_dense_layers and layers != sorted(layers)
        if has_other_order or (names.num_shared and (shared or 0) % experts.moe_ffn_hidden_size):
            raise ConfigurationError(
                f"model: {family.name} has experts in its last layers, and shared ones a multiple "
                f"as wide, but this model has them in layers {layers}, shared ones of {shared} "
                f"channels and others of {experts.moe_ffn_hidden_size}, for which {NO_COUNTERPART}"
            )

    def to_arguments(self) -> dict[str, Any]:
        """Megatron's arguments for it."""
        arguments = {field.name: getattr(self, field.name) for field in fields(self)}
        del arguments["has_value_head"]  # Megatron has none
        window_tokens, factor = arguments.pop("window_tokens"), self.rope_scaling_factor
        stretch = self.rotary_seq_len_interpolation_factor
        experts, latents, yarn = map(arguments.pop, ("experts", "latents", "yarn"))
        arguments |= {
            "group_query_attention": latents is None,
            "position_embedding_type": "rope" if latents or yarn is None else "yarn",
            "rotary_interleaved": False,
            "rotary_seq_len_interpolation_factor": None if stretch is None else int(stretch),
            "use_rope_scaling": factor is not None,
            "rope_scaling_factor": factor or _DEFAULT_LLAMA3_FACTOR,
            "normalization": "LayerNorm" if self.squared_relu else "RMSNorm",
            "layernorm_zero_centered_gamma": self.squared_relu,
            "swiglu": not (self.squared_relu or self.quick_geglu),
            "window_size": None if window_tokens is None else (window_tokens - 1, 0),
            "window_attn_skip_freq": list(self.window_attn_skip_freq) or None,
            "no_rope_freq": list(self.no_rope_freq) or None,
            "mtp_num_layers": self.mtp_num_layers or None,
            "num_experts": None,
        }
        if experts is not None:
            layers = experts.moe_layer_freq
            arguments |= asdict(experts)
            arguments["moe_layer_freq"] = 1 if all(layers) else list(layers)
            # As transformers computes the logits of DeepSeek.
            arguments["moe_router_dtype"] = None if latents is None else "fp32"
        if yarn is not None and latents is None:
            arguments |= yarn.to_arguments(of_latents=False)
        if latents is not None:
            del arguments["num_query_groups"], arguments["kv_channels"]
            stretching = yarn or Yarn(rotary_scaling_factor=1.0)
            arguments |= asdict(latents) | stretching.to_arguments(of_latents=True)
            arguments |= {
                "multi_latent_attention": True,
                "rope_type": "rope" if yarn is None else "yarn",
            }
        return arguments


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
    is_gpt_oss = bool(arguments.get("quick_geglu"))
    has_swiglu = not (has_squared_relu or is_gpt_oss)
    is_yarn = arguments.get("position_embedding_type") == "yarn"
    required: dict[str, tuple[object, str]] = {
        "normalization": ("LayerNorm" if has_squared_relu else "RMSNorm", "--normalization"),
        "layernorm_zero_centered_gamma": (has_squared_relu, "--apply-layernorm-1p"),
        "position_embedding_type": ("yarn" if is_yarn else "rope", "--position-embedding-type"),
        "softmax_type": ("learnable" if is_gpt_oss else "vanilla", "--softmax-type"),
        "glu_linear_offset": (1.0 if is_gpt_oss else 0.0, "--glu-linear-offset"),
        "swiglu": (has_swiglu, "--swiglu"),
    }
    for name, (value, flag) in required.items():
        if arguments.get(name, value) != value:
            raise ConfigurationError(
                f"{what}: {flag} must be {value} but is {arguments[name]}, for which "
                f"{NO_COUNTERPART}"
            )
    for name in _MUST_BE_OFF:
        if arguments.get(name):
            raise ConfigurationError(
                f"{what}: was trained with {name} = {arguments[name]}, for which {NO_COUNTERPART}"
            )

    what = f"{what}, arguments of the run"
    known: dict[str, Any] = {"vocab_size": vocab_size}
    if arguments.get("multi_latent_attention"):
        given = without_nulls(arguments, what)
        latents = known["latents"] = _read(Latents, given)
        if given.text("rope_type") == "yarn":
            known["yarn"] = _read(Yarn, given)
        known["kv_channels"] = latents.qk_head_dim + latents.qk_pos_emb_head_dim
        overruled = {"group_query_attention": False}
        arguments = {**arguments, **dict.fromkeys(NOT_OF_LATENTS), **overruled}
    given = without_nulls(arguments, what)
    if is_yarn and "latents" not in known:
        known["yarn"] = _read(Yarn, given)
    num_layers = given.integer("num_layers")
    if not arguments.get("group_query_attention", True):
        known["num_query_groups"] = given.integer("num_attention_heads")
    if not arguments.get("use_rope_scaling"):
        known["rope_scaling_factor"] = None
    if arguments.get("add_bias_linear"):
        known["add_qkv_bias"] = True
    if arguments.get("num_experts"):
        frequency = given.value("moe_layer_freq") if given.has("moe_layer_freq") else 1
        layers = tuple(map(int, layers_with_experts(num_layers, frequency)))
        width = given.integer("moe_ffn_hidden_size", default=given.integer("ffn_hidden_size"))
        known["experts"] = _read(Experts, given, moe_layer_freq=layers, moe_ffn_hidden_size=width)
    frequency = arguments.get("window_attn_skip_freq")
    return _read(
        HuggingFaceModel,
        given,
        window_tokens=_window_tokens(arguments.get("window_size")),
        window_attn_skip_freq=() if frequency is None else windowed_layers(num_layers, frequency),
        no_rope_freq=layers_without_rope(arguments.get("no_rope_freq"), num_layers),
        **known,
    )


def _read[Fields](kind: type[Fields], given: JsonObject, **known: Any) -> Fields:
    """A dataclass of this module from arguments that are called as its fields.

    known: fields that arguments do not say as they are.
    """
    readers: dict[str, Callable[[str], Any]] = {
        "int": given.integer,
        "float": given.number,
        "bool": given.flag,
        "str": given.text,
    }
    for field in fields(kind):  # type: ignore[arg-type]
        reader = readers.get(str(field.type).split()[0])
        is_needed = given.has(field.name) or field.default is MISSING
        if reader is not None and is_needed and field.name not in known:
            known[field.name] = reader(field.name)
    return kind(**known)


def _window_tokens(window_size: Sequence[int] | None) -> int | None:
    """Tokens of a window of Megatron's, which counts those before a token."""
    return None if window_size is None or window_size[0] < 0 else window_size[0] + 1


def layers_without_rope(frequency: int | Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """A period or a list of Megatron's; empty if all layers have positions."""
    if not frequency:
        return ()
    if isinstance(frequency, int):
        frequency = [int(layer % frequency == 0) for layer in range(1, num_layers + 1)]
    return tuple(frequency) if any(frequency) else ()


def without_nulls(content: Any, what: str) -> JsonObject:
    """An object in which null means absent, as in ``config.json`` and Megatron's arguments."""
    if isinstance(content, Mapping):
        content = {key: value for key, value in content.items() if value is not None}
    return JsonObject(content, what, ConfigurationError)


def model_flags(model: HuggingFaceModel) -> list[str]:
    """Flags of the training program for this model, each with its value."""
    defaults = {
        "rotary_percent": 1.0,
        "moe_layer_freq": 1,
        "moe_router_score_function": _SCORES[0],
        "softmax_type": "vanilla",
        "glu_linear_offset": 0.0,
    }
    if model.rope_scaling_factor is None:
        defaults["rope_scaling_factor"] = _DEFAULT_LLAMA3_FACTOR
    renamed = {
        "layernorm_epsilon": "norm_epsilon",
        "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    }
    flags = [] if model.add_bias_linear else ["--disable-bias-linear"]
    if model.yarn is not None and not model.yarn.yarn_correction_range_round_to_int:
        flags.append("--no-yarn-correction-range-round-to-int")
    for name, value in model.to_arguments().items():
        is_off = value is None or value is False or defaults.get(name) == value
        if is_off or name == "add_bias_linear":
            continue
        flag = f"--{renamed.get(name, name).replace('_', '-')}"
        if isinstance(value, tuple):
            flag += f" {','.join(map(str, value))}"
        elif isinstance(value, list):
            flag += f" '{value}'".replace(", ", ",")
        elif value is not True:
            flag += f" {value}"
        flags.append(flag)
    return flags
