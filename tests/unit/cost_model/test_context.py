"""Assumed costs of context-parallel degrees that were not measured."""

from dataclasses import replace

import pytest

from megatron.hydraulis.cluster import Cluster, Link
from megatron.hydraulis.cost_model import AnalyticCostModel, Coefficients, JobCosts
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme, ProfiledStrategy
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER
from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme, Strategy
from tests.support.simulation import SMALL_SHAPE

CLUSTER = Cluster(
    num_nodes=2,
    ranks_per_node=4,
    intra_node=Link(bytes_per_s=1e9, latency_s=0.0, source="test"),
    inter_node=Link(bytes_per_s=1e8, latency_s=0.0, source="test"),
)
LARGE_SHAPE = ModelShape(
    num_layers=40,
    hidden_size=5120,
    ffn_hidden_size=13824,
    num_attention_heads=40,
    num_query_groups=40,
    kv_channels=128,
    vocab_size=32000,
    gated_mlp=True,
    tied_embeddings=False,
)
TIMES = Coefficients(0.004, 0.8, 5.0)
DEVICE = replace(device_constants("a100-80"), link_fraction=1.0)
MODEL = AnalyticCostModel(shape=SMALL_SHAPE, device=DEVICE, cluster=CLUSTER)


def profile(rows: dict[Scheme, tuple[Coefficients, int]]) -> ProfileCostModel:
    """By scheme, its coefficients and limit."""
    schemes = tuple(
        ProfiledScheme(scheme=scheme, coefficients=times, max_tokens=limit)
        for scheme, (times, limit) in rows.items()
    )
    return ProfileCostModel(
        device="d",
        source="s",
        date="t",
        schemes=schemes,
        strategies=(ProfiledStrategy(name="long", regroup_ms=3.0, optimizer_ms=4.0),),
    )


def exchange_ms(cp: int, tp: int = 1, bytes_per_s: float = 1e9) -> float:
    """3 rounds through 4 layers of all but a cp-th of 64 bf16 numbers a token."""
    return 1e3 * 3 * 4 * (cp - 1) / cp * 64 * 2 / tp / bytes_per_s


def test_ranks_share_work_and_memory_evenly() -> None:
    costs = JobCosts(profile=profile({Scheme(tp=2): (TIMES, 100)}))
    assert costs.coefficients(Scheme(tp=2)) == TIMES
    assert costs.coefficients(Scheme(tp=2, cp=4)) == Coefficients(0.001, 0.2, 5.0)
    assert costs.max_tokens(Scheme(tp=2, cp=4)) == 400


def test_keys_and_values_are_exchanged_over_the_group_s_slowest_link() -> None:
    costs = JobCosts(profile=profile({Scheme(tp=2): (TIMES, 100)}), model=MODEL)
    inside, across = (costs.coefficients(Scheme(tp=2, cp=cp)).b_ms_per_token for cp in (2, 4))
    assert inside == pytest.approx(0.4 + exchange_ms(2, tp=2))
    assert across == pytest.approx(0.2 + exchange_ms(4, tp=2, bytes_per_s=1e8))
    half = replace(MODEL, device=replace(DEVICE, link_fraction=0.5))
    slow = JobCosts(profile=costs.profile, model=half)
    found = slow.coefficients(Scheme(tp=2, cp=2)).b_ms_per_token
    assert found == pytest.approx(0.4 + 2 * exchange_ms(2, tp=2))


def test_the_nearest_measured_width_is_taken() -> None:
    wide = Coefficients(0.001, 0.3, 6.0)
    costs = JobCosts(profile=profile({Scheme(cp=8): (wide, 800), Scheme(): (TIMES, 90)}))
    # Three doublings lie between 1 and 8: 2 is nearer to 1, 4 to 8, 16 to 8.
    assert costs.coefficients(Scheme(cp=2)).a_ms_per_token2 == pytest.approx(0.002)
    assert costs.coefficients(Scheme(cp=4)) == Coefficients(0.002, 0.6, 6.0)
    assert [costs.max_tokens(Scheme(cp=cp)) for cp in (1, 2, 4, 8, 16)] == [90, 180, 400, 800, 1600]


def test_a_narrower_group_than_measured_exchanges_less() -> None:
    wide = Coefficients(0.001, 0.5 + exchange_ms(4), 6.0)
    costs = JobCosts(profile=profile({Scheme(cp=4): (wide, 400)}), model=MODEL)
    narrow, one = (costs.coefficients(Scheme(cp=cp)) for cp in (2, 1))
    assert narrow.b_ms_per_token == pytest.approx(1.0 + exchange_ms(2))
    assert one.b_ms_per_token == pytest.approx(2.0)
    # A row that is faster than its exchange leaves no work to share.
    fast = JobCosts(
        profile=profile({Scheme(cp=4): (Coefficients(0.0, 0.0, 1.0), 400)}),
        model=MODEL,
    )
    assert fast.coefficients(Scheme(cp=1)).b_ms_per_token == 0.0


def test_a_splitting_width_is_its_full_width() -> None:
    costs = JobCosts(profile=profile({Scheme(cp=2): (TIMES, 100)}))
    assert costs.coefficients(Scheme(cp=2, splits_cp=True)) == TIMES
    assert costs.max_tokens(Scheme(cp=4, splits_cp=True)) == 200


def test_schemes_with_different_layers_per_stage_are_distinct() -> None:
    uneven = Coefficients(0.002, 0.6, 5.0)
    costs = JobCosts(
        profile=profile({Scheme(pp=2): (TIMES, 100), Scheme(pp=2, layers=(3, 1)): (uneven, 60)})
    )
    assert costs.max_tokens(Scheme(cp=2, pp=2, layers=(3, 1))) == 120
    assert costs.coefficients(Scheme(cp=2, pp=2)).b_ms_per_token == 0.4
    with pytest.raises(StrategyError, match=r"measure pp2:1,3, or take"):
        costs.coefficients(Scheme(cp=2, pp=2, layers=(1, 3)))


def test_overhead_is_that_of_the_profile() -> None:
    costs = JobCosts(profile=profile({Scheme(): (TIMES, 100)}))
    assert costs.overhead_ms(Strategy.parse("tp1", 1, name="long")) == 7.0


@pytest.mark.parametrize("way", ["auto", "p2p"])
@pytest.mark.parametrize("narrow", [Scheme(), Scheme(tp=2, pp=2), Scheme(pp=4)])
def test_assumed_widths_agree_with_the_analytic_model(narrow: Scheme, way: str) -> None:
    """Of the same shape and links; it also waits for latencies, in c."""
    device = device_constants("a100-80")
    cluster = device.cluster(64, 8)
    analytic = AnalyticCostModel(
        shape=LARGE_SHAPE, device=device, cluster=cluster, cp_comm_type=way
    )
    measured = (analytic.coefficients(narrow), analytic.max_tokens(narrow))
    costs = JobCosts(profile=profile({narrow: measured}), model=analytic)
    for cp in (2, 4, 8):
        scheme = narrow.of_context_group(cp)
        found, wanted = costs.coefficients(scheme), analytic.coefficients(scheme)
        assert found.a_ms_per_token2 == pytest.approx(wanted.a_ms_per_token2)
        # Messages between stages may take other links.
        assert found.b_ms_per_token == pytest.approx(wanted.b_ms_per_token, rel=0.02)
        assert costs.max_tokens(scheme) == min(cp * measured[1], analytic.max_tokens(scheme))


def test_limits_of_assumed_widths_keep_the_measured_share_of_the_memory_model() -> None:
    device = device_constants("a100-80")
    model = AnalyticCostModel(shape=LARGE_SHAPE, device=device, cluster=device.cluster(64, 8))
    narrow, measured = Scheme(tp=4), 800
    costs = JobCosts(profile=profile({narrow: (TIMES, measured)}), model=model)
    for cp in (2, 4, 8):
        wide = narrow.of_context_group(cp)
        share = measured * model.max_tokens(wide) // model.max_tokens(narrow)
        assert costs.max_tokens(wide) == min(share, cp * measured)
    # Parameters are not split by cp, and the gathered keys and values of a row are not either.
    assert costs.max_tokens(narrow.of_context_group(8)) < 8 * measured


def test_assumed_widths_of_a_ring_have_its_forms_scaled_as_measured() -> None:
    device = device_constants("a100-80")
    analytic = AnalyticCostModel(
        shape=LARGE_SHAPE, device=device, cluster=device.cluster(64, 8), has_te_attention=True
    )
    limit, narrow, wide = analytic.max_tokens(Scheme()), Scheme(), Scheme(cp=8)
    slower = analytic.coefficients(narrow).scaled(a=1.5, b=1.25, c=2.0)
    costs = JobCosts(profile=profile({narrow: (slower, limit)}), model=analytic)
    wanted = analytic.coefficients(wide).scaled(a=1.5, b=1.25, c=2.0)
    assert len(wanted.forms) == 3
    for found, form in zip(costs.coefficients(wide).forms, wanted.forms, strict=True):
        assert found.a_ms_per_token2 == pytest.approx(form.a_ms_per_token2)
        assert found.b_ms_per_token == pytest.approx(form.b_ms_per_token)
        assert found.c_ms == pytest.approx(form.c_ms)
    back = JobCosts(profile=profile({wide: (wanted, limit)}), model=analytic)
    assert back.coefficients(narrow).time_ms([1000]) == pytest.approx(slower.time_ms([1000]))


def test_every_measured_form_is_shared_by_the_ranks_of_another_width() -> None:
    times = replace(TIMES, others=(Coefficients(0.0, 2.0, 9.0),), host_ms=3.0)
    costs = JobCosts(profile=profile({Scheme(): (times, 100)}), model=MODEL)
    first, other = costs.coefficients(Scheme(cp=2)).forms
    assert costs.coefficients(Scheme(cp=2)).host_ms == 3.0
    assert (first.a_ms_per_token2, other.a_ms_per_token2) == (0.002, 0.0)
    assert other.b_ms_per_token == pytest.approx(1.0 + exchange_ms(2))
    again = costs.by(replace(MODEL, recompute=EVERY_LAYER)).coefficients(Scheme())
    assert len(again.forms) == 2
    assert times.time_ms([100]) < again.time_ms([100]) < 1.4 * times.time_ms([100])


@pytest.mark.parametrize("host_ms", [0.0, 6.0])
def test_the_host_of_another_model_is_scaled_by_its_own_measurement(host_ms: float) -> None:
    plain = replace(MODEL, has_te_attention=True)
    full = replace(plain, recompute=EVERY_LAYER)
    slow = replace(plain.coefficients(Scheme()).scaled(c=50.0), host_ms=host_ms)
    costs = JobCosts(profile=profile({Scheme(): (slow, 100)}), model=plain)
    assert costs.coefficients(Scheme(cp=2)).host_ms == pytest.approx(host_ms)
    ratio = full.coefficients(Scheme()).host_ms / plain.coefficients(Scheme()).host_ms
    assert costs.by(full).coefficients(Scheme()).host_ms == pytest.approx(ratio * host_ms)
