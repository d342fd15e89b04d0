"""``hydraulis report``: a page about a run, from its folder."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import HydraulisError, listed
from megatron.hydraulis.observability.advice import Advice, advice_on
from megatron.hydraulis.observability.console import (
    bytes_text,
    count_text,
    factor_text,
    factors_text,
    gain_text,
    loss_text,
    model_text,
    seconds_text,
    share_text,
    tokens_text,
)
from megatron.hydraulis.observability.records import (
    REPORT_FILE_NAME,
    REPORT_PICTURES_FOLDER_NAME,
)
from megatron.hydraulis.observability.report_data import Run, read_run
from megatron.hydraulis.observability.report_figures import ReportFigure, figures_of
from megatron.hydraulis.observability.report_numbers import Totals

SECURITY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser refuses anything that the page would load."""

MAX_ROWS = 200
"""More rows of a table would make the page slow; --json has all of them."""
MAX_RANKS_NAMED = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Make a page about a run from its folder, also if the run was killed or is still going on: "
        "loss, tokens/s, strategies, predicted against measured times in s or ms, idle share, "
        "padding, plan gap and wait, bytes of regrouping, and what to do about them. The page "
        "needs no network; the same pictures are written next to it as PNG."
    )
    parser.add_argument("folder", metavar="RUN_DIR", type=Path, help="the run's --run-dir")
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="DIR",
        help="trace of the run, for measured times of single replicas; default: the one that the "
        "run's configuration names",
    )
    parser.add_argument(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help=f"folder for {REPORT_FILE_NAME} and {REPORT_PICTURES_FOLDER_NAME}/*.png; default: "
        "RUN_DIR",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the numbers behind the page as JSON, times in s, shares from 0 to 1, and "
        "write no files",
    )


def run(namespace: argparse.Namespace) -> int:
    """Writes the page and prints its path, or prints the numbers; returns the exit status.

    Raises HydraulisError for a folder without an iteration, or if a file cannot be written.
    """
    found = read_run(namespace.folder, trace=namespace.trace)
    if namespace.json:
        content = {
            "run_dir": str(found.folder),
            "notes": list(found.notes),
            "starts": sorted(found.starts),
            "strategies_of_pool": [dataclasses.asdict(strategy) for strategy in found.strategies],
            **dataclasses.asdict(found.numbers),
            "advice": [dataclasses.asdict(one) for one in advice_on(found)],
            "records": [record.to_json() for record in found.records],
        }
        print(json.dumps(_finite(content), indent=1, allow_nan=False))
        return 0
    page = _write(namespace.output_dir or namespace.folder, found)
    for note in found.notes:
        print(f"note: {note}")
    print(f"report: {page}")
    return 0


def _write(folder: Path, found: Run) -> Path:
    path, pictures = folder / REPORT_FILE_NAME, folder / REPORT_PICTURES_FOLDER_NAME
    figures = figures_of(found)
    page = make_page(found, figures)
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        # An earlier report may have had figures that this one does not have.
        for picture in pictures.glob("*.png"):
            picture.unlink()
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise HydraulisError(
            f"a report needs writable files: {error.filename or folder}: {error.strerror}; free "
            "space there or give another --output-dir"
        ) from error
    for figure in figures:
        figure.write_png(pictures)
    return path


def _finite(value: Any) -> Any:
    """The value with None for numbers that are not finite, because JSON has no NaN."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_page(run: Run, figures: Iterable[ReportFigure]) -> str:
    """The whole document, which refers to nothing outside itself."""
    title = f"Run report: {run.folder.resolve().name}"
    sections = (
        _header(run, title),
        _tiles(run),
        _static(run),
        _notes(run),
        _advice(advice_on(run)),
        _figures(figures),
        _strategy_table(run),
        _replica_table(run),
        _rank_table(run),
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


def _header(run: Run, title: str) -> str:
    totals = run.numbers.totals
    used = [row for row in run.numbers.strategies if row.num_iterations]
    what = used[0].notation if len(used) == 1 else f"{len(used)} strategies"
    ranks = [f"{run.config['num_ranks']} ranks"] if run.config.get("num_ranks") else []
    parts = [what, *ranks, f"{totals.num_iterations:,} iterations", f"{totals.num_tokens:,} tokens"]
    return (
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(" · ".join(parts))}</p></header>'
    )


def _tiles(run: Run) -> str:
    totals, prediction = run.numbers.totals, run.numbers.iterations
    gather, scatter = totals.gather_wait_fraction, totals.scatter_wait_fraction
    waits = "not counted in this run"
    if gather is not None:
        waits = f"waits {share_text(gather + (scatter or 0.0))} of the time"
    losses = "none"
    if totals.first_loss is not None:
        losses = f"{loss_text(totals.first_loss)} → {loss_text(totals.last_loss)}"
    factors = [row.traced.factor for row in run.numbers.replicas if row.traced is not None]
    ratio, error = "–", ""
    if prediction is not None:
        ratio, error = factor_text(prediction.factor), f"iterations: {factors_text(prediction)}"
    if factors:
        ratio = " to ".join(dict.fromkeys(map(factor_text, (min(factors), max(factors)))))
        error = f"by replica; {error}"
    reached = f"{totals.last_iteration:,}"
    if totals.num_train_iters is not None:
        reached += f" of {totals.num_train_iters:,}"
    time = f"{seconds_text(totals.iteration_time_s)} per iteration"
    sequences = f"of {count_text(totals.num_sequences)} sequences"
    if totals.trained_tokens < totals.num_tokens:
        sequences = f"of {count_text(totals.num_tokens)}, {sequences}"
    idle = ("Idle share, predicted", share_text(totals.idle_fraction))
    imbalance = f"imbalance {totals.imbalance:.2f}, worst {totals.worst_imbalance:.2f}"
    if totals.measured_idle_fraction is not None:
        idle = ("Idle share, measured", share_text(totals.measured_idle_fraction))
        imbalance = f"predicted {share_text(totals.idle_fraction)}, {imbalance}"
    worst_gap = f"worst {share_text(totals.worst_plan_gap)}"
    waited = f"{share_text(totals.plan_wait_fraction)} of the time, without first iterations"
    tiles = [
        ("Iterations", reached, f"from {totals.first_iteration:,} on"),
        ("Loss, first → last", losses, "mean by the weights of tokens"),
        ("Tokens/s", count_text(totals.tokens_per_s), time),
        ("Trained tokens", count_text(totals.trained_tokens), sequences),
        ("Measured / predicted", ratio, error),
        (*idle, imbalance),
        ("Padding", share_text(totals.padding_fraction), "of the computed tokens"),
        ("Plan gap, median", share_text(totals.plan_gap), worst_gap),
        ("Plan wait, total", seconds_text(totals.plan_wait_s), waited),
        ("Regrouping per iteration", bytes_text(totals.regroup_bytes), waits),
        *_expert_tile(totals),
    ]
    shown = "".join(
        f'<div class="card"><dt>{escape(name)}</dt>'
        f"<dd>{escape(value)}<small>{escape(more)}</small></dd></div>"
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{shown}</dl>'


def _expert_tile(totals: Totals) -> Iterator[tuple[str, str, str]]:
    if totals.expert_load is None:
        return
    more = [f"busiest expert / mean, worst {totals.worst_expert_load:.2f}"]
    if totals.balancing_loss is not None:
        more.append(f"balancing loss {totals.balancing_loss:.4f}")
    if totals.router_bias_range is not None:
        more.append("biases {:.3g} to {:.3g}".format(*totals.router_bias_range))
    yield "Expert load, median", f"{totals.expert_load:.2f}", ", ".join(more)


def _static(run: Run) -> str:
    static = run.numbers.static
    if static is None:
        return ""
    text = (
        f"The same batches under the best static strategy of the pool, {static.name}: predicted "
        f"{seconds_text(static.found_s)}, at least {seconds_text(static.bound_s)}. As planned: "
        f"predicted {seconds_text(static.chosen_s)}, a gain of {gain_text(static)}."
    )
    how = (
        f"Sums over {static.num_iterations:,} iterations of what the planner found for each "
        "strategy, with regrouping and optimizer. A strategy that is soon ruled out is not "
        "searched to the end; the lower number uses what is proved of it."
    )
    return (
        f'<section><h2>Gain</h2><div class="card"><p>{escape(text)}</p>'
        f'<p class="soft">{escape(how)}</p></div></section>'
    )


def _notes(run: Run) -> str:
    if not run.notes:
        return ""
    items = "".join(f"<li>{escape(note)}</li>" for note in run.notes)
    return f'<section><h2>Notes</h2><ul class="card notes">{items}</ul></section>'


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
        f"{one.svg()}"
        f"<figcaption>{escape(one.caption)}</figcaption></figure>\n"
        for one in figures
    )
    return f'<section><h2>Figures</h2><div class="figures">{shown}</div></section>'


def _strategy_table(run: Run) -> str:
    rows = [
        {
            "strategy": row.name,
            "replicas": row.notation,
            "iterations": count_text(row.num_iterations),
            "tokens/s": count_text(row.tokens_per_s),
            "measured": seconds_text(row.measured_s),
            "predicted": seconds_text(row.predicted_s),
            "factor": factor_text(row.factor),
            "overhead, predicted": seconds_text(row.overhead_s),
            "idle, predicted": share_text(row.idle_fraction),
            "regrouping": bytes_text(row.regroup_bytes),
        }
        for row in run.numbers.strategies
    ]
    return _section(
        "Strategies",
        "Times are medians over iterations, without the first of a process; factor: measured / "
        "predicted, the median. Overhead: what "
        "regrouping and optimizer add to the slowest replica's time. Regrouping: bytes that "
        "the logging rank receives and sends in an iteration.",
        rows,
        num_text=2,
    )


def _replica_table(run: Run) -> str:
    is_traced = any(row.traced is not None for row in run.numbers.replicas)
    rows = []
    for row in run.numbers.replicas:
        cells = {
            "strategy": row.strategy,
            "replica": str(row.replica),
            "scheme": row.scheme or "–",
            "ranks": _ranks(row.ranks),
        }
        if is_traced:
            cells |= {
                "traced: measured": seconds_text(row.traced_measured_s),
                "traced: predicted": seconds_text(row.traced_predicted_s),
                "factor": factor_text(None if row.traced is None else row.traced.factor),
                "idle, measured": share_text(row.measured_idle_fraction),
            }
        cells |= {
            "idle, predicted": share_text(row.idle_fraction),
            "predicted": seconds_text(row.predicted_s),
        }
        rows.append(cells)
    return _section(
        "Replicas",
        "Medians of a replica's time in an iteration. Idle: share of the makespans after its end."
        + (
            " Traced, factor, idle as measured: only the iterations of the trace."
            if is_traced
            else ""
        ),
        rows,
        num_text=4,
    )


def _rank_table(run: Run) -> str:
    rows = [
        {
            "rank": str(row.rank),
            "busy": share_text(row.busy_fraction),
            "wait": share_text(row.wait_fraction),
            "idle": share_text(row.idle_fraction),
            "regrouping": share_text(row.regroup_fraction),
        }
        for row in run.numbers.ranks
    ]
    return _section(
        "Ranks, measured",
        "Shares of the traced iterations' time. Regrouping: a transfer is in progress, possibly "
        "hidden behind work.",
        rows,
        num_text=1,
    )


def _global_batch(run: Run, hydraulis: Mapping[str, Any]) -> str:
    sizes = [size for _, size in run.setting("batch_sizes", "steps") or ()]
    if len(sizes) > 1:
        return f"{sizes[0]:,} to {sizes[-1]:,} {run.setting('batch_sizes', 'unit')}"
    if hydraulis.get("global_batch_tokens"):
        return f"{hydraulis['global_batch_tokens']:,} tokens"
    return f"{run.setting('settings', 'global_batch_size')} sequences"


def _configuration(run: Run) -> str:
    if not run.config:
        return ""
    hydraulis = run.config.get("hydraulis") or {}
    pairs: list[tuple[str, str]] = [
        ("ranks", f"{run.config.get('num_ranks')}, {run.config.get('ranks_per_node')} per node"),
        ("cost model", str(run.config.get("cost_model"))),
        ("model", model_text(run.config.get("model") or {})),
        ("global batch", _global_batch(run, hydraulis)),
        ("longest sequence", f"{run.setting('settings', 'seq_length')} tokens"),
        ("plans ahead", str(hydraulis.get("plan_ahead"))),
        ("seed", str(run.setting("settings", "seed"))),
        ("data", ", ".join(map(str, run.setting("settings", "data_path") or ["–"]))),
        ("run folder", str(run.folder)),
    ]
    for name, key in (("changed in the pool", "pool_changes"), ("not in the pool", "left_out")):
        pairs += [(name, str(line)) for line in run.config.get(key) or ()]
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    has_experts = any(replica.experts for each in run.strategies for replica in each.replicas)
    limits = _table(
        [
            {
                "strategy": strategy.name,
                "scheme": replica.scheme,
                "ranks": _ranks(replica.ranks),
                **({"experts a rank": replica.experts} if has_experts else {}),
                "most tokens of a micro-batch": count_text(replica.max_tokens),
            }
            for strategy in run.strategies
            for replica in strategy.replicas
        ],
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


def _iteration_table(run: Run) -> str:
    records = run.records[-MAX_ROWS:]
    has_experts = run.numbers.totals.expert_load is not None
    rows = [
        {
            "iteration": str(record.iteration),
            "strategy": record.strategy,
            "loss": loss_text(record.lm_loss),
            "tokens": tokens_text(record.num_tokens, record.trained_tokens),
            "measured": seconds_text(record.iteration_time_s),
            "predicted": seconds_text(record.predicted_time_s),
            "imbalance": f"{record.imbalance:.2f}",
            "padding": share_text(record.padding_fraction),
            "plan gap": share_text(record.plan_gap),
            "plan wait": seconds_text(record.plan_wait_s),
            "regrouping": bytes_text(record.regroup_bytes),
            **({"expert load": factor_text(record.expert_load)} if has_experts else {}),
        }
        for record in records
    ]
    what = "All" if len(records) == len(run.records) else f"The last {len(records)}"
    return (
        '<section><h2>Iterations</h2><div class="card"><details id="iterations">'
        f"<summary>{what} iterations</summary>{_table(rows, num_text=2)}"
        "</details></div></section>"
    )


def _section(title: str, text: str, rows: Sequence[Mapping[str, str]], *, num_text: int) -> str:
    """A table under a title and a text; nothing if the table has no rows."""
    if not rows:
        return ""
    if len(rows) > MAX_ROWS:
        text += f" {len(rows) - MAX_ROWS} more are not shown here; --json has them."
    return (
        f'<section><h2>{escape(title)}</h2><div class="card"><p class="soft">{escape(text)}</p>'
        f"{_table(rows, num_text=num_text)}</div></section>"
    )


def _table(rows: Sequence[Mapping[str, str]], *, num_text: int) -> str:
    """The first `MAX_ROWS` rows; the first ``num_text`` columns are text, the others numbers."""

    def line(values: Iterable[str], tag: str) -> str:
        cells = [
            f'<{tag} class="text">{escape(value)}</{tag}>'
            if place < num_text
            else f"<{tag}>{escape(value)}</{tag}>"
            for place, value in enumerate(values)
        ]
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row.values(), "td") for row in rows[:MAX_ROWS])
    return (
        f'<div class="scroll"><table><thead>{line(rows[0] if rows else (), "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "–"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return listed(ranks, most=MAX_RANKS_NAMED)


STYLE = """
:root {
  color-scheme: light dark;
  --font: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif;
  --page: #f6f8fa; --card: #ffffff; --ink: #24292f; --soft: #57606a; --muted: #8b949e;
  --line: #d0d7de; --grid: #d8dee4; --idle: #e4e8ec; --act: #9a4a00; --act-back: #fff4e5;
  --series-0: #0072b2; --series-1: #e69f00; --series-2: #009e73; --series-3: #cc79a7;
  --series-4: #d55e00; --series-5: #56b4e9;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0d1117; --card: #161b22; --ink: #e6edf3; --soft: #a4aeb8; --muted: #7d8590;
    --line: #30363d; --grid: #2f3640; --idle: #343b44; --act: #ffb86b; --act-back: #2b2114;
    --series-0: #4aa8e0; --series-1: #f0b429; --series-2: #2fc79a; --series-3: #e29ac4;
    --series-4: #f5884a; --series-5: #8fd0f5;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 var(--font); overflow-wrap: anywhere;
}
main { max-width: 1240px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 4px; }
h2 { font-size: 1.2rem; margin: 36px 0 12px; }
h3 { font-size: 1rem; margin: 0 0 8px; }
p { margin: 0 0 8px; }
.soft, figcaption { color: var(--soft); }
code { font-family: ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace;
  font-size: 0.92em; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 14px 16px; }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(205px, 1fr));
  margin: 20px 0 0; }
.tiles dt { color: var(--soft); font-size: 0.85rem; }
.tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dd small { display: block; font-size: 0.82rem; font-weight: 400; color: var(--soft); }
ul.plain { list-style: none; margin: 0; padding: 0; display: grid; gap: 10px; }
.advice .finding { font-weight: 600; }
.advice .act { border-left: 4px solid var(--act); background: var(--act-back); }
.advice .act .finding { color: var(--act); }
.figures { display: grid; gap: 16px; grid-template-columns: repeat(2, minmax(0, 1fr)); }
figure { margin: 0; display: flex; flex-direction: column; }
figure svg { display: block; width: 100%; height: auto; max-width: 640px; margin: 0 auto; }
figcaption { font-size: 0.88rem; margin-top: 8px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 0.92rem;
  font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; }
th.text, td.text { text-align: left; }
th:first-child, td:first-child { padding-left: 0; }
tbody tr:last-child td { border-bottom: 0; }
dl.settings { display: grid; grid-template-columns: minmax(150px, max-content) 1fr; gap: 4px 20px;
  margin: 0; }
dl.settings dt { color: var(--soft); }
dl.settings dd { margin: 0; }
ul.notes { padding-left: 34px; }
details { margin-top: 14px; }
section > .card > details:only-child { margin-top: 0; }
summary { cursor: pointer; }
details pre { font-size: 0.82rem; white-space: pre-wrap; margin: 8px 0 0; }
@media (max-width: 760px) {
  main { padding: 16px 12px 32px; }
  .figures { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px; }
  .tiles dd { font-size: 1.05rem; }
  .card { padding: 12px; }
  dl.settings { grid-template-columns: 1fr; gap: 0; }
  dl.settings dd { margin-bottom: 8px; }
}
@media print { body { background: none; } .card { break-inside: avoid; } }
"""
