"""A run on every rank that evaluates between training iterations."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.hydraulis.runtime.executor import make_forward_step
from tests.support.gloo_pool import pool_of
from tests.support.models import Job, build_engine, packs_of_rank, spread, use_fp64_loss


@dataclass(frozen=True)
class EvaluatedRun:
    """Results of one rank."""

    losses: tuple[float, ...]
    """Of training."""
    states: tuple[tuple[np.ndarray, ...], ...]
    """Parameters, both moments and gradients of its shards after each iteration."""
    evaluated: tuple[tuple[float, ...], ...]
    """Before each iteration, in each strategy of the pool: the loss of that iteration's batch."""


def run_evaluating(job: Job, evaluates: bool, tells_next: bool) -> EvaluatedRun:
    """Every rank runs all iterations, each after an evaluation in every strategy if asked for.

    tells_next: whether a training iteration knows the strategy of the next one, and so begins to
    gather for it before the evaluation comes.
    """
    use_fp64_loss()
    engine = build_engine(job)
    step = make_forward_step()
    losses, states, evaluated = [], [], []
    for i, which in enumerate(job.schedule):
        of_strategies = []
        for strategy in engine.pool.strategies if evaluates else ():
            engine.set_training(False)
            spread_out = spread(len(job.batches[i]), len(strategy.replicas), per_micro_batch=1)
            batches = packs_of_rank(
                strategy, spread_out, job.batches[i], engine.rank, weights=job.weights_of(i)
            )
            of_strategies.append(engine.evaluate(strategy.name, batches, step).mean)
            engine.set_training(True)
        evaluated.append(tuple(of_strategies))
        strategy = engine.pool.strategies[which]
        following = None
        if tells_next and i + 1 < len(job.schedule):
            following = engine.pool.strategies[job.schedule[i + 1]].name
        batches = packs_of_rank(
            strategy,
            job.assignments[i],
            job.batches[i],
            engine.rank,
            weights=job.weights_of(i),
        )
        outcome = engine.train_step(strategy.name, batches, step, next_strategy=following)
        assert outcome.updated
        losses.append(outcome.loss.mean)
        shards, optimizer = engine.shards, engine.optimizer
        tensors = (shards.parameters, optimizer.exp_avg, optimizer.exp_avg_sq, shards.gradients)
        states.append(tuple(tensor.clone().numpy() for tensor in tensors))
    return EvaluatedRun(tuple(losses), tuple(states), tuple(evaluated))


def check_evaluation(job: Job, *, tells_next: bool = True) -> None:
    """On 4 ranks training is the same bit by bit with evaluations in between, and these have the
    losses of the weights before the iteration, in every strategy."""
    plain: list[EvaluatedRun] = pool_of(4).run(run_evaluating, job, False, tells_next)
    between: list[EvaluatedRun] = pool_of(4).run(run_evaluating, job, True, tells_next)
    for expected, found in zip(plain, between, strict=True):
        assert found.losses == expected.losses
        for states in zip(found.states, expected.states, strict=True):
            for after, before in zip(*states, strict=True):
                np.testing.assert_array_equal(after, before)
        for losses, trained in zip(found.evaluated, found.losses, strict=True):
            assert len(losses) == len(job.strategies)
            np.testing.assert_allclose(losses, trained, rtol=1e-12)
    assert len(set(plain[0].losses)) == len(job.schedule)
