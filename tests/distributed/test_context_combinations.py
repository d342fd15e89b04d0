"""Context parallelism combined with other options of a model or run: the same update."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.hydraulis.runtime.model_building import ModelDefinition
from tests.support.comparison import assert_same
from tests.support.evaluation_probes import check_evaluation
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    FP64_TOLERANCE,
    LENGTHS,
    SHORT_MODEL,
    SPLITS,
    assert_law,
    law_job,
    waves,
)
from tests.support.models import Job, SmallModel, assemble, run_job
from tests.support.recomputed_models import RecomputedModel

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class CombinedModel(RecomputedModel):
    """A small model with settings of rotary positions, of the exchange, and of recompute."""

    rotary_interleaved: bool = False
    defined: tuple[tuple[str, Any], ...] = ()
    """Fields of the model's definition."""

    def transformer(self) -> TransformerConfig:
        config = super().transformer()
        config.rotary_interleaved = self.rotary_interleaved
        return config

    def definition(self) -> ModelDefinition:
        return replace(super().definition(), **dict(self.defined))


def combined(model: SmallModel, **settings: object) -> CombinedModel:
    values = {field.name: getattr(model, field.name) for field in fields(SmallModel)}
    return CombinedModel(**(values | {"cp_comm_type": "auto"} | settings))


def job_of(text: str) -> Job:
    """The law's job on one replica, with all splits of waves."""
    if "~" not in text:
        return law_job(4, text, SHORT_MODEL)
    splits = list(SPLITS.values()) if "cp4" in text else [[(0, 1), (1, 1)], [(0, 2)]]
    return replace(waves(splits, SHORT_MODEL), strategies=(text,))


ROTARY: dict[str, dict[str, object]] = {
    "half of a head": {"defined": (("rotary_percent", 0.5),)},
    "scaled as in Llama 3": {
        "defined": (("rope_scaling", True), ("rotary_base", 500)),
        "rotary_interleaved": True,
    },
    "stretched": {"defined": (("seq_len_interpolation_factor", 4.0),)},
}


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize(("text", "way"), [("tp2cp2", "a2a"), ("cp2~pp2", "all_gather")])
def test_rotary_positions_of_every_kind(text: str, way: str, name: str) -> None:
    model = combined(SHORT_MODEL, cp_comm_type=way, **ROTARY[name])
    runs = pool_of(4).run(run_job, replace(job_of(text), model=model))
    alone = pool_of(1).run(run_job, law_job(1, "tp1", model))
    plain = pool_of(1).run(run_job, law_job(1, "tp1", SHORT_MODEL))
    for i in range(len(LENGTHS)):
        expected = assemble(alone, [alone[0].gradients[i]])
        found = assemble(runs, [run.gradients[i] for run in runs])
        assert_same(found, expected, FP64_TOLERANCE, f"{text}, iteration {i}")
    assert plain[0].norms[0] != pytest.approx(alone[0].norms[0], rel=1e-6)


@pytest.mark.parametrize("way", ["all_gather", "a2a"])
@pytest.mark.parametrize("text", ["cp2~pp2", "tp2cp2~", "cp4~"])
def test_tied_embeddings_and_full_recompute_in_waves(text: str, way: str) -> None:
    """On cp4~ with groups of four ranks but two query groups, and norms of queries and keys."""
    model = replace(SHORT_MODEL, tied=True, num_groups=2, qk_layernorm=True)
    recomputed = combined(
        model, cp_comm_type=way, granularity="full", method="uniform", num_layers_recomputed=1
    )
    job = replace(job_of(text), model=model)
    assert_law(job, pool_of(4).run(run_job, replace(job, model=recomputed)))


def test_evaluation_between_iterations_in_strategies_with_cp() -> None:
    texts = ("tp2cp2", "cp4", "4*tp1")
    jobs = [law_job(4, text, SHORT_MODEL) for text in texts]
    job = replace(
        jobs[0],
        strategies=texts,
        schedule=(0, 1, 2),
        assignments=tuple(job.assignments[i] for i, job in enumerate(jobs)),
    )
    check_evaluation(job)
