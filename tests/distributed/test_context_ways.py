"""Each way to exchange keys and values gives the same update, with and without recompute."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tests.support.gloo_pool import pool_of
from tests.support.law import SHORT_MODEL, assert_law, law_job
from tests.support.models import run_job
from tests.support.recomputed_models import RecomputedModel

pytestmark = pytest.mark.distributed

RECOMPUTE: dict[str, dict[str, object]] = {
    "none": {},
    "core attention": {"granularity": "selective"},
    "full": {"granularity": "full", "method": "uniform", "num_layers_recomputed": 1},
}


@pytest.mark.parametrize("way", ["all_gather", "a2a"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("text", ["cp2pp2", "tp2cp2"])
def test_same_update(text: str, recompute: str, way: str) -> None:
    job = law_job(4, text, SHORT_MODEL)
    values = {field.name: getattr(SHORT_MODEL, field.name) for field in fields(SHORT_MODEL)}
    values |= RECOMPUTE[recompute] | {"cp_comm_type": way}
    model = RecomputedModel(**values)
    assert_law(job, pool_of(4).run(run_job, replace(job, model=model)))
