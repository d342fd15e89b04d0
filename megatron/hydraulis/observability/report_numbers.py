"""The numbers behind a report, as the page shows them and as ``--json`` prints them."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron.hydraulis.observability.records import IterationRecord
from megatron.hydraulis.observability.report_run import Run
from megatron.hydraulis.observability.report_trace import (
    MeasuredReplica,
    measured_replicas,
    shares_of_ranks,
)

__all__ = [
    "Numbers",
    "Prediction",
    "RankNumbers",
    "ReplicaNumbers",
    "StrategyNumbers",
    "Totals",
    "idle_share",
    "numbers_of",
]

MIN_ITERATIONS_TO_COMPARE = 9
"""Of the beginning and the end of a run: three each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Of the whole run. Times, throughput and waits leave out the first iteration of every
    process, which also builds models and groups, unless there is no other."""

    num_iterations: int
    first_iteration: int
    last_iteration: int
    num_train_iters: int | None
    first_loss: float | None
    last_loss: float | None
    num_skipped: int
    """Iterations without a loss or without an update."""
    num_tokens: int
    num_sequences: int
    tokens_per_s: float | None
    iteration_time_s: float
    """Median."""
    padding_fraction: float
    idle_fraction: float
    """Predicted: of the makespans, weighted by ranks, that replicas wait for the slowest."""
    imbalance: float
    """Median."""
    worst_imbalance: float
    plan_gap: float | None
    """Median of the plans with a bound."""
    worst_plan_gap: float | None
    plan_time_s: float
    """Median."""
    plan_wait_s: float
    """Sum."""
    plan_wait_fraction: float
    """Of the iterations' time."""
    marked_plans: dict[str, int]
    """Plans that were cut short, by their status."""
    regroup_bytes: float | None
    """Of the rank that logs, an iteration's mean."""
    gather_wait_fraction: float | None
    """Of the iterations' time, on the rank that logs."""
    scatter_wait_fraction: float | None
    slowdown: float | None
    """Measured / predicted time in the last third over that in the first; None for few
    iterations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Predicted against measured times of the same things."""

    num_compared: int
    factor: float
    """Median of measured / predicted time."""
    error: float
    """Median of |measured / predicted - 1|, as `prediction_error` of an iteration is."""
    error_beyond_factor: float
    """The same with predicted times multiplied by the factor: what one constant cannot mend."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyNumbers:
    """Of the iterations that ran a strategy, medians of the steady ones."""

    name: str
    notation: str
    num_iterations: int
    """0 for a strategy of the pool that no iteration chose."""
    num_tokens: int
    tokens_per_s: float | None
    predicted_s: float | None
    measured_s: float | None
    idle_fraction: float | None
    """Predicted, weighted by ranks."""
    regroup_bytes: float | None
    """Of the rank that logs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaNumbers:
    """Of one replica of a strategy."""

    strategy: str
    replica: int
    scheme: str
    """Empty where the configuration is unknown."""
    ranks: tuple[int, ...]
    predicted_s: float
    """Median over the iterations of the strategy."""
    idle_fraction: float
    """Predicted: 1 - its times / the makespans."""
    traced: Prediction | None
    """Of the traced iterations; None where there are none."""
    traced_predicted_s: float | None
    """Median, of the traced iterations."""
    traced_measured_s: float | None
    """Median, of the traced iterations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNumbers:
    """How a rank spent its traced iterations, measured; busy, wait and idle sum up to 1."""

    rank: int
    busy_fraction: float
    wait_fraction: float
    """Waiting for a neighbour of the pipeline, for regrouping or for a plan."""
    idle_fraction: float
    regroup_fraction: float
    """With parameters or gradients on their way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Everything that the page shows of a run."""

    totals: Totals
    iterations: Prediction | None
    """Predicted against measured times of steady iterations."""
    replicas_traced: Prediction | None
    strategies: tuple[StrategyNumbers, ...]
    """Those of the pool first in the order of their use."""
    replicas: tuple[ReplicaNumbers, ...]
    measured_replicas: tuple[MeasuredReplica, ...]
    ranks: tuple[RankNumbers, ...]


def numbers_of(run: Run) -> Numbers:
    """All numbers of a run."""
    measured = measured_replicas(run)
    iterations = {replica.iteration for replica in measured}
    counted = (iterations - run.starts) or iterations
    measured_steady = tuple(one for one in measured if one.iteration in counted)
    return Numbers(
        totals=_totals(run),
        iterations=_prediction(
            (record.predicted_time_s, record.iteration_time_s) for record in run.steady
        ),
        replicas_traced=_prediction((one.predicted_s, one.measured_s) for one in measured_steady),
        strategies=_strategies(run),
        replicas=_replicas(run, measured_steady),
        measured_replicas=measured,
        ranks=tuple(
            RankNumbers(
                rank=shares.rank,
                busy_fraction=_ratio(shares.busy_us, shares.window_us) or 0.0,
                wait_fraction=_ratio(shares.wait_us, shares.window_us) or 0.0,
                idle_fraction=_ratio(shares.idle_us, shares.window_us) or 0.0,
                regroup_fraction=_ratio(shares.transfer_us, shares.window_us) or 0.0,
            )
            for shares in shares_of_ranks(run)
        ),
    )


def idle_share(record: IterationRecord) -> float:
    """Predicted share of an iteration's makespan that ranks of replicas wait for the slowest one,
    from 0 to 1: 1 - 1 / imbalance."""
    return max(0.0, 1.0 - 1.0 / record.imbalance)


def _totals(run: Run) -> Totals:
    records, steady = run.records, run.steady
    losses = [record.lm_loss for record in records if record.lm_loss is not None]
    gaps = [record.plan_gap for record in records if record.plan_gap is not None]
    time_s = math.fsum(record.iteration_time_s for record in steady)
    wait_s = math.fsum(record.plan_wait_s for record in steady)
    num_tokens = sum(record.num_tokens for record in records)
    num_padding = math.fsum(record.num_padding for record in records)
    imbalances = [record.imbalance for record in records]
    return Totals(
        num_iterations=len(records),
        first_iteration=records[0].iteration,
        last_iteration=records[-1].iteration,
        num_train_iters=run.num_train_iters,
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        num_skipped=sum(record.lm_loss is None or record.grad_norm is None for record in records),
        num_tokens=num_tokens,
        num_sequences=sum(record.num_sequences for record in records),
        tokens_per_s=_ratio(sum(record.num_tokens for record in steady), time_s),
        iteration_time_s=statistics.median(record.iteration_time_s for record in steady),
        padding_fraction=num_padding / max(num_tokens + num_padding, 1.0),
        idle_fraction=_idle_fraction(records) or 0.0,
        imbalance=statistics.median(imbalances),
        worst_imbalance=max(imbalances),
        plan_gap=statistics.median(gaps) if gaps else None,
        worst_plan_gap=max(gaps) if gaps else None,
        plan_time_s=statistics.median(record.plan_time_s for record in steady),
        plan_wait_s=wait_s,
        plan_wait_fraction=_ratio(wait_s, time_s) or 0.0,
        marked_plans=_marked(run),
        regroup_bytes=_mean(record.regroup_bytes for record in records),
        gather_wait_fraction=_share_of_time(steady, lambda record: record.gather_wait_s),
        scatter_wait_fraction=_share_of_time(steady, lambda record: record.scatter_wait_s),
        slowdown=_slowdown(steady),
    )


def _strategies(run: Run) -> tuple[StrategyNumbers, ...]:
    counts = Counter(record.strategy for record in run.records)
    notations = {shape.name: shape.notation for shape in run.strategies}
    names = [name for name, _ in counts.most_common()]
    names += [name for name in notations if name not in counts]
    found = []
    for name in names:
        records = [record for record in run.records if record.strategy == name]
        steady = [record for record in run.steady if record.strategy == name]
        time_s = math.fsum(record.iteration_time_s for record in steady)
        found.append(
            StrategyNumbers(
                name=name,
                notation=notations.get(name, name),
                num_iterations=counts[name],
                num_tokens=sum(record.num_tokens for record in records),
                tokens_per_s=_ratio(sum(record.num_tokens for record in steady), time_s),
                predicted_s=_median(record.predicted_time_s for record in steady),
                measured_s=_median(record.iteration_time_s for record in steady),
                idle_fraction=_idle_fraction(records),
                regroup_bytes=_mean(record.regroup_bytes for record in records),
            )
        )
    return tuple(found)


def _replicas(run: Run, measured: Sequence[MeasuredReplica]) -> tuple[ReplicaNumbers, ...]:
    shapes = {shape.name: shape for shape in run.strategies}
    found = []
    for name in dict.fromkeys(record.strategy for record in run.records):
        records = [record for record in run.records if record.strategy == name]
        num_replicas = max(len(record.replica_times_s) for record in records)
        shape = shapes.get(name)
        for number in range(num_replicas):
            own = [record for record in records if len(record.replica_times_s) > number]
            is_known = shape is not None and len(shape.replicas) == num_replicas
            replica = shape.replicas[number] if shape is not None and is_known else None
            traced = [one for one in measured if (one.strategy, one.replica) == (name, number)]
            possible_s = math.fsum(max(record.replica_times_s) for record in own)
            busy_s = math.fsum(record.replica_times_s[number] for record in own)
            found.append(
                ReplicaNumbers(
                    strategy=name,
                    replica=number,
                    scheme="" if replica is None else replica.scheme,
                    ranks=() if replica is None else replica.ranks,
                    predicted_s=statistics.median(r.replica_times_s[number] for r in own),
                    idle_fraction=1.0 - busy_s / possible_s if possible_s > 0.0 else 0.0,
                    traced=_prediction((one.predicted_s, one.measured_s) for one in traced),
                    traced_predicted_s=_median(one.predicted_s for one in traced),
                    traced_measured_s=_median(one.measured_s for one in traced),
                )
            )
    return tuple(found)


def _prediction(pairs: Iterable[tuple[float, float]]) -> Prediction | None:
    """Of (predicted, measured) times; None where none of them took time."""
    known = [(predicted, measured) for predicted, measured in pairs if min(predicted, measured) > 0]
    if not known:
        return None
    factor = statistics.median(measured / predicted for predicted, measured in known)

    def error(scale: float) -> float:
        return statistics.median(
            abs(measured / (scale * predicted) - 1.0) for predicted, measured in known
        )

    return Prediction(
        num_compared=len(known), factor=factor, error=error(1.0), error_beyond_factor=error(factor)
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


def _marked(run: Run) -> dict[str, int]:
    marked: Counter[str] = Counter()
    num_before = 0
    for record in run.records:
        # Every process counts its own.
        if record.iteration in run.starts:
            num_before = 0
        marked[record.plan_status] += record.num_marked_plans > num_before
        num_before = record.num_marked_plans
    return {status: number for status, number in marked.most_common() if number}


def _idle_fraction(records: Sequence[IterationRecord]) -> float | None:
    makespans_s = [max(record.replica_times_s, default=0.0) for record in records]
    idle_s = math.fsum(
        makespan_s * idle_share(record)
        for makespan_s, record in zip(makespans_s, records, strict=True)
    )
    return _ratio(idle_s, math.fsum(makespans_s))


def _share_of_time(
    records: Sequence[IterationRecord], part_s: Callable[[IterationRecord], float | None]
) -> float | None:
    known = [
        (value_s, record.iteration_time_s)
        for record in records
        if (value_s := part_s(record)) is not None
    ]
    return _ratio(math.fsum(value_s for value_s, _ in known), math.fsum(time for _, time in known))


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0.0 else None


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
