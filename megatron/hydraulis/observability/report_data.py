"""A run, read from its folder, and the numbers that are derived from its records.

The closing table, ``summary.png``, the report and its advice are all made from a `Run`.

Statistics are dicts by name. The end of a name is the unit: ``_s``, ``_bytes``, ``_fraction`` (0 to
1), ``_per_s``, ``factor`` (measured / predicted time); None is unknown. docs/metrics.md defines
them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.observability.records import (
    CONFIG_FILE_NAME,
    HAS_ENDED,
    METRICS_FILE_NAME,
    IterationRecord,
    by_iteration,
    read_lines,
    read_metrics,
)
from megatron.hydraulis.observability.trace import (
    MERGED_FILE_NAME,
    Spans,
    rank_files,
    rank_shares,
    read_trace,
)

Statistics = dict[str, Any]

TRACE_FOLDER_NAME = "trace"
"""Subfolder that is searched for a trace if there is no configuration that could name one."""

MAX_TRACE_BYTES = 256 * 2**20
"""A larger trace would take longer to read than someone waits for a report."""

_EARLIER_FOLDER = re.compile(r"earlier\.(\d+)")
_MS_PER_S = 1e3
_OBJECTS = ("model", "settings", "hydraulis", "batch_sizes")
"""Sections of the configuration."""

MIN_ITERATIONS_TO_COMPARE = 9
"""The beginning of a run and its end are compared by three iterations each, or more."""
_WHY_SHORT: dict[object, str] = {
    True: "an --exit option ended it",
    False: "it was interrupted or is still running",
}
"""The reason for each value of `HAS_ENDED`, which earlier versions did not write."""
_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class PoolReplica:
    """A replica in the configuration."""

    scheme: str
    ranks: tuple[int, ...]
    max_tokens: int | None
    """Most tokens of a micro-batch."""
    experts: str = ""
    """Experts of a layer on each rank, in words; empty without experts, and in configurations of
    versions that did not write it."""


@dataclass(frozen=True, slots=True)
class PoolStrategy:
    """A strategy in the configuration."""

    name: str
    notation: str
    replicas: tuple[PoolReplica, ...]
    overhead_s: float | None
    """Predicted; None in configurations of versions that did not write it."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run."""

    folder: Path
    records: tuple[IterationRecord, ...]
    """One or more records, in ascending order of iterations."""
    starts: frozenset[int]
    """The first iteration of every process that trained: it also builds models and groups."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """``config.json``; empty if it is missing or unreadable."""
    strategies: tuple[PoolStrategy, ...] = ()
    """The pool, from the configuration."""
    spans: Spans = field(default_factory=Spans)
    """The trace; empty if there is none."""
    notes: tuple[str, ...] = ()
    """Sentences that a reader must know to interpret the figures."""

    def setting(self, section: str, name: str) -> Any:
        """A value from a section of the configuration; None if it is missing."""
        values = self.config.get(section)
        return values.get(name) if isinstance(values, Mapping) else None

    @property
    def num_train_iters(self) -> int | None:
        """The iteration that the run is to end with; None if unknown."""
        value = self.setting("settings", "train_iters")
        return value if isinstance(value, int) else None

    @property
    def why_short(self) -> str | None:
        """Says why the last record is not that of `num_train_iters`; None if it is, or unknown."""
        wanted = self.num_train_iters
        if wanted is None or self.records[-1].iteration >= wanted:
            return None
        return _WHY_SHORT.get(self.config.get(HAS_ENDED), "it ended early or is still running")

    @property
    def steady(self) -> tuple[IterationRecord, ...]:
        """All records but those of `starts`; all of them if there are no others."""
        return (
            tuple(record for record in self.records if record.iteration not in self.starts)
            or self.records
        )

    @cached_property
    def numbers(self) -> Numbers:
        return Numbers(self)


def read_run(
    folder: str | Path, *, trace: str | Path | None = None, only_last_start: bool = False
) -> Run:
    """Reads a run folder, also of a run that was killed or is still running.

    Args:
        folder: of the run, or an ``earlier.N`` in it.
        trace: folder of its trace; if None, the one that the configuration names, if it exists;
            without a configuration the subfolder ``trace``.
        only_last_start: whether to leave out trace, earlier parts and notes, as a run does when it
            ends.

    Raises:
        HydraulisError: there is no such folder, it has no iteration, a complete line of its metrics
            is not a record, or ``trace`` is given and cannot be read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise HydraulisError(
            f"a report needs a run folder but {folder} is not a folder; give the folder of "
            "--run-dir, which is printed at the end of training"
        )
    written, path = read_lines(folder), folder / METRICS_FILE_NAME
    if not written:
        raise HydraulisError(
            f"a report needs at least 1 iteration, but {path} has 0 complete lines; train an "
            "iteration first"
        )
    notes: list[str] = []
    if not path.read_bytes().endswith(b"\n"):
        notes.append(
            f"The last line of {METRICS_FILE_NAME} is incomplete, as after a killed run; it is "
            "ignored."
        )
    config = _read_config(folder / CONFIG_FILE_NAME, notes)
    run = Run(
        folder=folder,
        records=tuple(by_iteration(written)),
        starts=_starts(written, notes),
        config=config,
        strategies=_strategies(config, notes),
    )
    if only_last_start:
        return run
    notes += map(str, config.get("notes") or ())
    run = _with_earlier_parts(run, notes)
    spans = _read_spans(run, trace, notes)
    notes += _interruptions(run)
    return dataclasses.replace(run, spans=spans, notes=tuple(notes))


def _starts(written: Sequence[IterationRecord], notes: list[str]) -> frozenset[int]:
    """First iterations of processes: an iteration that does not follow the one before it."""
    starts = {written[0].iteration}
    for before, after in itertools.pairwise(record.iteration for record in written):
        if after <= before:
            starts.add(after)
            notes.append(
                f"Training resumed from iteration {after} after it had reached {before}; for "
                "iterations that ran twice the later run counts."
            )
    return frozenset(starts)


def _with_earlier_parts(run: Run, notes: list[str]) -> Run:
    """The run with iterations before its first one from ``earlier.N``, latest N first."""
    folders = sorted(
        (
            (int(match[1]), path)
            for path in run.folder.iterdir()
            if (match := _EARLIER_FOLDER.fullmatch(path.name))
            and (path / METRICS_FILE_NAME).is_file()
        ),
        reverse=True,
    )
    records, starts = run.records, run.starts
    others = []
    for _, path in folders:
        first = records[0].iteration
        if first == 1:
            others.append(path.name)
            continue
        try:
            before = [record for record in read_metrics(path) if record.iteration < first]
        except HydraulisError as error:
            notes.append(f"{path.name} is not included: {error}.")
            continue
        if before:
            records = (*before, *records)
            starts |= {before[0].iteration}
            notes.append(
                f"The run resumed from iteration {first}; iterations {before[0].iteration} to "
                f"{before[-1].iteration} are from {path.name}."
            )
    if others:
        notes.append(
            f"This folder also holds separate earlier runs: {', '.join(others)}. For their reports "
            f"give, for example, {run.folder / others[0]} to the report command."
        )
    return dataclasses.replace(run, records=records, starts=starts)


def _read_config(path: Path, notes: list[str]) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
        for name in _OBJECTS:
            if not isinstance(config.get(name) or {}, dict):
                raise ValueError(f"{name} is not an object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        notes.append(
            f"{CONFIG_FILE_NAME} cannot be read ({reason}): schemes, ranks and settings of the run "
            "are unknown."
        )
        return {}
    return config


def _strategies(config: Mapping[str, Any], notes: list[str]) -> tuple[PoolStrategy, ...]:
    try:
        return tuple(
            PoolStrategy(
                name=str(strategy["name"]),
                notation=str(strategy["strategy"]),
                replicas=tuple(
                    PoolReplica(
                        scheme=str(replica["scheme"]),
                        ranks=tuple(int(rank) for rank in replica["ranks"]),
                        max_tokens=replica.get("max_tokens_per_micro_batch"),
                        experts=str(replica.get("experts_per_rank", "")),
                    )
                    for replica in strategy["replicas"]
                ),
                overhead_s=(
                    float(strategy["overhead_ms"]) / _MS_PER_S
                    if "overhead_ms" in strategy
                    else None
                ),
            )
            for strategy in config.get("strategies", ())
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        notes.append(
            f"The strategies of {CONFIG_FILE_NAME} have another format than this version writes "
            f"({error!r}): replicas have numbers but no schemes."
        )
        return ()


def _read_spans(run: Run, given: str | Path | None, notes: list[str]) -> Spans:
    if given is not None:
        return read_trace(given)
    named = run.setting("hydraulis", "trace")
    candidates = []
    if not run.config:
        candidates = [run.folder / TRACE_FOLDER_NAME]
    elif named:
        # First inside the run folder, which may have been moved, then where the run wrote it.
        candidates = [run.folder / Path(named).name]
        if not _EARLIER_FOLDER.fullmatch(run.folder.name):
            # Otherwise the next run of the folder may have written its own trace there.
            candidates.append(Path(named))
    for path in candidates:
        merged = path / MERGED_FILE_NAME
        files = rank_files(path) or ([merged] if merged.is_file() else [])
        if not files:
            continue
        num_bytes = sum(file.stat().st_size for file in files)
        if num_bytes > MAX_TRACE_BYTES:
            notes.append(
                f"The trace in {path} has {num_bytes / 1e6:,.0f} MB, more than "
                f"{MAX_TRACE_BYTES / 1e6:,.0f} MB, and is not read; --trace {path} reads it anyway."
            )
            break
        try:
            return read_trace(path)
        except HydraulisError as error:
            notes.append(f"The trace in {path} is not included: {error}.")
            break
    return Spans()


def _interruptions(run: Run) -> list[str]:
    notes = []
    last = run.records[-1].iteration
    if run.why_short is not None:
        notes.append(
            f"The run has reached iteration {last} of {run.num_train_iters}: {run.why_short}."
        )
    num_missing = last - run.records[0].iteration + 1 - len(run.records)
    if num_missing:
        notes.append(f"{num_missing} iterations in between are missing in {METRICS_FILE_NAME}.")
    return notes


class Numbers:
    """All numbers of a run; `to_json` lists them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._pool = {strategy.name: strategy for strategy in run.strategies}
        self.measured_replicas = self._measured_replicas()
        """The predicted time of each replica with sequences in each traced iteration, and the
        measured time from its first forward to the end of its last backward on any rank."""
        kept = self._steady({one["iteration"] for one in self.measured_replicas})
        self._measured = [one for one in self.measured_replicas if one["iteration"] in kept]
        self.iterations = prediction((r.predicted_time_s, r.iteration_time_s) for r in run.steady)
        """Prediction of steady iterations."""
        self.replicas_traced = _traced(self._measured)
        """Prediction of replicas in traced iterations."""
        self.static = self._static_strategy()
        """The pool's fastest strategy if it ran every iteration, by sums over the same batches of
        the planner's times; None if the planner had no choice, or no strategy holds every
        batch."""
        self.totals = self._totals()
        self.strategies = self._strategy_rows()
        """The most used first, then those of the pool that were never chosen."""
        self.replicas = self._replica_rows()
        self.ranks = self._rank_rows()
        """Measured shares of the traced iterations; busy, wait and idle sum up to 1."""

    def to_json(self) -> Statistics:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    @property
    def used(self) -> list[Statistics]:
        """The strategies that iterations used."""
        return [row for row in self.strategies if row["num_iterations"]]

    def _static_strategy(self) -> Statistics | None:
        times_s = [r.strategy_times_s for r in self._run.records if r.strategy_times_s]
        # A strategy that does not hold a batch has no time for it.
        names = set(times_s[0]).intersection(*times_s[1:]) if times_s else set()
        if not names:
            return None
        chosen_s = [min(time["found_s"] for time in each.values()) for each in times_s]
        found_s = {name: math.fsum(each[name]["found_s"] for each in times_s) for name in names}
        # A bound is raised only until the strategy is ruled out; a faster plan would have been
        # chosen.
        bound_s = min(
            math.fsum(
                max(each[name]["bound_s"], s) for each, s in zip(times_s, chosen_s, strict=True)
            )
            for name in names
        )
        best = min(sorted(names), key=lambda name: found_s[name])
        total_s = math.fsum(chosen_s)
        return {
            "name": best,
            "num_iterations": len(times_s),
            "chosen_s": total_s,
            # Plans are little improved where the strategy was soon ruled out: it may be faster.
            "found_s": found_s[best],
            # With plans as good as the chosen ones no strategy takes less.
            "bound_s": bound_s,
            "gain": (bound_s / total_s, found_s[best] / total_s),
        }

    def _totals(self) -> Statistics:
        run, records, steady = self._run, self._run.records, self._run.steady
        losses, gaps = _known(records, "lm_loss"), _known(records, "plan_gap")
        loads = _known(records, "expert_load")
        balancing, biases = _known(records, "balancing_loss"), _known(records, "router_bias_range")
        waits_s, imbalances = _known(steady, "plan_wait_s"), _known(records, "imbalance")
        num_tokens = sum(_known(records, "num_tokens"))
        num_padding = math.fsum(_known(records, "num_padding"))
        return {
            "num_iterations": len(records),
            "first_iteration": records[0].iteration,
            "last_iteration": records[-1].iteration,
            "num_train_iters": run.num_train_iters,
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            # Without a loss or without an update.
            "num_skipped": sum(r.lm_loss is None or r.grad_norm is None for r in records),
            "num_untrained": sum(record.trained_tokens == 0 for record in records),
            "num_tokens": num_tokens,
            "trained_tokens": sum(_known(records, "trained_tokens")),
            "num_sequences": sum(_known(records, "num_sequences")),
            # Times, throughput and waits are those of steady iterations.
            "tokens_per_s": _tokens_per_s(steady),
            "iteration_time_s": _median(_known(steady, "iteration_time_s")),
            "mfu_fraction": _mfu_fraction(run),
            "padding_fraction": num_padding / max(num_tokens + num_padding, 1.0),
            "idle_fraction": _idle_fraction(records) or 0.0,
            "measured_idle_fraction": self._measured_idle_fraction(self._measured),
            "imbalance": _median(imbalances),
            "worst_imbalance": max(imbalances),
            "plan_gap": _median(gaps),
            "worst_plan_gap": max(gaps, default=None),
            "plan_time_s": _median(_known(steady, "plan_time_s")),
            "plan_wait_s": math.fsum(waits_s),
            "median_plan_wait_s": _median(waits_s),
            "worst_plan_wait_s": max(waits_s),
            "plan_wait_fraction": _share_of_time(steady, "plan_wait_s") or 0.0,
            # Plans that were cut short, by status.
            "marked_plans": _marked_plans(run),
            "num_switches": sum(a.strategy != b.strategy for a, b in itertools.pairwise(records)),
            # On the logging rank, like the waits.
            "regroup_bytes": _mean(_known(records, "regroup_bytes")),
            "gather_wait_fraction": _share_of_time(steady, "gather_wait_s"),
            "scatter_wait_fraction": _share_of_time(steady, "scatter_wait_s"),
            "column_bytes": _mean(_known(records, "column_bytes")),
            "column_wait_fraction": _share_of_time(steady, "column_wait_s"),
            "expert_load": _median(loads),
            "worst_expert_load": max(loads, default=None),
            "balancing_loss": balancing[-1] if balancing else None,
            "router_bias_range": biases[-1] if biases else None,
            "slowdown": _slowdown(steady),
        }

    def _strategy_rows(self) -> list[Statistics]:
        """Times are medians of steady iterations."""
        counts = Counter(record.strategy for record in self._run.records)
        rows = []
        for name in dict.fromkeys((*(name for name, _ in counts.most_common()), *self._pool)):
            records = [record for record in self._run.records if record.strategy == name]
            steady = [record for record in self._run.steady if record.strategy == name]
            compared = prediction((r.predicted_time_s, r.iteration_time_s) for r in steady)
            known = self._pool.get(name)
            rows.append(
                {
                    "name": name,
                    "notation": known.notation if known else name,
                    "num_iterations": counts[name],
                    "num_tokens": sum(_known(records, "num_tokens")),
                    "tokens_per_s": _tokens_per_s(steady),
                    "predicted_s": _median(_known(steady, "predicted_time_s")),
                    "measured_s": _median(_known(steady, "iteration_time_s")),
                    "factor": compared and compared["factor"],
                    "overhead_s": known.overhead_s if known else None,
                    "idle_fraction": _idle_fraction(records),
                    "regroup_bytes": _mean(_known(records, "regroup_bytes")),
                }
            )
        return rows

    def _replica_rows(self) -> list[Statistics]:
        rows = []
        for name in dict.fromkeys(record.strategy for record in self._run.records):
            records = [record for record in self._run.records if record.strategy == name]
            num_replicas = max(len(record.replica_times_s) for record in records)
            known = self._replicas_of(name)
            measured = [one for one in self._measured if one["strategy"] == name]
            for number in range(num_replicas):
                own = [record for record in records if len(record.replica_times_s) > number]
                traced = [one for one in measured if one["replica"] == number]
                busy, compared = busy_fraction(own, replica=number), _traced(traced)
                has_scheme = len(known) == num_replicas
                rows.append(
                    {
                        "strategy": name,
                        "replica": number,
                        "scheme": known[number].scheme if has_scheme else "",
                        "ranks": known[number].ranks if has_scheme else (),
                        "predicted_s": _median([r.replica_times_s[number] for r in own]),
                        "idle_fraction": 0.0 if busy is None else 1.0 - busy,
                        "measured_idle_fraction": self._measured_idle_fraction(measured, number),
                        "traced": compared,
                        "factor": compared and compared["factor"],
                        "traced_predicted_s": _median([one["predicted_s"] for one in traced]),
                        "traced_measured_s": _median([one["measured_s"] for one in traced]),
                    }
                )
        return rows

    def _replicas_of(self, strategy: str) -> tuple[PoolReplica, ...]:
        known = self._pool.get(strategy)
        return known.replicas if known else ()

    def _measured_replicas(self) -> list[Statistics]:
        """The rows are none if the trace or the ranks of the replicas are unknown."""
        bounds_us: dict[tuple[int, int], tuple[float, float]] = {}
        for span in self._run.spans.where(is_planned=False).named("forward", "backward"):
            key = (int(span.detail.get("iteration", 0)), span.rank)
            start_us, end_us = bounds_us.get(key, (span.start_us, span.end_us))
            bounds_us[key] = (min(start_us, span.start_us), max(end_us, span.end_us))
        found = []
        for record in self._run.records:
            replicas = self._replicas_of(record.strategy)
            if len(replicas) != len(record.replica_times_s):
                continue
            for number, replica in enumerate(replicas):
                keys = [(record.iteration, rank) for rank in replica.ranks]
                own = [bounds_us[key] for key in keys if key in bounds_us]
                if own and record.replica_times_s[number] > 0.0:
                    elapsed_us = max(end for _, end in own) - min(start for start, _ in own)
                    found.append(
                        {
                            "iteration": record.iteration,
                            "strategy": record.strategy,
                            "replica": number,
                            "predicted_s": record.replica_times_s[number],
                            "measured_s": elapsed_us / _US_PER_S,
                        }
                    )
        return found

    def _measured_idle_fraction(
        self, measured: Sequence[Statistics], replica: int | None = None
    ) -> float | None:
        """Share of the measured makespans, by ranks, that replicas, or one, do not work."""
        busy_s, whole_s = [], []
        for (_, strategy), group in itertools.groupby(
            measured, key=lambda one: (one["iteration"], one["strategy"])
        ):
            times_s = {one["replica"]: one["measured_s"] for one in group}
            for number, known in enumerate(self._replicas_of(strategy)):
                if replica in (None, number):
                    # A replica without sequences has no time.
                    busy_s.append(len(known.ranks) * times_s.get(number, 0.0))
                    whole_s.append(len(known.ranks) * max(times_s.values()))
        share = _ratio(math.fsum(busy_s), math.fsum(whole_s))
        return None if share is None else 1.0 - share

    def _rank_rows(self) -> list[Statistics]:
        spans = self._run.spans
        iterations = {int(span.detail["iteration"]) for span in spans.where(name="iteration")}
        kept = self._steady(iterations)
        parts = {"busy": "busy", "wait": "wait", "idle": "idle", "regroup": "transfer"}
        return [
            {
                "rank": shares.rank,
                **{
                    f"{name}_fraction": _ratio(getattr(shares, f"{part}_us"), shares.window_us)
                    or 0.0
                    for name, part in parts.items()
                },
            }
            for shares in rank_shares(
                Spans(tuple(span for span in spans if span.detail.get("iteration") in kept))
            )
        ]

    def _steady(self, iterations: set[int]) -> set[int]:
        """The iterations without the first ones of processes, if there are others."""
        return (iterations - self._run.starts) or iterations


def prediction(pairs: Iterable[tuple[float, float]]) -> Statistics | None:
    """Compares (predicted, measured) times of the same things; None if no pair is positive.

    ``half`` has the quartiles of measured / predicted time, ``factor`` their median, ``error`` and
    ``worst_error`` median and maximum of |measured / predicted - 1|.
    """
    factors = [
        measured / predicted for predicted, measured in pairs if min(predicted, measured) > 0
    ]
    if not factors:
        return None
    errors = [abs(factor - 1.0) for factor in factors]
    # One value has no quartiles.
    low, _, high = statistics.quantiles(factors * (1 + (len(factors) == 1)), method="inclusive")
    return {
        "num_compared": len(factors),
        "factor": statistics.median(factors),
        "error": statistics.median(errors),
        "worst_error": max(errors),
        "half": (low, high),
    }


def _traced(measured: Iterable[Statistics]) -> Statistics | None:
    return prediction((one["predicted_s"], one["measured_s"]) for one in measured)


def _slowdown(records: Sequence[IterationRecord]) -> float | None:
    """Measured / predicted time in the last third over that in the first third; None if there are
    few iterations."""
    ratios = [
        record.iteration_time_s / record.predicted_time_s
        for record in records
        if min(record.iteration_time_s, record.predicted_time_s) > 0.0
    ]
    if len(ratios) < MIN_ITERATIONS_TO_COMPARE:
        return None
    third = len(ratios) // 3
    return statistics.median(ratios[-third:]) / statistics.median(ratios[:third])


def _mfu_fraction(run: Run) -> float | None:
    """Operations that the sequences need over what the devices could have done meanwhile; None if
    their peak or number is unknown."""
    peak, num_ranks = run.config.get("peak_flops_per_s_of_rank"), run.config.get("num_ranks")
    known = [record for record in run.steady if record.model_flops is not None]
    if not isinstance(peak, float | int) or not isinstance(num_ranks, int):
        return None
    time_s = math.fsum(record.iteration_time_s for record in known)
    return _ratio(math.fsum(r.model_flops or 0.0 for r in known), time_s * num_ranks * peak)


def _marked_plans(run: Run) -> dict[str, int]:
    marked: Counter[str] = Counter()
    num_before = 0
    for record in run.records:
        # Every process counts its own plans.
        if record.iteration in run.starts:
            num_before = 0
        marked[record.plan_status] += record.num_marked_plans > num_before
        num_before = record.num_marked_plans
    return {status: number for status, number in marked.most_common() if number}


def busy_fraction(
    records: Iterable[IterationRecord], *, replica: int | None = None
) -> float | None:
    """Sum of the predicted times of all replicas, or of one, / sum of their makespans; None if all
    makespans are 0."""
    times_s = [
        (time_s, max(record.replica_times_s))
        for record in records
        for number, time_s in enumerate(record.replica_times_s)
        if replica in (None, number)
    ]
    return _ratio(math.fsum(time for time, _ in times_s), math.fsum(most for _, most in times_s))


def _idle_fraction(records: Sequence[IterationRecord]) -> float | None:
    """Predicted share of the makespans, weighted by ranks, that replicas wait for the slowest."""
    times_s = [(max(r.replica_times_s, default=0.0), r.idle_share) for r in records]
    return _ratio(math.fsum(s * share for s, share in times_s), math.fsum(s for s, _ in times_s))


def _tokens_per_s(records: Sequence[IterationRecord]) -> float | None:
    return _ratio(
        sum(_known(records, "num_tokens")), math.fsum(_known(records, "iteration_time_s"))
    )


def _share_of_time(records: Sequence[IterationRecord], part: str) -> float | None:
    """The share of a field in s in the iterations' time, over the records that have it."""
    known = [record for record in records if getattr(record, part) is not None]
    return _ratio(math.fsum(_known(known, part)), math.fsum(_known(known, "iteration_time_s")))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _known(records: Iterable[IterationRecord], name: str) -> list[Any]:
    """The values of a field in the records that have it."""
    return [value for record in records if (value := getattr(record, name)) is not None]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
