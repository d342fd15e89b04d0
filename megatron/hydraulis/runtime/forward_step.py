"""One micro-batch through the model, with upstream's signatures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.packed_attention import PackedRow

AGREEMENT_RTOL = 0.02
"""Sums of a loss function that differ by no more are equal: room for bf16 and another order, far
from the factor of 2 or more that a mean makes."""

LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
ForwardStep = Callable[[Iterator[PackedBatch], torch.nn.Module], tuple[Tensor, Any]]


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the token losses: what a token weighs must not depend on where it was packed.

    Args:
        loss_mask: (1, tokens), 1 where trained.
        output_tensor: (1, tokens), loss of every token.

    Returns:
        Sum of losses, number of trained tokens, and both as ``{"lm loss": (2,)}``.
    """
    losses = output_tensor.reshape(-1)
    mask = loss_mask.reshape(-1).to(losses.dtype)
    loss = torch.sum(losses * mask)
    num_tokens = mask.sum().to(torch.int)
    # The schedule divides the returned loss in place: report a copy.
    report = torch.stack([loss.detach().clone(), num_tokens.to(loss.dtype)])
    return loss, num_tokens, {"lm loss": report}


def packed_seq_params(batch: PackedBatch) -> PackedRow:
    """Upstream's description of a pack, of the whole row where a group shares it.

    ``max_seqlen`` is the longest sequence, not the pack. The context-parallel group is the
    micro-batch's own: `ContextAttention` and `follow_rows` read it here.

    Raises:
        ConfigurationError: the batch is one rank's part of a row but was not told of its group.
    """
    if batch.context_size > 1 and batch.context_group is None:
        raise ConfigurationError(
            f"a micro-batch is the part of rank {batch.context_rank} of {batch.context_size} but "
            "has no context-parallel group; give it one with PackedBatch.in_group"
        )
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=batch.cu_seqlens,
        cu_seqlens_kv=batch.cu_seqlens,
        cu_seqlens_q_padded=batch.cu_seqlens_padded,
        cu_seqlens_kv_padded=batch.cu_seqlens_padded,
        max_seqlen_q=batch.max_seqlen,
        max_seqlen_kv=batch.max_seqlen,
        local_cp_size=batch.context_size,
        cp_group=batch.context_group,
        positions=batch.position_ids.view(-1),
        segment_lengths=batch.segment_lengths,
    )


def make_forward_step(loss: LossFunction = loss_func) -> ForwardStep:
    """A ``forward_step(data_iterator, model)`` around a loss function of upstream's signature.

    The function is checked on the first micro-batch that has a loss, see `check_loss_function`.
    """
    checked = _CheckedOnce(loss)

    def forward_step(
        data_iterator: Iterator[PackedBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        batch = next(data_iterator)
        output = model(
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            packed_seq_params=packed_seq_params(batch),
        )
        return output, partial(checked, batch.loss_mask)

    return forward_step


class _CheckedOnce:
    """A loss function that is checked until a micro-batch with a loss has passed."""

    def __init__(self, loss: LossFunction) -> None:
        self._loss = loss
        self._is_checked = False

    def __call__(self, loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        if self._is_checked:
            return self._loss(loss_mask, output)
        before = output.detach().clone()
        returned = self._loss(loss_mask, output)
        self._is_checked = check_loss_function(self._loss, loss_mask, before, returned)
        return returned


def check_loss_function(
    loss: LossFunction, loss_mask: Tensor, output: Tensor, returned: Any
) -> bool:
    """Whether a loss function adds up: over tokens, and in what it reports.

    Gradients are summed over all micro-batches and divided by all tokens once. A mean, or a report
    of something else, would make the update depend on how sequences were packed, and nothing would
    show it.

    Args:
        loss: the function.
        loss_mask: (1, tokens) of a micro-batch.
        output: of the model, usually (1, tokens).
        returned: what the function gave for them.

    Returns:
        False where the micro-batch shows nothing: its loss is zero or not finite.

    Raises:
        ConfigurationError: what is returned is not (sum, tokens, report), the report's first entry
            is not (sum, tokens), or twice the tokens do not give twice the sum and the count.
    """
    total, num_tokens = _sum_and_tokens(returned)
    if total == 0.0 or not math.isfinite(total):
        return False
    if output.shape[:2] == loss_mask.shape:
        with torch.no_grad():
            twice = loss(torch.cat([loss_mask] * 2, dim=1), torch.cat([output] * 2, dim=1))
        found = _sum_and_tokens(twice)
        if not _agree(found, (2 * total, 2 * num_tokens)):
            raise ConfigurationError(
                f"the loss function gives ({total:g}, {num_tokens:g}) for a micro-batch but "
                f"({found[0]:g}, {found[1]:g}) for the same tokens twice; return the sum over "
                "tokens, not their mean, and the number of tokens"
            )
    return True


def _sum_and_tokens(returned: Any) -> tuple[float, float]:
    """What a loss function returned, its report found to say the same."""
    if not (isinstance(returned, tuple) and len(returned) == 3):
        raise ConfigurationError(
            "the loss function must return three values: the sum of the token losses, the number "
            "of tokens, and a report {'lm loss': tensor of both}"
        )
    total, num_tokens = (
        float(value.detach() if isinstance(value, torch.Tensor) else value)
        for value in returned[:2]
    )
    report = returned[2]
    name, entry = next(iter(report.items()), ("none", torch.empty(0)))
    reported = entry.reshape(-1).tolist()
    if len(reported) != 2:
        raise ConfigurationError(
            f"the loss function's report '{name}' holds {len(reported)} numbers; its first entry "
            "must be a tensor of 2: the sum of the token losses and the number of tokens"
        )
    if math.isfinite(total) and not _agree((reported[0], reported[1]), (total, num_tokens)):
        raise ConfigurationError(
            f"the loss function returns ({total:g}, {num_tokens:g}) but reports '{name}' as "
            f"({reported[0]:g}, {reported[1]:g}); both must be the sum of the token losses and the "
            "number of tokens"
        )
    return total, num_tokens


def _agree(found: tuple[float, float], wanted: tuple[float, float]) -> bool:
    return all(
        math.isclose(value, other, rel_tol=AGREEMENT_RTOL)
        for value, other in zip(found, wanted, strict=True)
    )
