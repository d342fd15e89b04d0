"""Reference computations for the Triton kernels that sort tokens by expert, see `kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.cuda_stand_in.attention import _refuse
from tests.cuda_stand_in.te.kernels import _new, launch

_ROW_MAP_PASSES = 3


def make_row_id_map(routing_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """(tokens, 2 · experts + 1) int32: for each token the rows of its copies, their experts, and
    in the last column how many there are."""
    out = _new((num_tokens, 2 * num_experts + 1), routing_map, torch.int32)
    sums = _new((num_experts,), routing_map, torch.int32)

    def compute(routing_map: Tensor) -> tuple[Tensor, ...]:
        chosen = routing_map.bool()
        rows = chosen.T.reshape(-1).cumsum(0).view(num_experts, num_tokens).T - 1
        found = torch.full((num_tokens, 2 * num_experts + 1), -1, dtype=torch.int32)
        for token, experts in enumerate(chosen):
            numbers = experts.nonzero().flatten()
            found[token, : len(numbers)] = rows[token, numbers].int()
            found[token, num_experts : num_experts + len(numbers)] = numbers.int()
            found[token, -1] = len(numbers)
        return found, chosen.sum(0).int()

    for _ in range(_ROW_MAP_PASSES):
        launch("make_row_id_map", compute, (routing_map,), (out, sums))
    return out


def permute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    scale: Any,
    pad_offsets: Any,
    num_tokens: int,
    num_experts: int,
    num_out_tokens: int,
    hidden_size: int,
    scale_hidden_dim: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """Copies of tokens by expert, and their weights, (copies,), of (tokens, experts)."""
    _refuse(scale=scale is not None, padding=pad_offsets is not None)
    out = _new((num_out_tokens, hidden_size), inp, inp.dtype)
    weights = None if probs is None else _new((num_out_tokens,), inp, probs.dtype)

    def compute(inp: Tensor, row_id_map: Tensor, probs: Tensor | None) -> tuple[Tensor, ...]:
        tokens, rows, experts = _copies(row_id_map, num_experts)
        found = torch.zeros(num_out_tokens, hidden_size, dtype=inp.dtype)
        found[rows] = inp[tokens]
        if probs is None:
            return (found,)
        of_copies = torch.zeros(num_out_tokens, dtype=probs.dtype)
        of_copies[rows] = probs[tokens, experts]
        return found, of_copies

    outs = (out,) if weights is None else (out, weights)
    launch("permute_with_mask_map", compute, (inp, row_id_map, probs), outs)
    return out, None, weights


def unpermute_with_mask_map(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Any,
    permuted_probs: Tensor | None,
    pad_offsets: Any,
    num_tokens: int,
    num_experts: int,
    hidden_size: int,
) -> tuple[Tensor, Tensor | None]:
    """Sums over the copies of each token, in fp32, and the weights as (tokens, experts)."""
    _refuse(merging=merging_probs is not None, padding=pad_offsets is not None)
    out = _new((num_tokens, hidden_size), inp, inp.dtype)
    weights = None
    if permuted_probs is not None:
        weights = _new((num_tokens, num_experts), inp, permuted_probs.dtype)

    def compute(inp: Tensor, row_id_map: Tensor, probs: Tensor | None) -> tuple[Tensor, ...]:
        tokens, rows, experts = _copies(row_id_map, num_experts)
        found = torch.zeros(num_tokens, hidden_size).index_add_(0, tokens, inp[rows].float())
        if probs is None:
            return (found,)
        of_experts = torch.zeros(num_tokens, num_experts, dtype=probs.dtype)
        of_experts[tokens, experts] = probs[rows]
        return found, of_experts

    outs = (out,) if weights is None else (out, weights)
    launch("unpermute_with_mask_map", compute, (inp, row_id_map, permuted_probs), outs)
    return out, weights


def make_chunk_sort_map(
    split_sizes: Tensor, sorted_indices: Tensor, num_tokens: int, num_splits: int
) -> Tensor:
    """(tokens,) int32: the row of each token after chunks are sorted."""
    out = _new((num_tokens,), sorted_indices, torch.int32)

    def compute(split_sizes: Tensor, sorted_indices: Tensor) -> tuple[Tensor, ...]:
        chunks = torch.arange(num_tokens).split(split_sizes.tolist())
        return (torch.cat([chunks[i] for i in sorted_indices.tolist()]).argsort().int(),)

    launch("make_chunk_sort_map", compute, (split_sizes, sorted_indices), (out,))
    return out


def sort_chunks_by_map(
    inp: Tensor,
    row_id_map: Tensor,
    probs: Tensor | None,
    num_tokens: int,
    hidden_size: int,
    is_forward: bool,
) -> tuple[Tensor, Tensor | None]:
    """Tokens and weights in the order of the map, or back."""
    out = _new((num_tokens, hidden_size), inp, inp.dtype)
    weights = None if probs is None else _new((num_tokens,), inp, probs.dtype)

    def compute(inp: Tensor, row_id_map: Tensor, probs: Tensor | None) -> tuple[Tensor, ...]:
        order = row_id_map.long()
        order = order.argsort() if is_forward else order
        return tuple(each[order] for each in (inp, probs) if each is not None)

    outs = (out,) if weights is None else (out, weights)
    launch("sort_chunks_by_map", compute, (inp, row_id_map, probs), outs)
    return out, weights


PERMUTATIONS: tuple[Callable[..., Any], ...] = (
    make_row_id_map,
    permute_with_mask_map,
    unpermute_with_mask_map,
    make_chunk_sort_map,
    sort_chunks_by_map,
)


def _copies(row_id_map: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token, row and expert of every copy."""
    numbers = row_id_map[:, -1:]
    is_copy = torch.arange(num_experts) < numbers
    tokens = is_copy.nonzero()[:, 0]
    rows = row_id_map[:, :num_experts][is_copy].long()
    return tokens, rows, row_id_map[:, num_experts:-1][is_copy].long()
