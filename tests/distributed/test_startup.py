"""What a rank costs the job's store at start does not grow with the number of ranks."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.startup import RankStart, measure

pytestmark = pytest.mark.distributed


def starts_of(num_ranks: int) -> dict[int, RankStart]:
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # the backend `fake`
    return {start.rank: start for start in measure(num_ranks, [0, 1])}


def test_requests_and_groups_of_a_rank_do_not_grow_with_the_job() -> None:
    starts = {num_ranks: starts_of(num_ranks) for num_ranks in (16, 64)}
    for of_rank in starts.values():
        for start in of_rank.values():
            requests = start.num_requests
            assert requests["ours get"] == 1  # the plan
            # Places are written, and checked, every few seconds; rank 0 publishes plans.
            num_plans = requests["ours set"] - requests["ours check"]
            assert 1 <= num_plans <= 4 if start.rank == 0 else num_plans == 0
    for rank in (0, 1):
        assert starts[16][rank].num_groups == starts[64][rank].num_groups
    assert starts[64][0].num_groups_of_job <= 4 * starts[16][0].num_groups_of_job
