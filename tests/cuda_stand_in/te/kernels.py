"""Reference computations for what Transformer Engine's Python side calls in its binding.

`replace` puts them in place of the binding's functions. Each allocates what the binding's function
allocates and counts as one kernel. For fused attention the binding itself allocates: the shapes of
outputs and workspaces are decided by its library and by cudnn-frontend. Where values are required,
the CPU computes them from aliases of the arguments. FP8, dropout, fused GELU and overlap with user
buffers are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tests.cuda_stand_in.attention import _forward as attention_forward
from tests.cuda_stand_in.attention import _refuse, _window_bias
from tests.cuda_stand_in.device import driver
from tests.cuda_stand_in.races import mark_kernel
from tests.cuda_stand_in.values import _computing, alias

Tensors = tuple[Tensor, ...]


def replace() -> None:
    """Replace the binding's functions in this process."""
    # It loads the libraries that the binding needs, and all modules that import from it by name.
    import transformer_engine.pytorch  # noqa: F401

    from tests.cuda_stand_in.te.permutation import PERMUTATIONS

    binding = import_module("transformer_engine_torch")
    in_triton = import_module("transformer_engine.pytorch.triton.permutation")
    loaded = [each for name, each in sys.modules.items() if name.startswith("transformer_engine.")]
    of_module = [(binding, kernel) for kernel in _KERNELS]
    for source, kernel in (*of_module, *((in_triton, kernel) for kernel in PERMUTATIONS)):
        name = kernel.__name__
        # Functions of Transformer Engine's Python side may have the name of what they call.
        original = getattr(source, name)
        replacement = _after(original, kernel) if kernel in _AFTER_THE_BINDING else kernel
        for module in (binding, *loaded):
            if vars(module).get(name) is original:
                setattr(module, name, replacement)


def rmsnorm_fwd(
    x: Tensor, weight: Tensor, eps: float, out: Any, quantizer: Any, dtype: Any, *others: Any
) -> list[Any]:
    """Output, None and the reciprocal of the root mean square, (tokens,) fp32."""
    _refuse(quantizer=quantizer, zero_centered_gamma=others[1])
    out = _new(x.shape, x, _torch_type(dtype)) if out is None else out
    scale = _new(x.shape[:1], x, torch.float32)

    def compute(x: Tensor, weight: Tensor) -> Tensors:
        x = x.float()
        scale = (x.square().mean(-1) + eps).rsqrt()
        return x * scale[:, None] * weight.float(), scale

    launch("rmsnorm_fwd", compute, (x, weight), (out, scale))
    return [out, None, scale]


def rmsnorm_bwd(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, *others: Any) -> list[Any]:
    """Gradients of input and weight."""
    _refuse(zero_centered_gamma=others[1])
    outs = torch.empty_like(x), torch.empty_like(weight)

    def compute(grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> Tensors:
        grad, normed = grad.float().view_as(x), x.float() * scale[:, None]
        scaled = grad * weight.float()
        mean = (scaled * normed).mean(-1, keepdim=True)
        return scale[:, None] * (scaled - normed * mean), (grad * normed).sum(0)

    launch("rmsnorm_bwd", compute, (grad, x, scale, weight), outs)
    return list(outs)


def layernorm_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Any,
    quantizer: Any,
    dtype: Any,
    *others: Any,
) -> list[Any]:
    """Output, mean and the reciprocal of the standard deviation, (tokens,) fp32."""
    _refuse(quantizer=quantizer, zero_centered_gamma=others[1])
    out = _new(x.shape, x, _torch_type(dtype)) if out is None else out
    mean, scale = (_new(x.shape[:1], x, torch.float32) for _ in range(2))

    def compute(x: Tensor, weight: Tensor, bias: Tensor) -> Tensors:
        x = x.float()
        mean, scale = x.mean(-1), (x.var(-1, correction=0) + eps).rsqrt()
        normed = (x - mean[:, None]) * scale[:, None]
        return normed * weight.float() + bias.float(), mean, scale

    launch("layernorm_fwd", compute, (x, weight, bias), (out, mean, scale))
    return [out, mean, scale]


def layernorm_bwd(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, *others: Any
) -> list[Any]:
    """Gradients of input, weight and bias."""
    _refuse(zero_centered_gamma=others[1])
    outs = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)

    def compute(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor) -> Tensors:
        grad, normed = grad.float().view_as(x), (x.float() - mean[:, None]) * scale[:, None]
        scaled = grad * weight.float()
        d_x = scaled - scaled.mean(-1, keepdim=True)
        d_x = d_x - normed * (scaled * normed).mean(-1, keepdim=True)
        return d_x * scale[:, None], (grad * normed).sum(0), grad.sum(0)

    launch("layernorm_bwd", compute, (grad, x, mean, scale, weight), outs)
    return list(outs)


def generic_gemm(
    a: Tensor,
    is_a_transposed: bool,
    b: Tensor,
    is_b_transposed: bool,
    out: Tensor | None,
    quantizer: Any,
    dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Any,
    is_backward: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulates: bool,
    *others: Any,
    comm_overlap: Any = None,
    extra_output: Any = None,
    alpha: float = 1.0,
    beta: float | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """``b @ a`` in row-major order, with either operand transposed, in fp32.

    Returns:
        The product, the gradient of the bias in the backward, two results that are not supported.
    """
    _refuse(quantizer=quantizer, gelu=gelu, comm_overlap=comm_overlap, extra_output=extra_output)
    _refuse(scaled=alpha != 1.0 or (beta or 0.0) != float(accumulates))
    name = "generic_gemm_accumulating" if accumulates else "generic_gemm"
    sides = (a, is_a_transposed), (b, is_b_transposed)
    return *_product(name, *sides, out, dtype, bias, is_backward, accumulates), None, None


def te_general_grouped_gemm(
    a: list[Tensor],
    is_a_transposed: bool,
    b: list[Tensor],
    is_b_transposed: bool,
    outs: list[Tensor],
    dtype: Any,
    sizes: list[int] | None,
    biases: list[Tensor],
    bias_type: Any,
    is_single_output: bool,
    gelu_inputs: list[Tensor],
    is_backward: bool,
    workspaces: list[Tensor],
    workspace_size: int,
    accumulates: bool,
    *others: Any,
) -> list[Tensor]:
    """A kernel for each product that has elements; outputs may be rows of one.

    The library spreads them over further streams, which wait for the caller's and it for them.
    """
    _refuse(bias=any(each.numel() for each in biases))
    _refuse(gelu=any(each.numel() for each in gelu_inputs))
    name = "grouped_gemm_accumulating" if accumulates else "grouped_gemm"
    parts = outs[0].split(sizes) if is_single_output else outs
    for left, right, out in zip(a, b, parts, strict=True):
        sides = (left, is_a_transposed), (right, is_b_transposed)
        if left.numel() and right.numel():
            _product(name, *sides, out, dtype, None, is_backward, accumulates)
        elif out.numel() and not accumulates:
            out.zero_()
    return biases


def _product(
    name: str,
    left: tuple[Tensor, bool],
    right: tuple[Tensor, bool],
    out: Tensor | None,
    dtype: Any,
    bias: Tensor | None,
    is_backward: bool,
    accumulates: bool,
) -> tuple[Tensor, Tensor | None]:
    """``right @ left``, each possibly transposed, and in the backward the bias's gradient."""
    (a, is_a_transposed), (b, is_b_transposed) = left, right
    a_flat, b_flat = a.flatten(0, -2), b.flatten(0, -2)
    columns = a_flat.size(0 if is_a_transposed else 1)
    shape = (b_flat.size(1), columns) if is_b_transposed else (*b.shape[:-1], columns)
    if out is None:
        out = _new(shape, b, b.dtype if dtype is None else _torch_type(dtype))
    has_bias_gradient = bias is not None and is_backward
    bias_gradient = None
    if has_bias_gradient:
        assert bias is not None
        bias_gradient = _new((b_flat.size(1),), b, bias.dtype)

    def compute(a: Tensor, b: Tensor, bias: Tensor | None, before: Tensor) -> Tensors:
        wide = torch.promote_types(a.dtype, torch.float32)
        a, b = a.to(wide), b.to(wide)
        product = (b.t() if is_b_transposed else b) @ (a.t() if is_a_transposed else a)
        if bias is not None and not is_backward:
            product = product + bias.to(wide)
        if accumulates:
            product = product + before.view_as(product)
        return (product, b.sum(0)) if has_bias_gradient else (product,)

    outs = (out,) if bias_gradient is None else (out, bias_gradient)
    launch(name, compute, (a_flat, b_flat, bias, out), outs)
    return out, bias_gradient


def fused_attn_fwd(
    outs: list[Tensor],
    max_q: int,
    max_k: int,
    is_training: bool,
    scale: float,
    dropout: float,
    zeroes: bool,
    layout: Any,
    out_format: Any,
    scale_format: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: Any,
    is_bottom_right: bool,
    lengths_q: Tensor,
    lengths_k: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dtype: Any,
    borders_q: Tensor | None,
    borders_k: Tensor | None,
    *others: Any,
) -> list[Tensor]:
    """Packed rows: output and, in training, log-sum-exp (tokens, heads, 1) fp32 and the state of
    random numbers.

    ``outs`` are those that the binding allocated.
    """
    page_k, _, s_quantizer, o_quantizer, bias, offset, *_ = others
    _refuse(dropout=dropout, bias=bias is not None, offset=offset is not None)
    _refuse(pages=page_k is not None, s_quantizer=s_quantizer, o_quantizer=o_quantizer)
    shape = outs[0].shape

    def compute(q: Tensor, k: Tensor, v: Tensor, *cuts: Any) -> Tensors:
        found, sums = torch.zeros(shape), torch.zeros(*shape[:2], 1)
        for q_at, k_at in _segments(*cuts):
            bias = _bias(q_at, k_at, mask, is_bottom_right)
            here, keys, values = (x.transpose(0, 1) for x in (q[q_at], k[k_at], v[k_at]))
            part, lse_part = attention_forward(here, keys, values, scale, bias)
            found[q_at] = part.transpose(0, 1)
            sums[q_at] = lse_part.transpose(0, 1).unsqueeze(-1)
        return (found, sums, torch.zeros(2, dtype=torch.int64))[: len(outs)]

    given = (query, key, value, lengths_q, lengths_k, borders_q, borders_k)
    launch("fused_attn_fwd", compute, given, tuple(outs))
    return outs


def fused_attn_bwd(
    outs: list[Any],
    max_q: int,
    max_k: int,
    scale: float,
    dropout: float,
    zeroes: bool,
    layout: Any,
    out_format: Any,
    grad_format: Any,
    grads_layout: Any,
    scale_format: Any,
    grad_scale_format: Any,
    bias_type: Any,
    mask: Any,
    softmax: Any,
    window: Any,
    is_bottom_right: bool,
    is_deterministic: bool,
    lengths_q: Tensor,
    lengths_k: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    grad: Tensor,
    dtype: Any,
    kept: list[Tensor],
    borders_q: Tensor | None,
    borders_k: Tensor | None,
    *others: Any,
) -> list[Any]:
    """Gradients of queries, keys and values, for the log-sum-exp that the forward kept.

    That may include keys of other ranks, so probabilities come from it, as in the kernel. ``outs``
    are those that the binding allocated.
    """
    _refuse(dropout=dropout)

    def compute(
        q: Tensor, k: Tensor, v: Tensor, o: Tensor, g: Tensor, lse: Tensor, *cuts: Any
    ) -> Tensors:
        found = tuple(torch.zeros(x.shape) for x in (q, k, v))
        for q_at, k_at in _segments(*cuts):
            bias = _bias(q_at, k_at, mask, is_bottom_right)
            heads = (x.transpose(0, 1) for x in (g[q_at], q[q_at], k[k_at], v[k_at], o[q_at]))
            parts = _attention_gradients(
                *heads, lse=lse[q_at].transpose(0, 1).float(), scale=scale, bias=bias
            )
            for whole, at, part in zip(found, (q_at, k_at, k_at), parts, strict=True):
                whole[at] = part.transpose(0, 1)
        return found

    cuts = (lengths_q, lengths_k, borders_q, borders_k)
    given = (query, key, value, out, grad.view(out.shape), kept[0], *cuts)
    launch("fused_attn_bwd", compute, given, tuple(outs[:3]))
    return outs


def thd_read_half_tensor(tensor: Tensor, borders: Tensor, half: int) -> Tensor:
    """The first or second half of every segment, of (tokens, ...) or (2, tokens, ...)."""
    axis = 0 if tensor.dim() == 3 else 1
    shape = list(tensor.shape)
    shape[axis] //= 2
    out = _new(shape, tensor, tensor.dtype)

    def compute(tensor: Tensor, borders: Tensor) -> Tensors:
        return (tensor.index_select(axis, _half(borders, half)),)

    launch("thd_read_half_tensor", compute, (tensor, borders), (out,))
    return out


def thd_second_half_lse_correction(
    lse: Tensor, of_step: Tensor, borders: Tensor, is_packed: bool
) -> None:
    """Add the step's to the log-sum-exp (heads, tokens) of second halves, in place."""
    _refuse(unpacked=not is_packed)

    def compute(lse: Tensor, of_step: Tensor, borders: Tensor) -> Tensors:
        at = _half(borders, 1)
        found = lse.clone()
        found[:, at] = torch.logaddexp(lse[:, at], of_step[:, : at.numel()])
        return (found,)

    launch("thd_second_half_lse_correction", compute, (lse, of_step, borders), (lse,))


def thd_read_second_half_lse(lse: Tensor, borders: Tensor, is_packed: bool, size: int) -> Tensor:
    """(heads, size): the log-sum-exp of second halves."""
    _refuse(unpacked=not is_packed)
    out = torch.zeros((lse.size(0), size), dtype=lse.dtype, device=lse.device)

    def compute(lse: Tensor, borders: Tensor) -> Tensors:
        found = torch.zeros(out.shape)
        at = _half(borders, 1)
        found[:, : at.numel()] = lse[:, at]
        return (found,)

    launch("thd_read_second_half_lse", compute, (lse, borders), (out,))
    return out


def thd_out_correction(
    out: Tensor,
    of_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_of_step: Tensor,
    borders: Tensor,
    only_second_half: bool,
    is_packed: bool,
) -> None:
    """Merge a step's output into that of the steps before, in place; lse is (heads, tokens)."""
    _refuse(unpacked=not is_packed)

    def compute(
        out: Tensor, of_step: Tensor, old: Tensor, new: Tensor, lse_of_step: Tensor, cuts: Tensor
    ) -> Tensors:
        at = _half(cuts, 1) if only_second_half else torch.arange(new.size(1))

        def weight(lse: Tensor) -> Tensor:
            return (lse - new[:, at]).exp().nan_to_num(0.0).t().unsqueeze(-1)

        found = out.float().view(new.size(1), new.size(0), -1).clone()
        part = of_step.float().view(-1, *found.shape[1:])[: at.numel()]
        found[at] = found[at] * weight(old[:, at]) + part * weight(lse_of_step[:, : at.numel()])
        return (found.view(out.shape),)

    given = (out, of_step, old_lse, lse, lse_of_step, borders)
    launch("thd_out_correction", compute, given, (out,))


def thd_grad_correction(
    grad: Tensor, of_step: Tensor, borders: Tensor, first: str, second: str
) -> None:
    """Add or copy a step's gradient to the halves of every segment, in place.

    Where one half is 'none', ``of_step`` has only the other.
    """

    def compute(grad: Tensor, of_step: Tensor, borders: Tensor) -> Tensors:
        found, is_half = grad.clone(), "none" in (first, second)
        for half, what in enumerate((first, second)):
            at = _half(borders, half)
            part = of_step[: at.numel()] if is_half else of_step[at]
            if what == "add":
                found[at] += part
            elif what == "copy":
                found[at] = part
            elif what == "zero":
                found[at] = 0
        return (found,)

    launch("thd_grad_correction", compute, (grad, of_step, borders), (grad,))


def thd_sequence_order_to_cp_rank_order(
    tensor: Tensor, borders: Tensor, size: int, num_tokens: int
) -> Tensor:
    """All tokens of a row, rank after rank."""
    tensor = tensor.contiguous()
    out = torch.empty_like(tensor)
    launch(
        "thd_sequence_order_to_cp_rank_order",
        lambda tensor, borders: (tensor[_rank_order(borders, size)],),
        (tensor, borders),
        (out,),
    )
    return out


def thd_cp_rank_order_to_sequence_order(
    tensor: Tensor, borders: Tensor, size: int, num_tokens: int
) -> Tensor:
    """The inverse of `thd_sequence_order_to_cp_rank_order`."""
    tensor = tensor.contiguous()
    out = torch.empty_like(tensor)
    launch(
        "thd_cp_rank_order_to_sequence_order",
        lambda tensor, borders: (tensor[_rank_order(borders, size).argsort()],),
        (tensor, borders),
        (out,),
    )
    return out


def thd_copy_valid_tokens_from_per_split_to_rank_local(
    out: Tensor, tensor: Tensor, begins: Tensor, lengths: Tensor
) -> None:
    """Copy the true tokens of every segment, in place."""

    def compute(out: Tensor, tensor: Tensor, begins: Tensor, lengths: Tensor) -> Tensors:
        found = out.clone()
        for begin, length in zip(begins.tolist(), lengths.diff().tolist(), strict=False):
            found[begin : begin + length] = tensor[begin : begin + length]
        return (found,)

    launch("thd_copy_valid_tokens", compute, (out, tensor, begins, lengths), (out,))


def fused_rope_forward(
    tensor: Tensor,
    angles: Tensor,
    starts: Any,
    format_: Any,
    interleaved: bool,
    borders: Tensor | None,
    size: int,
    rank: int,
) -> Tensor:
    """Packed rows, or a rank's part of them, rotated by their places in segments; without borders
    (tokens, batch, heads, size)."""
    return _rotated("fused_rope_forward", tensor, angles, starts, interleaved, borders, size, rank)


def fused_rope_backward(
    gradient: Tensor,
    angles: Tensor,
    starts: Any,
    format_: Any,
    interleaved: bool,
    borders: Tensor | None,
    size: int,
    rank: int,
) -> Tensor:
    """The gradient of what `fused_rope_forward` rotated."""
    name = "fused_rope_backward"
    return _rotated(name, gradient, angles, starts, interleaved, borders, size, rank)


def _rotated(
    name: str,
    tensor: Tensor,
    angles: Tensor,
    starts: Any,
    interleaved: bool,
    borders: Tensor | None,
    size: int,
    rank: int,
) -> Tensor:
    _refuse(starts=starts is not None, interleaved=interleaved)
    out = _new(tensor.shape, tensor, tensor.dtype)

    def compute(tensor: Tensor, angles: Tensor, borders: Tensor | None) -> Tensors:
        places = []
        for length in [tensor.size(0)] if borders is None else borders.diff().tolist():
            if size == 1:
                places.append(torch.arange(length))
                continue
            chunk = length // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
                places.append(torch.arange(number * chunk, (number + 1) * chunk))
        turn = angles.flatten(0, 2)[torch.cat(places)].float()
        turn = turn.view(-1, *[1] * (tensor.dim() - 2), turn.size(-1))
        cos, sin = turn.cos(), turn.sin() * (1 if name == "fused_rope_forward" else -1)
        width = turn.size(-1)
        inner, rest = tensor.float().split([width, tensor.size(-1) - width], -1)
        first, second = inner.chunk(2, -1)
        turned = inner * cos + torch.cat([-second, first], -1) * sin
        return (torch.cat([turned, rest], -1),)

    launch(name, compute, (tensor, angles, borders), (out,))
    return out


_KERNELS: tuple[Callable[..., Any], ...] = (
    rmsnorm_fwd,
    rmsnorm_bwd,
    layernorm_fwd,
    layernorm_bwd,
    generic_gemm,
    te_general_grouped_gemm,
    fused_attn_fwd,
    fused_attn_bwd,
    thd_read_half_tensor,
    thd_second_half_lse_correction,
    thd_read_second_half_lse,
    thd_out_correction,
    thd_grad_correction,
    thd_sequence_order_to_cp_rank_order,
    thd_cp_rank_order_to_sequence_order,
    thd_copy_valid_tokens_from_per_split_to_rank_local,
    fused_rope_forward,
    fused_rope_backward,
)

_AFTER_THE_BINDING = (fused_attn_fwd, fused_attn_bwd)
"""Kernels that take what the binding's function of the same name returns."""


def _after(original: Callable[..., Any], kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs the binding's own, with all that it allocates, and then a kernel."""

    @wraps(kernel)
    def called(*given: Any, **named: Any) -> Any:
        with _computing():
            found = original(*given, **named)
        return kernel(found, *given, **named)

    return called


def launch(
    name: str,
    compute: Callable[..., Tensors],
    inputs: tuple[Tensor | None, ...],
    outputs: Tensors,
) -> None:
    """One kernel on the current stream, its accesses if they are marked, its values if required."""
    stream = torch.cuda.current_stream().cuda_stream
    mark_kernel(name, [x for x in inputs if x is not None], list(outputs))
    if not driver().stand_in_kernel(name.encode(), stream):
        return
    found = compute(*(None if x is None else _on_cpu(x) for x in inputs))
    for out, values in zip(outputs, found, strict=True):
        _on_cpu(out).copy_(values.view(out.shape))


def _on_cpu(tensor: Tensor) -> Tensor:
    return alias(tensor.detach()) if tensor.is_cuda else tensor


def _new(shape: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device=like.device)


def _torch_type(dtype: Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    found: torch.dtype = TE_DType_To_Torch[dtype]
    return found


def _segments(
    lengths_q: Tensor, lengths_k: Tensor, borders_q: Tensor | None, borders_k: Tensor | None
) -> list[tuple[slice, slice]]:
    """Queries and keys of every segment, which begins at a padded border and has a true length."""
    slices = []
    for lengths, borders in ((lengths_q, borders_q), (lengths_k, borders_k)):
        begins = (lengths if borders is None else borders).tolist()
        sizes = lengths.diff().tolist()
        slices.append([slice(b, b + size) for b, size in zip(begins, sizes, strict=False)])
    return list(zip(*slices, strict=True))


def _bias(queries: slice, keys: slice, mask: Any, is_bottom_right: bool) -> Tensor:
    num_q, num_k = queries.stop - queries.start, keys.stop - keys.start
    is_causal = "CAUSAL" in str(mask).upper()
    if is_causal and num_q != num_k and not (is_bottom_right or "BOTTOM" in str(mask).upper()):
        raise ValueError(
            f"a causal mask needs as many keys as queries, or to be bottom-right, but there are "
            f"{num_q} queries and {num_k} keys"
        )
    return _window_bias(num_q, num_k, -1, 0 if is_causal else -1)


def _attention_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    lse: Tensor,
    scale: float,
    bias: Tensor,
) -> Tensors:
    """All (heads, tokens, size), lse (heads, queries, 1)."""
    groups = q.size(0) // k.size(0)
    grad, q, out = grad.float(), q.float(), out.float()
    k, v = (x.float().repeat_interleave(groups, 0) for x in (k, v))
    p = (q @ k.transpose(-1, -2) * scale + bias - lse).exp().nan_to_num(0.0)
    d_scores = p * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    d_k, d_v = d_scores.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad
    return d_scores @ k, *(x.unflatten(0, (-1, groups)).sum(1) for x in (d_k, d_v))


def _half(borders: Tensor, half: int) -> Tensor:
    """Places of the first or second half of every segment.

    Borders are those of the row or of a rank's part, whichever cuts what is indexed in halves.
    """
    starts, lengths = borders[:-1].tolist(), borders.diff().tolist()
    return torch.cat(
        [
            torch.arange(start + half * (length // 2), start + (half + 1) * (length // 2))
            for start, length in zip(starts, lengths, strict=True)
        ]
    )


def _rank_order(borders: Tensor, size: int) -> Tensor:
    """Places of tokens in a row, as all ranks together hold them: two chunks of every segment."""
    places = []
    for rank in range(size):
        for start, stop in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
            chunk = (stop - start) // (2 * size)
            for number in (rank, 2 * size - 1 - rank):
                places.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
    return torch.cat(places)
