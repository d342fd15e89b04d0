"""The numbers of a report, against figures worked out by hand, and the advice from them."""

import statistics
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.observability import IterationRecord
from megatron.hydraulis.observability.report_advice import Advice, advice_on
from megatron.hydraulis.observability.report_numbers import Numbers, idle_share, numbers_of
from megatron.hydraulis.observability.report_run import Run, read_run
from tests.unit.observability.records_for_tests import make_record
from tests.unit.observability.run_folders import (
    make_pool_records,
    make_records,
    write_config,
    write_run,
    write_trace,
)

STRATEGY = "tp2+2*tp1"


def of(
    run_dir: Path,
    records: list[IterationRecord],
    strategies: tuple[str, ...] = (STRATEGY,),
    **ours: Any,
) -> tuple[Run, Numbers]:
    write_run(run_dir, records)
    write_config(run_dir, strategies, train_iters=len(records), **ours)
    run = read_run(run_dir)
    return run, numbers_of(run)


def findings(advice: tuple[Advice, ...], kind: str = "act") -> str:
    return "\n".join(f"{one.finding} {one.action}" for one in advice if one.kind == kind)


def test_totals_leave_the_first_iteration_out_of_times_alone(tmp_path: Path) -> None:
    _, numbers = of(tmp_path, make_records(plan_wait_s=0.0055))
    totals = numbers.totals
    assert totals.tokens_per_s == pytest.approx(22_000 / 2.2)
    assert totals.num_tokens == 8 * 22_000
    assert totals.iteration_time_s == 2.2
    assert (totals.first_loss, totals.last_loss) == (9.0 - 1 / 8, 8.0)
    assert totals.plan_wait_s == pytest.approx(7 * 0.0055)
    assert totals.plan_wait_fraction == pytest.approx(0.0025)
    assert totals.regroup_bytes == 5_000_000
    assert totals.gather_wait_fraction == pytest.approx(0.005)
    assert totals.scatter_wait_fraction == pytest.approx(0.01)
    assert totals.padding_fraction == pytest.approx(0.004)
    assert totals.idle_fraction == pytest.approx(1 - 1 / 1.07)
    assert totals.marked_plans == {}


def test_prediction_of_iterations(tmp_path: Path) -> None:
    records = [make_record(1, iteration_time_s=50.0)] + [
        make_record(number, predicted_time_s=1.0, iteration_time_s=time_s)
        for number, time_s in ((2, 2.0), (3, 2.5), (4, 4.0))
    ]
    prediction = of(tmp_path, records)[1].iterations
    assert prediction is not None
    assert prediction.num_compared == 3
    assert prediction.factor == 2.5
    # Errors 2/1 - 1, 2.5/1 - 1, 4/1 - 1; after the factor 1 - 2/2.5, 0, 4/2.5 - 1.
    assert prediction.error == pytest.approx(1.5)
    assert prediction.error == statistics.median(
        record.prediction_error for record in records[1:] if record.prediction_error is not None
    )
    assert prediction.error_beyond_factor == pytest.approx(0.2)


def test_idle_share_is_that_of_the_ranks_of_replicas() -> None:
    # tp2 for 1 s, tp1 for 0.5 s twice: of 4 rank-seconds 1 is idle.
    record = make_record(replica_times_s=(1.0, 0.5, 0.5), imbalance=4 / 3)
    assert idle_share(record) == pytest.approx(0.25)
    assert idle_share(make_record(imbalance=1.0 - 1e-9)) == 0.0


def test_strategies_of_a_pool_with_one_that_never_ran(tmp_path: Path) -> None:
    run, numbers = of(tmp_path, make_pool_records(), (STRATEGY, "long", "pairs"))
    assert [(row.name, row.num_iterations) for row in numbers.strategies] == [
        ("pairs", 8),
        ("long", 4),
        (STRATEGY, 0),
    ]
    assert sum(row.num_tokens for row in numbers.strategies) == numbers.totals.num_tokens
    pairs, long, unused = numbers.strategies
    assert pairs.idle_fraction == pytest.approx(0.05)
    assert long.idle_fraction == 0.0
    assert unused.measured_s is None
    assert [(row.strategy, row.replica, row.scheme) for row in numbers.replicas] == [
        ("pairs", 0, "tp2"),
        ("pairs", 1, "tp2"),
        ("long", 0, "tp4"),
    ]
    assert numbers.replicas[1].idle_fraction == pytest.approx(0.1)
    assert f"No iteration chose {STRATEGY}" in findings(advice_on(run, numbers), "know")


def test_measured_replicas_come_from_the_trace(tmp_path: Path) -> None:
    records = make_records(replica_times_s=(1.0, 0.75, 0.0))
    write_trace(tmp_path / "trace", records)
    _, numbers = of(tmp_path, records)
    # The third replica never had a sequence.
    assert len(numbers.measured_replicas) == 2 * len(records)
    prediction = numbers.replicas_traced
    assert prediction is not None
    assert prediction.num_compared == 2 * (len(records) - 1)
    assert prediction.factor == pytest.approx(2.0)
    assert prediction.error == pytest.approx(1.0)
    assert [row.traced_measured_s for row in numbers.replicas[:2]] == pytest.approx([2.0, 1.5])
    assert numbers.replicas[2].traced is None
    for row in numbers.ranks:
        assert row.busy_fraction + row.wait_fraction + row.idle_fraction == pytest.approx(1.0)
    assert numbers.ranks[0].busy_fraction == pytest.approx(2.0 / 2.2)
    assert numbers.ranks[3].idle_fraction == pytest.approx(1.0)


def test_a_replica_slower_than_others_of_its_scheme_is_named(tmp_path: Path) -> None:
    records = make_records()
    write_trace(tmp_path / "trace", records, slower={3: 1.8})
    told = findings(advice_on(*of(tmp_path, records)))
    assert "Replica 2 of tp2+2*tp1 (tp1, ranks 3)" in told
    assert "1.29× as long" in told  # 3.6 of the median of 2 and 3.6


def test_a_scheme_that_is_predicted_otherwise_than_others_is_named(tmp_path: Path) -> None:
    records = make_records()
    write_trace(tmp_path / "trace", records, slower={0: 2.0, 1: 2.0})
    told = findings(advice_on(*of(tmp_path, records)))
    assert "tp2 4×, tp1 2×" in told
    assert "--cost-profile" in told


@pytest.mark.parametrize(
    ("changes", "ours", "wanted"),
    [
        ({"plan_wait_s": 0.2}, {}, "Raise --plan-ahead from 2 to 4"),
        ({"plan_wait_s": 0.2}, {"plan_ahead": 0}, "--plan-ahead 2"),
        ({"plan_wait_s": 0.2, "plan_time_s": 3.0}, {}, "set --plan-time-limit below"),
        ({}, {}, "takes 2.2× its predicted time (median error 120%)"),
        ({}, {"cost_profile": "p.json"}, "Measure anew what --cost-profile p.json says"),
        ({"imbalance": 1.3}, {}, "wait 23.1% of the makespans"),
        ({"padding_fraction": 0.2}, {}, "20.0% of the tokens run are padding"),
        ({"scatter_wait_s": 0.44}, {}, "20.0% for gradients"),
        ({"scatter_wait_s": 0.44}, {"no_regroup_overlap": True}, "out --no-regroup-overlap"),
        ({"lm_loss": None}, {}, "8 of 8 iterations updated nothing"),
        (
            {"num_marked_plans": 1, "plan_status": "time limit"},
            {"plan_time_limit": 0.5},
            "1 time limit. Raise --plan-time-limit from 0.5 s",
        ),
    ],
)
def test_what_costs_time_is_told_with_its_number(
    tmp_path: Path, changes: dict[str, Any], ours: dict[str, Any], wanted: str
) -> None:
    run, numbers = of(tmp_path, make_records(**changes), **ours)
    assert wanted in findings(advice_on(run, numbers))


def test_a_run_as_it_should_be_has_nothing_to_act_on(tmp_path: Path) -> None:
    records = make_records(iteration_time_s=1.02)
    run, numbers = of(tmp_path, records)
    advice = advice_on(run, numbers)
    assert not findings(advice)
    assert "Nothing here costs more than it should" in advice[0].finding
    assert f"--trace {tmp_path / 'trace'}" in findings(advice, "know")


def test_a_run_that_becomes_slower_is_told(tmp_path: Path) -> None:
    times_s = [9.0, 2.0, 2.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0, 3.0]
    records = [make_record(n, iteration_time_s=time_s) for n, time_s in enumerate(times_s, 1)]
    run, numbers = of(tmp_path, records)
    assert numbers.totals.slowdown == pytest.approx(1.5)
    assert "The last third of the iterations took 1.5× the time" in findings(
        advice_on(run, numbers)
    )
    write_run(tmp_path / "short", records[:9])
    assert numbers_of(read_run(tmp_path / "short")).totals.slowdown is None


def test_marked_plans_are_counted_over_processes(tmp_path: Path) -> None:
    counts = [(1, 0), (2, 1), (3, 1), (4, 2), (3, 1), (4, 1), (5, 2)]
    records = [make_record(n, num_marked_plans=m, plan_status="greedy") for n, m in counts]
    # Of iterations 3 and 4 the second process counts: 2, 3 and 5 are marked.
    assert of(tmp_path, records)[1].totals.marked_plans == {"greedy": 3}
