"""What to do about what a run shows: rules, each with the number that triggered it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Literal

from megatron.hydraulis.observability.console import factor_text, seconds_text, share_text
from megatron.hydraulis.observability.report_data import ReplicaNumbers, Run

__all__ = ["Advice", "advice_on"]

MAX_PREDICTION_ERROR = 0.10
"""Median error of iteration times from which measuring a cost profile is worthwhile."""
MAX_REPLICA_DEVIATION = 0.20
"""Largest difference of measured / predicted time between schemes or replicas of one scheme."""
MAX_SLOWDOWN = 0.25
"""Largest increase of measured / predicted time from the beginning to the end of the run."""
MAX_PLAN_WAIT = 0.01
"""Largest share of the iterations' time."""
MAX_IDLE = 0.10
MAX_PADDING = 0.05
MAX_PLAN_GAP = 0.05
"""Largest median gap: single small batches have wide gaps."""
MAX_REGROUP_WAIT = 0.10
"""Largest share of the iterations' time."""
DEFAULT_PLAN_AHEAD = 2
PROFILE_COMMAND = "hydraulis profile"
MIN_ITERATIONS = 3
"""Fewer iterations show nothing typical."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, or to know."""

    kind: Literal["act", "know"]
    """``act``: something costs time or may be wrong; ``know``: for information."""
    finding: str
    """What the run shows, with its number."""
    action: str


def advice_on(run: Run) -> tuple[Advice, ...]:
    """Things to do first, then things to know; at least one."""
    rules = (
        _few_iterations,
        _skipped,
        _plan_wait,
        _prediction,
        _slowdown,
        _schemes,
        _slow_replica,
        _idle,
        _regrouping,
        _padding,
        _marked_plans,
        _plan_gap,
        _unused,
        _no_trace,
    )
    found = [advice for rule in rules if (advice := rule(run)) is not None]
    if not any(advice.kind == "act" for advice in found):
        found.insert(
            0,
            Advice(
                "know",
                "Nothing here costs more than it should.",
                "To make the run faster, compare other strategies.",
            ),
        )
    return tuple(sorted(found, key=lambda advice: advice.kind != "act"))


def _few_iterations(run: Run) -> Advice | None:
    if len(run.steady) >= MIN_ITERATIONS:
        return None
    return Advice(
        "know",
        f"Only {len(run.records)} iteration(s) were trained, and the first also builds models and "
        "groups.",
        "Train more iterations before you rely on times.",
    )


def _skipped(run: Run) -> Advice | None:
    totals = run.numbers.totals
    if not totals.num_skipped:
        return None
    return Advice(
        "act",
        f"{totals.num_skipped} of {totals.num_iterations} iterations updated nothing: no trained "
        "token, or a loss or gradient that is not finite.",
        "Check the loss; lower --lr, or inspect the sequences of these iterations (--plan-dir).",
    )


def _plan_wait(run: Run) -> Advice | None:
    totals = run.numbers.totals
    if totals.plan_wait_fraction <= MAX_PLAN_WAIT:
        return None
    ahead = run.setting("hydraulis", "plan_ahead")
    now = ahead if isinstance(ahead, int) else DEFAULT_PLAN_AHEAD
    action = f"Raise --plan-ahead from {now} to {2 * now}."
    if ahead == 0:
        action = f"Plan in a separate process: --plan-ahead {DEFAULT_PLAN_AHEAD}."
    elif totals.plan_time_s >= totals.iteration_time_s:
        action = (
            "Planning is slower than training, so planning further ahead only delays the wait: set "
            "--plan-time-limit below an iteration's time, or use a smaller pool."
        )
    return Advice(
        "act",
        f"Training waited {seconds_text(totals.plan_wait_s)} for plans, "
        f"{share_text(totals.plan_wait_fraction)} of its time; a plan takes "
        f"{seconds_text(totals.plan_time_s)}, an iteration "
        f"{seconds_text(totals.iteration_time_s)}.",
        action,
    )


def _prediction(run: Run) -> Advice | None:
    prediction = run.numbers.iterations
    if prediction is None or prediction.error <= MAX_PREDICTION_ERROR:
        return None
    profile = run.setting("hydraulis", "cost_profile")
    return Advice(
        "act",
        f"An iteration takes {factor_text(prediction.factor)} its predicted time (median error "
        f"{share_text(prediction.error)}); after calibrating that factor the error is "
        f"{share_text(prediction.error_beyond_factor)}.",
        f"Measure the profile of --cost-profile {profile} again on this machine; check for other "
        "programs on it."
        if profile
        else "Predictions use assumed constants of the device, not measurements: measure this "
        f"machine ({PROFILE_COMMAND}) and train with --cost-profile. A factor common to all "
        "replicas does not change plans; the remaining error does.",
    )


def _slowdown(run: Run) -> Advice | None:
    ratio = run.numbers.totals.slowdown
    if ratio is None or ratio <= 1.0 + MAX_SLOWDOWN:
        return None
    return Advice(
        "act",
        f"Relative to their predictions, the last third of the iterations took "
        f"{factor_text(ratio)} the time of the first third.",
        "Something became slower during the run: another program on these machines, a device that "
        "got hot, a shared network.",
    )


def _schemes(run: Run) -> Advice | None:
    """A scheme whose times are off by another factor than the others': plans are skewed."""
    factors = {scheme: statistics.median(values) for scheme, values in _factors(run).items()}
    if len(factors) < 2:
        return None
    usual = statistics.median(factors.values())
    if max(abs(value / usual - 1.0) for value in factors.values()) <= MAX_REPLICA_DEVIATION:
        return None
    listed = ", ".join(f"{scheme} {factor_text(value)}" for scheme, value in factors.items())
    return Advice(
        "act",
        f"Measured / predicted time of replicas differs by scheme: {listed}. So plans give some "
        "replicas too much work and others too little.",
        f"Measure the schemes on this machine ({PROFILE_COMMAND}) and train with --cost-profile.",
    )


def _slow_replica(run: Run) -> Advice | None:
    """A replica that is slower than others of its scheme."""
    factors = _factors(run)

    def slowness(row: ReplicaNumbers) -> float:
        values = factors.get(row.scheme, [])
        if row.traced is None or len(values) < 2:
            return 1.0
        return row.traced.factor / statistics.median(values)

    slowest = max(run.numbers.replicas, key=slowness, default=None)
    if slowest is None or slowness(slowest) <= 1.0 + MAX_REPLICA_DEVIATION:
        return None
    ranks = ", ".join(map(str, slowest.ranks))
    return Advice(
        "act",
        f"Replica {slowest.replica} of {slowest.strategy} ({slowest.scheme}, ranks {ranks}) takes "
        f"{factor_text(slowness(slowest))} as long as replicas of its scheme usually take for the "
        "same work.",
        "Check these ranks: another program on them, a slower device or link.",
    )


def _factors(run: Run) -> dict[str, list[float]]:
    """By scheme: measured / predicted times of its replicas with enough traced iterations."""
    found: dict[str, list[float]] = {}
    for row in run.numbers.replicas:
        if row.scheme and row.traced is not None and row.traced.num_compared >= MIN_ITERATIONS:
            found.setdefault(row.scheme, []).append(row.traced.factor)
    return found


def _idle(run: Run) -> Advice | None:
    totals = run.numbers.totals
    if totals.idle_fraction <= MAX_IDLE:
        return None
    return Advice(
        "act",
        f"By the plans, ranks wait {share_text(totals.idle_fraction)} of the makespans for the "
        f"slowest replica (worst imbalance {totals.worst_imbalance:.2f}).",
        "Use a larger global batch, which can be balanced better, or add a strategy with fewer, "
        "wider replicas for the long sequences to the pool.",
    )


def _regrouping(run: Run) -> Advice | None:
    totals = run.numbers.totals
    gather, scatter = totals.gather_wait_fraction, totals.scatter_wait_fraction
    if gather is None or scatter is None or gather + scatter <= MAX_REGROUP_WAIT:
        return None
    return Advice(
        "act",
        f"The logging rank waits {share_text(gather)} of the time for parameters and "
        f"{share_text(scatter)} for gradients, which includes waiting for slower ranks to send "
        "them.",
        "Remove --no-regroup-overlap."
        if run.setting("hydraulis", "no_regroup_overlap")
        else "Check in a trace (--trace) whether the wait is for the network or for a late rank; "
        "larger batches or strategies with more tp·pp transfer fewer bytes per token.",
    )


def _padding(run: Run) -> Advice | None:
    share = run.numbers.totals.padding_fraction
    if share <= MAX_PADDING:
        return None
    return Advice(
        "act",
        f"{share_text(share)} of the computed tokens are padding: lengths are rounded up to "
        "multiples that tp and cp need.",
        "Use replicas with less tp for short sequences, or join very short documents in the "
        "corpus.",
    )


def _marked_plans(run: Run) -> Advice | None:
    marked = run.numbers.totals.marked_plans
    if not marked:
        return None
    listed = ", ".join(f"{number} {status}" for status, number in marked.items())
    limit = run.setting("hydraulis", "plan_time_limit")
    return Advice(
        "act",
        f"Plans that were cut short: {listed}.",
        f"Raise --plan-time-limit from {limit} s or remove it."
        if limit
        else "The log of the run says why the solver or the search failed.",
    )


def _plan_gap(run: Run) -> Advice | None:
    totals = run.numbers.totals
    if totals.plan_gap is None or totals.plan_gap <= MAX_PLAN_GAP:
        return None
    return Advice(
        "know",
        f"A better plan with the same strategy could save up to {share_text(totals.plan_gap)} of "
        f"the makespan (median; worst {share_text(totals.worst_plan_gap)}).",
        "The bound may be loose. Larger batches narrow it; hydraulis plan "
        "--explain shows a single batch.",
    )


def _unused(run: Run) -> Advice | None:
    unused = [row.name for row in run.numbers.strategies if not row.num_iterations]
    if not unused or len(run.steady) < MIN_ITERATIONS:
        return None
    return Advice(
        "know",
        f"No iteration chose {', '.join(unused)}.",
        "A strategy that is never chosen costs process groups and planning time: remove it from "
        "the pool, unless batches that need it are rare.",
    )


def _no_trace(run: Run) -> Advice | None:
    if run.numbers.measured_replicas:
        return None
    return Advice(
        "know",
        "There is no trace of this run, so the times of single replicas are predictions only.",
        f"Train with --trace {run.folder / 'trace'} to see measured times.",
    )
