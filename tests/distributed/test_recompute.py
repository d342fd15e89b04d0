"""Activation recompute takes place and changes no update, under any strategy."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest

from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.passes import ScatterPass
from tests.support.gloo_pool import pool_of
from tests.support.law import GPT2_LIKE, MAIN_MODEL, assert_law, changing, law_job
from tests.support.models import (
    Job,
    SmallModel,
    build_engine,
    packs_of_rank,
    run_job,
    use_fp64_loss,
)
from tests.support.recomputed_models import recomputed

pytestmark = pytest.mark.distributed

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


def _count_calls(engine: RuntimeEngine, strategy_name: str, calls: Counter[str]) -> int:
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


SETTINGS: dict[str, dict[str, object]] = {
    "core attention": {"granularity": "selective"},
    "MLP": {"granularity": "selective", "modules": ("mlp",)},
    "both": {"granularity": "selective", "modules": ("core_attn", "mlp")},
    "full, every layer": {
        "granularity": "full",
        "method": "uniform",
        "num_layers_recomputed": 1,
    },
    "full, chunks of three": {
        "granularity": "full",
        "method": "uniform",
        "num_layers_recomputed": 3,
    },
    "full, first layer": {"granularity": "full", "method": "block", "num_layers_recomputed": 1},
}
STRATEGIES = ("pp2:3,1+2*tp1", "tp2@0,3+pp2:1,3@1,2", "tp2pp2:3,1")
"""One for each iteration."""
DEEP_GPT2_LIKE = replace(GPT2_LIKE, num_layers=MAIN_MODEL.num_layers)


def check_law_recomputing(job: Job, settings: dict[str, object]) -> None:
    """The job with recompute, on 4 ranks, against the one-process run without."""
    runs = pool_of(4).run(run_job, replace(job, model=recomputed(job.model, **settings)))
    assert_law(job, runs)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_update_with_recompute(name: str) -> None:
    check_law_recomputing(changing(STRATEGIES), SETTINGS[name])


@pytest.mark.parametrize("name", ["core attention", "full, every layer", "full, first layer"])
@pytest.mark.parametrize(
    "model",
    [
        replace(MAIN_MODEL, sequence_parallel=False, qk_layernorm=True),
        DEEP_GPT2_LIKE,
    ],
    ids=["q/k norms, no sequence parallelism", "GPT-2 like"],
)
def test_every_model_can_recompute(model: SmallModel, name: str) -> None:
    check_law_recomputing(law_job(4, "tp2@0,3+pp2:1,3@1,2", model), SETTINGS[name])


@pytest.mark.parametrize("name", SETTINGS)
def test_recomputed_modules_run_twice_in_training_and_once_in_evaluation(name: str) -> None:
    settings = SETTINGS[name]
    job = law_job(2, "pp2:3,1", recomputed(MAIN_MODEL, **settings))
    probes: list[RecomputeProbe] = pool_of(2).run(probe_recompute, job)
    for probe, num_layers in zip(probes, (3, 1), strict=True):
        assert probe.num_layers == num_layers
        assert probe.num_micro_batches > 1
        again = {"core_attention": 0, "mlp": 0, "layer": 0}
        if settings["granularity"] == "full":
            num_again = 1 if settings["method"] == "block" else num_layers
            again = dict.fromkeys(again, num_again)
        else:
            modules = settings.get("modules", ("core_attn",))
            assert isinstance(modules, tuple)
            again["core_attention"] = num_layers * ("core_attn" in modules)
            again["mlp"] = num_layers * ("mlp" in modules)
        once = probe.num_layers * probe.num_micro_batches
        assert probe.calls_in_evaluation == dict.fromkeys(again, once)
        assert probe.calls_in_training == {
            module: once + count * probe.num_micro_batches for module, count in again.items()
        }


@pytest.mark.parametrize("name", ["MLP", "full, every layer", "full, chunks of three"])
def test_buckets_are_scattered_during_the_recomputing_backward(name: str) -> None:
    """Gradients of recomputed layers arrive in a backward inside the backward."""
    job = law_job(2, "2*tp1", recomputed(MAIN_MODEL, **SETTINGS[name]))
    for probe in pool_of(2).run(probe_recompute, job):
        assert probe.num_buckets > MAIN_MODEL.num_layers
        assert probe.num_left_after_backward == 0
