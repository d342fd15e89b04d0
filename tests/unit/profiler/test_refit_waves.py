"""Waves give times of groups: each group size is fitted separately and written as a row."""

import random

import pytest

from megatron.hydraulis.cost_model import Coefficients, ProfileCostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.profile import ProfiledModel, ProfiledScheme
from megatron.hydraulis.loop.refit import IterationTimes, OnlineRefit
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import ContextGroup, MicroBatch, ReplicaPlan
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.planning import LLAMA_7B

SCHEME = Scheme(cp=2, pp=2, splits_cp=True)
PROFILED = Coefficients(a_ms_per_token2=1e-5, b_ms_per_token=0.02, c_ms=3.0)
BASE = ProfileCostModel(
    device="made up",
    source="test",
    date="2026-01-02",
    schemes=tuple(
        ProfiledScheme(scheme=Scheme(cp=cp, pp=2), coefficients=PROFILED, max_tokens=1000)
        for cp in (1, 2)
    ),
)
FACTORS = {1: 1.5, 2: 0.7}
"""True over profiled time, by the size of a group."""


def iteration(draw: random.Random, number: int) -> IterationTimes:
    """A wave of two groups, of which one may be empty, and a micro-batch on both ranks."""
    lengths = tuple(draw.randint(20, 400) for _ in range(4))
    groups = (ContextGroup(0, 1, number % 2), ContextGroup(1, 1, 2 - number % 2))
    replica = ReplicaPlan(
        SCHEME,
        (0, 1, 2, 3),
        (MicroBatch((0, 1), lengths[:2], groups), MicroBatch((2, 3), lengths[2:])),
        predicted_time_s=1.0,
    )
    plan = IterationPlan(
        iteration=number, strategy="cp2~pp2", replicas=(replica,), predicted_time_s=1.0
    )
    times_ms: dict[int, list[float]] = {rank: [] for rank in range(4)}
    for micro_batch in replica.micro_batches:
        for _, share in replica.shares(micro_batch):
            time_ms = FACTORS[share.group.size] * PROFILED.time_ms(share.lengths)
            for column in share.group.columns:
                times_ms[column].append(time_ms)
                times_ms[2 + column].append(0.9 * time_ms)
    strategy = Strategy.parse("cp2~pp2", 4)
    return IterationTimes(plan=plan, strategy=strategy, rank_times_ms=times_ms, iteration_ms=100.0)


def test_every_group_size_is_fitted_separately() -> None:
    draw = random.Random(5)
    refit = OnlineRefit(BASE)
    for number in range(20):
        refit.add(iteration(draw, number))
    fitted = refit.refitted()
    for cp, factor in FACTORS.items():
        found = fitted.coefficients(Scheme(cp=cp, pp=2))
        for lengths in [(100,), (300, 40)]:
            assert found.time_ms(lengths) == pytest.approx(
                factor * PROFILED.time_ms(lengths), rel=0.02
            )
    assert fitted.coefficients(SCHEME) == fitted.coefficients(Scheme(cp=2, pp=2))
    messages = " ".join(refit.news())
    assert "cp2pp2 takes 0.70 times" in messages
    assert "pp2 takes 1.50 times" in messages
    assert "slow rank" not in messages


def test_the_profile_has_a_row_for_every_known_size() -> None:
    refit = OnlineRefit(BASE)
    draw = random.Random(6)
    for number in range(8):
        refit.add(iteration(draw, number))
    pool = Pool.of(Strategy.parse("cp2~pp2", 4))
    newest = refit.refitted()
    profile = newest.to_profile(
        pool,
        Limits(newest),
        model=ProfiledModel(shape=LLAMA_7B),
        device="d",
        source="s",
        date="2026-01-03",
    )
    assert [row.scheme for row in profile.schemes] == [Scheme(cp=2, pp=2), Scheme(pp=2)]
    assert profile.coefficients(SCHEME) == refit.refitted().coefficients(Scheme(cp=2, pp=2))
