"""Bytes of weights that columns share, and of their gradients, in NCCL's calls on the stand-in."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.outcome import StepOutcome
from tests.cuda_stand_in.lone_ranks import log_of
from tests.cuda_stand_in.order import Call, read_log
from tests.cuda_stand_in.orders import WITH_EXPERTS
from tests.cuda_stand_in.pool import run_logged
from tests.cuda_stand_in.test_bf16_gradients import SIZES
from tests.cuda_stand_in.test_same_update_law import BF16_MODEL
from tests.support.gloo_pool import pool_of
from tests.support.law import law_job
from tests.support.models import Job, SmallModel, build_engine, most_of_every_layer, run_job

pytestmark = pytest.mark.distributed

NUM_COLUMNS = 4
BF16_BYTES, FP32_BYTES = 2, 4
NUM_LAYERS = 8
MODEL = replace(BF16_MODEL, num_layers=NUM_LAYERS)
EXPERTS = replace(MODEL, variant=WITH_EXPERTS.variant)
PARTLY_FROZEN = replace(MODEL, frozen=most_of_every_layer(NUM_LAYERS))
BYTES = [
    *itertools.product((MODEL, EXPERTS), (None, torch.bfloat16), (0, 1)),
    (PARTLY_FROZEN, None, 1),
]
"""Models, dtypes of gradients, and layers that are gathered ahead."""


def units_of(job: Job) -> dict[int, dict[str, Counter[str]]]:
    """On every rank: elements of each unit where it is whole, of all and of those that are trained,
    by the number of ranks that share them."""
    arena = build_engine(job).runtime_of(job.strategies[0]).arena
    assert arena is not None
    found: dict[int, dict[str, Counter[str]]] = {}
    for unit, places in arena.places.items():
        for run in (place.run for place in places):
            numbers = found.setdefault(run.sharer[1], {"all": Counter(), "trained": Counter()})
            numbers["all"][unit.name] += run.num_elements
            numbers["trained"][unit.name] += run.num_elements * (not run.is_frozen)
    return found


def column_bytes(job: Job) -> int:
    """On every rank: what the engine counts of the only iteration."""
    optim_step = RuntimeEngine.optim_step
    outcomes = []

    def kept(engine: RuntimeEngine, **named: Any) -> StepOutcome:
        outcomes.append(optim_step(engine, **named))
        return outcomes[0]

    with patch.object(RuntimeEngine, "optim_step", kept):
        run_job(job)
    return outcomes[0].column_bytes


@pytest.mark.parametrize(("model", "gradient_dtype", "num_ahead"), BYTES)
def test_bytes_of_an_iteration(
    model: SmallModel, gradient_dtype: torch.dtype | None, num_ahead: int, tmp_path: Path
) -> None:
    """A rank receives a layer's weights twice in each micro-batch, but for those that are still in
    their slots, and the embedding's and the output layer's once; and every gradient once. Whole
    experts come from the ranks that hold the same ones."""
    job = law_job(NUM_COLUMNS, "cp4fsep2" if model is EXPERTS else "cp4fs", model)
    job = replace(
        job,
        schedule=job.schedule[:1],
        assignments=job.assignments[:1],
        batches=job.batches[:1],
        gradient_dtype=gradient_dtype,
        num_layers_ahead=num_ahead,
    )
    counted = pool_of(NUM_COLUMNS, "cuda").run(run_logged, tmp_path, column_bytes, job)
    units_by_size = pool_of(NUM_COLUMNS, "cuda").run(units_of, job)[0]
    assert list(units_by_size) == ([4, 2] if model is EXPERTS else [4])
    num_micro_batches = len(job.assignments[0].replicas[0])
    assert num_micro_batches > 1
    gathers = 2 * num_micro_batches * NUM_LAYERS - (2 * num_micro_batches - 1) * (1 + num_ahead)
    gradient_bytes = FP32_BYTES if gradient_dtype is None else BF16_BYTES
    kind = "ReduceScatter" if gradient_dtype is None else "AlltoAll"
    moved_bytes = [0] * NUM_COLUMNS
    for rank, (size, units) in itertools.product(range(NUM_COLUMNS), units_by_size.items()):
        layer, trained = units["all"]["layer 0"], units["trained"]
        ends = units["all"].total() - NUM_LAYERS * layer
        assert (trained == units["all"]) == (model is not PARTLY_FROZEN)
        calls = calls_of(log_of(tmp_path, rank))
        (sharers,) = {
            call.communicator
            for call in calls
            if call.kind == "AllGather" and call.count * size == trained["layer 0"]
        }
        received_bytes = {"AllGather": 0, "ReduceScatter": 0, "AlltoAll": 0}
        for call in calls:
            if call.communicator == sharers and call.kind in received_bytes:
                # It counts the elements of a share; all but one are received.
                received_bytes[call.kind] += (size - 1) * call.count * SIZES[call.dtype]
        share_of_others = (size - 1) / size
        assert received_bytes == {
            "ReduceScatter": 0,
            "AlltoAll": 0,
            "AllGather": share_of_others * BF16_BYTES * (gathers * layer + ends),
            kind: share_of_others * gradient_bytes * num_micro_batches * trained.total(),
        }
        moved_bytes[rank] += 2 * sum(received_bytes.values())  # received and sent
    assert counted == moved_bytes


def calls_of(log: Path) -> list[Call]:
    return [call for operation in read_log(log).operations for call in operation.calls]
