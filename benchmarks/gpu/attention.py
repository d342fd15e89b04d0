"""Forward and backward of each core attention, and of a padded batch, on packs of equal tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from benchmarks.gpu.packs import NUM_TOKENS, PACKS
from megatron.hydraulis.runtime.core_attention import (
    CORE_ATTENTIONS,
    MODULE_OF,
    current_environment,
)

NUM_HEADS, NUM_GROUPS, HEAD_SIZE = 16, 8, 128
NUM_WARMUP, NUM_REPEATS = 3, 10
MIXED_LENGTHS = (16_384, 4096, 4096, 2048, 2048, 1024, *(512,) * 4, *(128,) * 8)
"""Of a pack with a long tail, in tokens; padded, every sequence is as long as the longest."""


def run() -> dict[str, Any]:
    """Median ms of each way on each pack; interleaved, so that drift meets all alike."""
    torch.cuda.set_device(0)
    here = current_environment(dtype=torch.bfloat16, head_size=HEAD_SIZE)
    left_out = {name: why for name in CORE_ATTENTIONS if (why := here.obstacle(name)) is not None}
    names = [name for name in CORE_ATTENTIONS if name not in left_out]
    rest = NUM_TOKENS - sum(MIXED_LENGTHS)
    cases = {f"{len(pack.lengths)} x {pack.length}": pack.lengths for pack in PACKS}
    cases["mixed"] = (*MIXED_LENGTHS, rest) if rest else MIXED_LENGTHS
    rows = []
    for label, lengths in cases.items():
        ways: dict[str, Callable[[], None]] = {name: _packed(name, lengths) for name in names}
        ways["padded"] = _padded(lengths)
        times = _interleaved_ms(ways)
        rows.append(
            {
                "pack": label,
                "tokens": sum(lengths),
                "sum_of_squares": sum(n * n for n in lengths),
                **{f"{name}_ms": statistics.median(values) for name, values in times.items()},
                **{
                    f"{name}_spread_ms": max(values) - min(values) for name, values in times.items()
                },
            }
        )
    return {"rows": rows, "left_out": left_out}


def _interleaved_ms(ways: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(NUM_WARMUP + NUM_REPEATS):
        for name, way in ways.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            way()
            end.record()
            end.synchronize()
            if number >= NUM_WARMUP:
                times[name].append(start.elapsed_time(end))
    return times


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _packed(name: Any, lengths: Sequence[int]) -> Callable[[], None]:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=NUM_HEADS * HEAD_SIZE,
        num_attention_heads=NUM_HEADS,
        num_query_groups=NUM_GROUPS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    attention = MODULE_OF[name](config, 1, AttnMaskType.causal, "self")
    borders = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    row = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=borders,
        cu_seqlens_kv_padded=borders,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        local_cp_size=1,
    )
    num_tokens = sum(lengths)
    inputs = [
        _drawn(num_tokens, heads, HEAD_SIZE).requires_grad_()
        for heads in (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
    ]
    gradient = _drawn(num_tokens, NUM_HEADS * HEAD_SIZE)

    def way() -> None:
        attention(*inputs, None, packed_seq_params=row).backward(gradient)

    return way


def _padded(lengths: Sequence[int]) -> Callable[[], None]:
    """A batch in which every sequence is as long as the longest."""
    query, key, value = (
        _drawn(len(lengths), heads, max(lengths), HEAD_SIZE).requires_grad_()
        for heads in (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
    )
    gradient = _drawn(len(lengths), NUM_HEADS, max(lengths), HEAD_SIZE)

    def way() -> None:
        outcome = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        outcome.backward(gradient)

    return way
