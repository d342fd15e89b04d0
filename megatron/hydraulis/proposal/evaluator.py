"""Iteration times of mixes: a quick estimate of many, the planner's bounds and plans of some.

The estimate treats sequences as divisible: the buckets of a batch are spread over the schemes of a
mix so that it ends as early as possible. How long two schemes take for a sequence, ``a·s² + b·s``
each, has a ratio that only rises or only falls with its length. So in a best solution every scheme
has one range of lengths: the longest sequences go to the scheme that holds the longest ones, and
when its replicas are full, the next scheme goes on where it stopped. Whether a mix ends within a
time is thus a pass over its schemes, and bisection finds the least time. With several forms, or
limits that contradict this order, the result can be longer than necessary, never shorter.
A replica works only for a share of that time; the rest goes to the constant cost of micro-batches
and to filling the pipeline.

Sequences and micro-batches that cannot be divided take longer, on some schemes more than on others.
How much is learnt from the planner's bounds of some mixes: a stretch factor by the share of ranks
of each scheme, the share of pipelines, and a constant.

The overhead of a mix, regrouping and optimizer, is approximated as well: the planner's bounds have
the exact one. The estimate only selects the mixes that get such a bound.

A full plan takes a second. Most mixes get less: the planner's bound, and a quick plan, which is the
planner's first one after some moves and swaps. The time of the full plan lies between them.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.cost_model.limits import Limits
from megatron.hydraulis.planner.costs import PoolCosts, SchemeCost
from megatron.hydraulis.planner.greedy import dispatch, longest_first
from megatron.hydraulis.planner.improve import Assignment, improve_dispatch
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.planners import CertifiedPlanner
from megatron.hydraulis.planner.search import TARGET_GAP, StrategySearch
from megatron.hydraulis.planner.solver import Deadline, Solver
from megatron.hydraulis.planner.wave_packing import packer_for
from megatron.hydraulis.proposal.candidates import Candidates, FloatArray, Mix
from megatron.hydraulis.strategy import Pool

_NUM_BUCKETS = 12
_NUM_STEPS = 14
"""Steps of the search for the time of a mix: precise to 1e-4 of it."""
_ROUNDING = 1e-9
"""Buckets of which less is left are done."""
_NUM_GRID_TIMES = 128
_MOST_MICRO_BATCHES = 256
_FULL = 0.97
"""Tokens of a well-packed micro-batch, as a share of its limit."""
_LEAST_SHARE, _LEAST_PER_TOKEN_MS, _LEAST_TIME_MS = 1e-4, 1e-12, 1e-3
_AT_FLOOR = 1.005
"""Nothing is learnt from times within this factor of the longest sequence's own time."""
_RIDGE = 1.0
"""Weight of the assumption of no stretch, in observations of mixes of one scheme."""
_MAX_ELEMENTS = 300_000
"""Most elements of an array, so that it stays in the cache; more mixes are split."""

_MS_PER_S = 1e3
_STEP = 0.04
"""First step of the search for the bound, as a share of the time; each next one is doubled."""
_BOUND_GAP = 0.02
"""Precision of the bound, as a share of the time; its distance to the plan is larger."""
_TIGHT = 3e-3
"""A quick plan this close to its bound is expected to be as good as the full one."""
_QUICK_EFFORT = 6e6
"""Effort of a quick plan, chosen by hand: much less than what a full one may take."""
_QUICK_STEPS = 200
_PLAN_ABOVE_BOUND = 0.75
"""Assumed position of plans between bound and quick plan, to select what to plan: chosen by eye
from 44 plans of the 32B example on 64 ranks, neither fitted nor computed."""
_PLAN_BELOW_QUICK = 0.06
"""Assumed largest gain of a full plan over a quick one: chosen by eye from the same plans."""


class Estimator:
    """The estimate for batches of a job.

    Args:
        batches: shape (num_batches, …), lengths in tokens; each fits some candidate.
    """

    def __init__(self, candidates: Candidates, batches: Sequence[Sequence[int]]) -> None:
        self._candidates = candidates
        costs = candidates.costs
        squared = costs[0].coefficients.squared  # the window is the model's, not a scheme's
        edges = _edges(batches, [cost.longest for cost in costs])
        shape = (len(batches), len(edges))
        tokens, squares, longest = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for row, batch in enumerate(batches):
            lengths = np.asarray(batch, dtype=np.float64)
            places = np.searchsorted(edges, lengths)
            np.add.at(tokens[row], places, lengths)
            np.add.at(squares[row], places, squared(lengths))
            np.maximum.at(longest[row], places, lengths)
        # (num_batches, num_buckets, num_schemes)
        self._work_ms = np.stack([_work_ms(cost, squares, tokens) for cost in costs], axis=2)
        self._pass_ms = np.stack([_alone_ms(cost, longest) for cost in costs], axis=2)
        for values_ms in (self._work_ms, self._pass_ms):
            values_ms[longest == 0.0] = 0.0
        self._pass_ms = np.maximum.accumulate(self._pass_ms, axis=1)
        longer_ms = self._work_ms[:, ::-1].cumsum(axis=1)
        longer_ms = np.concatenate((np.zeros_like(longer_ms[:, :1]), longer_ms), axis=1)
        self._longer_ms = np.moveaxis(longer_ms, 1, 2)
        """Work of the 0, 1, … longest buckets: (num_batches, num_schemes, num_buckets + 1)."""
        self._per_length = np.array([_per_length(cost, edges[0], edges[-1]) for cost in costs])
        self._grid_ms, self._grid_shares = _work_shares(costs, batches)
        self._parts: dict[tuple[tuple[Mix, ...], tuple[int, ...]], tuple[FloatArray, FloatArray]]
        self._parts = {}
        """Times by mixes and batches: a search returns to the neighbours after it has learned."""
        # Of each scheme, of pipelines, constant.
        self._stretches = np.zeros(len(costs) + 2)

    def mean_work_ms(self, batches: Sequence[int]) -> FloatArray:
        """Work of each bucket on each scheme, mean of batches: shape (num_buckets, num_schemes)."""
        mean: FloatArray = self._work_ms[list(batches)].mean(axis=0)
        return mean

    def longest_pass_ms(self, batches: Sequence[int]) -> FloatArray:
        """Time of the longest sequence of each bucket alone: shape (num_buckets, num_schemes).

        inf if a scheme cannot hold it.
        """
        longest: FloatArray = self._pass_ms[list(batches)].max(axis=0)
        return longest

    def work_shares(self, time_ms: float) -> FloatArray:
        """Share of a time that a replica of each scheme works, shape (num_schemes,)."""
        shares: FloatArray = self._grid_shares[int(self._places(np.array(time_ms)))]
        return shares

    def times_ms(self, mixes: Sequence[Mix], batches: Sequence[int]) -> FloatArray:
        """Estimated times, shape (num_mixes, len(batches)); inf if a batch does not fit."""
        spread_ms, floor_ms = self._parts_ms(mixes, batches)
        stretched_ms = spread_ms * (1.0 + self._features(mixes) @ self._stretches)[:, None]
        times: FloatArray = np.maximum(stretched_ms, floor_ms) + self._overheads_ms(mixes)[:, None]
        return times

    def _overheads_ms(self, mixes: Sequence[Mix]) -> FloatArray:
        """Overhead of mixes, shape (num_mixes,): that of the scheme of theirs that takes longest.

        A collective takes as long as its slowest rank, which receives nearly all that its scheme
        holds, whatever the other ranks hold. Exact values take a millisecond a mix, too long here.
        """
        overheads_ms = np.array(self._candidates.overheads_ms)
        is_used = np.array(mixes).reshape(-1, len(overheads_ms)) > 0
        largest: FloatArray = np.where(is_used, overheads_ms, 0.0).max(axis=1, initial=0.0)
        return largest

    def learn(self, evaluated: Sequence[tuple[Mix, int, float]]) -> None:
        """Fits later estimates to expected times: (mix, batch, ms) of each."""
        mixes = tuple(dict.fromkeys(mix for mix, _, _ in evaluated))
        rows = {mix: row for row, mix in enumerate(mixes)}
        spread_ms, floor_ms = self._parts_ms(mixes, range(len(self._work_ms)))
        features, overheads_ms = self._features(mixes), self._overheads_ms(mixes)
        num = len(self._candidates.schemes)
        known, ratios = [np.eye(num, num + 2) * np.sqrt(_RIDGE)], [np.zeros(num)]
        for mix, batch, time_ms in evaluated:
            row = rows[mix]
            makespan_ms = time_ms - overheads_ms[row]
            if makespan_ms > _AT_FLOOR * floor_ms[row, batch]:
                known.append(features[row : row + 1])
                ratios.append(np.array([makespan_ms / spread_ms[row, batch] - 1.0]))
        # Not above: it takes half a second, also of programs that propose nothing.
        from scipy.optimize import nnls

        self._stretches, _ = nnls(np.concatenate(known), np.concatenate(ratios))

    def _features(self, mixes: Sequence[Mix]) -> FloatArray:
        """Shares of all ranks of each scheme, of pipelines, and 1: (num_mixes, num_schemes + 2)."""
        sizes = np.array(self._candidates.sizes) / self._candidates.num_ranks
        is_pipeline = np.array([scheme.pp > 1 for scheme in self._candidates.schemes])
        shares = np.array(mixes).reshape(-1, len(sizes)) * sizes
        return np.column_stack((shares, shares @ is_pipeline, np.ones(len(shares))))

    def _parts_ms(
        self, mixes: Sequence[Mix], batches: Sequence[int]
    ) -> tuple[FloatArray, FloatArray]:
        """Times without stretch, and of the longest sequence alone: each as `times_ms`."""
        if not mixes:
            return np.zeros((0, len(batches))), np.zeros((0, len(batches)))
        key = tuple(mixes), tuple(batches)
        if key not in self._parts:
            self._parts[key] = self._new_parts_ms(mixes, batches)
        return self._parts[key]

    def _new_parts_ms(
        self, mixes: Sequence[Mix], batches: Sequence[int]
    ) -> tuple[FloatArray, FloatArray]:
        counts = np.array(mixes, dtype=np.float64)
        num_classes = int((counts > 0).sum(axis=1).max())
        size = len(batches) * self._work_ms.shape[1] * num_classes
        step = max(1, _MAX_ELEMENTS // size)
        parts = [
            self._parts_of_some_ms(counts[start : start + step], num_classes, np.array(batches))
            for start in range(0, len(counts), step)
        ]
        spreads_ms, floors_ms = zip(*parts, strict=True)
        return np.concatenate(spreads_ms), np.concatenate(floors_ms)

    def _parts_of_some_ms(
        self, counts: FloatArray, num_classes: int, batches: npt.NDArray[np.int64]
    ) -> tuple[FloatArray, FloatArray]:
        # Axes: mixes, batches, buckets, classes of the mix.
        chosen = np.argsort(-counts, axis=1, kind="stable")[:, :num_classes]
        num = np.take_along_axis(counts, chosen, axis=1)[:, None, :]
        is_there = num[:, :, None, :] > 0
        pass_ms = np.moveaxis(self._pass_ms[batches][:, :, chosen], 2, 0)
        pass_ms = np.where(is_there, pass_ms, np.inf)
        floor_ms = pass_ms[:, :, -1].min(axis=2)
        sizes = np.array(self._candidates.sizes)[chosen][:, None, None, :]
        rank_ms = sizes * np.moveaxis(self._work_ms[batches][:, :, chosen], 2, 0)
        fastest_ms = np.where(is_there, rank_ms, np.inf).min(axis=3).sum(axis=2)
        low_ms = time_ms = fastest_ms / self._candidates.num_ranks
        high_ms = np.full_like(time_ms, np.inf)
        for _ in range(_NUM_STEPS):
            # Sequences may take as long as the longest one, even if all the rest is done earlier.
            able = (pass_ms <= np.maximum(time_ms, floor_ms)[:, :, None, None]).sum(axis=2)
            shares = self._grid_shares[self._places(time_ms)[:, :, None], chosen[:, None, :]]
            room_ms = time_ms[:, :, None] * shares * num
            is_enough = self._is_enough(room_ms, able, chosen[:, None, :], batches)
            low_ms = np.where(is_enough, low_ms, time_ms)
            high_ms = np.where(is_enough, time_ms, high_ms)
            middle_ms = (low_ms + high_ms) / 2.0
            time_ms = np.where(np.isinf(high_ms), 2.0 * time_ms, middle_ms)
        return np.where(np.isfinite(floor_ms), time_ms, np.inf), floor_ms

    def _is_enough(
        self,
        room_ms: FloatArray,
        able: npt.NDArray[np.int64],
        schemes: npt.NDArray[np.int64],
        batches: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.bool_]:
        """Returns whether mixes do all the work of batches, shape (num_mixes, num_batches).

        Args, all of a shape that extends to (num_mixes, num_batches, num_classes):
            room_ms: work that the replicas of each scheme can do.
            able: number of buckets, from the shortest one, that a scheme holds in time.
            schemes: indices.
            batches: indices, shape (num_batches,).
        """
        schemes = np.broadcast_to(schemes, able.shape)
        # Of schemes that hold the same, those with the cheapest attention have the longest.
        order = np.lexsort((self._per_length[schemes], -able), axis=2)
        room_ms = np.take_along_axis(room_ms, order, axis=2)
        able = np.take_along_axis(able, order, axis=2)
        schemes = np.take_along_axis(schemes, order, axis=2)
        num_buckets = self._work_ms.shape[1]
        done = np.zeros(able.shape[:2])
        """Buckets that are done, from the longest one, the last of them in part."""
        for place in range(able.shape[2]):
            longer_ms = self._longer_ms[batches, schemes[:, :, place]]
            first = np.minimum((done + _ROUNDING).astype(np.int64), num_buckets - 1)
            until_ms = _between(longer_ms, first, done - first)
            is_able = able[:, :, place] + first >= num_buckets
            until_ms += np.where(is_able, room_ms[:, :, place], 0.0)
            last = np.minimum((longer_ms <= until_ms[:, :, None]).sum(axis=2), num_buckets) - 1
            begin_ms, end_ms = _between(longer_ms, last, 0.0), _between(longer_ms, last, 1.0)
            part = (until_ms - begin_ms) / np.maximum(end_ms - begin_ms, _ROUNDING)
            done = last + np.minimum(part, 1.0)
        is_enough: npt.NDArray[np.bool_] = done > num_buckets - _ROUNDING
        return is_enough

    def _places(self, time_ms: FloatArray) -> npt.NDArray[np.int64]:
        """The nearest times of the grid."""
        low, high = self._grid_ms[0], self._grid_ms[-1]
        position = np.log(np.clip(time_ms, low, high) / low) / np.log(high / low)
        places: npt.NDArray[np.int64] = np.rint(position * (_NUM_GRID_TIMES - 1)).astype(np.int64)
        return places


def _between(
    values: FloatArray, places: npt.NDArray[np.int64], part: FloatArray | float
) -> FloatArray:
    """Values between a place on the last axis and the next one."""
    low = np.take_along_axis(values, places[:, :, None], axis=2)[:, :, 0]
    high = np.take_along_axis(values, places[:, :, None] + 1, axis=2)[:, :, 0]
    between: FloatArray = low + part * (high - low)
    return between


def _per_length(cost: SchemeCost, shortest: float, longest: float) -> float:
    """Time per token of a long sequence over that of a short one: of one form it rises with a/b."""
    short_ms, long_ms = (
        cost.coefficients.least_time_ms(cost.coefficients.squared(length) / length, 1.0, 0.0)
        for length in (shortest, longest)
    )
    return float(long_ms / max(short_ms, _LEAST_PER_TOKEN_MS))


def _work_ms(cost: SchemeCost, squares: FloatArray | float, tokens: FloatArray | float) -> Any:
    """Time of sequences on one stage in full micro-batches.

    squares, tokens: sums over the sequences, of `Coefficients.squared` and of their lengths.
    """
    num_full = tokens / (_FULL * max(1, cost.max_tokens))
    return cost.coefficients.least_time_ms(squares, tokens, num_full)


def _alone_ms(cost: SchemeCost, lengths: FloatArray) -> FloatArray:
    """Time of a replica with one sequence of each length; inf if it does not hold it."""
    one_ms = cost.coefficients.time_of_sums_ms(cost.coefficients.squared(lengths), lengths)
    alone_ms: FloatArray = np.where(lengths <= cost.longest, cost.num_stages * one_ms, np.inf)
    return alone_ms


def _edges(batches: Sequence[Sequence[int]], limits: Sequence[int]) -> FloatArray:
    """Longest lengths of the buckets, ascending: the limits, and equal shares of all tokens."""
    lengths = np.sort(np.concatenate([np.asarray(batch) for batch in batches]))
    share = np.cumsum(lengths) / lengths.sum()
    quantiles = np.searchsorted(share, np.linspace(0.0, 1.0, _NUM_BUCKETS + 1)[1:-1])
    inner = [limit for limit in limits if limit < lengths[-1]]
    return np.unique(np.concatenate((lengths[quantiles], inner, lengths[-1:]))).astype(np.float64)


def _work_shares(
    costs: Sequence[SchemeCost], batches: Sequence[Sequence[int]]
) -> tuple[FloatArray, FloatArray]:
    """A grid of times, and the share of each that a replica works: (num_times, num_schemes).

    With v micro-batches of equal work, p stages and constant cost c, ``T·v/(v+p-1) - v·c`` is left
    for work, but no more than v micro-batches hold.
    """
    lengths = np.concatenate([np.asarray(batch, dtype=np.float64) for batch in batches])
    num_micro_batches = np.arange(1, _MOST_MICRO_BATCHES + 1, dtype=np.float64)
    squared = costs[0].coefficients.squared
    shortest = lengths.min()
    fastest_ms = min(_work_ms(cost, 0.0, shortest) for cost in costs) + _LEAST_TIME_MS
    sums = [(squared(np.array(batch, dtype=np.float64)).sum(), sum(batch)) for batch in batches]
    slowest_ms = max(cost.coefficients.time_of_sums_ms(*each) for cost in costs for each in sums)
    grid_ms = np.geomspace(fastest_ms, max(slowest_ms, 2.0 * fastest_ms), _NUM_GRID_TIMES)
    shares = np.empty((_NUM_GRID_TIMES, len(costs)))
    for place, cost in enumerate(costs):
        fitting = lengths[lengths <= cost.max_tokens]
        length = float(squared(fitting).sum() / fitting.sum()) if len(fitting) else 0.0
        tokens = _FULL * cost.max_tokens
        full_ms = _work_ms(cost, tokens * length, tokens)
        room_ms = num_micro_batches * (full_ms - cost.coefficients.c_ms)
        filled = num_micro_batches / (num_micro_batches + cost.num_stages - 1.0)
        work_ms = grid_ms[:, None] * filled - num_micro_batches * cost.coefficients.c_ms
        is_issued = num_micro_batches * cost.coefficients.host_ms <= grid_ms[:, None]
        most_ms = np.where(is_issued, np.minimum(work_ms, room_ms), 0.0).max(axis=1)
        with_constants = full_ms / max(room_ms[0], _LEAST_TIME_MS)
        shares[:, place] = np.clip(with_constants * most_ms / grid_ms, _LEAST_SHARE, 1.0)
    return grid_ms, shares


@dataclass(frozen=True, slots=True)
class Bounded:
    """Limits of the time of a plan, overhead included."""

    bound_ms: float
    """Lower bound of the time of any plan."""
    quick_ms: float
    """Time of the quick plan."""

    @property
    def is_tight(self) -> bool:
        """The quick plan can hardly be improved."""
        return self.quick_ms * (1.0 - _TIGHT) <= self.bound_ms

    @property
    def expected_ms(self) -> float:
        """Expected time of the full plan."""
        if self.is_tight:
            return self.quick_ms
        between_ms = self.bound_ms + _PLAN_ABOVE_BOUND * (self.quick_ms - self.bound_ms)
        return max(between_ms, self.quick_ms * (1.0 - _PLAN_BELOW_QUICK))


class Evaluator:
    """Bounds and plans of mixes for given batches.

    Args:
        batches: shape (num_batches, …), lengths in tokens.
        seed: of the planner.
        row_quantum: to which plans round rows up, in tokens; bounds leave that padding out.
    """

    def __init__(
        self,
        candidates: Candidates,
        cost_model: CostModel,
        batches: Sequence[Sequence[int]],
        *,
        seed: int = 0,
        row_quantum: int = 1,
    ) -> None:
        self._limits = Limits(cost_model, row_quantum=row_quantum)
        self._candidates = candidates
        self._cost_model = cost_model
        self.batches = batches
        self.longest = tuple(max(batch) for batch in batches)
        self._orders = [longest_first(batch) for batch in batches]
        self._seed = seed
        self._pools: dict[Mix, tuple[Pool, PoolCosts]] = {}
        self._bounds: dict[tuple[Mix, int], Bounded] = {}
        self._plans_ms: dict[tuple[Mix, int], float] = {}
        self._packers: dict[tuple[SchemeCost, int], ReplicaPacker] = {}
        self._solver = Solver(Deadline(None), seed=seed)
        self._fastest_ms = [math.inf] * len(batches)
        """Least time of the quick plans known for each batch."""

    def evaluated(self) -> Iterator[tuple[Mix, int, Bounded]]:
        """Yields mixes and batches with their bounds, in the order in which they were computed."""
        for (mix, batch), bounded in self._bounds.items():
            yield mix, batch, bounded

    @property
    def num_bounds(self) -> int:
        """Bounds computed so far."""
        return len(self._bounds)

    @property
    def num_plans(self) -> int:
        """Plans made so far."""
        return len(self._plans_ms)

    def holds(self, mix: Mix, batch: int) -> bool:
        """Returns whether some replica holds the longest sequence of a batch."""
        return self._candidates.limit(mix) >= self.longest[batch]

    def overhead_ms(self, mix: Mix) -> float:
        """Time that regrouping and optimizer add to the makespan of a mix."""
        pool, costs = self._pool(mix)
        return costs.overheads_ms[pool.strategies[0].name]

    def bounded(self, mix: Mix, batch: int, estimate_ms: float) -> Bounded:
        """Bound and quick plan of a mix that holds the batch.

        estimate_ms: where the search for the bound starts; a wrong one only costs time. If the
        quick plan is far slower than the fastest one known for the batch, the bound is rough.
        """
        if (mix, batch) not in self._bounds:
            found = self._bounds[mix, batch] = self._bounded(mix, batch, estimate_ms)
            self._fastest_ms[batch] = min(self._fastest_ms[batch], found.quick_ms)
        return self._bounds[mix, batch]

    def is_planned(self, mix: Mix, batch: int) -> bool:
        """Returns whether the time of the full plan is known."""
        return (mix, batch) in self._plans_ms

    def plan_ms(self, mix: Mix, batch: int) -> float:
        """The predicted time of the plan of a mix that holds the batch."""
        if not self.is_planned(mix, batch):
            pool, _ = self._pool(mix)
            planner = CertifiedPlanner(pool, self._cost_model, self._limits, seed=self._seed)
            plan = planner.plan(self.batches[batch])
            self._plans_ms[mix, batch] = plan.predicted_time_s * _MS_PER_S
        return self._plans_ms[mix, batch]

    def _pool(self, mix: Mix) -> tuple[Pool, PoolCosts]:
        if mix not in self._pools:
            pool = Pool.of(self._candidates.strategy(mix))
            self._pools[mix] = (pool, PoolCosts(pool, self._cost_model, self._limits))
        return self._pools[mix]

    def _bounded(self, mix: Mix, batch: int, estimate_ms: float) -> Bounded:
        pool, costs = self._pool(mix)
        strategy = pool.strategies[0]
        replica_costs = costs.replica_costs(strategy)
        overhead_ms = self.overhead_ms(mix)
        search = StrategySearch(
            strategy,
            replica_costs,
            self.batches[batch],
            self._orders[batch],
            partial(self._packer, batch),
            self._solver,
            overhead_ms=overhead_ms,
        )
        quick_ms = self._quick_ms(replica_costs, batch, search.bound_ms)
        if (quick_ms + overhead_ms) * (1.0 - _PLAN_BELOW_QUICK) < self._fastest_ms[batch]:
            _raise_bound(search, estimate_ms - overhead_ms, quick_ms)
        return Bounded(search.bound_ms + overhead_ms, quick_ms + overhead_ms)

    def _quick_ms(self, costs: Sequence[SchemeCost], batch: int, bound_ms: float) -> float:
        """Makespan of the first plan after some moves and swaps."""
        quick = Assignment(
            [self._packer(batch, cost) for cost in costs],
            dispatch(self._orders[batch], self.batches[batch], costs),
            Effort(_QUICK_EFFORT),
        )
        improve_dispatch(quick, bound_ms / (1.0 - TARGET_GAP), _QUICK_STEPS)
        return quick.makespan_ms

    def _packer(self, batch: int, cost: SchemeCost) -> ReplicaPacker:
        if (cost, batch) not in self._packers:
            self._packers[cost, batch] = packer_for(cost, self.batches[batch], self._solver)
        return self._packers[cost, batch]


def _raise_bound(search: StrategySearch, estimate_ms: float, quick_ms: float) -> None:
    """Raises the bound to within _BOUND_GAP of what the planner's program can prove.

    Growing steps up or down from the estimate, then bisection: this solves fewer programs than
    bisection alone.
    """
    high_ms = quick_ms * (1.0 - _TIGHT)
    time_ms, step = min(estimate_ms, high_ms), _STEP
    if search.excludes(time_ms):
        while time_ms < high_ms:
            time_ms, step = min(time_ms * (1.0 + step), high_ms), 2.0 * step
            if not search.excludes(time_ms):
                high_ms = time_ms
    else:
        high_ms = time_ms
        while time_ms > search.bound_ms:
            time_ms, step = time_ms * (1.0 - step), 2.0 * step
            if not search.excludes(time_ms):
                high_ms = time_ms
    while high_ms - search.bound_ms > _BOUND_GAP * high_ms:
        middle_ms = (search.bound_ms + high_ms) / 2.0
        if not search.excludes(middle_ms):
            high_ms = middle_ms
