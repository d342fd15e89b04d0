"""The result of an iteration, and how its parts are timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.hydraulis.runtime.memory import OutOfMemory
from megatron.hydraulis.runtime.process_groups import to_device

Phase = Callable[[str], AbstractContextManager[object]]
"""``phase(name)`` is entered around every part of an iteration, by all ranks, including idle ones:
'gather' (skipped where the parameters have been gathered or are on their way), 'forward-backward',
'scatter', 'optimizer' (skipped where there is nothing to update). With overlap 'gather' is only the
beginning of the gather, and 'scatter' the part of the scatter after the last backward.
"""


def untimed(name: str) -> AbstractContextManager[None]:
    """A `Phase` that measures nothing."""
    return nullcontext()


@dataclass(frozen=True)
class LossTotal:
    """Loss of a global batch, equal on every rank."""

    loss_sum: float
    """Σ weight · loss over tokens."""
    weight_sum: float
    """Σ weight, by which gradients are divided."""
    trained_tokens: int
    """Tokens with a weight above 0."""

    @property
    def mean(self) -> float:
        """Loss per unit of weight; 0 where nothing was trained."""
        return self.loss_sum / self.weight_sum if self.weight_sum else 0.0

    @property
    def is_finite(self) -> bool:
        """True if every micro-batch's loss was finite."""
        return math.isfinite(self.loss_sum) and math.isfinite(self.weight_sum)


@dataclass(frozen=True, kw_only=True)
class StepVote:
    """Values that all ranks sum after their backward passes, so that all decide the same."""

    loss: LossTotal
    next_strategy: int | None
    """Index in the pool of the next iteration's strategy; None where rank 0 does not know it."""
    num_ranks_without_memory: int
    squared_norm: float
    """Squared norm of the gradients before any division; 0 where no update follows."""
    predictions: Tensor
    """(layers, 2) Σ weight · loss and Σ weight of each layer of multi-token prediction."""
    routing: Tensor
    """Input of `RouterState.accept`; empty without experts and where no update follows."""

    @staticmethod
    def to_tensor(
        losses: Tensor | None,
        squared_norm: Tensor | None,
        *,
        trained_tokens: int,
        next_strategy: int | None,
        ran_out_of_memory: bool,
        predictions: Tensor,
        device: torch.device,
    ) -> Tensor:
        """This rank's summand.

        Args:
            losses: shape (num_micro_batches, 2), sums of weighted losses and of weights, on the
                device; None on ranks that do not report them.
            squared_norm: shape (1,), of this rank's gradients; None where no update follows.
            trained_tokens: of the micro-batches of ``losses``.
            next_strategy: on rank 0; None on the others.
            ran_out_of_memory: whether this rank has abandoned its micro-batches.
            predictions: this rank's part of `predictions`, on the device.
        """
        number = 0 if next_strategy is None else 1 + next_strategy
        values = [0.0, 0.0, trained_tokens, number, ran_out_of_memory, 0.0]
        vote = torch.tensor(values, dtype=torch.float64)
        vote = to_device(vote, device)
        if losses is not None:
            vote[:2] += losses.sum(dim=0)
        if squared_norm is not None:
            vote[5:] = squared_norm
        return torch.cat([vote, predictions.flatten()])

    @classmethod
    def from_host(cls, total: Tensor, num_predictions: int = 0) -> StepVote:
        """The vote in the sum over all ranks, which the figures of routing follow.

        num_predictions: layers of multi-token prediction.
        """
        routing = 6 + 2 * num_predictions
        loss_sum, weight_sum, tokens, number, num_without_memory, squared_norm = total[:6].tolist()
        return cls(
            loss=LossTotal(loss_sum, weight_sum, round(tokens)),
            next_strategy=round(number) - 1 if number else None,
            num_ranks_without_memory=round(num_without_memory),
            squared_norm=squared_norm,
            predictions=total[6:routing].view(-1, 2),
            routing=total[routing:],
        )


@dataclass(frozen=True, kw_only=True)
class RoutingFigures:
    """Routing of an update's tokens to experts; the losses are without coefficients."""

    worst_load: float
    """Tokens of the busiest expert of a layer over the mean of its experts; of the worst layer."""
    balancing_loss: float | None
    """Mean over tokens and layers, 1 where the load is even; None without such a loss."""
    z_loss: float | None
    """Mean square of the log-sum-exp of a router's logits; None without such a loss."""
    bias_range: tuple[float, float] | None
    """Smallest and largest bias of a router, after the update; None without biases."""


@dataclass(frozen=True)
class StepOutcome:
    """The result of one iteration."""

    loss: LossTotal
    gradient_norm: float | None
    """The norm after division by the weights, before clipping; None where nothing was trained."""
    updated: bool
    bad_micro_batches: tuple[int, ...]
    """Micro-batches of this rank's replica whose loss, on this rank's part of them, is not finite
    (last stage only)."""
    regroup_bytes: int = 0
    """Bytes that this rank receives from others and sends to them in gathers and scatters of all
    batches."""
    skipped_bytes: int = 0
    """Bytes that gathers did not exchange, as arenas still held frozen parameters."""
    gather_wait_s: float = 0.0
    """Time for which this rank's compute waited for parameters."""
    scatter_wait_s: float = 0.0
    """Time for which it waited for gradients."""
    column_bytes: int = 0
    """Bytes that this rank receives and sends where cp ranks share weights, for all micro-batches:
    gathers of weights and scatters of gradients."""
    column_wait_s: float = 0.0
    """Time for which its compute waited for them."""
    num_ranks_without_memory: int = 0
    """Ranks that ran out of memory; equal on every rank. If there are any, nothing is updated."""
    out_of_memory: OutOfMemory | None = None
    """This rank's own lack of memory, if it is one of them."""
    routing: RoutingFigures | None = None
    """None without experts, and where nothing was updated."""
    prediction_losses: tuple[float, ...] = ()
    """Loss per unit of weight of each layer of multi-token prediction; 0 where it predicts none."""
