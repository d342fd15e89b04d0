"""Building one role's `GPTModel` on `meta`: the only place that constructs Megatron's model.

A role can be built of local layers or of Transformer Engine's. Names, shapes, canonical order and
initial values of parameters are always those of the local layers, also in checkpoints: a layer of
Transformer Engine has the same parameters under other names, because it fuses each norm with the
linear layer behind it (`global_name` maps them back). The norm behind the last layer is torch's.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lora import Adapter, Lora
from megatron.hydraulis.model_shape import layers_with_experts, require_no_dropout
from megatron.hydraulis.runtime.adapters import adapt
from megatron.hydraulis.runtime.core_attention import MODULE_OF, CoreAttentionName
from megatron.hydraulis.runtime.executor import widened
from megatron.hydraulis.runtime.experts import SequenceRouter, add_biases_once, hand_rows_to_routers
from megatron.hydraulis.runtime.gated_delta_net import PackedGatedDeltaNet
from megatron.hydraulis.runtime.latent_attention import LatentAttention
from megatron.hydraulis.runtime.packed_rows import follow_rows
from megatron.hydraulis.runtime.predictions import PredictionLayer, add_predictions
from megatron.hydraulis.runtime.token_loss import ChunkedOutput, PackedGPTModel, token_losses
from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.role import Role, roles_of

_TE_FUSION = "te_gradient_accumulation_fusion"
"""Attribute of a role's configuration: whether Transformer Engine's layers add to gradients."""


type LayerSpec = ModuleSpec | TransformerBlockSubmodules | HybridStackSubmodules
"""Megatron's description of the layers of a GPT or, by kind, of a hybrid model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDefinition:
    """Everything about the model that no strategy changes."""

    transformer: TransformerConfig
    """Upstream's configuration of the whole model, with all parallel degrees 1."""
    layer_spec: LayerSpec
    """One spec for all layers, one for each layer of the whole model, or one for each kind."""
    layer_pattern: str = ""
    """The kind of each layer of a hybrid model, in upstream's symbols; empty for a GPT."""
    vocab_size: int
    """Tokens that exist."""
    padded_vocab_size: int
    """Rows of the embedding: a fixed property of the model, independent of the strategy."""
    max_sequence_length: int
    position_embedding_type: str = "rope"
    rotary_percent: float = 1.0
    rotary_base: int = 10000
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    seq_len_interpolation_factor: float | None = None
    loss_chunk_tokens: int | None = None
    """Tokens whose logits exist at the same time; None for the memory model's default."""
    tied_embeddings: bool = False
    sequence_parallel: bool = True
    """Sequence parallelism wherever tp > 1."""
    model_provider: Callable[..., torch.nn.Module] | None = None
    """A user's ``model_provider(pre_process, post_process, config=, pg_collection=)``."""
    built_layer_spec: LayerSpec | None = None
    """Layers that roles are built of instead of ``layer_spec``'s, with the same parameters, such as
    Transformer Engine's. Names, order and initial values are those of ``layer_spec``."""
    core_attention: CoreAttentionName = "sdpa"
    has_value_head: bool = False
    """Whether a `ValueHead` replaces the output layer; embeddings are not tied then."""
    decays_qk_norms: bool = False
    """Whether weight decay applies to the norms of queries and keys, too."""
    lora: Lora | None = None
    """Adapters, which alone are trained; None to train what the layers have."""
    adapters: tuple[Adapter, ...] = ()
    """Those that the model can have; see `megatron.hydraulis.lora.adapters`."""

    def __post_init__(self) -> None:
        if self.vocab_size > self.padded_vocab_size:
            raise ConfigurationError(
                f"the vocabulary has {self.vocab_size} tokens but the model's embedding only "
                f"{self.padded_vocab_size} rows; raise --padded-vocab-size or omit it"
            )
        require_no_dropout(self.transformer.hidden_dropout, self.transformer.attention_dropout)
        obstacles = {
            "adapters": self.lora,
            "a model provider": self.model_provider,
            "a value head": self.has_value_head,
            "a hybrid pattern": self.layer_pattern,
            "learned positions": self.position_embedding_type == "learned_absolute",
        }
        found = [what for what, is_there in obstacles.items() if is_there]
        if self.num_predictions and found:
            raise ConfigurationError(
                f"layers of multi-token prediction are trained with all of the model that is built "
                f"here but it has {' and '.join(found)}; remove --mtp-num-layers"
            )

    @property
    def num_predictions(self) -> int:
        """Layers of multi-token prediction."""
        return self.transformer.mtp_num_layers or 0

    @property
    def for_uneven_columns(self) -> ModelDefinition:
        """The same model for ranks that share experts but have rows of different lengths, which
        upstream's all-gather dispatcher cannot gather."""
        transformer = copy.copy(self.transformer)
        if transformer.moe_token_dispatcher_type == "allgather":
            transformer.moe_token_dispatcher_type = "alltoall"
        return dataclasses.replace(self, transformer=transformer)

    @property
    def recomputing(self) -> ModelDefinition:
        """The same model, whose backward computes every layer again."""
        transformer = copy.copy(self.transformer)
        transformer.recompute_granularity = "full"
        transformer.recompute_method, transformer.recompute_num_layers = "uniform", 1
        return dataclasses.replace(self, transformer=transformer)

    def roles_of(self, strategy: Strategy) -> list[Role | None]:
        """The role of every rank, None for idle ranks: shape (num_ranks,)."""
        return roles_of(
            strategy,
            self.transformer.num_layers,
            self.tied_embeddings,
            self.transformer.num_moe_experts or 0,
            self.num_predictions,
        )

    @property
    def whole_role(self) -> Role:
        """The role of a rank that holds all of the model."""
        num_layers = self.transformer.num_layers
        return Role(
            *(1, 0, 0, num_layers, num_layers, self.tied_embeddings),
            num_predictions=self.num_predictions,
        )

    @property
    def as_built(self) -> ModelDefinition:
        """The same model with the layers that roles are built of as ``layer_spec``."""
        if self.built_layer_spec is None:
            return self
        return dataclasses.replace(self, layer_spec=self.built_layer_spec, built_layer_spec=None)

    def role_config(self, role: Role) -> TransformerConfig:
        """Upstream's configuration of this role's stage.

        A stage is a complete model with ``pp = 1``: it builds its layers only, however uneven the
        cut, and no code of upstream looks for a neighbour's weights. `copy` skips `__post_init__`,
        since initialisers are scaled for the whole model's depth.
        """
        config = copy.copy(self.transformer)
        config.num_layers = role.num_layers
        config.mtp_num_layers = None  # or any stage would have the final norm
        config.tensor_model_parallel_size = config.expert_tensor_parallel_size = role.tp
        if role.experts is not None:
            first, stop = role.experts
            config.expert_tensor_parallel_size = 1
            config.expert_model_parallel_size = config.num_moe_experts // (stop - first)
            # With allgather a rank's experts may get no tokens, which Transformer Engine's sorting
            # kernel refuses.
            config.moe_permute_fusion &= config.moe_token_dispatcher_type != "allgather"
        config.pipeline_model_parallel_size = 1
        config.context_parallel_size = 1
        config.sequence_parallel = self.sequence_parallel and role.tp > 1
        # Without apex's kernel only Transformer Engine's layers add to gradients, see `on_meta`.
        vars(config)[_TE_FUSION] = config.gradient_accumulation_fusion
        config.gradient_accumulation_fusion &= parallel_layers._grad_accum_fusion_available
        config.use_cpu_initialization = True  # allocates without naming a device, so on `meta`
        config.perform_initialization = False
        config.calculate_per_token_loss = True
        config.finalize_model_grads_func = None
        config.grad_scale_func = None
        config.timers = None
        config.no_sync_func = None
        config.batch_p2p_comm = True
        config.batch_p2p_sync = False
        config.variable_seq_lengths = False
        config.pipeline_dtype = config.params_dtype
        return config


def build_role_model(
    definition: ModelDefinition, role: Role, pg_collection: ProcessGroupCollection
) -> torch.nn.Module:
    """The stage's model on `meta`, its layers numbered as in the whole model.

    Returns:
        A module whose parameters hold no memory yet; `Arena.bind` gives them some.
    """
    config = definition.role_config(role)
    with torch.device("meta"):
        model = build_model(definition.as_built, config, role, pg_collection)
    numbered: Any  # Megatron's modules carry attributes that torch's type does not know
    for name, numbered in model.named_modules():
        if isinstance(getattr(numbered, "layer_number", None), int):
            is_prediction = name.startswith("mtp.")
            is_last = is_prediction and isinstance(numbered, SequenceRouter)
            first = 0 if is_prediction else role.first_layer
            numbered.layer_number += role.num_layers_of_model if is_last else first
    follow_rows(model)
    hand_rows_to_routers(model)
    if role.experts is None and config.add_bias_linear:
        add_biases_once(model, role.tp)
    model.config = config
    return model


def build_model(
    definition: ModelDefinition,
    config: TransformerConfig,
    role: Role,
    pg_collection: ProcessGroupCollection,
) -> torch.nn.Module:
    """One stage of the model in the caller's device context (normally `meta`)."""
    if definition.model_provider is not None:
        model = definition.model_provider(
            pre_process=role.has_embedding,
            post_process=role.has_output,
            config=config,
            pg_collection=pg_collection,
        )
    else:
        common: dict[str, Any] = {
            "config": config,
            "vocab_size": definition.padded_vocab_size,
            "max_sequence_length": definition.max_sequence_length,
            "pre_process": role.has_embedding,
            "post_process": role.has_output,
            "parallel_output": True,
            "share_embeddings_and_output_weights": definition.tied_embeddings,
            "position_embedding_type": definition.position_embedding_type,
            "rotary_percent": definition.rotary_percent,
            "rotary_base": definition.rotary_base,
            "seq_len_interpolation_factor": definition.seq_len_interpolation_factor,
        }
        if definition.layer_pattern:
            # A stage has no neighbours, as in `role_config`.
            alone = copy.copy(pg_collection)
            alone.pp, alone.dp_cp = None, pg_collection.cp
            model = HybridModel(
                hybrid_stack_spec=ModuleSpec(
                    module=_PackedStack,
                    submodules=_packed(definition.layer_spec, definition.core_attention),
                ),
                hybrid_layer_pattern=definition.layer_pattern[role.first_layer :][
                    : role.num_layers
                ],
                pg_collection=alone,
                **common,
            )
        else:
            model = GPTModel(
                transformer_layer_spec=_stage_spec(definition, role),
                rope_scaling=definition.rope_scaling,
                rope_scaling_factor=definition.rope_scaling_factor,
                pg_collection=pg_collection,
                **common,
            )
    if definition.lora is not None:
        adapt(model, definition.lora, definition.adapters)
    packed = {GPTModel: PackedGPTModel, HybridModel: PackedHybridModel}.get(type(model))
    if packed is not None:
        packed.convert(
            model,
            definition.vocab_size,
            definition.loss_chunk_tokens,
            has_value_head=definition.has_value_head,
        )
    if definition.num_predictions and role.has_output:
        add_predictions(model, config, _prediction_spec(definition), pg_collection)
    return model


def _prediction_spec(definition: ModelDefinition) -> MultiTokenPredictionBlockSubmodules:
    """Layers of multi-token prediction, which as upstream's are like the last one of the model."""
    spec = definition.layer_spec
    if isinstance(spec, TransformerBlockSubmodules):
        spec = spec.layer_specs[-1]
    block = packed_block_spec(spec, 1, core_attention=definition.core_attention)
    layer = ModuleSpec(
        module=PredictionLayer,
        submodules=MultiTokenPredictionLayerSubmodules(
            enorm=PackedNorm,
            hnorm=PackedNorm,
            layer_norm=PackedNorm,
            eh_proj=ColumnParallelLinear,
            mtp_model_layer=block.layer_specs[0],
        ),
    )
    return MultiTokenPredictionBlockSubmodules([layer] * definition.num_predictions)


_LOCAL_NAMES = {
    ".self_attention.linear_qkv.layer_norm_": ".input_layernorm.",
    ".self_attention.in_proj.layer_norm_": ".input_layernorm.",
    ".self_attention.linear_q_up_proj.layer_norm_": ".self_attention.q_layernorm.",
    ".self_attention.linear_kv_up_proj.layer_norm_": ".self_attention.kv_layernorm.",
    ".mlp.linear_fc1.layer_norm_": ".pre_mlp_layernorm.",
}
"""Name of a norm fused by Transformer Engine -> its name as a local module."""

_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)([0-9]+)$")
"""An expert's parameter in Transformer Engine's grouped linear layer."""


def global_name(local_name: str, role: Role) -> str:
    """The name in the whole model of local layers of a parameter of the stage."""
    if local_name == "output_layer.weight" and role.tied_embeddings:
        return "embedding.word_embeddings.weight"
    parts = _GROUPED.sub(r".experts.local_experts.\3.\1.\2", local_name).split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(int(parts[2]) + role.first_layer)
    if role.experts is not None and "local_experts" in parts:
        place = parts.index("local_experts") + 1
        parts[place] = str(int(parts[place]) + role.experts[0])
    name = ".".join(parts)
    for fused, local in _LOCAL_NAMES.items():
        name = name.replace(fused, local)
    return name


def packed_block_spec(
    layer_spec: ModuleSpec | TransformerBlockSubmodules,
    num_layers: int,
    *,
    core_attention: CoreAttentionName = "sdpa",
) -> TransformerBlockSubmodules:
    """Layers and final norm that support packed input and sequence parallelism.

    For a user's model provider: upstream's local core attention refuses packed input, and its norms
    refuse sequence parallelism.

    Args:
        layer_spec: upstream's spec of one layer, or of all.
        num_layers: layers of the stage, if there is one spec for all.
        core_attention: replaces upstream's.

    Returns:
        What `GPTModel` takes as ``transformer_layer_spec``.
    """
    if not isinstance(layer_spec, TransformerBlockSubmodules):
        layer_spec = TransformerBlockSubmodules(
            layer_specs=[layer_spec] * num_layers, layer_norm=WrappedTorchNorm
        )
    packed: TransformerBlockSubmodules = _packed(layer_spec, core_attention)
    return packed


def _packed(spec: Any, core_attention: CoreAttentionName) -> Any:
    """The same layers, of modules that support packed input and sequence parallelism."""
    attention = MODULE_OF[core_attention]
    replaced = {
        WrappedTorchNorm: PackedNorm,
        DotProductAttention: attention,
        TopKRouter: SequenceRouter,
        MLASelfAttention: LatentAttention,
        GatedDeltaNet: PackedGatedDeltaNet,
    }
    return _with_replaced(spec, replaced | _te_replacements(attention))


class PackedHybridModel(ChunkedOutput, HybridModel):
    """`HybridModel` whose output is chunked."""

    post_process: bool

    def forward(
        self,
        *inputs: Any,
        labels: Tensor | None = None,
        output_processor: Callable[..., Any] | None = None,
        output_processor_context: Any = None,
        **named: Any,
    ) -> Any:
        """As `PackedGPTModel.forward`: upstream's model has no ``output_processor``, but one of an
        earlier stage returns hidden states."""
        if labels is None or not self.post_process:
            return super().forward(*inputs, labels=labels, **named)
        self.post_process = False
        try:
            hidden = super().forward(*inputs, **named)
        finally:
            self.post_process = True
        tied = self.share_embeddings_and_output_weights
        return (output_processor or token_losses)(
            hidden_states=hidden,
            output_layer=self.output_layer,
            output_weight=self.shared_embedding_or_output_weight() if tied else None,
            labels=labels,
            context=output_processor_context,
        )


class _PackedStack(HybridStack):
    """Upstream's layers by a pattern, with torch's norm behind the last one."""

    def __init__(self, config: TransformerConfig, **named: Any) -> None:
        super().__init__(config, **named, post_layer_norm=False)
        if self.post_process:
            self.post_layer_norm = True
            self.final_norm = PackedNorm(config, config.hidden_size, eps=config.layernorm_epsilon)


def hybrid_layer_spec(config: TransformerConfig, *, use_te: bool) -> HybridStackSubmodules:
    """Upstream's layers of a hybrid model by kind: those of a GPT, each in two, and gated delta
    nets around the same linear layers. Upstream itself has them of Transformer Engine's alone."""
    layers = upstream_layer_spec(config, use_te=use_te).layer_specs or []
    have_experts = [False] * len(layers)
    if config.num_moe_experts is not None:
        have_experts = layers_with_experts(len(layers), config.moe_layer_freq)
    # A model without layers of a kind gets no use of what stands for it.
    whole, with_experts = (
        layers[have_experts.index(kind) if kind in have_experts else 0].submodules
        for kind in (False, True)
    )
    empty = TransformerLayerSubmodules()

    def without(given: TransformerLayerSubmodules, *names: str) -> TransformerLayerSubmodules:
        return dataclasses.replace(given, **{name: getattr(empty, name) for name in names})

    plain = copy.copy(config)
    plain.multi_latent_attention = False
    of_plain = (upstream_layer_spec(plain, use_te=use_te).layer_specs or [])[0].submodules
    linears = of_plain.self_attention.submodules
    net = GatedDeltaNetSubmodules(
        in_proj=linears.linear_qkv, out_norm=WrappedTorchNorm, out_proj=linears.linear_proj
    )

    def stored(norm: str, linear: str) -> dict[str, str]:
        return {} if use_te else {norm: f"{linear}.layer_norm_"}

    of_mlp = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    attention = ModuleSpec(module=TransformerLayer, submodules=without(whole, *of_mlp))
    recurrent = dataclasses.replace(
        without(of_plain, *of_mlp),
        self_attention=ModuleSpec(module=GatedDeltaNet, submodules=net),
        sharded_state_dict_keys_map=stored("input_layernorm.", "self_attention.in_proj"),
    )
    of_attention = ("input_layernorm", "self_attention", "self_attn_bda")
    mlp = dataclasses.replace(
        without(whole, *of_attention),
        sharded_state_dict_keys_map=stored("pre_mlp_layernorm.", "mlp.linear_fc1"),
    )
    return HybridStackSubmodules(
        gdn_layer=ModuleSpec(module=TransformerLayer, submodules=recurrent),
        attention_layer=attention,
        mla_layer=attention,
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
        moe_layer=ModuleSpec(
            module=MoETransformerLayer, submodules=without(with_experts, *of_attention)
        ),
    )


def _stage_spec(definition: ModelDefinition, role: Role) -> TransformerBlockSubmodules:
    """The layers of this stage, which support packed input."""
    spec = definition.layer_spec
    if isinstance(spec, TransformerBlockSubmodules):
        num_specs = len(spec.layer_specs or ())
        if num_specs != role.num_layers_of_model:
            raise ConfigurationError(
                f"--spec gives {num_specs} layers but the model has {role.num_layers_of_model}; "
                "give one spec per layer, or one for all"
            )
        stop = role.first_layer + role.num_layers
        spec = dataclasses.replace(spec, layer_specs=spec.layer_specs[role.first_layer : stop])
    return packed_block_spec(spec, role.num_layers, core_attention=definition.core_attention)


def _with_replaced(spec: Any, replaced: Mapping[Any, Any]) -> Any:
    """The same spec with some of upstream's modules replaced, at any depth."""
    if isinstance(spec, type):
        return replaced.get(spec, spec)
    if isinstance(spec, list):
        return [_with_replaced(entry, replaced) for entry in spec]
    if isinstance(spec, functools.partial):
        named = {key: _with_replaced(value, replaced) for key, value in spec.keywords.items()}
        return functools.partial(spec.func, *spec.args, **named)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        changed = {
            field.name: _with_replaced(getattr(spec, field.name), replaced)
            for field in dataclasses.fields(spec)
            if field.init
        }
        return dataclasses.replace(spec, **changed)
    return spec


class _ZeroCentredLayerNorm(torch.nn.LayerNorm):
    """Multiplies by 1 + weight for ``zero_centered_gamma``.

    Like Transformer Engine it computes in fp32 and rounds the outcome only: bf16 has no number
    between 1 and 1.0078, so small weights would have no effect. The backward keeps its input in
    fp32.
    """

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, given: Tensor) -> Tensor:
        weight, bias = 1 + widened(self.weight), widened(self.bias)
        normed = F.layer_norm(widened(given), self.normalized_shape, weight, bias, self.eps)
        return normed.to(given.dtype)


class _ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """The same for `torch.nn.RMSNorm`."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, given: Tensor) -> Tensor:
        weight = 1 + widened(self.weight)
        return F.rms_norm(widened(given), self.normalized_shape, weight, self.eps).to(given.dtype)


_NORMS: Mapping[str, tuple[Any, Any]] = {
    "LayerNorm": (torch.nn.LayerNorm, _ZeroCentredLayerNorm),
    "RMSNorm": (torch.nn.RMSNorm, _ZeroCentredRMSNorm),
}
"""``config.normalization`` -> the norm, and the one for ``zero_centered_gamma``."""


class PackedNorm:
    """Torch's norm with support for sequence parallelism, which upstream's wrapper refuses."""

    def __new__(
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> Any:
        """A `LayerNorm` or `RMSNorm` over the last dim, by ``config.normalization``."""
        if config.normalization not in _NORMS:
            raise ConfigurationError(
                f"normalization '{config.normalization}' is not supported by local layers; choose "
                f"one of {', '.join(_NORMS)}"
            )
        plain, zero_centred = _NORMS[config.normalization]
        kind = zero_centred if config.layernorm_zero_centered_gamma else plain
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


def upstream_layer_spec(config: TransformerConfig, *, use_te: bool) -> TransformerBlockSubmodules:
    """Upstream's layers, local or of Transformer Engine's modules, which that needs.

    In a model with experts they may differ from layer to layer.
    """
    layers = get_gpt_decoder_layer_specs(
        config, use_transformer_engine=use_te, normalization=config.normalization
    )
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=WrappedTorchNorm)


def adaptable_layer_spec(
    local: ModuleSpec | TransformerBlockSubmodules, te: TransformerBlockSubmodules
) -> ModuleSpec | TransformerBlockSubmodules:
    """Local layers with Transformer Engine's routed experts, where there are any.

    An adapter needs the input of its linear layer, which Transformer Engine's layer hides where it
    fuses the norm. Its product is the same kernel of cuBLAS as torch's; but its experts are one
    kernel for all of them, and these have no adapters.
    """
    if not isinstance(local, TransformerBlockSubmodules):
        return local
    layers = []
    for own, of_te in zip(local.layer_specs or (), te.layer_specs or (), strict=True):
        mlp = own.submodules.mlp
        if isinstance(mlp, functools.partial) and mlp.func is MoELayer:
            experts = of_te.submodules.mlp.keywords["submodules"].experts
            parts = dataclasses.replace(mlp.keywords["submodules"], experts=experts)
            mlp = functools.partial(MoELayer, submodules=parts)
        submodules = dataclasses.replace(own.submodules, mlp=mlp)
        layers.append(dataclasses.replace(own, submodules=submodules))
    return dataclasses.replace(local, layer_specs=layers)


def _te_replacements(attention: Any) -> dict[Any, Any]:
    """Upstream's wrappers of Transformer Engine -> what replaces them; empty without it."""
    from megatron.core.extensions import transformer_engine as wrappers

    if not wrappers.HAVE_TE:
        return {}
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    built_on_meta = (
        wrappers.TELayerNormColumnParallelLinear,
        wrappers.TEColumnParallelLinear,
        wrappers.TERowParallelLinear,
        wrappers.TEColumnParallelGroupedLinear,
        wrappers.TERowParallelGroupedLinear,
        wrappers.TELinear,
        wrappers.TENorm,
        TESpecProvider().layer_norm(has_residual=True),
    )
    replaced = {wrapper: on_meta(wrapper) for wrapper in built_on_meta}
    return {**replaced, wrappers.TEDotProductAttention: attention}


@functools.cache
def on_meta(wrapper: Any) -> Any:
    """A builder of upstream's wrapper, with its signature, that allocates nothing.

    A role's configuration asks for initialisation on the CPU, as local modules need it to be built
    on `meta`; upstream's wrappers would name that device, which overrides the context of `meta`, so
    they get a changed copy. That also restores ``gradient_accumulation_fusion``, for which they do
    not need apex. The builder is a subclass where the wrapper is an ordinary class, since upstream
    tests instances of it.
    """

    def changed(config: TransformerConfig) -> TransformerConfig:
        config = copy.copy(config)
        config.use_cpu_initialization = False
        config.init_model_with_meta_device = True
        config.gradient_accumulation_fusion = vars(config).get(
            _TE_FUSION, config.gradient_accumulation_fusion
        )
        return config

    if "__new__" in vars(wrapper):  # a function written as a class

        class BuiltOnMeta:
            def __new__(cls, config: TransformerConfig, *args: Any, **named: Any) -> Any:
                return wrapper(changed(config), *args, **named)

        return BuiltOnMeta

    class ModuleOnMeta(wrapper):  # type: ignore[misc]
        def __init__(self, *args: Any, config: TransformerConfig, **named: Any) -> None:
            super().__init__(*args, config=changed(config), **named)

    ModuleOnMeta.__name__ = ModuleOnMeta.__qualname__ = wrapper.__name__
    return ModuleOnMeta
