"""Core attention over packed sequences by one variable-length kernel of torch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from megatron.hydraulis.runtime.context_attention import (
    ContextAttention,
    SharedRow,
    attend_and_forget,
    context_size_of,
    gather_row,
    gathered_again,
)
from megatron.hydraulis.runtime.process_groups import to_device

CAUSAL_WINDOW = (-1, 0)
"""How ``varlen_attn`` is told to be causal: all to the left, none to the right of a query. The last
query of a segment stands at its last key, so that fewer queries than keys are its end."""


class VarlenAttention(ContextAttention):
    """`ContextAttention` with one kernel a pack in the place of one a sequence. CUDA only.

    The kernel is FlashAttention 2: bf16 or fp16, gradients of queries added up in an order that
    differs from run to run.
    """

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
        """As `ContextAttention.forward`."""
        if packed_seq_params is not None and context_size_of(packed_seq_params) == 1:
            borders = packed_seq_params.cu_seqlens_q_padded
            if borders is None:
                borders = packed_seq_params.cu_seqlens_q
            longest = packed_seq_params.max_seqlen_q
            context = self._attend_between(query, key, value, borders, borders, longest, longest)
            return context.flatten(1, 2)
        return super().forward(
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias,
            packed_seq_params,
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        """As `SegmentAttention.attend`."""
        sums = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        borders, longest = to_device(sums, query.device), max(lengths)
        return self._attend_between(query, key, value, borders, borders, longest, longest)

    def _attend_to_row(self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow) -> Tensor:
        longest = max(row.lengths)
        return self._attend_between(query, key, value, row.borders, row.borders, longest, longest)

    def _attend_to_gathered(self, query: Tensor, key: Tensor, value: Tensor, row: SharedRow) -> Any:
        """Each stretch of this rank's queries is a segment, with the keys up to its end.

        Keys that both stretches of a sequence attend to are there twice: one and a half times the
        row at most, where blocks of queries would launch a kernel each.
        """
        stretches = row.stretches

        def by_stretch(gathered: Tensor) -> Tensor:
            segments = gathered.split(row.lengths)
            return torch.cat([segments[segment][:stop] for segment, _, stop in stretches.places])

        def attend(keys_and_values: Tensor) -> Tensor:
            k, v = keys_and_values.split(key.size(1), dim=1)
            return self._attend_between(
                query,
                k,
                v,
                stretches.query_borders,
                stretches.key_borders,
                max(stretches.num_queries),
                max(stretches.num_keys),
            )

        part = torch.cat([key, value], dim=1)
        kept = part.detach()
        return attend_and_forget(
            attend,
            by_stretch(gather_row(part, row)),
            lambda: by_stretch(gathered_again(kept, row)),
        )

    def _attend_between(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_borders: Tensor,
        key_borders: Tensor,
        most_queries: int,
        most_keys: int,
    ) -> Tensor:
        """(queries, heads, head size); borders are (segments + 1,) int32."""
        context = varlen_attn(
            query,
            key,
            value,
            query_borders,
            key_borders,
            most_queries,
            most_keys,
            scale=self.softmax_scale,
            window_size=CAUSAL_WINDOW,
            enable_gqa=query.size(1) != key.size(1),
        )
        assert isinstance(context, Tensor)  # a pair only where more is asked for
        return context
