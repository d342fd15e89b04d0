"""A run on every rank that counts recomputations of activations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.passes import ScatterPass
from tests.support.models import Job, build_engine, packs_of_rank, use_fp64_loss

WATCHED = ("core_attention", "mlp", "layer")


@dataclass(frozen=True)
class RecomputeProbe:
    """One iteration, then one evaluation, of one rank."""

    num_layers: int
    num_micro_batches: int
    calls_in_training: dict[str, int]
    """Forward calls of the modules WATCHED, over all layers of the rank."""
    calls_in_evaluation: dict[str, int]
    num_buckets: int
    num_left_after_backward: int
    """Buckets whose scatter had not begun when the last backward ended."""


def probe_recompute(job: Job) -> RecomputeProbe:
    """On every rank: the first iteration of the job."""
    use_fp64_loss()
    engine = build_engine(job)
    strategy = engine.pool.strategies[0]
    batches = packs_of_rank(strategy, job.assignments[0], job.batches[0], engine.rank)
    calls: Counter[str] = Counter()
    num_layers = _count_calls(engine, strategy.name, calls)
    left: list[int] = []
    finish = ScatterPass.finish

    def recording(scatter: ScatterPass) -> None:
        left.append(scatter._num_left)
        finish(scatter)

    with patch.object(ScatterPass, "finish", recording):
        engine.train_step(strategy.name, batches, make_forward_step())
    in_training = {name: calls[name] for name in WATCHED}
    calls.clear()
    engine.evaluate(strategy.name, batches, make_forward_step())
    return RecomputeProbe(
        num_layers=num_layers,
        num_micro_batches=len(batches),
        calls_in_training=in_training,
        calls_in_evaluation={name: calls[name] for name in WATCHED},
        num_buckets=len(engine.layout.buckets),
        num_left_after_backward=left[0],
    )


def _count_calls(engine: Engine, strategy_name: str, calls: Counter[str]) -> int:
    role = engine.runtime_of(strategy_name).model
    assert role is not None
    decoder: Any = role.model.decoder
    for layer in decoder.layers:
        watched = (layer.self_attention.core_attention, layer.mlp, layer)
        for name, module in zip(WATCHED, watched, strict=True):
            module.register_forward_hook(partial(_count, calls, name))
    return len(decoder.layers)


def _count(calls: Counter[str], name: str, module: Any, inputs: Any, output: Any) -> None:
    calls[name] += 1
