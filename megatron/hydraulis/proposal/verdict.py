"""What a pool gains over the best that the same GPUs do without one.

That best is the **baseline**: the fastest of all static strategies of one scheme with balanced
plans, and of Megatron's dynamic cp; each as the flags of the job say, with the other recomputation
(of every layer, or of none), and with Transformer Engine's ring of keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.hydraulis.cost_model.analytic import AnalyticCostModel
from megatron.hydraulis.cost_model.device import Precision
from megatron.hydraulis.cost_model.estimate_command import possible_schemes
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.profile import ProfiledScheme
from megatron.hydraulis.cost_model.trained_model import EVERY_LAYER, NO_RECOMPUTE
from megatron.hydraulis.proposal.propose import Proposal, ProposalRequest, best_static
from megatron.hydraulis.simulator.ways import BALANCED, MEGATRON_CP, Ways
from megatron.hydraulis.strategy import Pool, Strategy

_MS_PER_S = 1e3
RECOMPUTE_EVERY_LAYER = (
    *("--recompute-granularity", "full", "--recompute-method", "uniform"),
    *("--recompute-num-layers", "1"),
)
_RING = ("--core-attention", "te", "--cp-comm-type", "p2p")
DYNAMIC_CP = "--hybrid-context-parallel"
"""Megatron's flag of its dynamic cp."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How a job runs its layers, with its costs."""

    costs: JobCosts
    recomputation: tuple[str, ...] | None = None
    """Flags that replace the job's; None for the job's own, none of them for no recomputation."""
    ring: tuple[str, ...] = ()
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
            ", ring of Transformer Engine" if self.ring else ""
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
        models: dict[tuple[tuple[str, ...] | None, tuple[str, ...]], AnalyticCostModel]
        models = {(None, ()): model, (recomputation, ()): other}
        if model.precision is Precision.BF16 and model.device.name != "cpu":
            for (flags, _), each in list(models.items()):
                models[flags, _RING] = replace(each, cp_comm_type="p2p", has_te_attention=True)
        for (flags, ring), each in models.items():
            if each != model and (not ring or each != models[flags, ()]):
                found = _carried(costs, each)
                if any(row.max_tokens for row in found.profile.schemes):
                    yield cls(costs=found, recomputation=flags, ring=ring)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The best without a pool; times are means over the batches."""

    way: str
    """`BALANCED` or `MEGATRON_CP`."""
    strategy: Strategy
    setting: Setting
    time_s: float
    """With what regrouping and optimizer add."""

    @property
    def text(self) -> str:
        """Strategy and setting in a few words."""
        how = f"Megatron's {DYNAMIC_CP}" if self.way == MEGATRON_CP else "balanced plans"
        return f"{self.strategy} with {how}{self.setting.text}"

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
class PoolVerdict:
    """What a pool gains over the baseline."""

    baseline: Baseline
    gain: float
    """Time of the baseline over that of the pool."""

    def __str__(self) -> str:
        return (
            f"{self.gain:.3f} × as fast as {self.baseline.text}, the best without a pool: "
            f"{self.baseline.time_s:.4f} s"
        )

    def to_json(self) -> dict[str, Any]:
        """All figures by name."""
        return {"gain": self.gain, "baseline": self.baseline.to_json()}


def judged(request: ProposalRequest, costs: JobCosts, proposal: Proposal) -> Proposal:
    """The proposal with its verdict, or without one if no baseline holds the longest sequence."""
    settings = Setting.all_of(costs)
    baseline = best_baseline(request, settings, proposal.pool, proposal.best_static)
    if baseline is None:
        return proposal
    verdict = PoolVerdict(baseline=baseline, gain=baseline.time_s / proposal.mean_s)
    return replace(proposal, verdict=verdict)


def best_baseline(
    request: ProposalRequest,
    settings: Iterable[Setting],
    pool: Pool,
    static: tuple[Strategy, float] | None = None,
) -> Baseline | None:
    """The fastest baseline for the batches; None if none holds the longest sequence.

    Args:
        settings: of the job, `Setting.all_of`.
        pool: of the job.
        static: the best static strategy in the first setting and its time in s, if it is known.
    """
    best: Baseline | None = None
    for number, setting in enumerate(settings):
        below_s = float("inf") if best is None else best.time_s
        found = static
        if number or static is None:
            found = best_static(request, setting.costs.profile, below_s)
        if found is not None and found[1] < below_s:
            strategy, below_s = found
            best = Baseline(way=BALANCED, strategy=strategy, setting=setting, time_s=below_s)
        ways = Ways(
            batches=request.batches,
            pool=pool,
            costs=setting.costs,
            seq_length=request.counts.longest,
        )
        dynamic = ways.fastest(MEGATRON_CP, below_s)
        if dynamic is not None:
            works, makespan_s = dynamic
            strategy = works[0].strategy
            time_s = makespan_s + setting.costs.overhead_ms(strategy) / _MS_PER_S
            best = Baseline(way=MEGATRON_CP, strategy=strategy, setting=setting, time_s=time_s)
    return best


def _carried(costs: JobCosts, model: AnalyticCostModel) -> JobCosts:
    """The costs of the same job by another model.

    Estimated rows are estimated with it; times and limits of measured ones change by as much as the
    model's do.
    """
    profile = costs.profile
    if not profile.is_estimated:
        return costs.by(model)
    cluster = model.cluster
    possible = possible_schemes(model.shape, cluster.num_ranks, cluster.ranks_per_node)
    rows = (
        ProfiledScheme(
            scheme=scheme,
            coefficients=model.coefficients(scheme),
            max_tokens=model.max_tokens(scheme),
        )
        for scheme in dict.fromkeys((*possible, *(row.scheme for row in profile.schemes)))
    )
    return replace(costs, profile=replace(profile, schemes=tuple(rows)), model=model)
