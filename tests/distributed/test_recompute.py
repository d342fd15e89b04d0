"""Activation recompute takes place and changes no update, under any strategy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, assert_law, law_job
from tests.support.models import Job, SmallModel, run_job
from tests.support.recompute_probes import RecomputeProbe, probe_recompute
from tests.support.recomputed_models import recomputed

pytestmark = pytest.mark.distributed

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
STRATEGIES = [(3, "pp2:3,1+tp1"), (4, "tp2@0,3+pp2:1,3@1,2"), (4, "tp2pp2:3,1")]
GPT2_LIKE = replace(
    MAIN_MODEL,
    normalization="LayerNorm",
    swiglu=False,
    bias=True,
    tied=True,
    position_embedding="learned_absolute",
)


def check_law_recomputing(job: Job, num_ranks: int, settings: dict[str, object]) -> None:
    """The job with recompute against the one-process run without."""
    runs = pool_of(num_ranks).run(run_job, replace(job, model=recomputed(job.model, **settings)))
    assert_law(job, runs)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize(("num_ranks", "text"), STRATEGIES)
def test_the_same_update_with_recompute(num_ranks: int, text: str, name: str) -> None:
    check_law_recomputing(law_job(num_ranks, text), num_ranks, SETTINGS[name])


@pytest.mark.parametrize("name", ["core attention", "full, every layer", "full, first layer"])
@pytest.mark.parametrize(
    "model",
    [
        replace(MAIN_MODEL, sequence_parallel=False, qk_layernorm=True),
        GPT2_LIKE,
    ],
    ids=["q/k norms, no sequence parallelism", "GPT-2 like"],
)
def test_every_model_can_recompute(model: SmallModel, name: str) -> None:
    check_law_recomputing(law_job(4, "tp2@0,3+pp2:1,3@1,2", model), 4, SETTINGS[name])


@pytest.mark.parametrize("name", ["both", "full, every layer", "full, chunks of three"])
def test_strategies_may_change_with_recompute(name: str) -> None:
    texts = ("tp2+2*tp1", "tp2@0,3+pp2@2,1", "pp3:2,1,1+idle")
    jobs = [law_job(4, text) for text in texts]
    job = replace(
        jobs[0],
        strategies=texts,
        schedule=(0, 1, 2),
        assignments=tuple(job.assignments[i] for i, job in enumerate(jobs)),
    )
    check_law_recomputing(job, 4, SETTINGS[name])


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
