"""Overruns and missing bounds of pipelines are recorded and marked in the plan."""

import dataclasses
from typing import Any

import pytest

from megatron.hydraulis.planner import pipeline_packing
from megatron.hydraulis.planner import solver as solver_module
from megatron.hydraulis.planner.costs import Pipeline
from megatron.hydraulis.planner.pipeline_bounds import best_works_ms
from megatron.hydraulis.planner.solver import (
    Deadline,
    LinearModel,
    Outcome,
    Solution,
    Solver,
    SolverLimits,
)
from tests.fault.test_solver_trouble import CASES, market_split, statuses


def test_after_an_overrun_no_integer_program_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each could take as long as the guard allows; linear programs have an iteration limit."""
    asked: list[LinearModel] = []

    def overrun(model: LinearModel, *_: object, **__: object) -> Solution:
        asked.append(model)
        return Solution(outcome=Outcome.OVERRUN)

    monkeypatch.setattr(solver_module, "solve", overrun)
    solver = Solver(Deadline(None))
    integral = market_split()
    linear = dataclasses.replace(integral, is_integral=None)
    for model in (integral, integral, linear):
        assert solver.solve(model, SolverLimits()).outcome is Outcome.OVERRUN
    assert asked == [integral, linear]


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
