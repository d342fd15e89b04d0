"""Forward and backward of each core attention, and of a padded batch, on packs of equal tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from benchmarks.gpu.rank import Place
from benchmarks.gpu.sizes import Sizes
from megatron.hydraulis.runtime.core_attention import (
    CORE_ATTENTIONS,
    MODULE_OF,
    current_environment,
)
from tests.support.context_probes import packed

NUM_WARMUP = 3


def run(place: Place) -> None:
    """The median time on one rank of each way on each pack, in turn, so that drift meets all."""
    sizes = place.sizes
    here = current_environment(dtype=torch.bfloat16, head_size=sizes.attention_heads[2])
    usable = {name: here.obstacle(name) for name in CORE_ATTENTIONS}
    rows: list[dict[str, Any]] = []
    for label, lengths in sizes.attention_packs.items():
        ways: dict[str, Callable[[], None]] = {
            name: _packed(sizes, name, lengths) for name, why_not in usable.items() if not why_not
        }
        ways["padded"] = _padded(sizes, lengths)
        times = _interleaved_ms(ways, sizes.num_attention_repeats)
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
        print(rows[-1], flush=True)
    mixed = rows[-1]
    for name, why_not in usable.items():
        if why_not:
            place.lacks(name, why_not)
        else:
            ratio = mixed[f"{name}_ms"] / mixed["padded_ms"]
            place.measured(name, ratio, rows=rows)


def _interleaved_ms(
    ways: dict[str, Callable[[], None]], num_repeats: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(NUM_WARMUP + num_repeats):
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


def _packed(sizes: Sizes, name: Any, lengths: Sequence[int]) -> Callable[[], None]:
    num_heads, num_groups, head_size = sizes.attention_heads
    config = TransformerConfig(
        num_layers=1,
        hidden_size=num_heads * head_size,
        num_attention_heads=num_heads,
        num_query_groups=num_groups,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    attention = MODULE_OF[name](config, 1, AttnMaskType.causal, "self")
    row = packed(lengths, lengths, device="cuda")
    num_tokens = sum(lengths)
    inputs = [
        _drawn(num_tokens, heads, head_size).requires_grad_()
        for heads in (num_heads, num_groups, num_groups)
    ]
    gradient = _drawn(num_tokens, num_heads * head_size)

    def way() -> None:
        attention(*inputs, None, packed_seq_params=row).backward(gradient)

    return way


def _padded(sizes: Sizes, lengths: Sequence[int]) -> Callable[[], None]:
    """A batch in which every sequence is as long as the longest."""
    num_heads, num_groups, head_size = sizes.attention_heads
    query, key, value = (
        _drawn(len(lengths), heads, max(lengths), head_size).requires_grad_()
        for heads in (num_heads, num_groups, num_groups)
    )
    gradient = _drawn(len(lengths), num_heads, max(lengths), head_size)

    def way() -> None:
        outcome = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        outcome.backward(gradient)

    return way
