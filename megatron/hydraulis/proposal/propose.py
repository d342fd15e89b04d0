"""The pool of strategies for lengths, a cost profile and a cluster."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from rich.table import Table

from megatron.hydraulis.command_line import Flag
from megatron.hydraulis.cost_model.profile import ProfileCostModel
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.lengths.batches import BatchesRequest, draw_batches
from megatron.hydraulis.proposal.candidates import Candidates, FloatArray, Mix
from megatron.hydraulis.proposal.evaluator import Estimator, Evaluator
from megatron.hydraulis.proposal.explore import (
    Explorer,
    Regime,
    pool_times,
    regimes_of,
    select,
    single_scheme_mixes,
    with_longest_sequence,
)
from megatron.hydraulis.strategy import Pool, Scheme, Strategy
from megatron.hydraulis.strategy.notation import parse_terms
from megatron.hydraulis.terminal import (
    OnProgress,
    StrategyText,
    figures_table,
    notebook_html,
    table_text,
)

if TYPE_CHECKING:
    from megatron.hydraulis.proposal.verdict import PoolVerdict

_MS_PER_S = 1e3
_WIDTH = 110
"""Columns of the tables where there is no terminal."""
_NONE = "–"
_NUM_ROUNDS = 5
"""Rounds of searching regimes by the estimate and learning from the planner's bounds."""
_LEARNING_BATCHES = 6
"""Batches for which mixes are bounded in a round."""
_LEARNING_PER_MEMBER, _SHORTLIST_PER_MEMBER = 1, 2
"""New mixes per strategy that are bounded in a round, and for all batches in the end."""
_MIN_REGIME_SHARE = 1.0 / 32.0
"""A regime with a smaller share of the batches is searched together with the next longer one."""
_NUM_STATIC = 3
"""Strategies of one scheme that may be planned in full, to compare the pool with the best."""
_PLAN_BELOW_EXPECTED = 0.01
"""Share of the expected time of all batches that plans may save at most: one that must save more to
be the best static strategy is not planned further."""
_NUM_NEAR = 2
"""Neighbours of a member that are bounded for its batches."""
_LEAST_EXCHANGE_GAIN = 2e-3
"""Expected gain, as a share of the mean time, that justifies planning other members."""
_LEAST_MEMBER_GAIN = 3e-3
"""Gain, as a share of the mean time, below which a member is left out."""
_LEAST_GAIN = 1e-4
_LEAST_PLAN_GAIN = 4e-3
"""Expected gain, as a share of a batch's time, that justifies a plan."""
_HOPELESS = 1.05
"""Mixes whose estimate exceeds the best one by this factor are not bounded: estimates are right to
a few percent."""


def _parsed_schemes(text: str) -> list[Scheme]:
    terms = parse_terms(text, label="--schemes")
    return [term.scheme for term in terms if term.scheme is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolMember:
    """A strategy of the proposed pool. Times are means of predicted iteration times."""

    name: str
    replicas: str
    longest_tokens: int
    """Longest sequence that it holds."""
    num_batches: int
    """Batches for which it is the pool's fastest."""
    mean_s: float | None
    """Mean time of these batches; None if there are none."""
    overhead_s: float
    """Time that regrouping and optimizer add to its makespan; part of every time."""
    gain_s: float | None
    """Increase of the mean over all batches without it; None if the rest of the pool does not hold
    every batch and the corpus' longest sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """The first strategies of the pool, in the order in which they help most."""

    names: tuple[str, ...]
    mean_s: float
    """Mean time of all batches with these alone; from bounds if a batch has no plan."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegimeChoice:
    """Batches by their longest sequence, and the strategy that is best for them."""

    above_tokens: int
    up_to_tokens: int
    num_batches: int
    replicas: str
    name: str | None
    """Its name in the pool; None if it is not in the pool."""
    mean_s: float
    """Mean time with this strategy alone; from bounds if a batch has no plan."""
    pool_mean_s: float
    """Mean time with the pool."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Proposal:
    """A pool and its predicted times."""

    pool: Pool
    profile: ProfileCostModel
    """Profile of the proposal, without assumed rows that the pool does not need."""
    members: tuple[PoolMember, ...]
    """The strategies in the order of the pool, which starts with the one used most."""
    mean_s: float
    """Mean predicted iteration time over all batches, by full plans."""
    sizes: tuple[PoolSize, ...]
    static: str | None
    """Replicas of the best static strategy: of one scheme, by full plans; None if none holds the
    longest sequence."""
    static_s: float | None
    """Mean predicted iteration time with it alone."""
    one_more_s: float | None
    """Mean with one more strategy; None if none was found."""
    one_more: tuple[str, ...] | None
    """Strategies of that larger pool that this one lacks."""
    regimes: tuple[RegimeChoice, ...]
    plans: tuple[tuple[str, float], ...]
    """Strategy of the pool and predicted iteration time in s of each batch."""
    num_batches: int
    num_tokens: float
    """Mean of a batch."""
    num_mixes: int
    """Number of strategies that were estimated for all batches."""
    num_bounds: int
    num_plans: int
    seconds: float
    verdict: "PoolVerdict | None" = None
    """What it gains over the best without a pool; None if that was not searched."""

    @property
    def error_s(self) -> float | None:
        """Standard error of `mean_s`: other batches have other times; None of a single batch."""
        times_s = [time_s for _, time_s in self.plans]
        return stdev(times_s) / math.sqrt(len(times_s)) if len(times_s) > 1 else None

    @property
    def best_static(self) -> tuple[Strategy, float] | None:
        """`static`, placed, with its time in s."""
        if self.static is None or self.static_s is None:
            return None
        pool = self.pool
        placed = Strategy.parse(self.static, pool.num_ranks, ranks_per_node=pool.ranks_per_node)
        return placed, self.static_s

    @property
    def shares(self) -> dict[Strategy, float]:
        """Shares of the batches by strategy of the pool."""
        return {
            self.pool.strategy(member.name): member.num_batches / self.num_batches
            for member in self.members
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {', '.join(member.replicas for member in self.members)}>"

    def __str__(self) -> str:
        verdict = [] if self.verdict is None else [f"{self.verdict}\n"]
        return "\n".join([*(table_text(table, _WIDTH) for table in self.tables()), *verdict])

    def _repr_html_(self) -> str:
        return notebook_html(str(self))

    def tables(self) -> Iterator[Table]:
        """The pool, smaller and larger pools, and the best strategy of each regime."""
        yield _pool_table(self)
        yield _size_table(self)
        yield _regime_table(self)

    def to_json(self) -> dict[str, Any]:
        """All fields but the profile; the pool as in its file."""
        tables = ("members", "sizes", "regimes")
        pools = ("mean_s", "error_s", "static", "static_s", "one_more_s", "one_more")
        counts = ("num_batches", "num_tokens", "num_mixes", "num_bounds", "num_plans", "seconds")
        return {
            "pool": self.pool.to_json(),
            "verdict": None if self.verdict is None else self.verdict.to_json(),
            **{name: [asdict(row) for row in getattr(self, name)] for name in tables},
            **{name: getattr(self, name) for name in (*pools, *counts)},
        }


@dataclass(frozen=True, kw_only=True)
class ProposalRequest(BatchesRequest):
    """Asks for the pool of a job whose batches are drawn from a corpus."""

    num_ranks: int
    ranks_per_node: int
    """At least 1, as in `Strategy`."""
    schemes: Annotated[
        Sequence[Scheme] | None,
        Flag(
            "schemes to build strategies from, separated by '+', such as tp8+tp4pp2+tp4 "
            "(default: all of the profile)",
            metavar="LIST",
            parse=_parsed_schemes,
        ),
    ] = None
    num_batches: Annotated[int, Flag("number of batches to sample")] = 32
    max_strategies: Annotated[
        int, Flag("maximum number of strategies in the pool", metavar="K")
    ] = 7

    @cached_property
    def batches(self) -> Sequence[Sequence[int]]:
        """Lengths in tokens, shape (num_batches, …); raises as `draw_batches`."""
        return draw_batches(self.counts, self.sizes, self.num_batches, self.seed)

    def candidates(self, cost_model: ProfileCostModel) -> Candidates:
        """The schemes that may be in a best pool; raises as `Candidates.of`."""
        return Candidates.of(
            cost_model,
            self.num_ranks,
            self.ranks_per_node,
            self.schemes,
            self.batches,
            self.counts.longest,
        )


def propose(
    request: ProposalRequest,
    cost_model: ProfileCostModel,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Proposal:
    """The pool with the least mean predicted time over the batches.

    It holds the corpus' longest sequence even if that was not drawn. The result is deterministic.

    cost_model: of the job, with rows for all schemes that are offered.

    Raises PlanError if no scheme holds the longest sequence, and as `ProposalRequest.candidates`.
    """
    start_s = time.perf_counter()
    candidates, batches = request.candidates(cost_model), request.batches
    longest, size = request.counts.longest, request.max_strategies
    if longest > candidates.longest:
        raise PlanError(
            f"a sequence must fit one micro-batch but the longest has {longest} tokens and the "
            f"largest limit of {len(candidates.schemes)} admissible schemes is "
            f"{candidates.longest}; lower --seq-length, recompute more (--offer-recompute "
            f"where times are estimated), or take a larger tp or cp"
        )
    regimes = regimes_of(
        batches,
        [cost.longest for cost in candidates.costs],
        min_batches=max(1, int(_MIN_REGIME_SHARE * len(batches))),
    )
    search = _PoolSearch(request, candidates, cost_model)
    # One more strategy than wanted, to know what it would gain.
    _explore(search.explorer, search.evaluator, regimes, size + 1, on_progress)
    shortlist = search.explorer.shortlist(size + 1, _SHORTLIST_PER_MEMBER * (size + 1))
    for done, mix in enumerate(shortlist, start=1):
        search.add(mix)
        on_progress("bounds", done, len(shortlist) + 1)
    search.add_waves()
    search.improve(size)
    on_progress("bounds", len(shortlist) + 1, len(shortlist) + 1)
    on_progress("plans", 0, 3)
    static = search.best_static()
    on_progress("plans", 1, 3)
    chosen = search.planned_pool(size)
    if static is not None:
        chosen = search.no_worse(chosen, static, size)
        most_ms = search.mean_ms(chosen) * (1.0 + _LEAST_MEMBER_GAIN)
        if search.mean_ms((static,)) <= most_ms:
            chosen = (static,)
    on_progress("plans", 2, 3)
    larger = search.planned_pool(size + 1, chosen)
    on_progress("plans", 3, 3)
    one_more = larger if len(larger) > len(chosen) else None
    seconds = time.perf_counter() - start_s
    return _proposal(search, cost_model, regimes, chosen, static, one_more, seconds)


def _explore(
    explorer: Explorer,
    evaluator: Evaluator,
    regimes: Sequence[Regime],
    size: int,
    on_progress: OnProgress,
) -> None:
    done, total = 0, _NUM_ROUNDS * (len(regimes) + 1) + size
    for _ in range(_NUM_ROUNDS):
        for regime in regimes:
            on_progress("search", done, total)
            explorer.search_regime(regime)
            done += 1
        _learn(explorer, evaluator, size)
        done += 1
    explorer.grow(size, lambda num: on_progress("search", done + num, total))


def _learn(explorer: Explorer, evaluator: Evaluator, size: int) -> None:
    """Improves the estimate with the planner's bounds of some mixes for some batches."""
    known = {mix for mix, _, _ in evaluator.evaluated()}
    num_batches = len(evaluator.batches)
    for mix in explorer.shortlist(size, _LEARNING_PER_MEMBER * size, known):
        estimates_ms = explorer.estimates_ms(mix)
        for batch in range(0, num_batches, -(-num_batches // _LEARNING_BATCHES)):
            if evaluator.holds(mix, batch):
                evaluator.bounded(mix, batch, float(estimates_ms[batch]))
    explorer.learn(
        [(mix, batch, bounded.expected_ms) for mix, batch, bounded in evaluator.evaluated()]
    )


class _PoolSearch:
    """Selects pools by the planner's bounds and confirms them with full plans."""

    def __init__(
        self, request: ProposalRequest, candidates: Candidates, cost_model: ProfileCostModel
    ) -> None:
        batches, self._longest = request.batches, request.counts.longest
        self._readings = cost_model.readings().values()
        self.candidates = candidates
        self.evaluator = Evaluator(
            candidates,
            cost_model,
            batches,
            seed=request.seed,
            row_quantum=request.row_quantum_tokens,
        )
        estimator = Estimator(candidates, batches)
        self.explorer = Explorer(candidates, estimator, len(batches), self._longest)
        self.mixes: list[Mix] = []
        self.times_ms: FloatArray = np.empty((0, len(batches)))
        """Shape (num_mixes, num_batches): times of plans, expected times without a plan, inf if a
        mix does not hold a batch."""

    def add(self, mix: Mix) -> None:
        """Bounds a new mix for the batches for which it may be the fastest."""
        if mix not in self.mixes:
            row = [self._expected_ms(mix, batch) for batch in range(len(self.evaluator.batches))]
            self.mixes.append(mix)
            self.times_ms = np.vstack((self.times_ms, row))

    def add_waves(self) -> None:
        """Adds mixes with ``~`` like the best strategy that is used alone."""
        (best,) = self._selected(1, ())
        for mix in dict.fromkeys(self.candidates.wave_mixes(self.mixes[best])):
            self.add(mix)

    def improve(self, size: int) -> None:
        """Adds neighbours of the best pool's members that are expected to be better."""
        pool = self._selected(size, ())
        fastest = self.times_ms[list(pool)].argmin(axis=0)
        better = []
        for place, row in enumerate(pool):
            batches = np.flatnonzero(fastest == place).tolist()
            if not batches:
                continue
            mine_ms = float(self.times_ms[row, batches].sum())
            for mix in self.explorer.near(self.mixes[row], batches, _NUM_NEAR):
                if mix not in self.mixes and self._beats(mix, batches, mine_ms):
                    better.append(mix)
        for mix in better:
            self.add(mix)

    def best_static(self) -> int | None:
        """The fastest strategy of one scheme, by full plans of all batches; None if none holds the
        longest sequence."""
        candidates, empty = self.candidates, (0,) * len(self.candidates.schemes)
        plain = single_scheme_mixes(candidates)
        self.explorer.remember(plain)
        means_ms = {
            mix: float(self.explorer.estimates_ms(mix).mean()) for mix in self._static(plain)
        }
        waves = set(range(len(empty))) - set(candidates.plain)
        for mix in self._static(candidates.filled(empty, (index,)) for index in sorted(waves)):
            self.add(mix)
        known_ms = dict(zip(self.mixes, self.times_ms.mean(axis=1), strict=True))
        means_ms = {mix: float(known_ms[mix]) for mix in self._static(known_ms)} | means_ms
        best, best_ms = None, math.inf
        for mix in sorted(means_ms, key=lambda mix: means_ms[mix])[:_NUM_STATIC]:
            self.add(mix)
            row = self.mixes.index(mix)
            times_ms = self.times_ms[row]  # a view
            least_ms = times_ms * (1.0 - _PLAN_BELOW_EXPECTED)
            for batch in range(len(times_ms)):
                if not least_ms.sum() < best_ms:
                    break
                times_ms[batch] = least_ms[batch] = self.evaluator.plan_ms(mix, batch)
            if least_ms.sum() < best_ms:
                best, best_ms = row, float(least_ms.sum())
        return best

    def _static(self, mixes: Iterable[Mix]) -> Iterator[Mix]:
        """Those of one scheme on all ranks that hold the longest sequence."""
        for mix in mixes:
            if self.candidates.is_static(mix) and self.candidates.limit(mix) >= self._longest:
                yield mix

    def planned_pool(self, size: int, start: Sequence[int] = ()) -> tuple[int, ...]:
        """The best pool found of at most size strategies, as indices of mixes, no worse than start.

        The time of every batch is that of a plan. start: such a pool of fewer strategies.
        """
        pool = self._selected(size, start, exchanges=not start)
        self._plan(pool)
        best_ms = self.mean_ms(pool)
        other = self._selected(size, self._useful(pool))
        if self.mean_ms(other) < best_ms * (1.0 - _LEAST_EXCHANGE_GAIN):
            self._plan(other)
            if self.mean_ms(other) < best_ms:
                pool = other
        return self._useful(pool)

    def no_worse(self, pool: Sequence[int], static: int, size: int) -> tuple[int, ...]:
        """The pool if it is at most as slow as a static strategy, however regrouping counts.

        Otherwise the static strategy with as many of the members as that allows. Plans choose by
        one reading, under which a strategy with more regrouping may seem faster than it is.
        """
        if self._worst_ratio(pool, static) <= 1.0:
            return tuple(pool)
        kept = [static, *(row for row in pool if row != static)]
        while len(kept) > 1 and (len(kept) > size or self._worst_ratio(kept, static) > 1.0):
            smaller = [[row for row in kept if row != left_out] for left_out in kept[1:]]
            kept = min(smaller, key=lambda rows: self._worst_ratio(rows, static))
            self._plan(kept)
        return tuple(kept)

    def _worst_ratio(self, pool: Sequence[int], static: int) -> float:
        """The largest over all readings of the pool's mean time over that of one strategy alone;
        0.0 without readings. Plans are chosen by the cost model's own reading."""
        fastest = np.array(pool)[self.times_ms[list(pool)].argmin(axis=0)]
        own_ms = {row: self.evaluator.overhead_ms(self.mixes[row]) for row in (*pool, static)}
        strategies = {row: self.candidates.strategy(self.mixes[row]) for row in own_ms}
        ratios = [0.0]
        for reading in self._readings:
            more_ms = {row: reading.overhead_ms(strategies[row]) - own_ms[row] for row in own_ms}
            mean_ms = self.mean_ms(pool) + fmean(more_ms[int(row)] for row in fastest)
            ratios.append(mean_ms / (self.mean_ms((static,)) + more_ms[static]))
        return max(ratios)

    def _useful(self, pool: Sequence[int]) -> tuple[int, ...]:
        """The pool without members that the others replace at no cost, the last ones first."""
        kept, most_ms = list(pool), self.mean_ms(pool) * (1.0 + _LEAST_MEMBER_GAIN)
        for row in reversed(pool):
            others = [other for other in kept if other != row]
            if self.mean_ms(others) <= most_ms:
                kept = others
        return tuple(kept)

    def _plan(self, pool: Sequence[int]) -> None:
        """Plans until no strategy is expected to be noticeably faster than the fastest plan."""
        for batch in range(self.times_ms.shape[1]):
            least_ms = float("inf")
            for row in sorted(pool, key=lambda row: (self.times_ms[row, batch], row)):
                if not self.times_ms[row, batch] < least_ms * (1.0 - _LEAST_PLAN_GAIN):
                    break
                if not self.evaluator.is_planned(self.mixes[row], batch):
                    self.times_ms[row, batch] = self.evaluator.plan_ms(self.mixes[row], batch)
                least_ms = min(least_ms, float(self.times_ms[row, batch]))
            for row in pool:
                # Strategies without a plan must not appear faster than the fastest plan.
                if not self.evaluator.is_planned(self.mixes[row], batch):
                    self.times_ms[row, batch] = max(self.times_ms[row, batch], least_ms)

    def mean_ms(self, pool: Sequence[int]) -> float:
        """Mean time of the batches; inf if a batch or the longest sequence does not fit."""
        limits = (self.candidates.limit(self.mixes[row]) for row in pool)
        if max(limits, default=0) < self._longest:
            return float("inf")
        return float(pool_times(self.times_ms, pool).mean())

    def by_gain(self, pool: Sequence[int]) -> tuple[int, ...]:
        """The pool in the order in which each member helps those before it most."""
        ordered: tuple[int, ...] = ()
        while len(ordered) < len(pool):
            rest = [row for row in pool if row not in ordered]
            ordered += (min(rest, key=lambda row: (self._rank(*ordered, row), row)),)
        return ordered

    def _rank(self, *pool: int) -> tuple[float, float]:
        times = self._with_longest()[list(pool)].min(axis=0)
        is_held = np.isfinite(times)
        return -float(is_held.sum()), float(times[is_held].sum())

    def _expected_ms(self, mix: Mix, batch: int) -> float:
        if not self.evaluator.holds(mix, batch):
            return float("inf")
        estimate_ms = float(self.explorer.estimates_ms(mix)[batch])
        if estimate_ms > _HOPELESS * self.explorer.least_estimates_ms()[batch]:
            return estimate_ms
        return self.evaluator.bounded(mix, batch, estimate_ms).expected_ms

    def _beats(self, mix: Mix, batches: Sequence[int], most_ms: float) -> bool:
        """The mix is expected to need less than most_ms for the batches together."""
        sum_ms = 0.0
        for batch in batches:
            sum_ms += self._expected_ms(mix, batch)
            if not sum_ms < most_ms * (1.0 - _LEAST_GAIN):
                return False
        return True

    def _with_longest(self) -> FloatArray:
        return with_longest_sequence(self.times_ms, self.mixes, self.candidates, self._longest)

    def _selected(
        self, size: int, start: Sequence[int], *, exchanges: bool = True
    ) -> tuple[int, ...]:
        return select(self._with_longest(), size, start, exchanges=exchanges)


def _proposal(
    search: _PoolSearch,
    cost_model: ProfileCostModel,
    regimes: Iterable[Regime],
    chosen: Sequence[int],
    static: int | None,
    one_more: Sequence[int] | None,
    seconds: float,
) -> Proposal:
    candidates, mixes = search.candidates, search.mixes
    fastest = np.array(chosen)[search.times_ms[list(chosen)].argmin(axis=0)]
    by_use = sorted(chosen, key=lambda row: (-int((fastest == row).sum()), row))
    names = {row: f"P{place}" for place, row in enumerate(by_use, start=1)}
    mean_ms = search.mean_ms(chosen)
    members = []
    for row in by_use:
        without_ms = search.mean_ms([other for other in chosen if other != row])
        mine = np.flatnonzero(fastest == row)
        members.append(
            PoolMember(
                name=names[row],
                replicas=candidates.text(mixes[row]),
                longest_tokens=candidates.limit(mixes[row]),
                num_batches=len(mine),
                mean_s=float(search.times_ms[row, mine].mean()) / _MS_PER_S if len(mine) else None,
                overhead_s=search.evaluator.overhead_ms(mixes[row]) / _MS_PER_S,
                gain_s=(without_ms - mean_ms) / _MS_PER_S if np.isfinite(without_ms) else None,
            )
        )
    by_gain = search.by_gain(chosen)
    sizes = []
    for num in range(1, len(chosen) + 1):
        of_size_ms = search.mean_ms(by_gain[:num])
        if np.isfinite(of_size_ms):
            named = tuple(names[row] for row in by_gain[:num])
            sizes.append(PoolSize(names=named, mean_s=of_size_ms / _MS_PER_S))
    one_more_s, added = None, None
    if one_more is not None:
        one_more_s = search.mean_ms(one_more) / _MS_PER_S
        added = tuple(candidates.text(mixes[row]) for row in one_more if row not in chosen)
    pool = Pool.of(*(candidates.strategy(mixes[row], name=names[row]) for row in by_use))
    return Proposal(
        pool=pool,
        profile=cost_model.only_for(pool),
        members=tuple(members),
        mean_s=mean_ms / _MS_PER_S,
        sizes=tuple(sizes),
        static=None if static is None else candidates.text(mixes[static]),
        static_s=None if static is None else search.mean_ms((static,)) / _MS_PER_S,
        one_more_s=one_more_s,
        one_more=added,
        regimes=tuple(_choice(regime, search, chosen, names) for regime in regimes),
        plans=tuple(
            (names[int(row)], float(search.times_ms[row, batch]) / _MS_PER_S)
            for batch, row in enumerate(fastest)
        ),
        num_batches=len(search.evaluator.batches),
        num_tokens=fmean(map(sum, search.evaluator.batches)),
        num_mixes=search.explorer.num_mixes,
        num_bounds=search.evaluator.num_bounds,
        num_plans=search.evaluator.num_plans,
        seconds=seconds,
    )


def _choice(
    regime: Regime, search: _PoolSearch, chosen: Sequence[int], names: dict[int, str]
) -> RegimeChoice:
    times_ms = search.times_ms[:, list(regime.batches)]
    means_ms = times_ms.mean(axis=1)
    best = int(means_ms.argmin())
    return RegimeChoice(
        above_tokens=regime.above,
        up_to_tokens=regime.up_to,
        num_batches=len(regime.batches),
        replicas=search.candidates.text(search.mixes[best]),
        name=names.get(best),
        mean_s=float(means_ms[best]) / _MS_PER_S,
        pool_mean_s=float(pool_times(times_ms, chosen).mean()) / _MS_PER_S,
    )


def _pool_table(proposal: Proposal) -> Table:
    is_needed = any(member.gain_s is None for member in proposal.members)
    why = f" ({_NONE}: without it some sequences do not fit)" if is_needed else ""
    error = "" if proposal.error_s is None else f" ± {proposal.error_s:.4f}"
    table = figures_table(
        "proposed pool",
        ("strategy", "replicas"),
        ("max tokens", "best for", "time, s", "overhead, s", "gain, %"),
        caption=f"Expected: {proposal.mean_s:.4f}{error} s per iteration, the mean of "
        f"{proposal.num_batches} batches of {proposal.num_tokens:,.0f} tokens (±: standard error). "
        f"Max tokens: the longest sequence that it holds. Best "
        f"for: share of the batches, and time: of these. Overhead: what regrouping and optimizer "
        f"add to its makespan. Gain: increase of the time without it"
        f"{why}.",
    )
    for member in proposal.members:
        gain = _NONE
        if member.gain_s is not None:
            gain = f"{100 * member.gain_s / (proposal.mean_s + member.gain_s):.2f}"
        table.add_row(
            member.name,
            StrategyText(member.replicas),
            f"{member.longest_tokens:,}",
            f"{100 * member.num_batches / proposal.num_batches:.0f} %",
            _NONE if member.mean_s is None else f"{member.mean_s:.4f}",
            f"{member.overhead_s:.4f}",
            gain,
        )
    return table


def _size_table(proposal: Proposal) -> Table:
    nothing = "No strategy was found that would make this pool faster."
    table = figures_table(
        "pools of other sizes",
        ("strategies",),
        ("time per iteration, s", "one more saves, ms"),
        caption=nothing if proposal.one_more_s is None else "",
    )
    rows = [(", ".join(size.names), size.mean_s) for size in proposal.sizes]
    if proposal.one_more_s is not None and proposal.one_more:
        rows.append((f"all, with {' and '.join(proposal.one_more)}", proposal.one_more_s))
    following = [mean_s for _, mean_s in rows[1:]]
    for place, (names, mean_s) in enumerate(rows):
        saved = f"{1e3 * (mean_s - following[place]):.1f}" if place < len(following) else _NONE
        is_pool = place + 1 == len(proposal.sizes)
        table.add_row(
            StrategyText(names), f"{mean_s:.4f}", saved, style="bold" if is_pool else None
        )
    return table


def _regime_table(proposal: Proposal) -> Table:
    table = figures_table(
        "one strategy for each regime",
        ("longest sequence, tokens", "best strategy", "in pool"),
        ("batches", "with it alone, s", "with the pool, s"),
        caption="A regime: the same schemes hold the longest sequence of the batch.",
    )
    for regime in proposal.regimes:
        table.add_row(
            f"{regime.above_tokens + 1:,} – {regime.up_to_tokens:,}",
            StrategyText(regime.replicas),
            regime.name or _NONE,
            str(regime.num_batches),
            f"{regime.mean_s:.4f}",
            f"{regime.pool_mean_s:.4f}",
        )
    return table
