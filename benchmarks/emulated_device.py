"""An emulated device: every forward and backward takes the time that a cost profile gives it.

Planning, data, process groups, regrouping, Megatron's schedules and the messages between ranks are
real. Only the tensors are tiny: a micro-batch runs as the beginning of its row, and the rank sleeps
until the modelled time of the full micro-batch is over. Many ranks can thus share a few cores, and
the wall-clock gain of a strategy can be measured without devices.

Differences from a real device: losses and gradients are those of the few tokens that run.
Regrouping and update take the time of tiny shards, not that of the cost profile. A wait for
parameters inside a forward is part of its modelled time, and gradients are ready soon after a
modelled backward begins, so more of regrouping overlaps with compute.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, Variable

from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.executor import ForwardStep
from megatron.hydraulis.strategy import Scheme

MS_PER_S = 1000.0


@dataclass(frozen=True, kw_only=True, eq=False)
class EmulatedBatch(PackedBatch):
    """The beginning of a micro-batch, and the time that the full one takes on a stage."""

    lengths: tuple[int, ...]
    """Tokens of the sequences of the full micro-batch, in their order, without padding."""
    forward_s: float
    backward_s: float


def scaled(profile: ProfileCostModel, factor: float) -> ProfileCostModel:
    """The same limits, with every time multiplied by a factor, for any model.

    Raises ConfigurationError for a factor that is not positive and finite.
    """
    if not 0.0 < factor < math.inf:
        raise ConfigurationError(
            f"cost profile: times are scaled by a positive number but the factor is {factor}; "
            f"give 1 for the times as they were measured"
        )
    rows = (
        replace(
            row,
            coefficients=row.coefficients.scaled(a=factor, b=factor, c=factor),
        )
        for row in profile.schemes
    )
    strategies = (
        replace(row, regroup_ms=row.regroup_ms * factor, optimizer_ms=row.optimizer_ms * factor)
        for row in profile.strategies
    )
    return replace(profile, model=None, schemes=tuple(rows), strategies=tuple(strategies))


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """A device given by its cost profile, faster or slower than the real one."""

    cost_model: ProfileCostModel
    """The emulated times; make plans with them."""
    scale: float = 1.0
    """Seconds here for each second of the device, already applied to ``cost_model``."""

    @classmethod
    def read(cls, path: str | Path, scale: float = 1.0) -> EmulatedDevice:
        """A device by its cost profile file, with times multiplied by ``scale``.

        Raises ConfigurationError for a file that is no cost profile, and for a scale that is not
        positive and finite.
        """
        return cls(scaled(ProfileCostModel.read(path), scale), scale)

    @property
    def notice(self) -> str:
        """The warning for the log of a run."""
        return (
            f"emulated device: forward and backward take the times modelled for "
            f"{self.cost_model.device} ({self.cost_model.source}, {self.cost_model.date}) times "
            f"{self.scale:g}; every micro-batch runs as a few tokens of it, so losses, gradient "
            f"norms and the trained weights mean nothing"
        )

    def shorten(self, batch: PackedBatch, scheme: Scheme) -> EmulatedBatch:
        """The micro-batch as a replica of a scheme runs it: the first tp tokens of its row.

        Tensor parallelism cannot divide fewer tokens among its ranks. A context-parallel group of
        c ranks runs a row of one segment, of which each rank has the first 2·tp tokens of its
        part, and takes the time of the scheme with cp = c. The tokens get the largest weights of
        the row: with their own ones, a masked prompt would train nothing.

        Raises StrategyError for a scheme that is not in the profile.
        """
        size = batch.context_size
        timed = scheme if scheme.cp == 1 else scheme.of_context_group(size)
        lengths = batch.sequence_lengths
        coefficients = self.cost_model.coefficients(timed)
        time_s = coefficients.time_ms(lengths) / MS_PER_S
        forward_s = coefficients.forward_share * time_s
        num_kept = min(scheme.tp * (1 if size == 1 else 2), batch.tokens.size(-1))
        weights = batch.weights.topk(num_kept, dim=1).values
        num_tokens = min(num_kept, batch.num_tokens)
        if size == 1:
            kept = batch.cu_seqlens.clamp(max=num_kept).unique()
        else:
            kept = batch.cu_seqlens.new_tensor([0, num_kept * size])
        segment_lengths = tuple(kept.diff().tolist())
        longest = max(segment_lengths)
        return EmulatedBatch(
            tokens=batch.tokens[:, :num_kept],
            labels=batch.labels[:, :num_kept],
            weights=weights,
            # Positions of the other chunks of a shared row are beyond the end of the short row.
            position_ids=batch.position_ids[:, :num_kept].clamp(max=longest - 1),
            cu_seqlens=kept,
            cu_seqlens_padded=kept,
            segment_lengths=segment_lengths,
            max_seqlen=longest,
            num_tokens=num_tokens,
            num_padding=num_kept - num_tokens,
            trained_tokens=int(weights.count_nonzero()),
            has_fractional_weights=batch.has_fractional_weights,
            sequence_lengths=lengths,
            context_size=size,
            context_rank=batch.context_rank,
            context_group=batch.context_group,
            lengths=lengths,
            forward_s=forward_s,
            backward_s=time_s - forward_s,
        )


@dataclass(slots=True)
class EmulationCount:
    """Operations of a rank, and overruns of their modelled times."""

    num_operations: int = 0
    """Forwards and backwards, each of one micro-batch."""
    num_overruns: int = 0
    """Operations whose tiny tensors took longer than the modelled time: a larger scale helps."""
    overrun_s: float = 0.0
    """Sum of the excess times."""
    modelled_s: float = 0.0
    """Sum of the modelled times."""

    def __add__(self, other: EmulationCount) -> EmulationCount:
        return EmulationCount(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: EmulationCount) -> EmulationCount:
        return EmulationCount(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))


class EmulatedForwardStep:
    """A forward step, of upstream's signature, whose forward and backward take the modelled time.

    The rank sleeps for the rest of that time; if the tiny tensors take longer, an overrun is
    counted. Waiting for other stages is not part of an operation.

    Args:
        forward_step: runs the tiny tensors.
        now_s: seconds since some fixed moment; the machine's time by default.
        sleep: returns after so many seconds, at least 0; a sleeping rank frees its core.
        count: counts the operations; a new one if None.
    """

    def __init__(
        self,
        forward_step: ForwardStep,
        *,
        now_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        count: EmulationCount | None = None,
    ) -> None:
        self._forward_step = forward_step
        self._now_s, self._sleep = now_s, sleep
        self.count = EmulationCount() if count is None else count

    def __call__(
        self, data_iterator: Iterator[PackedBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Any]:
        """One micro-batch forward.

        Raises ConfigurationError for a micro-batch without a modelled time.
        """
        start_s = self._now_s()
        batch = next(data_iterator)
        if not isinstance(batch, EmulatedBatch):
            raise ConfigurationError(
                f"an emulated device runs micro-batches of known time but was given a "
                f"{type(batch).__name__} of {batch.num_tokens} tokens; shorten it with "
                f"EmulatedDevice.shorten first"
            )
        output, loss_function = self._forward_step(iter((batch,)), model)

        def begin_backward() -> Callable[[], None]:
            backward_start_s = self._now_s()
            return lambda: self._sleep_until_over(backward_start_s, batch.backward_s)

        timed: Tensor = _TimedBackward.apply(output, begin_backward)
        self._sleep_until_over(start_s, batch.forward_s)
        return timed, loss_function

    def _sleep_until_over(self, start_s: float, modelled_s: float) -> None:
        remaining_s = modelled_s - (self._now_s() - start_s)
        self.count.num_operations += 1
        self.count.modelled_s += modelled_s
        if remaining_s < 0.0:
            self.count.num_overruns += 1
            self.count.overrun_s -= remaining_s
        else:
            self._sleep(remaining_s)


class _TimedBackward(Function):
    """The identity on a stage's output; calls back when its backward begins and ends.

    It is the first node of the stage's backward. The end is a callback of the autograd engine,
    which runs when the backward call is complete, as in torch's DistributedDataParallel: the real
    computation is part of the modelled time, not added to it.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, begin: Callable[[], Callable[[], None]]) -> Tensor:
        ctx.begin = begin
        # No view, because pipeline schedules may free a stage's output, which must own its data.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        Variable._execution_engine.queue_callback(ctx.begin())
        return gradients[0], None
