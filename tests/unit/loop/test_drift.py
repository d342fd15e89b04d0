"""Drift and slow ranks in synthetic times are named once, and so is their end."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model import Coefficients
from megatron.hydraulis.loop.drift import DriftReport, micro_batch_times_ms
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.planner.replica_plan import ContextGroup, MicroBatch, ReplicaPlan
from megatron.hydraulis.runtime.spans import RecordedSpan
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.planning import TableCostModel

TIMES = Coefficients(a_ms_per_token2=1e-5, b_ms_per_token=0.02, c_ms=3.0)
MODEL = TableCostModel(default_limit=1024, times=lambda scheme: TIMES)


class Machine:
    """Plans batches of one strategy and runs them by other times."""

    def __init__(
        self, strategy: str, limit: float = 0.1, cost_model: TableCostModel = MODEL
    ) -> None:
        self._planner = GreedyPlanner(Pool.of(Strategy.parse(strategy, 4)), cost_model)
        self._report = DriftReport(cost_model, limit)
        self._draw = random.Random(3)

    def run(
        self,
        num_iterations: int,
        *,
        factor: float = 1.0,
        rank_factors: Mapping[int, float] | None = None,
        stage_factors: tuple[float, ...] = (1.0, 1.0),
    ) -> list[str]:
        """What is reported. Ranks of a replica wait for its slowest."""
        news: list[str] = []
        for _ in range(num_iterations):
            plan = self._planner.plan([self._draw.randint(20, 900) for _ in range(24)])
            rank_times_ms: dict[int, list[float]] = {}
            for replica in plan.replicas:
                slow = factor * max((rank_factors or {}).get(rank, 1.0) for rank in replica.ranks)
                work_ms = [
                    TIMES.time_ms(m.lengths) * slow * self._draw.uniform(0.98, 1.02)
                    for m in replica.micro_batches
                ]
                for rank in replica.ranks:
                    position = replica.replica.position_of(rank)
                    assert position is not None
                    rank_times_ms[rank] = [stage_factors[position.stage] * t for t in work_ms]
            news += self._report.add(plan, rank_times_ms)
        return news


def test_nothing_is_reported_without_drift() -> None:
    assert Machine("2*tp1+tp2").run(12) == []


def test_drift_is_reported_once_and_its_end_too() -> None:
    machine = Machine("4*tp1")
    assert machine.run(4) == []
    # The median may pass between both times.
    line = machine.run(20, factor=1.4)[-1]
    match = re.search(r"cost profile: tp1 takes ([\d.]+) times the predicted time", line)
    assert match is not None
    assert float(match[1]) == pytest.approx(1.4, rel=0.03)
    assert "more than 10%" in line
    assert machine.run(20, factor=1.4) == []
    line = machine.run(20)[-1]
    assert "tp1 is back at 1.0" in line


def test_faster_times_are_a_drift_too_and_a_limit_is_kept() -> None:
    (line,) = Machine("4*tp1").run(6, factor=0.5)
    assert "-5" in line
    assert Machine("4*tp1", limit=0.6).run(6, factor=0.5) == []


@pytest.mark.parametrize(("host_ms", "num_lines"), [(5.0, 1), (500.0, 0)])
def test_devices_that_wait_for_the_host_are_not_compared(host_ms: float, num_lines: int) -> None:
    times = replace(TIMES, host_ms=host_ms)
    machine = Machine("4*tp1", cost_model=TableCostModel(default_limit=1024, times=lambda _: times))
    assert len(machine.run(6, factor=2.0)) == num_lines


def test_a_slow_rank_is_named_and_is_not_a_drift() -> None:
    machine = Machine("4*tp1")
    (line,) = machine.run(10, rank_factors={2: 1.5})
    assert "slow rank: rank 2 takes 1.5" in line
    assert "run tp1;" in line
    assert machine.run(20)[-1] == "slow rank: rank 2 is as fast as the others again"


def test_ranks_that_wait_for_a_slow_one_are_named_with_it() -> None:
    news = Machine("2*tp2").run(6, rank_factors={3: 1.5})
    named = [line.split(" takes")[0] for line in news if "slow rank" in line]
    assert named == ["slow rank: rank 2", "slow rank: rank 3"]


def test_ranks_of_a_stage_with_less_work_and_of_one_replica_are_not_compared() -> None:
    assert Machine("2*pp2").run(8, stage_factors=(0.4, 1.0)) == []
    assert Machine("tp2+2*tp1", limit=0.6).run(6, rank_factors={0: 1.5, 1: 1.5}) == []


def test_the_first_iteration_of_a_strategy_is_ignored() -> None:
    machine = Machine("4*tp1")
    assert machine.run(1, factor=100.0) == machine.run(6) == []


def test_every_size_of_context_groups_drifts_by_itself() -> None:
    """A wave of two groups, of which one may be empty, and a micro-batch on both ranks."""
    factors = {1: 1.5, 2: 0.7}
    draw, report = random.Random(5), DriftReport(MODEL, 0.1)
    news: list[str] = []
    for number in range(6):
        lengths = tuple(draw.randint(20, 400) for _ in range(4))
        groups = (ContextGroup(0, 1, number % 2), ContextGroup(1, 1, 2 - number % 2))
        micro_batches = (MicroBatch((0, 1), lengths[:2], groups), MicroBatch((2, 3), lengths[2:]))
        scheme = Scheme(cp=2, pp=2, splits_cp=True)
        replica = ReplicaPlan(scheme, (0, 1, 2, 3), micro_batches, predicted_time_s=1.0)
        times_ms: dict[int, list[float]] = {rank: [] for rank in range(4)}
        for micro_batch in micro_batches:
            for _, share in replica.shares(micro_batch):
                time_ms = factors[share.group.size] * TIMES.time_ms(share.lengths)
                for column in share.group.columns:
                    times_ms[column].append(time_ms)
                    times_ms[2 + column].append(0.9 * time_ms)
        plan = IterationPlan(
            iteration=number, strategy="cp2~pp2", replicas=(replica,), predicted_time_s=1.0
        )
        news += report.add(plan, times_ms)
    assert sorted(line.split(" times")[0] for line in news) == [
        "cost profile: cp2pp2 takes 0.70",
        "cost profile: pp2 takes 1.50",
    ]


def test_waits_for_parameters_are_no_part_of_a_micro_batch() -> None:
    def span(name: str, start_ms: float, end_ms: float, micro_batch: int = 0) -> RecordedSpan:
        detail = {"micro_batch": micro_batch}
        return RecordedSpan(name, int(start_ms * 1e6), int(end_ms * 1e6), detail)

    spans = [
        span("forward", 0, 10),
        span("gather wait", 2, 5),
        span("gather wait", 9, 12),  # ends later
        span("pipeline wait", 12, 20),
        span("forward", 20, 24, 1),
        span("backward", 30, 36),
        span("backward", 40, 41, 1),
        span("optimizer", 50, 60),
    ]
    assert micro_batch_times_ms(spans, 2) == [10 - 3 - 1 + 6, 4 + 1]
    assert micro_batch_times_ms([], 0) == []
