"""The record of a run: what its folder holds, and the numbers derived from it.

The closing table, ``summary.png``, the report and its advice are all made from a `Run`.
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
    METRICS_FILE_NAME,
    SUMMARY_FILE_NAME,
    IterationRecord,
    read_metrics,
)
from megatron.hydraulis.observability.trace import MERGED_FILE_NAME, rank_files, read_trace
from megatron.hydraulis.observability.trace_analysis import Spans, rank_shares

TRACE_FOLDER_NAME = "trace"
"""Subfolder that is searched for a trace if there is no configuration that could name one."""

MAX_TRACE_BYTES = 256 * 2**20
"""A larger trace would take longer to read than someone waits for a report."""

MIN_ITERATIONS_TO_COMPARE = 9
"""To compare the beginning of a run with its end: three each."""

_EARLIER_FOLDER = re.compile(r"earlier\.(\d+)")
_MS_PER_S, _US_PER_S = 1e3, 1e6


@dataclass(frozen=True, slots=True)
class PoolReplica:
    """A replica in the configuration."""

    scheme: str
    ranks: tuple[int, ...]
    max_tokens: int | None
    """Most tokens of a micro-batch."""
    experts: str = ""
    """Of a layer on each rank, in words; empty without experts, and in configurations of versions
    that did not write it."""


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
    """At least one, in ascending order of iterations."""
    starts: frozenset[int]
    """The first iteration of every process that trained: it also builds models and groups."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """``config.json``; empty if it is missing or unreadable."""
    strategies: tuple[PoolStrategy, ...] = ()
    """The pool, from the configuration."""
    spans: Spans = field(default_factory=Spans)
    """The trace; empty if there is none."""
    notes: tuple[str, ...] = ()
    """What a reader must know to interpret the figures, a sentence each."""

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
    def steady(self) -> tuple[IterationRecord, ...]:
        """All records but those of `starts`; all of them if there are no others."""
        return (
            tuple(record for record in self.records if record.iteration not in self.starts)
            or self.records
        )

    @cached_property
    def numbers(self) -> Numbers:
        """All numbers derived from the run."""
        return _numbers_of(self)


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
    records = read_metrics(folder)
    if not records:
        raise HydraulisError(
            f"a report needs at least 1 iteration, but {folder / METRICS_FILE_NAME} has 0 complete "
            "lines; train an iteration first"
        )
    notes: list[str] = []
    config = _read_config(folder / CONFIG_FILE_NAME, notes)
    run = Run(
        folder=folder,
        records=tuple(records),
        starts=_starts(folder / METRICS_FILE_NAME, notes),
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


def _starts(path: Path, notes: list[str]) -> frozenset[int]:
    """First iterations of processes: an iteration that does not follow the line before it."""
    lines = path.read_bytes().split(b"\n")
    if lines[-1]:
        notes.append(
            f"The last line of {METRICS_FILE_NAME} is incomplete, as after a killed run; it is "
            "ignored."
        )
    iterations = [int(json.loads(line)["iteration"]) for line in lines[:-1]]
    starts = {iterations[0]}
    for before, after in itertools.pairwise(iterations):
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
    except (OSError, ValueError) as error:
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
        return Spans.of(read_trace(given))
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
            return Spans.of(read_trace(path))
        except HydraulisError as error:
            notes.append(f"The trace in {path} is not included: {error}.")
            break
    return Spans()


def _interruptions(run: Run) -> list[str]:
    notes = []
    last, wanted = run.records[-1].iteration, run.num_train_iters
    if wanted is not None and last < wanted:
        # Written when a run ends without an error; a new start moves it away.
        has_ended = (run.folder / SUMMARY_FILE_NAME).is_file()
        notes.append(
            f"The run ended at iteration {last} of {wanted}, as one of its --exit options asks."
            if has_ended
            else f"The run has reached iteration {last} of {wanted}: it was interrupted or is "
            "still running."
        )
    num_missing = last - run.records[0].iteration + 1 - len(run.records)
    if num_missing:
        notes.append(f"{num_missing} iterations in between are missing in {METRICS_FILE_NAME}.")
    return notes


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Totals of the run. Times, throughput and waits leave out the first iteration of every
    process, which also builds models and groups, unless there is no other."""

    num_iterations: int
    first_iteration: int
    last_iteration: int
    num_train_iters: int | None
    first_loss: float | None
    last_loss: float | None
    num_skipped: int
    """Number of iterations without a loss or without an update."""
    num_tokens: int
    trained_tokens: int
    num_sequences: int
    tokens_per_s: float | None
    iteration_time_s: float
    """Median."""
    padding_fraction: float
    idle_fraction: float
    """Predicted share of the makespans, weighted by ranks, that replicas wait for the slowest."""
    measured_idle_fraction: float | None
    """The same in the traced iterations; None if there are none."""
    imbalance: float
    """Median."""
    worst_imbalance: float
    plan_gap: float | None
    """Median over the plans with a bound."""
    worst_plan_gap: float | None
    plan_time_s: float
    """Median."""
    plan_wait_s: float
    """Sum."""
    median_plan_wait_s: float
    worst_plan_wait_s: float
    plan_wait_fraction: float
    """Share of the iterations' time."""
    marked_plans: dict[str, int]
    """Number of plans that were cut short, by status."""
    num_switches: int
    """How often an iteration ran another strategy than the one before."""
    regroup_bytes: float | None
    """Mean per iteration on the logging rank."""
    gather_wait_fraction: float | None
    """Share of the iterations' time, on the logging rank."""
    scatter_wait_fraction: float | None
    expert_load: float | None
    """Median of `IterationRecord.expert_load`; None without experts."""
    worst_expert_load: float | None
    balancing_loss: float | None
    """Of the last iteration that has one, like the next; None without any."""
    router_bias_range: tuple[float, float] | None
    slowdown: float | None
    """Measured / predicted time in the last third over that in the first third; None if there are
    few iterations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Comparison of predicted and measured times of the same things."""

    num_compared: int
    factor: float
    """Median of measured / predicted time."""
    error: float
    """Median of |measured / predicted - 1|, as `prediction_error` of an iteration."""
    worst_error: float
    half: tuple[float, float]
    """Quartiles of measured / predicted time: half of the things lie between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyNumbers:
    """Numbers of the iterations that ran a strategy; times are medians of the steady ones."""

    name: str
    notation: str
    num_iterations: int
    """0 for a strategy of the pool that was never chosen."""
    num_tokens: int
    tokens_per_s: float | None
    predicted_s: float | None
    measured_s: float | None
    factor: float | None
    """Median of measured / predicted time."""
    overhead_s: float | None
    """Regrouping and optimizer beyond the makespan, predicted at the start."""
    idle_fraction: float | None
    """Predicted, weighted by ranks."""
    regroup_bytes: float | None
    """On the logging rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaNumbers:
    """Numbers of one replica of a strategy; times are medians."""

    strategy: str
    replica: int
    scheme: str
    """Empty if the configuration is unknown."""
    ranks: tuple[int, ...]
    predicted_s: float
    idle_fraction: float
    """Predicted: 1 - sum of its times / sum of the makespans; 0 if all makespans are 0."""
    measured_idle_fraction: float | None
    """The same in the traced iterations; None if there are none."""
    traced: Prediction | None
    """In the traced iterations; None if there are none."""
    traced_predicted_s: float | None
    traced_measured_s: float | None


@dataclass(frozen=True, slots=True)
class MeasuredReplica:
    """A replica in one traced iteration."""

    iteration: int
    strategy: str
    replica: int
    """Its place in the strategy."""
    predicted_s: float
    measured_s: float
    """From the start of its first forward to the end of its last backward, on any of its ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNumbers:
    """Measured shares of a rank's traced iterations; busy, wait and idle sum up to 1."""

    rank: int
    busy_fraction: float
    wait_fraction: float
    """Waiting for a pipeline neighbour, for regrouping or for a plan."""
    idle_fraction: float
    regroup_fraction: float
    """With a transfer of parameters or gradients in progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticStrategy:
    """The strategy of the pool that would take the least time if it ran every iteration.

    All times are predicted and sums over the same batches, from what the planner computed for each
    strategy in each iteration, with what regrouping and optimizer add.
    """

    name: str
    num_iterations: int
    """Iterations with such times; only strategies that hold all their batches are considered."""
    chosen_s: float
    """Of the strategies that the planner chose."""
    found_s: float
    """Of the plans found for this one strategy. They are little improved where it was soon ruled
    out, so that it may be faster."""
    bound_s: float
    """With plans as good as those of the chosen strategies no strategy takes less."""

    @property
    def gain(self) -> tuple[float, float]:
        """From and to: its time / that of the chosen strategies."""
        return self.bound_s / self.chosen_s, self.found_s / self.chosen_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """All numbers of a run."""

    totals: Totals
    static: StaticStrategy | None
    """None if the planner had no choice, or no strategy holds every batch."""
    iterations: Prediction | None
    """Of steady iterations."""
    replicas_traced: Prediction | None
    strategies: tuple[StrategyNumbers, ...]
    """The most used first, then those of the pool that were never chosen."""
    replicas: tuple[ReplicaNumbers, ...]
    measured_replicas: tuple[MeasuredReplica, ...]
    ranks: tuple[RankNumbers, ...]


def _numbers_of(run: Run) -> Numbers:
    measured = _measured_replicas(run)
    counted = _steady(run, {one.iteration for one in measured})
    measured_steady = [one for one in measured if one.iteration in counted]
    return Numbers(
        totals=_totals(run, measured_steady),
        static=_static_strategy(run),
        iterations=_prediction(
            (record.predicted_time_s, record.iteration_time_s) for record in run.steady
        ),
        replicas_traced=_prediction((one.predicted_s, one.measured_s) for one in measured_steady),
        strategies=_strategy_numbers(run),
        replicas=_replica_numbers(run, measured_steady),
        measured_replicas=measured,
        ranks=_rank_numbers(run),
    )


def _static_strategy(run: Run) -> StaticStrategy | None:
    times_s = [record.strategy_times_s for record in run.records if record.strategy_times_s]
    # A strategy that does not hold a batch has no time for it.
    names = set(times_s[0]).intersection(*times_s[1:]) if times_s else set()
    if not names:
        return None
    chosen_s = [min(time["found_s"] for time in each.values()) for each in times_s]
    found_s = {name: math.fsum(each[name]["found_s"] for each in times_s) for name in names}
    # A bound is raised only until the strategy is ruled out; a faster plan would have been chosen.
    bound_s = {
        name: math.fsum(
            max(each[name]["bound_s"], s) for each, s in zip(times_s, chosen_s, strict=True)
        )
        for name in names
    }
    best = min(sorted(names), key=lambda name: found_s[name])
    return StaticStrategy(
        name=best,
        num_iterations=len(times_s),
        chosen_s=math.fsum(chosen_s),
        found_s=found_s[best],
        bound_s=min(bound_s.values()),
    )


def _totals(run: Run, measured: Sequence[MeasuredReplica]) -> Totals:
    records, steady = run.records, run.steady
    losses = [record.lm_loss for record in records if record.lm_loss is not None]
    gaps = [record.plan_gap for record in records if record.plan_gap is not None]
    waits_s = [record.plan_wait_s for record in steady]
    num_tokens = sum(record.num_tokens for record in records)
    num_padding = math.fsum(record.num_padding for record in records)
    imbalances = [record.imbalance for record in records]
    loads = [record.expert_load for record in records if record.expert_load is not None]
    return Totals(
        num_iterations=len(records),
        first_iteration=records[0].iteration,
        last_iteration=records[-1].iteration,
        num_train_iters=run.num_train_iters,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        num_skipped=sum(record.lm_loss is None or record.grad_norm is None for record in records),
        num_tokens=num_tokens,
        trained_tokens=sum(record.trained_tokens for record in records),
        num_sequences=sum(record.num_sequences for record in records),
        tokens_per_s=_tokens_per_s(steady),
        iteration_time_s=statistics.median(record.iteration_time_s for record in steady),
        padding_fraction=num_padding / max(num_tokens + num_padding, 1.0),
        idle_fraction=_idle_fraction(records) or 0.0,
        measured_idle_fraction=_measured_idle_fraction(run, measured),
        imbalance=statistics.median(imbalances),
        worst_imbalance=max(imbalances),
        plan_gap=_median(gaps),
        worst_plan_gap=max(gaps, default=None),
        plan_time_s=statistics.median(record.plan_time_s for record in steady),
        plan_wait_s=math.fsum(waits_s),
        median_plan_wait_s=statistics.median(waits_s),
        worst_plan_wait_s=max(waits_s),
        plan_wait_fraction=_share_of_time(steady, "plan_wait_s") or 0.0,
        marked_plans=_marked_plans(run),
        num_switches=sum(
            one.strategy != other.strategy for one, other in itertools.pairwise(records)
        ),
        regroup_bytes=_mean(record.regroup_bytes for record in records),
        gather_wait_fraction=_share_of_time(steady, "gather_wait_s"),
        scatter_wait_fraction=_share_of_time(steady, "scatter_wait_s"),
        expert_load=_median(loads),
        worst_expert_load=max(loads, default=None),
        balancing_loss=_last(record.balancing_loss for record in records),
        router_bias_range=_last(record.router_bias_range for record in records),
        slowdown=_slowdown(steady),
    )


def _strategy_numbers(run: Run) -> tuple[StrategyNumbers, ...]:
    counts = Counter(record.strategy for record in run.records)
    notations = {strategy.name: strategy.notation for strategy in run.strategies}
    overheads_s = {strategy.name: strategy.overhead_s for strategy in run.strategies}
    names = [name for name, _ in counts.most_common()]
    names += [name for name in notations if name not in counts]
    found = []
    for name in names:
        records = [record for record in run.records if record.strategy == name]
        steady = [record for record in run.steady if record.strategy == name]
        prediction = _prediction((r.predicted_time_s, r.iteration_time_s) for r in steady)
        found.append(
            StrategyNumbers(
                name=name,
                notation=notations.get(name, name),
                num_iterations=counts[name],
                num_tokens=sum(record.num_tokens for record in records),
                tokens_per_s=_tokens_per_s(steady),
                predicted_s=_median(record.predicted_time_s for record in steady),
                measured_s=_median(record.iteration_time_s for record in steady),
                factor=None if prediction is None else prediction.factor,
                overhead_s=overheads_s.get(name),
                idle_fraction=_idle_fraction(records),
                regroup_bytes=_mean(record.regroup_bytes for record in records),
            )
        )
    return tuple(found)


def _replica_numbers(run: Run, measured: Sequence[MeasuredReplica]) -> tuple[ReplicaNumbers, ...]:
    pool = {strategy.name: strategy.replicas for strategy in run.strategies}
    found = []
    for name in dict.fromkeys(record.strategy for record in run.records):
        records = [record for record in run.records if record.strategy == name]
        num_replicas = max(len(record.replica_times_s) for record in records)
        known = pool.get(name, ())
        if len(known) != num_replicas:
            known = (PoolReplica("", (), None),) * num_replicas
        for number, replica in enumerate(known):
            own = [record for record in records if len(record.replica_times_s) > number]
            traced = [one for one in measured if (one.strategy, one.replica) == (name, number)]
            busy = busy_fraction(own, replica=number)
            found.append(
                ReplicaNumbers(
                    strategy=name,
                    replica=number,
                    scheme=replica.scheme,
                    ranks=replica.ranks,
                    predicted_s=statistics.median(record.replica_times_s[number] for record in own),
                    idle_fraction=0.0 if busy is None else 1.0 - busy,
                    measured_idle_fraction=_measured_idle_fraction(
                        run, [one for one in measured if one.strategy == name], replica=number
                    ),
                    traced=_prediction((one.predicted_s, one.measured_s) for one in traced),
                    traced_predicted_s=_median(one.predicted_s for one in traced),
                    traced_measured_s=_median(one.measured_s for one in traced),
                )
            )
    return tuple(found)


def _measured_replicas(run: Run) -> tuple[MeasuredReplica, ...]:
    """By iteration and replica, if the trace and the ranks of the replicas are known, without
    replicas that had no sequences in an iteration."""
    bounds_us: dict[tuple[int, int], tuple[float, float]] = {}
    for span in run.spans.where(is_planned=False).named("forward", "backward"):
        key = (int(span.detail.get("iteration", 0)), span.rank)
        start_us, end_us = bounds_us.get(key, (span.start_us, span.end_us))
        bounds_us[key] = (min(start_us, span.start_us), max(end_us, span.end_us))
    pool = {strategy.name: strategy.replicas for strategy in run.strategies}
    found = []
    for record in run.records:
        replicas = pool.get(record.strategy, ())
        if len(replicas) != len(record.replica_times_s):
            continue
        for number, replica in enumerate(replicas):
            keys = [(record.iteration, rank) for rank in replica.ranks]
            own = [bounds_us[key] for key in keys if key in bounds_us]
            predicted_s = record.replica_times_s[number]
            if own and predicted_s > 0.0:
                elapsed_us = max(end for _, end in own) - min(start for start, _ in own)
                place = (record.iteration, record.strategy, number)
                found.append(MeasuredReplica(*place, predicted_s, elapsed_us / _US_PER_S))
    return tuple(found)


def _measured_idle_fraction(
    run: Run, measured: Sequence[MeasuredReplica], *, replica: int | None = None
) -> float | None:
    """Share of the measured makespans, weighted by ranks, that replicas, or one, do not work."""
    pool = {strategy.name: strategy.replicas for strategy in run.strategies}
    busy_s, whole_s = [], []
    by_iteration = itertools.groupby(measured, key=lambda one: (one.iteration, one.strategy))
    for (_, strategy), group in by_iteration:
        times_s = {one.replica: one.measured_s for one in group}
        for number, known in enumerate(pool[strategy]):
            if replica in (None, number):
                # A replica without sequences has no time.
                busy_s.append(len(known.ranks) * times_s.get(number, 0.0))
                whole_s.append(len(known.ranks) * max(times_s.values()))
    share = _ratio(math.fsum(busy_s), math.fsum(whole_s))
    return None if share is None else 1.0 - share


def _rank_numbers(run: Run) -> tuple[RankNumbers, ...]:
    iterations = {int(span.detail["iteration"]) for span in run.spans.where(name="iteration")}
    kept = _steady(run, iterations)
    spans = Spans(tuple(span for span in run.spans if span.detail.get("iteration") in kept))
    return tuple(
        RankNumbers(
            rank=shares.rank,
            busy_fraction=_ratio(shares.busy_us, shares.window_us) or 0.0,
            wait_fraction=_ratio(shares.wait_us, shares.window_us) or 0.0,
            idle_fraction=_ratio(shares.idle_us, shares.window_us) or 0.0,
            regroup_fraction=_ratio(shares.transfer_us, shares.window_us) or 0.0,
        )
        for shares in rank_shares(spans)
    )


def _steady(run: Run, iterations: set[int]) -> set[int]:
    """Without the first iterations of processes, if there are others."""
    return (iterations - run.starts) or iterations


def _prediction(pairs: Iterable[tuple[float, float]]) -> Prediction | None:
    """Compares (predicted, measured) times; None if there is no pair of positive times."""
    known = [(predicted, measured) for predicted, measured in pairs if min(predicted, measured) > 0]
    if not known:
        return None
    factors = [measured / predicted for predicted, measured in known]
    errors = [abs(factor - 1.0) for factor in factors]
    # One value has no quartiles.
    low, _, high = statistics.quantiles(
        factors * (2 if len(factors) == 1 else 1), method="inclusive"
    )
    return Prediction(
        num_compared=len(known),
        factor=statistics.median(factors),
        error=statistics.median(errors),
        worst_error=max(errors),
        half=(low, high),
    )


def _slowdown(records: Sequence[IterationRecord]) -> float | None:
    ratios = [
        record.iteration_time_s / record.predicted_time_s
        for record in records
        if min(record.iteration_time_s, record.predicted_time_s) > 0.0
    ]
    if len(ratios) < MIN_ITERATIONS_TO_COMPARE:
        return None
    third = len(ratios) // 3
    return statistics.median(ratios[-third:]) / statistics.median(ratios[:third])


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
    times_s = [(max(r.replica_times_s, default=0.0), r.idle_share) for r in records]
    return _ratio(math.fsum(s * share for s, share in times_s), math.fsum(s for s, _ in times_s))


def _tokens_per_s(records: Sequence[IterationRecord]) -> float | None:
    time_s = math.fsum(record.iteration_time_s for record in records)
    return _ratio(sum(record.num_tokens for record in records), time_s)


def _share_of_time(records: Sequence[IterationRecord], part: str) -> float | None:
    """Of the iterations' time: the share of a field in s, in the records that have it."""
    known = [record for record in records if getattr(record, part) is not None]
    part_s = math.fsum(getattr(record, part) for record in known)
    return _ratio(part_s, math.fsum(record.iteration_time_s for record in known))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _last[T](values: Iterable[T | None]) -> T | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None
