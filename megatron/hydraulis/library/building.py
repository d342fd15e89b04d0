"""Makes the definition of the model and the engine from flags."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core.jit import disable_jit_fuser
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.global_vars import set_args
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.hydraulis.cost_model.model_arguments import gradient_bytes
from megatron.hydraulis.cost_model.regrouping import BF16_BYTES
from megatron.hydraulis.flags.arguments import Resolved, gpt_model_config
from megatron.hydraulis.frozen import Frozen
from megatron.hydraulis.lora import Adapter, Lora, adapters
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.catalogue import catalogue, frozen_parts
from megatron.hydraulis.runtime.core_attention import (
    CoreAttention,
    CoreAttentionName,
    choose,
    current_environment,
    row_kinds,
)
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.gated_delta_net import check_kernels
from megatron.hydraulis.runtime.model_building import (
    LayerSpec,
    ModelDefinition,
    adaptable_layer_spec,
    hybrid_layer_spec,
    upstream_layer_spec,
)
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder
from megatron.hydraulis.strategy import Pool


@dataclass(kw_only=True)
class HydraulisModelConfig(GPTModelConfig):
    """Upstream's model configuration, with what else a `ModelDefinition` needs."""

    num_tokens_in_vocabulary: int | None = None
    """Tokens that exist; ``vocab_size`` is the padded number."""
    uses_sequence_parallel: bool = True
    model_provider: Callable[..., torch.nn.Module] | None = None
    core_attention: CoreAttentionName = "sdpa"
    decays_qk_norms: bool = False
    layer_pattern: str = ""
    loss_chunk_tokens: int | None = None
    lora: Lora | None = None
    adapters: tuple[Adapter, ...] = ()
    """All that the model can have."""


def choose_core_attention(resolved: Resolved, pool: Pool) -> CoreAttention:
    """The core attention of the strategies of a pool on this rank's current device.

    Raises ConfigurationError if the one that --core-attention names is not available, or does not
    support the exchange among cp ranks, or if gated delta nets have no kernels.
    """
    args = resolved.args
    if Symbols.GDN in (args.hybrid_layer_pattern or ""):
        check_kernels(deterministic=args.deterministic_mode)
    here = current_environment(
        dtype=args.params_dtype,
        head_size=resolved.shape.kv_channels,
        rows=row_kinds(pool, resolved.shape, args.seq_length),
        cp_comm_type=args.cp_comm_type[0],
        softmax_type=args.softmax_type,
    )
    return choose(resolved.hydraulis.core_attention, here)


def model_config[Config: HydraulisModelConfig](
    resolved: Resolved, core_attention: CoreAttentionName, kind: type[Config]
) -> Config:
    """The configuration of the model that the flags describe."""
    config: Config = gpt_model_config(resolved.args, kind)
    config.num_tokens_in_vocabulary = resolved.vocabulary.size
    config.uses_sequence_parallel = resolved.hydraulis.sequence_parallel
    config.core_attention = core_attention
    config.decays_qk_norms = resolved.args.apply_wd_to_qk_layernorm
    config.layer_pattern = resolved.args.hybrid_layer_pattern or ""
    config.loss_chunk_tokens = resolved.hydraulis.loss_chunk_tokens
    if resolved.frozen.lora is not None:
        config.lora, config.adapters = resolved.frozen.lora, tuple(adapters(resolved.shape))
        # The biases of routers are the model's, not the adapters'.
        config.transformer.moe_router_bias_update_rate = 0.0
    return config


def build_engine(
    resolved: Resolved,
    pool: Pool,
    definition: ModelDefinition,
    settings: AdamWSettings | None,
    *,
    accumulates: bool = False,
    spans: SpanRecorder = NO_SPANS,
    make: Callable[..., RuntimeEngine] = RuntimeEngine,
) -> RuntimeEngine:
    """The engine that the flags describe. Collective.

    Args:
        pool: the strategies that hold the model.
        accumulates: as for `RuntimeEngine`.
    """
    if resolved.args.disable_jit_fuser:
        disable_jit_fuser()
    return make(
        definition,
        pool,
        settings,
        seed=resolved.args.seed,
        timeout=timedelta(minutes=resolved.args.distributed_timeout_minutes),
        owners_for=resolved.hydraulis.regroup_owners_for,
        gradient_dtype=torch.bfloat16 if gradient_bytes(resolved.args) == BF16_BYTES else None,
        overlap=not resolved.hydraulis.no_regroup_overlap,
        num_layers_ahead=resolved.hydraulis.fs_prefetch,
        accumulates=accumulates,
        spans=spans,
    )


def definition_of(resolved: Resolved, core_attention: CoreAttentionName) -> ModelDefinition:
    """The model that the flags describe."""
    return model_definition(model_config(resolved, core_attention, HydraulisModelConfig))


def model_definition(config: HydraulisModelConfig) -> ModelDefinition:
    """The part of upstream's configuration that no strategy changes."""
    assert config.vocab_size is not None
    layer_spec, built_layer_spec = _layer_spec(config), None
    if config.transformer.transformer_impl == "transformer_engine":
        built_layer_spec = _own_layers(config, use_te=True)
        if config.lora is not None:
            built_layer_spec = adaptable_layer_spec(layer_spec, built_layer_spec)
    return ModelDefinition(
        transformer=config.transformer,
        layer_spec=layer_spec,
        layer_pattern=config.layer_pattern,
        built_layer_spec=built_layer_spec,
        lora=config.lora,
        adapters=config.adapters,
        core_attention=config.core_attention,
        decays_qk_norms=config.decays_qk_norms,
        vocab_size=config.num_tokens_in_vocabulary or config.vocab_size,
        padded_vocab_size=config.vocab_size,
        max_sequence_length=config.seq_length,
        position_embedding_type=config.position_embedding_type,
        rotary_percent=config.rotary_percent,
        rotary_base=config.rotary_base,
        rope_scaling=config.rope_scaling,
        rope_scaling_factor=config.rope_scaling_factor,
        seq_len_interpolation_factor=config.seq_len_interpolation_factor,
        loss_chunk_tokens=config.loss_chunk_tokens,
        tied_embeddings=config.share_embeddings_and_output_weights,
        sequence_parallel=config.uses_sequence_parallel,
        model_provider=config.model_provider,
    )


def frozen_by(provider: Callable[..., torch.nn.Module], resolved: Resolved) -> Frozen:
    """What a model provider freezes of the whole model, which it makes on the meta device; it may
    read Megatron's arguments."""
    config = model_config(resolved, "sdpa", HydraulisModelConfig)
    config.model_provider = provider
    set_args(resolved.args)
    try:
        entries = catalogue(
            model_definition(config),
            tensor_parallel=resolved.pool.tp_lcm > 1,
            expert_parallel=resolved.pool.ep_lcm > 1,
        )
    finally:
        set_args(None)
    return frozen_parts(entry.spec for entry in entries)


def _own_layers(config: HydraulisModelConfig, *, use_te: bool) -> Any:
    """Upstream's layers of a GPT or, by kind, of a hybrid model."""
    own = hybrid_layer_spec if config.layer_pattern else upstream_layer_spec
    return own(config.transformer, use_te=use_te)


def _layer_spec(config: HydraulisModelConfig) -> LayerSpec:
    """``--spec`` as upstream reads it: a spec, or a function from the configuration to a spec.

    Without it, the local layers: the catalogue of the model uses them even if the layers of
    Transformer Engine are built.
    """
    spec = config.transformer_layer_spec
    if spec is None and (config.transformer.num_moe_experts is not None or config.layer_pattern):
        return _own_layers(config, use_te=False)
    if spec is None:
        transformer = copy.copy(config.transformer)
        transformer.transformer_impl = "local"
        local = copy.copy(config)
        local.transformer = transformer
        return default_layer_spec(local, None)
    if isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
        return spec
    if "vp_stage" in inspect.signature(spec).parameters:
        return spec(config, vp_stage=None)
    return spec(config)
