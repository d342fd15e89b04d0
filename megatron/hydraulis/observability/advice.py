"""Advice on a run, by rules; each remark has the number that triggered it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron.hydraulis.observability.console import (
    factor_text,
    factors_text,
    seconds_text,
    share_text,
)
from megatron.hydraulis.observability.report_data import Run, Statistics

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
class Remark:
    """One thing to do, or to know."""

    kind: Literal["act", "know"]
    """``act``: something costs time or may be wrong; ``know``: for information."""
    finding: str
    """The observation, with its number."""
    action: str


def advice_on(run: Run) -> tuple[Remark, ...]:
    """Things to do first, then things to know; at least one."""
    found = list(itertools.chain(_on_iterations(run), _on_replicas(run), _on_plans(run)))
    if not any(advice.kind == "act" for advice in found):
        found.insert(
            0,
            Remark(
                "know",
                "Nothing here costs more than it should.",
                "To make the run faster, compare other strategies.",
            ),
        )
    return tuple(sorted(found, key=lambda advice: advice.kind != "act"))


def _on_iterations(run: Run) -> Iterator[Remark]:
    totals, prediction = run.numbers.totals, run.numbers.iterations
    if len(run.steady) < MIN_ITERATIONS:
        yield Remark(
            "know",
            f"Only {len(run.records)} iteration(s) were trained, and the first also builds models "
            "and groups.",
            "Train more iterations before you rely on times.",
        )
    if totals["num_skipped"]:
        yield Remark(
            "act",
            f"{totals['num_skipped']} of {totals['num_iterations']} iterations updated nothing: no "
            "trained token, or a loss or gradient that is not finite.",
            "Check the loss; lower --lr, or inspect the sequences of these iterations "
            "(--plan-dir).",
        )
    if totals["plan_wait_fraction"] > MAX_PLAN_WAIT:
        yield Remark(
            "act",
            f"Training waited {seconds_text(totals['plan_wait_s'])} for plans, "
            f"{share_text(totals['plan_wait_fraction'])} of its time; a plan takes "
            f"{seconds_text(totals['plan_time_s'])}, an iteration "
            f"{seconds_text(totals['iteration_time_s'])}.",
            _how_to_plan_faster(run),
        )
    if prediction is not None and prediction["error"] > MAX_PREDICTION_ERROR:
        profile = run.setting("hydraulis", "cost_profile")
        yield Remark(
            "act",
            f"Measured / predicted time of iterations is {factors_text(prediction)}.",
            f"Measure the profile of --cost-profile {profile} again on this machine; check for "
            "other programs on it."
            if profile
            else "Predictions use assumed constants of the device, not measurements: measure this "
            f"machine ({PROFILE_COMMAND}) and train with --cost-profile. A factor common to all "
            "replicas does not change plans; differences between replicas do.",
        )
    if totals["slowdown"] is not None and totals["slowdown"] > 1.0 + MAX_SLOWDOWN:
        yield Remark(
            "act",
            "Relative to their predictions, the last third of the iterations took "
            f"{factor_text(totals['slowdown'])} the time of the first third.",
            "Something became slower during the run: another program on these machines, a device "
            "that got hot, a shared network.",
        )


def _how_to_plan_faster(run: Run) -> str:
    ahead = run.setting("hydraulis", "plan_ahead")
    if ahead == 0:
        return f"Plan in a separate process: --plan-ahead {DEFAULT_PLAN_AHEAD}."
    if run.numbers.totals["plan_time_s"] >= run.numbers.totals["iteration_time_s"]:
        return (
            "Planning is slower than training, so planning further ahead only delays the wait: set "
            "--plan-time-limit below an iteration's time, or use a smaller pool."
        )
    now = ahead if isinstance(ahead, int) else DEFAULT_PLAN_AHEAD
    return f"Raise --plan-ahead from {now} to {2 * now}."


def _on_replicas(run: Run) -> Iterator[Remark]:
    totals = run.numbers.totals
    # By scheme: measured / predicted times of its replicas with enough traced iterations.
    traced: dict[str, list[float]] = {}
    for row in run.numbers.replicas:
        one = row["traced"]
        if row["scheme"] and one is not None and one["num_compared"] >= MIN_ITERATIONS:
            traced.setdefault(row["scheme"], []).append(one["factor"])
    usual = {scheme: statistics.median(factors) for scheme, factors in traced.items()}

    def slowness(row: Statistics) -> float:
        """Slowness compared to the other replicas of the scheme."""
        if row["traced"] is None or len(traced.get(row["scheme"], ())) < 2:
            return 1.0
        return float(row["factor"] / usual[row["scheme"]])

    if len(usual) > 1:
        middle = statistics.median(usual.values())
        if max(abs(factor / middle - 1.0) for factor in usual.values()) > MAX_REPLICA_DEVIATION:
            listed = ", ".join(f"{scheme} {factor_text(value)}" for scheme, value in usual.items())
            yield Remark(
                "act",
                f"Measured / predicted time of replicas differs by scheme: {listed}. So plans give "
                "some replicas too much work and others too little.",
                f"Measure the schemes on this machine ({PROFILE_COMMAND}) and train with "
                "--cost-profile.",
            )
    slowest = max(run.numbers.replicas, key=slowness, default=None)
    if slowest is not None and slowness(slowest) > 1.0 + MAX_REPLICA_DEVIATION:
        ranks = ", ".join(map(str, slowest["ranks"]))
        which = "Replica {replica} of {strategy} ({scheme}, ranks ".format(**slowest)
        yield Remark(
            "act",
            f"{which}{ranks}) takes {factor_text(slowness(slowest))} as long as replicas of its "
            "scheme usually take for the same work.",
            "Check these ranks: another program on them, a slower device or link.",
        )
    measured, planned = totals["measured_idle_fraction"], share_text(totals["idle_fraction"])
    if (totals["idle_fraction"] if measured is None else measured) > MAX_IDLE:
        yield Remark(
            "act",
            (
                f"By the plans, ranks wait {planned} of the makespans for the slowest replica"
                if measured is None
                else f"Ranks wait {share_text(measured)} of the makespans for the slowest replica, "
                f"by the plans {planned}"
            )
            + f" (worst imbalance {totals['worst_imbalance']:.2f}).",
            "Use a larger global batch, which can be balanced better, or add a strategy with "
            "fewer, wider replicas for the long sequences to the pool."
            if totals["idle_fraction"] > MAX_IDLE
            else "Plans balance these batches, but measured / predicted time differs by replica: "
            f"measure the schemes ({PROFILE_COMMAND}) and train with --cost-profile.",
        )
    gather, scatter = totals["gather_wait_fraction"], totals["scatter_wait_fraction"]
    if gather is not None and scatter is not None and gather + scatter > MAX_REGROUP_WAIT:
        yield Remark(
            "act",
            f"The logging rank waits {share_text(gather)} of the time for parameters and "
            f"{share_text(scatter)} for gradients, which includes waiting for slower ranks to send "
            "them.",
            _how_to_wait_less(run),
        )
    columns = totals["column_wait_fraction"]
    if columns is not None and columns > MAX_REGROUP_WAIT:
        yield Remark(
            "act",
            f"The logging rank waits {share_text(columns)} of the time for weights and gradients "
            "that cp ranks share.",
            f"Gather more layers ahead than --fs-prefetch {run.setting('hydraulis', 'fs_prefetch')}"
            ", or give longer micro-batches, which hide more; compare with a strategy without fs.",
        )
    if totals["padding_fraction"] > MAX_PADDING:
        yield Remark(
            "act",
            f"{share_text(totals['padding_fraction'])} of the computed tokens are padding: lengths "
            "are rounded up to multiples that tp and cp need.",
            "Use replicas with less tp for short sequences, or join very short documents in the "
            "corpus.",
        )


def _how_to_wait_less(run: Run) -> str:
    """Advice on shorter waits for parameters and gradients."""
    if run.setting("hydraulis", "no_regroup_overlap"):
        return "Remove --no-regroup-overlap."
    fewer = "larger batches or strategies with more tp·pp transfer fewer bytes per token"
    if run.setting("settings", "bf16") and not run.setting("settings", "grad_reduce_in_bf16"):
        fewer += ", and --grad-reduce-in-bf16 halves those of gradients"
    if not run.numbers.ranks:
        return (
            "Check in a trace (--trace) whether the wait is for the network or for a late rank; "
            f"{fewer}."
        )
    busy = [row["busy_fraction"] for row in run.numbers.ranks]
    trace = (
        f"In the trace the busiest rank works {share_text(max(busy))} of the time, the least busy "
        f"one {share_text(min(busy))}: "
    )
    if max(busy) > 1.0 - MAX_IDLE:
        return (
            f"{trace}the wait is for late ranks, not for the network. Measure the schemes "
            f"({PROFILE_COMMAND}) and train with --cost-profile, so that plans balance them."
        )
    return f"{trace}no rank works all the time, so the wait is for the network; {fewer}."


def _on_plans(run: Run) -> Iterator[Remark]:
    totals = run.numbers.totals
    if totals["marked_plans"]:
        listed = ", ".join(
            f"{number} {status}" for status, number in totals["marked_plans"].items()
        )
        limit = run.setting("hydraulis", "plan_time_limit")
        yield Remark(
            "act",
            f"Plans that were cut short: {listed}.",
            f"Raise --plan-time-limit from {limit} s or remove it."
            if limit
            else "The log of the run says why the solver or the search failed.",
        )
    if totals["plan_gap"] is not None and totals["plan_gap"] > MAX_PLAN_GAP:
        yield Remark(
            "know",
            "A better plan with the same strategy could save up to "
            f"{share_text(totals['plan_gap'])} of the makespan (median; worst "
            f"{share_text(totals['worst_plan_gap'])}).",
            "The bound may be loose. Larger batches narrow it; hydraulis plan "
            "--explain shows a single batch.",
        )
    unused = [row["name"] for row in run.numbers.strategies if not row["num_iterations"]]
    if unused and len(run.steady) >= MIN_ITERATIONS:
        yield Remark(
            "know",
            f"No iteration chose {', '.join(unused)}.",
            "A strategy that is never chosen costs process groups and planning time: remove it "
            "from the pool, unless batches that need it are rare.",
        )
    if not run.numbers.measured_replicas:
        yield Remark(
            "know",
            "There is no trace of this run, so the times of single replicas are predictions only.",
            f"Train with --trace {run.folder / 'trace'} to see measured times.",
        )
