"""The gated delta rule and its convolution over packed rows, against token by token and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.ssm.gated_delta_net import common as upstream
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime import gated_delta_net
from megatron.hydraulis.runtime.gated_delta_net import (
    check_kernels,
    convolve,
    delta,
    gated_delta_rule,
)
from megatron.hydraulis.runtime.packed_rows import PackedRow
from tests.support.reference import recurrent_delta_rule, unit_length

LENGTHS = (3, 150, 1, 64, 70)
"""Shorter than a chunk, several chunks, a token, one chunk, a chunk and some."""
HEADS, KEY_SIZE, VALUE_SIZE = 3, 8, 5


def _inputs(dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value, decay and beta of a row."""
    torch.manual_seed(5)
    query, key = unit_length(torch.randn(2, sum(LENGTHS), HEADS, KEY_SIZE, dtype=torch.float64))
    value = torch.randn(sum(LENGTHS), HEADS, VALUE_SIZE, dtype=torch.float64)
    # Some heads forget at once, others hardly anything.
    decay = -torch.rand(sum(LENGTHS), HEADS, dtype=torch.float64) * torch.tensor([20.0, 1.0, 1e-3])
    beta = torch.rand(sum(LENGTHS), HEADS, dtype=torch.float64)
    return [each.to(dtype).requires_grad_() for each in (query, key, value, decay, beta)]


def _with_gradients(rule: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    output = rule(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    return [output, *torch.autograd.grad((output * weights).sum(), inputs)]


def _by_sequence(rule: Callable[..., Any], *inputs: Tensor) -> Tensor:
    """A rule of (1, tokens, …) that knows no borders, on each sequence alone."""
    outputs = []
    for sequence in zip(*(each.unsqueeze(0).split(LENGTHS, dim=1) for each in inputs), strict=True):
        query, key, value, decay, beta = sequence
        outputs.append(rule(query, key, value, g=decay, beta=beta)[0].squeeze(0))
    return torch.cat(outputs)


@pytest.mark.parametrize(
    ("rule", "dtype", "tolerance"),
    [
        (recurrent_delta_rule, torch.float64, 1e-12),
        (upstream.torch_chunk_gated_delta_rule, torch.float32, 1e-5),
        (
            partial(
                qwen3_next.torch_recurrent_gated_delta_rule,
                initial_state=None,
                output_final_state=False,
            ),
            torch.float32,
            1e-5,
        ),
    ],
    ids=["token by token", "upstream", "transformers"],
)
def test_rule_equals_others_sequence_by_sequence(
    rule: Callable[..., Any], dtype: torch.dtype, tolerance: float
) -> None:
    found = _with_gradients(partial(gated_delta_rule, lengths=LENGTHS), _inputs(dtype))
    expected = _with_gradients(partial(_by_sequence, rule), _inputs(dtype))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        assert (one - other).abs().max() < tolerance * other.abs().max()


def _row(lengths: tuple[int, ...] = LENGTHS) -> PackedRow:
    borders = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    return PackedRow(
        qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders, segment_lengths=lengths
    )


def test_convolution_of_a_row_is_that_of_its_sequences() -> None:
    torch.manual_seed(6)
    channels, width = 6, 4
    row = torch.randn(sum(LENGTHS), channels, dtype=torch.float64)
    taps = torch.randn(channels, width, dtype=torch.float64)
    expected = torch.zeros_like(row)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    for start, length in zip(starts, LENGTHS, strict=False):
        for token in range(length):
            for back in range(min(width, token + 1)):
                expected[start + token] += row[start + token - back] * taps[:, width - 1 - back]
    found = convolve(row, taps, _row())
    torch.testing.assert_close(found, torch.nn.functional.silu(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("deterministic", "message"),
    [(False, "fla is not installed; pip install"), (True, "--deterministic-mode .*; remove it")],
)
def test_cuda_needs_kernels(deterministic: bool, message: str) -> None:
    check_kernels(deterministic=deterministic)  # on a CPU plain torch does it
    with (
        patch.object(torch.cuda, "is_available", lambda: True),
        pytest.raises(ConfigurationError, match=message),
    ):
        check_kernels(deterministic=deterministic)


def test_kernels_of_fla_get_the_borders_of_the_row() -> None:
    """With stand-ins for fla's kernels, which have its arguments, there is no fla here."""
    borders = []

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        cu_seqlens: Tensor,
        **named: Any,
    ) -> tuple[Tensor, None]:
        assert named == {"use_qk_l2norm_in_kernel": False}
        borders.append(cu_seqlens.tolist())
        q, k, v, g, beta = (each.squeeze(0) for each in (q, k, v, g, beta))
        found = gated_delta_rule(q, k, v, g, beta, cu_seqlens.diff().tolist())
        return found.unsqueeze(0), None

    def causal_conv1d(
        x: Tensor, weight: Tensor, bias: None, activation: str, *, cu_seqlens: Tensor
    ) -> tuple[Tensor, None]:
        assert activation == "silu"
        borders.append(cu_seqlens.tolist())
        with patch.object(gated_delta_net, "has_kernels", lambda _: False):
            return convolve(x.squeeze(0), weight, _row()).unsqueeze(0), None

    row, taps = torch.randn(sum(LENGTHS), 6), torch.randn(6, 4)
    query, key, value, decay, beta = _inputs(torch.float32)

    def both() -> tuple[Tensor, Tensor]:
        return delta(query, key, value, decay, beta, _row()), convolve(row, taps, _row())

    expected = both()
    with (
        patch.object(gated_delta_net, "has_kernels", lambda _: True),
        patch.object(upstream, "chunk_gated_delta_rule", chunk_gated_delta_rule),
        patch.object(upstream, "causal_conv1d", causal_conv1d),
    ):
        found = both()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert borders == [_row().cu_seqlens_q.tolist()] * 2
