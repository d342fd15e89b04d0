"""What replaces functions of upstream's loop."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.hydraulis.loop import step
from megatron.hydraulis.loop.step import RunParts, TrainingLoop
from megatron.hydraulis.runtime.outcome import LossTotal


def loop_of(guard: MagicMock) -> TrainingLoop:
    unused: Any = MagicMock()
    return TrainingLoop(unused, RunParts(None, None, unused, None, unused, guard), unused)


def test_every_batch_of_an_evaluation_is_a_separate_place(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(eval_iters=2, consumed_valid_samples=0)
    monkeypatch.setattr(step, "get_args", lambda: args)
    monkeypatch.setattr(step, "get_timers", MagicMock())
    guard = MagicMock()
    unused: Any = MagicMock()
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
    model.engine.evaluate.return_value = LossTotal(3.0, 2.0, 2)
    losses, _, _ = loop_of(guard).evaluate(unused, data, [model], None, None)
    assert losses["lm loss"].item() == 1.5
    assert [call.kwargs["plan"] for call in guard.enter.mock_calls] == [
        "",
        "strategy 'a', plan aaaaaaaaaaaa",
        "",
        "strategy 'b', plan bbbbbbbbbbbb",
    ]


def test_losses_of_a_log_line_are_added_up_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(log_interval=2, data_parallel_size=1)
    monkeypatch.setattr(step, "get_args", lambda: args)
    shown = []

    def training_log(
        losses: Any, totals: Any, rate: float, iteration: int, scale: Any, *_: Any, **__: Any
    ) -> None:
        for name, loss in losses.items() if iteration > 0 else ():
            totals[name] = totals[name] + loss
            if iteration % args.log_interval == 0:
                shown.append(totals[name].item())
                totals[name] = torch.zeros(1, device="meta")  # instead of upstream's device

    log = loop_of(MagicMock()).around_training_log(training_log)
    totals: dict[str, torch.Tensor] = {}
    log({"lm loss": torch.tensor([float("nan")])}, totals, 1e-3, 0, 1.0, False, 1)
    assert not totals  # a skipped iteration leaves no loss of 0 for the line
    for iteration in range(1, 5):
        loss = torch.tensor([float(iteration)])
        log({"lm loss": loss}, totals, 1e-3, iteration, 1.0, False, 0)
    assert shown == [1 + 2, 3 + 4]
