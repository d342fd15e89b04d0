"""What a run does about memory: tried out before the first iteration, mended once in an iteration.

Limits only fall. They fall on every rank alike, by what ranks have told each other, and plans that
were made under the old ones are made anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import (
    CappedCostModel,
    MemoryTrial,
    StrategyCosts,
    after_failure,
    caps_of_schemes,
    lower,
    with_lower_limits,
)
from megatron.hydraulis.errors import OutOfMemoryError, StrategyError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.loop.batch_reader import PlannedData
from megatron.hydraulis.loop.planning import Planning, planners
from megatron.hydraulis.profiler.memory_meter import CpuMemory, free_share_bytes
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.forward_step import ForwardStep
from megatron.hydraulis.runtime.memory_trial import MemoryGauge, run_memory_trial
from megatron.hydraulis.runtime.out_of_memory import LoneOutOfMemoryError, OutOfMemory
from megatron.hydraulis.runtime.outcome import StepOutcome
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

__all__ = ["CpuGauge", "MemorySafety", "peak_memory_bytes", "use_expandable_segments"]

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""What a user sets torch's allocator by."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"

_BYTES_PER_GIB = 2**30


class CpuGauge:
    """This process, interpreter included, of what the machine has free for it."""

    def __init__(self, num_ranks_of_node: int) -> None:
        self._meter = CpuMemory()
        self._meter.restart()
        share = free_share_bytes(num_ranks_of_node)
        # Where the system does not tell, nothing is lowered.
        self._capacity = sys.maxsize if share is None else self._meter.peak_bytes() + share

    def restart(self) -> int:
        self._meter.restart()
        return self._meter.peak_bytes()

    def peak_bytes(self) -> int:
        return self._meter.peak_bytes()

    def capacity_bytes(self) -> int:
        return self._capacity


class MemorySafety:
    """The limits of a run as memory allows them, equal on every rank.

    Args:
        planning: what the run plans with; `planning` is what it plans with now.
        hydraulis: our flags.
        log: where rank 0's lines go.
    """

    def __init__(
        self, planning: Planning, hydraulis: HydraulisConfig, *, log: Callable[[str], None]
    ) -> None:
        self.planning = planning
        self._given = planning
        self._hydraulis = hydraulis
        self._log = log if dist.get_rank() == 0 else _silent
        self._caps: dict[Scheme, int] = {}
        self._trials: dict[tuple[str, Scheme], MemoryTrial] = {}
        self._data: list[tuple[PlannedData, bool]] = []
        self._failed_iteration: int | None = None

    def capped(self, cost_model: CostModel) -> CostModel:
        """A cost model with limits no higher than memory allows by now."""
        if not self._caps:
            return cost_model
        return CappedCostModel(cost_model, tuple(self._caps.items()))

    def watch(self, data: PlannedData, *, is_training: bool) -> None:
        """Data whose plans keep the limits from now on."""
        self._data.append((data, is_training))

    def try_out(
        self,
        engine: Engine,
        forward_step: ForwardStep,
        gauge: MemoryGauge,
        *,
        longest_tokens: int,
        most_tokens: int,
        vocab_size: int,
    ) -> None:
        """Run the largest micro-batches of every strategy and lower what proves too high.

        Collective. most_tokens: of a global batch, beyond which no micro-batch goes.

        Raises OutOfMemoryError where no strategy is left.
        """
        for strategy in self.planning.pool.strategies:
            costs = StrategyCosts(self.planning.cost_model, strategy)

            def limit(scheme: Scheme, costs: StrategyCosts = costs) -> int:
                try:
                    held = costs.max_tokens(scheme)
                except StrategyError:
                    return 0  # a size of group that the cost profile does not know is not planned
                return min(held, scheme.row_tokens((most_tokens,)))

            results = run_memory_trial(
                engine,
                strategy,
                limit,
                forward_step,
                gauge,
                longest_tokens=longest_tokens,
                vocab_size=vocab_size,
            )
            for result in results:
                self._log(result.text)
                self._trials[strategy.name, result.scheme] = result.trial
            lowered = {
                result.scheme: result.allowed_tokens
                for result in results
                if result.allowed_tokens < result.promised_tokens
            }
            self._cap(caps_of_schemes(strategy, lowered))
        self._replan()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Within, an error of a rank without memory says what had been predicted."""
        try:
            yield
        except LoneOutOfMemoryError as error:
            error.add_note(self._predicted(error.own))
            raise

    def lower_after(self, iteration: int, outcome: StepOutcome) -> None:
        """Lower the limits of what found no memory, so that the iteration can be planned anew.

        Collective, after a step that updated nothing because ranks had no memory.

        Raises OutOfMemoryError for the second time in an iteration, for recorded plans, and where
        no strategy is left.
        """
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, outcome.out_of_memory)
        failures: list[OutOfMemory] = [each for each in everyone if each is not None]
        told = f"iteration {iteration}: {failures[0].text} ({self._predicted(failures[0])})"
        if len(failures) > 1:
            told += f", and so {len(failures) - 1} other ranks"
        if self._failed_iteration == iteration:
            raise OutOfMemoryError(
                f"{told}, again after its limit was lowered; give "
                f"--max-tokens-per-micro-batch, or a strategy with more ranks a replica"
            )
        if self._hydraulis.replay_plans is not None:
            raise OutOfMemoryError(
                f"{told}; recorded plans cannot be made anew: run without --replay-plans "
                f"{self._hydraulis.replay_plans}"
            )
        self._failed_iteration = iteration
        for failure in failures:
            self._cap({failure.group: after_failure(failure.num_tokens, failure.group)})
        limits = ", ".join(
            f"{scheme}: {self._caps[scheme]:,} tokens"
            for scheme in dict.fromkeys(failure.scheme for failure in failures)
        )
        self._log(f"warning: {told}; limits are now {limits}, and the iteration is planned anew")
        self._replan()

    def _cap(self, caps: dict[Scheme, int]) -> None:
        self._caps = lower(self._caps, caps)

    def _replan(self) -> None:
        if not self._caps:
            return
        kept: list[Strategy] = []
        for strategy in self._given.pool.strategies:
            lowered = with_lower_limits(strategy, self._caps)
            if lowered is not None:
                kept.append(lowered)
            elif strategy.name in {each.name for each in self.planning.pool.strategies}:
                self._log(
                    f"warning: strategy '{strategy.name}' is left out: memory holds none of it"
                )
        if not kept:
            raise OutOfMemoryError(
                f"memory holds a micro-batch of none of the {len(self._given.pool.strategies)} "
                "strategies; use more tp or pp ranks, or recompute activations"
            )
        self.planning = replace(
            self._given, cost_model=self.capped(self._given.cost_model), pool=Pool.of(*kept)
        )
        for data, is_training in self._data:
            makes_plans = dist.get_rank() == 0
            data.lower_limits(
                self.planning.pool,
                self.planning.cost_model,
                planners(self.planning, self._hydraulis, is_training=is_training)
                if makes_plans
                else None,
                repeats_last=is_training,
            )

    def _predicted(self, failure: OutOfMemory) -> str:
        trial = self._trials.get((failure.strategy, failure.group))
        if trial is not None:
            num_bytes = trial.predicted_bytes(failure.num_tokens)
            return (
                f"the memory trial foretold {num_bytes / _BYTES_PER_GIB:.2f} of "
                f"{trial.capacity_bytes / _BYTES_PER_GIB:.2f} GiB"
            )
        model = self._given.cost_model
        if not isinstance(model, AnalyticCostModel):
            return "the cost profile foretells limits, not bytes"
        scheme = failure.group
        memory = model.memory
        predicted = max(
            memory.peak_bytes(scheme, stage, failure.num_tokens) for stage in range(scheme.pp)
        )
        return (
            f"the memory model foretold {predicted / _BYTES_PER_GIB:.2f} of "
            f"{memory.usable_bytes / _BYTES_PER_GIB:.2f} GiB"
        )


def peak_memory_bytes() -> dict[str, int]:
    """Peaks of torch's allocator since the last call, by field of the record; none without CUDA."""
    if not torch.cuda.is_available():
        return {}
    peaks = {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks


def use_expandable_segments() -> bool:
    """Let torch's allocator grow its segments, so that packs of ever new sizes leave no holes.

    Before the first tensor on a device. What a user has set stays.

    Returns:
        Whether it was not set already.
    """
    if any(variable in os.environ for variable in ALLOCATOR_VARIABLES):
        return False
    os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS  # for processes that are started
    # The variable was read when torch was imported.
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is not None:
        set_settings(EXPANDABLE_SEGMENTS)
    return True


def _silent(line: str) -> None:
    return None
