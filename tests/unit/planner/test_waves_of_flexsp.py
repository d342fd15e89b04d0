"""Waves in FlexSP's setting: a 7B model on 64 ranks, sequences of up to 192K tokens."""

import pytest

from benchmarks.inputs import wave_cases
from megatron.hydraulis.planner.planners import CertifiedPlanner

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
