"""Our engine with one static homogeneous strategy, measured step by step."""

from __future__ import annotations

import torch.distributed as dist

from benchmarks.step_report import StepClock, StepReport, Traffic, finish_device
from benchmarks.workload import WEIGHT_SEED, Workload
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Pool, Strategy

_PHASE_NAMES = {"forward-backward": "compute"}
"""Names of the engine's phases in the comparison, if they differ."""


class HydraulisSide:
    """One rank of the engine; callable with the number of an iteration.

    Called with None it returns its `Traffic` instead.

    Args:
        workload: what to run.
        strategy: of all iterations.
        overlap: of regrouping with compute.
        announces_next: gather for the next iteration during the update, as in training; otherwise
            a step gathers its own parameters.
    """

    def __init__(
        self,
        workload: Workload,
        strategy: str,
        *,
        overlap: bool = True,
        announces_next: bool = False,
    ) -> None:
        num_ranks = dist.get_world_size()
        self._workload = workload
        self._strategy = Strategy.parse(strategy, num_ranks, name=strategy)
        pool = Pool(num_ranks=num_ranks, ranks_per_node=num_ranks, strategies=(self._strategy,))
        self._engine = RuntimeEngine(
            workload.definition(), pool, workload.optimizer, seed=WEIGHT_SEED, overlap=overlap
        )
        self._next = self._strategy.name if announces_next else None
        self._forward_step = make_forward_step()
        self._clock = StepClock()
        # With overlap a rank spends time on regrouping only where it has to wait for it.
        for waits, name in (
            (self._engine.gather_timer, "gather"),
            (self._engine.scatter_timer, "scatter"),
        ):
            self._clock.time_method(waits, "wait_for", name)

    def __call__(self, iteration: int | None) -> StepReport | Traffic:
        if iteration is None:
            return self._traffic()
        name = self._strategy.name
        replicas = self._strategy.replicas
        index = next(i for i, r in enumerate(replicas) if self._engine.rank in r.ranks)
        batches = self._workload.micro_batches(iteration, index, len(replicas))
        dist.barrier()
        self._clock.start_step()
        outcome = self._engine.train_step(
            name,
            batches,
            self._forward_step,
            next_strategy=self._next,
            phase=lambda phase: self._clock.measure(_PHASE_NAMES.get(phase, phase)),
        )
        assert outcome.gradient_norm is not None
        finish_device()
        return self._clock.report(
            loss=outcome.loss.mean,
            gradient_norm=outcome.gradient_norm,
            waits_s=outcome.gather_wait_s + outcome.scatter_wait_s,
        )

    def _traffic(self) -> Traffic:
        runtime = self._engine.runtime_of(self._strategy.name)
        assert runtime.arena is not None  # no rank is idle
        exchanged = runtime.regrouper.traffic
        return Traffic(
            parameters_bytes=sum(each.values.nbytes for each in runtime.arena.bound.values()),
            gather_bytes=exchanged.gather_received_bytes,
            scatter_bytes=exchanged.scatter_received_bytes,
        )
