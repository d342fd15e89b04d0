"""Which mixes are worth the planner's bound, found by the quick estimate.

Every regime is searched from the starts of starts.py and from the best mixes known, by steepest
descent over moves. Then pools are grown to the wanted size, and every member is moved towards what
is best for the batches that it is the fastest for, as long as that helps.
"""

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.proposal.batches import Regime
from megatron.hydraulis.proposal.fluid import FluidModel
from megatron.hydraulis.proposal.menu import Menu, Mix
from megatron.hydraulis.proposal.moves import neighbours
from megatron.hydraulis.proposal.selection import pool_times, select
from megatron.hydraulis.proposal.starts import range_mixes, single_scheme_mixes

__all__ = ["Explorer"]

_NUM_DESCENTS = 1
"""Starts of a regime from which the search goes on."""
_NUM_KEPT = 3
"""Mixes of a descent, best first, that are remembered."""
_MAX_REGIME_BATCHES = 6
_MAX_STEPS = 40
_MAX_POOL_ROUNDS = 1
_LEAST_GAIN = 1e-4
"""Share of the time that a step has to win: less is below what the estimate can tell."""

FloatArray = npt.NDArray[np.float64]


class Explorer:
    """Mixes with their estimated times.

    Args:
        longest: tokens of the longest sequence of the corpus, which some strategy has to hold.
    """

    def __init__(self, menu: Menu, fluid: FluidModel, num_batches: int, longest: int) -> None:
        self._menu = menu
        self._fluid = fluid
        self._num_batches = num_batches
        self._longest = longest
        self._rows: dict[Mix, FloatArray] = {}

    @property
    def num_mixes(self) -> int:
        """Mixes that are remembered."""
        return len(self._rows)

    def search_regime(self, regime: Regime) -> None:
        """Remember good mixes for the batches of a regime."""
        step = -(-len(regime.batches) // _MAX_REGIME_BATCHES)
        batches = regime.batches[::step]
        starts = dict.fromkeys(
            (
                *self._rows,
                *range_mixes(self._menu, self._fluid, batches),
                *single_scheme_mixes(self._menu),
            )
        )
        means = self._means(tuple(starts), batches)
        order = np.argsort(means, kind="stable")
        for place in order[:_NUM_DESCENTS]:
            if np.isfinite(means[place]):
                path = self._descend(tuple(starts)[place], float(means[place]), batches)
                self.remember(path[-_NUM_KEPT:])

    def learn(self, judged: Sequence[tuple[Mix, int, float]]) -> None:
        """Estimate anew by what mixes are expected to need for batches, ms."""
        self._fluid.learn(judged)
        mixes = tuple(self._rows)
        self._rows = {}
        self.remember(mixes)

    def grow(self, size: int, on_size: Callable[[int], None]) -> None:
        """Remember the members of good pools of 1 to size mixes."""
        self.remember(
            mix for mix in single_scheme_mixes(self._menu) if self._menu.limit(mix) >= self._longest
        )
        pool: list[Mix] = []
        for num in range(1, size + 1):
            pool = self._best_pool(num, pool)
            for _ in range(_MAX_POOL_ROUNDS):
                if not self._improve_members(pool):
                    break
                pool = self._best_pool(num, pool)
            on_size(num)

    def shortlist(self, size: int, num: int, known: Collection[Mix] = ()) -> tuple[Mix, ...]:
        """At most num mixes for the planner's bound that are not known yet.

        Members of pools first, then what pools would gain most from if these were not there: the
        estimate may be wrong.
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
        """Of every batch the least over all mixes that are remembered, shape (num_batches,)."""
        least: FloatArray = np.array(list(self._rows.values())).min(axis=0)
        return least

    def near(self, mix: Mix, batches: Sequence[int], num: int) -> tuple[Mix, ...]:
        """The num best neighbours of a mix for some batches, best first."""
        around = neighbours(self._menu, mix)
        means = self._means(around, batches)
        order = np.argsort(means, kind="stable")[:num]
        return tuple(around[place] for place in order if np.isfinite(means[place]))

    def remember(self, mixes: Iterable[Mix]) -> None:
        """Estimate mixes for all batches."""
        new = [mix for mix in dict.fromkeys(mixes) if mix not in self._rows]
        rows = self._fluid.times_ms(new, range(self._num_batches))
        self._rows |= dict(zip(new, rows, strict=True))

    def _means(self, mixes: Sequence[Mix], batches: Sequence[int]) -> FloatArray:
        means: FloatArray = self._fluid.times_ms(mixes, batches).mean(axis=1)
        return means

    def _descend(self, start: Mix, mean_ms: float, batches: Sequence[int]) -> list[Mix]:
        """Steepest descent; the path from the start to where no step helps."""
        path = [start]
        for _ in range(_MAX_STEPS):
            around = neighbours(self._menu, path[-1])
            if not around:
                break
            means = self._means(around, batches)
            place = int(means.argmin())
            if not means[place] < mean_ms * (1.0 - _LEAST_GAIN):
                break
            path.append(around[place])
            mean_ms = float(means[place])
        return path

    def _with_longest(self, mixes: Sequence[Mix]) -> FloatArray:
        """Times with one more column, for the longest sequence: 0 for mixes that hold it."""
        holds = [0.0 if self._menu.limit(mix) >= self._longest else np.inf for mix in mixes]
        rows = np.array([self._rows[mix] for mix in mixes])
        return np.column_stack((rows, holds))

    def _best_pool(self, size: int, pool: Sequence[Mix]) -> list[Mix]:
        mixes = list(self._rows)
        places = {mix: place for place, mix in enumerate(mixes)}
        chosen = select(self._with_longest(mixes), size, [places[mix] for mix in pool])
        return [mixes[place] for place in chosen]

    def _improve_members(self, pool: Sequence[Mix]) -> bool:
        """Remember better mixes for the batches of each member; whether there are any."""
        times = np.array([self._rows[mix] for mix in pool])
        least, fastest = pool_times(times, range(len(pool))), times.argmin(axis=0)
        found = False
        for place, mix in enumerate(pool):
            batches = [int(b) for b in np.flatnonzero((fastest == place) & np.isfinite(least))]
            if not batches:
                continue
            mean_ms = float(times[place, batches].mean())
            path = self._descend(mix, mean_ms, batches)
            if len(path) > 1:
                found = found or path[-1] not in self._rows
                self.remember(path[-1:])
        return found
