"""Plans whose micro-batches run in context groups: their rules, times and bounds."""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.__main__ import main
from megatron.hydraulis.cost_model import ProfileCostModel, pipeline_time_ms
from megatron.hydraulis.plan_check.files import SchemeFigures
from megatron.hydraulis.plan_check.rules import proved_packing_bound_ms, proved_strategy_bound_ms
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.strategy import Pool, Strategy

LENGTHS = [100, 10, 30, 31]
PROFILE: dict[str, Any] = {
    "device": "D",
    "source": "made up",
    "date": "2026-01-01",
    "schemes": [
        {
            "tp": 1,
            "cp": cp,
            "pp": 2,
            "a_ms_per_token2": 0.01 / cp,
            "b_ms_per_token": 0.2 / cp + 0.01 * cp,
            "c_ms": float(cp),
            "max_tokens": 32 * cp,
        }
        for cp in (1, 2, 4)
    ],
}
POOL: dict[str, Any] = {
    "num_ranks": 8,
    "ranks_per_node": 8,
    "strategies": [{"name": "waves", "replicas": "cp4~pp2"}],
}


def time_ms(cp: int, lengths: list[int]) -> float:
    """Of a group on one stage, by the formula."""
    row = PROFILE["schemes"][{1: 0, 2: 1, 4: 2}[cp]]
    squares = sum(length**2 for length in lengths)
    return float(
        row["a_ms_per_token2"] * squares + row["b_ms_per_token"] * sum(lengths) + row["c_ms"]
    )


def plan() -> dict[str, Any]:
    """100 tokens on all cp ranks; then two sequences on two of them, one on one, and one left."""
    first_ms = time_ms(4, [100])
    second_ms = max(time_ms(2, [10, 30]), time_ms(1, [31]))
    total_s = pipeline_time_ms([first_ms, second_ms], 2) / 1e3
    return {
        "iteration": 0,
        "strategy": "waves",
        "predicted_time_s": total_s,
        "plan_time_s": 0.0,
        "dispatch": None,
        "packing": None,
        "replicas": [
            {
                "scheme": {"tp": 1, "cp": 4, "pp": 2, "splits_cp": True},
                "ranks": list(range(8)),
                "predicted_time_s": total_s,
                "micro_batches": [
                    {"sequences": [0], "lengths": [100]},
                    {
                        "sequences": [1, 2, 3],
                        "lengths": [10, 30, 31],
                        "groups": [[0, 2, 2], [2, 1, 1], [3, 1, 0]],
                    },
                ],
            }
        ],
    }


def check(
    tmp_path: Path,
    content: dict[str, Any],
    pool: dict[str, Any] = POOL,
    profile: dict[str, Any] = PROFILE,
) -> int:
    flags = []
    files = {"plan": content, "lengths": LENGTHS, "cost-profile": profile, "pool": pool}
    for name, value in files.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(value))
        flags += [f"--{name}", str(path)]
    return main(["check-plan", *flags])


def test_a_plan_with_waves_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, plan()) == 0
    assert capsys.readouterr().out.startswith("valid: strategy waves")


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([[0, 2, 2], [2, 1, 1]], "context-groups"),
        ([[0, 1, 1], [1, 2, 1], [3, 1, 1]], "context-groups"),
        ([[0, 2, 2], [2, 2, 0]], "context-groups"),
        ([[0, 2, 1], [0, 2, 2]], "context-groups"),
        ([[0, 3, 2], [3, 1, 1]], "context-groups"),
        ([[0, 2], [2, 2]], "plan-format"),
        # 10 and 30 on one cp rank, which holds 32.
        ([[0, 1, 2], [1, 1, 1], [2, 2, 0]], "on cp ranks 0 to 0 has 40 tokens but the limit is 32"),
        # Another way to group takes another time.
        ([[0, 2, 2], [2, 2, 1]], "replica-time"),
    ],
)
def test_damaged_waves_are_named_by_their_rule(
    groups: list[list[int]], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = plan()
    content["replicas"][0]["micro_batches"][1]["groups"] = groups
    assert check(tmp_path, content) == 1
    assert message in capsys.readouterr().out


def test_limits_count_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """100 tokens on 4 ranks are 104: a strategy's own limit of 100 is too small."""
    pool = copy.deepcopy(POOL)
    pool["strategies"][0]["max_tokens"] = {"cp4~pp2": 103}
    assert check(tmp_path, plan(), pool) == 1
    assert "104 tokens with padding but the limit is 103" in capsys.readouterr().out


def test_a_strategys_own_limit_is_divided_over_the_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = copy.deepcopy(POOL)
    pool["strategies"][0]["max_tokens"] = {"cp4~pp2": 123}
    # 31 tokens on one of four ranks, of which each may hold a quarter of 123.
    assert check(tmp_path, plan(), pool) == 1
    assert "31 tokens but the limit is 30" in capsys.readouterr().out


def test_groups_of_a_size_without_a_row_are_neither_planned_nor_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = copy.deepcopy(PROFILE)
    profile["schemes"][2]["c_ms"] = 40.0  # so that narrow groups are worthwhile
    del profile["schemes"][1]
    cost_model = ProfileCostModel.from_json(profile, what="profile")
    strategy = Strategy.parse("cp4~pp2", 8, name="waves")
    planned = CertifiedPlanner(Pool.of(strategy), cost_model).plan(LENGTHS)
    sizes = {g.size for m in planned.replicas[0].micro_batches for g in m.groups}
    assert sizes == {1}
    assert check(tmp_path, planned.to_json(), profile=profile) == 0
    assert check(tmp_path, plan(), profile=profile) == 1
    assert "the profile knows groups of 1, 4" in capsys.readouterr().out


def splits(width: int) -> list[list[int]]:
    """Sizes of aligned groups, in their order."""
    if width == 1:
        return [[1]]
    halves = splits(width // 2)
    return [[width], *(left + right for left in halves for right in halves)]


def waves(lengths: list[int], figures: SchemeFigures) -> Iterator[float]:
    """The time of every wave of these sequences that keeps the limits."""
    of_size = {group.cp: group for group in figures.groups}
    for sizes in splits(figures.cp):
        for homes in itertools.product(range(len(sizes)), repeat=len(lengths)):
            shares = [
                (of_size[size], [s for s, h in zip(lengths, homes, strict=True) if h == i])
                for i, size in enumerate(sizes)
            ]
            if all(group.held_tokens(share) <= group.max_tokens for group, share in shares):
                yield max(group.time_ms(share) for group, share in shares)


@pytest.mark.parametrize("lengths", [[60], [8, 9], [20, 5, 31], [12, 12, 12], [33, 1, 2]])
def test_no_wave_is_below_the_bounds(lengths: list[int]) -> None:
    rows = [
        SchemeFigures(
            a_ms_per_token2=row["a_ms_per_token2"],
            b_ms_per_token=row["b_ms_per_token"],
            c_ms=row["c_ms"],
            max_tokens=row["max_tokens"],
            num_stages=1,
            cp=row["cp"],
        )
        for row in PROFILE["schemes"]
    ]
    whole = rows[-1]
    figures = SchemeFigures(
        whole.a_ms_per_token2,
        whole.b_ms_per_token,
        whole.c_ms,
        whole.max_tokens,
        num_stages=1,
        cp=4,
        groups=tuple(rows),
    )
    # One wave, or one a sequence, or two of which one has a single sequence.
    best_ms = min(
        sum(min(waves(part, figures), default=float("inf")) for part in parts)
        for parts in [
            [lengths],
            [[length] for length in lengths],
            *([[length], lengths[:i] + lengths[i + 1 :]] for i, length in enumerate(lengths)),
        ]
        if all(parts)
    )
    bounds_ms = (
        proved_packing_bound_ms(lengths, figures.at_best),
        proved_strategy_bound_ms(lengths, [figures.at_best]),
    )
    for bound_ms in bounds_ms:
        assert 0.0 < bound_ms <= best_ms * (1 + 1e-9)
