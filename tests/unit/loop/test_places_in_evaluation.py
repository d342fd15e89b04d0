"""An evaluation of many batches has many waits, each with its plan."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.hydraulis.loop import step
from megatron.hydraulis.loop.step import RunParts, TrainingLoop
from megatron.hydraulis.runtime.outcome import LossTotal


def test_every_batch_is_a_separate_place(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(eval_iters=2, consumed_valid_samples=0)
    monkeypatch.setattr(step, "get_args", lambda: args)
    monkeypatch.setattr(step, "get_timers", MagicMock())
    guard = MagicMock()
    unused: Any = MagicMock()
    loop = TrainingLoop(unused, RunParts(None, None, unused, None, unused, guard), unused)
    data = MagicMock()
    data.next_batch.side_effect = [
        SimpleNamespace(
            plan=SimpleNamespace(strategy=name),
            digest=name * 20,
            share=SimpleNamespace(micro_batches=()),
            batch=SimpleNamespace(num_sequences=1),
        )
        for name in ("a", "b")
    ]
    model = MagicMock()
    model.engine.device = torch.device("cpu")
    model.engine.evaluate.return_value = LossTotal(3.0, 2.0, 2)
    losses, _, _ = loop.evaluate(unused, data, [model], None, None)
    assert losses["lm loss"].item() == 1.5
    assert [call.kwargs["plan"] for call in guard.enter.mock_calls] == [
        "",
        "strategy 'a', plan aaaaaaaaaaaa",
        "",
        "strategy 'b', plan bbbbbbbbbbbb",
    ]
