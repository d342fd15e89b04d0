"""Hugging Face's models, unpacked and on one process, give our loss and gradients.

Both compute in fp32. Two iterations: at the initial weights, where all norms are 1, and at those
that the engine's first update made.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu

from tests.support.comparison import assert_same, wrong_tensors
from tests.support.gloo_pool import pool_of
from tests.support.huggingface import (
    deepseek_v2,
    deepseek_v3,
    gpt_oss,
    labelled_gradients,
    llama_gradients,
    mistral,
    mixtral,
    nemotron,
    qwen2_moe,
    qwen3_moe,
    qwen3_next,
    smollm3,
    to_llama,
)
from tests.support.law import FP64_SETTINGS, MAIN_MODEL, changing, law_job
from tests.support.models import Job, RankRun, SmallModel, assemble, run_initial_weights, run_job

pytestmark = pytest.mark.distributed

NUM_ITERATIONS = 2
TOLERANCE = 1e-5
"""Relative to a tensor's largest value; the loss relative to itself."""
LLAMA = replace(MAIN_MODEL, dtype=torch.float32)


def with_large_steps(job: Job) -> Job:
    """Two iterations; the second one's weights are far from the first one's."""
    return replace(
        job,
        schedule=job.schedule[:NUM_ITERATIONS],
        assignments=job.assignments[:NUM_ITERATIONS],
        batches=job.batches[:NUM_ITERATIONS],
        weights=job.weights[:NUM_ITERATIONS],
        settings=FP64_SETTINGS,
    )


@pytest.mark.parametrize(
    ("num_ranks", "text", "model"),
    [
        (3, "tp2+tp1", LLAMA),
        (4, "tp2@0,3+pp2:1,3@2,1", LLAMA),
        (1, "tp1", replace(LLAMA, num_groups=8)),
        (3, "tp2+tp1", replace(LLAMA, num_groups=2, tied=True)),
        (3, "pp2+tp1", replace(LLAMA, tied=True)),
    ],
    ids=["tp2+tp1", "tp2+descending pp2", "multi-head", "two groups, tied", "pp2+tp1, tied"],
)
def test_llama_gives_the_same_loss_and_gradients(
    num_ranks: int, text: str, model: SmallModel
) -> None:
    check(law_job(num_ranks, text, model), num_ranks)


def with_experts(model: SmallModel = LLAMA, **variant: Any) -> SmallModel:
    experts = {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 16,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }
    return replace(model, num_layers=2, variant=tuple((experts | variant).items()))


def with_latents(**variant: Any) -> SmallModel:
    # The epsilon is that of transformers' norms of latents, which no setting changes.
    latents = {
        "kv_lora_rank": 12,
        "qk_head_dim": 4,
        "qk_pos_emb_head_dim": 6,
        "v_head_dim": 8,
        "layernorm_epsilon": 1e-6,
    } | variant
    model = replace(LLAMA, num_layers=2, num_groups=8, qk_layernorm=True)
    return replace(model, variant=tuple(latents.items()))


FAMILIES: dict[str, tuple[SmallModel, Callable[[SmallModel], torch.nn.Module]]] = {
    "Mistral": (replace(LLAMA, variant=(("window_size", (6, 0)),)), mistral),
    "Nemotron": (
        replace(
            LLAMA,
            swiglu=False,
            normalization="LayerNorm",
            variant=(("activation_func", squared_relu), ("layernorm_zero_centered_gamma", True)),
        ),
        nemotron,
    ),
    "SmolLM3": (replace(LLAMA, variant=(("no_rope_freq", 2),)), smollm3),
    "Qwen3-Next without experts": (
        replace(
            LLAMA,
            qk_layernorm=True,
            variant=(("attention_output_gate", True), ("layernorm_zero_centered_gamma", True)),
        ),
        qwen3_next,
    ),
    "Mixtral": (with_experts(), mixtral),
    "Qwen2-MoE": (
        with_experts(
            moe_router_pre_softmax=True,
            moe_shared_expert_intermediate_size=24,
            moe_shared_expert_gate=True,
        ),
        qwen2_moe,
    ),
    "Qwen3-MoE, balanced": (
        with_experts(
            replace(LLAMA, qk_layernorm=True),
            moe_router_topk=3,
            moe_layer_freq=(0, 1),
            moe_router_load_balancing_type="seq_aux_loss",
            moe_aux_loss_coeff=0.3,
        ),
        qwen3_moe,
    ),
    "DeepSeek-V2-Lite without experts": (
        with_latents(q_lora_rank=None, rope_type="rope"),
        deepseek_v2,
    ),
    "DeepSeek-V3": (
        with_latents(
            q_lora_rank=10,
            rotary_scaling_factor=40,
            original_max_position_embeddings=16,
            mscale=0.7,
            mscale_all_dim=0.9,
            num_moe_experts=8,
            moe_ffn_hidden_size=16,
            moe_shared_expert_intermediate_size=16,
            moe_router_topk=4,
            moe_router_score_function="sigmoid",
            moe_router_num_groups=4,
            moe_router_group_topk=2,
            moe_router_topk_scaling_factor=2.5,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
        ),
        deepseek_v3,
    ),
    "GPT-OSS without experts": (
        replace(
            LLAMA,
            bias=True,
            variant=(
                ("window_size", (6, 0)),
                ("window_attn_skip_freq", 2),
                ("softmax_type", "learnable"),
                ("activation_func", quick_gelu),
                ("glu_linear_offset", 1.0),
                ("activation_func_clamp_value", 0.5),
            ),
        ),
        gpt_oss,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_variants_of_other_families_give_the_same_loss_and_gradients(name: str) -> None:
    """Each iteration in another strategy."""
    model, build = FAMILIES[name]
    check(changing(("tp2+2*tp1", "cp2pp2"), model), 4, build)


def check(
    job: Job, num_ranks: int, build: Callable[[SmallModel], torch.nn.Module] | None = None
) -> None:
    """Two iterations of a job against Llama, or another model of Hugging Face."""
    job, model = with_large_steps(job), job.model
    ranks = pool_of(num_ranks)
    runs: list[RankRun] = ranks.run(run_job, job)
    starts: list[RankRun] = ranks.run(run_initial_weights, job)
    weights = assemble(starts, [start.parameters[0] for start in starts])
    for i in range(NUM_ITERATIONS):
        expected = llama_gradients(
            to_llama(weights, model), model, job.batches[i], job.weights[i], build
        )
        found = to_llama(assemble(runs, [run.gradients[i] for run in runs]), model)
        assert_same(found, expected.gradients, TOLERANCE, f"iteration {i}")
        assert runs[0].losses[i] == pytest.approx(expected.loss, rel=TOLERANCE)
        weights = assemble(runs, [run.parameters[i] for run in runs])


def test_tokens_without_weight_are_labels_of_minus_100() -> None:
    """Weights of 0 and 1, as of conversations, against the loss of transformers' own model."""
    job = with_large_steps(law_job(3, "tp2+tp1", LLAMA))
    masks = tuple(tuple(each > 0 for each in of_batch) for of_batch in job.weights)
    assert not all(mask[1:].any() for mask in masks[0])
    weights = tuple(tuple(each.astype(np.float32) for each in masks_) for masks_ in masks)
    job = replace(job, weights=weights)
    runs: list[RankRun] = pool_of(3).run(run_job, job)
    starts: list[RankRun] = pool_of(3).run(run_initial_weights, job)
    parameters = to_llama(assemble(starts, [start.parameters[0] for start in starts]), LLAMA)
    expected = labelled_gradients(parameters, LLAMA, job.batches[0], masks[0])
    found = to_llama(assemble(runs, [run.gradients[0] for run in runs]), LLAMA)
    assert_same(found, expected.gradients, TOLERANCE)
    assert runs[0].losses[0] == pytest.approx(expected.loss, rel=TOLERANCE)


def test_another_order_of_query_group_rows_is_detected() -> None:
    """Heads stacked as all queries, all keys, all values would be another model."""
    job = law_job(1, "tp1", LLAMA)
    start: RankRun = pool_of(1).run(run_initial_weights, job)[0]
    weights = assemble([start], [start.parameters[0]])
    right = to_llama(weights, LLAMA)
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    query, key, value = np.split(weights[name], [32, 48])
    prefix = "model.layers.0.self_attn."
    wrong = right | {
        prefix + "q_proj.weight": query,
        prefix + "k_proj.weight": key,
        prefix + "v_proj.weight": value,
    }
    assert {n: v.shape for n, v in wrong.items()} == {n: v.shape for n, v in right.items()}
    batch = job.batches[0], job.weights[0]
    found, expected = (llama_gradients(w, LLAMA, *batch).gradients for w in (wrong, right))
    assert max(wrong_tensors(found, expected, TOLERANCE).values()) > 1e-2
