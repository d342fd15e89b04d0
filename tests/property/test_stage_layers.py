"""Layers of pipeline stages against all splits of small models."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.hydraulis.cost_model import AnalyticCostModel, ModelShape, Recompute
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.pipeline import split_layers
from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.strategy import Scheme
from tests.support.planning import LLAMA_7B


def all_splits(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
        borders = (0, *cuts, num_layers)
        yield tuple(stop - start for start, stop in itertools.pairwise(borders))


@st.composite
def stages(draw: st.DrawFn) -> tuple[int, list[list[int]], list[list[int]], int]:
    """Layers; each stage's time and tokens by the number of layers; required tokens.

    Times never fall with more layers, tokens never rise.
    """
    num_layers = draw(st.integers(1, 8))
    num_stages = draw(st.integers(1, min(4, num_layers)))
    sizes = st.lists(st.integers(0, 6), min_size=num_layers, max_size=num_layers)
    times = [list(itertools.accumulate(draw(sizes))) for _ in range(num_stages)]
    tokens = [sorted(draw(sizes), reverse=True) for _ in range(num_stages)]
    return num_layers, times, tokens, draw(st.integers(0, 7))


@given(stages())
def test_no_split_that_holds_the_tokens_has_a_faster_slowest_stage(
    drawn: tuple[int, list[list[int]], list[list[int]], int],
) -> None:
    num_layers, times, tokens, min_tokens = drawn

    def slowest(layers: tuple[int, ...]) -> int:
        return max(times[stage][num - 1] for stage, num in enumerate(layers))

    def held(layers: tuple[int, ...]) -> int:
        return min(tokens[stage][num - 1] for stage, num in enumerate(layers))

    found = split_layers(
        num_layers,
        len(times),
        time=lambda stage, num: times[stage][num - 1],
        tokens=lambda stage, num: tokens[stage][num - 1],
        min_tokens=min_tokens,
    )
    assert sum(found) == num_layers
    assert min(found) >= 1
    splits = list(all_splits(num_layers, len(times)))
    needed = min(min_tokens, max(map(held, splits)))
    able = [split for split in splits if held(split) >= needed]
    assert held(found) >= needed
    assert slowest(found) == min(map(slowest, able))
    fastest = [split for split in able if slowest(split) == slowest(found)]
    assert held(found) == max(map(held, fastest))


def test_more_stages_than_layers() -> None:
    with pytest.raises(StrategyError, match=r"3 stages share 2; use at most pp2"):
        split_layers(2, 3, time=lambda *_: 1.0, tokens=lambda *_: 1.0, min_tokens=0)


SMALL = ModelShape(
    num_layers=9,
    hidden_size=1024,
    ffn_hidden_size=2816,
    num_attention_heads=16,
    num_query_groups=4,
    kv_channels=64,
    vocab_size=32_000,
    gated_mlp=True,
    tied_embeddings=False,
)


@given(
    st.sampled_from([Scheme(pp=2), Scheme(tp=2, pp=3), Scheme(tp=4, pp=4), Scheme(cp=2, pp=3)]),
    st.sampled_from([8_000, 32_000, 128_000, 512_000]),
    st.booleans(),
    st.sampled_from(
        [
            Recompute(),
            Recompute(granularity="selective", modules=("mlp",)),
            Recompute(granularity="full", method="block", num_layers=2),
            Recompute(granularity="full", method="uniform", num_layers=1),
        ]
    ),
    st.floats(2e9, 12e9),
    st.integers(0, 40_000),
)
def test_the_analytic_model_chooses_the_least_b(
    scheme: Scheme,
    vocab_size: int,
    tied: bool,
    recompute: Recompute,
    memory_bytes: float,
    min_tokens: int,
) -> None:
    values = {name: getattr(SMALL, name) for name in SMALL.__slots__}
    device = device_constants("h100")
    small_device = type(device)(
        **{name: getattr(device, name) for name in device.__slots__}
        | {"memory_bytes": memory_bytes, "reserve_bytes": 0.0}
    )
    model = AnalyticCostModel(
        shape=ModelShape(**values | {"vocab_size": vocab_size, "tied_embeddings": tied}),
        device=small_device,
        cluster=device.cluster(16, 8),
        recompute=recompute,
    )
    found = model.balanced_scheme(scheme, min_tokens=min_tokens)
    assert (found.tp, found.cp, found.pp) == (scheme.tp, scheme.cp, scheme.pp)
    splits = [
        Scheme(scheme.tp, scheme.cp, scheme.pp, layers)
        for layers in all_splits(SMALL.num_layers, scheme.pp)
    ]
    needed = min(min_tokens, max(map(model.max_tokens, splits)))
    able = [split for split in splits if model.max_tokens(split) >= needed]
    b_of = {split: model.coefficients(split).b_ms_per_token for split in able}
    assert model.max_tokens(found) >= needed
    assert model.coefficients(found).b_ms_per_token == pytest.approx(min(b_of.values()), rel=1e-9)


def test_a_large_output_layer_takes_layers_from_the_last_stage() -> None:
    device = device_constants("h100")
    cluster = device.cluster(8, 8)
    shape = {name: getattr(LLAMA_7B, name) for name in LLAMA_7B.__slots__}
    large = ModelShape(**shape | {"vocab_size": 128_256})
    model = AnalyticCostModel(shape=large, device=device, cluster=cluster)
    found = model.balanced_scheme(Scheme(tp=2, pp=4), min_tokens=0)
    # An output layer of 3.4 layers: 9 + 9 + 9 + (5 + 3.4).
    assert found.layers is not None
    assert found.layers[-1] == 5
    assert max(found.layers) == 9
    # An output layer of 0.65 layers does not justify an uneven split: 8.65 is less than 9.
    usual = AnalyticCostModel(shape=LLAMA_7B, device=device, cluster=cluster)
    assert usual.balanced_scheme(Scheme(tp=2, pp=4), min_tokens=0) == Scheme(tp=2, pp=4)


def test_layers_of_a_model_that_does_not_fit_are_balanced_without_a_number_of_tokens() -> None:
    device = device_constants("cpu")  # holds no token
    model = AnalyticCostModel(
        shape=LLAMA_7B,
        device=device,
        cluster=device.cluster(8, 8),
    )
    scheme = model.balanced_scheme(Scheme(pp=3), min_tokens=0)
    assert scheme == Scheme(pp=3)  # 11 + 11 + (10 + 0.65)
