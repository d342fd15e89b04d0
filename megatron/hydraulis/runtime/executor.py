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
from megatron.hydraulis.runtime.attention import PackedRow
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder, schedule_spans

LossFunction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
ForwardStep = Callable[[Iterator[PackedBatch], torch.nn.Module], tuple[Tensor, Any]]

AGREEMENT_RTOL = 0.02
"""Relative difference up to which two sums of a loss function count as equal: enough for bf16 and
another order of summation, far below the factor of 2 or more that a mean causes."""


@dataclass(frozen=True)
class RoleModel:
    """One role's model, its parameters in the arena, and the groups it runs in."""

    model: torch.nn.Module
    groups: ProcessGroupCollection

    @property
    def reports_loss(self) -> bool:
        """Whether this rank reports its pipeline's loss: TP rank 0 of the last stage.

        With cp > 1 every cp rank of a replica has a pipeline and the loss of its own tokens.
        """
        is_last = bool(self.groups.pp.rank() == self.groups.pp.size() - 1)
        return is_last and self.groups.tp.rank() == 0


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
        role: this rank's model and groups.
        batches: this rank's part of the micro-batches in their order; may be empty.
        forward_step: upstream's signature.
        forward_only: evaluation.
        spans: records every forward, backward and wait for a neighbour.

    Returns:
        What the loss function reported for each micro-batch; empty except on the last stage.
    """
    if not batches:
        return []  # upstream's schedules raise without micro-batches
    config: Any = role.model.config
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": iter(batches),
        "model": role.model,
        "num_microbatches": len(batches),
        "seq_length": batches[0].tokens.size(-1),
        "micro_batch_size": 1,
        "forward_only": forward_only,
        "pg_collection": role.groups,
    }
    with schedule_spans(config, spans, stage=role.groups.pp.rank()):
        if role.groups.pp.size() == 1:
            reports: list[dict[str, Tensor]] = forward_backward_no_pipelining(**arguments)
            return reports
        divisor = role.groups.tp.size() if config.sequence_parallel else 1
        rows = [batch.tokens.size(-1) // divisor for batch in batches]
        communicator = PlannedCommunicator(role.groups.pp, config, rows)
        reports = forward_backward_pipelining_without_interleaving(
            p2p_communicator=communicator, **arguments
        )
        return reports


class PlannedCommunicator(P2PCommunicator):
    """Megatron's communicator without negotiation: the plan gives the shape of every message.

    1F1B receives activations, and gradients, in the order of the micro-batches: the k-th receive
    of either kind is micro-batch k.

    Args:
        pp_group: this rank's pipeline.
        config: the stage's configuration.
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


def loss_func(loss_mask: Tensor, output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum of the token losses, so that a token's weight does not depend on where it was packed.

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
    )


def make_forward_step(loss: LossFunction = loss_func) -> ForwardStep:
    """A ``forward_step(data_iterator, model)`` around a loss function of upstream's signature.

    The function is checked on the first micro-batch that has a loss, see `check_loss_function`.
    """
    is_checked = False

    def checked(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        nonlocal is_checked
        if is_checked:
            return loss(loss_mask, output)
        before = output.detach().clone()
        returned = loss(loss_mask, output)
        is_checked = check_loss_function(loss, loss_mask, before, returned)
        return returned

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


def check_loss_function(
    loss: LossFunction, loss_mask: Tensor, output: Tensor, returned: Any
) -> bool:
    """Check that a loss function returns and reports sums over tokens.

    Gradients are summed over all micro-batches and divided by all tokens once. A mean, or a report
    of something else, would silently make the update depend on how sequences were packed.

    Args:
        loss: the function.
        loss_mask: (1, tokens) of a micro-batch.
        output: of the model, usually (1, tokens).
        returned: what the function gave for them.

    Returns:
        False where the micro-batch proves nothing: its loss is zero or not finite.

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
    """What a loss function returned, after a check that its report agrees."""
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
