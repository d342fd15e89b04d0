"""Masks of the blocks of queries that attend to the beginning of their segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.hydraulis.runtime.attention import MASK_QUANTUM, QueryBlock, SharedRow

SIZES = [(1, 1), (3, 17), (8, 16), (8, 31), (31, 31), (17, 48)]
"""Queries and keys of each block."""


@pytest.mark.parametrize("size", SIZES)
def test_masks_are_causal_and_begin_where_cuda_s_kernel_can_read_them(size: Any) -> None:
    blocks = [QueryBlock(0, num_queries, num_keys) for num_queries, num_keys in SIZES]
    nothing: Any = None
    row = SharedRow(
        group=nothing,
        size=2,
        lengths=(48,),
        borders=nothing,
        by_place=nothing,
        by_rank=torch.arange(48),
        blocks=blocks,
        block_lengths=[block.num_queries for block in blocks],
        dtype=torch.bfloat16,
    )
    mask = row.mask_of(QueryBlock(0, *size))
    num_queries, num_keys = size
    attended = torch.ones(size, dtype=torch.bool).tril(num_keys - num_queries)
    assert torch.equal(mask == 0, attended)
    assert bool((mask[~attended] == -torch.inf).all())
    assert mask.storage_offset() % MASK_QUANTUM == 0
    assert mask.stride(0) % MASK_QUANTUM == 0
