"""Gated delta nets over packed rows: Megatron's layer, whose state is 0 before every sequence.

Upstream's forward needs kernels of CUDA, waits for the device to read the borders of a row, and
exchanges heads in the cp group that the model was built with. Here the parameters, projections and
norms are upstream's; the convolution and the recurrence, which stop at borders, are fla's kernels
on CUDA and plain torch elsewhere, in fp64 for an fp64 model.

A head's state S, (key size, value size), decays by exp(g) and learns by beta how far its value for
a key is from the token's:

    S_t = exp(g_t) S_{t-1} + k_t u_t'        u_t = beta_t (v_t - exp(g_t) S_{t-1}' k_t)
    output_t = S_t' q_t

Within a chunk that follows the state S, with G_t the sum of g up to t, this is linear in u:

    u_t + Σ_{i<t} beta_t exp(G_t - G_i) (k_t·k_i) u_i = beta_t (v_t - exp(G_t) S' k_t)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.gated_delta_net import common as kernels
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.executor import widened
from megatron.hydraulis.runtime.packed_rows import (
    HeadExchange,
    borders_of,
    context_size_of,
    segment_lengths,
    shared_row,
)

CHUNK_TOKENS = 64
"""Tokens whose updates of the state are solved together."""
_NORM_EPSILON = 1e-6
"""Of the norms of queries and keys, as in fla."""


class PackedGatedDeltaNet(GatedDeltaNet):
    """Upstream's layer, with its parameters, for packed rows."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        # Upstream's attribute, which its Mamba layers have.
        self.in_proj.weight.partition_sizes = self.in_proj_split_sections
        self.conv1d.weight.partition_sizes = self.in_proj_split_sections[:3]

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = gated_delta_rule  # upstream's is None without fla

    def reset_parameters(self) -> None:
        """Upstream's values, by operations that can be repeated on a part of a parameter."""
        if self.config.perform_initialization:
            with get_cuda_rng_tracker().fork(), torch.no_grad():
                self.dt_bias.fill_(1.0)
                self.A_log.uniform_(*self.A_init_range).log_()

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """The layer's output, (T, 1, hidden size), or this TP rank's part of it, and its bias.

        Ranks that share the row exchange parts of it for all of it for a part of the heads.
        """
        size, rank = context_size_of(packed_seq_params), 0
        mixed = self.in_proj(hidden_states)[0].squeeze(1)
        parts = mixed.split(self.in_proj_split_sections, dim=1)
        row = None
        if size > 1:
            row, rank = shared_row(packed_seq_params, mixed), packed_seq_params.cp_group.rank()
            shares = torch.cat([part.unflatten(1, (size, -1)) for part in parts], dim=2)
            mixed = HeadExchange.apply(shares, row, True)
            parts = mixed.split([part.size(1) // size for part in parts], dim=1)
        query, key, value, gate, beta, alpha = parts
        channels = self.conv1d.weight.squeeze(1).split(self.in_proj_split_sections[:3])
        taps = torch.cat([each.chunk(size)[rank] for each in channels])
        widths = [query.size(1), key.size(1), value.size(1)]
        mixed = convolve(torch.cat([query, key, value], dim=1), taps, packed_seq_params)
        query, key, value = (
            each.unflatten(1, (-1, head))
            for each, head in zip(
                mixed.split(widths, dim=1),
                (self.key_head_dim, self.key_head_dim, self.value_head_dim),
                strict=True,
            )
        )
        per_key = self.num_value_heads // self.num_key_heads
        query, key = (_normed(each).repeat_interleave(per_key, dim=1) for each in (query, key))
        bias, rate = (each.chunk(size)[rank] for each in (self.dt_bias, self.A_log))
        decay = -widened(rate).exp() * F.softplus(widened(alpha) + widened(bias))
        output = delta(query, key, value, decay, beta.sigmoid(), packed_seq_params)
        gated = widened(self.out_norm(output)) * self.act_fn(widened(gate.view_as(output)))
        found = gated.to(output.dtype).flatten(1)
        if row is not None:
            found = HeadExchange.apply(found, row, False).flatten(1)
        return self.out_proj(found.unsqueeze(1))


def check_kernels(*, deterministic: bool) -> None:
    """Raise ConfigurationError where a gated delta net lacks kernels on CUDA, or such as add in a
    fixed order."""
    if torch.cuda.is_available() and deterministic:
        raise ConfigurationError(
            "--deterministic-mode repeats a run bit by bit but fla's kernels, by which gated delta "
            "nets run on CUDA, do not; remove it"
        )
    if torch.cuda.is_available() and kernels.chunk_gated_delta_rule is None:
        raise ConfigurationError(
            "gated delta nets run on CUDA by the kernels of flash-linear-attention but fla is not "
            "installed; pip install 'flash-linear-attention[cuda]'"
        )


def has_kernels(tensor: Tensor) -> bool:
    """Whether fla's kernels compute with a tensor, and not plain torch."""
    return tensor.is_cuda


def _normed(heads: Tensor) -> Tensor:
    wide = widened(heads)
    scale = (wide.square().sum(-1, keepdim=True) + _NORM_EPSILON).rsqrt()
    return (wide * scale).to(heads.dtype)


def convolve(row: Tensor, taps: Tensor, packed_seq_params: PackedSeqParams) -> Tensor:
    """SiLU of a causal convolution of each channel, in which no sequence sees another.

    Args:
        row: (R, channels).
        taps: (channels, width), the last for a token itself.
    """
    if has_kernels(row):
        found, _ = kernels.causal_conv1d(
            x=row.unsqueeze(0),
            weight=taps,
            bias=None,
            activation="silu",
            cu_seqlens=borders_of(packed_seq_params),
        )
        return found.squeeze(0)
    width = taps.size(1)
    found = [
        F.conv1d(F.pad(each.t(), (width - 1, 0)), taps.unsqueeze(1), groups=len(taps)).t()
        for each in row.split(segment_lengths(packed_seq_params))
    ]
    return F.silu(torch.cat(found))


def delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    packed_seq_params: PackedSeqParams,
) -> Tensor:
    """(R, heads, value size) outputs of a row; arguments as for `gated_delta_rule`."""
    if not has_kernels(query):
        return gated_delta_rule(query, key, value, decay, beta, segment_lengths(packed_seq_params))
    found, _ = kernels.chunk_gated_delta_rule(
        *(each.unsqueeze(0) for each in (query, key, value)),
        g=decay.unsqueeze(0),
        beta=beta.unsqueeze(0),
        use_qk_l2norm_in_kernel=False,
        cu_seqlens=borders_of(packed_seq_params),
    )
    return found.squeeze(0)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    lengths: Sequence[int],
) -> Tensor:
    """Outputs of the recurrence, sequence by sequence, in fp32 or fp64.

    Args:
        query: (R, heads, key size) of a row, normed.
        key: likewise.
        value: (R, heads, value size).
        decay: (R, heads), g of the module's docstring, at most 0.
        beta: (R, heads) from 0 to 1.
        lengths: of the row's segments, in tokens.
    """
    row = [widened(each) for each in (query * query.size(-1) ** -0.5, key, value, decay, beta)]
    outputs = []
    for sequence in zip(*(each.split(list(lengths)) for each in row), strict=True):
        state = row[0].new_zeros(query.size(1), query.size(2), value.size(2))
        for chunk in zip(*(each.split(CHUNK_TOKENS) for each in sequence), strict=True):
            output, state = _chunk(chunk, state)
            outputs.append(output)
    return torch.cat(outputs).to(value.dtype)


def _chunk(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of a chunk's tokens after a state, and the state after them."""
    *vectors, decay, beta = inputs
    query, key, value = (each.transpose(0, 1) for each in vectors)
    total = decay.t().cumsum(1)  # G, (heads, tokens)
    left = total.unsqueeze(2).exp()
    # Of what came before: 0 above the diagonal also before exp, which could overflow there.
    kept = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
    beta = beta.t().unsqueeze(2)
    updates = torch.linalg.solve_triangular(
        beta * (key @ key.mT) * kept,
        beta * (value - left * (key @ state)),
        upper=False,
        unitriangular=True,
    )
    output = left * (query @ state) + ((query @ key.mT) * kept) @ updates
    remaining = (total[:, -1:] - total).exp().unsqueeze(2)
    state = left[:, -1:] * state + (key * remaining).mT @ updates
    return output.transpose(0, 1), state
