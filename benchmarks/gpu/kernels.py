"""Errors of attention kernels, and of the engine's gradients with each of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from benchmarks.gpu.rank import Place
from benchmarks.gpu.reference import attention_fp64, errors
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.core_attention import (
    CORE_ATTENTIONS,
    MODULE_OF,
    CoreAttentionName,
    Environment,
    RowKind,
    current_environment,
)
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.context_probes import packed, run_attention
from tests.support.models import SmallModel

HEAD_SIZE, NUM_HEADS, NUM_GROUPS = 64, 4, 2
MODEL = SmallModel(num_layers=2, hidden_size=256, ffn_hidden_size=512, num_heads=4, num_groups=2)
LENGTHS = (700, 17, 129, 1)
EXPERTS = dataclasses.replace(
    MODEL,
    variant=(
        ("num_moe_experts", 4),
        ("moe_ffn_hidden_size", 256),
        ("moe_router_topk", 4),  # of fewer, rounding would choose others
        ("moe_router_load_balancing_type", "none"),
        ("moe_token_dispatcher_type", "alltoall"),
    ),
)
LATENTS = dataclasses.replace(
    MODEL,
    num_groups=4,
    qk_layernorm=True,
    variant=(
        *(("q_lora_rank", 128), ("kv_lora_rank", 64), ("rope_type", "rope")),
        *(("qk_head_dim", 128), ("qk_pos_emb_head_dim", 64), ("v_head_dim", 128)),
    ),
)
"""With heads of DeepSeek-V3's sizes."""
WAYS: dict[str, tuple[CoreAttentionName, SmallModel, bool]] = {
    "torch": ("torch", MODEL, False),
    "te": ("te", MODEL, False),
    "layers of te": ("te", MODEL, True),
    "experts of te": ("te", EXPERTS, True),
    "latents of te": ("te", LATENTS, True),
}
"""Core attention, model, and whether its layers are those of Transformer Engine."""


def run(place: Place) -> None:
    """The error of each kernel, then that of gradients with each, on one rank."""
    here = current_environment(dtype=torch.bfloat16, head_size=HEAD_SIZE)
    for name in CORE_ATTENTIONS:
        if why_not := here.obstacle(name):
            place.lacks(name, why_not)
            continue
        worst = 0.0
        for lengths in place.sizes.kernel_lengths.values():
            found, single = _attention_errors(name, lengths), _attention_errors("sdpa", lengths)
            if name == "sdpa":
                worst = max(worst, *single)
            else:
                worst = max(worst, *(a / b for a, b in zip(found, single, strict=True)))
        place.measured(name, worst)
    for way, (attention, model, has_te_layers) in WAYS.items():
        if why_not := environment_of(model).obstacle(attention):
            place.lacks(f"engine {way}", why_not)
            continue
        exact = _gradients(model, torch.float32, "sdpa")
        reference_error = _error(exact, _gradients(model, torch.bfloat16, "sdpa"))
        built = dataclasses.replace(model, has_te_layers=has_te_layers)
        error = _error(exact, _gradients(built, torch.bfloat16, attention))
        ratio = error / reference_error
        place.measured(f"engine {way}", ratio, error=error, error_of_sdpa=reference_error)


@functools.cache
def _attention_errors(name: CoreAttentionName, lengths: tuple[int, ...]) -> list[float]:
    """Errors of outcome and gradients of queries, keys and values in bf16, relative to fp64."""
    generator = torch.Generator("cuda").manual_seed(0)
    num_tokens = sum(lengths)
    shapes: list[tuple[int, ...]] = [
        (num_tokens, heads, HEAD_SIZE) for heads in (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
    ]
    shapes.append((num_tokens, NUM_HEADS * HEAD_SIZE))
    tensors = [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in shapes
    ]
    model = SmallModel(
        hidden_size=NUM_HEADS * HEAD_SIZE,
        num_heads=NUM_HEADS,
        num_groups=NUM_GROUPS,
        dtype=torch.bfloat16,
    )
    attention = MODULE_OF[name](model.transformer(), 1, AttnMaskType.causal, "self")
    row = packed(lengths, lengths, device="cuda")
    found: list[Any] = list(run_attention(attention, tensors, row))
    query, key, value, gradient = tensors
    return errors(found, attention_fp64(query, key, value, gradient, lengths))


def environment_of(model: SmallModel) -> Environment:
    """The environment of a model's attention."""
    sizes = dict(model.variant)
    row = RowKind(model.num_heads, model.num_groups, value_head_size=sizes.get("v_head_dim"))
    head_size = HEAD_SIZE
    if row.value_head_size is not None:
        head_size = sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]
    return current_environment(dtype=torch.bfloat16, head_size=head_size, rows=(row,))


def engine_and_batch(
    model: SmallModel, dtype: torch.dtype, attention: CoreAttentionName, lengths: Sequence[int]
) -> tuple[RuntimeEngine, PackedBatch]:
    """An engine of one rank, and a micro-batch of random sequences of these lengths."""
    definition = dataclasses.replace(
        dataclasses.replace(model, dtype=dtype).definition(), core_attention=attention
    )
    engine = RuntimeEngine(
        definition, Pool.of(Strategy.parse("tp1", 1)), AdamWSettings(lr=1e-3), seed=3
    )
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, size=length + 1) for length in lengths]
    return engine, pack(sequences).pinned().to("cuda", non_blocking=True)


@functools.cache
def _gradients(model: SmallModel, dtype: torch.dtype, attention: CoreAttentionName) -> Tensor:
    """Flat, on the shards, in fp64, of two equal micro-batches."""
    engine, batch = engine_and_batch(model, dtype, attention, LENGTHS)
    engine.forward_backward("tp1", [batch, batch], make_forward_step())
    engine.close()
    return engine.shards.gradients.double()


def _error(exact: Tensor, found: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
