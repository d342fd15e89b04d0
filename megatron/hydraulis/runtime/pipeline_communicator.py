"""Pipeline communication in which the plan tells every shape: neighbours never negotiate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator


class PlannedCommunicator(P2PCommunicator):
    """Megatron's communicator for micro-batches of known, unequal lengths.

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
