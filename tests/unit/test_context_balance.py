"""The benchmark of waves: baselines on data whose answer is known, and one of its batches."""

import json

import pytest

from benchmarks.context_balance import (
    cost_profile,
    in_step_s,
    megatron_s,
    rows_by_best_fit,
    rows_longest_first,
    run_flexsp,
)
from benchmarks.inputs import DATA
from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.planner.costs import GroupCost

GROUP = GroupCost(32, Coefficients(0.0, 1.0, 100.0), 128)
"""Two of them side by side."""


def test_rows_in_step_wait_for_the_longest() -> None:
    lengths = [100, 60, 50, 20]
    assert rows_by_best_fit(GROUP, lengths) == [[100, 20], [60, 50]]
    assert in_step_s(GROUP, lengths, rows_by_best_fit) == pytest.approx(0.220)
    # Three rows go in two steps: 220 ms, then 130 ms.
    assert in_step_s(GROUP, [100, 60, 50, 20, 30], rows_by_best_fit) == pytest.approx(0.350)
    rows = rows_longest_first(GROUP, [100, 60, 50, 20])
    assert sorted(map(sum, rows)) == [110, 120]


def test_megatron_s_scheduler_runs_the_rows_of_a_rank_one_by_one() -> None:
    groups = [
        GroupCost(2**power, Coefficients(0.0, 1.0 / 2**power, 10.0), 128 * 2**power)
        for power in range(7)
    ]
    # A sequence a rank; one that needs all ranks.
    assert megatron_s(groups, [100] * 64) == pytest.approx(0.110)
    assert megatron_s(groups, [64 * 128]) == pytest.approx(0.138)


def test_waves_beat_every_other_way_on_a_batch_of_flexsp_s() -> None:
    reference = json.loads((DATA / "flexsp_reference.json").read_text("utf-8"))
    batch = json.loads((DATA / "flexsp_batches.json").read_text("utf-8"))["batches"][0]
    found = run_flexsp(cost_profile(reference, "gpt-7b"), batch)
    others = (found.static_s, found.best_fit_s, found.longest_first_s, found.megatron_s)
    assert found.bound_s <= found.waves_s <= 1.06 * found.bound_s
    assert found.waves_s < 0.95 * found.searched_s < found.searched_s < min(others)
