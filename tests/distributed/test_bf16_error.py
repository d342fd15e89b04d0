"""bf16 parameters: strategies add little to the rounding error of a single process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.bf16_error import (
    MOST_OF_ONE_PROCESS,
    assert_little_is_added,
    errors,
    gradients_of,
    one_process,
)
from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, changing, law_job
from tests.support.recomputed_models import recomputed
from tests.support.reference import ReferenceRun, run_reference

pytestmark = pytest.mark.distributed

MODEL = replace(MAIN_MODEL, dtype=torch.bfloat16)
NO_SEQUENCE_PARALLELISM = replace(MODEL, sequence_parallel=False)


@pytest.mark.parametrize(
    ("num_ranks", "text"),
    [(2, "tp2"), (4, "tp4"), (4, "tp2pp2:3,1"), (4, "4*tp1"), (4, "tp2@0,3+pp2:1,3@1,2")],
)
def test_of_a_strategy(num_ranks: int, text: str) -> None:
    assert_little_is_added(MODEL, gradients_of(law_job(num_ranks, text, MODEL), num_ranks))


def test_without_sequence_parallelism() -> None:
    gradients = gradients_of(law_job(4, "tp4", NO_SEQUENCE_PARALLELISM), 4)
    assert_little_is_added(MODEL, gradients)


def test_with_recompute() -> None:
    model = recomputed(MODEL, granularity="full", method="uniform", num_layers_recomputed=1)
    assert_little_is_added(MODEL, gradients_of(law_job(3, "tp2+tp1", model), 3))


def test_of_a_schedule_that_switches_strategies() -> None:
    job = changing(("tp2+2*tp1", "tp2@0,3+pp2@2,1", "pp3:2,1,1+idle"), MODEL)
    assert_little_is_added(MODEL, gradients_of(job, 4))


def test_upstream_s_model_in_bf16_on_one_process_is_no_more_exact() -> None:
    """The reference of the comparison is not inaccurate."""
    upstream: ReferenceRun = pool_of(1).run(
        run_reference, law_job(1, "tp1", MODEL), torch.bfloat16
    )[0]
    theirs, ours = errors(MODEL, upstream.gradients[0], 0), one_process(MODEL)[0]
    assert max(ours[kind] / theirs[kind] for kind in ours) <= MOST_OF_ONE_PROCESS
