"""Models with latent attention give the same update under every strategy as upstream's on one
process, sequence by sequence and unpacked."""

from __future__ import annotations

import copy
import re
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron.hydraulis.runtime import model_building
from megatron.hydraulis.transfer.canonical import Contribution
from tests.support.bf16_error import assert_little_is_added, gradients_of
from tests.support.broken_rules import described, run_broken, wrong_with
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    SHORT_MODEL,
    SPLITS,
    changing,
    check_law,
    law_cases,
    law_job,
    law_reference,
    waves,
    wrong_gradients,
)
from tests.support.models import SmallModel

pytestmark = pytest.mark.distributed


def _model(**variant: Any) -> SmallModel:
    latent = {
        "q_lora_rank": 12,
        "kv_lora_rank": 9,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 6,
        "v_head_dim": 8,
        "rope_type": "rope",
    } | variant
    # The size of the output of upstream's local core attention.
    latent["kv_channels"] = latent["v_head_dim"]
    return replace(SHORT_MODEL, num_groups=8, qk_layernorm=True, variant=tuple(latent.items()))


_YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 40,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
MODELS = {
    "plain": _model(),
    "YaRN": _model(**_YARN),
    "no norms": replace(_model(), qk_layernorm=False),
    "one projection of queries": _model(q_lora_rank=None),
    "large values": _model(v_head_dim=12),
    "recomputed": _model(
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **_YARN,
    ),
    "core attention recomputed": _model(
        recompute_granularity="selective", recompute_modules=("core_attn",)
    ),
    "experts and YaRN": _model(
        num_moe_experts=4,
        moe_ffn_hidden_size=16,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=24,
        **_YARN,
    ),
}
STRATEGIES = (("tp2cp2", "tp2@0,3+pp2@2,1", "tp2+2*tp1"), ("cp2pp2", "tp4", "pp2:1,1+cp2"))
"""One for each iteration of a run."""


@pytest.mark.parametrize(("name", "strategies"), law_cases(MODELS, STRATEGIES))
def test_latent_attention_gives_the_same_update(name: str, strategies: tuple[str, ...]) -> None:
    check_law(changing(strategies, MODELS[name]), 4)


@pytest.mark.nightly
@pytest.mark.parametrize("strategies", [("tp4ep4", "tp2cp2ep2", "2*tp2ep2"), ("cp4ep4", "4*tp1")])
def test_whole_experts_give_the_same_update(strategies: tuple[str, ...]) -> None:
    check_law(changing(strategies, MODELS["experts and YaRN"]), 4)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("large values", "all_gather"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("large values", "a2a"), ("YaRN", "all_gather"), ("YaRN", "a2a"))
        ),
    ],
)
def test_latent_attention_gives_the_same_update_in_waves(name: str, way: str) -> None:
    check_law(waves(list(SPLITS.values()), replace(MODELS[name], cp_comm_type=way)), 4)


@pytest.mark.nightly
def test_bf16_adds_little() -> None:
    model = replace(MODELS["YaRN"], dtype=torch.bfloat16)
    assert_little_is_added(model, gradients_of(law_job(4, "tp2+cp2", model), 4))


class _Upstreams(MLASelfAttention):
    """Upstream's attention, with the groups of a strategy, which it takes from the process."""

    def get_query_key_value_tensors(  # type: ignore[no-untyped-def]
        self, hidden_states, key_value_states, position_ids, packed_seq_params, **named
    ):
        row = copy.copy(packed_seq_params)
        row.local_cp_size = None
        with ExitStack() as grouped:
            for name in (
                "gather_from_tensor_model_parallel_region",
                "scatter_to_sequence_parallel_region",
            ):
                in_group = partial(getattr(mappings, name), group=self.tp_group)
                grouped.enter_context(patch.object(multi_latent_attention, name, in_group))
            return super().get_query_key_value_tensors(
                hidden_states, key_value_states, position_ids, row, **named
            )


_UPSTREAMS = partial(patch, f"{model_building.__name__}.LatentAttention", _Upstreams)
_PROJECTION = "self_attention.linear_kv_down_proj.weight"


def test_contributions_that_upstream_s_layers_lose_are_found() -> None:
    """They are why the projections are our own."""
    model = _model(q_lora_rank=16, kv_lora_rank=16, qk_pos_emb_head_dim=8)
    job = law_job(1, "tp1", model)
    assert not wrong_gradients(job, pool_of(1).run(run_broken, job, _UPSTREAMS))
    wrong = wrong_with(_UPSTREAMS, 2, "tp2", model)
    found = {name for name in wrong if name.startswith("decoder.layers.1.")}
    layer = "decoder.layers.1"
    assert found == {f"{layer}.{_PROJECTION}", f"{layer}.input_layernorm.weight"}


def test_contributions_of_one_tp_rank_alone_are_found() -> None:
    """All that every rank has of latents: their projections and norms."""
    names = r"down_proj|self_attention\.(q|kv)_layernorm"
    model = MODELS["plain"]
    rule = partial(described, names, contribution=Contribution.REPLICATED)
    expected = {name for name in law_reference(model).gradients[0] if re.search(names, name)}
    assert len(expected) == 4 * model.num_layers
    assert wrong_with(rule, 2, "tp2", model) == expected
