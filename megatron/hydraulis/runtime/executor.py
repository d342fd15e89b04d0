"""Runs one replica's micro-batches through Megatron's own schedules, with upstream's signatures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.packed_rows import PackedRow
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder, schedule_spans

LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
ForwardStep = Callable[[Iterator[PackedBatch], torch.nn.Module], tuple[Tensor, Any]]

AGREEMENT_RTOL = 0.02
"""Relative difference up to which two sums of a loss function count as equal: enough for bf16 and
another order of summation, far below the factor of 2 or more that a mean causes."""

SMALL_WEIGHT_SUM = 0.4
"""Sum to which the check of a loss function scales weights: rounding makes it 0 or 1."""


@dataclass(frozen=True)
class RoleModel:
    """One role's model, its parameters in the arena, and the groups it runs in."""

    model: torch.nn.Module
    groups: ProcessGroupCollection

    @property
    def reports_loss(self) -> bool:
        """True if this rank reports its pipeline's loss: TP rank 0 of the last stage.

        With cp > 1 every cp rank of a replica has a pipeline and the loss of its own tokens.
        """
        is_last = bool(self.groups.pp.rank() == self.groups.pp.size() - 1)
        return is_last and self.groups.tp.rank() == 0


def scale_balancing(
    role: RoleModel | None, batches: Sequence[PackedBatch], device: torch.device
) -> None:
    """Collective: set by what losses that balance experts enter the gradient, which is divided
    later.

    Args:
        role: this rank's; None where idle.
        batches: as for `run_micro_batches`.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    if role is not None and role.reports_loss:
        for batch in batches:
            sums[0] += batch.weights.sum(dtype=torch.float64)
            sums[1] += batch.num_tokens
    dist.all_reduce(sums)
    if role is not None:
        config: Any = role.model.config
        # Of the shape that upstream gives it in models without these losses, since a process has
        # one tensor for all. Without tokens there are no losses either.
        config.moe_grad_scale_func = lambda: sums[:1] / sums[1].clamp(min=1)


def run_micro_batches(
    role: RoleModel,
    batches: Sequence[PackedBatch],
    forward_step: ForwardStep,
    *,
    forward_only: bool = False,
    spans: SpanRecorder = NO_SPANS,
) -> list[dict[str, Tensor]]:
    """Run all micro-batches of this rank's replica, forward and backward, in 1F1B order.

    Each cp rank of a replica runs a pipeline, all with the same number of micro-batches.

    Args:
        batches: this rank's part of the micro-batches in their order; may be empty.

    Returns:
        What the loss function reported for each micro-batch; empty except on the last stage.
    """
    if not batches:
        return []  # upstream's schedules raise without micro-batches
    config: Any = role.model.config
    arguments: dict[str, Any] = {
        "forward_step_func": forward_step,
        "data_iterator": iter(batches),
        "model": role.model,
        "num_microbatches": len(batches),
        "seq_length": batches[0].tokens.size(-1),
        "micro_batch_size": 1,
        "forward_only": forward_only,
        "pg_collection": role.groups,
    }
    schedule = forward_backward_no_pipelining
    if role.groups.pp.size() > 1:
        divisor = role.groups.tp.size() if config.sequence_parallel else 1
        rows = [batch.tokens.size(-1) // divisor for batch in batches]
        arguments["p2p_communicator"] = PlannedCommunicator(role.groups.pp, config, rows)
        schedule = forward_backward_pipelining_without_interleaving
    with schedule_spans(config, spans, stage=role.groups.pp.rank()):
        reports: list[dict[str, Tensor]] = schedule(**arguments)
    return reports


class PlannedCommunicator(P2PCommunicator):
    """Megatron's communicator without negotiation: the plan gives the shape of every message.

    1F1B receives activations, and gradients, in the order of the micro-batches: the k-th receive
    of either kind is micro-batch k.

    Args:
        rows: rows of the hidden states of every micro-batch on this rank (tokens of the pack,
            over tp with sequence parallelism).
    """

    def __init__(
        self, pp_group: dist.ProcessGroup, config: ModelParallelConfig, rows: Sequence[int]
    ) -> None:
        super().__init__(pp_group, config)
        self._shapes = [(count, 1, config.hidden_size) for count in rows]
        self._num_received = {"forward": 0, "backward": 0}

    def _communicate(self, *, recv_prev: bool, recv_next: bool, **others: Any) -> Any:
        if recv_prev or recv_next:
            direction = "forward" if recv_prev else "backward"
            others["tensor_shape"] = self._shapes[self._num_received[direction]]
            self._num_received[direction] += 1
        return super()._communicate(recv_prev=recv_prev, recv_next=recv_next, **others)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are added up: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in a dtype in which its values can be added up."""
    return tensor.to(at_least_fp32(tensor.dtype))


def weighted_losses(losses: Tensor, weights: Tensor) -> Tensor:
    """(tokens,) products; 0 where the weight is 0, also for a loss that is not finite."""
    return losses.where(weights != 0, 0.0) * weights


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Weighted sum of the token losses, so that where a token was packed does not change its part.

    Args:
        loss_mask: (1, tokens) weights, 0 where not trained; upstream's name.
        output_tensor: (1, tokens), loss of every token.

    Returns:
        Σ weight · loss, Σ weight, and both as ``{"lm loss": (2,)}``.
    """
    losses = output_tensor.reshape(-1)
    # Sums in bf16 would round the divisor.
    weights = loss_mask.reshape(-1).to(at_least_fp32(losses.dtype))
    loss = weighted_losses(losses, weights).sum()
    weight_sum = weights.sum()
    return loss, weight_sum, {"lm loss": torch.stack([loss.detach(), weight_sum])}


def packed_seq_params(batch: PackedBatch) -> PackedRow:
    """Upstream's description of a pack; of the whole row where a group shares it.

    ``max_seqlen`` is the longest sequence, not the pack. ``cp_group`` is the micro-batch's group,
    which `ContextAttention` and `follow_rows` read here.

    Raises:
        ConfigurationError: the batch is one rank's part of a row but has no group.
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
        sequence_lengths=batch.sequence_lengths,
        predictions=batch.predictions,
    )


def forward_step_of(
    finish: Callable[[PackedBatch, Any], Any], output_processor: Callable[..., Any] | None = None
) -> ForwardStep:
    """A ``forward_step(data_iterator, model)``: the model on the next row, then ``finish``.

    Args:
        finish: from a row and what the model returns for it to (loss, number of tokens, report).
        output_processor: of the model; its context is the row.
    """

    def forward_step(
        data_iterator: Iterator[PackedBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        batch = next(data_iterator)
        named = {}
        if output_processor is not None:
            named = {"output_processor": output_processor, "output_processor_context": batch}
        output = model(
            batch.tokens,
            batch.position_ids,
            None,
            labels=batch.labels,
            packed_seq_params=packed_seq_params(batch),
            **named,
        )
        return output, partial(finish, batch)

    return forward_step


def make_forward_step(loss: LossFunction = loss_func) -> ForwardStep:
    """A forward step around a loss function of upstream's signature.

    The function is checked on the first micro-batch that has a loss, and on the first whose weights
    are not all 0 or 1; see `check_loss_function`.
    """
    is_checked = {False: False, True: False}  # by whether weights are fractions

    def checked(batch: PackedBatch, output: Tensor) -> tuple[Tensor, int, dict[str, Any]]:
        are_fractions = batch.has_fractional_weights
        if is_checked[are_fractions]:
            total, _, report = loss(batch.weights, output)
        else:
            before = output.detach().clone()
            returned = loss(batch.weights, output)
            is_checked[are_fractions] = check_loss_function(
                loss, batch.weights, before, returned, are_fractions=are_fractions
            )
            total, _, report = returned
        # The schedule adds up whole numbers, by which upstream divides its own gradients; ours are
        # divided by the weights in the report.
        return total, batch.trained_tokens, report

    return forward_step_of(checked)


def check_loss_function(
    loss: LossFunction, weights: Tensor, output: Tensor, returned: Any, *, are_fractions: bool
) -> bool:
    """Check that a loss function returns and reports weighted sums over tokens.

    Gradients are summed over all micro-batches and divided by all weights once. A mean, or a report
    of something else, would silently make the update depend on how sequences were packed. Weights
    of 0 and 1 may be counted as whole numbers, as upstream's loss functions do; others may not.

    Args:
        weights: (1, tokens) of a micro-batch.
        output: of the model, usually (1, tokens).
        are_fractions: whether one of the weights is neither 0 nor 1.

    Returns:
        False where the micro-batch proves nothing: its loss is zero or not finite.

    Raises:
        ConfigurationError: what is returned is not (sum, weights, report), the report's first entry
            is not (sum, weights), twice the tokens do not give twice the sums, or sums do not
            follow weights that are fractions.
    """
    total, weight_sum = _sums(returned)
    if total == 0.0 or not math.isfinite(total):
        return False
    if output.shape[:2] == weights.shape:
        with torch.no_grad():
            twice = loss(torch.cat([weights] * 2, dim=1), torch.cat([output] * 2, dim=1))
        found = _sums(twice)
        if not _agree(found, (2 * total, 2 * weight_sum)):
            raise ConfigurationError(
                f"the loss function gives ({total:g}, {weight_sum:g}) for a micro-batch but "
                f"({found[0]:g}, {found[1]:g}) for the same tokens twice; return the sum over "
                "tokens, not their mean, and the sum of their weights"
            )
    if are_fractions:
        factor = SMALL_WEIGHT_SUM / float(weights.sum())
        with torch.no_grad():
            found = _sums(loss(weights * factor, output))
        if not _agree(found, (factor * total, factor * weight_sum)):
            raise ConfigurationError(
                f"the loss function gives ({total:g}, {weight_sum:g}) for a micro-batch but "
                f"({found[0]:g}, {found[1]:g}) for its weights times {factor:g}; return the sum of "
                "weight times loss, and the sum of the weights as it is, neither rounded nor as a "
                "number of tokens"
            )
    return True


def _sums(returned: Any) -> tuple[float, float]:
    """Returns the two sums of a loss function, after a check that its report agrees."""
    if not (isinstance(returned, tuple) and len(returned) == 3):
        raise ConfigurationError(
            "the loss function must return three values: the weighted sum of the token losses, the "
            "sum of the weights, and a report {'lm loss': tensor of both}"
        )
    total, weight_sum = (
        float(value.detach() if isinstance(value, torch.Tensor) else value)
        for value in returned[:2]
    )
    report = returned[2]
    name, entry = next(iter(report.items()), ("none", torch.empty(0)))
    reported = entry.reshape(-1).tolist()
    if len(reported) != 2:
        raise ConfigurationError(
            f"the loss function's report '{name}' holds {len(reported)} numbers; its first entry "
            "must be a tensor of 2: the weighted sum of the token losses and the sum of the weights"
        )
    if math.isfinite(total) and not _agree((reported[0], reported[1]), (total, weight_sum)):
        raise ConfigurationError(
            f"the loss function returns ({total:g}, {weight_sum:g}) but reports '{name}' as "
            f"({reported[0]:g}, {reported[1]:g}); both must be the weighted sum of the token "
            "losses and the sum of the weights"
        )
    return total, weight_sum


def _agree(found: tuple[float, float], wanted: tuple[float, float]) -> bool:
    return all(
        math.isclose(value, other, rel_tol=AGREEMENT_RTOL)
        for value, other in zip(found, wanted, strict=True)
    )
