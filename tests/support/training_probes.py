"""Runs on every rank that inspect the engine: dtypes, and iterations that train nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from megatron.hydraulis.data.packed_batch import PackedBatch
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import make_forward_step
from tests.support.models import Job, build_engine, packs_of_rank


@dataclass(frozen=True)
class PrecisionProbe:
    """Dtypes after one step, by name; what this rank holds or owns."""

    parameter_dtypes: set[str]
    gradient_dtypes: set[str]
    shard_dtypes: set[str]
    optimizer_state_dtypes: set[str]
    num_micro_batches: int
    accumulation_error: float
    """Relative error (2-norm) of the gradient of all micro-batches together, against the fp32 sum
    of what each of them gives alone."""


@dataclass(frozen=True)
class UntrainedProbe:
    """Four iterations: trained, no sequences, all masked, trained."""

    updated: tuple[bool, ...]
    num_tokens: tuple[int, ...]
    moved_by_training: bool
    unchanged_by_missing: bool
    unchanged_by_masked: bool
    next_update_is_the_same: bool
    """As that of a run without the two iterations between."""


def probe_precision(job: Job) -> PrecisionProbe:
    """On every rank: the first iteration of the job, one replica over all ranks."""
    engine = build_engine(job)
    name = job.strategies[0]
    packs = _packs(engine, job, 0)
    step = make_forward_step()
    engine.forward_backward(name, packs, step)
    together = engine.shards.gradients.clone()
    alone = torch.zeros_like(together)
    for pack in packs:
        engine.forward_backward(name, [pack], step)
        alone += engine.shards.gradients
    engine.train_step(name, packs, step)
    runtime = engine.runtime_of(name)
    assert runtime.model is not None
    assert runtime.arena is not None
    parameters: list[Any] = list(runtime.model.model.parameters())
    gradients = [p.main_grad for p in parameters]
    states = [
        value
        for state in engine.optimizer.state_dict()["state"].values()
        for key, value in state.items()
        if key != "step"
    ]
    assert states
    return PrecisionProbe(
        parameter_dtypes={str(p.dtype) for p in parameters},
        gradient_dtypes={str(g.dtype) for g in gradients},
        shard_dtypes={str(engine.shards.parameters.dtype), str(engine.shards.gradients.dtype)},
        optimizer_state_dtypes={str(value.dtype) for value in states},
        num_micro_batches=len(packs),
        accumulation_error=((together - alone).norm() / alone.norm()).item(),
    )


def probe_untrained_iterations(job: Job) -> UntrainedProbe:
    """On every rank: two iterations of the job, with two between that have nothing to train."""
    name = job.strategies[0]
    step = make_forward_step()
    plain = build_engine(job)
    for i in range(2):
        plain.train_step(name, _packs(plain, job, i), step)

    engine = build_engine(job)
    start = _snapshot(engine)
    outcomes = [engine.train_step(name, _packs(engine, job, 0), step)]
    trained = _snapshot(engine)
    outcomes.append(engine.train_step(name, [], step))
    after_missing = _snapshot(engine)
    masked = [_masked(batch) for batch in _packs(engine, job, 0)]
    outcomes.append(engine.train_step(name, masked, step))
    after_masked = _snapshot(engine)
    outcomes.append(engine.train_step(name, _packs(engine, job, 1), step))
    return UntrainedProbe(
        updated=tuple(outcome.updated for outcome in outcomes),
        num_tokens=tuple(outcome.loss.num_tokens for outcome in outcomes),
        moved_by_training=not torch.equal(start[0], trained[0]),
        unchanged_by_missing=_equal(trained, after_missing),
        unchanged_by_masked=_equal(trained, after_masked),
        next_update_is_the_same=_equal(_snapshot(engine), _snapshot(plain)),
    )


def _packs(engine: Engine, job: Job, iteration: int) -> list[PackedBatch]:
    strategy = engine.pool.strategies[0]
    return packs_of_rank(strategy, job.assignments[iteration], job.batches[iteration], engine.rank)


def _masked(batch: PackedBatch) -> PackedBatch:
    return dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask), num_tokens=0)


def _snapshot(engine: Engine) -> list[torch.Tensor]:
    state = engine.optimizer.state_dict()["state"]
    values = [value for run in sorted(state) for _, value in sorted(state[run].items())]
    return [value.clone() for value in [engine.shards.parameters, *values]]


def _equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))
