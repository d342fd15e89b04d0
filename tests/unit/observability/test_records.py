import dataclasses
import json
import math
from typing import Any

import pytest

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability import IterationRecord
from tests.unit.observability.records_for_tests import make_record

# What readers of metrics.jsonl may count on.
PROMISED_KEYS = {
    "iteration",
    "lm_loss",
    "grad_norm",
    "learning_rate",
    "num_sequences",
    "num_tokens",
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
def test_what_is_not_finite_is_written_as_null(value: float | None) -> None:
    values = make_record(lm_loss=value, grad_norm=value).to_json()
    assert values["lm_loss"] is None
    assert values["grad_norm"] is None
    assert IterationRecord.from_json(values).lm_loss is None


def test_keys_of_a_later_version_are_passed_over() -> None:
    record = make_record()
    assert IterationRecord.from_json(record.to_json() | {"wait_time_s": 0.0}) == record


def test_files_of_before_regrouping_was_counted_are_read() -> None:
    values = make_record(regroup_bytes=4096, gather_wait_s=0.25, scatter_wait_s=0.5).to_json()
    assert IterationRecord.from_json(values).to_json() == values
    for name in ("regroup_bytes", "gather_wait_s", "scatter_wait_s"):
        del values[name]
    assert IterationRecord.from_json(values) == make_record()


def test_missing_keys_are_named() -> None:
    values = make_record().to_json()
    del values["imbalance"], values["num_tokens"]
    with pytest.raises(HydraulisError, match=r"2 of 19 keys are missing \(num_tokens, imbalance\)"):
        IterationRecord.from_json(values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iteration", 0),
        ("num_sequences", -1),
        ("num_tokens", -1),
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
def test_a_value_against_its_rule_is_refused_by_name(name: str, value: Any) -> None:
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
