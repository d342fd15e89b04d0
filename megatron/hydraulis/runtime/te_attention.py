"""Core attention over packed sequences by Transformer Engine, which is imported when one is built.

Upstream's own wrapper takes the context-parallel group of a micro-batch too, but makes the stream
of the ring only where the model's own cp is above 1, has one way to communicate for groups of every
size, and hands on both kinds of borders where they are equal, upon which Transformer Engine takes
the row for one with padding inside and leaves out FlashAttention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.hydraulis.cost_model.context import takes_all_to_all, te_all_to_all_refusal
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.context_attention import context_size_of

__all__ = ["TE_MASK", "TEAttention", "TEWay", "choose_te_way", "packed_arguments"]

TE_MASK = "padding_causal"
"""Causal inside each segment: the only causal mask that packed rows may have."""

TEWay = Literal["p2p", "all_gather", "a2a"]


class TEAttention(torch.nn.Module):
    """Transformer Engine's ``DotProductAttention`` in the place of Megatron's core attention.

    It holds no parameters. The ranks that share a micro-batch are those of
    ``packed_seq_params.cp_group``, set anew in every forward; how they exchange keys and values is
    ``config.cp_comm_type``, see `choose_te_way`.

    Args:
        config: of the role.
        layer_number: from 1.
        attn_mask_type: not used: packed rows have one causal mask.
        attention_type: 'self'.
        attention_dropout: must be 0.
        softmax_scale: 1 / √(head size) where None.
        make_attention: Transformer Engine's class; a stand-in of its signature in tests.
        pg_collection: holds the ``tp`` group.
    """

    takes_context_group = True

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        *,
        make_attention: Callable[..., Any] | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ConfigurationError(
                f"attention dropout is {dropout}, but masks depend on the layout and the same "
                "batch would give another update under another plan; set --attention-dropout 0"
            )
        if make_attention is None:
            from transformer_engine.pytorch import DotProductAttention

            make_attention = DotProductAttention
        self.config = config
        self.layer_number = max(1, layer_number)
        self.cp_comm_type: str = config.cp_comm_type or "auto"
        self.attention = make_attention(
            num_attention_heads=config.num_attention_heads,
            kv_channels=config.kv_channels,
            num_gqa_groups=config.num_query_groups,
            attention_dropout=0.0,
            qkv_format="thd",
            attn_mask_type=TE_MASK,
            sequence_parallel=config.sequence_parallel,
            tp_size=config.tensor_model_parallel_size,
            tp_group=None if pg_collection is None else pg_collection.tp,
            layer_number=self.layer_number,
            attention_type=attention_type,
            softmax_scale=softmax_scale,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend inside every sequence of the row. Collective over the micro-batch's group.

        Args:
            query: (T, heads, head size), this rank's tokens.
            key: (T, query groups, head size), likewise.
            value: as ``key``.
            attention_mask: not used: the sequence borders and causality say it all.
            packed_seq_params: borders of the whole row, the group, its size.

        Returns:
            (T, heads · head size).

        Raises:
            ConfigurationError: unpacked input, or an exchange that the heads do not allow.
        """
        if packed_seq_params is None:
            raise ConfigurationError(
                f"core attention 'te' takes packed rows but was given {tuple(query.shape)} without "
                "PackedSeqParams; pack the sequences, or use --core-attention sdpa"
            )
        size = context_size_of(packed_seq_params)
        if size == 1:
            # Said each time: the group of the micro-batch before would stay.
            self.attention.set_context_parallel_group(None, None, None)
        else:
            group = packed_seq_params.cp_group
            self.attention.set_context_parallel_group(
                group,
                dist.get_process_group_ranks(group),
                _context_stream(query.device),
                choose_te_way(self.cp_comm_type, query.size(1), key.size(1), size),
            )
        context: Tensor = self.attention(
            query, key, value, None, **packed_arguments(packed_seq_params)
        )
        return context.reshape(context.size(0), -1)


def choose_te_way(cp_comm_type: str, num_heads: int, num_groups: int, context_size: int) -> TEWay:
    """How Transformer Engine brings queries and keys of a group together; equal on all its ranks.

    ``auto`` is the all-to-all where it moves less and the heads allow it, else the ring, which
    moves what an all-gather does but beside compute.

    Args:
        cp_comm_type: one of `CP_COMM_TYPES`.
        num_heads: query heads on this rank, after tensor parallelism.
        num_groups: key and value heads on this rank.
        context_size: ranks of the group, c.

    Raises:
        ConfigurationError: an unknown type, or ``a2a`` where the heads do not allow it.
    """
    refusal = te_all_to_all_refusal(num_heads, num_groups, context_size)
    if takes_all_to_all(cp_comm_type, num_heads, num_groups, context_size, refusal):
        return "a2a"
    return "all_gather" if cp_comm_type == "all_gather" else "p2p"


def packed_arguments(packed_seq_params: PackedSeqParams) -> dict[str, Any]:
    """What ``DotProductAttention.forward`` takes beside queries, keys and values.

    Of a row that a group shares, borders and longest segment are those of the whole row. Alone,
    what is behind a sequence is a segment of its own, so that true and padded borders are the same:
    saying so leaves every kernel of Transformer Engine to choose from.
    """
    padded = packed_seq_params.cu_seqlens_q_padded
    if padded is None:
        padded = packed_seq_params.cu_seqlens_q
    is_shared = context_size_of(packed_seq_params) > 1
    true = packed_seq_params.cu_seqlens_q if is_shared else padded
    return {
        "qkv_format": "thd",
        "attn_mask_type": TE_MASK,
        "cu_seqlens_q": true,
        "cu_seqlens_kv": true,
        "cu_seqlens_q_padded": padded,
        "cu_seqlens_kv_padded": padded,
        "max_seqlen_q": packed_seq_params.max_seqlen_q,
        "max_seqlen_kv": packed_seq_params.max_seqlen_kv,
        "pad_between_seqs": is_shared,
    }


@functools.cache
def _context_stream(device: torch.device) -> Any:
    """The stream beside compute on which Transformer Engine passes keys and values on; None where
    there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
