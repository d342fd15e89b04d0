"""Results of operations on the stand-in's device, compared with those of the CPU."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.gloo_pool import WorkerFailure, pool_of

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCE = {"fp64": 1e-14, "fp32": 1e-5, "bf16": 2e-2}
"""Relative to the largest value of a result."""
SEGMENTS = [0, 5, 6, 20]
"""Borders of packed rows."""


def _attention(is_causal: bool) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def _masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((6, 6), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _grouped_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k[:, :2], v[:, :2]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _in_place(x: Tensor) -> Tensor:
    y, other = x.clone(), torch.empty_like(x)
    y.t()[0].mul_(5)
    y[:, 1] += 1
    with torch.no_grad():
        torch.add(x, 0.25, out=other)
    y = y + other
    y[y > 2] = 0.5
    y.index_add_(0, torch.tensor([1, 1], device=y.device), y[:2].clone())
    return y


QKV: list[tuple[int, ...]] = [(2, 4, 6, 8)] * 3
OPERATIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "RMS norm": (lambda x, w: F.rms_norm(x, (32,), w, 1e-5), [(16, 32), (32,)]),
    "RMS norm without weights": (lambda x: F.rms_norm(x, (32,), None, 1e-5), [(16, 32)]),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (32,), w, b), [(16, 32), (32,), (32,)]),
    "linear": (F.linear, [(16, 32), (8, 32), (8,)]),
    "batched product": (torch.bmm, [(3, 4, 5), (3, 5, 6)]),
    "attention": (_attention(True), QKV),
    "attention to all": (_attention(False), QKV),
    "attention with a mask": (_masked_attention, QKV),
    "attention with query groups": (_grouped_attention, QKV),
    "activations": (lambda x: F.silu(x) * F.gelu(x, approximate="tanh"), [(16, 32)]),
    "softmax": (lambda x: torch.softmax(x.float(), -1), [(16, 32)]),
    "cross entropy": (
        lambda x: F.cross_entropy(x.float(), torch.arange(16, device=x.device)),
        [(16, 32)],
    ),
    "mask": (lambda x: x[x > 0], [(16, 32)]),
    "unique": (lambda x: (x * 2).round().detach().unique(), [(16, 32)]),
    "views": (lambda x: torch.cat([x, x * 2]).t().contiguous()[::2, 3:], [(16, 32)]),
    "sort": (lambda x: x.sort(-1)[0].cumsum(0), [(16, 32)]),
    "embedding": (
        lambda w: F.embedding(torch.tensor([1, 2, 1], device=w.device), w),
        [(10, 4)],
    ),
    "in place": (_in_place, [(3, 4)]),
}


def _run(name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Results and gradients, on the CPU."""
    operation, shapes = OPERATIONS[name]
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .to(device)
        .requires_grad_()
        for shape in shapes
    ]
    out = operation(*inputs)
    if out.requires_grad:
        # Unequal weights: a sum of squares of normalised values has almost no gradient.
        weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=device)
        (out.double().flatten() * weights).square().sum().backward()
    grads = [x.grad for x in inputs if x.grad is not None]
    return [x.detach().cpu() for x in (out, *grads)]


def errors(dtype_name: str) -> dict[str, float]:
    """A worker returns the largest error of each operation relative to the largest value."""
    found = {}
    for name in OPERATIONS:
        results = [_run(name, DTYPES[dtype_name], device) for device in ("cpu", "cuda")]
        found[name] = 0.0
        for expected, given in zip(*results, strict=True):
            assert given.dtype == expected.dtype, name
            assert given.shape == expected.shape, name
            error = (given.double() - expected.double()).abs().max()
            found[name] = max(found[name], float(error / expected.double().abs().max()))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_operations_and_their_gradients(dtype: str) -> None:
    found: dict[str, float] = pool_of(1, "cuda").run(errors, dtype)[0]
    wrong = {name: error for name, error in found.items() if not error <= TOLERANCE[dtype]}
    assert not wrong


def _segment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1)


def packed_rows(num_groups: int) -> float:
    """A worker compares torch's kernel for packed rows with one call per segment in fp32."""
    from torch.nn.attention.varlen import varlen_attn

    generator = torch.Generator().manual_seed(1)
    values = [
        torch.randn(SEGMENTS[-1], heads, 8, generator=generator).bfloat16()
        for heads in (4, num_groups, num_groups)
    ]
    packed = [x.cuda().requires_grad_() for x in values]
    plain = [x.float().requires_grad_() for x in values]
    borders = torch.tensor(SEGMENTS, dtype=torch.int32, device="cuda")
    longest = max(b - a for a, b in pairwise(SEGMENTS))
    q, k, v = packed
    out = varlen_attn(
        q, k, v, borders, borders, longest, longest, window_size=(-1, 0), enable_gqa=True
    )
    assert isinstance(out, Tensor)
    expected = torch.cat(
        [_segment(*(x[start:stop] for x in plain)) for start, stop in pairwise(SEGMENTS)]
    )
    out.float().square().sum().backward()
    expected.square().sum().backward()
    pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(packed, plain, strict=True))]
    worst = 0.0
    for given, exact in pairs:
        assert given is not None
        assert exact is not None
        error = (given.detach().cpu().float() - exact.detach()).abs().max()
        worst = max(worst, float(error / exact.detach().abs().max()))
    return worst


@pytest.mark.parametrize("num_groups", [4, 2])
def test_attention_of_packed_rows(num_groups: int) -> None:
    assert pool_of(1, "cuda").run(packed_rows, num_groups)[0] <= TOLERANCE["bf16"]


def optimizer_steps() -> list[list[float]]:
    """A worker makes three updates by each of torch's implementations of AdamW."""
    found = []
    for device, options in [
        ("cpu", {}),
        ("cuda", {}),
        ("cuda", {"fused": True}),
        ("cuda", {"foreach": True}),
    ]:
        parameter = torch.nn.Parameter(torch.linspace(-1, 1, 5, device=device))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, **options)  # type: ignore[arg-type]
        for _ in range(3):
            parameter.grad = parameter.detach() * 2 + 1
            optimizer.step()
        found.append(parameter.detach().cpu().tolist())
    return found


def test_optimizers() -> None:
    expected, *found = pool_of(1, "cuda").run(optimizer_steps)[0]
    for values in found:
        assert values == pytest.approx(expected, rel=1e-5)


def random_numbers() -> dict[str, bool]:
    """A worker draws numbers, which follow from the state of the device's generator."""
    generator = torch.Generator("cuda").manual_seed(3)
    state = generator.get_state()
    draws = []
    for _ in range(2):
        generator.set_state(state)
        draws.append([torch.rand(9, generator=generator, device="cuda") for _ in range(2)])
    dropped = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(seed)
        dropped.append(F.dropout(torch.ones(64, device="cuda")))
    before = torch.get_rng_state()
    normal = torch.empty(1000, device="cuda").normal_(1.0, 2.0)
    return {
        "repeat": all(torch.equal(x, y) for x, y in zip(*draws, strict=True)),
        "continue": not torch.equal(*draws[0]),
        "same seed": torch.equal(dropped[0], dropped[1]),
        "other seed": not torch.equal(dropped[0], dropped[2]),
        "the CPU's generator is left alone": torch.equal(before, torch.get_rng_state()),
        "distributed as asked": abs(normal.mean().item() - 1) < 0.3
        and 1.8 < normal.std().item() < 2.2,
    }


def test_random_numbers() -> None:
    found: dict[str, bool] = pool_of(1, "cuda").run(random_numbers)[0]
    assert all(found.values()), found


def in_another_thread() -> list[float]:
    """A worker runs a kernel, a copy of another type and a pinned buffer in a thread of Python."""
    found: list[float] = []

    def copy() -> None:
        values = torch.arange(6.0).pin_memory().to("cuda", non_blocking=True)
        found.extend(values.view(2, 3).t().double().cpu().flatten().tolist())

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    return found


def test_threads_have_values() -> None:
    assert pool_of(1, "cuda").run(in_another_thread)[0] == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def call(name: str) -> None:
    """A worker calls something that is not computed."""
    if name == "an operation":
        q = torch.randn(1, 2, 4, 8, device="cuda", dtype=torch.bfloat16)
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    else:
        torch.cuda._sleep(1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("an operation", r"_scaled_dot_product_flash_attention.default is not computed: dropout_p"),
        ("a kernel", r"spin_kernel.* is launched outside of the operations that are computed"),
    ],
)
def test_what_is_not_computed_is_an_error_that_names_it(name: str, message: str) -> None:
    with pytest.raises(WorkerFailure) as failure:
        pool_of(1, "cuda").run(call, name)
    assert re.search(message, str(failure.value)), failure.value
