"""From a shortlist to a pool: the planner's bounds choose, full plans confirm.

A pool is settled when the time of every batch is that of a plan and not a guess: the strategy that
is expected to be fastest for a batch is planned, until the fastest one is.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.proposal.explore import Explorer
from megatron.hydraulis.proposal.judge import Judge
from megatron.hydraulis.proposal.menu import Menu, Mix
from megatron.hydraulis.proposal.selection import pool_times, select

__all__ = ["Refiner"]

_NUM_NEAR = 2
"""Neighbours of a member that are bounded for its batches."""
_MAX_EXCHANGES = 1
_LEAST_EXCHANGE_GAIN = 2e-3
"""Share of the mean time that has to be expected of other members to plan them."""
_LEAST_MEMBER_GAIN = 1e-6
_LEAST_GAIN = 1e-4
_LEAST_PLAN_GAIN = 4e-3
"""Share of a batch's time that has to be expected of a plan to make it."""
_HOPELESS = 1.05
"""A quick estimate above the least one by more than this is not looked into: it is right to a few
percent."""

FloatArray = npt.NDArray[np.float64]


class Refiner:
    """Strategies with times from the planner, as a matrix (num_mixes, num_batches), ms."""

    def __init__(self, menu: Menu, judge: Judge, explorer: Explorer, longest: int) -> None:
        self._menu = menu
        self._judge = judge
        self._explorer = explorer
        self._longest = longest
        self.mixes: list[Mix] = []
        self._times_ms = np.empty((0, len(judge.batches)))

    @property
    def times_ms(self) -> FloatArray:
        """Times of plans, expected ones where there is no plan, inf where a batch does not fit."""
        return self._times_ms

    def add(self, mixes: Iterable[Mix], on_mix: Callable[[], None] = lambda: None) -> None:
        """Bound mixes for the batches that they may be the fastest for."""
        for mix in mixes:
            if mix not in self.mixes:
                row = [self._expected_ms(mix, batch) for batch in range(len(self._judge.batches))]
                self.mixes.append(mix)
                self._times_ms = np.vstack((self._times_ms, row))
            on_mix()

    def improve(self, size: int) -> int:
        """Bound neighbours of the best pool's members, keep the better ones; how many."""
        pool = self._selected(size, ())
        fastest = self._times_ms[list(pool)].argmin(axis=0)
        better = []
        for place, row in enumerate(pool):
            batches = np.flatnonzero(fastest == place).tolist()
            if not batches:
                continue
            mine_ms = float(self._times_ms[row, batches].sum())
            for mix in self._explorer.near(self.mixes[row], batches, _NUM_NEAR):
                if mix not in self.mixes and self._beats(mix, batches, mine_ms):
                    better.append(mix)
        self.add(better)
        return len(better)

    def settled_pool(self, size: int, start: Sequence[int] = ()) -> tuple[int, ...]:
        """The best settled pool found of at most size strategies, no worse than start.

        Places in mixes. start: a settled pool of fewer strategies.
        """
        pool = self._selected(size, start, exchanges=not start)
        self.settle(pool)
        best, best_ms = pool, self.mean_ms(pool)
        for _ in range(_MAX_EXCHANGES):
            pool = self._selected(size, self._useful(pool))
            if not self.mean_ms(pool) < best_ms * (1.0 - _LEAST_EXCHANGE_GAIN):
                break
            self.settle(pool)
            mean_ms = self.mean_ms(pool)
            if mean_ms < best_ms:
                best, best_ms = pool, mean_ms
        return self._useful(best)

    def _useful(self, pool: Sequence[int]) -> tuple[int, ...]:
        """The pool without members that others replace at no cost, the last ones first."""
        kept, most_ms = list(pool), self.mean_ms(pool) * (1.0 + _LEAST_MEMBER_GAIN)
        for row in reversed(pool):
            others = [other for other in kept if other != row]
            if self.mean_ms(others) <= most_ms:
                kept = others
        return tuple(kept)

    def settle(self, pool: Sequence[int]) -> None:
        """Plan until no strategy is expected to be noticeably faster than the fastest plan."""
        for batch in range(self._times_ms.shape[1]):
            least_ms = float("inf")
            for row in sorted(pool, key=lambda row: (self._times_ms[row, batch], row)):
                if not self._times_ms[row, batch] < least_ms * (1.0 - _LEAST_PLAN_GAIN):
                    break
                if not self._judge.is_planned(self.mixes[row], batch):
                    time_ms = self._judge.plan_ms(self.mixes[row], batch)
                    self._times_ms[row, batch] = time_ms
                least_ms = min(least_ms, float(self._times_ms[row, batch]))
            self._raise_guesses(pool, batch, least_ms)

    def _raise_guesses(self, pool: Sequence[int], batch: int, least_ms: float) -> None:
        """What was not worth a plan counts as no faster than the fastest plan."""
        for row in pool:
            if not self._judge.is_planned(self.mixes[row], batch):
                self._times_ms[row, batch] = max(self._times_ms[row, batch], least_ms)

    def mean_ms(self, pool: Sequence[int]) -> float:
        """Mean time of the batches; inf where one of them, or the longest sequence, is not held."""
        if max((self._menu.limit(self.mixes[row]) for row in pool), default=0) < self._longest:
            return float("inf")
        return float(pool_times(self._times_ms, pool).mean())

    def order(self, pool: Sequence[int]) -> tuple[int, ...]:
        """The pool in an order in which each one helps those before it most."""
        rows = list(pool)
        ordered: tuple[int, ...] = ()
        while len(ordered) < len(rows):
            rest = [row for row in rows if row not in ordered]
            ordered += (min(rest, key=lambda row: (self._rank(*ordered, row), row)),)
        return ordered

    def _rank(self, *pool: int) -> tuple[float, float]:
        times = self._with_longest()[list(pool)].min(axis=0)
        is_held = np.isfinite(times)
        return -float(is_held.sum()), float(times[is_held].sum())

    def _expected_ms(self, mix: Mix, batch: int) -> float:
        if not self._judge.holds(mix, batch):
            return float("inf")
        estimate_ms = float(self._explorer.estimates_ms(mix)[batch])
        if estimate_ms > _HOPELESS * self._explorer.least_estimates_ms()[batch]:
            return estimate_ms
        return self._judge.bounded(mix, batch, estimate_ms).expected_ms

    def _beats(self, mix: Mix, batches: Sequence[int], most_ms: float) -> bool:
        """Whether a mix is expected to be faster for some batches, in all."""
        sum_ms = 0.0
        for batch in batches:
            sum_ms += self._expected_ms(mix, batch)
            if not sum_ms < most_ms * (1.0 - _LEAST_GAIN):
                return False
        return True

    def _with_longest(self) -> FloatArray:
        """Times with one more column, for the longest sequence: 0 for mixes that hold it."""
        holds = [0.0 if self._menu.limit(mix) >= self._longest else np.inf for mix in self.mixes]
        return np.column_stack((self._times_ms, holds))

    def _selected(
        self, size: int, start: Sequence[int], *, exchanges: bool = True
    ) -> tuple[int, ...]:
        return select(self._with_longest(), size, start, exchanges=exchanges)
