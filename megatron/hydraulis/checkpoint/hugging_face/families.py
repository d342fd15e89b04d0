"""The families of models that Hugging Face and Megatron compute in the same way: a row each.

Parts of a model are called by the flags of Megatron that give it them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

BIASES = "biases in all linear layers"
"""The only part that Megatron has without a flag."""
WINDOWED_LAYERS = "--window-attn-skip-freq"
"""The part of a family in which only some layers have windows."""
PREDICTIONS = "--mtp-num-layers"
"""The part of a family that has layers of multi-token prediction behind the others."""
_NO_WINDOW = {"use_sliding_window": False}
_NO_BIAS = {"attention_bias": False}


DENSE_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of an MLP's layers, in all families."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertNames:
    """A family's names for its experts, in ``config.json`` and in the names of tensors."""

    number: str = "num_experts"
    ffn_hidden_size: str = "moe_intermediate_size"
    module: str = "mlp"
    """Name of the module that has router and experts."""
    router: str = "gate"
    """Name of the router in it."""
    projections: tuple[str, str, str] = DENSE_PROJECTIONS
    """Names of an expert's layers."""
    is_stacked: bool = False
    """Whether a folder has tensors of all experts of a layer, (experts, inputs, outputs), in which
    outputs of gate and up take turns."""
    shared_module: str = "shared_expert"
    shared_ffn_hidden_size: str | None = None
    """Key of their width, if the family has shared experts with a gate."""
    num_shared: str | None = None
    """Key of their number, if it has them without a gate: each is as wide as an expert."""
    num_dense_layers: str | None = None
    """Key of the number of layers without experts, which are the first; None if any may be."""
    normalizes: bool | None = None
    """Whether the weights of a token's experts sum to 1; None if ``norm_topk_prob`` says so."""
    chooses_groups: bool = False
    """Whether a token's experts may be chosen in some groups of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A model type; numbers are the defaults of transformers (5.23)."""

    architecture: str
    marks: Set[str] = frozenset()
    """Parts by which the family is recognized."""
    needs: Set[str] = frozenset()
    """Further parts that all its models have."""
    may_have: Set[str] = frozenset()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Values that ``config.json`` must have."""
    needs_head_dim: bool = False
    """Whether ``head_dim`` must be given: its default is a fixed number, which may change."""
    needs_groups: bool = True
    """Whether ``num_key_value_heads`` must be given; otherwise it defaults to the heads."""
    norm_epsilon_key: str = "rms_norm_eps"
    norm_epsilon: float = 1e-6
    rope_theta: float = 10000.0
    rotary_percent: float = 1.0
    window_tokens: int | None = None
    alternates: bool = False
    """Whether every other layer, the first among them, has a window unless ``layer_types`` says
    which; otherwise all have."""
    has_yarn: bool = False
    """Whether YaRN stretches positions by default, so that ``config.json`` must say how."""
    no_rope_layer_interval: int = 0
    """Period of the layers without positions; 0 if all have them."""
    qkv_bias_key: str | None = None
    """Key that says whether queries, keys and values have biases, by default they do. Without it
    they have them if the family's mark says so."""
    has_whole_heads: bool = False
    """Whether the hidden size must be a multiple of the heads."""
    tied_embeddings: bool = False
    experts: ExpertNames | None = None

    @property
    def name(self) -> str:
        """The family's name in messages."""
        return self.architecture.removesuffix("ForCausalLM")

    @property
    def parts(self) -> Set[str]:
        """Parts that its models always or sometimes have."""
        return self.marks | self.needs | self.may_have


_SPARSE = {"--moe-layer-freq", "--moe-router-pre-softmax"}
_LATENT = "--multi-latent-attention"
_SIGMOID = "--moe-router-score-function"
_SHARED = "--moe-shared-expert-intermediate-size"
_SCALED = "--moe-router-topk-scaling-factor"
_DEEPSEEK = ExpertNames(
    number="n_routed_experts",
    shared_module="shared_experts",
    num_shared="n_shared_experts",
    num_dense_layers="first_k_dense_replace",
    normalizes=False,
)
FAMILIES: Mapping[str, Family] = {
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        marks={_LATENT, _SIGMOID},
        needs={"--num-experts", "--moe-router-enable-expert-bias", _SHARED, "--qk-layernorm"},
        may_have={"--moe-layer-freq", "--moe-router-num-groups", _SCALED, PREDICTIONS},
        settings=_NO_BIAS
        | {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
        | {"rope_interleave": True, "moe_layer_freq": 1},
        experts=replace(_DEEPSEEK, normalizes=True, chooses_groups=True),
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        marks={_LATENT},
        needs={"--num-experts", "--moe-router-pre-softmax", _SHARED, "--qk-layernorm"},
        may_have={"--moe-layer-freq", _SCALED},
        settings=_NO_BIAS
        | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"}
        | {"mlp_bias": False, "moe_layer_freq": 1},
        experts=_DEEPSEEK,
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        marks={"--quick-geglu"},
        needs={"--num-experts", "--softmax-type", "--window-size", WINDOWED_LAYERS, BIASES}
        | {"--glu-linear-offset", "--activation-func-clamp-value"},
        settings={"attention_bias": True, "swiglu_alpha": 1.702},
        needs_head_dim=True,
        norm_epsilon=1e-5,
        rope_theta=150000.0,
        alternates=True,
        has_yarn=True,
        window_tokens=128,
        experts=ExpertNames(
            number="num_local_experts",
            ffn_hidden_size="intermediate_size",
            router="router",
            is_stacked=True,
            normalizes=True,
        ),
    ),
    "nemotron": Family(
        architecture="NemotronForCausalLM",
        marks={"--squared-relu"},
        may_have={"--rotary-percent", BIASES},
        settings={"hidden_act": "relu2"},
        needs_groups=False,
        norm_epsilon_key="norm_eps",
        norm_epsilon=1e-5,
        rotary_percent=0.5,
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        marks={"--no-rope-freq"},
        may_have={BIASES},
        settings=_NO_WINDOW,
        rope_theta=2e6,
        no_rope_layer_interval=4,
        tied_embeddings=True,
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        marks={"--num-experts", "--moe-shared-expert-gate"},
        needs={_SHARED},
        may_have=_SPARSE | {"--add-qkv-bias"},
        settings=_NO_WINDOW,
        qkv_bias_key="qkv_bias",
        experts=ExpertNames(shared_ffn_hidden_size="shared_expert_intermediate_size"),
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        marks={"--num-experts", "--qk-layernorm"},
        may_have=_SPARSE,
        settings=_NO_WINDOW | _NO_BIAS,
        needs_head_dim=True,
        experts=ExpertNames(),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        marks={"--num-experts"},
        may_have={"--window-size"},
        settings=_NO_BIAS | {"router_jitter_noise": 0.0},
        norm_epsilon=1e-5,
        rope_theta=1e6,
        experts=ExpertNames(
            number="num_local_experts",
            ffn_hidden_size="intermediate_size",
            module="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            normalizes=True,
        ),
    ),
    "ministral": Family(
        architecture="MinistralForCausalLM",
        marks={WINDOWED_LAYERS},
        needs={"--window-size"},
        settings=_NO_BIAS,
        needs_head_dim=True,
        window_tokens=4096,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        marks={"--window-size"},
        settings=_NO_BIAS,
        window_tokens=4096,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        marks={"--qk-layernorm"},
        settings=_NO_WINDOW | _NO_BIAS,
        needs_head_dim=True,
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        marks={"--add-qkv-bias"},
        settings=_NO_WINDOW,
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        has_whole_heads=True,
        may_have={BIASES},
        needs_groups=False,
    ),
}
"""Rows by model type; a model is of the first family whose marks it has."""
_NORMS = "norms after attention and MLP"
LEFT_OUT: Mapping[str, str] = {
    "gemma3_text": f"{_NORMS}, a second rotary base for layers with windows, a scaled embedding",
    "mimo_v2_flash": "values of fewer channels than keys and a second rotary base for layers with "
    "windows",
    "olmo3": f"{_NORMS}, a norm over the queries of all heads",
}
"""What further model types have and Megatron's GPTModel lacks."""
