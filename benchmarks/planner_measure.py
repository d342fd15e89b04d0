"""What the planner's benchmark measures, as plain data."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.strategy import Pool

MS_PER_S = 1e3
BYTES_PER_MB = 1e6
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBatch:
    """One batch, planned several times."""

    seed: int | None
    """None for instance B."""
    num_sequences: int
    longest_tokens: int
    strategy: str
    time_ms: float
    bound_ms: float
    status: str
    wall_s: list[float] = field(default_factory=list)
    """Of every round."""
    cpu_s: list[float] = field(default_factory=list)
    """Of every round, of the whole process: on a busy machine the steadier figure."""
    alone_ms: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By strategy that can hold the batch: bound and time of its plan when it is the whole pool."""

    @property
    def ratio(self) -> float:
        """Time over bound of the chosen strategy."""
        return self.time_ms / self.bound_ms

    @property
    def best_other(self) -> float:
        """Least time of any other strategy's plan, over that of the choice."""
        return min(
            (time_ms for name, (_, time_ms) in self.alone_ms.items() if name != self.strategy),
            default=float("inf"),
        ) / (self.time_ms)

    @property
    def quietest_s(self) -> float:
        """Least time over all rounds: the machine may have been busy in the others."""
        return min(self.wall_s)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Of the process after a number of plans."""

    num_plans: int
    resident_bytes: int
    num_blocks: int
    """Blocks that Python's allocator holds."""


def planned_batch(
    batch: Sequence[int], pool: Pool, model: CostModel, *, seed: int | None = None
) -> PlannedBatch:
    """Plan a batch once, for what does not change from round to round."""
    plan = CertifiedPlanner(pool, model).plan(batch)
    assert plan.dispatch is not None  # the certified planner reports on every plan
    return PlannedBatch(
        seed=seed,
        num_sequences=len(batch),
        longest_tokens=max(batch),
        strategy=plan.strategy,
        time_ms=MS_PER_S * plan.predicted_time_s,
        bound_ms=MS_PER_S * plan.dispatch.bound_s,
        status=plan.dispatch.status,
    )


def time_rounds(
    batches: Sequence[Sequence[int]],
    planned: Sequence[PlannedBatch],
    pool: Pool,
    model: CostModel,
    num_rounds: int,
    advance: Callable[[], None],
) -> None:
    """Plan all batches once a round, so that whatever else the machine does falls on all."""
    planner = CertifiedPlanner(pool, model)
    for _ in range(num_rounds):
        for batch, result in zip(batches, planned, strict=True):
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            planner.plan(batch)
            result.wall_s.append(time.perf_counter() - start_s)
            result.cpu_s.append(time.process_time() - start_cpu_s)
            advance()


def plan_alone(batch: Sequence[int], result: PlannedBatch, pool: Pool, model: CostModel) -> None:
    """Plan a batch with every strategy that can hold it, one at a time."""
    explanation = CertifiedPlanner(pool, model).explain(batch)
    for strategy, outcome in zip(pool.strategies, explanation.strategies, strict=True):
        if outcome.bound_s is not None:
            plan = CertifiedPlanner(Pool.of(strategy), model).plan(batch)
            result.alone_ms[strategy.name] = _bound_and_time_ms(plan)


def memory_uses(
    batches: Sequence[Sequence[int]],
    pool: Pool,
    model: CostModel,
    marks: Sequence[int],
    advance: Callable[[], None],
) -> Iterator[MemoryUse]:
    """Plan batches in turn, and look at the process after these numbers of plans."""
    planner = CertifiedPlanner(pool, model)
    for number in range(1, max(marks) + 1):
        planner.plan(batches[number % len(batches)], iteration=number)
        advance()
        if number in marks:
            gc.collect()
            yield MemoryUse(number, _resident_bytes(), sys.getallocatedblocks())


def to_json(result: PlannedBatch) -> dict[str, Any]:
    """All fields."""
    return asdict(result)


def _bound_and_time_ms(plan: IterationPlan) -> tuple[float, float]:
    assert plan.dispatch is not None  # the certified planner reports on every plan
    return MS_PER_S * plan.dispatch.bound_s, MS_PER_S * plan.predicted_time_s


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
