"""A run of the training program on a tiny GPT: its files and its output."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.hydraulis.loop import entry
from megatron.hydraulis.observability.records import IterationRecord, read_metrics
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.runtime.engine import RuntimeEngine
from tests.support.forked_job import JobOutcome
from tests.support.tiny_corpus import PADDED_VOCAB_SIZE
from tests.support.training_log import LogLine, log_lines

SEED = 77
SPLIT = "80,20,0"
TRAIN_ITERS = 4
BATCH_SIZE = 16
BATCH_TOKENS = 160
NUM_LAYERS, HIDDEN, FFN, NUM_HEADS, NUM_GROUPS, HEAD = 2, 32, 64, 4, 2, 8
PRINTED = 2e-6
"""Half a unit of the last of seven printed digits, relative, with room for fp32 rounding."""
ROUNDING = 1e-5
"""Relative difference of losses that fp32 sums in another order may make over a few steps."""

MAIN_FLAGS = (
    *("--lr-warmup-iters", "1", "--lr-warmup-init", "2e-3"),
    *("--eval-interval", "2", "--eval-iters", "2", "--log-timers-to-tensorboard"),
)


@dataclass(frozen=True)
class Run:
    """A job that ended, and its files."""

    outcome: JobOutcome
    run_dir: Path
    plan_dir: Path
    argv: list[str]

    @property
    def lines(self) -> list[LogLine]:
        return log_lines(self.outcome.stdout)

    @property
    def records(self) -> list[IterationRecord]:
        return read_metrics(self.run_dir)

    @property
    def losses(self) -> list[float]:
        return [record.lm_loss for record in self.records if record.lm_loss is not None]

    @property
    def plans(self) -> list[IterationPlan]:
        return [
            IterationPlan.from_json(json.loads(path.read_text()))
            for path in sorted(self.plan_dir.iterdir())
        ]

    def probed(self, rank: int) -> dict[str, Any]:
        """The values that `probing` printed on a rank."""
        found = re.search(r"^PROBE (.*)$", self.outcome.ranks[rank].stdout, re.MULTILINE)
        assert found is not None
        return json.loads(found[1])


Launch = Callable[..., Run]


def probing(argv: Sequence[str], hooks: entry.UserHooks | None = None) -> None:
    """The program, which prints what a rank's engine holds and its learning rates."""
    engines: list[RuntimeEngine] = []
    used: list[float] = []

    class ProbedEngine(RuntimeEngine):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            engines.append(self)

        def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
            used.append(self.optimizer.param_groups[0]["lr"])
            return super().forward_backward(*args, **kwargs)

    entry.main(argv, dataclasses.replace(hooks or entry.UserHooks(), engine=ProbedEngine))
    (engine,) = engines
    (strategy,) = engine.pool.strategies
    arena = engine.runtime_of(strategy.name).arena
    held = 0 if arena is None else sum(each.values.numel() for each in arena.bound.values())
    print("PROBE", json.dumps({"num_parameters_held": held, "learning_rates_used": used}))


def floating_point_operations(plan: IterationPlan) -> float:
    """Operations of an iteration of the tiny model: by tokens, and by squares of lengths."""
    kv_size = NUM_GROUPS * HEAD
    per_token = NUM_LAYERS * (HIDDEN * (HIDDEN + 2 * kv_size) + HIDDEN * HIDDEN + 3 * HIDDEN * FFN)
    per_token += HIDDEN * PADDED_VOCAB_SIZE
    per_square = NUM_LAYERS * NUM_HEADS * HEAD  # QKᵀ and PV, half of each by causality
    lengths = [
        length
        for replica in plan.replicas
        for micro_batch in replica.micro_batches
        for length in micro_batch.lengths
    ]
    squares = sum(length * length for length in lengths)
    # A multiply and an add each; the backward pass costs twice the forward pass.
    return 3 * 2 * (per_token * sum(lengths) + per_square * squares)
