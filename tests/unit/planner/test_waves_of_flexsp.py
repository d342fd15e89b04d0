"""Waves in FlexSP's setting: a 7B model on 64 ranks, sequences of up to 192K tokens."""

import numpy as np
import pytest

from benchmarks.inputs import WAVE_RANKS, flexsp_profile, wave_cases
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.strategy import Pool, Strategy

CASES = {case.name: case for case in wave_cases(0)}


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("Wikipedia 0", 1.06), ("GitHub, σ 1.75, 2", 1.06), ("GitHub, σ 2.2, 1", 1.03)],
)
def test_a_batch_takes_little_more_than_its_bound(name: str, ratio: float) -> None:
    case = CASES[name]
    plan = CertifiedPlanner(case.pool, case.profile).plan(case.batch)
    assert plan.dispatch is not None
    assert plan.dispatch.bound_s <= plan.predicted_time_s <= ratio * plan.dispatch.bound_s


def test_thousands_of_sequences_take_no_longer_than_planned_greedily() -> None:
    """They spend the effort of the search before its first step ends."""
    drawn = np.random.default_rng(1).lognormal(np.log(900), 1.6, 2048)
    lengths = drawn.clip(16, 190_000).astype(int).tolist()
    pool, profile = Pool.of(Strategy.parse("cp32~+4*cp8", WAVE_RANKS)), flexsp_profile()
    certified, greedy = (
        planner(pool, profile).plan(lengths).predicted_time_s
        for planner in (CertifiedPlanner, GreedyPlanner)
    )
    assert certified <= greedy
