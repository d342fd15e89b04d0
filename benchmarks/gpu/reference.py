"""Attention in fp64, block by block, as what all kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_TOKENS = 512
"""Queries at a time: 65,536 keys of a head are 268 MB of scores then."""


def attention_fp64(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, lengths: Sequence[int]
) -> list[Tensor]:
    """Outcome (tokens, heads · size) and gradients of queries, keys and values, in fp64.

    query: (tokens, heads, size); key and value: (tokens, groups, size).
    """
    num_copies = query.size(1) // key.size(1)
    q, k, v = (each.double().detach().requires_grad_() for each in (query, key, value))
    wide = gradient.double().unflatten(1, query.shape[1:])
    outcome = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    start = 0
    for length in lengths:
        for begin in range(0, length, BLOCK_TOKENS):
            end = min(begin + BLOCK_TOKENS, length)
            rows, columns = slice(start + begin, start + end), slice(start, start + end)
            sees = torch.ones(end - begin, end, dtype=torch.bool, device=q.device).tril(begin)
            for head in range(query.size(1)):
                group = head // num_copies
                scores = q[rows, head] @ k[columns, group].T * query.size(2) ** -0.5
                weights = scores.masked_fill(~sees, -torch.inf).softmax(-1)
                block = weights @ v[columns, group]
                block.backward(wide[rows, head])
                outcome[rows, head] = block.detach()
        start += length
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [outcome.flatten(1), q.grad, k.grad, v.grad]


def errors(found: Sequence[Tensor], reference: Sequence[Tensor]) -> list[float]:
    """Root of the mean squared error of each tensor, relative to that of its values."""
    return [
        float((mine.double() - true).norm() / true.norm())
        for mine, true in zip(found, reference, strict=True)
    ]
