"""The advice of a report, against figures calculated by hand."""

from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.observability.advice import Remark, advice_on
from megatron.hydraulis.observability.report_data import read_run
from tests.unit.observability.run_folders import (
    STRATEGY,
    make_pool_records,
    make_record,
    make_records,
    run_of,
    write_run,
    write_trace,
)


def findings(advice: tuple[Remark, ...], kind: str = "act") -> str:
    return "\n".join(f"{one.finding} {one.action}" for one in advice if one.kind == kind)


@pytest.mark.parametrize(
    ("slower", "wanted"),
    [
        # 3.6 of the median of 2 and 3.6.
        ({3: 1.8}, ("Replica 2 of tp2+2*tp1 (tp1, ranks 3)", "1.29× as long")),
        ({0: 2.0, 1: 2.0}, ("tp2 4×, tp1 2×", "--cost-profile")),
    ],
)
def test_a_slow_replica_and_a_slow_scheme_are_named(
    tmp_path: Path, slower: dict[int, float], wanted: tuple[str, ...]
) -> None:
    records = make_records()
    write_trace(tmp_path / "trace", records, slower=slower)
    advice = findings(advice_on(run_of(tmp_path, records)))
    assert all(text in advice for text in wanted)


@pytest.mark.parametrize(
    ("changes", "ours", "wanted"),
    [
        ({"plan_wait_s": 0.2}, {}, "Raise --plan-ahead from 2 to 4"),
        ({"plan_wait_s": 0.2}, {"plan_ahead": 0}, "--plan-ahead 2"),
        ({"plan_wait_s": 0.2, "plan_time_s": 3.0}, {}, "set --plan-time-limit below"),
        ({}, {}, "of iterations is 2.2× (half of them 2.2× to 2.2×)"),
        ({}, {"cost_profile": "p.json"}, "Measure the profile of --cost-profile p.json again"),
        ({"imbalance": 1.3}, {}, "wait 23.1% of the makespans"),
        ({"padding_fraction": 0.2}, {}, "20.0% of the computed tokens are padding"),
        ({"scatter_wait_s": 0.44}, {}, "20.0% for gradients"),
        ({"scatter_wait_s": 0.44}, {}, "--grad-reduce-in-bf16 halves those of gradients"),
        ({"scatter_wait_s": 0.44}, {"no_regroup_overlap": True}, "Remove --no-regroup-overlap"),
        ({"column_wait_s": 0.44}, {"fs_prefetch": 1}, "20.0% of the time for weights"),
        ({"column_wait_s": 0.44}, {"fs_prefetch": 1}, "--fs-prefetch 1"),
        ({"lm_loss": None}, {}, "8 of 8 iterations updated nothing"),
        (
            {"num_marked_plans": 1, "plan_status": "time limit"},
            {"plan_time_limit": 0.5},
            "1 time limit. Raise --plan-time-limit from 0.5 s",
        ),
    ],
)
def test_what_costs_time_is_reported_with_its_number(
    tmp_path: Path, changes: dict[str, Any], ours: dict[str, Any], wanted: str
) -> None:
    run = run_of(tmp_path, make_records(**changes), **ours)
    assert wanted in findings(advice_on(run))


@pytest.mark.parametrize(
    ("scale", "wanted"),
    [
        (1.0, "the busiest rank works 90.9% of the time, the least busy one 45.5%: the wait is for "
         "late ranks"),
        (0.5, "the busiest rank works 45.5% of the time, the least busy one 22.7%: no rank works "
         "all the time, so the wait is for the network; "),
    ],
)  # fmt: skip
def test_a_trace_shows_what_regrouping_waits_for(tmp_path: Path, scale: float, wanted: str) -> None:
    records = make_records(scatter_wait_s=0.44)
    assert "Check in a trace (--trace)" in findings(advice_on(run_of(tmp_path, records)))
    # Every replica takes twice its 1, 0.75 and 0.5 s, times the scale, of 2.2 s.
    write_trace(tmp_path / "trace", records, slower=dict.fromkeys(range(4), scale))
    advice = findings(advice_on(read_run(tmp_path)))
    assert f"In the trace {wanted}" in advice
    assert "--trace" not in advice


def test_idle_ranks_are_those_of_the_trace_if_there_is_one(tmp_path: Path) -> None:
    records = make_records(imbalance=1.02)
    assert "for the slowest replica" not in findings(advice_on(run_of(tmp_path, records)))
    write_trace(tmp_path / "trace", records, slower={0: 2.0, 1: 2.0})
    # tp2 for 4 s, tp1 for 1.5 and 1 s: of 16 rank-seconds 5.5 are idle.
    advice = findings(advice_on(read_run(tmp_path)))
    assert "Ranks wait 34.4% of the makespans for the slowest replica, by the plans 2.0%" in advice
    assert "differs by replica: measure the schemes" in advice


def test_a_good_run_has_no_advice(tmp_path: Path) -> None:
    records = make_records(iteration_time_s=1.02)
    run = run_of(tmp_path, records)
    advice = advice_on(run)
    assert not findings(advice)
    assert "Nothing here costs more than it should" in advice[0].finding
    assert f"--trace {tmp_path / 'trace'}" in findings(advice, "know")


def test_a_run_that_becomes_slower_is_reported(tmp_path: Path) -> None:
    times_s = [9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    records = [make_record(n, iteration_time_s=time_s) for n, time_s in enumerate(times_s, 1)]
    run = run_of(tmp_path, records)
    assert run.numbers.totals["slowdown"] == pytest.approx(1.5)
    assert "the last third of the iterations took 1.5× the time" in findings(advice_on(run))
    write_run(tmp_path / "short", records[:9])
    assert read_run(tmp_path / "short").numbers.totals["slowdown"] is None


def test_a_strategy_that_never_ran_is_named(tmp_path: Path) -> None:
    run = run_of(tmp_path, make_pool_records(), (STRATEGY, "long", "pairs"))
    assert f"No iteration chose {STRATEGY}" in findings(advice_on(run), "know")
