"""--balance-pipeline-layers: pools, profiles and a dry run with it and without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.flags.describe import describe, format_description
from megatron.hydraulis.library.planning import Planning, read_cost_profile
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.pool import balance_pool
from tests.unit.flags.argument_command import parse

# Four layers of a narrow model; an output layer of a whole layer and more.
WIDE_OUTPUT = ("--vocab-size", "4000", "--num-layers", "8")
BALANCE = "--balance-pipeline-layers"


pytestmark = pytest.mark.usefixtures("plain_environment")


def planning_of(resolved: Resolved) -> Planning:
    return Planning.of(resolved, device_constants("cpu"), read_cost_profile(resolved))


def write_pool(folder: Path, max_tokens: dict[str, int] | None = None, **texts: str) -> str:
    entries: list[dict[str, Any]] = [
        {"name": name, "replicas": text} for name, text in texts.items()
    ]
    if max_tokens is not None:
        entries[0]["max_tokens"] = max_tokens
    path = folder / "pool.json"
    path.write_text(json.dumps({"num_ranks": 8, "ranks_per_node": 8, "strategies": entries}))
    return str(path)


def write_profile(folder: Path, *rows: dict[str, Any]) -> str:
    base = {"tp": 1, "cp": 1, "pp": 2, "a_ms_per_token2": 1e-6, "b_ms_per_token": 1.0, "c_ms": 1.0}
    path = folder / "profile.json"
    head = {"device": "d", "source": "s", "date": "2026-01-01"}
    path.write_text(json.dumps(head | {"schemes": [base | row for row in rows]}))
    return str(path)


def test_a_strategy_named_by_its_text_is_named_by_its_new_text(tmp_path: Path) -> None:
    typed = (*WIDE_OUTPUT, "--strategy", "4*pp2")
    plain = planning_of(parse(tmp_path, *typed)).pool.strategies[0]
    assert str(plain) == "4*pp2"
    balanced = planning_of(parse(tmp_path, *typed, BALANCE)).pool.strategies[0]
    assert balanced.name == str(balanced)
    (scheme,) = balanced.schemes
    assert scheme.layers is not None
    assert scheme.layers[0] > 4 > scheme.layers[1]
    sizes = (*WIDE_OUTPUT, "--pipeline-model-parallel-size", "2")
    by_sizes = planning_of(parse(tmp_path, *sizes, BALANCE)).pool.strategies[0]
    assert by_sizes == balanced


def test_only_schemes_that_list_no_layers_get_some_and_pools_keep_names(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, mixed="pp2+pp2:6,2+tp2+2*tp1", plain="8*tp1", three="tp2pp3+2*idle")
    typed = (*WIDE_OUTPUT, "--strategy-pool", pool)
    without = planning_of(parse(tmp_path, *typed)).pool
    balanced = planning_of(parse(tmp_path, *typed, BALANCE)).pool
    assert [str(s) for s in without.strategies] == [
        *("pp2+pp2:6,2+tp2+2*tp1", "8*tp1", "tp2pp3+2*idle"),
    ]
    assert [s.name for s in balanced.strategies] == ["mixed", "plain", "three"]
    first, *rest = balanced.strategies[0].schemes
    assert first.layers is not None
    assert [str(scheme) for scheme in rest] == [
        *(["pp2:6,2"] if first.layers != (6, 2) else []),
        *("tp2", "tp1"),
    ]
    assert balanced.strategies[1] == without.strategies[1]
    assert balanced.strategies[2].schemes[0].layers is not None
    for before, after in zip(without.strategies, balanced.strategies, strict=True):
        assert [r.ranks for r in before.replicas] == [r.ranks for r in after.replicas]


def test_limits_of_a_strategy_go_with_its_schemes() -> None:
    strategy = Strategy.parse("pp2+pp2:3,1", 4, name="s")
    even, uneven = strategy.schemes
    limited = Strategy("s", strategy.replicas, 4, 4, ((even, 900), (uneven, 700)))
    asked: list[tuple[Scheme, int | None]] = []

    def choose(scheme: Scheme, limit: int | None) -> Scheme:
        asked.append((scheme, limit))
        return uneven

    (balanced,) = balance_pool(Pool.of(limited), choose).strategies
    assert asked == [(even, 900)]
    assert balanced.schemes == (uneven,)
    assert balanced.token_limits == ((uneven, 700),)


def test_a_dry_run_shows_the_layers(tmp_path: Path) -> None:
    resolved = parse(tmp_path, *WIDE_OUTPUT, "--strategy", "tp2+2*pp3", BALANCE)
    planning = planning_of(resolved)
    text = format_description(
        describe(
            resolved,
            planning.pool.strategies,
            planning.limits,
            cost_model=planning.source,
            left_out=(),
        )
    )
    scheme = planning.pool.strategies[0].schemes[1]
    assert scheme.layers is not None
    listed = ",".join(map(str, scheme.layers))
    lines = [line.split() for line in text.splitlines()]
    assert ["1", f"pp3:{listed}", "0"] in [line[:3] for line in lines]
    assert f"strategy     tp2+2*pp3:{listed}, idle: none" in text
    assert f"  {BALANCE}" in text.splitlines()
    stages = [line for line in lines if line[:2] in (["1", "3"], ["2", "4"])]
    assert [line[2] for line in stages] == [str(num) for num in scheme.layers[1:]]


def test_a_profile_chooses_among_measured_splits(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, s="4*pp2")
    rows: list[dict[str, Any]] = [
        {"b_ms_per_token": 2.0, "max_tokens": 500},
        {"layers": [5, 3], "b_ms_per_token": 1.5, "max_tokens": 400},
        {"layers": [6, 2], "b_ms_per_token": 1.4, "max_tokens": 100},
        {"layers": [3, 2], "b_ms_per_token": 0.1, "max_tokens": 900},  # of another model
    ]
    typed = (*WIDE_OUTPUT, "--strategy-pool", pool, "--cost-profile")
    profile = write_profile(tmp_path, *rows)

    def chosen(*more: str) -> str:
        return str(planning_of(parse(tmp_path, *typed, profile, *more)).pool.strategies[0])

    assert chosen() == "4*pp2"
    # The fastest does not hold a sequence of 128 tokens.
    assert chosen(BALANCE) == "4*pp2:5,3"
    assert chosen(BALANCE, "--seq-length", "100") == "4*pp2:6,2"
    # Among rows that hold less than required, the one that holds most.
    assert chosen(BALANCE, "--seq-length", "600") == "4*pp2"
    # With a limit by the flag, that of the rows does not matter.
    assert chosen(BALANCE, "--max-tokens-per-micro-batch", "600") == "4*pp2:6,2"


def test_a_profile_needs_no_row_of_the_even_split(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, s="4*pp2")
    profile = write_profile(tmp_path, {"layers": [5, 3], "max_tokens": 400})
    typed = (*WIDE_OUTPUT, "--strategy-pool", pool, "--cost-profile", profile)
    with pytest.raises(
        ConfigurationError,
        match=r"lacks pp2 of 's' and has pp2:5,3;.*pool\.json\.cost_profile\.json",
    ):
        planning_of(parse(tmp_path, *typed))
    planning = planning_of(parse(tmp_path, *typed, BALANCE))
    assert str(planning.pool.strategies[0]) == "4*pp2:5,3"
    (strategy,) = planning.pool.strategies
    assert planning.limits.max_tokens(strategy, strategy.schemes[0]) == 400


def test_among_equally_fast_rows_the_even_split_is_kept(tmp_path: Path) -> None:
    pool = write_pool(tmp_path, s="4*pp2")
    profile = write_profile(tmp_path, {"layers": [5, 3], "max_tokens": 400}, {"max_tokens": 400})
    typed = (*WIDE_OUTPUT, "--strategy-pool", pool, "--cost-profile", profile, BALANCE)
    assert str(planning_of(parse(tmp_path, *typed)).pool.strategies[0]) == "4*pp2"
