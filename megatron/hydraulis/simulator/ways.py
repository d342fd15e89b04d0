"""Ways to train the same batches: the pool, and alternatives without it (docs/metrics.md).

The best static strategy is the fastest simulated one over all batches; per batch the planner
chooses. Homogeneous strategies are those of the cost profile's schemes whose replicas fill the job,
and the pool's own. With experts they include ``cp8~ep8``, Megatron's expert parallelism over
data-parallel ranks, see `Layout`. "megatron, cp" has pp 1 only; the groups of a wave pack their
sequences into rows of what fits, and run as many of them, since they may share experts. For "best
per batch" and "cp only" greedy plans select two strategies per batch for the certified planner. tp
and ep of "cp only", and the three strategies that "static, balanced" plans, have the fastest greedy
plans of 16 batches; tp and ep of the other ways with cp are the fastest simulated ones. If no
scheme with cp was measured, these ways need model and links to estimate the cost of cp.

"equal groups" are the groups of equal width that FlexSP is compared with (arXiv 2412.01523, section
6.1: the best width for each batch). The ceiling computes tokens at the rate of the scheme that
needs the fewest ranks' milliseconds per token, attention likewise, and divides both evenly: without
constant costs, pipelines to fill, memory limits, regrouping and planning.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import ConfigurationError, StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.planner.bounds import dispatch_bound_ms
from megatron.hydraulis.planner.costs import PoolCosts, SchemeCost, scheme_cost
from megatron.hydraulis.planner.greedy import best_fit, dispatch, longest_first
from megatron.hydraulis.planner.plan import MS_PER_S
from megatron.hydraulis.planner.planners import GreedyPlanner
from megatron.hydraulis.simulator.batches import BatchPlanning
from megatron.hydraulis.simulator.schedulers import (
    Wave,
    context_waves,
    deal_padded,
    first_fit_decreasing,
    fixed_length_shares,
    packed_rows,
)
from megatron.hydraulis.simulator.work import CeilingCosts, IterationWork, MicroBatchWork
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.terminal import OnProgress

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

_NUM_BALANCED = 3
"""Static strategies that the certified planner gets; models with experts have over a hundred. In
ten cases, dense and with experts, the one with the fastest greedy plans was the best of all whose
greedy plans took at most 10 % longer."""
_NUM_GREEDY_BATCHES = 16

_Step = TypeVar("_Step")
FloatArray = npt.NDArray[np.float64]
Batches = Sequence[Sequence[int]]
Works = list[IterationWork]
Shares = tuple[tuple[MicroBatchWork, ...], ...]
"""Micro-batches of each replica."""
SharesOf = Callable[["Layout", Sequence[int]], Shares]
"""Of a batch's lengths."""


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


@dataclass(frozen=True, slots=True)
class _Amounts:
    """What lanes compute in rows of fixed length: shape (num_batches, num_lanes) each, zeros for a
    lane without rows."""

    tokens: FloatArray
    squares: FloatArray
    """Σs² of the sequences, in tokens²."""
    num_rows: FloatArray
    num_micro_batches: FloatArray
    least_tokens: FloatArray
    """Of a micro-batch."""
    least_squares: FloatArray
    """Of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a way could do."""

    cost_model: CostModel
    works: Callable[[], Works]
    """Makes the work of every batch."""
    least_ms: float = 0.0
    """All batches take at least this; 0.0 if unknown."""


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
    on_progress: OnProgress = lambda what, done, total: None
    """The name of a phase begins with its way."""
    _rows: dict[tuple[int, tuple[int, ...]], list[list[list[int]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Known `fixed_length_shares` without empty rows, by number of lanes and batch."""
    _amounts: dict[tuple[int, int], _Amounts] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Known `_amounts_of_rows`."""

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

    @cached_property
    def simulated(self) -> JobCosts:
        """Costs without computed overheads, which the simulator makes events of."""
        return replace(self.costs, profile=replace(self.profile, regroup=None))

    @cached_property
    def _stages(self) -> StageCosts:
        return StageCosts(self.costs, self.shape)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence of all batches."""
        return max(max(batch) for batch in self.batches)

    @property
    def limit(self) -> int:
        """Tokens of the longest possible sequence, which a static strategy must hold."""
        return self.longest if self.seq_length is None else self.seq_length

    def candidates(self, way: str) -> Iterator[Candidate]:
        """What a way could do, that with the lowest limit first; the fastest counts.

        None if no such strategy holds the longest sequence. Raises PlanError if a batch cannot be
        planned at all, StrategyError for a scheme that the profile lacks.
        """
        if way == CEILING:
            yield self._ceiling()
        elif way in CONTEXT_WAYS:
            if self.costs.knows_exchange:
                yield from self._context_parallel(way)
        elif way == POOL:
            yield from self._planned(way, [self.pool], self.profile)
        elif way == PER_BATCH:
            homogeneous = self.homogeneous()
            if any(self._holds(strategy) for strategy in homogeneous):
                pool = Pool.of(*homogeneous)
                yield from self._planned(way, [pool], self.profile, shortlists=True)
        elif way == BALANCED:
            pools = list(map(Pool.of, self.static()))
            pools = self._fastest(way, pools, self.profile, _NUM_BALANCED)
            yield from self._planned(way, pools, self.profile)
        else:
            limited = sorted(
                (
                    (least_ms, layout, shares_of)
                    for layout in self.layouts()
                    for least_ms, shares_of in self._variants(way, layout)
                ),
                key=lambda each: each[0],
            )
            for least_ms, layout, shares_of in self._tracked(way, limited, len(limited)):
                yield Candidate(self.simulated, partial(self._works, layout, shares_of), least_ms)

    def _tracked(self, what: str, steps: Iterable[_Step], num: int) -> Iterator[_Step]:
        """Yields the steps and reports their progress."""
        self.on_progress(what, 0, num)
        for done, step in enumerate(steps, start=1):
            yield step
            self.on_progress(what, done, num)

    def _works(self, layout: Layout, shares_of: SharesOf) -> Works:
        return [layout.work(shares_of(layout, batch)) for batch in self.batches]

    def _variants(self, way: str, layout: Layout) -> Iterator[tuple[float, SharesOf]]:
        """How a way without planner could distribute a batch, each with a time in ms that all
        batches take at least."""
        if way in (FIXED_ROWS, PACKING):
            most_rows = layout.cost.max_tokens // self.limit
            for num_rows in _powers_of_two(most_rows):
                fixed_rows = partial(self._fixed_rows, num_rows=num_rows, pads=way == FIXED_ROWS)
                yield self._least_ms_of_rows(way, layout, num_rows), fixed_rows
            return
        least_ms = self._least_ms(way, layout)
        makes: dict[str, list[SharesOf]] = {
            PADDING: [_padded],
            MEGATRON_PACKING: [_packed, partial(_packed, limit=self.limit)],
            DISPATCH: [_dispatched],
        }
        for shares_of in makes[way]:
            yield least_ms, shares_of

    def _least_ms(self, way: str, layout: Layout) -> float:
        """No works of a layout take less.

        The slowest lane takes at least the mean of all: tokens and attention shared evenly, in as
        few micro-batches as memory allows, without pipelines to fill.
        """
        tokens, squares = self._sums[way == PADDING]
        num_micro_batches = np.ceil(tokens / layout.cost.max_tokens)
        each_ms = [
            stage.a_ms_per_token2 * squares
            + stage.b_ms_per_token * tokens
            + stage.c_ms * num_micro_batches
            for stage in self._stages.coefficients(layout.scheme)
        ]
        return float(np.max(each_ms, axis=0).sum()) / layout.num_lanes

    @cached_property
    def _sums(self) -> list[tuple[FloatArray, FloatArray]]:
        """Tokens and squared tokens of each batch, and of its sequences if all are padded to the
        longest: shape (num_batches,) each."""
        padded = [np.full(len(batch), max(batch)) for batch in self.batches]
        squared = self.profile.schemes[0].coefficients.squared  # the window is the model's
        return [
            (
                np.array([lengths.sum() for lengths in each], np.float64),
                np.array([squared(lengths).sum() for lengths in each], np.float64),
            )
            for each in (list(map(np.asarray, self.batches)), padded)
        ]

    def _least_ms_of_rows(self, way: str, layout: Layout, num_rows: int) -> float:
        """No works with num_rows rows a micro-batch take less.

        A stage runs the lane's micro-batches, after the stages before it have run the forward of
        one, and before they run the backward of one.
        """
        rows = self._amounts_of_rows(layout.num_lanes, num_rows)
        num_computed, least_computed = rows.tokens, rows.least_tokens
        if way == FIXED_ROWS:
            num_computed = self.limit * rows.num_rows
            least_computed = np.where(rows.num_rows > 0, float(self.limit), 0.0)
        before_ms: FloatArray | float = 0.0
        least_ms = np.zeros(len(self.batches))
        for stage in self._stages.coefficients(layout.scheme):
            a_ms, b_ms, c_ms = stage.a_ms_per_token2, stage.b_ms_per_token, stage.c_ms
            own_ms = a_ms * rows.squares + b_ms * num_computed + c_ms * rows.num_micro_batches
            least_ms = np.maximum(least_ms, (own_ms + before_ms).max(axis=1))
            before_ms += a_ms * rows.least_squares + b_ms * least_computed
            before_ms += c_ms * (rows.num_rows > 0)
        return float(least_ms.sum())

    def _amounts_of_rows(self, num_lanes: int, num_rows: int) -> _Amounts:
        """Of micro-batches of num_rows rows."""
        key = num_lanes, num_rows
        if key not in self._amounts:
            squared = self.profile.schemes[0].coefficients.squared
            found = np.zeros((len(fields(_Amounts)), len(self.batches), num_lanes))
            for index, batch in enumerate(self.batches):
                lengths = np.asarray(batch)
                squares = squared(lengths)
                for lane, rows in enumerate(self._shares(num_lanes, batch)):
                    if rows:
                        starts = np.cumsum([0, *map(len, rows[:-1])])[::num_rows]
                        order = list(itertools.chain.from_iterable(rows))
                        tokens = np.add.reduceat(lengths[order], starts)
                        of_each = np.add.reduceat(squares[order], starts)
                        found[:, index, lane] = (
                            *(tokens.sum(), of_each.sum(), len(rows), len(starts)),
                            *(tokens.min(), of_each.min()),
                        )
            self._amounts[key] = _Amounts(*found)
        return self._amounts[key]

    def homogeneous(self) -> list[Strategy]:
        """Strategies of one scheme that fill the job, each once.

        ``~`` only with ep, where it is Megatron's expert parallelism over data-parallel ranks, and
        of several widths only the narrowest that holds the longest sequence, and all ranks.
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

    def _splitting_schemes(self) -> Iterator[Scheme]:
        """By tp, ep and pp the narrowest that holds the longest sequence, and that of all ranks,
        which has no replicas to balance."""
        known: set[Scheme] = set()
        for scheme in self.profile.splitting_schemes:  # narrow ones first
            if scheme.ep > 1 and self.profile.max_tokens(scheme) >= self.limit:
                narrow = scheme.of_context_group(1)
                if narrow not in known or scheme.num_ranks == self.pool.num_ranks:
                    known.add(narrow)
                    yield scheme

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

        return tuple(
            tuple(map(work, itertools.batched(rows, num_rows)))
            for rows in self._shares(layout.num_lanes, batch)
        )

    def _shares(self, num_lanes: int, batch: Sequence[int]) -> list[list[list[int]]]:
        """The `fixed_length_shares` of a batch, without empty rows."""
        batch = tuple(batch)
        if (num_lanes, batch) not in self._rows:
            shares = fixed_length_shares(batch, self.limit, num_lanes, self._first_fit[batch])
            self._rows[num_lanes, batch] = [[row for row in share if row] for share in shares]
        return self._rows[num_lanes, batch]

    @cached_property
    def _first_fit(self) -> dict[tuple[int, ...], list[list[int]]]:
        """Rows of each batch, which do not depend on the layout."""
        return {tuple(each): first_fit_decreasing(each, self.limit) for each in self.batches}

    def _context_parallel(self, way: str) -> Iterator[Candidate]:
        if way == CP_ONLY:
            pools = context_group_pools(
                self.costs,
                num_ranks=self.pool.num_ranks,
                ranks_per_node=self.pool.ranks_per_node,
                longest=self.limit,
            )
            best = self._fastest(way, list(pools.values()), self.costs, 1)
            yield from self._planned(way, best, self.costs, shortlists=True)
            return
        makes: list[Callable[[], Works]]
        if way == EQUAL_GROUPS:
            makes = [partial(self._equal, layouts) for layouts in self._equal_groups()]
        else:
            makes = list(self._megatron_context())
        for make_works in self._tracked(way, makes, len(makes)):
            yield Candidate(self.simulated, make_works)

    def _fastest(
        self, way: str, pools: Sequence[Pool], cost_model: CostModel, num: int
    ) -> list[Pool]:
        """By greedy plans of the first batches; bounds exclude most pools without one."""
        if len(pools) <= num:
            return list(pools)
        batches = self.batches[:_NUM_GREEDY_BATCHES]
        limits = Limits(cost_model, row_quantum=self.row_quantum)
        planners = [GreedyPlanner(pool, cost_model, limits) for pool in pools]
        bounded = [
            ([_bound_ms(planner.costs, batch) for batch in batches], place)
            for place, planner in enumerate(planners)
        ]
        bounded.sort(key=lambda each: math.fsum(each[0]))
        known_ms: list[tuple[float, int]] = []
        for times_ms, place in self._tracked(f"{way}, greedy plans", bounded, len(bounded)):
            most_ms = known_ms[num - 1][0] if len(known_ms) >= num else math.inf
            for index, batch in enumerate(batches):
                if math.fsum(times_ms) >= most_ms:
                    break
                times_ms[index] = MS_PER_S * planners[place].plan(batch).predicted_time_s
            insort(known_ms, (math.fsum(times_ms), place))
        return [pools[place] for _, place in known_ms[:num]]

    def _equal_groups(self) -> Iterator[list[Layout]]:
        """By tp and ep, the layouts of groups of equal width, if one holds the limit.

        Groups that are too narrow for all experts share them in replicas that are just wide enough.
        """
        num_ranks, per_node = self.pool.num_ranks, self.pool.ranks_per_node
        for tp, ep, columns in context_degrees(self.costs, num_ranks):
            layouts = []
            for cp in _powers_of_two(columns):
                width = max(cp, ep // math.gcd(tp, ep))
                whole = Scheme(tp, width, splits_cp=width > cp, ep=ep)
                if columns % width or not self._knows(whole):
                    continue
                text = f"{columns // width}*{whole}"
                strategy = Strategy.parse(text, num_ranks, ranks_per_node=per_node)
                lane = whole.of_context_group(cp) if whole.splits_cp else whole
                layouts.append(self._layout(strategy, lane, self.costs))
            if max((layout.cost.longest for layout in layouts), default=0) >= self.limit:
                yield layouts

    def _equal(self, layouts: Sequence[Layout]) -> Works:
        """Each batch on the best of layouts, of which one holds the limit."""
        works = []
        for batch in self.batches:
            best_ms, best = math.inf, None
            for layout in layouts:
                if layout.cost.longest < max(layout.cost.tokens(batch)):
                    continue
                work = layout.work(_dispatched(layout, batch))
                time_ms = self.costs.overhead_ms(layout.strategy) + work.makespan_ms(self.costs)
                if time_ms < best_ms:
                    best_ms, best = time_ms, work
            assert best is not None  # that of the limit holds every batch
            works.append(best)
        return works

    def _megatron_context(self) -> Iterator[Callable[[], Works]]:
        """The works of every tp, ep and limit of a rank."""
        num_ranks, per_node = self.pool.num_ranks, self.pool.ranks_per_node
        for tp, ep, width in context_degrees(self.costs, num_ranks):
            if width < 2 or width & (width - 1):
                continue  # groups are powers of two
            whole = Scheme(tp, width, splits_cp=True, ep=ep)
            strategy = Strategy.parse(str(whole), num_ranks, ranks_per_node=per_node)
            limits = ((each, self.costs.max_tokens(each)) for each in whole.group_schemes)
            most_tokens = min(limit // each.cp for each, limit in limits)
            for halvings in range(_NUM_RANK_LIMITS):
                rank_tokens = most_tokens >> halvings
                if rank_tokens * width < self.limit or not rank_tokens:
                    break
                yield partial(self._in_waves, strategy, rank_tokens, most_tokens)

    def _in_waves(self, strategy: Strategy, rank_tokens: int, most_tokens: int) -> Works:
        (whole,) = strategy.schemes
        works = []
        for batch in self.batches:
            waves = context_waves(batch, rank_tokens, whole.cp)
            micro_batches = tuple(_wave_works(waves, batch, most_tokens))
            works.append(IterationWork(strategy, (micro_batches,)))
        return works

    def _ceiling(self) -> Candidate:
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
        costs = CeilingCosts.of(self._stages, known, num_ranks)
        strategy = Strategy.parse(f"tp{num_ranks}", num_ranks)
        works = [IterationWork(strategy, ((MicroBatchWork.packed(b),),)) for b in self.batches]
        return Candidate(costs, lambda: works)

    def _knows(self, scheme: Scheme) -> bool:
        try:
            self.costs.coefficients(scheme)
            if self.shape is not None:
                scheme.layers_per_stage(self.shape.num_layers)
        except StrategyError:
            return False
        return True

    def _planned(
        self, way: str, pools: Sequence[Pool], cost_model: CostModel, *, shortlists: bool = False
    ) -> list[Candidate]:
        """Plans every batch with the certified planner, for all strategies or a short list.

        Raises PlanError as the planner does.
        """
        limits = Limits(cost_model, row_quantum=self.row_quantum)
        plans = (
            (index, timed)
            for index, pool in enumerate(pools)
            for timed in self.planning.plans(pool, limits, self.batches, shortlists=shortlists)
        )
        works: list[Works] = [[] for _ in pools]
        for index, timed in self._tracked(way, plans, len(pools) * len(self.batches)):
            strategy = pools[index].strategy(timed.plan.strategy)
            time_s = timed.cpu_s if self.plan_time_s is None else self.plan_time_s
            works[index].append(IterationWork.of_plan(timed.plan, strategy, plan_time_s=time_s))
        return [Candidate(self.simulated, partial(list, of_pool)) for of_pool in works]


def _bound_ms(costs: PoolCosts, batch: Sequence[int]) -> float:
    """No plan takes less."""
    return min(
        dispatch_bound_ms(batch, costs.replica_costs(strategy)) + costs.overheads_ms[strategy.name]
        for strategy in costs.feasible_strategies(batch, 0)
    )


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


def context_degrees(costs: JobCosts, num_ranks: int) -> Iterator[tuple[int, int, int]]:
    """Yields tp, ep and the columns that they leave for cp, of the profile's schemes without pp."""
    rows = (row.scheme for row in costs.profile.schemes)
    for tp, ep in sorted({(scheme.tp, scheme.ep) for scheme in rows if scheme.pp == 1}):
        if num_ranks % tp == 0 and num_ranks % ep == 0:
            yield tp, ep, num_ranks // tp


def context_group_pools(
    costs: JobCosts, *, num_ranks: int, ranks_per_node: int, longest: int
) -> dict[tuple[int, int], Pool]:
    """Pools for training with context parallelism alone: one tp, groups of ranks of several widths.

    FlexSP (arXiv 2412.01523) and other dynamic context parallelism can choose from these: weights
    do not move, so tp is fixed and there is no pipeline. Widths are powers of two. Here a strategy
    lasts an iteration; FlexSP may regroup the ranks for every micro-batch, which helps if groups
    wait for each other at each of them, as under ZeRO-3. Groups that are too narrow for all experts
    share them and do so, too (``cp8~ep8``). Costs of widths that were not measured are assumed: see
    cost_model/job_costs.py.

    Returns:
        By tp and ep, strategies that hold a sequence of `longest` tokens: with groups of at most
        two widths, and with widths halved down to 1; of shared experts replicas of each width. A
        tp without shared experts is left out if the profile lacks it without pipeline; tp and ep
        are, if nothing holds the sequence.
    """
    limits = Limits(costs)
    pools: dict[tuple[int, int], Pool] = {}
    for tp, ep, columns in context_degrees(costs, num_ranks):
        alone, texts = Scheme(tp=tp, ep=ep), []
        if tp % ep:
            for width in _powers_of_two(columns):
                whole = Scheme(tp, width, splits_cp=width > 1, ep=ep)
                if columns % width == 0 and tp * width % ep == 0:
                    texts.append((whole, f"{columns // width}*{whole}"))
        elif costs.is_measured(alone) and limits.of_scheme(alone) > 0:
            for widths in _groupings(columns):
                terms = (f"{num}*{replace(alone, cp=cp)}" for cp, num in Counter(widths).items())
                texts.append((replace(alone, cp=widths[0]), "+".join(terms)))
        strategies = [
            Strategy.parse(text, num_ranks, ranks_per_node=ranks_per_node)
            for widest, text in texts
            if limits.of_scheme(widest) >= longest
        ]
        if strategies:
            pools[tp, ep] = Pool.of(*strategies)
    return pools


def _powers_of_two(most: int) -> Iterator[int]:
    """1, 2, 4, … up to most."""
    return (1 << power for power in range(most.bit_length()))


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
