"""Gradients of several calls add up on the shards and are divided once."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from tests.support.comparison import assert_same
from tests.support.gloo_pool import pool_of
from tests.support.law import FP64_TOLERANCE, SHORT_MODEL, law_job, law_reference
from tests.support.models import (
    Job,
    RankRun,
    assemble,
    build_engine,
    packs_of_rank,
    rank_run,
    spread,
    use_fp64_loss,
)

pytestmark = pytest.mark.distributed

NUM_FIRST = 3
"""Sequences of the first of two calls."""


def accumulate(job: Job) -> RankRun:
    """On every rank: each batch in two calls, on the first and the last strategy, and an update."""
    use_fp64_loss()
    engine = build_engine(job)
    parameters, losses, norms = [], [], []
    for batch, weights in zip(job.batches, job.weights, strict=True):
        call(engine, job.strategies[0], batch[:NUM_FIRST], weights[:NUM_FIRST])
        call(engine, job.strategies[-1], batch[NUM_FIRST:], weights[NUM_FIRST:])
        outcome = engine.optim_step()
        parameters.append(engine.shards.parameters.cpu().numpy().copy())
        losses.append(outcome.loss.mean)
        norms.append(outcome.gradient_norm or 0.0)
    return rank_run(engine, [], parameters, losses, norms)


def call(
    engine: RuntimeEngine, name: str, part: Any, weights: Any = None, *, is_divided: bool = False
) -> None:
    strategy = engine.pool.strategy(name)
    assignment = spread(len(part), len(strategy.replicas))
    packs = packs_of_rank(strategy, assignment, part, engine.rank, weights=weights)
    packs = [pack.to(engine.device) for pack in packs]
    engine.forward_backward(name, packs, make_forward_step(), is_divided=is_divided)


@pytest.mark.parametrize(
    ("strategies", "ranks_per_node"),
    [
        (("4*tp1",), None),
        (("4*tp1", "tp2+pp2"), None),
        (("2*cp2", "tp2pp2"), 2),
        (("cp4fs", "2*cp2fs"), None),
    ],
)
def test_two_calls_and_an_update_are_those_of_both_batches(
    strategies: tuple[str, ...], ranks_per_node: int | None
) -> None:
    job = replace(law_job(4, strategies[0]), strategies=strategies, ranks_per_node=ranks_per_node)
    runs: list[RankRun] = pool_of(4).run(accumulate, job)
    expected = law_reference(job.model)
    for i, gradients in enumerate(expected.gradients):
        found = assemble(runs, [run.parameters[i] for run in runs])
        assert_same(found, expected.parameters[i], FP64_TOLERANCE)
        norm = math.sqrt(sum(float(np.square(each).sum()) for each in gradients.values()))
        assert runs[0].norms[i] == pytest.approx(norm, rel=1e-10)
        assert runs[0].losses[i] == pytest.approx(expected.losses[i], rel=1e-12)


def update_beyond_the_range(job: Job) -> tuple[bool, bool]:
    """Whether the rank takes an update whose gradients overflow, and whether parameters changed."""
    engine = build_engine(job)
    before = engine.shards.parameters.clone()
    call(engine, job.strategies[0], job.batches[0])
    outcome = engine.optim_step(divisor=1e-41)
    return outcome.updated, not torch.equal(engine.shards.parameters, before)


def test_gradients_that_overflow_when_they_are_divided_update_nothing() -> None:
    job = law_job(2, "2*tp1", replace(SHORT_MODEL, dtype=torch.float32))
    assert pool_of(2).run(update_beyond_the_range, job) == [(False, False)] * 2


def bytes_of_updates(job: Job) -> tuple[list[int], int, int]:
    """Bytes of the rank in an update of one call and one of two, and in a gather and a scatter."""
    engine, (name,) = build_engine(job), job.strategies
    found = []
    for num_calls in (1, 2):
        for _ in range(num_calls):
            call(engine, name, job.batches[0], job.weights[0])
        found.append(engine.optim_step().regroup_bytes)
    traffic = engine.runtime_of(name).regrouper.traffic
    gather = traffic.gather_received_bytes + traffic.gather_sent_bytes
    return found, gather, traffic.scatter_received_bytes + traffic.scatter_sent_bytes


def test_a_gather_that_serves_two_calls_counts_once() -> None:
    for found, gather, scatter in pool_of(2).run(bytes_of_updates, law_job(2, "2*tp1")):
        assert found == [gather + scatter, gather + 2 * scatter]
        assert gather > 0
