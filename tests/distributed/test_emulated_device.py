"""An emulated device through the engine: every rank sleeps exactly what the plan's times say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from benchmarks.emulated_device import (
    EmulatedBatch,
    EmulatedDevice,
    EmulatedForwardStep,
    scaled,
)
from megatron.hydraulis.cost_model import FORWARD_SHARE
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.replica_plan import MicroBatch, ReplicaPlan
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from tests.support.gloo_pool import pool_of, worker_groups
from tests.support.models import SmallModel

pytestmark = pytest.mark.distributed

SCALE = 0.5
NUM_LAYERS = 2
LENGTHS = ((900, 700, 600, 500, 400, 300, 200, 100, 50, 3), (1500, 20, 10))
STRATEGIES = ("tp2+pp2", "tp2pp2", "2*tp1+2*idle")


def profile() -> dict[str, Any]:
    """A cost profile with a row for each scheme of the test."""

    def row(tp: int, pp: int, max_tokens: int) -> dict[str, Any]:
        return {
            "tp": tp,
            "cp": 1,
            "pp": pp,
            "a_ms_per_token2": 1.1e-5 / (tp * pp),
            "b_ms_per_token": 0.13 / (tp * pp),
            "c_ms": 7.0,
            "max_tokens": max_tokens,
        }

    return {
        "device": "imagined",
        "source": "made for tests",
        "date": "2026-01-01",
        "schemes": [row(1, 1, 2000), row(2, 1, 1600), row(1, 2, 1600), row(2, 2, 1600)],
    }


def emulated_device() -> EmulatedDevice:
    whole = ProfileCostModel.from_json(profile(), what="profile")
    return EmulatedDevice(scaled(whole, SCALE), SCALE)


class FrozenClock:
    """Time does not advance, so that sleeps are exactly the modelled times."""

    def __init__(self) -> None:
        self.sleeps_s: list[float] = []

    def now_s(self) -> float:
        return 0.0

    def sleep(self, duration_s: float) -> None:
        self.sleeps_s.append(duration_s)


@dataclass(frozen=True)
class Iteration:
    """One rank's iteration."""

    sleeps_s: tuple[float, ...]
    lengths: tuple[tuple[int, ...], ...]
    """Of its micro-batches."""
    num_rows: int
    """Tokens that went through the model."""
    num_tokens: int
    """Trained by all ranks."""


def strategies(num_ranks: int) -> Pool:
    parsed = tuple(Strategy.parse(text, num_ranks, name=text) for text in STRATEGIES)
    return Pool(num_ranks=num_ranks, ranks_per_node=num_ranks, strategies=parsed)


def shortened(device: EmulatedDevice, mine: ReplicaPlan, micro_batch: MicroBatch) -> EmulatedBatch:
    sequences = [np.zeros(length + 1, dtype=np.int64) for length in micro_batch.lengths]
    return device.shorten(pack(sequences, mine.scheme.tp), mine.scheme)


def run_plans(plans: list[str]) -> list[Iteration]:
    """On every rank: the plans in sequence, on an emulated device."""
    device = emulated_device()
    pool = strategies(dist.get_world_size())
    engine = RuntimeEngine(
        SmallModel(num_layers=NUM_LAYERS).definition(),
        pool,
        AdamWSettings(lr=1e-3),
        seed=1,
        groups=worker_groups(),
    )
    clock = FrozenClock()
    forward_step = EmulatedForwardStep(make_forward_step(), now_s=clock.now_s, sleep=clock.sleep)
    done = []
    for text in plans:
        plan = IterationPlan.from_json(json.loads(text))
        mine = plan.replica_of(engine.rank)
        batches = [] if mine is None else [shortened(device, mine, m) for m in mine.micro_batches]
        clock.sleeps_s.clear()
        outcome = engine.train_step(plan.strategy, batches, forward_step)
        done.append(
            Iteration(
                tuple(clock.sleeps_s),
                tuple(batch.lengths for batch in batches),
                sum(batch.tokens.size(-1) for batch in batches),
                outcome.loss.trained_tokens,
            )
        )
    return done


def expected_sleeps_s(times_ms: list[float], stage: int, num_stages: int) -> list[float]:
    """The operations of a stage in 1F1B order."""
    forwards = [FORWARD_SHARE * (t / 1e3) for t in times_ms]
    backwards = [t / 1e3 - f for t, f in zip(times_ms, forwards, strict=True)]
    num_ahead = min(num_stages - 1 - stage, len(times_ms))
    sleeps = forwards[:num_ahead]
    for k, forward in enumerate(forwards[num_ahead:]):
        sleeps += [forward, backwards[k]]
    return sleeps + backwards[len(backwards) - num_ahead :]


def test_ranks_sleep_the_modelled_times_and_plans_keep_the_real_lengths() -> None:
    num_ranks = 4
    pool = strategies(num_ranks)
    device = emulated_device()
    cost_model = device.cost_model
    plans = [
        CertifiedPlanner(
            Pool(num_ranks=num_ranks, ranks_per_node=num_ranks, strategies=(strategy,)), cost_model
        ).plan(lengths)
        for strategy in pool.strategies
        for lengths in LENGTHS
    ]
    ranks: list[list[Iteration]] = pool_of(num_ranks).run(
        run_plans, [json.dumps(plan.to_json()) for plan in plans]
    )
    for index, plan in enumerate(plans):
        lengths = LENGTHS[index % len(LENGTHS)]
        plan.validate(lengths, pool.strategy(plan.strategy), cost_model.max_tokens)
        num_micro_batches = sum(len(replica.micro_batches) for replica in plan.replicas)
        for rank in range(num_ranks):
            found, mine = ranks[rank][index], plan.replica_of(rank)
            # At least a token of each micro-batch is trained, and nearly none of the real ones.
            assert num_micro_batches <= found.num_tokens <= 2 * num_micro_batches < sum(lengths)
            if mine is None:
                assert found.sleeps_s == ()
                continue
            assert found.lengths == tuple(m.lengths for m in mine.micro_batches)
            assert found.num_rows == mine.scheme.tp * len(mine.micro_batches)
            coefficients = cost_model.coefficients(mine.scheme)
            times_ms = [coefficients.time_ms(m.lengths) for m in mine.micro_batches]
            stage = mine.ranks.index(rank) // mine.scheme.tp
            wanted = expected_sleeps_s(times_ms, stage, mine.scheme.pp)
            assert list(found.sleeps_s) == wanted, (plan.strategy, rank)


WAVE = ((0, 2, (900, 20)), (2, 1, (300,)), (3, 1, ()))
"""Offset and size of every context group of a width of 4, and what it runs."""


def wave_profile() -> ProfileCostModel:
    """Groups of two take six tenths of the time of one rank."""
    rows = [(1, 1.0), (2, 0.6), (4, 0.4)]
    content = profile()
    content["schemes"] = [
        content["schemes"][0] | {"cp": cp, "b_ms_per_token": 0.1 * share} for cp, share in rows
    ]
    return ProfileCostModel.from_json(content, what="profile")


def run_wave() -> tuple[list[float], int, int]:
    """On every rank: how long it slept, the tokens it ran, and those that all ranks trained."""
    strategy = Strategy.parse("cp4~", 4, name="cp4~")
    engine = RuntimeEngine(
        SmallModel(num_layers=NUM_LAYERS).definition(),
        Pool(num_ranks=4, ranks_per_node=4, strategies=(strategy,)),
        AdamWSettings(lr=1e-3),
        seed=1,
        groups=worker_groups(),
    )
    offset, size, lengths = next(g for g in WAVE if g[0] <= engine.rank < g[0] + g[1])
    part = pack(
        [np.zeros(length + 1, dtype=np.int64) for length in lengths],
        context_size=size,
        context_rank=engine.rank - offset,
        allow_empty=True,
    )
    batch = EmulatedDevice(wave_profile()).shorten(part, strategy.replicas[0].scheme)
    clock = FrozenClock()
    outcome = engine.train_step(
        "cp4~",
        [batch],
        EmulatedForwardStep(make_forward_step(), now_s=clock.now_s, sleep=clock.sleep),
    )
    return clock.sleeps_s, batch.tokens.size(-1), outcome.loss.trained_tokens


def test_groups_of_a_wave_take_their_own_times() -> None:
    ranks = pool_of(4).run(run_wave)
    cost_model = wave_profile()
    for rank, (sleeps_s, num_rows, num_tokens) in enumerate(ranks):
        _, size, lengths = next(g for g in WAVE if g[0] <= rank < g[0] + g[1])
        time_ms = cost_model.coefficients(Scheme(cp=size)).time_ms(lengths)
        assert sleeps_s == expected_sleeps_s([time_ms], 0, 1)
        assert num_rows == (2 if size == 2 else 1)
        # The first two tokens of each part of the pair, and the first of one of the others.
        assert num_tokens == 2 + 2 + 1
