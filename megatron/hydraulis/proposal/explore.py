"""Finds mixes that are worth the planner's bound, by the quick estimate.

Every regime is searched from initial mixes and from the best known mixes, by steepest descent over
exchanges. Then pools are grown to the wanted size, and every member is moved towards what is best
for the batches for which it is the fastest.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.hydraulis.proposal.candidates import Candidates, FloatArray, Mix, neighbours
from megatron.hydraulis.proposal.evaluator import Estimator

_NUM_KEPT = 3
"""Number of mixes that are remembered from the end of a descent."""
_MAX_REGIME_BATCHES = 6
_MAX_STEPS = 40
_LEAST_GAIN = 1e-4
"""Least gain of a step, as a share of the time: smaller gains are within the estimate's error."""
_NUM_HALVINGS = 14
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Regime:
    """Batches whose longest sequence lies between two limits: the same schemes can hold it."""

    above: int
    """Longest sequences have more tokens than this; 0 for the first regime."""
    up_to: int
    """Longest sequences have at most this many tokens."""
    batches: tuple[int, ...]
    """Indices of the batches, ascending."""


class Explorer:
    """Mixes with their estimated times.

    Args:
        longest: tokens of the longest sequence of the corpus, which some strategy must hold.
    """

    def __init__(
        self, candidates: Candidates, estimator: Estimator, num_batches: int, longest: int
    ) -> None:
        self._candidates = candidates
        self._estimator = estimator
        self._num_batches = num_batches
        self._longest = longest
        self._rows: dict[Mix, FloatArray] = {}
        """Estimated times of the remembered mixes for all batches."""
        self._initial: dict[Regime, tuple[Mix, ...]] = {}
        self._neighbours: dict[Mix, tuple[Mix, ...]] = {}
        self._plain = single_scheme_mixes(candidates)

    @property
    def num_mixes(self) -> int:
        """Number of remembered mixes."""
        return len(self._rows)

    def search_regime(self, regime: Regime) -> None:
        """Remembers good mixes for the batches of a regime, together and each alone."""
        batches = regime.batches[:: -(-len(regime.batches) // _MAX_REGIME_BATCHES)]
        if regime not in self._initial:
            self._initial[regime] = range_mixes(self._candidates, self._estimator, batches)
        mixes = tuple(dict.fromkeys((*self._rows, *self._initial[regime], *self._plain)))
        for some in dict.fromkeys((batches, *((batch,) for batch in batches))):
            means_ms = self._means_ms(mixes, some)
            best = int(means_ms.argmin())
            if np.isfinite(means_ms[best]):
                path = self._descend(mixes[best], float(means_ms[best]), some)
                self.remember(path[-_NUM_KEPT:])

    def learn(self, evaluated: Sequence[tuple[Mix, int, float]]) -> None:
        """Corrects the estimate by expected times (mix, batch, ms), and all remembered times."""
        self._estimator.learn(evaluated)
        mixes = tuple(self._rows)
        self._rows = {}
        self.remember(mixes)

    def grow(self, size: int, on_size: Callable[[int], None]) -> None:
        """Remembers the members of good pools of 1 to size mixes."""
        self.remember(mix for mix in self._plain if self._candidates.limit(mix) >= self._longest)
        pool: list[Mix] = []
        for num in range(1, size + 1):
            pool = self._best_pool(num, pool)
            if self._improve_members(pool):
                pool = self._best_pool(num, pool)
            on_size(num)

    def shortlist(self, size: int, num: int, known: Collection[Mix] = ()) -> tuple[Mix, ...]:
        """At most num mixes for the planner's bound, without known ones.

        Members of pools come first, then those of pools without these mixes: the estimate may be
        wrong.
        """
        mixes = list(self._rows)
        times = self._with_longest(mixes)
        pool: tuple[int, ...] = ()
        chosen: dict[int, None] = {}
        for count in range(1, size + 1):
            pool = select(times, count, pool)
            chosen |= dict.fromkeys(pool)
        new = [place for place in chosen if mixes[place] not in known]
        while len(new) < num and len(chosen) < len(mixes):
            rest = [place for place in range(len(mixes)) if place not in chosen]
            more = [rest[place] for place in select(times[rest], size)]
            chosen |= dict.fromkeys(more)
            new += [place for place in more if mixes[place] not in known]
        return tuple(mixes[place] for place in new[:num])

    def estimates_ms(self, mix: Mix) -> FloatArray:
        """Estimated times of all batches, shape (num_batches,)."""
        self.remember((mix,))
        return self._rows[mix]

    def least_estimates_ms(self) -> FloatArray:
        """The least estimated time of each batch over all remembered mixes, (num_batches,)."""
        least: FloatArray = np.array(list(self._rows.values())).min(axis=0)
        return least

    def near(self, mix: Mix, batches: Sequence[int], num: int) -> tuple[Mix, ...]:
        """The num best neighbours of a mix for some batches, best first."""
        around = self._around(mix)
        means_ms = self._means_ms(around, batches)
        order = np.argsort(means_ms, kind="stable")[:num]
        return tuple(around[place] for place in order if np.isfinite(means_ms[place]))

    def remember(self, mixes: Iterable[Mix]) -> None:
        """Estimates mixes for all batches."""
        new = [mix for mix in dict.fromkeys(mixes) if mix not in self._rows]
        rows = self._estimator.times_ms(new, range(self._num_batches))
        self._rows |= dict(zip(new, rows, strict=True))

    def _means_ms(self, mixes: Sequence[Mix], batches: Sequence[int]) -> FloatArray:
        means_ms: FloatArray = self._estimator.times_ms(mixes, batches).mean(axis=1)
        return means_ms

    def _around(self, mix: Mix) -> tuple[Mix, ...]:
        if mix not in self._neighbours:
            self._neighbours[mix] = neighbours(self._candidates, mix)
        return self._neighbours[mix]

    def _descend(self, start: Mix, mean_ms: float, batches: Sequence[int]) -> list[Mix]:
        """Steepest descent; the path from start to a mix that no exchange improves."""
        path = [start]
        for _ in range(_MAX_STEPS):
            around = self._around(path[-1])
            if not around:
                break
            means_ms = self._means_ms(around, batches)
            place = int(means_ms.argmin())
            if not means_ms[place] < mean_ms * (1.0 - _LEAST_GAIN):
                break
            path.append(around[place])
            mean_ms = float(means_ms[place])
        return path

    def _with_longest(self, mixes: Sequence[Mix]) -> FloatArray:
        times = np.array([self._rows[mix] for mix in mixes])
        return with_longest_sequence(times, mixes, self._candidates, self._longest)

    def _best_pool(self, size: int, pool: Sequence[Mix]) -> list[Mix]:
        mixes = list(self._rows)
        places = {mix: place for place, mix in enumerate(mixes)}
        chosen = select(self._with_longest(mixes), size, [places[mix] for mix in pool])
        return [mixes[place] for place in chosen]

    def _improve_members(self, pool: Sequence[Mix]) -> bool:
        """Remembers better mixes for the batches of each member; whether there are new ones."""
        times = np.array([self._rows[mix] for mix in pool])
        least, fastest = pool_times(times, range(len(pool))), times.argmin(axis=0)
        found = False
        for place, mix in enumerate(pool):
            batches = [int(b) for b in np.flatnonzero((fastest == place) & np.isfinite(least))]
            if not batches:
                continue
            path = self._descend(mix, float(times[place, batches].mean()), batches)
            if len(path) > 1:
                found = found or path[-1] not in self._rows
                self.remember(path[-1:])
        return found


def regimes_of(
    batches: Sequence[Sequence[int]], limits: Sequence[int], *, min_batches: int = 1
) -> tuple[Regime, ...]:
    """The regimes of batches, shortest first.

    limits: most tokens of a sequence on each scheme; the largest is at least that of the longest
    sequence. A regime of fewer than min_batches batches is merged into the next longer one, whose
    strategies can run its batches too.
    """
    edges = sorted(set(limits))
    longest = [max(batch) for batch in batches]
    regimes: list[Regime] = []
    above, held = 0, 0
    members: list[int] = []
    for edge in edges:
        inside = [place for place, length in enumerate(longest) if held < length <= edge]
        members += inside
        held = edge
        is_last = not any(length > edge for length in longest)
        if members and (len(members) >= min_batches or is_last):
            regimes.append(Regime(above, edge, tuple(sorted(members))))
            members, above = [], edge
        elif not members:
            above = edge
    return tuple(regimes)


def single_scheme_mixes(candidates: Candidates) -> tuple[Mix, ...]:
    """Mixes with as many replicas of one plain scheme as possible; others fill the rest."""
    empty = (0,) * len(candidates.schemes)
    return tuple(dict.fromkeys(candidates.filled(empty, (i,)) for i in candidates.plain))


def range_mixes(
    candidates: Candidates, estimator: Estimator, batches: Sequence[int]
) -> tuple[Mix, ...]:
    """Initial mixes for the mean of some batches: one scheme for each of several length ranges.

    For a given time, a dynamic program cuts the lengths into ranges, assigns a scheme to each and
    minimises the number of ranks that finish all ranges in that time. Bisection finds the least
    time for which the job has enough ranks, for each scheme that may serve the longest sequences.
    """
    work_ms = estimator.mean_work_ms(batches)
    pass_ms = estimator.longest_pass_ms(batches)
    has_work = work_ms.max(axis=1) > 0.0
    work_ms, pass_ms = work_ms[has_work], pass_ms[has_work]
    found = []
    for last in candidates.plain:
        low_ms = float(pass_ms[-1, last])
        if not np.isfinite(low_ms):
            continue
        high_ms = max(low_ms, float(work_ms.sum(axis=0).max()) * 4.0)
        best = None
        for _ in range(_NUM_HALVINGS):
            time_ms = math.sqrt(max(low_ms, 1e-6) * high_ms)
            shares = estimator.work_shares(time_ms)
            mix = _fewest_ranks(candidates, shares, work_ms, pass_ms, last, time_ms)
            if mix is not None and candidates.num_idle(mix) >= 0:
                best, high_ms = mix, time_ms
            else:
                low_ms = time_ms
        if best is not None:
            order = sorted((i for i, n in enumerate(best) if n), key=lambda i: candidates.sizes[i])
            found.append(candidates.filled(best, order))
    return tuple(dict.fromkeys(found))


def _fewest_ranks(
    candidates: Candidates,
    shares: FloatArray,
    work_ms: FloatArray,
    pass_ms: FloatArray,
    last: int,
    time_ms: float,
) -> Mix | None:
    """The mix of fewest ranks that finishes in time_ms; None if a bucket has no scheme."""
    num_buckets, num_schemes = work_ms.shape
    sizes = np.array(candidates.sizes, dtype=np.float64)
    before = np.vstack((np.zeros(num_schemes), work_ms.cumsum(axis=0)))
    # Replicas for the range of buckets i to j - 1; axes i, j, schemes.
    num = np.ceil((before[None, :, :] - before[:, None, :]) / (shares * time_ms) - 1e-9)
    num = np.maximum(num, 1.0)
    ranks = num * sizes
    for j in range(1, num_buckets + 1):
        ranks[:, j, pass_ms[j - 1] > time_ms * (1.0 + 1e-9)] = np.inf
    ranks[:, :, [i for i in range(num_schemes) if i not in candidates.plain]] = np.inf
    fewest = np.full(num_buckets + 1, np.inf)
    fewest[0] = 0.0
    steps: list[tuple[int, int]] = [(0, 0)]
    for j in range(1, num_buckets + 1):
        of_ranges = fewest[:j, None] + ranks[:j, j, :]
        if j == num_buckets:
            of_ranges = np.where(np.arange(num_schemes) == last, of_ranges, np.inf)
        place = int(of_ranges.argmin())
        fewest[j] = of_ranges.flat[place]
        steps.append((place // num_schemes, place % num_schemes))
    if not np.isfinite(fewest[-1]):
        return None
    mix = [0] * num_schemes
    j = num_buckets
    while j > 0:
        i, scheme = steps[j]
        mix[scheme] += int(num[i, j, scheme])
        j = i
    return tuple(mix)


def pool_times(times: FloatArray, pool: Sequence[int]) -> FloatArray:
    """Least time of every batch over a pool, shape (num_batches,); inf if no member holds it.

    times: shape (num_strategies, num_batches), inf if a strategy does not hold a batch.
    """
    least: FloatArray = times[list(pool)].min(axis=0, initial=np.inf)
    return least


def with_longest_sequence(
    times: FloatArray, mixes: Sequence[Mix], candidates: Candidates, longest: int
) -> FloatArray:
    """Times of mixes with a column for the longest sequence: 0 for mixes that hold it, else inf."""
    holds = [0.0 if candidates.limit(mix) >= longest else np.inf for mix in mixes]
    return np.column_stack((times, holds))


def select(
    times: FloatArray, size: int, start: Sequence[int] = (), *, exchanges: bool = True
) -> tuple[int, ...]:
    """Strategies of a good pool, at most size of them, beginning with start.

    A good pool has a low sum over batches of the least time over the pool. This is the
    facility-location problem: greedy selection and exchanges of single members come close to its
    optimum (Cornuejols, Fisher and Nemhauser, Management Science 23, 1977).

    times: shape (num_strategies, num_columns), inf if a strategy does not hold a batch. Holding
    more columns is preferred to being fast. Strategies that change nothing are not selected.
    Without exchanges start stays in the pool.
    """
    finite = times[np.isfinite(times)]
    penalty = 1e3 * (float(finite.max(initial=0.0)) + 1.0) * max(1, times.shape[1])
    costs = np.where(np.isfinite(times), times, penalty)
    pool = list(start)
    while len(pool) < size:
        least = costs[pool].min(axis=0, initial=np.inf)
        sums = np.minimum(costs, least).sum(axis=1)
        best = int(sums.argmin())
        if pool and not sums[best] < least.sum() * (1.0 - _ROUNDING):
            break
        pool.append(best)
    while exchanges and _exchange(costs, pool):
        pass
    return tuple(pool)


def _exchange(costs: FloatArray, pool: list[int]) -> bool:
    """Makes the exchange of a member that helps most; whether there is one."""
    best_sum = float(costs[pool].min(axis=0).sum()) * (1.0 - _ROUNDING)
    best: tuple[int, int] | None = None
    for place in range(len(pool)):
        others = costs[pool[:place] + pool[place + 1 :]].min(axis=0, initial=np.inf)
        sums = np.minimum(costs, others).sum(axis=1)
        candidate = int(sums.argmin())
        if sums[candidate] < best_sum:
            best_sum, best = float(sums[candidate]) * (1.0 - _ROUNDING), (place, candidate)
    if best is None:
        return False
    pool[best[0]] = best[1]
    return True
