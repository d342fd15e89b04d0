"""Layers with fused norms train the catalogued parameters of local layers."""

from dataclasses import fields

import pytest

from tests.distributed.test_hybrid_models import HYBRID
from tests.support.fused_layers import FusedSmallModel
from tests.support.law import check_law, law_job

pytestmark = pytest.mark.distributed

MODELS = {
    "RMSNorm": FusedSmallModel(num_heads=8, num_groups=4, qk_layernorm=True),
    "LayerNorm, biases": FusedSmallModel(
        num_heads=8, num_groups=4, normalization="LayerNorm", bias=True, swiglu=False
    ),
    "hybrid": FusedSmallModel(
        **{field.name: getattr(HYBRID, field.name) for field in fields(HYBRID)}
    ),
}


@pytest.mark.parametrize("text", ["tp2pp2", "tp2+2*tp1"])
@pytest.mark.parametrize("model", MODELS)
def test_same_update(model: str, text: str) -> None:
    check_law(law_job(4, text, MODELS[model]), 4)
