"""Pools written for another number of ranks."""

from pathlib import Path

import pytest

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.strategy.pool import fit_pool, num_ranks_of
from tests.unit.flags.argument_command import parse


def pool(num_ranks: int, **strategies: str) -> Pool:
    return Pool.of(
        *(Strategy.parse(text, num_ranks, name=name) for name, text in strategies.items())
    )


def fitted(given: Pool, num_ranks: int, ranks_per_node: int = 0) -> dict[str, str]:
    found, _ = fit_pool(given, num_ranks, ranks_per_node or num_ranks, num_layers=4)
    assert found.num_ranks == num_ranks
    return {strategy.name: str(strategy) for strategy in found.strategies}


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, {"short": "tp1"}),
        (2, {"short": "2*tp1", "mixed": "tp2"}),
        (3, {"short": "3*tp1", "mixed": "tp2+tp1", "long": "pp2+idle"}),
        (7, {"short": "7*tp1"}),
    ],
)
def test_as_many_schemes_are_kept_as_the_ranks_allow(
    num_ranks: int, expected: dict[str, str]
) -> None:
    given = pool(4, short="4*tp1", mixed="tp2+2*tp1", long="2*pp2")
    found = fitted(given, num_ranks)
    for name, text in expected.items():
        assert found[name] == text


def test_what_does_not_fit_is_dropped_with_a_message() -> None:
    given = pool(8, wide="tp8", half="2*tp4", both="tp4+4*tp1")
    found, changes = fit_pool(given, 5, 5, num_layers=4)
    assert {s.name: str(s) for s in found.strategies} == {
        "half": "tp4+idle",
        "both": "tp4+tp1",
    }
    assert changes[0] == "the strategies are for 8 ranks but there are 5"
    assert "strategy 'wide' is skipped: its tp8 needs 8 ranks" in changes
    assert "strategy 'both': tp4+4*tp1 becomes tp4+tp1" in changes


def test_strategies_that_become_equal_are_merged() -> None:
    found, changes = fit_pool(pool(4, a="tp2+2*tp1", b="2*tp2"), 2, 2, num_layers=4)
    assert [s.name for s in found.strategies] == ["a"]
    assert any("'b' is skipped: it becomes the same as 'a'" in line for line in changes)


def test_if_none_is_left_every_scheme_of_the_right_size_becomes_a_strategy() -> None:
    given = pool(8, wide="tp8", deep="pp8:1,1,1,1,1,1,1,1")
    found, changes = fit_pool(given, 4, 4, num_layers=4)
    texts = {str(s) for s in found.strategies}
    assert texts == {"4*tp1", "2*pp2", "pp4", "2*tp2", "tp2pp2", "tp4"}
    assert "no strategy is left" in changes[-1]


@pytest.mark.parametrize(
    ("text", "num_ranks"), [("tp2@0,3+pp2@1,2", 4), ("3*tp1+2*idle", 5), ("cp8~+tp4pp2", 16)]
)
def test_the_number_of_ranks_of_a_text(text: str, num_ranks: int) -> None:
    assert num_ranks_of(text) == num_ranks


def test_the_flag_fits_what_other_flags_describe(tmp_path: Path) -> None:
    assert str(
        parse(tmp_path, "--strategy", "tp2+2*tp1", "--elastic", num_ranks=3).pool.strategies[0]
    ) == ("tp2+tp1")
    fewer = parse(tmp_path, "--elastic", "--ranks-per-node", "4", num_ranks=3)
    assert str(fewer.pool.strategies[0]) == "3*tp1"
    sizes = ("--tensor-model-parallel-size", "2")
    resolved = parse(tmp_path, *sizes, "--elastic", num_ranks=3)
    assert str(resolved.pool.strategies[0]) == "tp2+idle"
    assert resolved.pool_changes
    assert fit_pool(resolved.pool, 3, 3, num_layers=4)[0] is resolved.pool
    assert not parse(tmp_path, *sizes, "--elastic", num_ranks=4).pool_changes
    # Nodes whose size nobody knows, which 12 ranks do not fill.
    unknown = parse(tmp_path, "--strategy", "8*tp2", "--elastic", num_ranks=12)
    assert str(unknown.pool.strategies[0]) == "6*tp2"
    assert parse(tmp_path, *sizes, "--elastic", num_ranks=12).pool.ranks_per_node == 12
    assert parse(tmp_path, "--strategy", "6*tp2", "--elastic", num_ranks=12).pool.num_ranks == 12
    file = tmp_path / "pool.json"
    file.write_text(
        '{"num_ranks": 4, "ranks_per_node": 4, "strategies": [{"name": "s", "replicas": "4*tp1"}]}'
    )
    found = parse(tmp_path, "--strategy-pool", str(file), "--elastic", num_ranks=2)
    assert str(found.pool.strategy("s")) == "2*tp1"
    with pytest.raises(ConfigurationError, match="or add --elastic to adapt"):
        parse(tmp_path, "--strategy-pool", str(file), num_ranks=2)
    with pytest.raises(ConfigurationError, match="--elastic and --strategy-schedule s"):
        parse(
            tmp_path,
            "--strategy-pool",
            str(file),
            "--elastic",
            "--strategy-schedule",
            "s",
            num_ranks=2,
        )
