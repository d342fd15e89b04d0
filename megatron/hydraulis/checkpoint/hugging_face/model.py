"""A model that Hugging Face has, too, and Megatron's arguments for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron.hydraulis.checkpoint.hugging_face.families import BIASES, FAMILIES, Family
from megatron.hydraulis.checkpoint.manifest import OFF_BY_DEFAULT, known_settings
from megatron.hydraulis.cost_model.model_arguments import NOT_OF_LATENTS
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.json_object import JsonObject
from megatron.hydraulis.model_shape import ModelShape, layers_with_experts

_SCORES, _SCALING = "moe_router_score_function", "moe_router_topk_scaling_factor"
_DEFAULT_LLAMA3_FACTOR = 8.0
"""Megatron's default of ``--rope-scaling-factor``."""
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
    "layernorm_zero_centered_gamma",
    "moe_router_enable_expert_bias",
    "multi_latent_attention",
    "no_rope_freq",
    "num_experts",
    "squared_relu",
    "window_size",
)
_MUST_BE_OFF = (
    *(name for name in OFF_BY_DEFAULT if name not in _SOME_FAMILIES_HAVE),
    *("rotary_interleaved", "spec", "moe_apply_probs_on_input", "moe_latent_size"),
)
"""Arguments of Megatron that change what is computed unless they are false, empty or absent."""
FAMILY_NAMES = (
    "DeepSeek-V2, DeepSeek-V3, Llama, Mistral, Mixtral, Nemotron, Qwen2, Qwen3, both with experts, "
    "and SmolLM3"
)
NO_COUNTERPART = f"{FAMILY_NAMES} have no counterpart; only such models can be exported"


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """The experts of a model."""

    number: int
    per_token: int
    """Experts that a token passes."""
    ffn_hidden_size: int
    layers: tuple[int, ...]
    """1 for a layer with experts and 0 for the others, as --moe-layer-freq."""
    has_softmax_before_choice: bool = False
    """Over all experts, so that the weights of a token's experts sum to less than 1."""
    has_sigmoid_scores: bool = False
    """Instead of those of a softmax."""
    has_bias: bool = False
    """Whether biases, which are no weights, are added to the scores before the choice."""
    num_groups: int | None = None
    """Groups of experts of which a token chooses some first."""
    groups_per_token: int | None = None
    scaling_factor: float | None = None
    """Of the weights of a token's experts."""
    shared_ffn_hidden_size: int = 0
    """Of what all tokens pass; 0 for none."""
    has_shared_gate: bool = False

    def __post_init__(self) -> None:
        """Check what `ModelShape` does not know."""
        if self.per_token == 1 and not self.has_softmax_before_choice:
            raise ConfigurationError(
                "model: the weights of a token's experts sum to 1 (norm_topk_prob) but a token "
                "passes 1 expert, whose router would learn nothing and has no counterpart in "
                "Megatron; set norm_topk_prob to false, or import another model"
            )
        num_chosen, num_groups = self.groups_per_token, self.num_groups
        if num_chosen is None or num_groups is None:
            return
        if (
            num_groups < 1
            or self.number % num_groups
            or num_chosen > num_groups
            or self.per_token > num_chosen * (self.number // num_groups)
        ):
            raise ConfigurationError(
                f"model: groups share the experts evenly and hold a token's but there are "
                f"{self.number} experts and {num_groups} groups, {num_chosen} of them for the "
                f"{self.per_token} experts of a token; correct them"
            )
        if self.per_token != 2 * num_chosen:
            raise ConfigurationError(
                f"model: DeepSeek-V3 scores groups by their best 2 experts but Megatron by as many "
                f"as a token has in each group, and {self.per_token} experts in {num_chosen} "
                f"groups are not 2 each; use no groups"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """The sizes of latent attention, by Megatron's names."""

    kv_lora_rank: int
    q_lora_rank: int = 0
    """0 if one matrix projects queries."""
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Yarn:
    """How rotary positions of latent attention are stretched from 4,096 (arXiv 2309.00071)."""

    factor: float
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HuggingFaceModel:
    """A model that Megatron and Hugging Face compute in the same way.

    RMSNorm, rotary positions and a gated MLP with SiLU, unless a field says otherwise. Raises
    ConfigurationError for impossible sizes, and for a combination that no family has.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    """Of an MLP; without effect if all layers have experts."""
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
    rotary_percent: float = 1.0
    """Part of each head that is rotated."""
    experts: Experts | None = None
    latents: Latents | None = None
    yarn: Yarn | None = None

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
        scalings = {
            "--use-rope-scaling": self.llama3_factor,
            "--rotary-seq-len-interpolation-factor": stretch,
            "--multi-latent-attention": self.latents,
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
        if self.family == "llama" and self.hidden_size % self.num_attention_heads:
            raise ConfigurationError(
                f"model: Llama's --hidden-size is a multiple of its attention heads but is "
                f"{self.hidden_size} with {self.num_attention_heads} heads, for which "
                f"{NO_COUNTERPART}"
            )

    def shape(self, vocab_multiple: int = 1) -> ModelShape:
        """Its sizes, with the vocabulary padded to a multiple."""
        further_sizes: dict[str, Any] = {}
        if self.latents is not None:
            further_sizes = asdict(self.latents)
        if (experts := self.experts) is not None:
            further_sizes |= {
                "num_experts": experts.number,
                "num_expert_layers": sum(experts.layers),
                "num_first_mlp_layers": (*experts.layers, 1).index(1),
                "experts_per_token": experts.per_token,
                "expert_ffn_hidden_size": experts.ffn_hidden_size,
                "shared_expert_ffn_hidden_size": experts.shared_ffn_hidden_size,
            }
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
            num_windowed_layers=self.num_layers if self.window_tokens else 0,
            window_tokens=self.window_tokens or 0,
            **further_sizes,
        )

    @property
    def parts(self) -> list[str]:
        """What it has besides what all families have, by Megatron's flags."""
        experts = self.experts
        found = {
            "--qk-layernorm": self.has_qk_norms,
            BIASES: self.has_linear_biases,
            "--add-qkv-bias": self.has_qkv_biases and not self.has_linear_biases,
            "--window-size": self.window_tokens is not None,
            "--no-rope-freq": bool(self.layers_without_rope),
            "--squared-relu": self.has_squared_relu,
            "--multi-latent-attention": self.latents is not None,
            f"--rotary-percent {self.rotary_percent:g}": self.rotary_percent != 1.0,
        }
        if experts is not None:
            found |= {
                "--num-experts": True,
                "--moe-layer-freq": not all(experts.layers),
                "--moe-router-pre-softmax": experts.has_softmax_before_choice,
                "--moe-shared-expert-intermediate-size": bool(experts.shared_ffn_hidden_size),
                "--moe-shared-expert-gate": experts.has_shared_gate,
                "--moe-router-score-function sigmoid": experts.has_sigmoid_scores,
                "--moe-router-enable-expert-bias": experts.has_bias,
                f"--moe-router-num-groups {experts.num_groups}": bool(experts.num_groups),
                f"--moe-router-topk-scaling-factor {experts.scaling_factor}": (
                    experts.scaling_factor is not None
                ),
            }
        return [part for part, is_there in found.items() if is_there]

    def _check_family(self) -> None:
        family, parts = self.of_family, self.parts
        if all(map(family.has, parts)) and set(family.needs) <= set(parts):
            self._check_layers_of_experts()
            return
        has = " and ".join((*family.marks, *family.needs, *family.may_have)) or "none of these"
        raise ConfigurationError(
            f"model: {family.name} has {has} but this model {' and '.join(parts)}, for which "
            f"{NO_COUNTERPART}"
        )

    def _check_layers_of_experts(self) -> None:
        experts, names = self.experts, self.of_family.experts
        if experts is None or names is None:
            return
        has_other_order = names.num_dense_layers and list(experts.layers) != sorted(experts.layers)
        if has_other_order or (
            names.num_shared and experts.shared_ffn_hidden_size % experts.ffn_hidden_size
        ):
            raise ConfigurationError(
                f"model: {self.of_family.name} has experts in its last layers, and shared ones a "
                f"multiple as wide, but this model has them in layers {list(experts.layers)}, "
                f"shared ones of {experts.shared_ffn_hidden_size} channels and others of "
                f"{experts.ffn_hidden_size}, for which {NO_COUNTERPART}"
            )

    @property
    def family(self) -> str:
        """Its model type: the only family that may have these parts."""
        parts = set(self.parts)
        return next(name for name, each in FAMILIES.items() if parts.issuperset(each.marks))

    @property
    def of_family(self) -> Family:
        """The family's row."""
        return FAMILIES[self.family]

    @property
    def normalization(self) -> str:
        """Megatron's name of the norms."""
        return "LayerNorm" if self.has_squared_relu else "RMSNorm"

    def to_arguments(self) -> dict[str, Any]:
        stretch = self.interpolation_factor
        not_of_latents = () if self.latents is None else ("num_query_groups", "kv_channels")
        sizes = {name: getattr(self, name) for name in _SIZES if name not in not_of_latents}
        return sizes | {
            "group_query_attention": self.latents is None,
            "vocab_size": self.vocab_size,
            "position_embedding_type": "rope",
            "rotary_percent": self.rotary_percent,
            "rotary_interleaved": False,
            "rotary_seq_len_interpolation_factor": None if stretch is None else int(stretch),
            "use_rope_scaling": self.llama3_factor is not None,
            "rope_scaling_factor": self.llama3_factor or _DEFAULT_LLAMA3_FACTOR,
            "normalization": self.normalization,
            "layernorm_epsilon": self.norm_epsilon,
            "layernorm_zero_centered_gamma": self.has_squared_relu,
            "swiglu": not self.has_squared_relu,
            "squared_relu": self.has_squared_relu,
            "window_size": None if self.window_tokens is None else (self.window_tokens - 1, 0),
            "no_rope_freq": list(self.layers_without_rope) or None,
            "add_bias_linear": self.has_linear_biases,
            "add_qkv_bias": self.has_qkv_biases,
            "qk_layernorm": self.has_qk_norms,
            "untie_embeddings_and_output_weights": not self.tied_embeddings,
            **self._expert_arguments(),
            **self._latent_arguments(),
        }

    def _expert_arguments(self) -> dict[str, Any]:
        experts = self.experts
        if experts is None:
            return {"num_experts": None}
        return {
            "num_experts": experts.number,
            "moe_router_topk": experts.per_token,
            "moe_ffn_hidden_size": experts.ffn_hidden_size,
            "moe_layer_freq": 1 if all(experts.layers) else list(experts.layers),
            "moe_router_pre_softmax": experts.has_softmax_before_choice,
            "moe_shared_expert_intermediate_size": experts.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": experts.has_shared_gate,
            "moe_router_score_function": "sigmoid" if experts.has_sigmoid_scores else "softmax",
            "moe_router_enable_expert_bias": experts.has_bias,
            "moe_router_num_groups": experts.num_groups,
            "moe_router_group_topk": experts.groups_per_token,
            "moe_router_topk_scaling_factor": experts.scaling_factor,
            # As transformers computes the logits of DeepSeek.
            "moe_router_dtype": None if self.latents is None else "fp32",
        }

    def _latent_arguments(self) -> dict[str, Any]:
        if self.latents is None:
            return {}
        yarn = Yarn(factor=1.0) if self.yarn is None else self.yarn
        return asdict(self.latents) | {
            "q_lora_rank": self.latents.q_lora_rank or None,
            "multi_latent_attention": True,
            "rope_type": "rope" if self.yarn is None else "yarn",
            "rotary_scaling_factor": yarn.factor,
            "mscale": yarn.mscale,
            "mscale_all_dim": yarn.mscale_all_dim,
        }


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
    required: dict[str, tuple[object, str]] = {
        "normalization": ("LayerNorm" if has_squared_relu else "RMSNorm", "--normalization"),
        "layernorm_zero_centered_gamma": (has_squared_relu, "--apply-layernorm-1p"),
        "position_embedding_type": ("rope", "--position-embedding-type"),
        "softmax_type": ("vanilla", "--softmax-type"),
        "swiglu": (not has_squared_relu, "--swiglu"),
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

    latents, yarn = None, None
    if arguments.get("multi_latent_attention"):
        latents, yarn = _latents(without_nulls(arguments, f"{what}, arguments of the run"))
        num_channels = latents.qk_head_dim + latents.qk_pos_emb_head_dim
        overruled = {"kv_channels": num_channels, "group_query_attention": False}
        arguments = {**arguments, **dict.fromkeys(NOT_OF_LATENTS), **overruled}
    given = without_nulls(arguments, f"{what}, arguments of the run")
    is_grouped = arguments.get("group_query_attention", True)
    sizes = {n: given.integer(n) for n in _SIZES if n != "num_query_groups" or is_grouped}
    sizes.setdefault("num_query_groups", sizes["num_attention_heads"])
    has_llama3 = bool(arguments.get("use_rope_scaling"))
    interpolation = "rotary_seq_len_interpolation_factor"
    has_linear_biases = bool(given.value("add_bias_linear"))
    return HuggingFaceModel(
        **sizes,
        vocab_size=vocab_size,
        norm_epsilon=given.number("layernorm_epsilon"),
        llama3_factor=given.number("rope_scaling_factor") if has_llama3 else None,
        interpolation_factor=given.number(interpolation) if given.has(interpolation) else None,
        tied_embeddings=not given.value("untie_embeddings_and_output_weights"),
        has_linear_biases=has_linear_biases,
        has_qkv_biases=has_linear_biases or bool(arguments.get("add_qkv_bias")),
        has_qk_norms=bool(arguments.get("qk_layernorm")),
        window_tokens=_window_tokens(arguments.get("window_size")),
        layers_without_rope=layers_without_rope(arguments.get("no_rope_freq"), sizes["num_layers"]),
        has_squared_relu=has_squared_relu,
        rotary_percent=given.number("rotary_percent", default=1.0),
        experts=_experts(given) if arguments.get("num_experts") else None,
        latents=latents,
        yarn=yarn,
    )


def _latents(given: JsonObject) -> tuple[Latents, Yarn | None]:
    latents = Latents(
        kv_lora_rank=given.integer("kv_lora_rank"),
        q_lora_rank=given.integer("q_lora_rank", default=0),
        qk_head_dim=given.integer("qk_head_dim"),
        qk_pos_emb_head_dim=given.integer("qk_pos_emb_head_dim"),
        v_head_dim=given.integer("v_head_dim"),
    )
    if given.text("rope_type") != "yarn":
        return latents, None
    return latents, Yarn(
        factor=given.number("rotary_scaling_factor"),
        mscale=given.number("mscale"),
        mscale_all_dim=given.number("mscale_all_dim"),
    )


def _experts(given: JsonObject) -> Experts:
    num_layers = given.integer("num_layers")
    frequency = given.value("moe_layer_freq") if given.has("moe_layer_freq") else 1
    has_groups = given.has("moe_router_num_groups")
    scores = given.value(_SCORES) if given.has(_SCORES) else "softmax"
    if scores not in ("softmax", "sigmoid"):
        raise ConfigurationError(
            f"{given.what}: --moe-router-score-function must be softmax or sigmoid but is "
            f"{scores}, for which {NO_COUNTERPART}"
        )
    return Experts(
        number=given.integer("num_experts"),
        per_token=given.integer("moe_router_topk"),
        ffn_hidden_size=given.integer(
            "moe_ffn_hidden_size", default=given.integer("ffn_hidden_size")
        ),
        layers=tuple(map(int, layers_with_experts(num_layers, frequency))),
        has_softmax_before_choice=given.flag("moe_router_pre_softmax", default=False),
        shared_ffn_hidden_size=given.integer("moe_shared_expert_intermediate_size", default=0),
        has_shared_gate=given.flag("moe_shared_expert_gate", default=False),
        has_sigmoid_scores=scores == "sigmoid",
        has_bias=given.flag("moe_router_enable_expert_bias", default=False),
        num_groups=given.integer("moe_router_num_groups") if has_groups else None,
        groups_per_token=given.integer("moe_router_group_topk") if has_groups else None,
        scaling_factor=given.number(_SCALING) if given.has(_SCALING) else None,
    )


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
    arguments = model.to_arguments()
    defaults = {"rotary_percent": 1.0, "moe_layer_freq": 1, _SCORES: "softmax"}
    if model.llama3_factor is None:
        defaults["rope_scaling_factor"] = _DEFAULT_LLAMA3_FACTOR
    renamed = {
        "layernorm_epsilon": "norm_epsilon",
        "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    }
    flags = [] if model.has_linear_biases else ["--disable-bias-linear"]
    for name, value in arguments.items():
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
