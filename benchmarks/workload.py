"""Model, weights and data for both sides of a comparison."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from benchmarks.inputs import llama_shape
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.attention import SegmentAttention
from megatron.hydraulis.runtime.model_building import ModelDefinition, PackedNorm

DATA_SEED = 5
WEIGHT_SEED = 7


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A LLaMA-like model and equal packed micro-batches.

    Every micro-batch has sequences of the same lengths, so that every replica of a homogeneous
    strategy does the same work and Megatron's fixed shapes are no disadvantage.
    """

    shape: ModelShape = field(default_factory=llama_shape)
    lengths: tuple[int, ...] = (64, 40, 24)
    """Trained tokens of the sequences of each micro-batch."""
    num_micro_batches: int = 8
    """Of the global batch; distributed evenly over the replicas."""
    dtype: torch.dtype = torch.float32
    variant: Mapping[str, Any] = field(default_factory=dict)
    """Other fields of upstream's configuration, as of a model with experts or latents."""
    core_attention: Any = SegmentAttention
    """A class of the runtime, for both sides."""
    optimizer: AdamWSettings = field(
        default_factory=lambda: AdamWSettings(lr=1e-3, weight_decay=0.1, eps=1e-8, clip_grad=1.0)
    )

    @property
    def has_latents(self) -> bool:
        """True if attention is multi-latent."""
        return "kv_lora_rank" in self.variant

    @property
    def num_tokens_per_micro_batch(self) -> int:
        """Tokens of one pack."""
        return sum(self.lengths)

    def transformer(self, *, tp: int = 1, pp: int = 1, ep: int = 1) -> TransformerConfig:
        """Upstream's configuration; of the whole model if all degrees are 1."""
        return (MLATransformerConfig if self.has_latents else TransformerConfig)(
            num_layers=self.shape.num_layers,
            hidden_size=self.shape.hidden_size,
            ffn_hidden_size=self.shape.ffn_hidden_size,
            num_attention_heads=self.shape.num_attention_heads,
            num_query_groups=self.shape.num_query_groups,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            sequence_parallel=tp > 1,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            bf16=self.dtype == torch.bfloat16,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            transformer_impl="local",
            calculate_per_token_loss=True,
            batch_p2p_sync=False,
            use_cpu_initialization=not torch.cuda.is_available(),
            **self.variant,
        )

    def definition(self) -> ModelDefinition:
        """The model for our engine."""
        return ModelDefinition(
            transformer=self.transformer(),
            layer_spec=self.layers(self.shape.num_layers),
            vocab_size=self.shape.vocab_size,
            padded_vocab_size=self.shape.vocab_size,
            max_sequence_length=max(self.lengths),
        )

    def layers(self, num_layers: int) -> TransformerBlockSubmodules:
        """Upstream's local layers with the packed attention and norms that both sides use."""
        spec = get_gpt_layer_local_spec(
            self.variant.get("num_moe_experts"),
            normalization="RMSNorm",
            qk_layernorm=self.has_latents,
            multi_latent_attention=self.has_latents,
        )
        layer = copy.deepcopy(spec)
        layer.submodules.input_layernorm = PackedNorm
        layer.submodules.pre_mlp_layernorm = PackedNorm
        layer.submodules.self_attention.submodules.core_attention = self.core_attention
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=PackedNorm)

    def micro_batches_per_replica(self, num_replicas: int) -> int:
        """Number of micro-batches of each replica.

        Raises ValueError if they cannot be distributed evenly.
        """
        per_replica, rest = divmod(self.num_micro_batches, num_replicas)
        if rest or not per_replica:
            raise ValueError(
                f"{self.num_micro_batches} micro-batches cannot be distributed evenly over "
                f"{num_replicas} replicas; choose a multiple"
            )
        return per_replica

    def micro_batches(self, iteration: int, replica: int, num_replicas: int) -> list[PackedBatch]:
        """One replica's share of an iteration's global batch. Raises ValueError as above."""
        per_replica = self.micro_batches_per_replica(num_replicas)
        rng = np.random.default_rng((DATA_SEED, iteration))
        vocab_size = self.shape.vocab_size
        packs = [
            pack([rng.integers(0, vocab_size, size=length + 1) for length in self.lengths])
            for _ in range(self.num_micro_batches)
        ]
        own = packs[replica * per_replica : (replica + 1) * per_replica]
        return [pack.to(torch.device("cuda")) for pack in own] if torch.cuda.is_available() else own
