"""Ways to train the same batches: the pool, and alternatives without it.

==================  ============================================  =================================
way                 strategy                                      sequences
==================  ============================================  =================================
static, padding     the best homogeneous one that holds the       padded to the batch's longest,
                    limit, for this way                           distributed round-robin
static, fixed rows  the best such one for this way                rows of about equal tokens, at
                                                                  most the limit, padded to it, of
                                                                  which 1, 2, 4, … fill a
                                                                  micro-batch: the best number
static, packing     the best such one for this way                the same rows without padding
megatron, packing   the best such one for this way                `schedulers.packed_rows`
static, dispatch    the best such one for this way                to the replica that would finish
                                                                  first; rows filled up to the limit
static, balanced    the best such one for this way                certified planner
best per batch      the best homogeneous one for each batch       certified planner
equal groups        groups of one cp at one tp, per batch         as static, dispatch
megatron, cp        groups of cp widths at one tp, per            `schedulers.context_waves`
                    micro-batch
cp only             groups of cp widths at one tp, per batch      certified planner
ceiling             none: no plan can be faster                   spread over all ranks perfectly
pool                any of the pool, per batch                    certified planner
==================  ============================================  =================================

The best static strategy is the fastest simulated one over all batches; per batch the planner
chooses. Homogeneous strategies are those of the cost profile's schemes whose replicas fill the job,
and the pool's own. With experts they include ``cp8~ep8``, Megatron's expert parallelism over
data-parallel ranks, see `Layout`. "megatron, cp" has pp 1 only; the groups of a wave pack their
sequences into rows of what fits, and run as many of them, since they may share experts. For "best
per batch" and "cp only" greedy plans select two strategies per batch for the certified planner. The
tp of "cp only", and the six strategies that "static, balanced" plans, have the fastest greedy plans
of 16 batches; tp and ep of the other ways with cp are the fastest simulated ones. If no scheme with
cp was measured, these ways need model and links to estimate the cost of cp.

"equal groups" are the groups of equal width that FlexSP is compared with (arXiv 2412.01523, section
6.1: the best width for each batch). The ceiling computes tokens at the rate of the scheme that
needs the fewest ranks' milliseconds per token, attention likewise, and divides both evenly: without
constant costs, pipelines to fill, memory limits, regrouping and planning.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.planner.costs import SchemeCost, scheme_cost
from megatron.hydraulis.planner.greedy import best_fit, dispatch, longest_first
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.simulator.batches import BatchPlanning
from megatron.hydraulis.simulator.schedulers import Wave, context_waves, packed_rows
from megatron.hydraulis.simulator.work import CeilingCosts, IterationWork, MicroBatchWork
from megatron.hydraulis.strategy import Pool, Scheme, Strategy

PADDING, FIXED_ROWS = "static, padding", "static, fixed rows"
PACKING, DISPATCH = "static, packing", "static, dispatch"
BALANCED, PER_BATCH = "static, balanced", "best per batch"
MEGATRON_PACKING, MEGATRON_CP = "megatron, packing", "megatron, cp"
EQUAL_GROUPS, CP_ONLY = "equal groups", "cp only"
CEILING, POOL = "ceiling", "pool"
CONTEXT_WAYS = (EQUAL_GROUPS, MEGATRON_CP, CP_ONLY)
"""Of context parallelism alone, at one tp."""
WAYS = (
    *(PADDING, FIXED_ROWS, PACKING, MEGATRON_PACKING, DISPATCH, BALANCED, PER_BATCH),
    *CONTEXT_WAYS,
    *(CEILING, POOL),
)
_NUM_RANK_LIMITS = 3
"""Limits of a rank that "megatron, cp" may choose from: what fits, a half, a quarter."""

_NUM_BALANCED = 6
"""Static strategies that the certified planner gets; models with experts have over a hundred."""
_NUM_GREEDY_BATCHES = 16

Batches = Sequence[Sequence[int]]
Works = list[IterationWork]
Shares = tuple[tuple[MicroBatchWork, ...], ...]
"""Micro-batches of each replica."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A strategy of one scheme as Megatron trains it: data-parallel lanes with rows of their own.

    A lane is a replica; with ``~`` and ep, where Megatron's replicas share experts, a group of the
    cp ranks. The lanes of a replica run their micro-batches at the same time.
    """

    strategy: Strategy
    scheme: Scheme
    """Of a lane."""
    cost: SchemeCost
    """Of a lane."""

    @property
    def num_lanes(self) -> int:
        """Of the job."""
        return self.strategy.num_ranks // self.scheme.num_ranks

    def work(self, shares: Shares) -> IterationWork:
        """The micro-batches of each lane, by replica."""
        of_replica = len(shares) // len(self.strategy.replicas)
        if of_replica == 1:
            return IterationWork(self.strategy, shares)
        return IterationWork(
            self.strategy,
            tuple(
                tuple(
                    MicroBatchWork.wave([(self.scheme.cp, row) for row in rows])
                    for rows in itertools.zip_longest(*lanes)
                )
                for lanes in itertools.batched(shares, of_replica)
            ),
        )


@dataclass(frozen=True, kw_only=True)
class Ways:
    """All ways to train some batches.

    Raises ConfigurationError for no batch.
    """

    batches: Batches
    """Lengths of the sequences of each iteration, in tokens."""
    pool: Pool
    costs: JobCosts
    seq_length: int | None = None
    """Most tokens of a sequence of the corpus; None for the longest of the batches."""
    shape: ModelShape | None = None
    """If given, strategies that cannot split the model are left out."""
    plan_time_s: float | None = None
    """Time of a plan; None for the CPU time that it takes here."""
    row_quantum: int = 1
    """To which planned rows are rounded up, in tokens."""
    planning: BatchPlanning = field(default_factory=BatchPlanning)
    advance: Callable[[], None] = lambda: None
    """Called after each batch of each way."""
    _rows: dict[tuple[int, tuple[int, ...]], list[list[list[int]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Known `fixed_length_shares`."""

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
    def profile(self) -> ProfileCostModel:
        """What strategies without assumed widths cost."""
        return self.costs.profile

    @property
    def simulated(self) -> ProfileCostModel:
        """The profile without computed overheads, which the simulator makes events of."""
        return replace(self.profile, regroup=None)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all batches."""
        return max(max(batch) for batch in self.batches)

    @property
    def limit(self) -> int:
        """Tokens of the longest possible sequence, which a static strategy must hold."""
        return self.longest if self.seq_length is None else self.seq_length

    def candidates(self, way: str) -> list[tuple[CostModel, Works]]:
        """What a way could do, with the cost model for each; the best candidate counts.

        Empty if no such strategy holds the longest sequence. Raises PlanError if a batch cannot be
        planned at all, StrategyError for a scheme that the profile lacks.
        """
        if way == POOL:
            return [(self.simulated, self.planned(self.pool, self.profile))]
        if way == PER_BATCH:
            homogeneous = self.homogeneous()
            if not any(self._holds(strategy) for strategy in homogeneous):
                return []
            pool = Pool.of(*homogeneous)
            return [(self.simulated, self.planned(pool, self.profile, shortlists=True))]
        if way in CONTEXT_WAYS:
            return self._context_parallel(way)
        if way == CEILING:
            return [self._ceiling()]
        if way == BALANCED:
            pools = self._fastest(map(Pool.of, self.static()), self.profile, _NUM_BALANCED)
            return [(self.simulated, self.planned(pool, self.profile)) for pool in pools]
        found: list[tuple[CostModel, Works]] = []
        for layout in self.layouts():
            for shares_of in self._variants(way, layout):
                works = []
                for batch in self.batches:
                    works.append(layout.work(shares_of(layout, batch)))
                    self.advance()
                found.append((self.simulated, works))
        return found

    def _variants(
        self, way: str, layout: Layout
    ) -> Sequence[Callable[[Layout, Sequence[int]], Shares]]:
        """How a way without planner could distribute a batch."""
        if way == PADDING:
            return [_padded]
        if way == MEGATRON_PACKING:
            return [_packed, partial(_packed, limit=self.limit)]
        if way == DISPATCH:
            return [_dispatched]
        most_rows = layout.cost.max_tokens // self.limit
        return [
            partial(self._fixed_rows, num_rows=1 << power, pads=way == FIXED_ROWS)
            for power in range(most_rows.bit_length())
        ]

    def homogeneous(self) -> list[Strategy]:
        """Strategies of one scheme that fill the job, each once.

        ``~`` only with ep, where it is Megatron's expert parallelism over data-parallel ranks, and
        of several widths only the narrowest that holds the longest sequence.
        """
        num_ranks, per_node = self.pool.num_ranks, self.pool.ranks_per_node
        found: dict[str, Strategy] = {}
        for strategy in self.pool.strategies:
            is_usual = all(scheme.ep > 1 or not scheme.splits_cp for scheme in strategy.schemes)
            if is_usual and len(strategy.schemes) == 1 and not strategy.idle_ranks:
                found[str(strategy)] = strategy
        for scheme in (*self._plain_schemes(), *self._splitting_schemes()):
            if num_ranks % scheme.num_ranks == 0:
                text = f"{num_ranks // scheme.num_ranks}*{scheme}"
                strategy = Strategy.parse(text, num_ranks, ranks_per_node=per_node)
                found.setdefault(str(strategy), strategy)
        return [strategy for strategy in found.values() if self._fits_model(strategy)]

    def _plain_schemes(self) -> Iterator[Scheme]:
        for row in self.profile.schemes:
            if row.max_tokens and row.scheme == row.scheme.as_replica:
                yield row.scheme

    def _splitting_schemes(self) -> Iterable[Scheme]:
        """By tp, ep and pp the narrowest that holds the longest sequence."""
        narrowest: dict[tuple[int, int, int], Scheme] = {}
        for scheme in self.profile.splitting_schemes:
            if scheme.ep > 1 and self.profile.max_tokens(scheme) >= self.limit:
                narrowest.setdefault((scheme.tp, scheme.ep, scheme.pp), scheme)
        return narrowest.values()

    def static(self) -> list[Strategy]:
        """Homogeneous strategies that hold the longest sequence."""
        return [strategy for strategy in self.homogeneous() if self._holds(strategy)]

    def layouts(self) -> Iterator[Layout]:
        """Those whose lanes hold the longest sequence; with ``~`` the replicas are the smallest
        that hold all ep ranks."""
        for strategy in self.homogeneous():
            (scheme,) = strategy.schemes
            whole = scheme.of_context_group(scheme.cp)
            for lane in scheme.group_schemes:
                layout = self._layout(strategy, lane)
                is_whole = scheme.splits_cp and lane == whole  # the scheme without ``~``
                if lane.as_replica == whole and not is_whole and layout.cost.longest >= self.limit:
                    yield layout

    def _holds(self, strategy: Strategy) -> bool:
        return self._layout(strategy, strategy.schemes[0]).cost.longest >= self.limit

    def _fits_model(self, strategy: Strategy) -> bool:
        if self.shape is None:
            return True
        try:
            strategy.check_model(self.shape)
        except StrategyError:
            return False
        return True

    def _layout(
        self, strategy: Strategy, lane: Scheme, cost_model: CostModel | None = None
    ) -> Layout:
        """By default with the profile's costs."""
        cost_model = cost_model or self.profile
        return Layout(strategy, lane, scheme_cost(lane, strategy, cost_model, Limits(cost_model)))

    def _fixed_rows(
        self, layout: Layout, batch: Sequence[int], *, num_rows: int, pads: bool
    ) -> Shares:
        def work(rows: Sequence[Sequence[int]]) -> MicroBatchWork:
            lengths = [batch[i] for row in rows for i in row]
            num_padding = len(rows) * self.limit - sum(lengths) if pads else 0
            return MicroBatchWork.packed(lengths, num_padding=num_padding)

        key = layout.num_lanes, tuple(batch)
        if key not in self._rows:
            self._rows[key] = fixed_length_shares(batch, self.limit, layout.num_lanes)
        return tuple(
            tuple(map(work, itertools.batched((row for row in share if row), num_rows)))
            for share in self._rows[key]
        )

    def _context_parallel(self, way: str) -> list[tuple[CostModel, Works]]:
        if not self.costs.knows_exchange:
            return []
        simulated = replace(self.costs, profile=self.simulated)
        if way == MEGATRON_CP:
            return [(simulated, works) for works in self._megatron_context()]
        pools = context_group_pools(
            self.costs,
            num_ranks=self.pool.num_ranks,
            ranks_per_node=self.pool.ranks_per_node,
            longest=self.limit if way == CP_ONLY else 1,
        )
        if way == EQUAL_GROUPS:
            return [(simulated, works) for pool in pools.values() if (works := self._equal(pool))]
        best = self._fastest(pools.values(), self.costs, 1)
        return [(simulated, self.planned(pool, self.costs, shortlists=True)) for pool in best]

    def _fastest(self, pools: Iterable[Pool], cost_model: CostModel, num: int) -> list[Pool]:
        """By greedy plans of the first batches."""
        limits = Limits(cost_model, row_quantum=self.row_quantum)

        def time_s(pool: Pool) -> float:
            planner = GreedyPlanner(pool, cost_model, limits)
            batches = self.batches[:_NUM_GREEDY_BATCHES]
            return math.fsum(planner.plan(batch).predicted_time_s for batch in batches)

        found = list(pools)
        return sorted(found, key=time_s)[:num] if len(found) > num else found

    def _equal(self, pool: Pool) -> Works:
        """Each batch on the best strategy of one scheme; empty if none holds the limit."""
        layouts = [
            self._layout(strategy, strategy.schemes[0], self.costs)
            for strategy in pool.strategies
            if len(strategy.schemes) == 1
        ]
        if max(layout.cost.longest for layout in layouts) < self.limit:
            return []
        works = []
        for batch in self.batches:
            best_ms, best = math.inf, None
            for layout in layouts:
                if layout.cost.longest < max(layout.cost.tokens(batch)):
                    continue
                work = layout.work(_dispatched(layout, batch))
                time_ms = self.costs.overhead_ms(layout.strategy) + max(
                    math.fsum(row.time_ms(layout.cost.coefficients) for row in rows)
                    for rows in work.replicas
                )
                if time_ms < best_ms:
                    best_ms, best = time_ms, work
            assert best is not None  # that of the limit holds every batch
            works.append(best)
            self.advance()
        return works

    def _megatron_context(self) -> Iterator[Works]:
        """The works of every tp, ep and limit of a rank."""
        num_ranks, per_node = self.pool.num_ranks, self.pool.ranks_per_node
        rows = {row.scheme for row in self.profile.schemes if row.scheme.pp == 1}
        for tp, ep in sorted({(scheme.tp, scheme.ep) for scheme in rows}):
            width, rest = divmod(num_ranks, tp)
            if rest or width < 2 or width & (width - 1) or tp * width % ep:
                continue  # groups are powers of two
            whole = Scheme(tp, width, splits_cp=True, ep=ep)
            strategy = Strategy.parse(str(whole), num_ranks, ranks_per_node=per_node)
            limits = ((each, self.costs.max_tokens(each)) for each in whole.group_schemes)
            most_tokens = min(limit // each.cp for each, limit in limits)
            for halvings in range(_NUM_RANK_LIMITS):
                rank_tokens = most_tokens >> halvings
                if rank_tokens * width < self.limit or not rank_tokens:
                    break
                works = []
                for batch in self.batches:
                    waves = context_waves(batch, rank_tokens, width)
                    micro_batches = tuple(_wave_works(waves, batch, most_tokens))
                    works.append(IterationWork(strategy, (micro_batches,)))
                    self.advance()
                yield works

    def _ceiling(self) -> tuple[CostModel, Works]:
        """Batches as one micro-batch of one replica of all ranks."""
        num_ranks = self.pool.num_ranks
        schemes = {row.scheme for row in self.profile.schemes if row.scheme.num_ranks <= num_ranks}
        for strategy in self.pool.strategies:
            schemes.update(group for s in strategy.schemes for group in s.group_schemes)
        if self.costs.knows_exchange:
            for scheme in [scheme for scheme in schemes if scheme.pp == 1]:
                schemes.update(
                    scheme.of_context_group(1 << i)
                    for i in range((num_ranks // scheme.tp).bit_length())
                )
        known = [scheme for scheme in schemes if self._knows(scheme)]
        costs = CeilingCosts.of(StageCosts(self.costs, self.shape), known, num_ranks)
        strategy = Strategy.parse(f"tp{num_ranks}", num_ranks)
        works = [IterationWork(strategy, ((MicroBatchWork.packed(b),),)) for b in self.batches]
        return costs, works

    def _knows(self, scheme: Scheme) -> bool:
        try:
            self.costs.coefficients(scheme)
            if self.shape is not None:
                scheme.layers_per_stage(self.shape.num_layers)
        except StrategyError:
            return False
        return True

    def planned(self, pool: Pool, cost_model: CostModel, *, shortlists: bool = False) -> Works:
        """Plans every batch with the certified planner, for all strategies or a short list.

        Raises PlanError as the planner does.
        """
        works = []
        limits = Limits(cost_model, row_quantum=self.row_quantum)
        for timed in self.planning.plans(pool, limits, self.batches, shortlists=shortlists):
            strategy = pool.strategy(timed.plan.strategy)
            time_s = timed.cpu_s if self.plan_time_s is None else self.plan_time_s
            works.append(IterationWork.of_plan(timed.plan, strategy, plan_time_s=time_s))
            self.advance()
        return works


def _works_of(shares: Sequence[Sequence[Sequence[int]]], batch: Sequence[int]) -> Shares:
    """Packed micro-batches of indices by replica and row."""
    return tuple(
        tuple(MicroBatchWork.packed([batch[i] for i in row]) for row in rows) for rows in shares
    )


def _wave_works(
    waves: Iterable[Wave], batch: Sequence[int], rank_tokens: int
) -> Iterator[MicroBatchWork]:
    """As many micro-batches a wave as its groups need rows of rank_tokens a rank."""
    for wave in waves:
        sizes = [size for size, _ in wave]
        shares = [best_fit(indices, batch, rank_tokens * size) for size, indices in wave]
        for rows in itertools.zip_longest(*_works_of(shares, batch)):
            yield MicroBatchWork.wave(list(zip(sizes, rows, strict=True)))


def _padded(layout: Layout, batch: Sequence[int]) -> Shares:
    dealt = deal_padded(batch, layout.num_lanes, layout.cost.max_tokens)
    return tuple(
        tuple(MicroBatchWork.padded([batch[i] for i in row], max(batch)) for row in share)
        for share in dealt
    )


def _packed(layout: Layout, batch: Sequence[int], *, limit: int | None = None) -> Shares:
    """In rows of the limit with its padding for cp; by default of all that fits."""
    cost = layout.cost
    row_tokens = cost.max_tokens if limit is None else cost.tokens([limit])[0]
    return _works_of(packed_rows(cost.tokens(batch), row_tokens, layout.num_lanes), batch)


def _dispatched(layout: Layout, batch: Sequence[int]) -> Shares:
    cost = layout.cost
    lengths = cost.tokens(batch)
    shares = dispatch(longest_first(lengths), lengths, [cost] * layout.num_lanes)
    return _works_of([best_fit(each, lengths, cost.max_tokens) for each in shares], batch)


def deal_padded(
    lengths: Sequence[int], num_replicas: int, max_tokens: int
) -> list[list[list[int]]]:
    """Micro-batches of rows as long as the batch's longest sequence, one per sequence.

    Returns the indices of the sequences by replica and micro-batch: micro-batches are filled in the
    batch's order and distributed round-robin. Raises ValueError if a row does not fit.
    """
    longest = max(lengths)
    if longest > max_tokens:
        raise ValueError(f"a micro-batch of {max_tokens} tokens cannot hold a row of {longest}")
    num_rows = max_tokens // longest
    micro_batches = [list(row) for row in itertools.batched(range(len(lengths)), num_rows)]
    return [micro_batches[replica::num_replicas] for replica in range(num_replicas)]


def fixed_length_shares(
    lengths: Sequence[int], window_tokens: int, num_replicas: int
) -> list[list[list[int]]]:
    """Indices of the sequences of each row of each replica; a row may be empty.

    The rows of `equal_rows` are assigned in alternating order, so that replicas get about the same
    number of tokens. Raises ValueError if a sequence is longer than the window.
    """
    rows = equal_rows(lengths, window_tokens, num_replicas)
    shares: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    for turn, start in enumerate(range(0, len(rows), num_replicas)):
        order = range(num_replicas) if turn % 2 == 0 else reversed(range(num_replicas))
        for replica, row in zip(order, rows[start : start + num_replicas], strict=True):
            shares[replica].append(row)
    return shares


def equal_rows(lengths: Sequence[int], window_tokens: int, num_replicas: int) -> list[list[int]]:
    """Indices of the sequences of each row: a multiple of num_replicas rows of about equal tokens.

    As many rows as first-fit decreasing needs, rounded up. Sequences, longest first, go to the row
    with the fewest tokens; if one has no room there, the rows are those of first-fit decreasing.
    The fullest rows come first, and some may be empty. Raises ValueError if a sequence is longer
    than the window.
    """
    rows = first_fit_decreasing(lengths, window_tokens)
    num_rows = num_replicas * math.ceil(len(rows) / num_replicas)
    rows += [[] for _ in range(num_rows - len(rows))]
    balanced: list[list[int]] = [[] for _ in range(num_rows)]
    tokens = [0] * num_rows
    for index in longest_first(lengths):
        place = tokens.index(min(tokens))
        balanced[place].append(index)
        tokens[place] += lengths[index]
    if max(tokens) <= window_tokens:
        rows = balanced
    return sorted(rows, key=lambda row: -sum(lengths[i] for i in row))


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each row; longest first, each in the first row with room.

    Raises ValueError if a sequence is longer than a row.
    """
    if max(lengths, default=0) > row_tokens:
        raise ValueError(f"a row of {row_tokens} tokens cannot hold one of {max(lengths)}")
    rows: list[list[int]] = []
    room: list[int] = []
    for index in longest_first(lengths):
        place = next((i for i, free in enumerate(room) if free >= lengths[index]), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[place].append(index)
        room[place] -= lengths[index]
    return rows


def context_group_pools(
    costs: JobCosts, *, num_ranks: int, ranks_per_node: int, longest: int
) -> dict[int, Pool]:
    """Pools for training with context parallelism alone: one tp, groups of ranks of several widths.

    FlexSP (arXiv 2412.01523) and other dynamic context parallelism can choose from these: weights
    do not move, so tp is fixed and there is no pipeline. Widths are powers of two. Here a strategy
    lasts an iteration; FlexSP may regroup the ranks for every micro-batch, which helps if groups
    wait for each other at each of them, as under ZeRO-3. Costs of widths that were not measured are
    assumed: see cost_model/job_costs.py.

    Returns:
        By tp, strategies that hold a sequence of `longest` tokens: with groups of at most two
        widths, and with widths halved down to 1. A tp is left out if the profile lacks it without
        pipeline, or nothing holds the sequence.
    """
    limits = Limits(costs)
    pools: dict[int, Pool] = {}
    degrees = sorted({row.scheme.tp for row in costs.profile.schemes if row.scheme.pp == 1})
    for tp in degrees:
        has_row = costs.is_measured(Scheme(tp=tp)) and limits.of_scheme(Scheme(tp=tp)) > 0
        if num_ranks % tp or not has_row:
            continue
        strategies = []
        for widths in _groupings(num_ranks // tp):
            if limits.of_scheme(Scheme(tp=tp, cp=widths[0])) < longest:
                continue
            text = "+".join(f"{num}*tp{tp}cp{cp}" for cp, num in Counter(widths).items())
            strategies.append(Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node))
        if strategies:
            pools[tp] = Pool.of(*strategies)
    return pools


def _groupings(num_columns: int) -> Iterator[tuple[int, ...]]:
    """Widths of groups, in descending order, that use every column."""
    found: dict[tuple[int, ...], None] = {}
    widest = 1 << (num_columns.bit_length() - 1)
    while widest:
        rest = num_columns - widest
        narrow = widest
        while narrow:
            if rest % narrow == 0:
                found[(widest, *(narrow,) * (rest // narrow))] = None
            narrow //= 2
        halved, width = [widest], widest
        while sum(halved) < num_columns:
            width = max(1, min(width // 2, 1 << ((num_columns - sum(halved)).bit_length() - 1)))
            halved.append(width)
        found[tuple(halved)] = None
        widest //= 2
    yield from found
