"""Evaluation in any strategy of the pool does not change training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.evaluation_probes import check_evaluation
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
    check_evaluation(job, tells_next=tells_next)
