"""Masks of the blocks of queries that attend to the beginning of their segment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.hydraulis.runtime.attention import MASK_QUANTUM, QueryBlock, QueryBlocks

SIZES = [(1, 1), (3, 17), (8, 16), (8, 31), (31, 31), (17, 48)]
"""Queries and keys of each block."""


@pytest.mark.parametrize("has_offset", [False, True])
@pytest.mark.parametrize("window", [None, 0, 5, 16, 40])
@pytest.mark.parametrize("size", SIZES)
def test_masks_are_causal_and_begin_where_cuda_s_kernel_can_read_them(
    size: Any, window: int | None, has_offset: bool
) -> None:
    blocks = [QueryBlock(0, num_queries, 48 - num_keys, 48) for num_queries, num_keys in SIZES]
    masks = QueryBlocks(blocks, window, has_offset, torch.bfloat16, torch.device("cpu"))
    num_queries, num_keys = size
    mask = masks.mask_of(QueryBlock(0, num_queries, 0, num_keys))
    attended = torch.ones(size, dtype=torch.bool).tril(num_keys - num_queries)
    if window is not None:
        attended = attended.triu(num_keys - num_queries - window)
    if mask is None:
        assert num_queries == num_keys
        assert bool(attended.eq(torch.ones(size).tril().bool()).all())
        return
    if has_offset:  # its key is before the others
        attended = torch.cat([torch.ones(num_queries, 1, dtype=torch.bool), attended], dim=1)
    assert torch.equal(mask == 0, attended)
    assert bool((mask[~attended] == -torch.inf).all())
    assert mask.storage_offset() % MASK_QUANTUM == 0
    assert mask.stride(0) % MASK_QUANTUM == 0
