"""Overruns and missing bounds of pipelines are recorded and marked in the plan."""

from typing import Any

import pytest

from megatron.hydraulis.planner import pipeline_packing
from megatron.hydraulis.planner.bounds import best_works_ms
from megatron.hydraulis.planner.costs import Pipeline
from megatron.hydraulis.planner.solver import Deadline, Outcome, Solver
from tests.fault.test_solver_trouble import CASES, statuses


def test_missing_bounds_of_a_pipeline_are_recorded() -> None:
    solver = Solver(Deadline(0.0))
    assert best_works_ms(Pipeline(2), [1.0, 1.0], 4.0, 3.0, solver) is None
    assert solver.trouble is Outcome.OVERRUN


def test_a_packing_without_the_best_bounds_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        arguments[-1].trouble = Outcome.FAILED

    monkeypatch.setattr(pipeline_packing, "best_works_ms", fails)
    case = CASES["pipelines"]
    plan = case.plan()
    case.check(plan)
    assert statuses(plan) == {"solver failed"}
