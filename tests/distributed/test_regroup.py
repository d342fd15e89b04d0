"""Buckets that need no rearrangement are sent from and received into the arena."""

from dataclasses import replace

import pytest

from tests.support.gloo_pool import pool_of
from tests.support.law import MAIN_MODEL, check_law, law_job
from tests.support.models import Job, SmallModel, build_engine

pytestmark = pytest.mark.distributed

# Every parameter is a multiple of the arena's alignment, so that there are no gaps.
ALIGNED_MODEL = replace(MAIN_MODEL, hidden_size=64, ffn_hidden_size=64)
WITH_NORMS_OF_HEADS = replace(ALIGNED_MODEL, qk_layernorm=True)


def buckets_in_place(job: Job) -> tuple[int, int, int]:
    """On every rank: buckets held, received in place, and sent in place."""
    engine = build_engine(job)
    runtime = engine.runtime_of(job.strategies[0])
    assert runtime.bound is not None
    units = runtime.bound.role.units
    routes = [r for r in runtime.regrouper.routes if r.bucket.unit in units]
    received = [r for r in routes if r.received_in_place]
    sent = [r for r in routes if r.sent_in_place]
    return len(routes), len(received), len(sent)


@pytest.mark.parametrize(
    ("text", "model", "num_atoms", "num_rearranged"),
    [
        ("tp2", WITH_NORMS_OF_HEADS, None, 0),
        ("pp2", ALIGNED_MODEL, None, 0),
        # With more atoms than the tp needs, the layers of a stage.
        ("pp2", ALIGNED_MODEL, 8, ALIGNED_MODEL.num_layers // 2),
        # Two ranks divide all buckets evenly but the output's, whose middle is inside a row.
        ("2*tp1", ALIGNED_MODEL, None, 1),
    ],
)
def test_an_aligned_model_needs_little_rearranging(
    text: str, model: SmallModel, num_atoms: int | None, num_rearranged: int
) -> None:
    job = law_job(2, text, model, num_atoms=num_atoms)
    for num_held, num_received, num_sent in pool_of(2).run(buckets_in_place, job):
        assert num_received == num_sent == num_held - num_rearranged > 0
    check_law(job, 2)
