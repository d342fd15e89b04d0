"""The numbers that are derived from the record of a run."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.trace_analysis import Spans, rank_shares

if TYPE_CHECKING:
    from megatron.hydraulis.observability.report_data import Run

MIN_ITERATIONS_TO_COMPARE = 9
"""To compare the beginning of a run with its end: three each."""

_US_PER_S = 1e6


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


def numbers_of(run: Run) -> Numbers:
    """All numbers of a run."""
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
        known = [(replica.scheme, replica.ranks) for replica in pool.get(name, ())]
        if len(known) != num_replicas:
            known = [("", ())] * num_replicas
        for number, (scheme, ranks) in enumerate(known):
            own = [record for record in records if len(record.replica_times_s) > number]
            traced = [one for one in measured if (one.strategy, one.replica) == (name, number)]
            busy = busy_fraction(own, replica=number)
            found.append(
                ReplicaNumbers(
                    strategy=name,
                    replica=number,
                    scheme=scheme,
                    ranks=ranks,
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
