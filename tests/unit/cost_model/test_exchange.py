"""Elements that a group exchanges, by hand; its cost and memory in the analytic model."""

from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model import AnalyticCostModel, ModelShape, device_constants
from megatron.hydraulis.cost_model.context import exchange_of
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.strategy import Scheme
from tests.support.planning import LLAMA_7B

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=8,
    num_query_groups=4,
    kv_channels=10,
    vocab_size=64,
    gated_mlp=True,
    tied_embeddings=False,
)


def test_a_single_rank_exchanges_nothing() -> None:
    alone = exchange_of(SHAPE, Scheme(tp=2), 2, "a2a")
    assert (alone.total_bytes, alone.total_messages) == (0.0, 0)


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_keys_and_values_of_the_others(way: str) -> None:
    found = exchange_of(SHAPE, Scheme(tp=2, cp=4), 2, way)
    # Keys and values of 2 groups of 10 entries of 2 bytes, of 3 of 4 tokens; 3 times.
    assert found.forward_bytes == pytest.approx(2 * 2 * 10 * 2 * 3 / 4)
    assert found.total_bytes == pytest.approx(3 * found.forward_bytes)
    assert (found.forward_messages, found.total_messages) == (3, 9)


def test_tokens_for_heads() -> None:
    found = exchange_of(SHAPE, Scheme(tp=2, cp=4), 2, "a2a")
    # Of 4 heads there and back, and 2 groups made 4; a rank has a quarter of the tokens and keeps a
    # quarter of what it has.
    sent = (2 * 4 + 2 * 4) * 10 * 2
    assert found.forward_bytes == pytest.approx(sent * 3 / 4 / 4)
    assert found.total_bytes == pytest.approx(2 * found.forward_bytes)
    assert (found.forward_messages, found.total_messages) == (2, 4)


def test_the_exchange_is_that_of_training() -> None:
    ways = ("p2p", "a2a", "auto")
    ring, exchange, chosen = (exchange_of(SHAPE, Scheme(cp=8), 2, way) for way in ways)
    assert exchange.total_bytes < ring.total_bytes
    assert chosen == exchange
    ring, exchange, chosen = (exchange_of(SHAPE, Scheme(cp=2), 2, way) for way in ways)
    assert ring.total_bytes == exchange.total_bytes  # 24 head vectors either way
    assert chosen == ring
    with pytest.raises(ConfigurationError, match="a2a over 3"):
        exchange_of(SHAPE, Scheme(cp=3), 2, "a2a")


def test_times_and_limits_follow_the_exchange() -> None:
    device = device_constants("a800-80g")
    ring = AnalyticCostModel(shape=LLAMA_7B, device=device, cluster=device.cluster(64, 8))
    cheapest = replace(ring, cp_comm_type="auto")
    for size in (8, 16):
        scheme = Scheme(cp=size)
        assert (
            cheapest.coefficients(scheme).b_ms_per_token < ring.coefficients(scheme).b_ms_per_token
        )
    # Every layer keeps attention's output before and after the second exchange; in one layer at a
    # time the keys of the row are gathered.
    assert cheapest.max_tokens(Scheme(cp=8)) < ring.max_tokens(Scheme(cp=8))
    assert cheapest.max_tokens(Scheme(cp=16)) > ring.max_tokens(Scheme(cp=16))
    assert cheapest.coefficients(Scheme(tp=8)) == ring.coefficients(Scheme(tp=8))
    assert cheapest.max_tokens(Scheme(tp=8)) == ring.max_tokens(Scheme(tp=8))
