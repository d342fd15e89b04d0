"""Replicas that recompute every layer, ``tp2r``: the same update, with layers computed twice."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from megatron.core.transformer.transformer_layer import TransformerLayer

from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, SPLITS, assert_law, changing, check_law, law_job, waves
from tests.support.models import Job, RankRun, run_job

pytestmark = pytest.mark.distributed


def run_counted(job: Job) -> tuple[RankRun, int]:
    """The run of this rank, and how often it computed a layer's forward."""
    num_forwards = 0
    right = TransformerLayer.forward

    def counted(*inputs: object, **named: object) -> object:
        nonlocal num_forwards
        num_forwards += 1
        return right(*inputs, **named)

    with patch.object(TransformerLayer, "forward", counted):
        return run_job(job), num_forwards


@pytest.mark.parametrize("text", ["2*tp2r", "tp2r+2*tp1", "pp2r+2*tp1", "tp2pp2r", "cp4fsr"])
def test_recomputed_replicas_compute_layers_twice_and_give_the_same_update(text: str) -> None:
    job = law_job(4, text, MAIN_MODEL)
    counted = pool_of(4).run(run_counted, job)
    assert_law(job, [run for run, _ in counted])
    plain = law_job(4, text.replace("r", ""), MAIN_MODEL)
    usual = [num for _, num in pool_of(4).run(run_counted, plain)]
    is_recomputed = ["r" in term for term in text.split("+")]
    first = [num_twice / num for (_, num_twice), num in zip(counted, usual, strict=True)]
    assert first[:2] == [2.0, 2.0]
    assert set(first[2:]) == ({2.0} if all(is_recomputed) else {1.0})


def test_recomputation_may_change_from_iteration_to_iteration() -> None:
    check_law(changing(("tp2pp2r", "tp2pp2", "cp4fsr"), MAIN_MODEL), 4)


def test_waves_recompute_together() -> None:
    check_law(replace(waves(list(SPLITS.values()), MAIN_MODEL), strategies=("cp4~r",)), 4)
