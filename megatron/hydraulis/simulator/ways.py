"""Six ways to train the same batches: the pool, and what it is compared with (docs/metrics.md).

A static way uses its fastest strategy over all batches. Its candidates are homogeneous: replicas
of a scheme of the cost profile that fill the job, and such strategies of the pool. With experts
they include ``cp8~ep8``, Megatron's expert parallelism over data-parallel ranks, see `LaneLayout`.
"static, balanced" plans the three candidates that quick plans of some batches expect to be the
fastest.

"megatron, cp" has pp 1 only; the groups of a wave pack their sequences into rows of what fits, and
run as many of them, since they may share experts. If no scheme with cp was measured, it needs the
model and the links to estimate the cost of cp.

The ceiling computes tokens at the rate of the scheme that needs the fewest ranks' milliseconds per
token, and attention in the same way, and divides both evenly: without constant costs, pipelines to
fill, memory limits, regrouping and planning.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from multiprocessing import get_context
from statistics import fmean
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.cost_model.estimate_command import powers_of_two
from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.job_costs import JobCosts
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.cost_model.pipeline import StageCosts
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import PlanError, StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.planner.bounds import dispatch_bound_ms
from megatron.hydraulis.planner.costs import SchemeCost, scheme_cost
from megatron.hydraulis.planner.greedy import best_fit
from megatron.hydraulis.planner.plan import MS_PER_S, IterationPlan, Planner
from megatron.hydraulis.planner.planners import CertifiedPlanner, GreedyPlanner
from megatron.hydraulis.simulator.work import (
    CeilingCosts,
    IterationWork,
    MicroBatchWork,
    Wave,
    context_waves,
    first_fit_decreasing,
    fixed_length_shares,
)
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.terminal import OnProgress

FIXED_ROWS, PACKING, BALANCED = "static, fixed rows", "static, packing", "static, balanced"
MEGATRON_CP, CEILING, POOL = "megatron, cp", "ceiling", "pool"
WAYS = (FIXED_ROWS, PACKING, BALANCED, MEGATRON_CP, CEILING, POOL)
_NUM_RANK_LIMITS = 3
"""Limits of a rank that "megatron, cp" may choose from: what fits, a half, a quarter."""

_NUM_BALANCED = 3
"""Static strategies that get full plans; models with experts have over a hundred."""
_MOST_QUICK_BATCHES = 16
_EXPECTED_AT_LEAST = 0.97
"""Assumed least time of the quick plans of all batches over that expected from some of them."""
_PIPELINE_OVER_GREEDY = 0.82
"""Least time of a pipelined plan over that of the greedy one: the least of 33 was 0.826."""
FULL_OVER_QUICK = 0.99
"""Least time of a full plan over that of a quick one: of the greedy one without pipelines, where
the least of 11 was 0.995, else of one in line, whose search ends where at most 1 % is to gain."""

_Step = TypeVar("_Step")
FloatArray = npt.NDArray[np.float64]
Batches = Sequence[Sequence[int]]
Works = list[IterationWork]
Shares = tuple[tuple[MicroBatchWork, ...], ...]
"""Micro-batches of each replica."""

MAX_DEFAULT_PROCESSES = 8
"""A login node has other users too."""
FEWEST_BATCHES_PER_PROCESS = 10
"""A process starts in about a second, which fewer batches would not justify."""
CHUNKS_PER_PROCESS = 4
"""Number of chunks per process: several, so that no process waits long for the last one."""


@dataclass(frozen=True, slots=True)
class LaneLayout:
    """A strategy of one scheme as Megatron trains it: data-parallel lanes with rows of their own.

    A lane is a replica; with ``~`` and ep, where Megatron's replicas share experts, a group of the
    cp ranks. The lanes of a replica run their micro-batches at the same time.
    """

    strategy: Strategy
    scheme: Scheme
    """A lane's."""
    cost: SchemeCost
    """A lane's."""

    @property
    def num_lanes(self) -> int:
        """Number of lanes of the job."""
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
class Variant:
    """Variant of a way."""

    cost_model: CostModel
    works: Callable[[], Works]
    """Makes the work of every batch."""
    least_ms: float = 0.0
    """Lower bound of the time of all batches; 0.0 if unknown."""


def default_num_processes() -> int:
    """Number of cores that this process may use, up to `MAX_DEFAULT_PROCESSES`."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_PROCESSES)


@dataclass(frozen=True, slots=True)
class TimedPlan:
    """A plan and its CPU time."""

    plan: IterationPlan
    cpu_s: float


class BatchPlanning:
    """Plans batches, in several processes if there are many; a context manager that ends them.

    Plans depend on their batch alone, not on the number of processes.
    """

    def __init__(self, num_processes: int = 1) -> None:
        self._num_processes = num_processes
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=error is None, cancel_futures=True)
            self._executor = None

    def plans(
        self, pool: Pool, limits: Limits, batches: Sequence[Sequence[int]]
    ) -> Iterator[TimedPlan]:
        """Yields plans in the order of the batches, which are iterations 0, 1, …

        limits: of micro-batches, by the cost model to plan with.

        Raises PlanError as the planner does, and if a process is killed.
        """
        num_processes = min(self._num_processes, len(batches) // FEWEST_BATCHES_PER_PROCESS)
        if num_processes < 2:
            yield from _plans(pool, limits, batches, 0)
            return
        if self._executor is None:
            # A fork of a process with threads, for example of a progress bar, may hang.
            self._executor = ProcessPoolExecutor(
                self._num_processes, mp_context=get_context("spawn")
            )
        size = math.ceil(len(batches) / (num_processes * CHUNKS_PER_PROCESS))
        with _interrupts_blocked():
            parts = [
                self._executor.submit(_planned, pool, limits, batches[first : first + size], first)
                for first in range(0, len(batches), size)
            ]
        try:
            for part in parts:
                yield from part.result()
        except BrokenProcessPool as error:
            raise PlanError(
                f"one of {self._num_processes} planning processes was killed, possibly for lack of "
                "memory; plan with fewer"
            ) from error


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that start meanwhile never get any: their parent does, and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _planned(
    pool: Pool, limits: Limits, batches: Sequence[Sequence[int]], first: int
) -> list[TimedPlan]:
    return list(_plans(pool, limits, batches, first))


def _plans(
    pool: Pool, limits: Limits, batches: Sequence[Sequence[int]], first: int
) -> Iterator[TimedPlan]:
    planner = CertifiedPlanner(pool, limits.cost_model, limits)
    for iteration, batch in enumerate(batches, start=first):
        start_s = time.process_time()
        plan = planner.plan(batch, iteration=iteration)
        yield TimedPlan(plan, time.process_time() - start_s)


@dataclass(frozen=True, kw_only=True)
class Ways:
    """All ways to train some batches, of which there is at least one."""

    batches: Batches
    """Lengths of the sequences of each iteration, in tokens."""
    pool: Pool
    costs: JobCosts
    seq_length: int | None = None
    """Most tokens of a sequence of the corpus; None for the longest of the batches."""
    shape: ModelShape | None = None
    """Strategies that cannot split the model are left out if it is given."""
    plan_time_s: float | None = None
    """Time of a plan; None for the CPU time that it takes here."""
    row_quantum: int = 1
    """Planned rows are rounded up to a multiple of this."""
    planning: BatchPlanning = field(default_factory=BatchPlanning)
    on_progress: OnProgress = lambda what, done, total: None
    """The name of a phase begins with its way."""
    _rows: dict[tuple[int, tuple[int, ...]], list[list[list[int]]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Known `fixed_length_shares` without empty rows, by number of lanes and batch."""

    @property
    def profile(self) -> ProfileCostModel:
        """The profile, with rows for all schemes of the pool."""
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

    def candidates(self, way: str) -> Iterator[Variant]:
        """Variants of a way, that with the lowest limit first; the fastest counts.

        None if no such strategy holds the longest sequence. Raises PlanError if a batch cannot be
        planned at all, StrategyError for a scheme that the profile lacks.
        """
        if way == CEILING:
            yield self._ceiling()
        elif way == MEGATRON_CP:
            if self.costs.knows_exchange:
                yield from self._megatron_context()
        elif way == POOL:
            yield from self._planned(way, [self.pool])
        elif way == BALANCED:
            static = self.static()
            fastest = fastest_static(
                [(strategy, self.profile) for strategy in static],
                self.batches[:_MOST_QUICK_BATCHES],
                row_quantum=self.row_quantum,
                on_progress=partial(self.on_progress, f"{BALANCED}, quick plans"),
            )
            yield from self._planned(way, [Pool.of(static[place]) for place, _ in fastest])
        else:
            limited = sorted(
                (
                    (self._least_ms(way, layout, num_rows), layout, num_rows)
                    for layout in self.layouts()
                    for num_rows in powers_of_two(layout.cost.max_tokens // self.limit)
                ),
                key=lambda each: each[0],
            )
            for least_ms, layout, num_rows in self._tracked(way, limited, len(limited)):
                in_rows = partial(self._in_rows, way, layout, num_rows)
                yield Variant(self.simulated, in_rows, least_ms)

    def fastest(self, way: str, below_s: float = math.inf) -> tuple[Works, float] | None:
        """The works of a way's fastest candidate, overhead included, and their mean makespan in s;
        None if none takes less than below_s. Raises as `candidates`."""
        best_ms, mean_ms, best = MS_PER_S * below_s, math.inf, None
        for candidate in self.candidates(way):
            if candidate.least_ms < best_ms * len(self.batches):
                works = candidate.works()
                makespan_ms = fmean(work.makespan_ms(candidate.cost_model) for work in works)
                time_ms = makespan_ms + self.costs.overhead_ms(works[0].strategy)
                if time_ms < best_ms:
                    best_ms, mean_ms, best = time_ms, makespan_ms, works
        return None if best is None else (best, mean_ms / MS_PER_S)

    def _tracked(self, what: str, steps: Iterable[_Step], num: int) -> Iterator[_Step]:
        """Yields the steps and reports their progress."""
        self.on_progress(what, 0, num)
        for done, step in enumerate(steps, start=1):
            yield step
            self.on_progress(what, done, num)

    def _in_rows(self, way: str, layout: LaneLayout, num_rows: int) -> Works:
        """The work in micro-batches of num_rows rows of fixed length."""

        def work(rows: Sequence[Sequence[int]], batch: Sequence[int]) -> MicroBatchWork:
            lengths = [batch[i] for row in rows for i in row]
            num_padding = len(rows) * self.limit - sum(lengths) if way == FIXED_ROWS else 0
            return MicroBatchWork.packed(lengths, num_padding=num_padding)

        return [
            layout.work(
                tuple(
                    tuple(work(part, batch) for part in itertools.batched(rows, num_rows))
                    for rows in self._shares(layout.num_lanes, batch)
                )
            )
            for batch in self.batches
        ]

    def _least_ms(self, way: str, layout: LaneLayout, num_rows: int) -> float:
        """Lower bound of the time of works with num_rows rows a micro-batch.

        A lane has at least its share of the work. A stage runs the lane's micro-batches after the
        stages before it have run the forward of one, and before they run the backward of one.
        """
        tokens, squares, rows = self._amounts
        least_tokens = 0
        if way == FIXED_ROWS:
            tokens, least_tokens = self.limit * rows, self.limit
        num_micro_batches = np.ceil(rows / num_rows)
        before_ms, least_ms = 0.0, np.zeros(len(self.batches))
        for stage in self._stages.coefficients(layout.scheme):
            all_ms = stage.least_time_ms(squares, tokens, num_micro_batches)
            least_ms = np.maximum(least_ms, all_ms / layout.num_lanes + before_ms)
            before_ms += stage.time_of_sums_ms(0.0, least_tokens)
        return float(least_ms.sum())

    @cached_property
    def _amounts(self) -> FloatArray:
        """Tokens, Σs² and least rows of fixed length of each batch, shape (3, num_batches)."""
        squared = self.profile.schemes[0].coefficients.squared
        of_batches = (
            (sum(batch), squared(np.asarray(batch)).sum(), len(self._first_fit[tuple(batch)]))
            for batch in self.batches
        )
        return np.array(list(of_batches), np.float64).T

    def homogeneous(self) -> list[Strategy]:
        """Strategies of one scheme that fill the job, each once.

        ``~`` only with ep or fs, where it is Megatron's expert parallelism, or fully sharded data
        parallelism, over data-parallel ranks, and of several widths only the narrowest that holds
        the longest sequence, and all ranks.
        """
        num_ranks, per_node = self.pool.num_ranks, self.pool.ranks_per_node
        found: dict[str, Strategy] = {}
        for strategy in self.pool.strategies:
            scheme = strategy.schemes[0]
            is_usual = scheme.distributes_parameters or not scheme.splits_cp
            if is_usual and strategy.is_homogeneous:
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
        """Yields by tp, ep and pp, with fs and without, the narrowest scheme that holds the longest
        sequence, and that of all ranks, which has no replicas to balance."""
        known: set[object] = set()
        for scheme in self.profile.splitting_schemes:  # narrow ones first
            if scheme.distributes_parameters and self.profile.max_tokens(scheme) >= self.limit:
                columns = scheme.apart_from_cp
                if columns not in known or scheme.num_ranks == self.pool.num_ranks:
                    known.add(columns)
                    yield scheme

    def static(self) -> list[Strategy]:
        """Homogeneous strategies that hold the longest sequence and are static; ``~`` with fs has
        groups of one width in `layouts`."""
        return [
            strategy
            for strategy in self.homogeneous()
            for scheme in strategy.schemes
            if scheme.is_static
            if self._layout(strategy, scheme).cost.longest >= self.limit
        ]

    def layouts(self) -> Iterator[LaneLayout]:
        """Yields layouts whose lanes hold the longest sequence; with ``~`` the replicas are the
        smallest that hold all ep ranks, or all that share weights."""
        for strategy in self.homogeneous():
            (scheme,) = strategy.schemes
            whole = scheme.of_context_group(scheme.cp)
            for lane in scheme.group_schemes:
                layout = self._layout(strategy, lane)
                is_whole = scheme.splits_cp and lane == whole  # the scheme without ``~``
                if lane.as_replica == whole and not is_whole and layout.cost.longest >= self.limit:
                    yield layout

    def _fits_model(self, strategy: Strategy) -> bool:
        if self.shape is None:
            return True
        try:
            strategy.check_model(self.shape)
        except StrategyError:
            return False
        return True

    def _layout(self, strategy: Strategy, lane: Scheme) -> LaneLayout:
        cost = scheme_cost(lane, strategy, self.profile, Limits(self.profile))
        return LaneLayout(strategy, lane, cost)

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

    def _megatron_context(self) -> Iterator[Variant]:
        """Yields a variant for every tp, ep and limit of a rank."""
        num_ranks, per_node = self.pool.num_ranks, self.pool.ranks_per_node
        made: list[tuple[Callable[[], Works], float]] = []
        rows = (row.scheme for row in self.profile.schemes)
        plain = (each for each in rows if each.pp == each.fs == 1 and not each.recomputes)
        for tp, ep in sorted({(scheme.tp, scheme.ep) for scheme in plain}):
            width, rest = divmod(num_ranks, tp)
            if rest or num_ranks % ep or width < 2 or width & (width - 1):
                continue  # groups are powers of two
            whole = Scheme(tp, width, splits_cp=True, ep=ep)
            strategy = Strategy.parse(str(whole), num_ranks, ranks_per_node=per_node)
            limits = ((each, self.costs.max_tokens(each)) for each in whole.group_schemes)
            most_tokens = min(limit // each.cp for each, limit in limits)
            least_ms = self._least_in_groups_ms(whole)
            for halvings in range(_NUM_RANK_LIMITS):
                rank_tokens = most_tokens >> halvings
                if rank_tokens * width < self.limit or not rank_tokens:
                    break
                works = partial(self._in_waves, strategy, rank_tokens, most_tokens)
                made.append((works, least_ms))
        for in_waves, least_ms in self._tracked(MEGATRON_CP, made, len(made)):
            yield Variant(self.simulated, in_waves, least_ms)

    def _least_in_groups_ms(self, whole: Scheme) -> float:
        """Lower bound of the time of all batches: each sequence in the group that needs the least
        rank time for it."""
        lengths = np.concatenate([np.asarray(batch, np.float64) for batch in self.batches])
        least_ms = np.full(len(lengths), np.inf)
        for group in whole.group_schemes:
            times = self.costs.coefficients(group).sequence_time_ms(lengths)
            least_ms = np.minimum(least_ms, group.cp * times)
        return float(least_ms.sum()) / whole.cp

    def _in_waves(self, strategy: Strategy, rank_tokens: int, most_tokens: int) -> Works:
        (whole,) = strategy.schemes
        works = []
        for batch in self.batches:
            waves = context_waves(batch, rank_tokens, whole.cp)
            micro_batches = tuple(_wave_works(waves, batch, most_tokens))
            works.append(IterationWork(strategy, (micro_batches,)))
        return works

    def _ceiling(self) -> Variant:
        """Batches as one micro-batch of one replica of all ranks."""
        num_ranks = self.pool.num_ranks
        schemes = {row.scheme for row in self.profile.schemes if row.scheme.num_ranks <= num_ranks}
        schemes.update(self.pool.groups)
        if self.costs.knows_exchange:
            for scheme in [scheme for scheme in schemes if scheme.pp == scheme.fs == 1]:
                schemes.update(
                    scheme.of_context_group(1 << i)
                    for i in range((num_ranks // scheme.tp).bit_length())
                )
        known = [scheme for scheme in schemes if self._knows(scheme)]
        costs = CeilingCosts.of(self._stages, known, num_ranks)
        strategy = Strategy.parse(f"tp{num_ranks}", num_ranks)
        works = [IterationWork(strategy, ((MicroBatchWork.packed(b),),)) for b in self.batches]
        return Variant(costs, lambda: works)

    def _knows(self, scheme: Scheme) -> bool:
        try:
            self.costs.coefficients(scheme)
            if self.shape is not None:
                scheme.layers_per_stage(self.shape.num_layers)
        except StrategyError:
            return False
        return True

    def _planned(self, way: str, pools: Sequence[Pool]) -> list[Variant]:
        """Plans every batch with the certified planner; raises PlanError as that does."""
        limits = Limits(self.profile, row_quantum=self.row_quantum)
        plans = (
            (index, timed)
            for index, pool in enumerate(pools)
            for timed in self.planning.plans(pool, limits, self.batches)
        )
        works: list[Works] = [[] for _ in pools]
        for index, timed in self._tracked(way, plans, len(pools) * len(self.batches)):
            strategy = pools[index].strategy(timed.plan.strategy)
            time_s = timed.cpu_s if self.plan_time_s is None else self.plan_time_s
            works[index].append(IterationWork.of_plan(timed.plan, strategy, plan_time_s=time_s))
        return [Variant(self.simulated, partial(list, of_pool)) for of_pool in works]


def fastest_static(
    candidates: Iterable[tuple[Strategy, ProfileCostModel]],
    batches: Batches,
    *,
    row_quantum: int = 1,
    below_ms: float = math.inf,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[int, list[float]]]:
    """The few candidates that are worth full plans: their indices, best first, and the times of
    quick plans in ms, shape (num_batches,).

    Bounds exclude most candidates. The others have quick plans until their time is expected to be
    longer than that of the best one so far: over its bound as far as the quick plans are over
    theirs.

    Args:
        candidates: strategies of one scheme, without idle ranks, that hold all batches, with their
            costs.
        row_quantum: see `Ways`.
        below_ms: a mean time; candidates that are expected to take longer are left out.
    """
    bounded: list[tuple[float, int, Strategy, Limits, list[float]]] = []
    for place, (strategy, profile) in enumerate(candidates):
        limits = Limits(profile, row_quantum=row_quantum)
        cost = scheme_cost(strategy.schemes[0], strategy, profile, limits)
        costs = [cost] * len(strategy.replicas)
        bounds_ms = [dispatch_bound_ms(batch, costs) for batch in batches]
        bounded.append((math.fsum(bounds_ms), place, strategy, limits, bounds_ms))
    # Pipelines last: their plans take longest, and a good time is known by then.
    bounded.sort(key=lambda each: (each[2].schemes[0].pp > 1, *each[:2]))
    found: list[tuple[float, int, list[float]]] = []
    best_ms = below_ms * len(batches)
    on_progress(0, len(bounded))
    for done, (_, place, strategy, limits, bounds_ms) in enumerate(bounded, start=1):
        times_ms = _quick_times_ms(strategy, limits, batches, bounds_ms, best_ms)
        if times_ms:
            insort(found, (math.fsum(times_ms), place, times_ms))
            best_ms = min(best_ms, found[0][0])
        on_progress(done, len(bounded))
    return [
        (place, times_ms)
        for sum_ms, place, times_ms in found[:_NUM_BALANCED]
        if FULL_OVER_QUICK * sum_ms < best_ms
    ]


def _quick_times_ms(
    strategy: Strategy,
    limits: Limits,
    batches: Batches,
    bounds_ms: Sequence[float],
    below_ms: float,
) -> list[float]:
    """Times of quick plans; none if all of them are expected to take longer than below_ms.

    bounds_ms: without overhead.
    """
    profile: CostModel = limits.cost_model
    if math.fsum(bounds_ms) >= below_ms:
        return []
    overhead_ms = profile.overhead_ms(strategy)
    all_least_ms = math.fsum(bounds_ms) + overhead_ms * len(batches)
    if all_least_ms >= below_ms:
        return []
    pool = Pool.of(strategy)
    planners: list[tuple[Planner, float]]
    planners = [(GreedyPlanner(pool, profile, limits), _EXPECTED_AT_LEAST)]
    if strategy.schemes[0].pp > 1:
        in_line = CertifiedPlanner(pool, profile, limits, is_in_line=True)
        planners = [(planners[0][0], _PIPELINE_OVER_GREEDY), (in_line, _EXPECTED_AT_LEAST)]
    times_ms: list[float] = []
    least_ms = 0.0
    for batch, bound_ms in zip(batches, bounds_ms, strict=True):
        least_ms += bound_ms + overhead_ms
        for planner, share in planners:
            time_ms = MS_PER_S * planner.plan(batch).predicted_time_s
            over_bound = math.fsum((*times_ms, time_ms)) / least_ms
            if share * over_bound * all_least_ms >= below_ms:
                return []
        times_ms.append(time_ms)
    return times_ms


def _wave_works(
    waves: Iterable[Wave], batch: Sequence[int], rank_tokens: int
) -> Iterator[MicroBatchWork]:
    """Yields as many micro-batches a wave as its groups need rows of rank_tokens a rank."""
    for wave in waves:
        sizes = [size for size, _ in wave]
        shares = [best_fit(indices, batch, rank_tokens * size) for size, indices in wave]
        packed = (
            [MicroBatchWork.packed([batch[i] for i in row]) for row in rows] for rows in shares
        )
        for rows in itertools.zip_longest(*packed):
            yield MicroBatchWork.wave(list(zip(sizes, rows, strict=True)))
