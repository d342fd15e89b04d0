"""From the planner to the ranks: plans are sent early, once, and deleted when read."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from megatron.hydraulis.cost_model import ProfileCostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.data.sampler import GlobalBatch
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.loop.planned_data import (
    PlanExchange,
    PlanFeed,
    PlannedData,
    SampledBatches,
)
from megatron.hydraulis.loop.step import LogInterval
from megatron.hydraulis.model_shape import AttentionWindow
from megatron.hydraulis.planner.plan import PlanText
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.strategy import Pool, Strategy
from tests.unit.observability.run_folders import make_record

NUM_AHEAD = 2
WAITED_S = 0.25
ROW = {"tp": 1, "cp": 1, "pp": 1, "max_tokens": 50}
TIMES = {"a_ms_per_token2": 1e-4, "b_ms_per_token": 0.1, "c_ms": 1.0}
HEAD = {"device": "d", "source": "s", "date": "2026-01-01", "schemes": [ROW | TIMES]}
MODEL = ProfileCostModel.from_json(HEAD, what="profile")
# The rank of the test is idle, so that no sequence is read.
POOL = Pool.of(Strategy.parse("tp1@1+idle", 2, name="only"))


class SlowFirst:
    """Finishes the first plan when it is taken, all others immediately."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._lengths: dict[int, tuple[int, ...]] = {}

    def submit(self, iteration: int, lengths: tuple[int, ...]) -> None:
        self._lengths[iteration] = lengths

    def is_ready(self, iteration: int) -> bool:
        return iteration > 0

    def take(self, iteration: int) -> tuple[PlanText, float]:
        self.taken.append(iteration)
        if iteration == 4:
            raise PlanError("no plan for this one")
        plan = GreedyPlanner(POOL, MODEL).plan(self._lengths[iteration], iteration=iteration)
        return PlanText.of(plan), 0.0 if iteration else WAITED_S


class Sampler:
    def __init__(self) -> None:
        self.num_batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def next_batch(self) -> GlobalBatch:
        self.num_batches += 1
        return cast(
            GlobalBatch,
            SimpleNamespace(lengths=(5, 7), sequence_ids=(0, 1), num_tokens=12, num_sequences=2),
        )


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def planner() -> SlowFirst:
    return SlowFirst()


def test_a_plan_that_rank_0_does_not_publish_is_an_error_about_its_planner() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=0.1))
    with pytest.raises(PlanError, match=r"^plan 5 of the valid data .* rank 0 within 0 s: "):
        PlanExchange(store, "valid").fetch(4)


@pytest.fixture
def data(store: dist.Store, planner: SlowFirst, monkeypatch: pytest.MonkeyPatch) -> PlannedData:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    batches = SampledBatches(cast(Any, Sampler()))
    exchange = PlanExchange(store, "train")
    return PlannedData(
        corpus=cast(Any, None),
        batches=batches,
        exchange=exchange,
        feed=PlanFeed(cast(Any, planner), exchange, batches, num_ahead=NUM_AHEAD),
        pool=POOL,
        limits=Limits(MODEL),
        device=torch.device("cpu"),
    )


def test_plans_that_are_ready_reach_the_ranks_before_their_iteration(
    store: dist.Store, planner: SlowFirst, data: PlannedData
) -> None:
    first = data.next_batch()
    assert first.plan_wait_s == WAITED_S
    assert planner.taken == [0, 1, 2]
    other_rank = PlanExchange(store, "train")
    for iteration in (0, 1, 2):
        assert other_rank.fetch(iteration)[0].parse().iteration == iteration
    second = data.next_batch()
    assert (second.plan.iteration, second.plan_wait_s) == (1, 0.0)
    assert planner.taken == [0, 1, 2, 3]


def test_an_error_waits_for_its_iteration(planner: SlowFirst, data: PlannedData) -> None:
    for iteration in range(4):
        assert data.next_batch().plan.iteration == iteration
    assert 4 in planner.taken
    with pytest.raises(PlanError, match="no plan for this one"):
        data.next_batch()


def test_plans_do_not_pile_up_in_the_store(store: dist.Store, data: PlannedData) -> None:
    num_keys = []
    for _ in range(4):
        data.next_batch()
        num_keys.append(store.num_keys())
    assert max(num_keys) <= 2 + NUM_AHEAD + 1


def test_a_line_for_several_iterations_counts_their_strategies() -> None:
    interval = LogInterval()
    for number, name in enumerate(("short", "long", "short"), start=1):
        interval.add(make_record(number, strategy=name), (1, 2))
    record = interval.mean_record
    assert record is not None
    assert record.strategy == "short (2), long (1)"
    interval.clear()
    interval.add(make_record(4, strategy="long"), (1,))
    record = interval.mean_record
    assert record is not None
    assert record.strategy == "long"


def test_sums_of_lengths_are_means_over_the_iterations_of_a_line() -> None:
    """Upstream divides them by an iteration's mean time for FLOP/s."""
    interval = LogInterval()
    assert interval.mean_sums == interval.last_sums == (None, None)
    interval.add(make_record(1), (3, 4))
    interval.add(make_record(2), (5,))
    assert interval.last_sums == (5.0, 25.0)
    assert interval.mean_sums == ((7 + 5) / 2, (9 + 16 + 25) / 2)
    interval.clear()
    assert interval.mean_sums == (None, None)


def test_squares_leave_out_what_a_window_hides() -> None:
    interval = LogInterval(AttentionWindow(num_tokens=3, share=0.5))
    interval.add(make_record(1), (2, 5))
    assert interval.mean_sums == (7.0, 4 + 25 - 0.5 * (5 - 3) ** 2)


def test_batches_planned_ahead_do_not_count_as_consumed(data: PlannedData) -> None:
    assert data.batches.state == {"num_batches": 0}
    for num_taken in (1, 2, 3):
        data.next_batch()
        assert data.batches.sampler.state_dict() == {"num_batches": num_taken + NUM_AHEAD}
        assert data.batches.state == {"num_batches": num_taken}


def test_a_plan_made_during_an_iteration_is_known_before_its_end(data: PlannedData) -> None:
    first = data.next_batch()
    assert data.publish_ready() == first.plan.strategy
    assert replace(data, feed=None).publish_ready() is None


def test_lower_limits_repeat_the_last_batch_with_new_plans(
    store: dist.Store, planner: SlowFirst, data: PlannedData
) -> None:
    replaced: list[object] = []
    planner.replace = lambda *planners, **named: replaced.append(planners)  # type: ignore[attr-defined]
    data.next_batch()
    data.next_batch()
    planner.taken.clear()
    data.lower_limits(POOL, Limits(MODEL), cast(Any, ("planner", "stand-in")), repeats_last=True)
    assert replaced == [("planner",)]
    assert data.batches.iteration == 1
    assert [data.next_batch().plan.iteration for _ in range(3)] == [1, 2, 3]
    assert planner.taken == [1, 2, 3, 4, 5]
    assert data.batches.sampler.state_dict() == {"num_batches": 4 + NUM_AHEAD}
