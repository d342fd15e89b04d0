"""Ways to train the same batches: the pool, and what would be done without it.

==================  ============================================  =================================
way                 strategy                                      sequences
==================  ============================================  =================================
static, padding     the best homogeneous one that holds the       padded to the batch's longest,
                    limit, for this way                           dealt in turn
static, fixed rows  the best such one for this way                rows of about equal tokens, at
                                                                  most the limit, padded to it
static, packing     the best such one for this way                the same rows without padding
static, dispatch    the best such one for this way                to the replica that would be done
                                                                  first; rows filled up to the limit
static, balanced    the best such one for this way                certified planner
best per batch      the best homogeneous one for each batch       certified planner
cp only             groups of cp widths at one tp, per batch      certified planner
pool                any of the pool, per batch                    certified planner
==================  ============================================  =================================

Best is what the simulation finds best over all batches (static ways), or the planner for a batch.
Homogeneous strategies are those of the cost profile's schemes whose replicas fill the job, and the
pool's own. For "best per batch" and "cp only" greedy plans say which two strategies of a batch the
certified planner looks at; the tp of "cp only" is that of the least greedy plans over all batches.
Without measured schemes of cp, "cp only" needs model and links: what cp costs is its exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from megatron.hydraulis.cost_model.context import ContextCosts
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.planner.costs import SchemeCost
from megatron.hydraulis.planner.greedy import best_fit, dispatch
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.simulator.batch_planning import BatchPlanning
from megatron.hydraulis.simulator.context_groups import context_group_pools
from megatron.hydraulis.simulator.fixed_length import deal_padded, fixed_length_shares
from megatron.hydraulis.simulator.work import IterationWork, MicroBatchWork
from megatron.hydraulis.strategy import Pool, Strategy

__all__ = ["WAYS", "Ways"]

PADDING, FIXED_ROWS = "static, padding", "static, fixed rows"
PACKING, DISPATCH = "static, packing", "static, dispatch"
BALANCED, PER_BATCH = "static, balanced", "best per batch"
CP_ONLY, POOL = "cp only", "pool"
WAYS = (PADDING, FIXED_ROWS, PACKING, DISPATCH, BALANCED, PER_BATCH, CP_ONLY, POOL)
"""In the order in which each has one freedom more, but for the last two."""


def _nothing() -> None:
    """Nobody wants to know."""


Batches = Sequence[Sequence[int]]
Works = list[IterationWork]


@dataclass(frozen=True, kw_only=True)
class Ways:
    """All ways to train some batches.

    Raises ConfigurationError for no batch.
    """

    batches: Batches
    """Lengths of the sequences of each iteration, in tokens."""
    pool: Pool
    profile: ProfileCostModel
    context_costs: ContextCosts
    seq_length: int | None = None
    """Most tokens of a sequence of the corpus; None for those of the batches."""
    shape: ModelShape | None = None
    """Where it is given, strategies that cannot cut the model are left out."""
    plan_time_s: float | None = None
    """What a plan takes; None for the CPU time that it takes here."""
    planning: BatchPlanning = field(default_factory=BatchPlanning)
    advance: Callable[[], None] = field(default=_nothing)
    """Called for each batch of each way."""

    def __post_init__(self) -> None:
        if not self.batches:
            raise ConfigurationError(
                "simulation: there is at least 1 batch but 0 are given; simulate more iterations"
            )

        if self.longest > (self.seq_length or self.longest):
            raise ConfigurationError(
                f"simulation: sequences have at most --seq-length {self.seq_length} tokens but "
                f"one has {self.longest}; raise it or cut the sequences"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all batches."""
        return max(max(batch) for batch in self.batches)

    @property
    def limit(self) -> int:
        """Tokens of the longest sequence that may come: what a static strategy has to hold."""
        return self.longest if self.seq_length is None else self.seq_length

    def candidates(self, way: str) -> list[tuple[CostModel, Works]]:
        """What a way could do, each with the cost model that it takes place in; the best counts.

        Empty where no strategy of the kind holds the longest sequence. Raises PlanError where a
        batch cannot be planned at all, StrategyError for a scheme that the profile lacks.
        """
        if way == POOL:
            return [(self.profile, self.planned(self.pool, self.profile))]
        if way == PER_BATCH:
            homogeneous = self.homogeneous()
            if not any(self._holds(strategy) for strategy in homogeneous):
                return []
            pool = Pool.of(*homogeneous)
            return [(self.profile, self.planned(pool, self.profile, shortlists=True))]
        if way == CP_ONLY:
            return self._context_parallel()
        make: dict[str, Callable[[Strategy], Works]] = {
            PADDING: self._padded,
            FIXED_ROWS: partial(self._fixed_rows, pads=True),
            PACKING: partial(self._fixed_rows, pads=False),
            DISPATCH: self._dispatched,
            BALANCED: lambda strategy: self.planned(Pool.of(strategy), self.profile),
        }
        return [(self.profile, make[way](strategy)) for strategy in self.static()]

    def homogeneous(self) -> list[Strategy]:
        """Strategies of one scheme that fill the job, each once, by their canonical text."""
        num_ranks, per_node = self.pool.num_ranks, self.pool.ranks_per_node
        found: dict[str, Strategy] = {}
        for strategy in self.pool.strategies:
            if len(strategy.schemes) == 1 and not strategy.idle_ranks:
                found[str(strategy)] = strategy
        for row in self.profile.schemes:
            num_each = row.scheme.num_ranks
            if row.max_tokens and num_ranks % num_each == 0:
                text = f"{num_ranks // num_each}*{row.scheme}"
                strategy = Strategy.parse(text, num_ranks, ranks_per_node=per_node)
                found.setdefault(str(strategy), strategy)
        return [strategy for strategy in found.values() if self._fits_model(strategy)]

    def static(self) -> list[Strategy]:
        """Those of them that hold the longest sequence."""
        return [strategy for strategy in self.homogeneous() if self._holds(strategy)]

    def _holds(self, strategy: Strategy) -> bool:
        return self._cost(strategy).max_tokens >= self.limit

    def _fits_model(self, strategy: Strategy) -> bool:
        if self.shape is None:
            return True
        try:
            strategy.check_model(self.shape)
        except StrategyError:
            return False
        return True

    def _cost(self, strategy: Strategy) -> SchemeCost:
        """Of every replica of a homogeneous strategy."""
        scheme = strategy.schemes[0]
        limit = strategy.token_limit(scheme)
        return SchemeCost(
            coefficients=self.profile.coefficients(scheme),
            max_tokens=self.profile.max_tokens(scheme) if limit is None else limit,
            num_stages=scheme.pp,
        )

    def _padded(self, strategy: Strategy) -> Works:
        works = []
        for batch in self.batches:
            dealt = deal_padded(batch, len(strategy.replicas), self._cost(strategy).max_tokens)
            replicas = tuple(
                tuple(
                    MicroBatchWork.padded([batch[i] for i in members], max(batch))
                    for members in share
                )
                for share in dealt
            )
            works.append(IterationWork(strategy, replicas))
            self.advance()
        return works

    def _fixed_rows(self, strategy: Strategy, *, pads: bool) -> Works:
        works = []
        for batch in self.batches:
            shares = fixed_length_shares(batch, self.limit, len(strategy.replicas))
            replicas = tuple(
                tuple(self._row([batch[i] for i in row], pads=pads) for row in share if row)
                for share in shares
            )
            works.append(IterationWork(strategy, replicas))
            self.advance()
        return works

    def _row(self, lengths: Sequence[int], *, pads: bool) -> MicroBatchWork:
        num_padding = self.limit - sum(lengths) if pads else 0
        return MicroBatchWork.packed(lengths, num_padding=num_padding)

    def _dispatched(self, strategy: Strategy) -> Works:
        cost = self._cost(strategy)
        works = []
        for batch in self.batches:
            falling = sorted(range(len(batch)), key=lambda i: (-batch[i], i))
            shares = dispatch(falling, batch, [cost] * len(strategy.replicas))
            filled = [best_fit(share, batch, cost.max_tokens) for share in shares]
            replicas = tuple(
                tuple(MicroBatchWork.packed([batch[i] for i in members]) for members in share)
                for share in filled
            )
            works.append(IterationWork(strategy, replicas))
            self.advance()
        return works

    def _context_parallel(self) -> list[tuple[CostModel, Works]]:
        if not self.context_costs.knows_exchange:
            return []
        pools = context_group_pools(
            self.context_costs,
            num_ranks=self.pool.num_ranks,
            ranks_per_node=self.pool.ranks_per_node,
            longest=self.limit,
        )
        if not pools:
            return []
        times_s = {}
        for tp, pool in pools.items():
            planner = GreedyPlanner(pool, self.context_costs)
            times_s[tp] = sum(planner.plan(batch).predicted_time_s for batch in self.batches)
        best = pools[min(times_s, key=lambda tp: times_s[tp])]
        return [(self.context_costs, self.planned(best, self.context_costs, shortlists=True))]

    def planned(self, pool: Pool, cost_model: CostModel, *, shortlists: bool = False) -> Works:
        """Every batch planned: by the certified planner, or on a short list of strategies.

        Raises PlanError as the planner does.
        """
        works = []
        timed_plans = self.planning.plans(pool, cost_model, self.batches, shortlists=shortlists)
        for timed in timed_plans:
            works.append(
                IterationWork.of_plan(
                    timed.plan,
                    pool.strategy(timed.plan.strategy),
                    plan_time_s=timed.cpu_s if self.plan_time_s is None else self.plan_time_s,
                )
            )
            self.advance()
        return works
