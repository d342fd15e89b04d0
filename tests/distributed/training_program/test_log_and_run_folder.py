"""Output and files of the training program."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from megatron.hydraulis.data.corpus import Corpus
from megatron.hydraulis.data.sampler import BatchSizes, LengthSampler
from megatron.hydraulis.strategy import Strategy
from tests.support.tiny_corpus import (
    PADDED_VOCAB_SIZE,
    VOCAB_SIZE,
)
from tests.support.training_log import log_lines, scalars
from tests.support.training_run import (
    BATCH_SIZE,
    PRINTED,
    SEED,
    TRAIN_ITERS,
    Run,
    floating_point_operations,
)

pytestmark = pytest.mark.distributed


def test_every_iteration_prints_upstreams_line_with_ours_appended(main_run: Run) -> None:
    lines = main_run.lines
    assert [line.iteration for line in lines] == [1, 2, 3, 4]
    assert {line.train_iters for line in lines} == {TRAIN_ITERS}
    assert {line.strategy for line in lines} == {"tp2+2*tp1"}
    assert [line.consumed_samples for line in lines] == [16, 32, 48, 64]
    assert {line.global_batch_size for line in lines} == {BATCH_SIZE}
    assert {(line.num_skipped, line.num_nan) for line in lines} == {(0, 0)}
    speakers = [bool(log_lines(rank.stdout)) for rank in main_run.outcome.ranks.values()]
    assert speakers == [False, False, False, True]


def test_a_line_shows_the_figures_of_its_own_iteration(main_run: Run) -> None:
    # Upstream would print the mean of the first two losses on the second line.
    for line, record in zip(main_run.lines, main_run.records, strict=True):
        assert line.iteration == record.iteration
        assert line.lm_loss == pytest.approx(record.lm_loss, rel=PRINTED)
        assert line.grad_norm == pytest.approx(record.grad_norm, abs=6e-4)
        assert line.learning_rate == pytest.approx(record.learning_rate, rel=PRINTED)
        assert line.num_tokens == record.num_tokens
        assert line.global_batch_size == record.num_sequences
        assert line.consumed_samples == record.consumed_samples
    assert abs(main_run.losses[0] - main_run.losses[1]) > 1e-3


def test_metrics_hold_one_object_an_iteration(main_run: Run) -> None:
    objects = [json.loads(line) for line in (main_run.run_dir / "metrics.jsonl").open()]
    assert [found["iteration"] for found in objects] == [1, 2, 3, 4]
    wanted = {
        *("iteration", "lm_loss", "grad_norm", "learning_rate", "num_sequences", "num_tokens"),
        *("strategy", "iteration_time_s", "predicted_time_s", "padding_fraction", "imbalance"),
        "consumed_samples",
    }
    assert all(wanted <= set(found) for found in objects)
    assert all(found["predicted_time_s"] > 0 < found["iteration_time_s"] for found in objects)
    # One strategy: the same bytes in every iteration, for which compute sometimes waits.
    assert len({found["regroup_bytes"] for found in objects}) == 1
    assert objects[0]["regroup_bytes"] > 0
    for wait in ("gather_wait_s", "scatter_wait_s"):
        assert sum(found[wait] for found in objects) > 0
        assert all(found[wait] < found["iteration_time_s"] for found in objects)


def test_tensorboard_holds_upstreams_names(main_run: Run) -> None:
    found = scalars(main_run.run_dir)
    records = main_run.records
    by_iteration: dict[str, list[Any]] = {
        "lm loss": [record.lm_loss for record in records],
        "grad-norm": [record.grad_norm for record in records],
        "learning-rate": [record.learning_rate for record in records],
        "batch-size": [BATCH_SIZE] * TRAIN_ITERS,
        "tokens": [record.num_tokens for record in records],
        "imbalance": [record.imbalance for record in records],
    }
    for tag, values in by_iteration.items():
        assert found[tag] == pytest.approx(dict(zip([1, 2, 3, 4], values, strict=True))), tag
    for tag in ("lm loss", "grad-norm", "learning-rate", "batch-size"):
        assert sorted(found[f"{tag} vs samples"]) == [16, 32, 48, 64], tag
        assert list(found[f"{tag} vs samples"].values()) == list(found[tag].values()), tag
    assert sorted(found["iteration-time"]) == [1, 2, 3, 4]
    assert min(found["iteration-time"].values()) > 0
    assert sorted(found["lm loss validation"]) == [2, 4]


def test_floating_point_operations_count_tokens_and_squares_of_lengths(main_run: Run) -> None:
    found = scalars(main_run.run_dir)
    for plan in main_run.plans:
        iteration = plan.iteration + 1
        measured = found["throughput"][iteration] * 1e12 * found["iteration-time"][iteration] * 4
        assert measured == pytest.approx(floating_point_operations(plan), rel=1e-5)


def test_the_run_folder_holds_the_resolved_configuration(main_run: Run, corpus_prefix: str) -> None:
    config = json.loads((main_run.run_dir / "config.json").read_text())
    (strategy,) = config["strategies"]
    assert strategy["name"] == strategy["strategy"] == "tp2+2*tp1"
    assert [replica["ranks"] for replica in strategy["replicas"]] == [[0, 1], [2], [3]]
    assert config["settings"]["seed"] == SEED
    assert config["settings"]["data_path"] == [corpus_prefix]
    assert config["model"]["vocab_size"] == PADDED_VOCAB_SIZE
    assert config["model"]["vocab_size_unpadded"] == VOCAB_SIZE
    assert config["hydraulis"]["max_tokens_per_micro_batch"] == 128


def test_the_run_ends_with_table_picture_and_folder(main_run: Run) -> None:
    output = main_run.outcome.ranks[3].stdout
    table = output[output.index("Training finished") :]
    first, last = main_run.losses[0], main_run.losses[-1]
    assert re.search(r"iterations\s+│\s+1 to 4 │", table)
    assert f"{first:.4f} → {last:.4f}" in table
    assert f"{sum(record.num_tokens for record in main_run.records):,} │" in table
    for row in ("tokens/s", "padding", "imbalance"):
        assert row in table
    assert f"run folder: {main_run.run_dir}\n" in table
    picture = matplotlib.image.imread(main_run.run_dir / "summary.png")
    assert picture.std() > 0.05


def test_plans_are_valid_and_hold_the_sampled_batches(
    main_run: Run, training_corpus: Corpus
) -> None:
    strategy = Strategy.parse("tp2+2*tp1", 4)
    sampler = LengthSampler(
        training_corpus.lengths,
        training_corpus.groups,
        seed=SEED,
        sizes=BatchSizes.constant(num_sequences=BATCH_SIZE),
    )
    plans = main_run.plans
    assert [plan.iteration for plan in plans] == [0, 1, 2, 3]
    for plan, record in zip(plans, main_run.records, strict=True):
        batch = sampler.next_batch()
        plan.validate(batch.lengths, strategy, lambda scheme: 128)
        assert record.num_tokens == batch.num_tokens
        assert record.predicted_time_s == pytest.approx(plan.predicted_time_s)
        assert record.imbalance == pytest.approx(plan.imbalance)
    num_at_work = [sum(bool(r.micro_batches) for r in plan.replicas) for plan in plans]
    assert max(num_at_work) > 1, "no plan distributes its batch, so that the runs compare nothing"


def test_records_and_predictions_are_finite(main_run: Run, pipeline_run: Run) -> None:
    for run in (main_run, pipeline_run):
        for record in run.records:
            numbers = [
                value for value in dataclasses.asdict(record).values() if isinstance(value, float)
            ]
            assert np.isfinite(numbers).all()
            assert 0.0 <= record.padding_fraction < 0.1
