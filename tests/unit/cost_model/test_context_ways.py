import pytest

from megatron.hydraulis.cost_model.context import (
    CP_COMM_TYPES,
    all_to_all_elements,
    all_to_all_refusal,
    choose_way,
    gather_elements,
)
from megatron.hydraulis.errors import ConfigurationError


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
    assert choose_way("auto", heads, groups, size) == way
    assert choose_way("p2p", heads, groups, size) == "all_gather"
    assert choose_way("all_gather", heads, groups, size) == "all_gather"


@pytest.mark.parametrize(
    ("heads", "groups", "allowed"),
    [(8, 8, True), (8, 4, True), (8, 2, True), (8, 1, True), (6, 6, False), (12, 3, False)],
)
def test_heads_of_an_all_to_all(heads: int, groups: int, allowed: bool) -> None:
    assert (all_to_all_refusal(heads, groups, 4) is None) is allowed


def test_refusals_say_rule_numbers_and_fix() -> None:
    with pytest.raises(ConfigurationError, match=r"multiple of 4 query heads .* there are 6; use"):
        choose_way("a2a", 6, 6, 4)
    with pytest.raises(ConfigurationError, match="multiple or a divisor of 4 but there are 3; use"):
        choose_way("a2a", 12, 3, 4)
    with pytest.raises(ConfigurationError, match="ring is none of the 4 that are known; choose"):
        choose_way("ring", 8, 8, 4)
    assert choose_way(CP_COMM_TYPES[0], 12, 3, 4) == "all_gather"
