"""One rank of an emulated cluster, which runs plans on tiny tensors."""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from benchmarks.emulated_device import (
    EmulatedBatch,
    EmulatedDevice,
    EmulatedForwardStep,
    EmulationCount,
)
from benchmarks.workload import DATA_SEED, WEIGHT_SEED, Workload
from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Pool

WIDTH_PER_ATOM = 4
"""Of the tiny model: channels of a head, of which there are as many as the largest tp."""


@dataclass(frozen=True)
class Step:
    """One iteration to run."""

    plan: IterationPlan
    sleeps: bool = True
    """Whether to take the modelled times; a warm-up step need not."""


@dataclass(frozen=True)
class StepResult:
    """What one rank measured of an iteration."""

    wall_s: float
    """From the moment all ranks were ready until loss and parameters were final."""
    cpu_s: float
    """Of the whole process."""
    count: EmulationCount


def tiny_model(pool: Pool) -> Workload:
    """The smallest model that every strategy of the pool can cut."""
    num_parts = pool.tp_lcm
    return Workload(
        num_layers=math.lcm(*(scheme.pp for s in pool.strategies for scheme in s.schemes)),
        hidden_size=WIDTH_PER_ATOM * num_parts,
        ffn_hidden_size=WIDTH_PER_ATOM * num_parts,
        num_attention_heads=num_parts,
        num_query_groups=num_parts,
        vocab_size=WIDTH_PER_ATOM * num_parts,
        lengths=(max(scheme.tp for strategy in pool.strategies for scheme in strategy.schemes),),
    )


class EmulatedRank:
    """Callable with a `Step`; collective over the ranks of the pool."""

    def __init__(self, pool: Pool, device: EmulatedDevice) -> None:
        self._device = device
        self._model = tiny_model(pool)
        # This halves the tensor-parallel collectives, in each of which all processes must switch.
        definition = dataclasses.replace(self._model.definition(), sequence_parallel=False)
        self._engine = Engine(definition, pool, self._model.optimizer, seed=WEIGHT_SEED)
        for strategy in pool.strategies:
            self._engine.runtime_of(strategy.name)
        self._plain_step = make_forward_step()
        self._emulated_step = EmulatedForwardStep(make_forward_step())

    def __call__(self, step: Step) -> StepResult:
        batches = self._micro_batches(step.plan)
        before = dataclasses.replace(self._emulated_step.count)
        forward_step = self._emulated_step if step.sleeps else self._plain_step
        dist.barrier()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        outcome = self._engine.train_step(step.plan.strategy, batches, forward_step)
        wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        assert outcome.updated
        after = self._emulated_step.count
        return StepResult(
            wall_s,
            cpu_s,
            EmulationCount(
                **{
                    field.name: getattr(after, field.name) - getattr(before, field.name)
                    for field in dataclasses.fields(EmulationCount)
                }
            ),
        )

    def _micro_batches(self, plan: IterationPlan) -> list[EmulatedBatch]:
        """Random tokens of the real lengths, shortened; none where this rank is idle."""
        mine = plan.replica_of(self._engine.rank)
        if mine is None:
            return []
        rng = np.random.default_rng((DATA_SEED, plan.iteration))
        return [
            self._device.shorten(
                pack(
                    [rng.integers(0, self._model.vocab_size, size=n + 1) for n in batch.lengths],
                    mine.scheme.tp,
                ),
                mine.scheme,
            )
            for batch in mine.micro_batches
        ]
