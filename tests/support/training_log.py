"""Parsers for the output and files of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# Upstream's fields in upstream's order, then ours. The loss is missing if no iteration since
# the start was usable, the norm if the loss was not finite.
_LINE = re.compile(
    r"^ \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{6}\]"
    r" iteration +(?P<iteration>\d+)/ +(?P<train_iters>\d+) \|"
    r" consumed samples: +(?P<consumed_samples>\d+) \|"
    r" elapsed time per iteration \(ms\): (?P<elapsed_ms>[\d.]+) \|"
    r"( throughput per GPU \(TFLOP/s/GPU\): (?!0\.0 )[\d.]+ \|)?"
    r" learning rate: (?P<learning_rate>\S+) \|"
    r" global batch size: +(?P<global_batch_size>\d+) \|"
    r"( lm loss: (?P<lm_loss>\S+) \|)?"
    r" loss scale: 1\.0 \|"
    r"( grad norm: (?P<grad_norm>\S+) \|)?"
    r" number of skipped iterations: +(?P<num_skipped>\d+) \|"
    r" number of nan iterations: +(?P<num_nan>\d+) \|"
    r" strategy: (?P<strategy>[^|]+) \|"
    r" tokens: (?P<num_tokens>[\d,]+)(?: \((?P<trained_tokens>[\d,]+) trained\))? \|"
    r" padding: (?P<padding_percent>[\d.]+)% \|"
    r" imbalance: (?P<imbalance>[\d.]+) \|"
    r" plan time \(ms\): (?P<plan_time_ms>[\d.]+) \|"
    r" ETA (?P<eta>(\d+ days?, )?\d+:\d\d:\d\d) \|$",
    re.MULTILINE,
)
_VALIDATION = re.compile(
    r"^ validation loss at (?P<where>[^|]+) \| lm loss value: (?P<loss>\S+) \|", re.MULTILINE
)


@dataclass(frozen=True)
class LogLine:
    """One printed iteration."""

    iteration: int
    train_iters: int
    consumed_samples: int
    learning_rate: float
    global_batch_size: int
    lm_loss: float | None
    grad_norm: float | None
    num_skipped: int
    num_nan: int
    strategy: str
    num_tokens: int


def log_lines(output: str) -> list[LogLine]:
    """The iterations in a run's output; lines that lack a field do not count."""
    return [
        LogLine(
            iteration=int(found["iteration"]),
            train_iters=int(found["train_iters"]),
            consumed_samples=int(found["consumed_samples"]),
            learning_rate=float(found["learning_rate"]),
            global_batch_size=int(found["global_batch_size"]),
            lm_loss=None if found["lm_loss"] is None else float(found["lm_loss"]),
            grad_norm=None if found["grad_norm"] is None else float(found["grad_norm"]),
            num_skipped=int(found["num_skipped"]),
            num_nan=int(found["num_nan"]),
            strategy=found["strategy"],
            num_tokens=int(found["num_tokens"].replace(",", "")),
        )
        for found in _LINE.finditer(output)
    ]


def validation_losses(output: str) -> dict[str, float]:
    """'iteration 2' and the like -> loss per token."""
    return {found["where"].strip(): float(found["loss"]) for found in _VALIDATION.finditer(output)}


def scalars(run_dir: Path) -> dict[str, dict[int, float]]:
    """TensorBoard's scalars: tag -> step -> value."""
    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }
