"""Small variants of the layers give the same update under every strategy as on one process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from tests.support.law import SHORT_MODEL, SPLITS, changing, check_law, law_reference, waves
from tests.support.models import SmallModel
from tests.support.reference import initial_parameters

pytestmark = pytest.mark.distributed


def _model(model: SmallModel = SHORT_MODEL, **variant: Any) -> SmallModel:
    return replace(model, variant=tuple(variant.items()))


_GPT = replace(SHORT_MODEL, swiglu=False)
_WINDOW: dict[str, Any] = {"window_size": (6, 0)}
MODELS = {
    "windows in all layers": _model(**_WINDOW),
    "windows and full layers": _model(**_WINDOW, window_attn_skip_freq=2),
    "a window of one token": _model(window_size=(0, 0), window_attn_skip_freq=2),
    "softmax off by one": _model(softmax_type="off-by-one"),
    "learnable softmax": _model(softmax_type="learnable"),
    "learnable softmax and windows": _model(
        **_WINDOW, window_attn_skip_freq=2, softmax_type="learnable"
    ),
    "squared ReLU": _model(_GPT, activation_func=squared_relu),
    "quick GEGLU": _model(activation_func=quick_gelu),
    "quick GEGLU with offset and limit": _model(
        activation_func=quick_gelu, glu_linear_offset=1.0, activation_func_clamp_value=0.05
    ),
    "norms around one": _model(
        replace(SHORT_MODEL, qk_layernorm=True), layernorm_zero_centered_gamma=True
    ),
    "layer norms around one": _model(
        replace(SHORT_MODEL, normalization="LayerNorm", bias=True),
        layernorm_zero_centered_gamma=True,
    ),
    "layers without positions": _model(no_rope_freq=2),
    "gated attention": _model(replace(SHORT_MODEL, qk_layernorm=True), attention_output_gate=True),
    "decayed norms of queries and keys": replace(
        SHORT_MODEL, qk_layernorm=True, decays_qk_norms=True
    ),
}
STRATEGIES = ("tp2cp2", "tp2@0,3+pp2@2,1", "tp2+2*tp1")
"""One for each iteration."""
ATTENTIONS = [name for name in MODELS if "window" in name or "softmax" in name]


@pytest.mark.parametrize("name", MODELS)
def test_every_variant_gives_the_same_update(name: str) -> None:
    check_law(changing(STRATEGIES, MODELS[name]), 4)


@pytest.mark.parametrize("name", [*ATTENTIONS, "gated attention", "layers without positions"])
@pytest.mark.parametrize("way", ["all_gather", "a2a"])
def test_every_variant_of_attention_gives_the_same_update_in_waves(way: str, name: str) -> None:
    model = replace(MODELS[name], cp_comm_type=way)
    check_law(waves(list(SPLITS.values()), model), 4)


@pytest.mark.parametrize("name", [name for name in MODELS if "around one" not in name])
def test_every_variant_changes_the_update(name: str) -> None:
    """Or the comparisons above would show nothing. Norms around one are only another place to
    begin counting, without weight decay."""
    plain = replace(MODELS[name], variant=(), decays_qk_norms=False)
    found, expected = (
        law_reference(model).parameters[-1]["embedding.word_embeddings.weight"]
        for model in (MODELS[name], plain)
    )
    assert abs(found - expected).max() > 1e-4


def test_norms_around_one_begin_at_zero_and_offsets_as_matrices_do() -> None:
    centred = initial_parameters(MODELS["layer norms around one"], seed=1)
    for name, value in centred.items():
        if "layernorm" in name:
            assert not value.any(), name
    offsets = initial_parameters(MODELS["learnable softmax"], seed=1)
    offset = offsets["decoder.layers.1.self_attention.core_attention.softmax_offset"]
    assert offset.shape == (SHORT_MODEL.num_heads,)
    assert 0.02 < float(offset.std()) < 0.5
