"""Records of iterations and the file they are written to."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.records import (
    METRICS_FILE_NAME,
    IterationRecord,
    MetricsWriter,
    read_metrics,
)
from tests.support.full_disk import largest_file
from tests.unit.observability.run_folders import make_record, write_run

# Readers of metrics.jsonl may rely on these keys.
PROMISED_KEYS = {
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "num_sequences",
    "num_tokens",
    "trained_tokens",
    "strategy",
    "iteration_time_s",
    "predicted_time_s",
    "padding_fraction",
    "imbalance",
    "consumed_samples",
    "idle_fraction",
    "prediction_error",
    "plan_status",
    "num_marked_plans",
}


def test_json_has_the_promised_keys_and_comes_back_equal() -> None:
    record = make_record(3)
    values = json.loads(json.dumps(record.to_json(), allow_nan=False))
    assert values.keys() >= PROMISED_KEYS
    assert IterationRecord.from_json(values) == record


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_non_finite_numbers_are_written_as_null(value: float | None) -> None:
    values = make_record(lm_loss=value, grad_norm=value).to_json()
    assert values["lm_loss"] is None
    assert values["grad_norm"] is None
    assert IterationRecord.from_json(values).lm_loss is None


def test_files_of_other_versions_are_read() -> None:
    values = make_record(regroup_bytes=4096, gather_wait_s=0.25, scatter_wait_s=0.5).to_json()
    assert IterationRecord.from_json(values).to_json() == values
    later = values | {"wait_time_s": 0.0}
    assert IterationRecord.from_json(later).to_json() == values
    # Earlier versions trained every token.
    for name in ("regroup_bytes", "gather_wait_s", "scatter_wait_s", "trained_tokens"):
        del values[name]
    assert IterationRecord.from_json(values) == make_record()


def test_missing_keys_are_named() -> None:
    values = make_record().to_json()
    del values["imbalance"], values["num_tokens"]
    with pytest.raises(HydraulisError, match=r"2 keys are missing \(num_tokens, imbalance\)"):
        IterationRecord.from_json(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration", 0),
        ("num_sequences", -1),
        ("num_tokens", -1),
        ("trained_tokens", -1),
        ("consumed_samples", -16),
        ("iteration_time_s", -0.1),
        ("iteration_time_s", math.nan),
        ("predicted_time_s", math.inf),
        ("plan_time_s", -1.0),
        ("learning_rate", math.nan),
        ("padding_fraction", 1.01),
        ("padding_fraction", -0.01),
        ("imbalance", 0.9),
        ("imbalance", math.inf),
        ("strategy", ""),
        ("replica_times_s", (1.0, -1.0)),
        ("replica_times_s", (math.nan,)),
        ("regroup_bytes", -1),
        ("peak_reserved_bytes", -1),
        ("gather_wait_s", -0.5),
        ("scatter_wait_s", math.nan),
        ("plan_gap", 1.5),
        ("plan_gap", math.nan),
        ("plan_status", ""),
        ("num_marked_plans", -1),
    ],
)
def test_an_invalid_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(HydraulisError, match=name):
        make_record(**{name: value})


def test_a_replica_idles_from_its_end_to_the_makespan() -> None:
    assert make_record().idle_fraction == (0.0, 0.25, 0.5)
    assert make_record().to_json()["idle_fraction"] == [0.0, 0.25, 0.5]
    assert make_record(replica_times_s=(0.0, 0.0)).idle_fraction == (0.0, 0.0)


def test_padding_tokens_follow_from_their_fraction() -> None:
    record = make_record(num_tokens=900, padding_fraction=0.1)
    assert record.num_padding == pytest.approx(100)
    assert make_record(num_tokens=0, padding_fraction=1.0).num_padding == 0


def test_a_record_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_record().iteration = 2  # type: ignore[misc]


def test_prediction_error_is_relative_to_what_was_predicted() -> None:
    late = make_record(iteration_time_s=1.5, predicted_time_s=1.0)
    early = make_record(iteration_time_s=0.5, predicted_time_s=1.0)
    assert late.prediction_error == early.prediction_error == 0.5
    assert late.to_json()["prediction_error"] == 0.5
    assert make_record(predicted_time_s=0.0).to_json()["prediction_error"] is None


def test_each_line_is_in_the_file_before_the_next_iteration(tmp_path: Path) -> None:
    run_dir = tmp_path / "new" / "run"
    with MetricsWriter(run_dir) as writer:
        for num_lines in (1, 2):
            writer.write(make_record(num_lines))
            assert (run_dir / METRICS_FILE_NAME).read_text().count("\n") == num_lines


def test_records_come_back_as_written(tmp_path: Path) -> None:
    records = [make_record(iteration) for iteration in (1, 2, 3)]
    assert read_metrics(write_run(tmp_path, records)) == records


def test_a_resumed_run_appends_and_its_record_counts(tmp_path: Path) -> None:
    write_run(tmp_path, [make_record(iteration) for iteration in (1, 2, 3)])
    write_run(tmp_path, [make_record(2, lm_loss=1.0)])
    found = [(record.iteration, record.lm_loss) for record in read_metrics(tmp_path)]
    assert found == [(1, 8.875), (2, 1.0), (3, 8.625)]


@pytest.mark.parametrize("whole_lines", [0, 2])
def test_a_line_cut_off_by_a_kill_does_not_affect_others(tmp_path: Path, whole_lines: int) -> None:
    whole = [make_record(iteration) for iteration in range(1, whole_lines + 1)]
    write_run(tmp_path, whole)
    with open(tmp_path / METRICS_FILE_NAME, "a") as file:
        file.write('{"iteration": 3, "lm_lo')
    assert read_metrics(tmp_path) == whole
    write_run(tmp_path, [make_record(9)])
    assert read_metrics(tmp_path) == [*whole, make_record(9)]


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE_NAME).symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path)
    with pytest.raises(HydraulisError, match=r"iteration 7 .* \(\d+ bytes\).*No space left"):
        writer.write(make_record(7))
    writer.close()


@pytest.mark.fault
def test_a_disk_that_fills_up_within_a_line_leaves_complete_lines(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(make_record(1))
        line_bytes = (tmp_path / METRICS_FILE_NAME).stat().st_size
        with largest_file(line_bytes * 3 // 2), pytest.raises(HydraulisError, match="iteration 2"):
            writer.write(make_record(2))
        assert [record.iteration for record in read_metrics(tmp_path)] == [1]
        writer.write(make_record(3))
    assert [record.iteration for record in read_metrics(tmp_path)] == [1, 3]


def test_an_impossible_run_folder_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(HydraulisError, match="choose another --run-dir"):
        MetricsWriter(tmp_path / "file" / "run")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, [make_record(1)])
    with open(tmp_path / METRICS_FILE_NAME, "a") as file:
        file.write("not json\n")
    with pytest.raises(HydraulisError, match="line 2 of 2 is not"):
        read_metrics(tmp_path)


def test_a_folder_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HydraulisError, match="No such file"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lm_loss", "2.5"),
        ("lm_loss", [2.5]),
        ("strategy", ["a"]),
        ("iteration", True),
        ("num_tokens", 10**400),
        ("replica_times_s", ["a"]),
        ("replica_times_s", 1.0),
        ("router_bias_range", [1.0]),
        ("strategy_times_s", {"a": {}}),
        ("strategy_times_s", [1]),
    ],
)
def test_a_value_of_another_type_is_damage(tmp_path: Path, name: str, value: Any) -> None:
    assert_damaged(tmp_path, json.dumps({**make_record(1).to_json(), name: value}))


@pytest.mark.parametrize("line", ["[" * 100_000, "[1]", '"text"', "7"])
def test_a_line_that_is_no_object_is_damage(tmp_path: Path, line: str) -> None:
    assert_damaged(tmp_path, line)


def assert_damaged(folder: Path, line: str) -> None:
    (folder / METRICS_FILE_NAME).write_text(line + "\n")
    with pytest.raises(HydraulisError, match="line 1 of 1 is not"):
        read_metrics(folder)
