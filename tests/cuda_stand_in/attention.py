"""Attention as torch's CUDA kernels define it, computed on the CPU, with gradients.

The CPU has none of these operations. Each takes CPU aliases of the kernel's arguments and returns
the kernel's results; options that this project does not use (dropout, paged keys) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Grads = tuple[Tensor, Tensor, Tensor]


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in at least fp32, in which kernels accumulate."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _refuse(**unwritten: Any) -> None:
    for name, value in unwritten.items():
        if value:
            raise NotImplementedError(f"{name}={value}")


def _probabilities(q: Tensor, k: Tensor, scale: float, bias: Tensor) -> tuple[Tensor, Tensor]:
    """(heads, queries, keys) and their log-sum-exp; a query that sees no key gets zeros."""
    scores = q @ k.transpose(-1, -2) * scale + bias
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0), lse


def _window_bias(num_q: int, num_k: int, left: int, right: int) -> Tensor:
    """(queries, keys): 0, and minus infinity for keys outside of a query's window. The last
    query is aligned with the last key; a negative width is no bound."""
    distance = torch.arange(num_k) - (torch.arange(num_q) + num_k - num_q).unsqueeze(-1)
    hidden = torch.zeros(num_q, num_k, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    return torch.zeros(num_q, num_k).masked_fill(hidden, -math.inf)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor
) -> tuple[Tensor, Tensor]:
    """(..., heads, tokens, size); queries' heads a multiple of keys'."""
    groups = q.size(-3) // k.size(-3)
    k, v = (_wide(x).repeat_interleave(groups, -3) for x in (k, v))
    p, lse = _probabilities(_wide(q), k, scale or q.size(-1) ** -0.5, bias)
    return p @ v, lse


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None, bias: Tensor
) -> Grads:
    groups, scale = q.size(-3) // k.size(-3), scale or q.size(-1) ** -0.5
    grad, q = _wide(grad), _wide(q)
    wide_k, wide_v = (_wide(x).repeat_interleave(groups, -3) for x in (k, v))
    p, _ = _probabilities(q, wide_k, scale, bias)
    d_p = grad @ wide_v.transpose(-1, -2)
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdim=True)) * scale

    def of_groups(x: Tensor) -> Tensor:
        return x.unflatten(-3, (-1, groups)).sum(-3)

    d_k = of_groups(d_scores.transpose(-1, -2) @ q)
    d_v = of_groups(p.transpose(-1, -2) @ grad)
    return d_scores @ wide_k, d_k, d_v


def _segments(
    borders_q: Tensor, borders_k: Tensor, max_q: int, max_k: int, num_q: int, num_k: int
) -> Iterator[tuple[slice, slice]]:
    for name, borders, longest, total in (
        ("queries", borders_q, max_q, num_q),
        ("keys", borders_k, max_k, num_k),
    ):
        lengths = borders.diff()
        if borders[0] != 0 or borders[-1] != total or (lengths < 0).any():
            raise ValueError(f"borders {borders.tolist()} do not cut {total} {name}")
        if lengths.numel() and lengths.max() > longest:
            raise ValueError(f"a segment has {int(lengths.max())} {name}, but {longest} were given")
    for i in range(borders_q.numel() - 1):
        yield (
            slice(int(borders_q[i]), int(borders_q[i + 1])),
            slice(int(borders_k[i]), int(borders_k[i + 1])),
        )


def _window(is_causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    left, right = (-1 if width is None else width for width in (left, right))
    return (left, 0) if is_causal else (left, right)


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders_q: Tensor | None,
    borders_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Any, ...]:
    """Packed rows only, (tokens, heads, size): output, log-sum-exp (heads, tokens)."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    _refuse(dense=borders_q is None or borders_k is None)
    _refuse(**{name: value is not None for name, value in others.items()})
    assert borders_q is not None
    assert borders_k is not None
    window = _window(is_causal, window_size_left, window_size_right)
    out = torch.zeros_like(query)
    lse = torch.zeros(query.size(1), query.size(0), dtype=torch.float32)
    sizes = (query.size(0), key.size(0))
    for q_at, k_at in _segments(borders_q, borders_k, max_q, max_k, *sizes):
        q, k, v = (x.transpose(0, 1) for x in (query[q_at], key[k_at], value[k_at]))
        found, sums = _forward(q, k, v, scale, _window_bias(q.size(1), k.size(1), *window))
        out[q_at] = found.transpose(0, 1).to(out.dtype)
        lse[:, q_at] = sums.float()
    return out, lse, None, None, None


def flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    borders_q: Tensor,
    borders_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Grads:
    """Gradients of queries, keys and values."""
    _refuse(dropout_p=dropout_p)
    window = _window(is_causal, window_size_left, window_size_right)
    grads = tuple(torch.zeros_like(x) for x in (query, key, value))
    sizes = (query.size(0), key.size(0))
    for q_at, k_at in _segments(borders_q, borders_k, max_q, max_k, *sizes):
        g, q, k, v = (x.transpose(0, 1) for x in (grad[q_at], query[q_at], key[k_at], value[k_at]))
        found = _backward(g, q, k, v, scale, _window_bias(q.size(1), k.size(1), *window))
        for whole, at, part in zip(grads, (q_at, k_at, k_at), found, strict=True):
            whole[at] = part.transpose(0, 1).to(whole.dtype)
    return grads[0], grads[1], grads[2]


def _square_bias(query: Tensor, key: Tensor, is_causal: bool, bias: Tensor | None = None) -> Tensor:
    """Kernels align the triangle at different corners: rectangles are refused."""
    if bias is not None:
        _refuse(bias_and_causal=is_causal)
        return _wide(bias)
    num_q, num_k = query.size(-2), key.size(-2)
    _refuse(causal_rectangle=is_causal and num_q != num_k)
    return _window_bias(num_q, num_k, -1, 0 if is_causal else -1)


def dense_flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(batch, heads, tokens, size): output and log-sum-exp."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask)
    out, lse = _forward(query, key, value, scale, _square_bias(query, key, is_causal))
    return out, lse, None, None, query.size(-2), key.size(-2), None, None, None


def dense_flash_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    borders_q: Tensor | None,
    borders_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    *philox: Any,
    scale: float | None = None,
) -> Grads:
    """Gradients of queries, keys and values."""
    _refuse(dropout_p=dropout_p)
    return _backward(grad, query, key, value, scale, _square_bias(query, key, is_causal))


def efficient_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """(batch, heads, tokens, size): output; its backward needs nothing else."""
    _refuse(dropout_p=dropout_p)
    out, _ = _forward(query, key, value, scale, _square_bias(query, key, is_causal, bias))
    return out, None, None, None


def efficient_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    philox_seed: Tensor,
    philox_offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Gradients of queries, keys and values, none of a bias."""
    _refuse(dropout_p=dropout_p, gradient_of_bias=grad_input_mask[3])
    mask = _square_bias(query, key, is_causal, bias)
    return *_backward(grad, query, key, value, scale, mask), None


ATTENTIONS: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_flash_attention": dense_flash_forward,
    "_scaled_dot_product_flash_attention_backward": dense_flash_backward,
    "_scaled_dot_product_efficient_attention": efficient_forward,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
}
"""By the name of the operation. A result that is None is one that only a kernel can read."""
