"""Which linear layers get an adapter, and of what sizes."""

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lora import Lora, adapters
from megatron.hydraulis.model_shape import ModelShape

_DENSE = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "vocab_size": 128,
    "gated_mlp": True,
    "tied_embeddings": False,
}
_EXPERTS = {
    "num_experts": 4,
    "num_expert_layers": 4,
    "experts_per_token": 2,
    "expert_ffn_hidden_size": 16,
}
_LATENTS = {
    "num_query_groups": 4,
    "kv_channels": 8,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 6,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 4,
}


def _shape(**changes: object) -> ModelShape:
    return ModelShape(**(_DENSE | changes))  # type: ignore[arg-type]


def test_adapters_of_all_linear_layers_of_a_dense_model() -> None:
    lora = Lora.resolve(2, 4, (), _shape())
    assert lora.scale == 2
    assert {
        each.target: each.num_parameters(lora.rank) for each in lora.of(adapters(_shape()))
    } == {
        "q_proj": 2 * (32 + 32),
        "k_proj": 2 * (32 + 16),
        "v_proj": 2 * (32 + 16),
        "o_proj": 2 * (32 + 32),
        "gate_proj": 2 * (32 + 48),
        "up_proj": 2 * (32 + 48),
        "down_proj": 2 * (48 + 32),
    }


@pytest.mark.parametrize(
    ("given", "targets"),
    [
        ("linear_qkv", ("q_proj", "k_proj", "v_proj")),
        ("linear_proj", ("o_proj",)),
        (["v_proj", "q_proj", "v_proj"], ("q_proj", "v_proj")),
        (["output_layer"], ("lm_head",)),
        (["linear_fc2"], ("down_proj",)),
    ],
)
def test_names_of_megatron_and_of_hugging_face(
    given: list[str] | str, targets: tuple[str, ...]
) -> None:
    assert Lora.resolve(1, 1, given, _shape()).targets == targets


def test_latents_have_adapters_of_their_projections() -> None:
    shape = _shape(**_LATENTS)
    sizes = {each.target: (each.num_inputs, each.num_outputs) for each in adapters(shape)}
    assert sizes["q_a_proj"] == (32, 12)
    assert sizes["q_b_proj"] == (12, 32)
    assert sizes["kv_a_proj_with_mqa"] == (32, 12)
    assert sizes["kv_b_proj"] == (10, 40)
    assert sizes["o_proj"] == (16, 32)


def test_routed_experts_are_refused_by_name_and_shared_ones_are_adapted() -> None:
    with pytest.raises(ConfigurationError, match=r"'linear_fc1', which it lacks \(its routed"):
        Lora.resolve(1, 1, "linear_fc1", _shape(**_EXPERTS))
    shape = _shape(**_EXPERTS, shared_expert_ffn_hidden_size=24)
    lora = Lora.resolve(1, 1, "linear_fc1", shape)
    with pytest.raises(ConfigurationError, match=r"mlp.shared_experts.linear_fc1', which it lacks"):
        # It would be those of other layers, too, as targets are Hugging Face's.
        Lora.resolve(1, 1, "mlp.shared_experts.linear_fc1", shape)
    assert [each.module for each in lora.of(adapters(shape))] == [
        "mlp.shared_experts.linear_fc1"
    ] * 2


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"rank \(--lora-rank\) is 0"):
        Lora(0, 1.0, ("q_proj",))
    with pytest.raises(ConfigurationError, match=r"alpha \(--lora-alpha\) nan"):
        Lora(1, float("nan"), ("q_proj",))
    with pytest.raises(ConfigurationError, match=r"the text 'q_proj'; give \('q_proj',\)"):
        Lora(1, targets="q_proj")  # type: ignore[arg-type]
