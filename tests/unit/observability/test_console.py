import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.observability.console import (
    ETA_WINDOW,
    LINE_WIDTH,
    EtaEstimator,
    closing_table,
    compact_line,
    iteration_suffix,
)
from megatron.hydraulis.observability.records import IterationRecord
from tests.unit.observability.run_folders import make_record, make_run


def test_suffix_continues_upstreams_line() -> None:
    assert iteration_suffix(make_record(), 83.0) == (
        " strategy: tp2+2*tp1 | tokens: 24,310 | padding: 0.4% | imbalance: 1.07"
        " | plan time (ms): 1.2 | ETA 0:01:23 |"
    )
    assert iteration_suffix(make_record(), None).endswith(" ETA unknown |")


def test_tokens_without_weight_are_told_apart() -> None:
    record = make_record(num_tokens=4000, trained_tokens=1500)
    assert " | tokens: 4,000 (1,500 trained) | " in iteration_suffix(record, None)
    rows = rows_of(closing_table(make_run(record, make_record(2, num_tokens=1000))))
    assert rows["tokens"] == "5,000 (2,500 trained)"
    assert "iterations without a trained token" not in rows
    untrained = make_record(2, num_tokens=1000, trained_tokens=0, lm_loss=None, grad_norm=None)
    rows = rows_of(closing_table(make_run(record, untrained)))
    assert rows["iterations without a trained token"] == "1"


def test_peaks_of_memory_are_shown_if_known() -> None:
    record = make_record(peak_allocated_bytes=3 * 2**30, peak_reserved_bytes=7 * 2**29)
    assert " | peak memory (GiB): 3.00 of 3.50 reserved | ETA " in iteration_suffix(record, 1.0)
    assert "memory" not in iteration_suffix(make_record(), 1.0)


def test_the_load_of_experts_is_shown_if_there_are_some() -> None:
    record = make_record(expert_load=1.234, router_bias_range=(-0.5, 0.25))
    assert " | expert load: 1.23 | ETA " in iteration_suffix(record, 1.0)
    assert IterationRecord.from_json(record.to_json()) == record
    rows = rows_of(closing_table(make_run(record, make_record(2), make_record(3, expert_load=2.0))))
    assert rows["expert load, median (worst)"] == "1.62 (2.00)"


@pytest.mark.parametrize("strategy", ["tp2+2*tp1", "a long name " * 12])
def test_a_compact_line_has_at_most_120_columns(strategy: str) -> None:
    record = make_record(12, num_tokens=5000, iteration_time_s=0.5, strategy=strategy)
    line = compact_line(record, 40, 83.0)
    start = "iteration 12/40 | loss 7.5000 | grad norm 1.5 | 10,000 tokens/s | "
    assert line.startswith(start + strategy[:20].strip())
    assert line.endswith(" | 0:01:23 left")
    assert len(line) == (len(line) if strategy in line else LINE_WIDTH) <= LINE_WIDTH
    skipped = compact_line(make_record(lm_loss=None, grad_norm=None), 10**6, None)
    assert "loss none | grad norm none" in skipped
    assert "unknown left" in skipped


def test_mfu_is_shown_where_the_peak_is_known() -> None:
    # The first iteration builds the model.
    records = [make_record(n, model_flops=n * 1e12, iteration_time_s=0.5) for n in (1, 2, 4)]
    run = make_run(*records)
    assert "MFU" not in rows_of(closing_table(run))
    known = replace(run, config={"num_ranks": 2, "peak_flops_per_s_of_rank": 10e12})
    # 6e12 operations in a second on two devices.
    assert rows_of(closing_table(known))["MFU"] == "30.0%"
    before = replace(known, records=(make_record(1), make_record(2)))
    assert "MFU" not in rows_of(closing_table(before))


def test_eta_leaves_out_the_first_iteration_and_one_slow_one() -> None:
    eta = EtaEstimator()
    assert eta.remaining_s(10) is None
    eta.observe(60.0)
    assert eta.remaining_s(9) == pytest.approx(9 * 60.0)
    for time_s in (2.0, 2.0, 30.0):
        eta.observe(time_s)
    assert eta.remaining_s(6) == pytest.approx(6 * 2.0)


def test_eta_follows_the_recent_iterations() -> None:
    eta = EtaEstimator()
    for time_s in (9.0, *[1.0] * ETA_WINDOW, *[4.0] * ETA_WINDOW):
        eta.observe(time_s)
    assert eta.remaining_s(2) == pytest.approx(8.0)


def test_the_remaining_time_is_zero_at_and_after_the_end() -> None:
    eta = EtaEstimator()
    eta.observe(1.0)
    assert eta.remaining_s(0) == 0.0
    assert eta.remaining_s(-2) == 0.0


def rows_of(table: str) -> dict[str, str]:
    rows = re.findall(r"^│ (.+?) +│ +(.+?) │$", table, flags=re.MULTILINE)
    return dict(rows)


def test_closing_table_sums_up_the_run(tmp_path: Path) -> None:
    records = [
        # Slow because it builds the model: not part of the throughput.
        make_record(1, lm_loss=9.0, num_tokens=900, padding_fraction=0.1, iteration_time_s=50.0),
        make_record(2, num_tokens=1000, padding_fraction=0.0, iteration_time_s=2.0, imbalance=1.5),
        make_record(3, lm_loss=5.0, num_tokens=3000, padding_fraction=0.0, iteration_time_s=2.0),
    ]
    text = closing_table(make_run(*records, folder=tmp_path))
    rows = rows_of(text)
    assert rows["iterations"] == "1 to 3"
    assert rows["lm loss, first → last"] == "9.0000 → 5.0000"
    assert rows["tokens"] == "4,900"
    assert rows["tokens/s"] == "1,000"
    assert rows["padding"] == "2.0%"
    assert rows["imbalance, median (worst)"] == "1.07 (1.50)"
    assert text.endswith(f"run folder: {tmp_path}\nnext: hydraulis report {tmp_path}\n")


def test_closing_table_has_strategies_waits_gaps_and_plans_cut_short() -> None:
    names = ("strategy", "plan_wait_s", "plan_gap", "plan_status", "num_marked_plans")
    rows_of_plans: list[tuple[Any, ...]] = [
        # The first plan waits for the planner to start.
        ("short", 3.0, 0.0, "certified", 0),
        ("long", 0.001, 0.02, "time limit", 1),
        ("short", 0.002, None, "certified", 1),
        ("short", 0.005, 0.01, "greedy: KeyError", 2),
        ("short", 0.002, 0.01, "certified", 2),
    ]
    records = [
        make_record(number, **dict(zip(names, row, strict=True)))
        for number, row in enumerate(rows_of_plans, start=1)
    ]
    rows = rows_of(closing_table(make_run(*records)))
    assert rows["iterations of short"] == "4"
    assert rows["iterations of long"] == "1"
    assert rows["switches of strategy"] == "2"
    assert rows["plan wait, median (worst)"] == "2.0 ms (5.0 ms)"
    assert rows["plan gap, median (worst)"] == "1.0% (2.0%)"
    assert rows["plans cut short"] == "1 time limit, 1 greedy: KeyError"
    rows = rows_of(closing_table(make_run(make_record())))
    assert rows["strategy"] == "tp2+2*tp1"
    assert rows["plans cut short"] == "none"


def test_closing_table_has_errors_of_predictions_after_the_first_iteration() -> None:
    times_s = ((50.0, 1.0), (1.1, 1.0), (0.8, 1.0), (3.0, 2.0))
    records = [
        make_record(number, iteration_time_s=measured_s, predicted_time_s=predicted_s)
        for number, (measured_s, predicted_s) in enumerate(times_s, start=1)
    ]
    rows = rows_of(closing_table(make_run(*records)))
    assert rows["prediction error, median (worst)"] == "20.0% (50.0%)"
    nothing = closing_table(make_run(make_record(predicted_time_s=0.0)))
    assert "prediction error" not in nothing


def test_a_long_path_is_not_broken() -> None:
    run_dir = "/" + "/".join(["folder"] * 40)
    assert f"run folder: {run_dir}\n" in closing_table(make_run(make_record(), folder=run_dir))


def test_a_single_iteration_has_a_throughput() -> None:
    rows = rows_of(closing_table(make_run(make_record(num_tokens=100, iteration_time_s=2.0))))
    assert rows["tokens/s"] == "50"


def test_a_run_without_a_loss() -> None:
    rows = rows_of(closing_table(make_run(make_record(lm_loss=None, num_tokens=0))))
    assert rows["lm loss, first → last"] == "none → none"
    assert rows["padding"] == "0.0%"
