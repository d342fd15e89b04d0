"""bf16 parameters: strategies add little to the rounding error that one process has as well."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, law_job, law_reference
from tests.support.models import Job, RankRun, assemble, run_job
from tests.support.recomputed_models import recomputed
from tests.support.reference import ReferenceRun, run_reference

pytestmark = pytest.mark.distributed

MODEL = replace(MAIN_MODEL, dtype=torch.bfloat16)
NO_SEQUENCE_PARALLELISM = replace(MODEL, sequence_parallel=False)
MOST_OF_ONE_PROCESS = 2.0
"""Error of a gradient over that of the one-process run."""
LEAST_ERROR = 2**-9
"""Half a unit in the last place of bf16: an error below it would mean that nothing was rounded."""

Gradients = Sequence[Mapping[str, np.ndarray]]


def errors(found: Mapping[str, np.ndarray], iteration: int) -> dict[str, float]:
    """2-norms relative to the exact gradient's: of everything, and of each kind of parameter.

    A kind is a parameter of all layers together: that of one layer may have 32 elements, whose
    error is as much chance as rounding.
    """
    squares: dict[str, list[float]] = {}
    for name, exact in law_reference(MODEL).gradients[iteration].items():
        error = found[name][: exact.shape[0]] - exact
        for kind in ("everything", re.sub(r"layers\.\d+", "layers", name)):
            sums = squares.setdefault(kind, [0.0, 0.0])
            sums[0] += float(np.square(error).sum())
            sums[1] += float(np.square(exact).sum())
    return {kind: (error / size) ** 0.5 for kind, (error, size) in squares.items()}


def gradients_of(job: Job, num_ranks: int) -> Gradients:
    runs: list[RankRun] = pool_of(num_ranks).run(run_job, job)
    return [assemble(runs, [run.gradients[i] for run in runs]) for i in range(len(job.batches))]


@cache
def one_process() -> list[dict[str, float]]:
    """The same engine on one rank, with the same batches."""
    gradients = gradients_of(law_job(1, "tp1", MODEL), 1)
    return [errors(gradient, i) for i, gradient in enumerate(gradients)]


def assert_little_is_added(gradients: Gradients) -> None:
    for i, (gradient, alone) in enumerate(zip(gradients, one_process(), strict=True)):
        found = errors(gradient, i)
        assert found["everything"] > LEAST_ERROR
        ratios = {kind: found[kind] / alone[kind] for kind in alone}
        assert max(ratios.values()) <= MOST_OF_ONE_PROCESS, (i, ratios)


@pytest.mark.parametrize(
    ("num_ranks", "text"),
    [(2, "tp2"), (4, "tp4"), (4, "tp2pp2:3,1"), (4, "4*tp1"), (4, "tp2@0,3+pp2:1,3@1,2")],
)
def test_of_a_strategy(num_ranks: int, text: str) -> None:
    assert_little_is_added(gradients_of(law_job(num_ranks, text, MODEL), num_ranks))


def test_without_sequence_parallelism() -> None:
    assert_little_is_added(gradients_of(law_job(4, "tp4", NO_SEQUENCE_PARALLELISM), 4))


def test_with_recompute() -> None:
    model = recomputed(MODEL, granularity="full", method="uniform", num_layers_recomputed=1)
    assert_little_is_added(gradients_of(law_job(3, "tp2+tp1", model), 3))


def test_of_a_schedule_that_switches_strategies() -> None:
    texts = ("tp2+2*tp1", "tp2@0,3+pp2@2,1", "pp3:2,1,1+idle")
    jobs = [law_job(4, text, MODEL) for text in texts]
    job = replace(
        jobs[0],
        strategies=texts,
        schedule=(0, 1, 2),
        assignments=tuple(job.assignments[i] for i, job in enumerate(jobs)),
    )
    assert_little_is_added(gradients_of(job, 4))


def test_upstream_s_model_in_bf16_on_one_process_is_no_more_exact() -> None:
    """The run that is compared with is not a bad one of ours."""
    upstream: ReferenceRun = pool_of(1).run(
        run_reference, law_job(1, "tp1", MODEL), torch.bfloat16
    )[0]
    theirs, ours = errors(upstream.gradients[0], 0), one_process()[0]
    assert max(ours[kind] / theirs[kind] for kind in ours) <= MOST_OF_ONE_PROCESS
