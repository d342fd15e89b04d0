"""What attention kernels compute, and the gradients of the engine with each of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from benchmarks.gpu.rank import Place
from benchmarks.gpu.reference import attention_fp64, errors
from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.core_attention import (
    CORE_ATTENTIONS,
    MODULE_OF,
    CoreAttentionName,
    current_environment,
)
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.model_building import te_layer_spec
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.context_probes import packed, run_attention
from tests.support.models import SmallModel

HEAD_SIZE, NUM_HEADS, NUM_GROUPS = 64, 4, 2
MODEL = SmallModel(num_layers=2, hidden_size=256, ffn_hidden_size=512, num_heads=4, num_groups=2)
LENGTHS = (700, 17, 129, 1)
WAYS: dict[str, tuple[CoreAttentionName, bool]] = {
    "torch": ("torch", False),
    "te": ("te", False),
    "layers of te": ("te", True),
}
"""Core attention, and whether layers are those of Transformer Engine."""


def run(place: Place) -> None:
    """On one rank: the error of each kernel, then that of gradients with each."""
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
    exact = _gradients(torch.float32, "sdpa", False)
    reference_error = _error(exact, _gradients(torch.bfloat16, "sdpa", False))
    for way, (attention, has_te_layers) in WAYS.items():
        if why_not := here.obstacle(attention):
            place.lacks(f"engine {way}", why_not)
            continue
        error = _error(exact, _gradients(torch.bfloat16, attention, has_te_layers))
        ratio = error / reference_error
        place.measured(f"engine {way}", ratio, error=error, error_of_sdpa=reference_error)


@functools.cache
def _attention_errors(name: CoreAttentionName, lengths: tuple[int, ...]) -> list[float]:
    """Of outcome and gradients of queries, keys and values in bf16, relative to fp64."""
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
    row = packed(list(lengths), list(lengths))
    for which in ("q", "kv"):
        for kind in ("", "_padded"):
            borders = f"cu_seqlens_{which}{kind}"
            setattr(row, borders, getattr(row, borders).cuda())
    found: list[Any] = list(run_attention(attention, tensors, row))
    query, key, value, gradient = tensors
    return errors(found, attention_fp64(query, key, value, gradient, lengths))


def _gradients(dtype: torch.dtype, attention: CoreAttentionName, has_te_layers: bool) -> Tensor:
    """Flat, on the shards, in fp64, of two equal micro-batches."""
    model = dataclasses.replace(MODEL, dtype=dtype)
    definition = dataclasses.replace(model.definition(), core_attention=attention)
    if has_te_layers:
        spec = te_layer_spec(definition.transformer)
        definition = dataclasses.replace(definition, built_layer_spec=spec)
    engine = Engine(definition, Pool.of(Strategy.parse("tp1", 1)), AdamWSettings(lr=1e-3), seed=3)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, MODEL.vocab_size, size=length + 1) for length in LENGTHS]
    batch = pack(sequences).pinned().to("cuda", non_blocking=True)
    engine.forward_backward("tp1", [batch, batch], make_forward_step())
    engine.close()
    return engine.shards.gradients.double()


def _error(exact: Tensor, found: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
