"""Text for people: fields of log lines, the closing table, numbers with their units."""

from __future__ import annotations

import datetime
import math
import shlex
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.report_data import Run, Statistics

# Number of iterations whose median predicts the rest: enough to ignore an evaluation or a
# checkpoint, few enough to follow a change of strategy.
ETA_WINDOW = 20
TABLE_WIDTH = 72
LINE_WIDTH = 120


class EtaEstimator:
    """Remaining time of a run, from the median of its recent iterations.

    The first iteration of a process counts only as long as there is no other: it also builds models
    and groups.
    """

    def __init__(self) -> None:
        self._first_s: float | None = None
        self._recent_s: deque[float] = deque(maxlen=ETA_WINDOW)

    def observe(self, iteration_time_s: float) -> None:
        if self._first_s is None:
            self._first_s = iteration_time_s
        else:
            self._recent_s.append(iteration_time_s)

    def remaining_s(self, num_left: int) -> float | None:
        """Seconds that the iterations left will take; None without observations."""
        if self._first_s is None:
            return None
        return max(num_left, 0) * statistics.median(self._recent_s or [self._first_s])


def iteration_suffix(record: IterationRecord, eta_s: float | None) -> str:
    """Fields to append to upstream's log line, which ends in ``|``."""
    fields = [
        f"strategy: {record.strategy}",
        f"tokens: {tokens_text(record.num_tokens, record.trained_tokens)}",
        f"padding: {record.padding_fraction:.1%}",
        f"imbalance: {record.imbalance:.2f}",
        f"plan time (ms): {record.plan_time_s * 1e3:.1f}",
    ]
    if record.expert_load is not None:
        fields.append(f"expert load: {record.expert_load:.2f}")
    if record.peak_allocated_bytes is not None and record.peak_reserved_bytes is not None:
        fields.append(
            f"peak memory (GiB): {record.peak_allocated_bytes / 2**30:.2f} of "
            f"{record.peak_reserved_bytes / 2**30:.2f} reserved"
        )
    return " " + " | ".join([*fields, f"ETA {_eta_text(eta_s)}"]) + " |"


def compact_line(record: IterationRecord, num_iterations: int, eta_s: float | None) -> str:
    """A line of at most `LINE_WIDTH` columns instead of upstream's."""
    norm = "none" if record.grad_norm is None else f"{record.grad_norm:.3g}"
    before = (
        f"iteration {record.iteration:,}/{num_iterations:,} | loss {loss_text(record.lm_loss)} | "
        f"grad norm {norm} | {count_text(record.tokens_per_s)} tokens/s | "
    )
    after = f" | {_eta_text(eta_s)} left"
    room = LINE_WIDTH - len(before) - len(after)
    strategy = record.strategy
    return before + (strategy if len(strategy) <= room else strategy[: room - 1] + "…") + after


def _eta_text(eta_s: float | None) -> str:
    return "unknown" if eta_s is None else str(datetime.timedelta(seconds=math.ceil(eta_s)))


def closing_table(run: Run) -> str:
    """The table at the end of a run as plain text, followed by the path of the run folder and the
    command for its report, in unbroken lines that can be copied."""
    # Not above: only the last rank needs them, at the end of a run.
    from rich.table import Table

    from megatron.hydraulis.terminal import table_text

    table = Table(title="Training finished", title_justify="left", show_header=False)
    table.add_column("figure", style="bold")
    table.add_column("value", justify="right")
    for name, value in _closing_rows(run):
        table.add_row(name, value)
    return (
        f"{table_text(table, TABLE_WIDTH)}run folder: {run.folder}\n"
        f"next: hydraulis report {shlex.quote(str(run.folder))}\n"
    )


def _closing_rows(run: Run) -> Iterator[tuple[str, str]]:
    totals, prediction, used = run.numbers.totals, run.numbers.iterations, run.numbers.used

    def median_and_worst(name: str, middle: str = "") -> str:
        return f"{text_of(name, totals[middle or name])} ({text_of(name, totals[f'worst_{name}'])})"

    yield "iterations", f"{totals['first_iteration']} to {totals['last_iteration']}"
    if run.why_short is not None:
        yield f"of {run.num_train_iters}", run.why_short
    losses = loss_text(totals["first_loss"]), loss_text(totals["last_loss"])
    yield "lm loss, first → last", " → ".join(losses)
    yield "tokens", tokens_text(totals["num_tokens"], totals["trained_tokens"])
    if totals["num_untrained"]:
        yield "iterations without a trained token", count_text(totals["num_untrained"])
    yield "tokens/s", count_text(totals["tokens_per_s"])
    if totals["mfu_fraction"] is not None:
        yield "MFU", share_text(totals["mfu_fraction"])
    yield "padding", share_text(totals["padding_fraction"])
    yield "imbalance, median (worst)", median_and_worst("imbalance")
    if totals["expert_load"] is not None:
        yield "expert load, median (worst)", median_and_worst("expert_load")
    if len(used) == 1:
        yield "strategy", used[0]["name"]
    else:
        for strategy in used:
            yield f"iterations of {strategy['name']}", str(strategy["num_iterations"])
        yield "switches of strategy", str(totals["num_switches"])
    yield "plan wait, median (worst)", median_and_worst("plan_wait_s", "median_plan_wait_s")
    if totals["plan_gap"] is not None:
        yield "plan gap, median (worst)", median_and_worst("plan_gap")
    marked = ", ".join(f"{number} {status}" for status, number in totals["marked_plans"].items())
    yield "plans cut short", marked or "none"
    if prediction is not None:
        error, worst = share_text(prediction["error"]), share_text(prediction["worst_error"])
        yield "prediction error, median (worst)", f"{error} ({worst})"
    static = run.numbers.static
    if static is not None:
        yield f"gain over {static['name']} alone, predicted", gain_text(static)


_UNKNOWN = "–"
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")


def seconds_text(value_s: float | None) -> str:
    """'2.15 s', '430 ms' or '4.3 ms'."""
    if value_s is None:
        return _UNKNOWN
    if value_s >= 1.0:
        return f"{value_s:,.2f} s"
    return f"{value_s * 1e3:,.0f} ms" if value_s >= 0.0995 else f"{value_s * 1e3:,.1f} ms"


def loss_text(loss: float | None) -> str:
    """'2.3026', or 'none' if no token was trained."""
    return "none" if loss is None else f"{loss:.4f}"


def share_text(share: float | None) -> str:
    """'4.2%'."""
    if share is None:
        return _UNKNOWN
    return f"{share:.0%}" if share >= 0.995 else f"{share:.1%}"


def count_text(value: float | None) -> str:
    """'12,288'."""
    return _UNKNOWN if value is None else f"{value:,.0f}"


def tokens_text(num_tokens: int, trained_tokens: int) -> str:
    """'12,288', or '12,288 (3,072 trained)' if some are not."""
    trained = "" if trained_tokens == num_tokens else f" ({trained_tokens:,} trained)"
    return f"{num_tokens:,}{trained}"


def model_text(model: Mapping[str, Any]) -> str:
    """The sizes of a model in the configuration of a run, with – for unknown ones."""
    size = defaultdict(lambda: _UNKNOWN, model)
    text = (
        f"{size['num_layers']} layers, hidden {size['hidden_size']}, "
        f"ffn {size['ffn_hidden_size']}, {size['num_attention_heads']} heads of "
        f"{size['kv_channels']}, {size['num_query_groups']} query groups, vocabulary "
        f"{size['vocab_size_unpadded']} padded to {size['vocab_size']}"
    )
    if size["num_experts"] not in (_UNKNOWN, 0):
        text += (
            f", {size['num_experts']} experts of ffn {size['expert_ffn_hidden_size']} in "
            f"{size['num_expert_layers']} layers, {size['experts_per_token']} a token"
        )
        if size["shared_expert_ffn_hidden_size"] not in (_UNKNOWN, 0):
            text += f" and shared ones of ffn {size['shared_expert_ffn_hidden_size']}"
    parameters = size["num_parameters"]
    return text + (f": {parameters:,} parameters" if isinstance(parameters, int) else "")


def factor_text(value: float | None) -> str:
    """'2.5×'."""
    return _UNKNOWN if value is None else f"{value:.3g}×"


def factors_text(prediction: Statistics) -> str:
    """'1.2× (half of them 1.1× to 1.5×)': median and quartiles of measured / predicted time."""
    low, high = map(factor_text, prediction["half"])
    return f"{factor_text(prediction['factor'])} (half of them {low} to {high})"


def gain_text(static: Statistics) -> str:
    """'1.004× to 1.020×'."""
    return " to ".join(dict.fromkeys(f"{gain:.3f}×" for gain in static["gain"]))


def bytes_text(value: float | None) -> str:
    """'14.2 MB', in units of 1000."""
    if value is None:
        return _UNKNOWN
    for unit in _BYTE_UNITS:
        if value < 1000.0 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1000.0
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"


def ratio_text(value: float | None) -> str:
    """'1.07'."""
    return _UNKNOWN if value is None else f"{value:.2f}"


_TEXTS: dict[str, Callable[[Any], str]] = {
    "_per_s": count_text,
    "_s": seconds_text,
    "_bytes": bytes_text,
    "_tokens": count_text,
    "num_iterations": count_text,
    "_fraction": share_text,
    "_gap": share_text,
    "_loss": loss_text,
    "imbalance": ratio_text,
    "expert_load": ratio_text,
    "factor": factor_text,
}
"""The text of a statistic, by the end of its name, which is the unit."""


def text_of(name: str, value: Any) -> str:
    """The value of a named statistic with its unit; other values as they are."""
    for end, text in _TEXTS.items():
        if name.endswith(end):
            return text(value)
    return _UNKNOWN if value is None or value == "" else str(value)
