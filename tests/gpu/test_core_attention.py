"""Each core attention beside fp64, at mixed lengths from 17 to 65,536 tokens."""

from __future__ import annotations

import functools

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megatron.hydraulis.runtime.core_attention import (
    CORE_ATTENTIONS,
    MODULE_OF,
    current_environment,
)
from tests.gpu.reference import attention_fp64, errors
from tests.support.context_probes import packed, run_attention
from tests.support.models import SmallModel

HEAD_SIZE, NUM_HEADS, NUM_GROUPS = 64, 4, 2
LENGTHS = {
    "short": (17, 1, 64, 129, 1000),
    "mixed": (17, 4097, 128, 16_384, 333),
    "longest": (65_536, 17),
}
TIMES_SINGLE_DEVICE_ERROR = 2.0


@functools.cache
def tensors(lengths: tuple[int, ...]) -> list[Tensor]:
    """Queries, keys, values and the gradient of the outcome, in bf16."""
    generator = torch.Generator("cuda").manual_seed(0)
    num_tokens = sum(lengths)
    shapes: list[tuple[int, ...]] = [
        (num_tokens, heads, HEAD_SIZE) for heads in (NUM_HEADS, NUM_GROUPS, NUM_GROUPS)
    ]
    shapes.append((num_tokens, NUM_HEADS * HEAD_SIZE))
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for shape in shapes
    ]


@functools.cache
def reference(lengths: tuple[int, ...]) -> list[Tensor]:
    query, key, value, gradient = tensors(lengths)
    return attention_fp64(query, key, value, gradient, lengths)


@functools.cache
def errors_of(name: str, lengths: tuple[int, ...]) -> list[float]:
    model = SmallModel(
        hidden_size=NUM_HEADS * HEAD_SIZE,
        num_heads=NUM_HEADS,
        num_groups=NUM_GROUPS,
        dtype=torch.bfloat16,
    )
    attention = MODULE_OF[name](model.transformer(), 1, AttnMaskType.causal, "self")  # type: ignore[index]
    row = packed(list(lengths), list(lengths))
    for field in ("q", "kv"):
        for kind in ("", "_padded"):
            borders = f"cu_seqlens_{field}{kind}"
            setattr(row, borders, getattr(row, borders).cuda())
    found = run_attention(attention, tensors(lengths), row)
    return errors(found, reference(lengths))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("name", CORE_ATTENTIONS)
def test_error_is_at_most_twice_that_of_one_sequence_at_a_time(name: str, lengths: str) -> None:
    here = current_environment(dtype=torch.bfloat16, head_size=HEAD_SIZE)
    why_not = here.obstacle(name)  # type: ignore[arg-type]
    if why_not is not None:
        pytest.skip(f"core attention '{name}' is not there: {why_not}")
    found = errors_of(name, LENGTHS[lengths])
    single = errors_of("sdpa", LENGTHS[lengths])
    assert max(single) < 0.02, "the comparison itself is of bf16"
    for mine, theirs in zip(found, single, strict=True):
        assert mine <= TIMES_SINGLE_DEVICE_ERROR * theirs, (found, single)
