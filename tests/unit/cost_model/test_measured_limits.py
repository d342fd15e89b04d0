import dataclasses

import pytest

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.limits import (
    CappedCostModel,
    MemoryTrial,
    after_failure,
    allowed_tokens,
    caps_of_schemes,
    lower,
    with_lower_limits,
)
from megatron.hydraulis.cost_model.profile import ProfileCostModel, ProfiledScheme
from megatron.hydraulis.strategy import Scheme, Strategy

TP2 = Scheme(tp=2)
WAVES = Scheme(tp=2, cp=8, splits_cp=True)


def trial(peak_bytes: int, *, num_tokens: int = 100, capacity_bytes: int = 1000) -> MemoryTrial:
    return MemoryTrial(
        num_tokens=num_tokens,
        idle_bytes=200,
        peak_bytes=peak_bytes,
        capacity_bytes=capacity_bytes,
    )


@pytest.mark.parametrize(
    ("peaks", "allowed"),
    [
        ([300], 800),  # 1 byte a token: 200 + 800 is all there is
        ([290], 800),  # and no more than the limit where there is room
        ([360], 500),  # 1.6 bytes a token
        ([360, 300, 401], 398),  # the rank with the least room: 2.01 bytes, 398.01 tokens
        ([200], 800),  # nothing measured above idle
    ],
)
def test_line_through_two_points(peaks: list[int], allowed: int) -> None:
    assert allowed_tokens(800, TP2, [trial(peak) for peak in peaks]) == allowed


def test_no_room_at_all() -> None:
    assert allowed_tokens(800, TP2, [trial(300, capacity_bytes=150)]) == 0
    assert allowed_tokens(800, TP2, []) == 800


def test_after_a_failure_three_quarters() -> None:
    assert after_failure(100, TP2) == 74
    assert after_failure(1, TP2) == 0


def test_a_scheme_that_splits_holds_what_all_its_ranks_hold_together() -> None:
    waves = Strategy.parse("tp2cp8~", 16)
    allowed = {Scheme(tp=2, cp=8): 992, Scheme(tp=2): 100}
    assert caps_of_schemes(waves, allowed) == allowed | {WAVES: 992}
    assert caps_of_schemes(waves, {Scheme(tp=2): 100}) == {Scheme(tp=2): 100}
    assert caps_of_schemes(Strategy.parse("tp2", 2), {TP2: 100}) == {TP2: 100}


def test_of_two_caps_the_lower() -> None:
    assert lower({TP2: 5}, {TP2: 7, Scheme(): 3}) == {TP2: 5, Scheme(): 3}


def test_capped_cost_model() -> None:
    coefficients = Coefficients(1.0, 2.0, 3.0)
    rows = [
        ProfiledScheme(scheme=scheme, coefficients=coefficients, max_tokens=100)
        for scheme in (TP2, Scheme())
    ]
    base = ProfileCostModel(device="d", source="s", date="d", schemes=tuple(rows))
    capped = CappedCostModel(base, ((TP2, 60),))
    assert (capped.max_tokens(TP2), capped.max_tokens(Scheme())) == (60, 100)
    assert CappedCostModel(base, ((TP2, 600),)).max_tokens(TP2) == 100
    assert capped.coefficients(TP2) == coefficients
    assert capped.overhead_ms(Strategy.parse("tp2", 2)) == 0.0


def test_own_limits_of_a_strategy_are_lowered() -> None:
    plain = Strategy.parse("tp2+2*tp1", 4, name="s")
    limited = Strategy(
        plain.name,
        plain.replicas,
        plain.num_ranks,
        plain.ranks_per_node,
        token_limits=((TP2, 100), (Scheme(), 50)),
    )
    lowered = with_lower_limits(limited, {TP2: 60})
    assert lowered is not None
    assert dict(lowered.token_limits) == {TP2: 60, Scheme(): 50}
    assert with_lower_limits(plain, {TP2: 60}) == plain
    assert with_lower_limits(plain, {TP2: 0}) is None


def test_own_limit_of_a_splitting_scheme_follows_the_group_with_the_least_room() -> None:
    waves = Strategy.parse("tp2cp8~", 16)
    limited = dataclasses.replace(waves, token_limits=((WAVES, 1600),))
    # A group of 2 of the 8 columns would hold 400 tokens, but memory holds 300.
    lowered = with_lower_limits(limited, {Scheme(tp=2, cp=2): 300, Scheme(tp=2, cp=8): 1584})
    assert lowered is not None
    assert dict(lowered.token_limits) == {WAVES: 1200}
    assert with_lower_limits(limited, {Scheme(tp=2): 0}) is None
