"""Drift and slow ranks in synthetic times are detected, named, and reported once."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

from megatron.hydraulis.cost_model import Coefficients, ProfileCostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.cost_model.profile import ProfiledModel, ProfiledScheme
from megatron.hydraulis.library.planning import Planning
from megatron.hydraulis.loop.refit import (
    IterationTimes,
    OnlineRefit,
    RefitSettings,
    RunRefit,
    micro_batch_times_ms,
)
from megatron.hydraulis.observability.records import REFITTED_PROFILE_FILE_NAME
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.runtime.spans import RecordedSpan
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.planning import LLAMA_7B

TIMES = Coefficients(a_ms_per_token2=1e-5, b_ms_per_token=0.02, c_ms=3.0)
SCHEMES = (Scheme(), Scheme(tp=2), Scheme(pp=2))
MAX_TOKENS = 1024
PROFILE = ProfileCostModel(
    device="made up",
    source="test",
    date="2026-01-02",
    schemes=tuple(
        ProfiledScheme(scheme=scheme, coefficients=TIMES, max_tokens=MAX_TOKENS)
        for scheme in SCHEMES
    ),
)
MODEL = ProfiledModel(shape=LLAMA_7B, dtype="bf16", recompute="none", core_attention="te")
OVERHEAD_MS = 7.0


class Machine:
    """Plans batches of one strategy by the profile and runs them by other times."""

    def __init__(self, strategy: str, num_ranks: int = 4) -> None:
        self.strategy = Strategy.parse(strategy, num_ranks)
        self._planner = GreedyPlanner(Pool.of(self.strategy), PROFILE)
        self._draw = random.Random(3)
        self._iteration = 0

    def run(
        self,
        refit: OnlineRefit,
        num_iterations: int,
        *,
        factor: float = 1.0,
        rank_factors: Mapping[int, float] | None = None,
        stage_factors: tuple[float, ...] = (1.0, 1.0),
        noise: float = 0.02,
    ) -> list[str]:
        """The refit's messages but its verdicts. Ranks of a replica wait for its slowest."""
        news: list[str] = []
        for _ in range(num_iterations):
            lengths = [self._draw.randint(20, 900) for _ in range(24)]
            plan = self._planner.plan(lengths, iteration=self._iteration)
            self._iteration += 1
            refit.add(self._times(plan, factor, rank_factors or {}, stage_factors, noise))
            news += [line for line in refit.news() if "not fitted" not in line]
        return news

    def _times(
        self,
        plan: IterationPlan,
        factor: float,
        rank_factors: Mapping[int, float],
        stage_factors: tuple[float, ...],
        noise: float,
    ) -> IterationTimes:
        rank_times_ms: dict[int, list[float]] = {}
        makespans_ms = [0.0]
        for replica in plan.replicas:
            slow = max(rank_factors.get(rank, 1.0) for rank in replica.ranks)
            work_ms = [
                TIMES.time_ms(m.lengths)
                * factor
                * slow
                * self._draw.uniform(1.0 - noise, 1.0 + noise)
                for m in replica.micro_batches
            ]
            for rank in replica.ranks:
                position = replica.replica.position_of(rank)
                assert position is not None
                stage = stage_factors[position.stage]
                rank_times_ms[rank] = [stage * time_ms for time_ms in work_ms]
            slowest_ms = [max(stage_factors[: replica.scheme.pp]) * t for t in work_ms]
            makespans_ms.append(pipeline_time_ms(slowest_ms, replica.scheme.pp))
        return IterationTimes(
            plan=plan,
            strategy=self.strategy,
            rank_times_ms=rank_times_ms,
            iteration_ms=max(makespans_ms) + OVERHEAD_MS,
        )


def test_without_drift_there_is_no_message_and_times_stay() -> None:
    refit = OnlineRefit(PROFILE)
    machine = Machine("2*tp1+tp2")
    assert machine.run(refit, 12) == []
    newest = refit.refitted()
    for scheme in (Scheme(), Scheme(tp=2)):
        assert newest.coefficients(scheme).time_ms([500, 100]) == pytest.approx(
            TIMES.time_ms([500, 100]), rel=0.03
        )
    assert newest.coefficients(Scheme(pp=2)) == TIMES  # never run
    assert newest.max_tokens(Scheme()) == MAX_TOKENS
    assert newest.overhead_ms(machine.strategy) == pytest.approx(OVERHEAD_MS)


def test_drift_is_reported_once_and_followed_and_its_end_is_reported() -> None:
    refit = OnlineRefit(PROFILE, RefitSettings(num_iterations=7))
    machine = Machine("4*tp1")
    assert machine.run(refit, 8) == []
    news = machine.run(refit, 10, factor=1.4)
    assert len(news) == 1, news
    match = re.search(r"cost profile: tp1 takes ([\d.]+) times the profiled time", news[0])
    assert match is not None
    assert float(match.group(1)) == pytest.approx(1.4, rel=0.03)
    assert "more than 10%" in news[0]
    slower = refit.refitted().coefficients(Scheme())
    assert slower.time_ms([700]) == pytest.approx(1.4 * TIMES.time_ms([700]), rel=0.05)
    news = machine.run(refit, 10)
    assert len(news) == 1, news
    assert "back at" in news[0]


def test_faster_times_are_a_drift_too() -> None:
    news = Machine("4*tp1").run(OnlineRefit(PROFILE), 6, factor=0.5)
    assert len(news) == 1
    assert "-5" in news[0]


def test_a_drift_within_the_limit_is_followed_without_a_message() -> None:
    refit = OnlineRefit(PROFILE, RefitSettings(drift=0.5))
    assert Machine("4*tp1").run(refit, 8, factor=1.3) == []
    assert refit.refitted().coefficients(Scheme()).time_ms([300]) == pytest.approx(
        1.3 * TIMES.time_ms([300]), rel=0.05
    )


def test_a_slow_rank_is_named_and_is_not_a_drift() -> None:
    refit = OnlineRefit(PROFILE, RefitSettings(num_iterations=5))
    machine = Machine("4*tp1")
    news = machine.run(refit, 10, rank_factors={2: 1.5})
    assert len(news) == 1, news
    assert "slow rank: rank 2 takes 1.5" in news[0]
    assert "run tp1;" in news[0]
    assert machine.run(refit, 10) == ["slow rank: rank 2 is as fast as the others again"]


def test_ranks_that_wait_for_a_slow_one_are_named_with_it() -> None:
    news = Machine("2*tp2").run(OnlineRefit(PROFILE), 6, rank_factors={3: 1.5})
    assert [line.split(" takes")[0] for line in news if "slow rank" in line] == [
        "slow rank: rank 2",
        "slow rank: rank 3",
    ]


def test_ranks_of_a_stage_with_more_work_are_not_slow() -> None:
    refit = OnlineRefit(PROFILE)
    machine = Machine("2*pp2")
    assert machine.run(refit, 8, stage_factors=(0.4, 1.0)) == []
    assert refit.refitted().coefficients(Scheme(pp=2)).time_ms([600]) == pytest.approx(
        TIMES.time_ms([600]), rel=0.05
    )
    assert refit.refitted().overhead_ms(machine.strategy) == pytest.approx(OVERHEAD_MS)


def test_a_single_replica_has_no_slow_ranks() -> None:
    settings = RefitSettings(drift=0.6)
    machine = Machine("tp2+2*tp1")
    assert machine.run(OnlineRefit(PROFILE, settings), 6, rank_factors={0: 1.5, 1: 1.5}) == []


def test_the_first_iteration_of_a_strategy_counts_for_nothing() -> None:
    refit = OnlineRefit(PROFILE)
    machine = Machine("4*tp1")
    machine.run(refit, 1, factor=100.0)
    assert machine.run(refit, 6) == []
    assert refit.refitted().overhead_ms(machine.strategy) == pytest.approx(OVERHEAD_MS)


def test_the_next_run_can_begin_with_the_newest_times() -> None:
    refit = OnlineRefit(PROFILE)
    machine = Machine("4*tp1")
    machine.run(refit, 8, factor=2.0)
    newest = refit.refitted()
    pool = Pool.of(machine.strategy)
    profile = newest.to_profile(pool, Limits(newest), model=MODEL, device="d", source="s", date="x")
    again = ProfileCostModel.from_json(profile.to_json(), what="profile")
    assert again.coefficients(Scheme()) == newest.coefficients(Scheme())
    assert again.overhead_ms(machine.strategy) == newest.overhead_ms(machine.strategy)
    plan = GreedyPlanner(Pool.of(machine.strategy), newest).plan([500, 400, 300, 200])
    before = GreedyPlanner(Pool.of(machine.strategy), PROFILE).plan([500, 400, 300, 200])
    assert plan.makespan_s == pytest.approx(2.0 * before.makespan_s, rel=0.05)
    assert plan.predicted_time_s == pytest.approx(plan.makespan_s + OVERHEAD_MS / 1e3)


def test_rows_that_were_assumed_stay_assumed_unless_they_are_fitted() -> None:
    base = replace(PROFILE, schemes=tuple(replace(row, is_assumed=True) for row in PROFILE.schemes))
    refit = OnlineRefit(base)
    machine = Machine("4*tp1")
    machine.run(refit, 8, factor=2.0)
    newest = refit.refitted()
    pool = Pool.of(machine.strategy, Strategy.parse("2*tp2", 4))
    profile = newest.to_profile(pool, Limits(newest), model=MODEL, device="d", source="s", date="x")
    assert profile.assumed_schemes(pool) == (Scheme(tp=2),)


def test_a_standard_error_takes_two_iterations() -> None:
    refit = OnlineRefit(PROFILE, RefitSettings(min_iterations=2))
    Machine("4*tp1").run(refit, 5, factor=2.0)
    assert refit.refitted().times


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


def test_the_profile_for_the_next_run_has_the_limits_of_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    strategies = [Strategy.parse(text, 4) for text in ("4*tp1", "2*tp2")]
    limits = Limits(PROFILE)
    planning = Planning(
        cost_model=PROFILE, limits=limits, pool=Pool.of(*strategies), left_out=(), source="test"
    )
    flags = cast(Any, SimpleNamespace(refit_drift=0.1))
    refit = RunRefit(
        flags,
        lambda: planning,
        dist.HashStore(),
        model=MODEL,
        gradient_bytes=2,
        has_cuda=False,
    )
    # The other strategy was dropped, and the next run must find its scheme.
    reduced = limits.reduced([(Scheme(), 700), (Scheme(tp=2), 0)])
    planning = replace(planning, limits=reduced, pool=Pool.of(strategies[0]))
    refit.write(tmp_path)
    written = ProfileCostModel.read(tmp_path / REFITTED_PROFILE_FILE_NAME)
    assert written.gradient_bytes == 2
    assert {row.scheme: row.max_tokens for row in written.schemes} == {
        Scheme(): 700,
        Scheme(tp=2): 0,
    }
    assert written.model == MODEL
