"""Limits of micro-batches that follow the memory: a trial before training, recovery in training.

Limits are only ever lowered, equally on every rank. Plans made under earlier limits are made again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.limits import Limits, MemoryTrial, after_failure
from megatron.hydraulis.errors import OutOfMemoryError, StrategyError
from megatron.hydraulis.flags.config import HydraulisConfig
from megatron.hydraulis.library.planning import Planning, planners
from megatron.hydraulis.loop.planned_data import PlannedData
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import ForwardStep
from megatron.hydraulis.runtime.memory import (
    LoneOutOfMemoryError,
    MemoryMeter,
    OutOfMemory,
)
from megatron.hydraulis.runtime.memory_trial import StrategyTrial
from megatron.hydraulis.runtime.outcome import StepOutcome
from megatron.hydraulis.runtime.process_groups import of_all_ranks
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables by which a user configures torch's allocator."""
EXPANDABLE_SEGMENTS = "expandable_segments:True"

_BYTES_PER_GIB = 2**30


class MemorySafety:
    """The limits of a run as its memory allows; equal on every rank.

    Args:
        planning: what the run begins to plan with; the attribute is what it plans with now.
        log: takes the lines of rank 0.
    """

    def __init__(
        self, planning: Planning, hydraulis: HydraulisConfig, *, log: Callable[[str], None]
    ) -> None:
        self.planning = planning
        self._num_strategies = len(planning.pool.strategies)
        self._hydraulis = hydraulis
        self._log = log if dist.get_rank() == 0 else lambda line: None
        self._trials: dict[tuple[str, Scheme], MemoryTrial] = {}
        self._data: list[tuple[PlannedData, bool]] = []
        self._failed_iteration: int | None = None

    def watch(self, data: PlannedData, *, is_training: bool) -> None:
        """Plan this data under the limits from now on."""
        self._data.append((data, is_training))

    def try_out(
        self,
        engine: RuntimeEngine,
        forward_step: ForwardStep,
        meter: MemoryMeter,
        *,
        longest_tokens: int,
        most_tokens: int,
        vocab_size: int,
    ) -> None:
        """Run the largest micro-batches of every strategy and lower limits that do not fit.

        Collective. most_tokens: of a global batch, and so of a micro-batch.

        Raises OutOfMemoryError where no strategy is left.
        """
        measured: list[tuple[Scheme, int]] = []
        for strategy in self.planning.pool.strategies:

            def limit(scheme: Scheme, strategy: Strategy = strategy) -> int:
                try:
                    held = self.planning.limits.max_tokens(strategy, scheme)
                except StrategyError:
                    return 0  # no plan has groups of a size that the cost profile lacks
                row_tokens = self.planning.limits.row_tokens(strategy, scheme, (most_tokens,))
                return min(held, row_tokens)

            trial = StrategyTrial(
                engine=engine,
                strategy=strategy,
                forward_step=forward_step,
                meter=meter,
                longest_tokens=longest_tokens,
                vocab_size=vocab_size,
            )
            results = trial.results(limit)
            for result in results:
                self._log(result.text)
                self._trials[strategy.name, result.scheme] = result.trial
            measured += [
                (result.scheme, result.allowed_tokens)
                for result in results
                if result.allowed_tokens < result.promised_tokens
            ]
        self._plan_with(self.planning.limits.reduced(measured))

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Adds the predicted memory to the error of a rank that ran out of it."""
        try:
            yield
        except LoneOutOfMemoryError as error:
            error.add_note(self._predicted(error.own))
            raise

    def lower_after(self, iteration: int, outcome: StepOutcome) -> None:
        """Lower the limits of what ran out of memory, so that the iteration is planned again.

        Collective, after a step that updated nothing because ranks ran out of memory.

        Raises OutOfMemoryError for the second time in an iteration, for recorded plans, and where
        no strategy is left.
        """
        everyone = of_all_ranks(outcome.out_of_memory)
        failures = [each for each in everyone if each is not None]
        what = f"iteration {iteration}: {failures[0].text} ({self._predicted(failures[0])})"
        if len(failures) > 1:
            what += f", as did {len(failures) - 1} other ranks"
        if self._failed_iteration == iteration:
            raise OutOfMemoryError(
                f"{what}, again after its limit was lowered; give "
                f"--max-tokens-per-micro-batch, or a strategy with more ranks a replica"
            )
        if self._hydraulis.replay_plans is not None:
            raise OutOfMemoryError(
                f"{what}; recorded plans cannot be changed: run without --replay-plans "
                f"{self._hydraulis.replay_plans}"
            )
        self._failed_iteration = iteration
        limits = self.planning.limits.reduced(
            (failure.group, after_failure(failure.num_tokens, failure.group))
            for failure in failures
        )
        measured = dict(limits.measured)
        now = ", ".join(
            f"{scheme}: {measured[scheme]:,} tokens"
            for scheme in dict.fromkeys(failure.group for failure in failures)
        )
        self._log(f"warning: {what}; limits are now {now}, and the iteration is planned again")
        self._plan_with(limits)

    def _plan_with(self, limits: Limits) -> None:
        """Plan again with these limits, in the strategies that still have room."""
        if not limits.measured:
            return
        kept: list[Strategy] = []
        for strategy in self.planning.pool.strategies:
            if limits.holds(strategy):
                kept.append(strategy)
            else:
                self._log(
                    f"warning: strategy '{strategy.name}' is skipped: none of its micro-batches "
                    f"fits in memory"
                )
        if not kept:
            raise OutOfMemoryError(
                f"no micro-batch of any of the {self._num_strategies} strategies fits "
                "in memory; use more tp or pp ranks, or recompute activations"
            )
        self.planning = replace(self.planning, limits=limits, pool=Pool.of(*kept))
        for data, is_training in self._data:
            data.lower_limits(
                self.planning.pool,
                self.planning.limits,
                planners(self.planning, self._hydraulis, is_training=is_training)
                if dist.get_rank() == 0
                else None,
                repeats_last=is_training,
            )

    def _predicted(self, failure: OutOfMemory) -> str:
        trial = self._trials.get((failure.strategy, failure.group))
        if trial is not None:
            num_bytes = trial.predicted_bytes(failure.num_tokens)
            return (
                f"the memory trial predicted {num_bytes / _BYTES_PER_GIB:.2f} of "
                f"{trial.capacity_bytes / _BYTES_PER_GIB:.2f} GiB"
            )
        model = self.planning.cost_model
        if not isinstance(model, AnalyticCostModel):
            return "the cost profile predicts limits, not bytes"
        scheme = failure.group
        memory = model.memory
        predicted = max(
            memory.peak_bytes(scheme, stage, failure.num_tokens) for stage in range(scheme.pp)
        )
        return (
            f"the memory model predicted {predicted / _BYTES_PER_GIB:.2f} of "
            f"{memory.usable_bytes / _BYTES_PER_GIB:.2f} GiB"
        )


def use_expandable_segments() -> None:
    """Let torch's allocator grow its segments, so that packs of changing sizes leave no holes.

    To be called before the first tensor on a device. Changes nothing if the user has configured the
    allocator.
    """
    if any(variable in os.environ for variable in ALLOCATOR_VARIABLES):
        return
    os.environ[ALLOCATOR_VARIABLES[0]] = EXPANDABLE_SEGMENTS  # for child processes
    # The variable was read when torch was imported.
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is not None:
        set_settings(EXPANDABLE_SEGMENTS)
