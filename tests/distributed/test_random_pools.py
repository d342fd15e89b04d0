"""The same update with random pools, placements, batches and schedules."""

import os

import pytest
from hypothesis import given, settings

from tests.support.models import Job
from tests.support.random_jobs import check_random_job, jobs

NUM_DRAWS = 200 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 25
HANG_S = 60.0

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(40 * NUM_DRAWS)]


@settings(max_examples=NUM_DRAWS)
@given(drawn=jobs())
def test_every_pool_and_schedule_gives_the_same_update(drawn: tuple[int, int, Job]) -> None:
    num_ranks, seed, job = drawn
    check_random_job(num_ranks, seed, job, timeout_s=HANG_S)
