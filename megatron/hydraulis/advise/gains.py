"""What a job gains by packing, balance and a pool, by predicted times of the same batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.proposal.candidates import Candidates
from megatron.hydraulis.proposal.propose import OnProgress, Proposal, propose
from megatron.hydraulis.simulator.ways import CEILING, FIXED_ROWS, PACKING, Ways
from megatron.hydraulis.simulator.work import IterationWork, MicroBatchWork
from megatron.hydraulis.strategy import Scheme, Strategy

_MS_PER_S = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One way to train, with mean times over the batches."""

    name: str
    strategy: str
    """Of a pool the strategies by their number of batches."""
    makespan_s: float
    regroup_s: dict[str, float]
    """What regrouping and optimizer add, by how it counts."""
    memory_bytes: float
    """Estimated, of the fullest rank with the largest micro-batch that its schemes hold, or that
    rows of fixed length fill."""

    def time_s(self, kind: str) -> float:
        """Mean time of an iteration."""
        return self.makespan_s + self.regroup_s[kind]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What a job gains; times are predicted and of the same batches."""

    proposal: Proposal
    fixed_rows: Choice
    """The best homogeneous layout with rows of fixed length."""
    packing: Choice
    """The best one with the same rows without padding."""
    static: Choice
    """The best one with balanced plans."""
    pool: Choice
    ceiling_s: float
    """No plan is faster, see simulator/ways.py."""
    bound_s: float
    """No plan of these schemes is faster, see `least_makespan_ms`."""
    num_tokens: float
    """Of a batch, mean."""
    model_flops: float
    """Of a batch, mean, see `causal_flops`."""
    kinds: tuple[str, ...]
    """How regrouping can count, see `ProfileCostModel.readings`."""

    @property
    def choices(self) -> tuple[Choice, ...]:
        """From the least freedom to the most."""
        return self.fixed_rows, self.packing, self.static, self.pool

    @property
    def kind(self) -> str:
        """How regrouping counts where one figure is given."""
        return self.kinds[-1]

    def gain(self, over: Choice, kind: str | None = None) -> float:
        """Time of another choice over that of the pool."""
        kind = kind or self.kind
        return over.time_s(kind) / self.pool.time_s(kind)


def causal_flops(shape: ModelShape, lengths: Iterable[int]) -> float:
    """Floating-point operations that a batch needs, forward and backward.

    6 per entry of a matrix, the output layer included, and token; for causal attention
    6·layers·q·s² per sequence of s tokens, half of arXiv 2204.02311's; less under a window.
    """
    entries = shape.num_layers * shape.num_matrix_parameters_per_layer
    entries += shape.num_embedding_parameters
    squared = (lambda s: s * s) if shape.window is None else shape.window.squared
    attention = 6.0 * shape.num_layers * shape.score_size
    return math.fsum(6.0 * entries * length + attention * squared(length) for length in lengths)


def advise(
    costs: JobCosts,
    batches: Sequence[Sequence[int]],
    *,
    num_ranks: int,
    ranks_per_node: int,
    longest: int,
    max_strategies: int = 7,
    row_quantum: int = 1,
    seed: int = 0,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Advice:
    """Proposes a pool and compares it with training of fixed strategies.

    Args:
        costs: with a model, and with rows for all cp that are offered.
        batches: lengths in tokens; longest: of the corpus.

    Raises PlanError and ConfigurationError as `propose`, ConfigurationError if no homogeneous
    strategy holds the longest sequence.
    """
    profile = costs.profile
    assert costs.model is not None
    assert profile.regroup is not None
    shape, memory = costs.model.shape, costs.model.memory
    candidates = Candidates.of(profile, num_ranks, ranks_per_node, batches=batches)
    proposal = propose(
        candidates,
        profile,
        batches,
        max_strategies=max_strategies,
        longest=longest,
        seed=seed,
        row_quantum=row_quantum,
        on_progress=on_progress,
    )
    if proposal.static is None or proposal.static_s is None:
        raise ConfigurationError(
            f"advice: a static strategy of one scheme must hold the longest sequence, {longest} "
            f"tokens, on all {num_ranks} ranks but none does; lower --seq-length"
        )
    models = profile.readings()

    def choice(
        name: str,
        shares: Sequence[tuple[Strategy, float]],
        makespan_s: float,
        num_tokens: int | None = None,
    ) -> Choice:
        """shares: strategies with their shares of the batches."""
        return Choice(
            name=name,
            strategy=" ".join(str(strategy) for strategy, _ in shares),
            makespan_s=makespan_s,
            regroup_s={
                kind: math.fsum(share * model.overhead_ms(each) for each, share in shares)
                / _MS_PER_S
                for kind, model in models.items()
            },
            memory_bytes=memory.reserve_bytes
            + max(
                memory.peak_bytes(scheme, stage, num_tokens or profile.max_tokens(scheme))
                for strategy, _ in shares
                for scheme in strategy.schemes
                for stage in range(scheme.pp)
            ),
        )

    ways = Ways(
        batches=batches,
        pool=proposal.pool,
        costs=costs,
        seq_length=longest,
        shape=shape,
    )
    fixed = {}
    for done, way in enumerate((FIXED_ROWS, PACKING)):
        on_progress("baselines", done, 2)
        works, makespan_s = _fastest(ways.candidates(way), profile)
        num_tokens = max(
            row.num_computed for work in works for rows in work.replicas for row in rows
        )
        fixed[way] = choice(way, [(works[0].strategy, 1.0)], makespan_s, num_tokens)
    on_progress("baselines", 2, 2)
    static = Strategy.parse(proposal.static, num_ranks, ranks_per_node=ranks_per_node)
    static_s = proposal.static_s - profile.overhead_ms(static) / _MS_PER_S
    used = [proposal.pool.strategy(name) for name, _ in proposal.plans]
    overheads_s = [profile.overhead_ms(strategy) / _MS_PER_S for strategy in used]
    shares = [(strategy, used.count(strategy) / len(used)) for strategy in proposal.pool.strategies]
    ((ceiling, _),) = ways.candidates(CEILING)
    all_ranks = ceiling.coefficients(static.schemes[0])
    return Advice(
        proposal=proposal,
        fixed_rows=fixed[FIXED_ROWS],
        packing=fixed[PACKING],
        static=choice("static, balanced", [(static, 1.0)], static_s),
        pool=choice(
            "pool",
            shares,
            fmean(
                time_s - overhead_s
                for (_, time_s), overhead_s in zip(proposal.plans, overheads_s, strict=True)
            ),
        ),
        ceiling_s=fmean(map(all_ranks.time_ms, batches)) / _MS_PER_S,
        bound_s=fmean(least_makespan_ms(profile, batch, num_ranks) for batch in batches)
        / _MS_PER_S,
        num_tokens=fmean(map(sum, batches)),
        model_flops=fmean(causal_flops(shape, batch) for batch in batches),
        kinds=tuple(models),
    )


def least_makespan_ms(profile: ProfileCostModel, batch: Sequence[int], num_ranks: int) -> float:
    """Limit below which no plan's makespan is.

    Each sequence runs on the scheme that holds it and needs the least rank time for it, with its
    part of the constant time of a full micro-batch. All ranks share that evenly: no pipeline is
    filled, and regrouping takes no time.
    """
    lengths = np.array(batch, np.float64)
    least_ms = np.full(len(batch), np.inf)
    for row in profile.schemes:
        if row.max_tokens and row.scheme.num_ranks <= num_ranks:
            times, limit = row.coefficients, row.max_tokens
            each_ms = times.sequence_time_ms(lengths) + times.c_ms / limit * lengths
            each_ms[lengths > limit] = np.inf
            least_ms = np.minimum(least_ms, row.scheme.num_ranks * each_ms)
    return float(least_ms.sum()) / num_ranks


def _fastest(
    candidates: Sequence[tuple[CostModel, Sequence[IterationWork]]], profile: ProfileCostModel
) -> tuple[Sequence[IterationWork], float]:
    """The works of the fastest candidate, overhead included, and their mean makespan in s."""
    times_ms = []
    for _, works in candidates:
        makespan_ms = fmean(_makespan_ms(work, profile) for work in works)
        overhead_ms = profile.overhead_ms(works[0].strategy)
        times_ms.append((makespan_ms + overhead_ms, makespan_ms, works))
    _, makespan_ms, works = min(times_ms, key=lambda found: found[0])
    return works, makespan_ms / _MS_PER_S


def _makespan_ms(work: IterationWork, cost_model: CostModel) -> float:
    """Of replicas whose stages all take the time of the slowest."""

    def replica_ms(scheme: Scheme, rows: Sequence[MicroBatchWork]) -> float:
        times = cost_model.coefficients(scheme)
        of_rows_ms = [row.time_ms(times) for row in rows]
        return pipeline_time_ms(of_rows_ms, scheme.pp, forward_share=times.forward_share)

    replicas = zip(work.strategy.replicas, work.replicas, strict=True)
    return max(replica_ms(replica.scheme, rows) for replica, rows in replicas)
