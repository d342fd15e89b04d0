"""Core attention over packed sequences: causal inside each sequence, nothing across."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError

_FOUND_OUT = "hydraulis_found_out"
"""Attribute under which layers leave on a row's description what they found out of the row."""


@dataclass
class PackedRow(PackedSeqParams):
    """Upstream's description of a packed row, with what the host knows of it already.

    Upstream's code reads the same from ``cu_seqlens``, and waits for the device each time.
    """

    positions: Tensor | None = None
    """(T,) int64: of each token of this rank, its place in its sequence."""
    segment_lengths: tuple[int, ...] = ()
    """Of the segments of the whole row, padding included, in tokens."""


class SegmentAttention(torch.nn.Module):
    """`scaled_dot_product_attention` per sequence of a THD pack, on every device.

    Takes the place of Megatron's local core attention, which refuses packed input. On a CPU it is
    two to forty times faster than a dense mask over the pack, as no work crosses sequences. On a
    GPU it is right but not fast: a kernel a sequence and layer, where one variable-length kernel
    does for the pack (`VarlenAttention`, `TEAttention`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ConfigurationError(
                f"attention dropout is {dropout}, but masks depend on the layout and the same "
                "batch would give another update under another plan; set --attention-dropout 0"
            )
        self.config = config
        self.layer_number = max(1, layer_number)
        head_size = config.kv_channels
        assert head_size is not None
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(head_size)

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
        """Attend inside every sequence.

        Args:
            query: (tokens, heads, head size); without ``packed_seq_params`` (tokens, 1, …).
            key: (tokens, query groups, head size), likewise.
            value: as ``key``.
            attention_mask: not used: the sequence borders and causality say it all.
            packed_seq_params: holds ``cu_seqlens_q``; None for one unpacked sequence.

        Returns:
            (tokens, heads · head size), or (tokens, 1, heads · head size) unpacked.
        """
        unpacked = packed_seq_params is None
        if unpacked:
            if query.size(1) != 1:
                raise ConfigurationError(
                    f"unpacked input has {query.size(1)} rows; pack them into one THD row"
                )
            query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
            lengths: Sequence[int] = [query.size(0)]
        else:
            lengths = segment_lengths(packed_seq_params)
        context = self.attend(query, key, value, lengths)
        context = context.reshape(context.size(0), -1)
        return context.unsqueeze(1) if unpacked else context

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        """Causal attention inside every segment of a whole row.

        Args:
            query: (tokens, heads, head size).
            key: (tokens, query groups, head size).
            value: as ``key``.
            lengths: of the segments, which cover the row.

        Returns:
            (tokens, heads, head size).
        """
        segments = []
        parts = (each.split(list(lengths)) for each in (query, key, value))
        for q, k, v in zip(*parts, strict=True):
            attended = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k.transpose(0, 1).unsqueeze(0),
                v.transpose(0, 1).unsqueeze(0),
                is_causal=True,
                scale=self.softmax_scale,
                enable_gqa=q.size(1) != k.size(1),
            )
            segments.append(attended.squeeze(0).transpose(0, 1))
        return torch.cat(segments) if len(segments) > 1 else segments[0]


def segment_lengths(packed_seq_params: PackedSeqParams) -> tuple[int, ...]:
    """Padded lengths: padding inside a segment comes last, so causality hides it from the rest.

    Of the whole row, also where this rank holds a part of it. The host waits for the device where
    the description is not a `PackedRow`.
    """
    if isinstance(packed_seq_params, PackedRow) and packed_seq_params.segment_lengths:
        return packed_seq_params.segment_lengths

    def read() -> tuple[int, ...]:
        padded = packed_seq_params.cu_seqlens_q_padded
        borders = packed_seq_params.cu_seqlens_q if padded is None else padded
        return tuple(borders.diff().tolist())

    return once_a_row(packed_seq_params, "segment lengths", read)


def once_a_row[Found](
    packed_seq_params: PackedSeqParams, what: Hashable, find_out: Callable[[], Found]
) -> Found:
    """What all layers need to know of a row: found out by the first, kept with its description.

    Args:
        packed_seq_params: describes one micro-batch, and no other after it.
        what: the question.
        find_out: answers it.
    """
    found_out: dict[Hashable, Found] = vars(packed_seq_params).setdefault(_FOUND_OUT, {})
    if what not in found_out:
        found_out[what] = find_out()
    return found_out[what]
