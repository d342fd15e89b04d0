"""Packing, padding, order and dispatch of sequences change nothing but rounding."""

from dataclasses import replace

import pytest

from tests.support.comparison import assert_same
from tests.support.gloo_pool import pool_of
from tests.support.law import (
    BIASED_MODEL,
    FP64_TOLERANCE,
    NUM_ATOMS,
    SHORT_MODEL,
    SPLITS,
    check_law,
    law_job,
    law_reference,
    waves,
)
from tests.support.models import Assignment, Job, RankRun, assemble, run_job

pytestmark = pytest.mark.distributed

MODELS = {"rotary positions": SHORT_MODEL, "learned positions": BIASED_MODEL}


def one_iteration(job: Job, *replicas: tuple[tuple[int, ...], ...]) -> Job:
    """The job's first batch only, with this assignment."""
    return replace(job, schedule=(0,), assignments=(Assignment(replicas),), batches=job.batches[:1])


def update(job: Job, num_ranks: int) -> tuple[dict, dict, float]:
    """Whole gradients and parameters after the job's only iteration, and its loss."""
    runs: list[RankRun] = pool_of(num_ranks).run(run_job, job)
    gradients = assemble(runs, [run.gradients[0] for run in runs])
    parameters = assemble(runs, [run.parameters[0] for run in runs])
    return gradients, parameters, runs[0].losses[0]


def assert_same_update(num_ranks: int, first: Job, *others: Job) -> None:
    """All jobs give the update of the first, which is that of the one-process reference."""
    gradients, parameters, loss = update(first, num_ranks)
    reference = law_reference(first.model)
    for name, exact in reference.gradients[0].items():
        gradients_of_name = {name: gradients[name]}
        assert_same(gradients_of_name, {name: exact}, FP64_TOLERANCE)
    # Rows of the padded vocabulary have no gradient: compare the others.
    trained = {name: value.shape[0] for name, value in reference.gradients[0].items()}
    expected_gradients = {name: gradients[name][:rows] for name, rows in trained.items()}
    for other in others:
        other_gradients, other_parameters, other_loss = update(other, num_ranks)
        assert_same(other_gradients, expected_gradients, FP64_TOLERANCE)
        assert_same(other_parameters, parameters, FP64_TOLERANCE)
        assert other_loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_packed_equals_unpacked(name: str) -> None:
    job = law_job(1, "tp1", MODELS[name])
    assert_same_update(
        1,
        one_iteration(job, ((0,), (1,), (2,), (3,), (4,), (5,), (6,))),
        one_iteration(job, ((0, 1, 2, 3, 4, 5, 6),)),
        one_iteration(job, ((0, 1), (2, 3, 4), (5, 6))),
    )


def test_packed_equals_unpacked_in_a_pipeline_of_tensor_parallel_stages() -> None:
    job = law_job(4, "tp2pp2")
    assert_same_update(
        4,
        one_iteration(job, ((0,), (1,), (2,), (3,), (4,), (5,), (6,))),
        one_iteration(job, ((0, 1, 2, 3, 4, 5, 6),)),
    )


@pytest.mark.parametrize(("num_ranks", "text"), [(1, "tp1"), (2, "tp2"), (2, "pp2")])
@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_nothing(num_ranks: int, text: str, name: str) -> None:
    job = one_iteration(law_job(num_ranks, text, MODELS[name]), ((0, 1, 2), (3, 4), (5, 6)))
    # 31, 33 and 20 tokens: pads of up to 1 token, and of 95 and more, longer than any sequence.
    assert_same_update(num_ranks, job, replace(job, pad_multiple=2), replace(job, pad_multiple=128))


@pytest.mark.parametrize(
    ("num_ranks", "text"), [(3, "tp2+tp1"), (2, "cp2"), (4, "tp2pp2"), (3, "pp2+tp1"), (4, "cp4~")]
)
def test_a_row_quantum_changes_nothing(num_ranks: int, text: str) -> None:
    """Rows are one of two sizes, 16 and the limit of 40 tokens, or longer."""
    job = waves([SPLITS["2+1+1"]]) if "~" in text else law_job(num_ranks, text)
    check_law(replace(job, row_quantum=16), num_ranks)


def test_the_order_of_sequences_and_micro_batches_changes_nothing() -> None:
    job = law_job(2, "pp2")
    assert_same_update(
        2,
        one_iteration(job, ((0, 1), (2, 3, 4), (5, 6))),
        one_iteration(job, ((6, 5), (4, 3, 2), (1, 0))),
        one_iteration(job, ((3, 2, 4), (1, 0), (5, 6))),
    )


def test_the_order_of_replicas_changes_nothing() -> None:
    """Neither the assignment to replicas nor their placement and order matter."""
    few, many = ((0, 4),), ((1, 2), (3,), (5, 6))
    shapes = [
        ("tp2@0,1+tp1@2", few, many),
        ("tp2@0,1+tp1@2", many, few),
        ("tp1@2+tp2@0,1", few, many),
        ("tp2@2,0+tp1@1", few, many),
        ("tp1@0+tp2@1,2", many, few),
        ("tp2@0,1+tp1@2", (), (*few, *many)),
    ]
    jobs = [
        one_iteration(law_job(3, text, num_atoms=NUM_ATOMS), first, second)
        for text, first, second in shapes
    ]
    assert_same_update(3, *jobs)
