"""Latent attention of local layers: every tp rank holds the projections to latents whole."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_latent_attention import (
    MLASelfAttention,
    MLASelfAttentionSubmodules,
    MultiLatentAttention,
)
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import Tensor

from megatron.hydraulis.runtime.attention import PackedAttention
from megatron.hydraulis.runtime.packed_rows import PackedRow, once_a_row, rotate


class DuplicatedLinear(torch.nn.Linear):
    """A projection without bias that every TP rank holds, with upstream's signature."""

    def __init__(self, num_inputs: int, num_outputs: int, config: MLATransformerConfig) -> None:
        super().__init__(num_inputs, num_outputs, bias=False, dtype=config.params_dtype)
        parameter: Any = self.weight
        parameter.sequence_parallel = config.sequence_parallel
        if config.perform_initialization:
            assert config.init_method is not None
            config.init_method(self.weight)

    def reset_parameters(self) -> None:
        """Does nothing: the constructor initialises as the configuration says."""

    def forward(self, given: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The product, and no bias."""
        return super().forward(given), None


class LatentAttention(MLASelfAttention):
    """Upstream's attention, with its names of parameters, for rows whose positions are known.

    Upstream's local layers cut the projections to the latents by columns and gather their outputs.
    The rotary part of a key is the same for all heads, so each rank has only its heads' part of
    that gradient, but the backward of the gathering adds nothing up. Here every rank holds these
    projections and applies them to its part of the sequence, as Transformer Engine's layers do;
    gathering the sequence adds gradients up, and those of the projections are partial sums.

    Core attention gets values of their own size. Arguments are upstream's.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        layer_number: int,
        *arguments: Any,
        **named: Any,
    ) -> None:
        # Not that of `MLASelfAttention`, which takes only its own classes of projections.
        MultiLatentAttention.__init__(
            self, config, submodules, layer_number, *arguments, attention_type="self", **named
        )
        # Tables of YaRN for fused kernels, 4,096 positions in each layer.
        for name in [name for name, _ in self.rotary_pos_emb.named_buffers()]:
            delattr(self.rotary_pos_emb, name)

        def up(module: Any, num_inputs: int, channels_of_head: int) -> Any:
            return build_module(
                module,
                num_inputs,
                config.num_attention_heads * channels_of_head,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_group=self.pg_collection.tp,
            )

        def norm(module: Any, size: int) -> Any:
            # A builder for upstream, too; `build_module` would return a function as it is.
            return module(hidden_size=size, config=config, eps=config.layernorm_epsilon)

        hidden, q_rank, kv_rank = config.hidden_size, config.q_lora_rank, config.kv_lora_rank
        # Without a latent there is no norm of queries, as in DeepSeek-V2-Lite. Upstream's layers of
        # Transformer Engine then norm the hidden states a second time.
        if q_rank is None:
            self.linear_q_proj = up(submodules.linear_q_proj, hidden, self.q_head_dim)
        else:
            self.linear_q_down_proj = DuplicatedLinear(hidden, q_rank, config)
            self.linear_q_up_proj = up(submodules.linear_q_up_proj, q_rank, self.q_head_dim)
        size = kv_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = DuplicatedLinear(hidden, size, config)
        size = config.qk_head_dim + config.v_head_dim
        self.linear_kv_up_proj = up(submodules.linear_kv_up_proj, kv_rank, size)
        if q_rank is not None:
            self.q_layernorm = norm(submodules.q_layernorm, q_rank)
        self.kv_layernorm = norm(submodules.kv_layernorm, kv_rank)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
        **named: Any,
    ) -> Any:
        """Upstream's, with positions that the host need not read from the device.

        Args:
            hidden_states: (T / tp, 1, hidden size) of a packed row.
            packed_seq_params: describes it; without positions, upstream rotates.

        Returns:
            Queries and keys, (T, heads, size), values, (T, heads, size of a value), and both
            latents, (T / tp, rank).
        """
        row = packed_seq_params
        if not isinstance(row, PackedRow) or row.positions is None:
            return super().get_query_key_value_tensors(
                hidden_states,
                key_value_states,
                position_ids,
                packed_seq_params,
                inference_context,
                **named,
            )
        config = self.config
        content, rotary = config.qk_head_dim, config.qk_pos_emb_head_dim
        given = hidden_states.squeeze(1)
        if config.q_lora_rank is None:
            q_latent = given
            query, _ = self.linear_q_proj(q_latent)
        else:
            q_latent = self.q_layernorm(self.linear_q_down_proj(given)[0])
            query, _ = self.linear_q_up_proj(q_latent)
        kv_latent, key_rotary = self.linear_kv_down_proj(given)[0].split(
            [config.kv_lora_rank, rotary], dim=-1
        )
        kv_latent = self.kv_layernorm(kv_latent).contiguous()  # without a norm it is a part
        if config.sequence_parallel:
            key_rotary = gather_from_sequence_parallel_region(key_rotary, group=self.tp_group)
        heads = self.num_attention_heads_per_partition
        query_content, query_rotary = query.unflatten(-1, (heads, -1)).split(
            [content, rotary], dim=-1
        )
        key_content, value = (
            self.linear_kv_up_proj(kv_latent)[0]
            .unflatten(-1, (heads, -1))
            .split([content, config.v_head_dim], dim=-1)
        )
        cos, sin = once_a_row(
            row, ("latent rotation", query.dtype), functools.partial(self._angles, row, query.dtype)
        )
        query_rotary, key_rotary = rotate(
            query_rotary, key_rotary.unsqueeze(1), cos, sin, interleaved=True
        )
        query = torch.cat([query_content, query_rotary], dim=-1)
        key = torch.cat([key_content, key_rotary.expand(-1, heads, -1)], dim=-1)
        return query, key, value.contiguous(), q_latent, kv_latent

    def _angles(self, row: PackedRow, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (T, 1, rotary size), of pairs of adjacent channels."""
        assert row.positions is not None
        table = self.rotary_pos_emb(row.max_seqlen_q, packed_seq=True)
        scale = 1.0
        if isinstance(table, tuple):
            table, scale = table
        pairs = table.flatten(0, 2)[:, : table.size(-1) // 2]
        angles = pairs.index_select(0, row.positions).repeat_interleave(2, dim=-1).unsqueeze(1)
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _run_core_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: Any = None,
        attn_mask_type: Any = None,
        **named: Any,
    ) -> Tensor:
        """(T, heads · size of a value). Upstream pads values for every core attention."""
        if not isinstance(self.core_attention, PackedAttention):
            result: Tensor = super()._run_core_attention(
                query, key, value, attention_mask, packed_seq_params, attn_mask_type, **named
            )
            return result
        attended: Tensor = self.core_attention(
            query, key, value, attention_mask, packed_seq_params=packed_seq_params
        )
        return attended
