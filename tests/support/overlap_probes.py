"""Runs on every rank for tests of overlap: spans, memory, faults, and bitwise results."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from megatron.hydraulis.optimizer.sharded_adamw import ShardedAdamW
from megatron.hydraulis.runtime import engine as engine_module
from megatron.hydraulis.runtime import regroup
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.regroup import OneStepRoute
from megatron.hydraulis.runtime.spans import MemoryRecorder, RecordedSpan
from megatron.hydraulis.runtime.strategy_runtime import StrategyRuntime
from megatron.hydraulis.transfer.calls import Calls
from tests.support.forked_ranks import ForkedRanks
from tests.support.gloo_pool import prepare_parent
from tests.support.models import Job, build_engine, packs_of_rank, use_fp64_loss

LATE_S = 0.2
"""Delay of one rank, so that the order of events is certain."""


def spans_of_job(job: Job, late_rank: int) -> list[list[RecordedSpan]]:
    """Every rank returns the spans of each iteration; one rank begins each of them late."""
    spans = MemoryRecorder()
    engine = build_engine(job, spans)
    taken = []
    for i, which in enumerate(job.schedule):
        strategy = engine.pool.strategies[which]
        batches = packs_of_rank(strategy, job.assignments[i], job.batches[i], engine.rank)
        dist.barrier()
        if engine.rank == late_rank:
            time.sleep(LATE_S)
        engine.train_step(strategy.name, batches, make_forward_step())
        taken.append(spans.take())
    return taken


@dataclass(frozen=True)
class MemoryProbe:
    """Bytes of one rank."""

    arenas: dict[str, int]
    """After an iteration of each strategy."""
    needed: dict[str, int]
    """By strategy: parameters and gradients of the rank's role, with alignment."""
    staging: int
    """At the end."""
    num_models: int


def probe_memory(job: Job) -> MemoryProbe:
    """Every rank runs an iteration of each strategy of the job, twice over."""
    engine = build_engine(job)
    arenas, needed = {}, {}
    for _ in range(2):
        for i, strategy in enumerate(engine.pool.strategies):
            batches = packs_of_rank(strategy, job.assignments[i], job.batches[i], engine.rank)
            engine.train_step(strategy.name, batches, make_forward_step())
            arenas[strategy.name] = engine.memory.num_bytes
            runtime = engine.runtime_of(strategy.name)
            of_parameters = runtime.num_parameters * engine.dtype.itemsize
            needed[strategy.name] = of_parameters + bytes_of_gradients(engine, runtime)
    models = {id(engine.runtime_of(s.name).model) for s in engine.pool.strategies}
    models.discard(id(None))
    return MemoryProbe(arenas, needed, engine.staging.num_bytes, len(models))


def bytes_of_gradients(engine: RuntimeEngine, runtime: StrategyRuntime) -> int:
    """Bytes of the arena's gradients and of those of the shards, which begin in their place."""
    place = runtime.place_of_shards(engine.shards)
    num_elements = max(runtime.num_gradients, place + engine.shards.parameters.numel())
    return num_elements * engine.shards.gradients.element_size()


@dataclass(frozen=True)
class ChangeProbe:
    """Bytes of one rank's arenas when the strategy changes."""

    while_built: list[int]
    """Each time before a part of the second strategy's model is bound."""
    after_update: list[int]
    """When the gather of the second strategy is running, and then that of the first one again."""
    parameters: list[int]
    """Needed by each of the two."""
    gradients: list[int]


def probe_change(job: Job) -> ChangeProbe:
    """Every rank runs an iteration of each strategy, with the other one announced as the next."""
    engine = build_engine(job)
    engine.gather(engine.pool.strategies[0].name)
    while_built: list[int] = []
    after_update: list[int] = []
    reaching = engine.memory.reaching

    def noted(num_parameters: int, num_gradients: int) -> Any:
        while_built.append(engine.memory.num_bytes)
        return reaching(num_parameters, num_gradients)

    with patch.object(engine.memory, "reaching", noted):
        for i, strategy in enumerate(engine.pool.strategies):
            batches = packs_of_rank(strategy, job.assignments[i], job.batches[i], engine.rank)
            other = engine.pool.strategies[1 - i].name
            engine.train_step(strategy.name, batches, make_forward_step(), next_strategy=other)
            after_update.append(engine.memory.num_bytes)
    engine.finish_regrouping()
    runtimes = [engine.runtime_of(strategy.name) for strategy in engine.pool.strategies]
    return ChangeProbe(
        while_built,
        after_update,
        [runtime.num_parameters * engine.dtype.itemsize for runtime in runtimes],
        [bytes_of_gradients(engine, runtime) for runtime in runtimes],
    )


def order_of_update(job: Job) -> tuple[Calls, list[str]]:
    """Every rank returns the calls of the second strategy, and those of optimizer and track in the
    update of an iteration that knows it as the next one."""
    engine = build_engine(job)
    first, second = engine.pool.strategies
    batches = packs_of_rank(first, job.assignments[0], job.batches[0], engine.rank)
    log: list[str] = []
    step_by_bucket, submit = engine.optimizer.step_by_bucket, engine._track.submit

    def noted_step(*args: Any) -> Iterator[int]:
        log.clear()
        for bucket in step_by_bucket(*args):
            log.append(f"update {bucket}")
            yield bucket

    def noted_submit(submitted: Any) -> Any:
        log.append(f"{submitted.span} {submitted.detail['bucket']}")
        return submit(submitted)

    with (
        patch.object(engine.optimizer, "step_by_bucket", noted_step),
        patch.object(engine._track, "submit", noted_submit),
    ):
        engine.train_step(first.name, batches, make_forward_step(), next_strategy=second.name)
    engine.finish_regrouping()
    return engine.runtime_of(second.name).regrouper.calls, log


def bytes_of_iterations(job: Job) -> list[tuple[str, int, int]]:
    """Every rank returns for each iteration: strategy, bytes that the collectives of regrouping
    exchanged with other ranks, and the engine's figure."""
    engine = build_engine(job)
    group, rank, num_ranks = engine.groups.regroup, engine.rank, dist.get_world_size()
    exchanged: list[int] = []
    all_to_all, all_gather = dist.all_to_all_single, regroup.all_gather

    def counted_all_to_all(
        received: torch.Tensor, sent: torch.Tensor, *sizes: Any, **named: Any
    ) -> Any:
        if named.get("group") is group:
            for tensor, of_ranks in zip((received, sent), sizes, strict=True):
                assert sum(of_ranks) == tensor.numel()
                exchanged.append((sum(of_ranks) - of_ranks[rank]) * tensor.element_size())
        return all_to_all(received, sent, *sizes, **named)

    def counted_all_gather(received: torch.Tensor, sent: torch.Tensor, **named: Any) -> Any:
        assert named["group"] is group
        exchanged.append(2 * (num_ranks - 1) * sent.numel() * sent.element_size())
        return all_gather(received, sent, **named)

    found = []
    with (
        patch.object(dist, "all_to_all_single", counted_all_to_all),
        patch.object(regroup, "all_gather", counted_all_gather),
    ):
        for i, which in enumerate(job.schedule):
            strategy = engine.pool.strategies[which]
            batches = packs_of_rank(strategy, job.assignments[i], job.batches[i], rank)
            outcome = engine.train_step(strategy.name, batches, make_forward_step())
            found.append((strategy.name, sum(exchanged), outcome.regroup_bytes))
            exchanged.clear()
    return found


def run_there_and_back(job: Job) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Every rank returns shards and moments after two iterations of the first strategy, without and
    with an iteration of the second one between them that trains nothing."""
    use_fp64_loss()
    found = []
    for visits in (False, True):
        engine = build_engine(job)
        first, second = engine.pool.strategies[:2]
        for i in range(2):
            batches = packs_of_rank(first, job.assignments[i], job.batches[i], engine.rank)
            following = second.name if visits and i == 0 else first.name
            known = following if job.knows_next and i == 0 else None
            outcome = engine.train_step(
                first.name, batches, make_forward_step(), next_strategy=known
            )
            assert outcome.updated
            if visits and i == 0:
                nothing = packs_of_rank(second, job.assignments[2], job.batches[2], engine.rank)
                untrained = [
                    replace(b, weights=torch.zeros_like(b.weights), trained_tokens=0)
                    for b in nothing
                ]
                assert not engine.train_step(second.name, untrained, make_forward_step()).updated
        optimizer = engine.optimizer
        tensors = (engine.shards.parameters, optimizer.exp_avg, optimizer.exp_avg_sq)
        found.append([tensor.numpy().copy() for tensor in tensors])
    return found[0], found[1]


class InjectedFault(RuntimeError):
    """An injected fault."""


@contextmanager
def fault_in(phase: str, *, on_this_rank: bool) -> Iterator[None]:
    """Makes a gather, forward, scatter or optimizer step of this rank raise."""
    if not on_this_rank:
        yield
        return

    def fail(*_: Any, **__: Any) -> Any:
        raise InjectedFault(f"injected in {phase}")

    target: tuple[Any, str] = {
        "gather": (OneStepRoute, "gather"),
        "forward": (engine_module, "run_micro_batches"),
        "scatter": (OneStepRoute, "scatter"),
        "optimizer": (ShardedAdamW, "step_by_bucket"),
    }[phase]
    with patch.object(*target, fail):
        yield


@dataclass(frozen=True)
class Failure:
    """The error of a rank's step, or its output if the process was ended at once."""

    kind: str
    text: str
    """Message and notes."""


def failures_of(
    job: Job, num_ranks: int, phase: str, culprit: int, folder: Path, *, timeout_s: float
) -> list[Failure | None]:
    """The parent runs one step of the job on separate ranks, one of which fails in a phase.

    As a program would, a rank that met an error ends, and with it its connections. None
    means that a rank did not answer within the timeout.
    """
    prepare_parent()

    def serve(join: Callable[[], None], connection: Connection) -> None:
        join()
        output = os.open(folder / str(dist.get_rank()), os.O_CREAT | os.O_WRONLY)
        sys.stderr.flush()
        os.dup2(output, 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)  # pytest has replaced it
        connection.send(_failure(job, phase, culprit))
        os._exit(1)

    ranks = ForkedRanks(num_ranks, serve, timeout_s=10 * timeout_s)
    try:
        deadline = time.monotonic() + timeout_s
        found: list[Failure | None] = []
        for rank, connection in enumerate(ranks.connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                found.append(None)
                continue
            try:
                found.append(connection.recv())
            except EOFError:
                found.append(Failure("ended", (folder / str(rank)).read_text()))
        return found
    finally:
        ranks.close()


def _failure(job: Job, phase: str, culprit: int) -> Failure:
    use_fp64_loss()
    engine = build_engine(job)
    strategy = engine.pool.strategies[0]
    batches = packs_of_rank(strategy, job.assignments[0], job.batches[0], engine.rank)
    try:
        with fault_in(phase, on_this_rank=engine.rank == culprit):
            engine.train_step(strategy.name, batches, make_forward_step())
    except Exception as error:
        return Failure(type(error).__name__, "; ".join([str(error), *error.__notes__]))
    return Failure("none", "")
