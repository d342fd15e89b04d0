"""Adapters are trained alike in every strategy, and the model below them never changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.test_shared_weights import poisoned
from tests.support.broken_rules import run_broken
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    MAIN_MODEL,
    SHORT_MODEL,
    SPLITS,
    assert_law,
    changing,
    check_law,
    waves,
)
from tests.support.models import SmallModel

pytestmark = pytest.mark.distributed

ALL = ("all-linear",)
MODEL = replace(MAIN_MODEL, lora_targets=ALL)
SHORT = replace(SHORT_MODEL, lora_targets=ALL)
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.02,
    "moe_token_dispatcher_type": "alltoall",
}
LATENTS = {
    "q_lora_rank": 10,
    "kv_lora_rank": 12,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 8,
    "kv_channels": 8,
    "rope_type": "rope",
}
MODELS: dict[str, tuple[SmallModel, tuple[str, ...]]] = {
    "pipelines": (MODEL, ("tp2pp2", "pp3:2,1,1+tp1", "cp2pp2")),
    "recomputed": (MODEL, ("tp2pp2r", "pp4r", "cp2pp2r")),
    "no sequence parallelism": (
        replace(SHORT, sequence_parallel=False),
        ("tp2pp2r", "2*tp2", "tp4"),
    ),
    "some targets": (
        replace(MODEL, lora_targets=("k_proj", "o_proj", "up_proj")),
        ("tp2+pp2", "tp4", "tp2cp2r"),
    ),
    "biases, plain MLP, tied": (
        replace(SHORT, bias=True, swiglu=False, normalization="LayerNorm", tied=True),
        ("tp2pp2", "2*tp2", "cp4"),
    ),
    "experts": (
        replace(SHORT, variant=tuple((EXPERTS | {"moe_layer_freq": (0, 1)}).items())),
        ("cp4ep4", "tp2cp2ep2r", "2*pp2"),
    ),
    "shared weights": (MODEL, ("tp2cp2fs", "cp2fs+pp2", "cp4fsr")),
    "shared weights, tied": (replace(SHORT, tied=True), ("cp4fs", "tp2+cp2fs", "tp2cp2fsr")),
    "shared experts": (
        replace(SHORT, variant=tuple((EXPERTS | {"moe_layer_freq": (0, 1)}).items())),
        ("cp4fsep2", "tp2cp2fs", "tp2cp2fsep4r"),
    ),
    "latents": (
        replace(SHORT, num_groups=8, qk_layernorm=True, variant=tuple(LATENTS.items())),
        ("tp2pp2", "tp2cp2r", "4*tp1"),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_gives_the_same_adapters(name: str) -> None:
    """Another one in each iteration."""
    model, texts = MODELS[name]
    check_law(changing(texts, model), 4)


@pytest.mark.parametrize("text", ["cp4~", "cp4~fs"])
def test_waves_give_the_same_adapters(text: str) -> None:
    job = replace(waves(list(SPLITS.values()), SHORT), strategies=(text,))
    assert_law(job, pool_of(4).run(run_broken, job, poisoned))
