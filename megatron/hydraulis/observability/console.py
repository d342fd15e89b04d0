"""What a person reads while a run goes on, and when it ends."""

from __future__ import annotations

import datetime
import io
import itertools
import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.observability.records import IterationRecord

# Iterations whose median predicts the rest: enough to pass over an evaluation or a checkpoint,
# few enough to follow a change of strategy.
ETA_WINDOW = 20
TABLE_WIDTH = 72


class EtaEstimator:
    """Time left in a run, from the median of its recent iterations.

    The first iteration of a process counts only while it is the only one: it also builds models
    and groups and would double the estimate of a short run.
    """

    def __init__(self, num_iterations: int, *, window: int = ETA_WINDOW) -> None:
        """`num_iterations` is the iteration the run ends with (upstream's ``--train-iters``)."""
        if window < 1:
            raise ConfigurationError(
                f"an ETA needs at least 1 iteration, not a window of {window}; use {ETA_WINDOW}"
            )
        self._num_iterations = num_iterations
        self._recent_s: deque[float] = deque(maxlen=window)
        self._has_only_first = False

    def observe(self, iteration_time_s: float) -> None:
        """Takes note of the measured time of the iteration that has just ended."""
        if self._has_only_first:
            self._recent_s.clear()
            self._has_only_first = False
        elif not self._recent_s:
            self._has_only_first = True
        self._recent_s.append(iteration_time_s)

    def remaining_s(self, iteration: int) -> float | None:
        """Seconds from the end of `iteration` to the end of the run; None before any was seen."""
        if not self._recent_s:
            return None
        num_left = max(self._num_iterations - iteration, 0)
        return num_left * statistics.median(self._recent_s)


def iteration_suffix(record: IterationRecord, eta_s: float | None) -> str:
    """Fields to append to upstream's log line, which ends in ``|``: blank, fields, ``|``."""
    fields = [
        f"strategy: {record.strategy}",
        f"tokens: {record.num_tokens:,}",
        f"padding: {record.padding_fraction:.1%}",
        f"imbalance: {record.imbalance:.2f}",
        f"plan time (ms): {record.plan_time_s * 1e3:.1f}",
    ]
    if record.peak_allocated_bytes is not None and record.peak_reserved_bytes is not None:
        allocated, reserved = (
            num_bytes / 2**30
            for num_bytes in (record.peak_allocated_bytes, record.peak_reserved_bytes)
        )
        fields.append(f"peak memory (GiB): {allocated:.2f} of {reserved:.2f} reserved")
    fields.append(f"ETA {'unknown' if eta_s is None else _duration(eta_s)}")
    return " " + " | ".join(fields) + " |"


def closing_table(records: Sequence[IterationRecord], run_dir: str | Path) -> str:
    """The table a run ends with, as plain text, and beneath it the run folder's path.

    Throughput, plan wait and prediction error leave out the first iteration, which also builds
    models and groups and starts the planner, unless there is no other. The path stands on a
    line of its own, unbroken, so that it can be copied.
    """
    table = Table(title="Training finished", title_justify="left", show_header=False)
    table.add_column("figure", style="bold")
    table.add_column("value", justify="right")
    for name, value in _closing_rows(records):
        table.add_row(name, value)
    text = io.StringIO()
    Console(file=text, width=TABLE_WIDTH, force_terminal=False, highlight=False).print(table)
    return f"{text.getvalue()}run folder: {run_dir}\n"


def _closing_rows(records: Sequence[IterationRecord]) -> list[tuple[str, str]]:
    if not records:
        return [("iterations", "0")]
    steady = records[1:] or records
    num_tokens = sum(record.num_tokens for record in records)
    num_padding = sum(record.num_padding for record in records)
    steady_time_s = sum(record.iteration_time_s for record in steady)
    steady_tokens = sum(record.num_tokens for record in steady)
    imbalances = [record.imbalance for record in records]
    waits_ms = [record.plan_wait_s * 1e3 for record in steady]
    first, last = records[0], records[-1]
    return [
        ("iterations", f"{first.iteration} to {last.iteration}"),
        ("lm loss, first → last", f"{_loss(first.lm_loss)} → {_loss(last.lm_loss)}"),
        ("trained tokens", f"{num_tokens:,}"),
        ("tokens/s", f"{steady_tokens / steady_time_s:,.0f}" if steady_time_s > 0.0 else "–"),
        ("padding", f"{num_padding / max(num_tokens + num_padding, 1.0):.1%}"),
        (
            "imbalance, median (worst)",
            f"{statistics.median(imbalances):.2f} ({max(imbalances):.2f})",
        ),
        *_strategy_rows(records),
        (
            "plan wait, median (worst)",
            f"{statistics.median(waits_ms):.1f} ms ({max(waits_ms):.1f} ms)",
        ),
        *_plan_rows(records),
        *_prediction_rows(steady),
    ]


def _prediction_rows(steady: Sequence[IterationRecord]) -> list[tuple[str, str]]:
    """How far measured iteration times lie from predicted ones."""
    errors = [r.prediction_error for r in steady if r.prediction_error is not None]
    if not errors:
        return []
    text = f"{statistics.median(errors):.1%} ({max(errors):.1%})"
    return [("prediction error, median (worst)", text)]


def _strategy_rows(records: Sequence[IterationRecord]) -> list[tuple[str, str]]:
    """Iterations by strategy, the most used first, and how often one followed another."""
    counts = Counter(record.strategy for record in records)
    if len(counts) == 1:
        return [("strategy", next(iter(counts)))]
    switches = sum(one.strategy != other.strategy for one, other in itertools.pairwise(records))
    return [
        *((f"iterations of {name}", str(count)) for name, count in counts.most_common()),
        ("switches of strategy", str(switches)),
    ]


def _plan_rows(records: Sequence[IterationRecord]) -> list[tuple[str, str]]:
    gaps = [record.plan_gap for record in records if record.plan_gap is not None]
    rows = []
    if gaps:
        text = f"{statistics.median(gaps):.1%} ({max(gaps):.1%})"
        rows.append(("plan gap, median (worst)", text))
    num_before = 0
    marked: Counter[str] = Counter()
    for record in records:
        marked[record.plan_status] += record.num_marked_plans > num_before
        num_before = record.num_marked_plans
    told = ", ".join(f"{count} {status}" for status, count in marked.most_common() if count)
    return [*rows, ("plans cut short", told or "none")]


def _loss(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _duration(seconds: float) -> str:
    return str(datetime.timedelta(seconds=math.ceil(seconds)))
