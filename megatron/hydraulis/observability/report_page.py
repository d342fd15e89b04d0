"""The page of a report: HTML out of numbers, figures and advice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from megatron.hydraulis.observability.report_advice import Advice
from megatron.hydraulis.observability.report_figures import ReportFigure
from megatron.hydraulis.observability.report_numbers import Numbers
from megatron.hydraulis.observability.report_run import Run
from megatron.hydraulis.observability.report_style import STYLE
from megatron.hydraulis.observability.report_svg import inline_svg
from megatron.hydraulis.observability.report_text import (
    count,
    factor,
    num_bytes,
    percent,
    seconds,
)

__all__ = ["make_page"]

SECURITY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses whatever the page would load."""

MAX_ROWS = 200
"""Of a table; a page with more is slow, and --json has them all."""
MAX_RANKS_NAMED = 16


def make_page(
    run: Run,
    numbers: Numbers,
    advice: Sequence[Advice],
    figures: Iterable[ReportFigure],
) -> str:
    """The whole document; it refers to nothing outside itself."""
    title = f"Run report: {run.folder.resolve().name}"
    sections = (
        _header(run, numbers, title),
        _tiles(run, numbers),
        _notes(run),
        _advice(advice),
        _figures(figures),
        _strategy_table(numbers),
        _replica_table(numbers),
        _rank_table(numbers),
        _configuration(run),
        _iteration_table(run),
    )
    body = "\n".join(section for section in sections if section)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{SECURITY}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(run: Run, numbers: Numbers, title: str) -> str:
    totals = numbers.totals
    used = [row for row in numbers.strategies if row.num_iterations]
    what = used[0].notation if len(used) == 1 else f"{len(used)} strategies"
    ranks = run.config.get("num_ranks")
    parts = [what, f"{totals.num_iterations:,} iterations", f"{count(totals.num_tokens)} tokens"]
    if ranks:
        parts.insert(1, f"{ranks} ranks")
    return (
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(" · ".join(parts))}</p></header>'
    )


def _tiles(run: Run, numbers: Numbers) -> str:
    totals, prediction = numbers.totals, numbers.iterations
    wanted = "" if totals.num_train_iters is None else f" of {totals.num_train_iters:,}"
    waits = (
        "not counted in this run"
        if totals.gather_wait_fraction is None
        else f"waits {percent(totals.gather_wait_fraction + (totals.scatter_wait_fraction or 0.0))}"
        " of the time"
    )
    losses = "none"
    if totals.first_loss is not None and totals.last_loss is not None:
        losses = f"{totals.first_loss:.4f} → {totals.last_loss:.4f}"
    tiles = [
        ("Iterations", f"{totals.last_iteration:,}{wanted}", f"from {totals.first_iteration:,} on"),
        ("Loss, first → last", losses, "per trained token"),
        (
            "Tokens/s",
            count(totals.tokens_per_s),
            f"{seconds(totals.iteration_time_s)} an iteration",
        ),
        (
            "Trained tokens",
            count(totals.num_tokens),
            f"of {count(totals.num_sequences)} sequences",
        ),
        (
            "Measured / predicted",
            "–" if prediction is None else factor(prediction.factor),
            ""
            if prediction is None
            else f"error {percent(prediction.error)}, beyond the factor "
            f"{percent(prediction.error_beyond_factor)}",
        ),
        (
            "Idle share, predicted",
            percent(totals.idle_fraction),
            f"imbalance {totals.imbalance:.2f}, worst {totals.worst_imbalance:.2f}",
        ),
        ("Padding", percent(totals.padding_fraction), "of the tokens run"),
        (
            "Plan gap, median",
            percent(totals.plan_gap),
            f"worst {percent(totals.worst_plan_gap)}",
        ),
        (
            "Plan wait",
            seconds(totals.plan_wait_s),
            f"{percent(totals.plan_wait_fraction)} of the time",
        ),
        ("Regrouping, an iteration", num_bytes(totals.regroup_bytes), waits),
    ]
    shown = "".join(
        f'<div class="card"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{shown}</dl>'


def _notes(run: Run) -> str:
    if not run.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f'<section><h2>Before you read on</h2><ul class="card notes">{items}</ul></section>'


def _advice(advice: Sequence[Advice]) -> str:
    items = "".join(
        f'<li class="card {one.kind}"><p class="finding">{escape(one.finding)}</p>'
        f"<p>{escape(one.action)}</p></li>"
        for one in advice
    )
    return f'<section class="advice"><h2>What to do</h2><ul class="plain">{items}</ul></section>'


def _figures(figures: Iterable[ReportFigure]) -> str:
    shown = "".join(
        f'<figure class="card" id="{one.name}"><h3>{escape(one.title)}</h3>'
        f"{inline_svg(one.figure, one.name, escape(one.title))}"
        f"<figcaption>{escape(one.caption)}</figcaption></figure>\n"
        for one in figures
    )
    return f'<section><h2>Figures</h2><div class="figures">{shown}</div></section>'


def _strategy_table(numbers: Numbers) -> str:
    columns = (
        *("strategy", "replicas", "iterations", "tokens/s", "predicted", "measured"),
        *("idle, predicted", "regrouping"),
    )
    rows = [
        (
            row.name,
            row.notation,
            count(row.num_iterations),
            count(row.tokens_per_s),
            seconds(row.predicted_s),
            seconds(row.measured_s),
            percent(row.idle_fraction),
            num_bytes(row.regroup_bytes),
        )
        for row in numbers.strategies
    ]
    return _section(
        "Strategies",
        "Times are medians of an iteration, the first of a process left out. Regrouping: bytes "
        "that the rank that logs receives and sends in an iteration.",
        _table(columns, rows, num_text=2),
    )


def _replica_table(numbers: Numbers) -> str:
    is_traced = any(row.traced is not None for row in numbers.replicas)
    columns = ["strategy", "replica", "scheme", "ranks", "predicted", "idle, predicted"]
    if is_traced:
        columns += ["traced: predicted", "measured", "factor"]
    rows = []
    for row in numbers.replicas[:MAX_ROWS]:
        cells = [
            row.strategy,
            str(row.replica),
            row.scheme or "–",
            _ranks(row.ranks),
            seconds(row.predicted_s),
            percent(row.idle_fraction),
        ]
        if is_traced:
            cells += [
                seconds(row.traced_predicted_s),
                seconds(row.traced_measured_s),
                factor(None if row.traced is None else row.traced.factor),
            ]
        rows.append(cells)
    return _section(
        "Replicas",
        "Medians of a replica's time in an iteration. Idle: share of the makespans that it is done "
        "before." + (" Traced: the iterations of the trace alone." if is_traced else ""),
        _table(columns, rows, num_text=4),
        num_left_out=len(numbers.replicas) - len(rows),
    )


def _rank_table(numbers: Numbers) -> str:
    if not numbers.ranks:
        return ""
    rows = [
        (
            str(row.rank),
            percent(row.busy_fraction),
            percent(row.wait_fraction),
            percent(row.idle_fraction),
            percent(row.regroup_fraction),
        )
        for row in numbers.ranks[:MAX_ROWS]
    ]
    return _section(
        "Ranks, measured",
        "Shares of the traced iterations' time. Regrouping: something is on its way, which work "
        "may hide.",
        _table(("rank", "busy", "wait", "idle", "regrouping"), rows, num_text=1),
        num_left_out=len(numbers.ranks) - len(rows),
    )


def _configuration(run: Run) -> str:
    if not run.config:
        return ""
    hydraulis = run.config.get("hydraulis") or {}
    pairs: list[tuple[str, str]] = [
        ("ranks", f"{run.config.get('num_ranks')}, {run.config.get('ranks_per_node')} a node"),
        ("cost model", str(run.config.get("cost_model"))),
        ("model", _model(run.config.get("model") or {})),
        (
            "global batch",
            f"{hydraulis['global_batch_tokens']:,} tokens"
            if hydraulis.get("global_batch_tokens")
            else f"{run.setting('settings', 'global_batch_size')} sequences",
        ),
        ("longest sequence", f"{run.setting('settings', 'seq_length')} tokens"),
        ("plans ahead", str(hydraulis.get("plan_ahead"))),
        ("seed", str(run.setting("settings", "seed"))),
        ("data", ", ".join(map(str, run.setting("settings", "data_path") or ["–"]))),
        ("run folder", str(run.folder)),
    ]
    pairs += [("left out of the pool", str(line)) for line in run.config.get("left_out") or ()]
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    limits = _table(
        ("strategy", "scheme", "ranks", "most tokens of a micro-batch"),
        [
            (shape.name, replica.scheme, _ranks(replica.ranks), count(replica.max_tokens))
            for shape in run.strategies
            for replica in shape.replicas
        ][:MAX_ROWS],
        num_text=3,
    )
    settings = {
        "hydraulis": hydraulis,
        "explicit options": run.config.get("explicit_options"),
        "settings": run.config.get("settings"),
    }
    return (
        f'<section><h2>What was run</h2><div class="card"><dl class="settings">{shown}</dl>'
        f"<details><summary>Pool, with limits</summary>{limits}</details>"
        "<details><summary>All settings</summary>"
        f"<pre>{escape(json.dumps(settings, indent=1))}</pre></details></div></section>"
    )


def _model(model: Mapping[str, Any]) -> str:
    parameters = model.get("num_parameters")
    return (
        f"{model.get('num_layers')} layers, hidden {model.get('hidden_size')}, ffn "
        f"{model.get('ffn_hidden_size')}, {model.get('num_attention_heads')} heads, vocabulary "
        f"{model.get('vocab_size_unpadded')}"
        + (f"; {parameters:,} parameters" if isinstance(parameters, int) else "")
    )


def _iteration_table(run: Run) -> str:
    records = run.records[-MAX_ROWS:]
    columns = (
        *("iteration", "strategy", "loss", "tokens", "measured", "predicted", "imbalance"),
        *("padding", "plan gap", "plan wait", "regrouping"),
    )
    rows = [
        (
            str(record.iteration),
            record.strategy,
            "none" if record.lm_loss is None else f"{record.lm_loss:.4f}",
            count(record.num_tokens),
            seconds(record.iteration_time_s),
            seconds(record.predicted_time_s),
            f"{record.imbalance:.2f}",
            percent(record.padding_fraction),
            percent(record.plan_gap),
            seconds(record.plan_wait_s),
            num_bytes(record.regroup_bytes),
        )
        for record in records
    ]
    what = "All" if len(records) == len(run.records) else f"The last {len(records)}"
    return (
        '<section><h2>Iterations</h2><div class="card"><details id="iterations">'
        f"<summary>{what} iterations</summary>{_table(columns, rows, num_text=2)}"
        "</details></div></section>"
    )


def _section(title: str, text: str, table: str, *, num_left_out: int = 0) -> str:
    more = f" {num_left_out} more are left out here; --json has them." if num_left_out else ""
    return (
        f'<section><h2>{escape(title)}</h2><div class="card"><p class="soft">{escape(text + more)}'
        f"</p>{table}</div></section>"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int) -> str:
    """The first ``num_text`` columns are text, the others figures."""

    def cells(values: Sequence[str], tag: str) -> str:
        return "".join(
            f'<{tag} class="text">{escape(value)}</{tag}>'
            if place < num_text
            else f"<{tag}>{escape(value)}</{tag}>"
            for place, value in enumerate(values)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table><thead><tr>{cells(columns, "th")}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "–"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    more = f" and {len(ranks) - MAX_RANKS_NAMED} more" if len(ranks) > MAX_RANKS_NAMED else ""
    return ", ".join(map(str, ranks[:MAX_RANKS_NAMED])) + more
