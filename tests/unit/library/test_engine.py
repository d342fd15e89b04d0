"""What an engine passes on: to its planner, whose caller waits, and to the saver of checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks import inputs
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.errors import CheckpointError, ConfigurationError, HydraulisError
from megatron.hydraulis.library import engine as engine_module
from megatron.hydraulis.library.engine import Engine
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.strategy import Pool


def test_an_engine_of_pipelines_is_not_planned_greedily(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, model = Pool.of(inputs.pool().strategy("S6")), inputs.cost_model()
    planning = SimpleNamespace(pool=pool, cost_model=model, limits=Limits(model))
    built = SimpleNamespace(planning=planning, engine=None)
    monkeypatch.setattr(engine_module, "build_from_folder", lambda *_, **__: built)
    engine = Engine.from_hf(Path(), pool="8*tp4pp2", optimizer=None)
    batch = inputs.LengthDistribution().batch(0, inputs.BATCH_TOKENS, 12_416)
    plan = engine._planner.plan(batch)
    assert plan.predicted_time_s < 0.92 * GreedyPlanner(pool, model).plan(batch).predicted_time_s


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine of one rank whose optimizer has made three updates."""
    runtime: Any = MagicMock()
    runtime.optimizer.num_steps = torch.tensor(3.0)
    monkeypatch.setattr(engine_module, "agreed", lambda checked, what: checked())
    monkeypatch.setattr(engine_module, "upstream_entries", lambda args, steps, *_: {"steps": steps})
    monkeypatch.setattr(engine_module, "model_of", lambda args, vocab_size: {"size": vocab_size})
    built: Any = MagicMock()
    built.resolved.vocabulary.size = 61
    return Engine(runtime, MagicMock(), MagicMock(), built)


def test_a_checkpoint_is_named_after_the_updates_and_finished(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make: Any = MagicMock()
    monkeypatch.setattr(engine_module, "CheckpointSaver", make)
    engine.save(tmp_path)
    folder, runtime = make.call_args.args
    assert (folder.root, runtime) == (tmp_path, engine.runtime)
    calls = make.return_value.method_calls
    assert [name for name, *_ in calls] == ["save", "finish"]
    (state,) = calls[0].args
    assert (state.iteration, state.model, state.upstream) == (3, {"size": 61}, {"steps": 3})


def test_what_hinders_saving_or_loading_is_said_before_a_file_is_touched(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load: Any = MagicMock()
    monkeypatch.setattr(engine_module, "CheckpointSaver", load)
    monkeypatch.setattr(engine_module, "load_checkpoint", load)
    paths: list[Path] = []
    monkeypatch.setattr(engine_module, "find_checkpoints", lambda folder: paths)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        engine.load(tmp_path)
    paths.append(tmp_path)
    runtime: Any = engine.runtime
    with pytest.raises(ConfigurationError, match=r"make it by Engine\.from_hf"):
        Engine(runtime, MagicMock(), MagicMock()).save(tmp_path)
    runtime.require_no_gradients.side_effect = HydraulisError("gradients wait")
    with pytest.raises(HydraulisError, match="gradients wait"):
        engine.load(tmp_path)
    runtime.require_onloaded.side_effect = HydraulisError("on the host")
    with pytest.raises(HydraulisError, match="on the host"):
        engine.save(tmp_path)
    load.assert_not_called()
    runtime.require_no_gradients.side_effect = runtime.require_onloaded.side_effect = None
    runtime.has_optimizer = False
    engine.load(tmp_path)
    load.assert_called_once_with(tmp_path, runtime, {"size": 61}, with_optimizer=False)
