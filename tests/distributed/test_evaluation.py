"""Evaluation in any strategy of the pool does not change training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.evaluation_probes import EvaluatedRun, run_evaluating
from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, changing
from tests.support.models import SmallModel
from tests.support.recomputed_models import recomputed

pytestmark = pytest.mark.distributed

TEXTS = ("tp2+2*tp1", "tp2@0,3+pp2:1,3@2,1", "pp3:2,1,1+idle")


RECOMPUTED = recomputed(MAIN_MODEL, granularity="full", method="uniform", num_layers_recomputed=1)


@pytest.mark.parametrize(
    ("model", "tells_next"),
    [
        pytest.param(MAIN_MODEL, True, id="gather under way"),
        pytest.param(MAIN_MODEL, False, id="gather at once"),
        pytest.param(replace(MAIN_MODEL, tied=True), True, id="tied embeddings"),
        pytest.param(RECOMPUTED, True, id="recompute"),
    ],
)
def test_training_is_the_same_bit_by_bit(model: SmallModel, tells_next: bool) -> None:
    job = changing(TEXTS, model)
    plain: list[EvaluatedRun] = pool_of(4).run(run_evaluating, job, False, tells_next)
    between: list[EvaluatedRun] = pool_of(4).run(run_evaluating, job, True, tells_next)
    for expected, found in zip(plain, between, strict=True):
        assert found.losses == expected.losses
        for states in zip(found.states, expected.states, strict=True):
            for after, before in zip(*states, strict=True):
                np.testing.assert_array_equal(after, before)
        for i, losses in enumerate(found.evaluated):
            assert len(losses) == len(TEXTS)
            # With the weights before the iteration, in every strategy.
            np.testing.assert_allclose(losses, found.losses[i], rtol=1e-12)
    assert len(set(plain[0].losses)) == len(job.schedule)
