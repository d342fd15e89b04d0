"""Hybrid models by --hybrid-layer-pattern obey the law: the same update under every strategy.

The reference is upstream's HybridModel in one process, sequence by sequence, unpacked, with a rule
that goes token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron.hydraulis.runtime import gated_delta_net
from megatron.hydraulis.transfer.canonical import Contribution
from tests.support.broken_rules import Rule, described, wrong_with
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    SHORT_MODEL,
    SPLITS,
    changing,
    check_law,
    law_job,
    law_reference,
    waves,
)
from tests.support.models import run_job

pytestmark = pytest.mark.distributed

SIZES = {
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
}
HYBRID = replace(SHORT_MODEL, num_layers=5, layer_pattern="G-*G-", variant=tuple(SIZES.items()))
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 16,
    "moe_layer_freq": (0, 1, 0, 0, 0, 1),
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.3,
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 1 / 16,
}
WITH_EXPERTS = replace(
    HYBRID, num_layers=6, layer_pattern="GE*-GE", variant=tuple((SIZES | EXPERTS).items())
)
LATENTS = {
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "kv_channels": 6,  # of the output of upstream's local core attention
    "rope_type": "rope",
}
WITH_LATENTS = replace(
    HYBRID,
    layer_pattern="G-+G-",
    num_groups=8,
    qk_layernorm=True,
    variant=tuple((SIZES | LATENTS).items()),
)
NO_SP = replace(HYBRID, sequence_parallel=False)
_RIGHT_LENGTHS = gated_delta_net.segment_lengths


@contextmanager
def _state_leaks_over_borders() -> Iterator[None]:
    def one_segment(row: PackedSeqParams) -> tuple[int, ...]:
        return (sum(_RIGHT_LENGTHS(row)),)

    with patch.object(gated_delta_net, "segment_lengths", one_segment):
        yield


MUTATIONS: dict[str, tuple[Rule, str]] = {
    "leak": (_state_leaks_over_borders, "tp1"),
    "parts of in_proj not cut apart": (partial(described, "in_proj", parts=()), "tp2"),
    "parts of conv1d not cut apart": (partial(described, "conv1d", parts=()), "tp2"),
    "norm of heads replicated": (
        partial(described, "out_norm", contribution=Contribution.REPLICATED),
        "tp2",
    ),
}


class TestLaw:
    @pytest.mark.parametrize(
        ("num_ranks", "text"), [(1, "tp1"), (2, "tp2"), (2, "pp2:2,3"), (2, "cp2")]
    )
    def test_every_strategy_gives_the_same_update(self, num_ranks: int, text: str) -> None:
        check_law(law_job(num_ranks, text, HYBRID), num_ranks)

    def test_strategies_may_change_between_iterations(self) -> None:
        check_law(changing(("tp2pp2:3,2", "tp2+pp2:1,4", "pp3:2,1,2+tp1"), HYBRID), 4)

    @pytest.mark.parametrize("texts", [("tp4", "tp2cp2", "cp2fs+2*tp1")])
    def test_without_sequence_parallelism(self, texts: tuple[str, ...]) -> None:
        check_law(changing(texts, replace(NO_SP, tied=True)), 4)

    def test_recomputation_of_every_layer(self) -> None:
        check_law(changing(("tp2r+2*tp1", "pp2r:2,3+tp2", "2*tp2r"), HYBRID), 4)

    def test_experts(self) -> None:
        texts = ("tp2ep2+cp2", "pp2:1,5+tp2", "cp2ep2+2*tp1")
        check_law(changing(texts, WITH_EXPERTS), 4)
        check_law(waves([SPLITS["2+1+1"], SPLITS["4"]], WITH_EXPERTS, ep=4), 4)

    def test_latent_attention(self) -> None:
        check_law(changing(("tp2cp2", "pp2:3,2+tp2", "tp2+2*tp1"), WITH_LATENTS), 4)

    def test_waves_of_a_width_of_four(self) -> None:
        check_law(waves([SPLITS["4"], SPLITS["2+1+1"], SPLITS["1+1+1+1"]], HYBRID), 4)

    def test_bf16_stays_close(self) -> None:
        job = law_job(2, "tp2", replace(HYBRID, dtype=torch.bfloat16))
        losses = pool_of(2).run(run_job, job)[0].losses
        assert losses == pytest.approx(law_reference(job.model).losses, rel=2e-3)

    def test_the_order_in_a_row_changes_nothing(self) -> None:
        job = law_job(1, "tp1", HYBRID)
        turned = [
            replace(
                each, replicas=tuple(tuple(pack[::-1] for pack in packs) for packs in each.replicas)
            )
            for each in job.assignments
        ]
        assert turned != list(job.assignments)
        check_law(replace(job, assignments=tuple(turned)), 1)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_rule_is_found(name: str) -> None:
    rule, text = MUTATIONS[name]
    assert wrong_with(rule, int(text[2:]), text, NO_SP)
