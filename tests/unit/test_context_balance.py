"""The benchmark of waves: baselines on data whose answer is known, and its goals on one batch."""

import math

import pytest

from benchmarks.context_balance import (
    LINEAR_COST,
    SETTINGS,
    Balance,
    Setting,
    balance,
    in_step_s,
    megatron_balance,
    rows_by_best_fit,
    rows_longest_first,
    verdict,
    work,
)
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.planner.costs import GroupCost

GROUP = GroupCost(32, Coefficients(0.0, 1.0, 100.0), 128)
"""Two of them side by side."""


def test_work_is_attention_and_matrices() -> None:
    assert work(3) == 9 + 3 * LINEAR_COST


def test_lengths_keep_to_the_limit_and_depend_on_the_seed_alone() -> None:
    setting = SETTINGS[0]
    lengths = setting.lengths(3)
    assert lengths == setting.lengths(3) != setting.lengths(4)
    assert len(lengths) == setting.num_sequences
    assert 1 <= min(lengths) <= max(lengths) <= setting.limit


def test_rows_in_step_wait_for_the_longest() -> None:
    lengths = [100, 60, 50, 20]
    assert rows_by_best_fit(GROUP, lengths) == [[100, 20], [60, 50]]
    assert in_step_s(GROUP, lengths, rows_by_best_fit) == pytest.approx(0.220)
    # Three rows go in two steps: 220 ms, then 130 ms.
    assert in_step_s(GROUP, [100, 60, 50, 20, 30], rows_by_best_fit) == pytest.approx(0.350)
    rows = rows_longest_first(GROUP, [100, 60, 50, 20])
    assert sorted(map(sum, rows)) == [110, 120]


@pytest.mark.parametrize("setting", SETTINGS[:2], ids=lambda setting: setting.name)
def test_waves_reach_the_goal_and_balance_better_than_megatron(setting: Setting) -> None:
    found = balance(setting, 0, 1)
    assert found.bound <= found.makespan <= setting.goal
    theirs = megatron_balance(setting, 0)
    assert found.makespan < theirs < math.inf


def test_both_widths_are_held_against_the_goals() -> None:
    makespans = {8: (1.06, 1.03, 1.035), 32: (1.019, 1.0, 1.5), 64: (1.0, 1.026, 1.03)}
    found = {
        (setting, doublings): [
            Balance(value, 1.0, 1, 0.0) for value in makespans[setting.num_ranks]
        ]
        for setting in SETTINGS
        for doublings in (0, 1)
    }
    assert verdict(found, 0) == (
        "No wider than needed: 8 ranks 1.035 reaches 1.04, 32 ranks 1.019 reaches 1.02, 64 ranks "
        "1.026 misses 1.02."
    )
    assert verdict(found, 1).startswith("Up to twice as wide: 8 ranks 1.035 reaches 1.04")
