"""What to do about what a run shows: rules, each with the number that made it speak."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from megatron.hydraulis.observability.report_numbers import Numbers
from megatron.hydraulis.observability.report_run import Run
from megatron.hydraulis.observability.report_text import factor, percent, seconds

__all__ = ["Advice", "advice_on"]

MAX_PREDICTION_ERROR = 0.10
"""Of iteration times, median: beyond it the times that plans are made from are worth measuring."""
MAX_REPLICA_DEVIATION = 0.20
"""Of measured / predicted time, between schemes or between replicas of one."""
MAX_SLOWDOWN = 0.25
"""Of measured / predicted time, from the beginning to the end of the run."""
MAX_PLAN_WAIT = 0.01
"""Of the iterations' time."""
MAX_IDLE = 0.10
MAX_PADDING = 0.05
MAX_PLAN_GAP = 0.05
"""Of the median: single small batches have wide gaps."""
MAX_REGROUP_WAIT = 0.10
"""Of the iterations' time."""
DEFAULT_PLAN_AHEAD = 2
PROFILE_COMMAND = "python -m megatron.hydraulis profile"
MIN_ITERATIONS = 3
"""Fewer say nothing of what is usual."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to do, or to know."""

    kind: Literal["act", "know"]
    """``act``: something costs time or may be wrong; ``know``: no harm done."""
    finding: str
    """What the run shows, with its number."""
    action: str
    """What to do about it."""


def advice_on(run: Run, numbers: Numbers) -> tuple[Advice, ...]:
    """What is to be done first comes first; at least one."""
    rules: tuple[Callable[[Run, Numbers], Advice | None], ...] = (
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
    found = [advice for rule in rules if (advice := rule(run, numbers)) is not None]
    if not any(advice.kind == "act" for advice in found):
        found.insert(
            0,
            Advice(
                "know",
                "Nothing here costs more than it should.",
                "Compare with other strategies if the run is to be faster.",
            ),
        )
    return tuple(sorted(found, key=lambda advice: advice.kind != "act"))


def _few_iterations(run: Run, numbers: Numbers) -> Advice | None:
    if len(run.steady) >= MIN_ITERATIONS:
        return None
    return Advice(
        "know",
        f"Only {len(run.records)} iteration(s) were trained, the first of which also builds models "
        "and groups.",
        "Train more before believing times.",
    )


def _skipped(run: Run, numbers: Numbers) -> Advice | None:
    num = numbers.totals.num_skipped
    if not num:
        return None
    return Advice(
        "act",
        f"{num} of {numbers.totals.num_iterations} iterations updated nothing: no trained token, "
        "or a loss or gradient that is not finite.",
        "Look at the loss; lower --lr, or look at the sequences of these iterations (--plan-dir).",
    )


def _plan_wait(run: Run, numbers: Numbers) -> Advice | None:
    totals = numbers.totals
    if totals.plan_wait_fraction <= MAX_PLAN_WAIT:
        return None
    ahead = run.setting("hydraulis", "plan_ahead")
    finding = (
        f"Training stood still for plans {seconds(totals.plan_wait_s)}, "
        f"{percent(totals.plan_wait_fraction)} of its time; a plan takes "
        f"{seconds(totals.plan_time_s)}, an iteration {seconds(totals.iteration_time_s)}."
    )
    if ahead == 0:
        return Advice(
            "act", finding, f"Plan in a process of its own: --plan-ahead {DEFAULT_PLAN_AHEAD}."
        )
    if totals.plan_time_s >= totals.iteration_time_s:
        return Advice(
            "act",
            finding,
            "Planning is slower than training, so that planning further ahead only delays the "
            "wait: set --plan-time-limit below an iteration's time, or use a smaller pool.",
        )
    now = ahead if isinstance(ahead, int) else DEFAULT_PLAN_AHEAD
    return Advice("act", finding, f"Raise --plan-ahead from {now} to {2 * now}.")


def _prediction(run: Run, numbers: Numbers) -> Advice | None:
    prediction = numbers.iterations
    if prediction is None or prediction.error <= MAX_PREDICTION_ERROR:
        return None
    profile = run.setting("hydraulis", "cost_profile")
    finding = (
        f"An iteration takes {factor(prediction.factor)} its predicted time (median error "
        f"{percent(prediction.error)}); with that factor taken out the error is "
        f"{percent(prediction.error_beyond_factor)}."
    )
    if profile:
        return Advice(
            "act",
            finding,
            f"Measure anew what --cost-profile {profile} says of this machine; look for other "
            "programs on it.",
        )
    return Advice(
        "act",
        finding,
        f"Times come from what is known of the device, not from this machine: measure it "
        f"({PROFILE_COMMAND}) and train with --cost-profile. A factor common to all replicas does "
        "not change plans; what remains beside it does.",
    )


def _slowdown(run: Run, numbers: Numbers) -> Advice | None:
    ratio = numbers.totals.slowdown
    if ratio is None or ratio <= 1.0 + MAX_SLOWDOWN:
        return None
    return Advice(
        "act",
        f"The last third of the iterations took {factor(ratio)} the time of the first third, for "
        "what the plans expected of them.",
        "Something became slower during the run: another program on these machines, a device that "
        "got hot, a network that others use.",
    )


def _schemes(run: Run, numbers: Numbers) -> Advice | None:
    """A scheme whose times are off by another factor than the others': plans are skewed."""
    factors = {
        scheme: statistics.median(values) for scheme, values in _factors(numbers).items() if values
    }
    if len(factors) < 2:
        return None
    usual = statistics.median(factors.values())
    worst = max(factors, key=lambda scheme: abs(factors[scheme] / usual - 1.0))
    if abs(factors[worst] / usual - 1.0) <= MAX_REPLICA_DEVIATION:
        return None
    told = ", ".join(f"{scheme} {factor(value)}" for scheme, value in factors.items())
    return Advice(
        "act",
        f"Replicas take other multiples of their predicted times by scheme: {told}. So plans give "
        "some too much and some too little.",
        f"Measure the schemes on this machine ({PROFILE_COMMAND}) and train with --cost-profile.",
    )


def _slow_replica(run: Run, numbers: Numbers) -> Advice | None:
    """A replica that is slower than others of its scheme."""
    factors = _factors(numbers)
    slow = [
        (row.traced.factor / statistics.median(values), row)
        for row in numbers.replicas
        if row.traced is not None and len(values := factors.get(row.scheme, [])) > 1
    ]
    if not slow:
        return None
    ratio, row = max(slow, key=lambda pair: pair[0])
    if ratio <= 1.0 + MAX_REPLICA_DEVIATION:
        return None
    ranks = ", ".join(map(str, row.ranks))
    return Advice(
        "act",
        f"Replica {row.replica} of {row.strategy} ({row.scheme}, ranks {ranks}) takes "
        f"{factor(ratio)} as long as replicas of its scheme usually take for the same work.",
        "Look at these ranks: another program on them, a slower device or link.",
    )


def _factors(numbers: Numbers) -> dict[str, list[float]]:
    """By scheme: measured / predicted time of each of its replicas that was traced enough."""
    found: dict[str, list[float]] = {}
    for row in numbers.replicas:
        if row.scheme and row.traced is not None and row.traced.num_compared >= MIN_ITERATIONS:
            found.setdefault(row.scheme, []).append(row.traced.factor)
    return found


def _idle(run: Run, numbers: Numbers) -> Advice | None:
    totals = numbers.totals
    if totals.idle_fraction <= MAX_IDLE:
        return None
    return Advice(
        "act",
        f"By the plans, ranks wait {percent(totals.idle_fraction)} of the makespans for the "
        f"slowest replica (worst imbalance {totals.worst_imbalance:.2f}).",
        "Give plans more to deal out (a larger global batch), or the pool a strategy with fewer, "
        "wider replicas for the long sequences.",
    )


def _regrouping(run: Run, numbers: Numbers) -> Advice | None:
    gather, scatter = numbers.totals.gather_wait_fraction, numbers.totals.scatter_wait_fraction
    if gather is None or scatter is None or gather + scatter <= MAX_REGROUP_WAIT:
        return None
    finding = (
        f"The rank that logs waits {percent(gather)} of the time for parameters and "
        f"{percent(scatter)} for gradients, which includes waiting for slower ranks to send them."
    )
    if run.setting("hydraulis", "no_regroup_overlap"):
        return Advice("act", finding, "Leave out --no-regroup-overlap.")
    return Advice(
        "act",
        finding,
        "See in a trace (--trace) whether the network or a late rank is waited for; larger "
        "batches or strategies with more tp·pp carry fewer bytes per token.",
    )


def _padding(run: Run, numbers: Numbers) -> Advice | None:
    share = numbers.totals.padding_fraction
    if share <= MAX_PADDING:
        return None
    return Advice(
        "act",
        f"{percent(share)} of the tokens run are padding: lengths are rounded up to what tp and "
        "cp divide.",
        "Give short sequences replicas of less tp, or join what is very short in the corpus.",
    )


def _marked_plans(run: Run, numbers: Numbers) -> Advice | None:
    marked = numbers.totals.marked_plans
    if not marked:
        return None
    told = ", ".join(f"{number} {status}" for status, number in marked.items())
    limit = run.setting("hydraulis", "plan_time_limit")
    return Advice(
        "act",
        f"Plans that were cut short: {told}.",
        f"Raise --plan-time-limit from {limit} s or leave it out."
        if limit
        else "The log of the run says why the solver or the search failed.",
    )


def _plan_gap(run: Run, numbers: Numbers) -> Advice | None:
    gap, worst = numbers.totals.plan_gap, numbers.totals.worst_plan_gap
    if gap is None or worst is None or gap <= MAX_PLAN_GAP:
        return None
    return Advice(
        "know",
        f"A better plan with the same strategy could save up to {percent(gap)} of the makespan "
        f"(median; worst {percent(worst)}).",
        "The bound may be loose. Larger batches narrow it; python -m megatron.hydraulis plan "
        "--explain shows a single batch.",
    )


def _unused(run: Run, numbers: Numbers) -> Advice | None:
    unused = [row.name for row in numbers.strategies if not row.num_iterations]
    if not unused or len(run.steady) < MIN_ITERATIONS:
        return None
    return Advice(
        "know",
        f"No iteration chose {', '.join(unused)}.",
        "A strategy that is never chosen costs groups at the start and planning time: leave it out "
        "of the pool, unless batches that need it are rare.",
    )


def _no_trace(run: Run, numbers: Numbers) -> Advice | None:
    if numbers.measured_replicas:
        return None
    return Advice(
        "know",
        "There is no trace of this run, so the times of single replicas are predictions only.",
        f"Train with --trace {run.folder / 'trace'} to see them measured.",
    )
