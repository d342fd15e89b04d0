"""What replaces functions of upstream's loop."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.frozen import NOTHING_FROZEN
from megatron.hydraulis.loop import step
from megatron.hydraulis.loop.checkpoints import LoopCounters
from megatron.hydraulis.loop.step import RunParts, TrainingLoop, count_skipped
from megatron.hydraulis.runtime.outcome import LossTotal, StepOutcome
from tests.unit.observability.run_folders import make_record


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


@dataclass
class Step:
    """One call of train_step with parts that only count."""

    outcomes: list[StepOutcome]
    """What each run of the batch returns."""
    num_sequences: int = 3
    args: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(
            consumed_train_samples=100, global_batch_size=8, train_iters=10, train_samples=None
        )
    )
    loop: TrainingLoop = field(init=False)
    parts: MagicMock = field(default_factory=MagicMock)
    engine: MagicMock = field(default_factory=MagicMock)
    data: MagicMock = field(default_factory=MagicMock)
    scheduler: MagicMock = field(default_factory=MagicMock)

    def run(self, monkeypatch: pytest.MonkeyPatch, iteration: int = 4) -> tuple[Any, ...]:
        monkeypatch.setattr(step, "get_args", lambda: self.args)
        monkeypatch.setattr(TrainingLoop, "_record", lambda *_: None)
        resolved: Any = MagicMock()
        resolved.hydraulis.skip_nan_iterations = False
        resolved.sizes = BatchSizes.constant(num_sequences=8)
        self.parts.trace = self.parts.metrics = None
        self.loop = TrainingLoop(resolved, self.parts, MagicMock())
        self.parts.checkpoints.counters = LoopCounters()
        self.engine.optim_step.side_effect = self.outcomes
        self.data.publish_ready.return_value = "next"
        self.data.next_batch.return_value.batch.num_sequences = self.num_sequences
        model: Any = MagicMock(engine=self.engine)
        optimizer: Any = MagicMock()
        return self.loop.train_step(
            MagicMock(), self.data, [model], optimizer, self.scheduler, None, None, iteration
        )


def outcome(*, updated: bool = True, **more: Any) -> StepOutcome:
    weight = 2.0 if updated else 0.0
    return StepOutcome(LossTotal(3.0, weight, 2), 0.5 if updated else None, updated, (), **more)


def test_a_step_counts_its_sequences_and_advances_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Step([outcome()])
    losses, skipped, *_, norm, _, _ = made.run(monkeypatch)
    assert (losses["lm loss"].item(), skipped, norm) == (1.5, 0, 0.5)
    made.scheduler.step.assert_called_once_with(increment=3)
    # Upstream adds the nominal 8 sequences of a batch to it.
    assert made.args.consumed_train_samples + 8 == 100 + 3


def test_an_iteration_without_trained_tokens_leaves_the_schedule(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Step([outcome(updated=False)])
    losses, skipped, *_ = made.run(monkeypatch)
    assert (losses, skipped) == ({}, 1)
    made.scheduler.step.assert_not_called()


def test_a_batch_that_ran_out_of_memory_is_planned_and_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = outcome(updated=False, num_ranks_without_memory=1)
    made = Step([failed, outcome()])
    assert made.run(monkeypatch)[1] == 0
    made.parts.memory.lower_after.assert_called_once_with(5, failed)
    assert made.data.next_batch.call_count == 2
    assert made.engine.forward_backward.call_count == 2
    made.scheduler.step.assert_called_once_with(increment=3)


@pytest.mark.parametrize(("iteration", "next_strategy"), [(8, "next"), (9, None)])
def test_the_next_strategy_is_published_except_after_the_last_iteration(
    iteration: int, next_strategy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Step([outcome()])
    made.run(monkeypatch, iteration)
    assert made.engine.optim_step.call_args.kwargs["next_strategy"] == next_strategy


def test_a_difference_to_upstreams_count_of_samples_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Step([outcome(), outcome()])
    made.run(monkeypatch)
    with pytest.raises(HydraulisError, match="counted 95 consumed samples but the plans hold 103"):
        made.loop.train_step(
            MagicMock(), made.data, [MagicMock()], MagicMock(), made.scheduler, None, None, 5
        )


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


def test_many_iterations_in_a_row_without_a_trained_token_are_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "UNTRAINED_UNTIL_WARNING", 3)
    monkeypatch.setattr(step.dist, "get_rank", lambda: 0)
    counters = LoopCounters()
    corpus: Any = SimpleNamespace(prefixes=("text",))
    for iteration, updated in enumerate([False, False, True, False, False, False, False], start=11):
        unused: Any = None
        count_skipped(iteration, unused, outcome(updated=updated), corpus, counters, num_allowed=0)
    (line,) = capsys.readouterr().out.splitlines()
    assert "iterations 14 to 16 trained no token" in line
    assert "text.weights" in line
    assert counters == LoopCounters(num_untrained_in_a_row=4)


@pytest.mark.parametrize("console", ["megatron", "compact"])
def test_the_line_of_an_iteration_is_upstreams_or_ours(
    monkeypatch: pytest.MonkeyPatch, console: str
) -> None:
    args = SimpleNamespace(log_interval=1, data_parallel_size=1, train_iters=4)
    monkeypatch.setattr(step, "get_args", lambda: args)
    resolved: Any = SimpleNamespace(
        hydraulis=MagicMock(console=console),
        sizes=BatchSizes.constant(num_sequences=8),
        shape=SimpleNamespace(window=None),
        frozen=NOTHING_FROZEN,
    )
    unused: Any = MagicMock()
    loop = TrainingLoop(resolved, RunParts(None, None, unused, None, unused, MagicMock()), unused)
    loop._interval.add(make_record(2, num_tokens=2500), (3,))
    printed: list[str] = []
    show = loop.around_print_rank_last(printed.append)
    upstreams = " iteration 2/ 4 | elapsed time per iteration (ms): 1.0 |"

    def training_log(*_: Any, **__: Any) -> None:
        show(upstreams)
        show("(after 2 iterations) memory")

    show(upstreams)  # of another function
    loop.around_training_log(training_log)({}, {}, 1e-3, 2, 1.0, False, 0)
    before, line, after = printed
    assert (before, after) == (upstreams, "(after 2 iterations) memory")
    if console == "megatron":
        assert line.startswith(f"{upstreams} strategy: tp2+2*tp1 | tokens: 2,500 | ")
    else:
        assert line.startswith("iteration 2/4 | loss 8.7500 | grad norm 1.5 | 2,000 tokens/s | ")
