"""Runs one replica's micro-batches through Megatron's own schedules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.runtime.forward_step import ForwardStep
from megatron.hydraulis.runtime.pipeline_communicator import PlannedCommunicator
from megatron.hydraulis.runtime.schedule_spans import schedule_spans
from megatron.hydraulis.runtime.spans import NO_SPANS, SpanRecorder


@dataclass(frozen=True)
class RoleModel:
    """One role's model, bound, and the groups it runs in."""

    model: torch.nn.Module
    groups: ProcessGroupCollection

    @property
    def reports_loss(self) -> bool:
        """Whether this rank speaks for its pipeline: TP rank 0 of the last stage.

        Of a replica with cp > 1 every cp rank has a pipeline, and the loss of its own tokens.
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
    """All micro-batches of this rank's replica, forward and backward, in 1F1B order.

    The cp ranks of a replica run a pipeline each, all of them the same number of micro-batches.

    Args:
        role: this rank's model and groups.
        batches: this rank's part of the micro-batches in their order; none is an ordinary case.
        forward_step: upstream's signature.
        forward_only: evaluation.
        spans: is told of every forward, backward and wait for a neighbour.

    Returns:
        What the loss function reported for each micro-batch; empty but on the last stage.
    """
    if not batches:
        return []  # a schedule without micro-batches raises
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
