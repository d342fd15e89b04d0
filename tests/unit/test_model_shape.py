"""Model shapes: counts of parameters and impossible sizes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from megatron.core.transformer.utils import is_layer_window_attention

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape, layers_with_experts, windowed_layers
from tests.support.planning import LLAMA_7B


def test_llama_7b_has_its_known_number_of_parameters() -> None:
    # As published with the weights of LLaMA-7B.
    assert LLAMA_7B.num_parameters == 6_738_415_616


def test_options_that_change_the_count() -> None:
    tied = replace(LLAMA_7B, tied_embeddings=True)
    assert LLAMA_7B.num_parameters - tied.num_parameters == 32000 * 4096
    plain = replace(LLAMA_7B, gated_mlp=False)
    assert LLAMA_7B.num_parameters - plain.num_parameters == 32 * 4096 * 11008
    grouped = replace(LLAMA_7B, num_query_groups=8)
    assert LLAMA_7B.num_parameters - grouped.num_parameters == 32 * 2 * 4096 * 24 * 128
    gated = replace(LLAMA_7B, output_gate=True)
    assert gated.num_parameters - LLAMA_7B.num_parameters == 32 * 4096 * 4096


QWEN3_30B_A3B = ModelShape(
    num_layers=48,
    hidden_size=2048,
    ffn_hidden_size=6144,
    num_attention_heads=32,
    num_query_groups=4,
    kv_channels=128,
    vocab_size=151_936,
    gated_mlp=True,
    tied_embeddings=False,
    num_experts=128,
    num_expert_layers=48,
    experts_per_token=8,
    expert_ffn_hidden_size=768,
)


def test_qwen3_30b_a3b_has_its_known_number_of_parameters() -> None:
    # As published with its weights, without the norms of queries and keys.
    assert QWEN3_30B_A3B.num_parameters == 30_532_122_624 - 48 * 2 * 128
    active = 48 * QWEN3_30B_A3B.num_matrix_parameters_per_layer
    assert (active + 2 * QWEN3_30B_A3B.num_embedding_parameters) / 1e9 == pytest.approx(
        3.3, abs=0.1
    )


DEEPSEEK_V3 = ModelShape(
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    num_query_groups=128,
    kv_channels=192,
    vocab_size=129_280,
    gated_mlp=True,
    tied_embeddings=False,
    num_experts=256,
    num_expert_layers=58,
    experts_per_token=8,
    expert_ffn_hidden_size=2048,
    shared_expert_ffn_hidden_size=2048,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_head_dim=128,
    qk_pos_emb_head_dim=64,
    v_head_dim=128,
)


def test_deepseek_v3_has_its_known_number_of_parameters() -> None:
    # As published with its weights, without the norms of latents and the biases of routers.
    norms, biases = 61 * (1536 + 512), 58 * 256
    assert DEEPSEEK_V3.num_parameters == 671_026_419_200 - norms - biases
    assert DEEPSEEK_V3.num_whole_attention_entries == 7168 * (1536 + 512 + 64)
    assert DEEPSEEK_V3.score_size == 128 * (192 + 128) / 2


def test_layers_with_and_without_experts_are_counted_apart() -> None:
    mixed = replace(QWEN3_30B_A3B, num_expert_layers=45, shared_expert_ffn_hidden_size=100)
    mlp, shared = 3 * 2048 * 6144, 3 * 2048 * 100
    experts = 128 * 3 * 2048 * 768 + shared
    expected = 3 * (mlp - experts) - 3 * 128 * 2048 + 48 * shared
    assert mixed.num_parameters - QWEN3_30B_A3B.num_parameters == expected
    # A stage may have any of the layers: those of the larger kind count first.
    assert mixed.num_parameters_of_layers(40) == 40 * mixed.num_parameters_per_layer
    known = replace(mixed, num_first_mlp_layers=2)
    assert known.num_with_experts(40) == 40
    assert known.num_with_experts(40, are_first=True) == 38
    assert known.num_with_experts(1, are_first=True) == 0
    assert known.num_with_experts(40, are_first=True, most=False) == 37
    most = mixed.num_parameters_of_layers(38) + 2 * (mixed.num_parameters_per_layer + mlp)
    most -= 2 * mixed.num_expert_entries
    assert known.num_parameters_of_layers(40, are_first=True) == most
    assert mixed.mlp_width == (45 * (8 * 768 + 100) + 3 * 6144) / 48


@pytest.mark.parametrize(
    ("frequency", "expected"),
    [(1, [True] * 4), (2, [True, False, True, False]), ([0, 1, 1, 0], [False, True, True, False])],
)
def test_layers_with_experts_are_those_of_upstream(frequency: Any, expected: list[bool]) -> None:
    assert layers_with_experts(4, frequency) == expected


@pytest.mark.parametrize("length", [1, 4, 5, 6, 40])
def test_a_window_leaves_the_pairs_that_it_sees(length: int) -> None:
    """Pairs are counted: s² stands for s(s + 1)/2 pairs, so a difference is missing twice."""
    window = replace(LLAMA_7B, window_tokens=5, num_windowed_layers=8).window
    assert window is not None
    seen = sum(min(place, 5) for place in range(1, length + 1))
    unseen = length * (length + 1) // 2 - seen
    # Of one windowed layer in four. (s - w)² and not (s - w)(s - w + 1), as s² is not s(s + 1).
    expected = length**2 - 0.25 * (2 * unseen - max(0, length - 5))
    assert window.squared(length) == pytest.approx(expected)
    assert window.squared(np.array([length])) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("frequency", "num"), [(None, 12), (2, 6), (5, 10), (1, 0), ([1, 0, 0] * 4, 4)]
)
def test_layers_with_a_window_are_those_of_upstream(frequency: Any, num: int) -> None:
    assert sum(windowed_layers(12, frequency)) == num
    assert num == sum(
        is_layer_window_attention((8, 0), frequency, number) for number in range(1, 13)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_experts": 8}, "num_experts is 8, num_expert_layers 0"),
        ({"shared_expert_ffn_hidden_size": 8}, "shared_expert_ffn_hidden_size 8"),
        ({"num_first_mlp_layers": 1}, "num_expert_layers 0,.* num_first_mlp_layers 1"),
        ({"window_tokens": 8}, "num_windowed_layers is 0, window_tokens 8"),
        ({"window_tokens": 8, "num_windowed_layers": 33}, "some of 32 layers have a window"),
        ({"v_head_dim": 64}, "kv_lora_rank 0, qk_head_dim 0"),
        (
            {"kv_lora_rank": 64, "qk_head_dim": 96, "qk_pos_emb_head_dim": 64, "v_head_dim": 96},
            "qk_pos_emb_head_dim 64, v_head_dim 96, kv_channels 128",
        ),
        ({"num_query_groups": 5}, "32 heads are not a multiple of 5 query groups"),
    ],
)
def test_impossible_shapes(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        replace(LLAMA_7B, **changes)  # type: ignore[arg-type]
