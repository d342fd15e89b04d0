"""The memory model: limits near published ones, and the directions in which they move."""

from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model import MemoryModel, ModelShape, Recompute, device_constants
from megatron.hydraulis.strategy import Scheme
from tests.support.planning import LLAMA_7B, LLAMA_32B

EVERY_LAYER = Recompute(granularity="full", method="uniform", num_layers=1)


def memory(shape: ModelShape = LLAMA_7B, num_ranks: int = 64) -> MemoryModel:
    return MemoryModel(
        shape=shape, device=device_constants("a800-80"), num_ranks=num_ranks, parameter_bytes=2
    )


# Limits that the authors of arXiv 2412.07894 computed for LLAMA_32B on 64 A800-80G (their file
# generate_strategy_32b.py, 2024), by a formula of their own with another reserve.
@pytest.mark.parametrize(
    ("scheme", "published"),
    [
        (Scheme(tp=4, pp=2), 12416),
        (Scheme(tp=4, pp=4), 14592),
        (Scheme(tp=8), 21888),
        (Scheme(tp=8, pp=2), 25856),
    ],
    ids=str,
)
def test_near_published_limits(scheme: Scheme, published: int) -> None:
    assert memory(LLAMA_32B).max_tokens(scheme) == pytest.approx(published, rel=0.2)


def test_a_model_that_does_not_fit_has_room_for_no_token() -> None:
    assert memory(LLAMA_32B).max_tokens(Scheme()) == 0


def test_what_gives_more_room() -> None:
    base = memory().max_tokens(Scheme(tp=2))
    assert base > 0
    assert memory().max_tokens(Scheme(tp=4)) > base
    assert memory(num_ranks=512).max_tokens(Scheme(tp=2)) > base
    assert replace(memory(), recompute=EVERY_LAYER).max_tokens(Scheme(tp=2)) > base
    assert replace(memory(), sequence_parallel=False).max_tokens(Scheme(tp=2)) < base
    # Tokens are spread over the cp ranks, weights are not, and one layer's keys and values meet.
    assert 1.95 * base < memory().max_tokens(Scheme(tp=2, cp=2)) < 2 * base


def test_keys_and_values_of_the_row_by_hand() -> None:
    """Of one layer, in bf16, with their gradients; the row is cp times as long as a part."""
    alone = memory().bytes_per_token(Scheme(tp=2), 0)
    kept = 2 * 2 * LLAMA_7B.num_query_groups * LLAMA_7B.kv_channels * 2 / 2
    for cp in (2, 4, 8):
        shared = memory().bytes_per_token(Scheme(tp=2, cp=cp), 0)
        assert shared - alone == pytest.approx(kept * cp)


@pytest.mark.parametrize("scheme", [Scheme(tp=2), Scheme(tp=2, cp=4), Scheme(cp=2, pp=2)], ids=str)
def test_padding_to_the_shape_stays_within_the_limit(scheme: Scheme) -> None:
    assert memory().max_tokens(scheme) % (2 * scheme.tp * scheme.cp) == 0


def test_the_first_stage_holds_most_activations_the_last_the_logits() -> None:
    scheme = Scheme(pp=4)
    per_token = [memory().bytes_per_token(scheme, stage) for stage in range(4)]
    activations_of_one = per_token[2] / 2
    assert per_token[0] == pytest.approx(4 * activations_of_one)
    # bf16 logits and cross entropy's fp32 copy.
    assert per_token[3] == pytest.approx(activations_of_one + 6 * LLAMA_7B.vocab_size)


def test_what_recompute_keeps_by_hand() -> None:
    # Stage 0 of four, 8 layers, 4 micro-batches in flight, bf16, no tensor parallelism.
    scheme, shape = Scheme(pp=4), LLAMA_7B
    hidden, mlp = 2 * shape.hidden_size, 2 * 3 * shape.ffn_hidden_size
    layer = memory().bytes_per_token(scheme, 0) / 32
    assert layer == pytest.approx(2 * 8 * shape.hidden_size + mlp)
    cases = {
        EVERY_LAYER: 4 * 8 * hidden + layer,
        Recompute(granularity="full", method="uniform", num_layers=3): 4 * 3 * hidden + 3 * layer,
        Recompute(granularity="full", method="uniform", num_layers=20): 4 * hidden + 8 * layer,
        Recompute(granularity="full", method="block", num_layers=3): (
            4 * (3 * hidden + 5 * layer) + layer
        ),
        Recompute(granularity="selective", modules=("mlp",)): 4 * 8 * (layer - mlp) + mlp,
        Recompute(granularity="selective", modules=("core_attn",)): 4 * 8 * layer,
    }
    for recompute, expected in cases.items():
        found = replace(memory(), recompute=recompute).bytes_per_token(scheme, 0)
        assert found == pytest.approx(expected), recompute


def test_state_of_one_rank_counts_every_parameter() -> None:
    one = memory(num_ranks=1)
    # bf16 weight, fp32 gradient, and 16 bytes of canonical shard; staging is two layers in bf16 and
    # two in fp32.
    expected = 22 * LLAMA_7B.num_parameters + 12 * LLAMA_7B.num_parameters_per_layer
    assert one.state_bytes(Scheme(), 0) - expected == pytest.approx(0, abs=1e-6 * expected)


def test_staging_of_an_owner_is_a_whole_layer_whatever_tp() -> None:
    for parameter_bytes, as_owner, as_role in ((2, 6, 6), (4, 8, 0)):
        model = replace(memory(num_ranks=8), parameter_bytes=parameter_bytes)
        for tp in (1, 4):
            role = LLAMA_7B.num_parameters / tp * (parameter_bytes + 4)
            canonical = 16 * LLAMA_7B.num_parameters / 8
            staging = (as_owner + as_role / tp) * LLAMA_7B.num_parameters_per_layer
            found = model.state_bytes(Scheme(tp=tp), 0)
            assert found == pytest.approx(role + canonical + staging, rel=1e-6)


def test_tied_embeddings_are_held_once_by_one_stage_and_twice_by_two() -> None:
    tied = replace(LLAMA_7B, tied_embeddings=True)
    saved = memory().state_bytes(Scheme(), 0) - memory(tied).state_bytes(Scheme(), 0)
    num_embedding = LLAMA_7B.num_embedding_parameters
    assert saved == pytest.approx((6 + 16 / 64) * num_embedding)
    last = Scheme(pp=2)
    only_canonical = memory().state_bytes(last, 1) - memory(tied).state_bytes(last, 1)
    assert only_canonical == pytest.approx(16 / 64 * num_embedding)
