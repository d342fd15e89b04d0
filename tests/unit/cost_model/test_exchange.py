"""How a context-parallel group exchanges: elements by hand, ways, and what they cost."""

from dataclasses import replace

import pytest

from megatron.hydraulis.cost_model import AnalyticCostModel, ModelShape, device_constants
from megatron.hydraulis.cost_model.context import (
    all_to_all_elements,
    all_to_all_refusal,
    choose_way,
    exchange_of,
    gather_elements,
)
from megatron.hydraulis.cost_model.overlap import CostTerm
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.strategy import Scheme
from tests.support.planning import LLAMA_7B
from tests.unit.test_model_shape import DEEPSEEK_V3

PASSES = ("attention", "context_parallel")

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


@pytest.mark.parametrize(
    ("heads", "groups", "size", "gathered", "exchanged"),
    [
        (8, 8, 2, 48, 32),  # three times one rank's 8 + 8; twice half of 8·4
        (32, 8, 8, 336, 140),  # seven ranks' 8 + 8; seven eighths of 32 + 8 + 8 + 32
        (32, 2, 8, 84, 140),  # 2 groups are repeated up to 8
        (32, 8, 1, 0, 0),
    ],
)
def test_elements_written_out(
    heads: int, groups: int, size: int, gathered: float, exchanged: float
) -> None:
    assert gather_elements(groups, size) == gathered
    assert all_to_all_elements(heads, groups, size) == exchanged


@pytest.mark.parametrize(
    ("heads", "groups", "size", "way"),
    [
        (32, 8, 8, "a2a"),
        (32, 2, 8, "all_gather"),
        (32, 8, 2, "all_gather"),
        (32, 8, 4, "a2a"),
        (8, 8, 2, "a2a"),
        (6, 6, 4, "all_gather"),  # heads cannot be shared out
    ],
)
def test_the_cheaper_way_that_heads_allow(heads: int, groups: int, size: int, way: str) -> None:
    assert choose_way("auto", heads, groups, size, has_te=False) == way
    assert choose_way("p2p", heads, groups, size, has_te=False) == "all_gather"
    assert choose_way("all_gather", heads, groups, size, has_te=False) == "all_gather"


@pytest.mark.parametrize(
    ("heads", "groups", "allowed"),
    [(8, 8, True), (8, 4, True), (8, 2, True), (8, 1, True), (6, 6, False), (12, 3, False)],
)
def test_heads_of_an_all_to_all(heads: int, groups: int, allowed: bool) -> None:
    assert (all_to_all_refusal(heads, groups, 4) is None) is allowed


def test_refusals_say_rule_numbers_and_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"multiple of 4 query heads .* there are 6; use"):
        choose_way("a2a", 6, 6, 4, has_te=False)
    with pytest.raises(ConfigurationError, match="multiple or a divisor of 4 but there are 3; use"):
        choose_way("a2a", 12, 3, 4, has_te=False)
    assert choose_way("auto", 12, 3, 4, has_te=False) == "all_gather"


def test_a_single_rank_exchanges_nothing() -> None:
    alone = exchange_of(SHAPE, Scheme(tp=2), 2, "a2a")
    assert (alone.total_bytes, alone.total_messages) == (0.0, 0)


@pytest.mark.parametrize(
    ("way", "forward_bytes", "num_passes", "forward_messages"),
    [
        # Keys and values of 2 groups of 10 entries of 2 bytes, of 3 of 4 tokens.
        ("p2p", 2 * 2 * 10 * 2 * 3 / 4, 3, 3),
        ("all_gather", 2 * 2 * 10 * 2 * 3 / 4, 3, 3),
        # Of 4 heads there and back, and 2 groups made 4; a rank has a quarter of the tokens and
        # keeps a quarter of what it has.
        ("a2a", (2 * 4 + 2 * 4) * 10 * 2 * 3 / 4 / 4, 2, 2),
    ],
)
def test_what_a_rank_receives(
    way: str, forward_bytes: float, num_passes: int, forward_messages: int
) -> None:
    found = exchange_of(SHAPE, Scheme(tp=2, cp=4), 2, way)
    assert found.forward_bytes == pytest.approx(forward_bytes)
    assert found.total_bytes == pytest.approx(num_passes * forward_bytes)
    assert found.forward_messages == forward_messages
    assert found.total_messages == num_passes * forward_messages


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


def test_transformer_engine_has_no_ring_for_windows() -> None:
    """It gathers where `auto` would choose a ring and some layer has a window."""
    for heads, groups, size in ((3, 1, 2), (8, 2, 4)):  # an all-to-all does not divide these
        for windows, way in ((False, "p2p"), (True, "all_gather")):
            found = choose_way("auto", heads, groups, size, has_te=True, has_windows=windows)
            assert found == way
    assert choose_way("p2p", 8, 2, 4, has_te=True, has_windows=True) == "p2p"  # refused by name


def test_transformer_engine_exchanges_values_without_padding() -> None:
    for way in ("p2p", "a2a"):
        padded, values_apart = (
            exchange_of(DEEPSEEK_V3, Scheme(cp=4), 2, way, has_te=has_te).total_bytes
            for has_te in (False, True)
        )
        # Keys of 192 channels, values of 128.
        assert values_apart / padded == pytest.approx((192 + 128) / (2 * 192))


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


def test_a_ring_hides_behind_all_of_attention_but_the_last_step() -> None:
    """max(attention, exchange + attention/c), in forward and backward apart, as hand-made sums."""
    device = device_constants("h100")
    shape, scheme = LLAMA_7B, Scheme(cp=8)
    added = AnalyticCostModel(shape=shape, device=device, cluster=device.cluster(8, 8))
    ring = replace(added, has_te_attention=True)
    assert not added.coefficients(scheme).others, "an all-gather comes before attention"
    (terms,) = added.terms_by_stage(scheme)
    others_s = sum((t for cause, t in terms.items() if cause not in PASSES), CostTerm())
    attention, exchange = added.attention(scheme), added.forward_terms(scheme)["context_parallel"]
    for lengths in ([512] * 64, [6000] * 5, [32768], [131072]):
        squares, tokens = sum(s * s for s in lengths), sum(lengths)
        attention_s, exchange_s = (t.seconds(squares, tokens) for t in (attention, exchange))
        forward_s = max(attention_s, exchange_s + attention_s / 8)
        # On an H100 3.4 times the forward; gradients of keys and values besides them.
        backward_s = max(3.4 * attention_s, 2.0 * exchange_s + 3.4 * attention_s / 8)
        wanted_s = others_s.seconds(squares, tokens) + shape.num_layers * (forward_s + backward_s)
        assert ring.coefficients(scheme).time_ms(lengths) == pytest.approx(1e3 * wanted_s)
    # Recomputation attends once more, with another ring.
    again = replace(ring, recompute=EVERY_LAYER)
    lengths, squares, tokens = [131072], 131072**2, 131072
    more_s = sum(added.forward_terms(scheme).values(), CostTerm()).seconds(squares, tokens)
    more_s -= exchange.seconds(squares, tokens)  # hidden
    assert again.coefficients(scheme).time_ms(lengths) == pytest.approx(
        ring.coefficients(scheme).time_ms(lengths) + 1e3 * shape.num_layers * more_s
    )
    assert ring.coefficients(Scheme(cp=2)).time_ms([100]) > 0.0
    heads = replace(ring, cp_comm_type="a2a").coefficients(scheme)
    assert not heads.others, "an all-to-all comes before attention"
