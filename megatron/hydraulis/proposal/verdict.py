"""What a pool gains over the best that the same GPUs do without one.

That best is the **baseline**: the fastest of all static strategies of one scheme with balanced
plans, of their lanes with packed rows, and of Megatron's dynamic cp; each as the flags of the job
say, with the other recomputation (of every layer, or of none), and with Transformer Engine's ring
of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from megatron.hydraulis.assumed import Corner
from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.estimate_command import possible_schemes
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.profile import ProfiledScheme
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER, NO_RECOMPUTE
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.proposal.propose import Proposal, ProposalRequest
from megatron.hydraulis.simulator.ways import (
    BALANCED,
    FULL_OVER_QUICK,
    MEGATRON_CP,
    PACKING,
    Ways,
    fastest_static,
)
from megatron.hydraulis.strategy import Pool, Strategy
from megatron.hydraulis.terminal import print_next, profile_command

_MS_PER_S = 1e3
RECOMPUTE_EVERY_LAYER = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
_RING = ("--core-attention", "te", "--cp-comm-type", "auto")
DYNAMIC_CP = "--hybrid-context-parallel"
"""Megatron's flag of its dynamic cp."""
HOW = {
    BALANCED: "balanced plans",
    PACKING: "packed rows",
    MEGATRON_CP: f"Megatron's {DYNAMIC_CP}",
}
"""How a baseline is trained, by its way."""


PROFILE = "profile.json"
"""The file of measured rows in commands that are printed."""
OPEN_TEXT = "Which of the two is faster depends on what is assumed: measure both first."
Flags = tuple[str, ...]
Strategies = tuple[Strategy, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a job runs its layers, with its costs."""

    costs: JobCosts
    recomputation: Flags | None = None
    """Flags that replace the job's; None for the job's own, none of them for no recomputation."""
    ring: Flags = ()
    """Flags that are added."""

    def words(self, words: Sequence[str]) -> list[str]:
        """The words of a job's command with the flags of the setting."""
        kept, is_dropped = [], False
        for word in words:
            if word.startswith("--"):
                is_dropped = self.recomputation is not None and word.startswith("--recompute-")
            if not is_dropped:
                kept.append(word)
        return [*kept, *(self.recomputation or ()), *self.ring]

    @property
    def text(self) -> str:
        """What differs from the flags of the job, to follow a strategy; empty if nothing does."""
        recomputed = ", every layer recomputed" if self.recomputation else ", nothing recomputed"
        return (recomputed if self.recomputation is not None else "") + (
            ", TE attention" if self.ring else ""
        )

    @classmethod
    def all_of(cls, costs: JobCosts) -> Iterator[Setting]:
        """The setting of the job first, then the others in which Megatron holds the model; only the
        first if the model is unknown."""
        yield cls(costs=costs)
        model = costs.model
        if model is None:
            return
        recomputation = () if model.recompute.granularity == "full" else RECOMPUTE_EVERY_LAYER
        other = replace(model, recompute=EVERY_LAYER if recomputation else NO_RECOMPUTE)
        models: list[tuple[Flags | None, AnalyticCostModel]]
        models, ring = [(None, model), (recomputation, other)], Flags()
        can_ring = model.shape.window is None and model.device.name != "cpu"
        if model.precision is Precision.BF16 and can_ring:
            models = [(flags, _with_ring(each)) for flags, each in models]
            ring = _RING if models[0][1] != model else ()
        for flags, each in models:
            if each != model:
                found = _carried(costs, each)
                if any(row.max_tokens for row in found.profile.schemes):
                    yield cls(costs=found, recomputation=flags, ring=ring)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The best without a pool; times are means over the batches."""

    way: str
    """One of `HOW`."""
    strategy: Strategy
    setting: Setting
    time_s: float
    """With what regrouping and optimizer add."""

    @property
    def text(self) -> str:
        """Strategy and setting in a few words."""
        return f"{self.strategy} with {HOW[self.way]}{self.setting.text}"

    @property
    def overhead_s(self) -> float:
        """What regrouping and optimizer add."""
        return self.setting.costs.overhead_ms(self.strategy) / _MS_PER_S

    def to_json(self) -> dict[str, Any]:
        """The fields, without costs."""
        return {
            "way": self.way,
            "strategy": str(self.strategy),
            "setting": self.setting.text.lstrip(", "),
            "time_s": self.time_s,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class CornerGain:
    """What a pool gains with all assumed constants in a corner, see assumed.py."""

    corner: Corner
    baseline: Baseline
    """The best without a pool in this corner."""
    gain: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolVerdict:
    """What a pool gains over the baseline: a figure, and the range of what is assumed."""

    baseline: Baseline
    gain: float
    """Time of the baseline over that of the pool."""
    corners: tuple[CornerGain, ...]
    pool: Pool
    setting: Setting
    """That of the pool."""

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most that the pool gains."""
        gains = (self.gain, *(each.gain for each in self.corners))
        return min(gains), max(gains)

    @property
    def text(self) -> str:
        """The gain with its range, unless that is the same in two digits."""
        least, most = (f"{gain:.2f}" for gain in self.range)
        between = "" if least == most else f" ({least} to {most})"
        return f"{self.gain:.2f}{between} ×"

    @property
    def is_open(self) -> bool:
        """Whether the pool gains or loses depends on what is assumed."""
        least, most = (round(gain, 2) for gain in self.range)
        return least < 1.0 < most

    @property
    def to_measure(self) -> list[tuple[Setting, Strategies]]:
        """The strategies that decide, with their settings: the pool's, and the baselines."""
        baselines = (self.baseline, *(each.baseline for each in self.corners))
        return [
            (self.setting, self.pool.strategies),
            *((each.setting, (each.strategy,)) for each in baselines),
        ]

    def __str__(self) -> str:
        return (
            f"{self.text} as fast as {self.baseline.text}, the best without a pool: "
            f"{self.baseline.time_s:.4f} s{f'. {OPEN_TEXT}' if self.is_open else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        """All figures by name, and what to measure if the gain may be a loss."""
        return {
            "gain": self.gain,
            "range": list(self.range),
            "baseline": self.baseline.to_json(),
            "corners": {
                each.corner.value: {"gain": each.gain, "baseline": each.baseline.to_json()}
                for each in self.corners
            },
            "to_measure": [
                {"setting": setting.text.lstrip(", "), "schemes": list(schemes)}
                for setting, schemes in _by_setting(self.to_measure if self.is_open else ())
            ],
        }


def _by_setting(
    wanted: Iterable[tuple[Setting, Strategies]],
) -> list[tuple[Setting, dict[str, int]]]:
    """Each setting with the schemes of its strategies and their numbers of ranks."""
    found: dict[str, tuple[Setting, dict[str, int]]] = {}
    for setting, strategies in wanted:
        _, schemes = found.setdefault(setting.text, (setting, {}))
        used = (scheme for strategy in strategies for scheme in strategy.schemes)
        schemes |= {str(scheme): scheme.num_ranks for scheme in used}
    return list(found.values())


def print_measurements(
    wanted: Iterable[tuple[Setting, Strategies]], pool: Pool, words: Sequence[str]
) -> list[str]:
    """Prints the command that measures the strategies of each setting, and returns the schemes of
    the first.

    words: of the job's training.
    """
    of_settings = _by_setting(wanted)
    for number, (setting, schemes) in enumerate(of_settings):
        print_next(
            profile_command(pool.num_ranks, pool.ranks_per_node, max(schemes.values())),
            *("--out", f"{number}_{PROFILE}" if number else PROFILE, "--schemes"),
            *(*schemes, "--", *setting.words(words)),
        )
    return list(of_settings[0][1])


def judged(request: ProposalRequest, costs: JobCosts, proposal: Proposal) -> Proposal:
    """The proposal with its verdict, or without one if no baseline holds the longest sequence."""
    settings = list(Setting.all_of(costs))
    baseline = best_baseline(request, settings, proposal.pool, proposal.best_static)
    if baseline is None:
        return proposal
    verdict = pool_verdict(request, settings, proposal, baseline, settings[0])
    return replace(proposal, verdict=verdict)


def pool_verdict(
    request: ProposalRequest,
    settings: Sequence[Setting],
    proposal: Proposal,
    baseline: Baseline,
    setting: Setting,
) -> PoolVerdict:
    """What a proposed pool gains over a baseline, and in each corner over the best one there.

    The pool is the same in both corners, as if it were trained with before anything is measured.

    Args:
        settings: of the job, its own first.
        setting: that of the pool.
    """
    corners = []
    for corner in Corner if settings[0].costs.model is not None else ():
        there = {each.text: each for each in Setting.all_of(settings[0].costs.at_corner(corner))}
        own, of_baseline = there[setting.text], there[baseline.setting.text]
        pool_s = _mean_s(request, own, proposal.pool)
        first: Baseline | None
        if baseline.way != BALANCED:
            first = without_plans(request, of_baseline, proposal.pool, baseline.way)
        else:
            used = {strategy.replicas for strategy in proposal.pool.strategies}
            is_pool = own is of_baseline and used == {baseline.strategy.replicas}
            time_s = pool_s
            if not is_pool:
                time_s = _mean_s(request, of_baseline, Pool.of(baseline.strategy))
            first = replace(baseline, setting=of_baseline, time_s=time_s)
        best = best_baseline(request, there.values(), proposal.pool, first=first)
        if best is not None:
            gain = best.time_s / pool_s
            corners.append(CornerGain(corner=corner, baseline=best, gain=gain))
    return PoolVerdict(
        baseline=baseline,
        gain=baseline.time_s / proposal.mean_s,
        corners=tuple(corners),
        pool=proposal.pool,
        setting=setting,
    )


def best_baseline(
    request: ProposalRequest,
    settings: Iterable[Setting],
    pool: Pool,
    static: tuple[Strategy, float] | None = None,
    first: Baseline | None = None,
) -> Baseline | None:
    """The fastest baseline for the batches; None if none holds the longest sequence.

    Args:
        settings: of the job, `Setting.all_of`.
        pool: of the job.
        static: the best static strategy in the first setting and its time in s, if it is known.
        first: some baseline with its time; the others only count if they are faster.
    """
    best, candidates = first, list[tuple[Setting, Strategy]]()
    for number, setting in enumerate(settings):
        if static is not None and not number:
            strategy, time_s = static
            best = Baseline(way=BALANCED, strategy=strategy, setting=setting, time_s=time_s)
        else:
            candidates += (
                (setting, strategy)
                for strategy in _ways_of(request, setting, pool).static()
                if request.schemes is None or strategy.schemes[0] in request.schemes
                if first is None
                or (strategy.replicas, setting) != (first.strategy.replicas, first.setting)
            )
        for way in (PACKING, MEGATRON_CP):
            below_s = math.inf if best is None else best.time_s
            best = without_plans(request, setting, pool, way, below_s) or best
    below_s = math.inf if best is None else best.time_s
    for place, times_ms in fastest_static(
        [(strategy, setting.costs.profile) for setting, strategy in candidates],
        request.batches,
        row_quantum=request.row_quantum_tokens,
        below_ms=_MS_PER_S * below_s,
    ):
        setting, strategy = candidates[place]
        least_s = [FULL_OVER_QUICK * time_ms / _MS_PER_S for time_ms in times_ms]
        time_s = _mean_s(request, setting, Pool.of(strategy), least_s, below_s)
        if time_s < below_s:
            best = Baseline(way=BALANCED, strategy=strategy, setting=setting, time_s=time_s)
            below_s = time_s
    return best


def _mean_s(
    request: ProposalRequest,
    setting: Setting,
    pool: Pool,
    least_s: Iterable[float] = (),
    below_s: float = math.inf,
) -> float:
    """Mean time of the plans of all batches; a lower one if it is no less than below_s.

    least_s: of each batch's plan.
    """
    profile = setting.costs.profile
    limits = Limits(profile, row_quantum=request.row_quantum_tokens)
    planner = CertifiedPlanner(pool, profile, limits, seed=request.seed)
    times_s = list(least_s) or [0.0] * len(request.batches)
    for index, batch in enumerate(request.batches):
        if fmean(times_s) < below_s:
            times_s[index] = planner.plan(batch).predicted_time_s
    return fmean(times_s)


def without_plans(
    request: ProposalRequest, setting: Setting, pool: Pool, way: str, below_s: float = math.inf
) -> Baseline | None:
    """The fastest of a way that needs no planner, in a setting; None if nothing of it takes less
    than below_s."""
    found = _ways_of(request, setting, pool).fastest(way, below_s)
    if found is None:
        return None
    works, makespan_s = found
    strategy = works[0].strategy
    time_s = makespan_s + setting.costs.overhead_ms(strategy) / _MS_PER_S
    return Baseline(way=way, strategy=strategy, setting=setting, time_s=time_s)


def _ways_of(request: ProposalRequest, setting: Setting, pool: Pool) -> Ways:
    """Ways to train the request's batches in a setting."""
    model = setting.costs.model
    return Ways(
        batches=request.batches,
        pool=pool,
        costs=setting.costs,
        seq_length=request.counts.longest,
        shape=None if model is None else model.shape,
    )


def _with_ring(model: AnalyticCostModel) -> AnalyticCostModel:
    """The model with Transformer Engine's attention, and its ring where that is faster."""
    return replace(model, cp_comm_type="auto", has_te_attention=True)


def _carried(costs: JobCosts, model: AnalyticCostModel) -> JobCosts:
    """The costs of the same job by another model.

    Estimated rows are estimated with it; times and limits of measured ones change by as much as the
    model's do.
    """
    profile = costs.profile
    if not profile.is_estimated:
        return costs.by(model)
    possible = possible_schemes(model)
    rows = (
        ProfiledScheme(
            scheme=scheme,
            coefficients=model.coefficients(scheme),
            max_tokens=model.max_tokens(scheme),
        )
        for scheme in dict.fromkeys((*possible, *(row.scheme for row in profile.schemes)))
    )
    return replace(costs, profile=replace(profile, schemes=tuple(rows)), model=model)
