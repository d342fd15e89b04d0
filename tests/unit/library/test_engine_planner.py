"""The planner of an engine: its caller waits for each plan."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import inputs
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.library import engine as engine_module
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.strategy import Pool


def test_an_engine_of_pipelines_is_not_planned_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, model = Pool.of(inputs.pool().strategy("S6")), inputs.cost_model()
    planning = SimpleNamespace(pool=pool, cost_model=model, limits=Limits(model))
    built = SimpleNamespace(planning=planning, engine=None)
    monkeypatch.setattr(engine_module, "build_from_folder", lambda *_, **__: built)
    engine = engine_module.Engine.from_hf(Path(), pool="8*tp4pp2", optimizer=None)
    batch = inputs.LengthDistribution().batch(0, inputs.BATCH_TOKENS, 12_416)
    plan = engine._planner.plan(batch)
    assert plan.predicted_time_s < 0.92 * GreedyPlanner(pool, model).plan(batch).predicted_time_s
