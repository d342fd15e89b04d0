"""Losses of tokens: what a user's loss sees of a row, and how it becomes a sum.

A user's loss gives one number per token; its weight, the sum and the division are the engine's. So
no loss can depend on how sequences were packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch, token_places
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.executor import (
    ForwardStep,
    at_least_fp32,
    forward_step_of,
    weighted_losses,
    widened,
)
from megatron.hydraulis.runtime.token_log_probs import TokenOutputs, token_outputs

TokenLoss = Callable[[Tensor, Any, Mapping[str, Tensor], "Segments"], Tensor]
"""``loss(log_probs, entropy, inputs, segments)``: (tokens,) losses of (tokens,) log-probabilities
and entropies; these are None unless requested. ``inputs`` are the sequences' tensors, (tokens,
...). All are about predicting the same tokens: those of this rank's part of a row, without padding
and without the first of each sequence, which nothing predicts. Possibly 0 tokens."""

OUTPUTS = ("log_probs", "entropy")
"""What a forward pass can give of each token."""


class Segments:
    """The sequences of a row, of which this rank may hold a part.

    Args:
        index: (tokens,) number of each token's sequence in the row.
        num_sequences: of the row.
        group: ranks that hold the other parts of the row; None if there are none.
    """

    def __init__(
        self, index: Tensor, num_sequences: int, group: dist.ProcessGroup | None = None
    ) -> None:
        self.index = index
        self.num_sequences = num_sequences
        self._group = group

    def sum(self, values: Tensor) -> Tensor:
        """(tokens,): at each token the sum of (tokens,) values over its whole sequence.

        It has a gradient. Sums are in fp32, or fp64 for fp64; those of a mask are counts.
        Collective over the ranks that share the row.

        Raises ConfigurationError for values of another shape.
        """
        if values.shape != self.index.shape:
            raise ConfigurationError(
                f"segments.sum takes one value per token, here {len(self.index)} in shape "
                f"{tuple(self.index.shape)}, but got shape {tuple(values.shape)}; give (tokens,)"
            )
        summed: Tensor = _SegmentSum.apply(
            widened(values), self.index, self.num_sequences, self._group
        )
        return summed


class _SegmentSum(torch.autograd.Function):
    """y[t] = Σ x[u] over u in t's sequence; the operation is its own transpose."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, num_sequences: int, group: Any) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_sequences, ctx.group = num_sequences, group
        return _segment_sum(values, index, num_sequences, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        return _segment_sum(gradients[0], index, ctx.num_sequences, ctx.group), None, None, None


def _segment_sum(values: Tensor, index: Tensor, num_sequences: int, group: Any) -> Tensor:
    sums = values.new_zeros(num_sequences).index_add_(0, index, values)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums[index]


def loss_forward_step(
    loss: TokenLoss, *, divisor: float = 1.0, entropy: bool = True, temperature: float = 1.0
) -> ForwardStep:
    """A forward step whose micro-batches give Σ weight · loss ÷ divisor.

    Without ``entropy`` the loss gets None for it. Logits are divided by the temperature.
    """
    finish = partial(_weighted_sum, loss, divisor)
    outputs = token_outputs(entropy=entropy, temperature=temperature)
    return forward_step_of(finish, output_processor=outputs)


def output_forward_step(*, entropy: bool, temperature: float = 1.0) -> ForwardStep:
    """A forward step whose micro-batches report `OUTPUTS`: (tokens,) each, as a loss sees them.

    Entropies are computed and reported only if asked for. Logits are divided by the temperature.
    """
    outputs = token_outputs(entropy=entropy, temperature=temperature)
    return forward_step_of(_report_outputs, output_processor=outputs)


def check_token_loss(
    loss: TokenLoss,
    inputs: Mapping[str, Tensor],
    num_tokens: int,
    device: torch.device,
    *,
    entropy: bool,
) -> None:
    """Call a loss with zeros for a sequence and for no token, without a model and other ranks.

    Args:
        inputs: of one sequence, for ``num_tokens`` tokens, on the device.
        entropy: whether it gets entropies.

    Raises:
        ConfigurationError: it does not return a tensor of one loss per token, or one that depends
            on neither log-probabilities nor entropies.
    """
    losses = _call_with_zeros(loss, inputs, num_tokens, device, entropy)
    if not losses.requires_grad:
        raise ConfigurationError(
            "a loss must depend on log_probs or entropy but has no gradient; compute it from them, "
            "without detach()"
        )
    # A context-parallel rank may hold no token of a short sequence.
    none = {name: value[:0] for name, value in inputs.items()}
    _call_with_zeros(loss, none, 0, device, entropy)


def _call_with_zeros(
    loss: TokenLoss,
    inputs: Mapping[str, Tensor],
    num_tokens: int,
    device: torch.device,
    entropy: bool,
) -> Tensor:
    log_probs, zeros = torch.zeros(2, num_tokens, device=device, requires_grad=True).unbind()
    index = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    try:
        return _losses(loss, log_probs, zeros if entropy else None, inputs, Segments(index, 1))
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"a loss is called with {num_tokens} tokens before any rank runs the model, but raised "
            f"{type(error).__name__}: {error}; correct it"
        ) from error


class _Inputs(dict[str, Tensor]):
    """The inputs of a loss, which name the one that is missing."""

    def __missing__(self, name: str) -> Tensor:
        raise ConfigurationError(
            f"the loss reads the input {name!r} but the sequences have "
            f"{', '.join(map(repr, self)) or 'none'}; give it to every sequence"
        )


def _losses(
    loss: TokenLoss,
    log_probs: Tensor,
    entropy: Tensor | None,
    inputs: Mapping[str, Tensor],
    segments: Segments,
) -> Tensor:
    """What the loss returns, if that is one loss per token."""
    losses = loss(log_probs, entropy, _Inputs(inputs), segments)
    if not isinstance(losses, Tensor) or losses.shape != log_probs.shape:
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise ConfigurationError(
            f"a loss returns one number per token, here {log_probs.numel()} in shape "
            f"{tuple(log_probs.shape)}, but returned {found}; return the loss of each token: the "
            "engine weighs and sums them, and divides once"
        )
    if losses.is_complex() or losses.device != log_probs.device:
        raise ConfigurationError(
            f"a loss returns real numbers on {log_probs.device} but returned {losses.dtype} on "
            f"{losses.device}; convert them"
        )
    return losses


def _places(batch: PackedBatch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places in the row of tokens that are not padding, and numbers of their sequences."""
    places, numbers = (torch.from_numpy(each).to(device) for each in token_places(batch)[:2])
    return places, numbers


def _weighted_sum(
    loss: TokenLoss, divisor: float, batch: PackedBatch, outputs: TokenOutputs
) -> tuple[Tensor, int, dict[str, Tensor]]:
    places, numbers = _places(batch, outputs.log_probs.device)
    log_probs, weights = (each.view(-1)[places] for each in (outputs.log_probs, batch.weights))
    entropy = None if outputs.entropy is None else outputs.entropy.view(-1)[places]
    for each in (log_probs, entropy):
        if each is not None and each.requires_grad:
            each.register_hook(partial(_without_nan, weights == 0))
    segments = Segments(numbers, len(batch.sequence_lengths), batch.context_group)
    losses = _losses(loss, log_probs, entropy, batch.inputs, segments)
    weights = weights.to(at_least_fp32(losses.dtype))
    total = weighted_losses(losses, weights).sum()
    report = torch.stack([total.detach(), weights.sum()])
    return total / divisor, 0, {"lm loss": report}


def _without_nan(untrained: Tensor, gradient: Tensor) -> Tensor:
    """0 in place of 0 · ∞, such as that of a ratio that overflows at an untrained token."""
    return gradient.masked_fill(untrained & gradient.isnan(), 0.0)


def _report_outputs(
    batch: PackedBatch, outputs: TokenOutputs
) -> tuple[Tensor, int, dict[str, Tensor]]:
    places, _ = _places(batch, outputs.log_probs.device)
    rows = dict(zip(OUTPUTS, (outputs.log_probs, outputs.entropy), strict=True))
    found = {name: row.view(-1)[places] for name, row in rows.items() if row is not None}
    return outputs.log_probs.new_zeros(()), 0, found
