"""A job of plain Megatron continues here, and ours there: same state, same losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks.workload import Workload
from megatron.hydraulis.checkpoint.inspect import inspect_folder
from megatron.hydraulis.checkpoint.loading import _num_steps, load_checkpoint
from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint, renamed_norms
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.runtime.executor import make_forward_step
from tests.support.checkpoints import differing_keys, make_engine, save_engine, whole_tensors
from tests.support.gloo_pool import pool_of
from tests.support.plain_checkpoints import (
    EXPERTS_WORKLOAD,
    LATENTS_WORKLOAD,
    NAMED_LATENTS_WORKLOAD,
    NAMED_WORKLOAD,
    PLAIN_WORKLOAD,
    load_and_train,
    on_plain_ranks,
    train_and_save,
)

pytestmark = pytest.mark.distributed

NUM_ITERATIONS = 2
SAME_LOSS = 2e-6


def continue_here(
    source: str, root: str, strategy: str, iterations: range, workload: Workload = PLAIN_WORKLOAD
) -> tuple[int, list[float]]:
    """On every rank of ours: load, save at once, train on; (optimizer's steps, losses)."""
    engine = make_engine(workload.definition(), (strategy,), seed=99)
    loaded = load_checkpoint(Path(source), engine, {"num_layers": 2, "hidden_size": 32})
    num_steps = int(engine.optimizer.num_steps)
    save_engine(engine, Path(root), loaded.upstream.iteration)
    return num_steps, train(engine, strategy, iterations)


def train(engine: Any, strategy: str, iterations: range) -> list[float]:
    replica = engine.pool.strategy(strategy).replica_of(engine.rank)
    replicas = list(engine.pool.strategy(strategy).replicas)
    losses = []
    for group in engine.optimizer.param_groups:
        group["weight_decay"] = PLAIN_WORKLOAD.optimizer.weight_decay * group["wd_mult"]
    for iteration in iterations:
        batches = PLAIN_WORKLOAD.micro_batches(iteration, replicas.index(replica), len(replicas))
        outcome = engine.train_step(strategy, batches, make_forward_step())
        losses.append(outcome.loss.mean)
    return losses


@pytest.mark.parametrize(
    ("tp", "pp", "ep", "workload"),
    [
        (2, 1, 1, PLAIN_WORKLOAD),
        (1, 2, 1, PLAIN_WORKLOAD),
        (1, 1, 2, EXPERTS_WORKLOAD),
        (1, 2, 1, LATENTS_WORKLOAD),
        pytest.param(2, 2, 1, EXPERTS_WORKLOAD, marks=pytest.mark.nightly),
        pytest.param(1, 2, 2, NAMED_WORKLOAD, marks=pytest.mark.nightly),
    ],
    ids=["tp2", "pp2", "ep2", "pp2, latents", "tp2pp2, experts", "ep2pp2, other names"],
)
def test_a_megatron_job_continues_here(
    tp: int, pp: int, ep: int, workload: Workload, tmp_path: Path
) -> None:
    source = tmp_path / "plain"
    job = str(source), NUM_ITERATIONS, "fully_reshardable", workload, ep
    losses = on_plain_ranks(4, train_and_save, tp, pp, *job)
    (inspected,) = inspect_folder(source).checkpoints
    assert (inspected.written_by, inspected.problems) == ("megatron", ())
    assert inspected.iteration == NUM_ITERATIONS
    optimizer = StoredCheckpoint(source).common_state()["optimizer"]
    assert _num_steps(source, optimizer, iteration=-1) == NUM_ITERATIONS
    expected = whole_tensors(source)
    new_names = renamed_norms(expected.keys())
    assert bool(new_names) == (workload in (EXPERTS_WORKLOAD, LATENTS_WORKLOAD))
    expected = {new_names.get(key, key): tensor for key, tensor in expected.items()}
    iterations = range(NUM_ITERATIONS, NUM_ITERATIONS + 2)
    ours = str(tmp_path / "ours")
    found = pool_of(2).run(continue_here, str(source), ours, "2*tp1", iterations, workload)
    assert found[0][0] == NUM_ITERATIONS
    assert differing_keys(expected, whole_tensors(tmp_path / "ours" / "iter_0000002")) == {}
    last_stage = losses[-1]
    assert found[0][1] == pytest.approx(last_stage[NUM_ITERATIONS:], rel=SAME_LOSS)


@pytest.mark.parametrize(
    ("tp", "ep", "workload"),
    [
        (2, 1, PLAIN_WORKLOAD),
        (1, 2, NAMED_WORKLOAD),
        (1, 1, NAMED_LATENTS_WORKLOAD),
        pytest.param(2, 1, NAMED_WORKLOAD, marks=pytest.mark.nightly),
    ],
    ids=["tp2", "ep2", "latents", "tp2 with experts"],
)
def test_our_job_continues_in_plain_megatron(
    tp: int, ep: int, workload: Workload, tmp_path: Path
) -> None:
    root = str(tmp_path / "ours")
    strategy = "tp2ep2+tp1" if ep > 1 else "tp2+tp1"
    losses = pool_of(3).run(train_and_save_ours, root, strategy, workload)
    source = tmp_path / "ours" / f"iter_{NUM_ITERATIONS:07d}"
    iterations = range(NUM_ITERATIONS, NUM_ITERATIONS + 2)
    again = tmp_path / "plain"
    job = str(source), str(again), iterations, workload, ep
    found = on_plain_ranks(2, load_and_train, tp, 1, *job)
    assert differing_keys(whole_tensors(source), whole_tensors(again)) == {}
    assert found[0] == pytest.approx(losses[0][NUM_ITERATIONS:], rel=SAME_LOSS)


def train_and_save_ours(root: str, strategy: str, workload: Workload) -> list[float]:
    engine = make_engine(workload.definition(), (strategy,))
    losses = train(engine, strategy, range(NUM_ITERATIONS))
    save_engine(engine, Path(root), NUM_ITERATIONS)
    return losses + train(engine, strategy, range(NUM_ITERATIONS, NUM_ITERATIONS + 2))


def test_optimizer_state_in_buckets_is_refused_and_weights_can_be_loaded(
    tmp_path: Path,
) -> None:
    source = tmp_path / "plain"
    on_plain_ranks(2, train_and_save, 2, 1, str(source), NUM_ITERATIONS, "dp_reshardable")
    messages = pool_of(2).run(load_refused, str(source))
    assert all("--dist-ckpt-optim-fully-reshardable" in message for message in messages)
    assert all("dp_reshardable" in message for message in messages)
    assert pool_of(2).run(load_weights, str(source)) == [0, 0]


def load_refused(source: str) -> str:
    engine = make_engine(PLAIN_WORKLOAD.definition(), ("tp2",))
    try:
        load_checkpoint(Path(source), engine, {})
    except ConfigurationError as error:
        return str(error)
    return f"rank {dist.get_rank()} loaded it"


def load_weights(source: str) -> int:
    engine = make_engine(PLAIN_WORKLOAD.definition(), ("tp2",))
    before = engine.shards.parameters.clone()
    load_checkpoint(Path(source), engine, {}, with_optimizer=False)
    assert not engine.shards.parameters.equal(before)
    return int(engine.optimizer.num_steps)
