"""The pool of a given size with the least mean over batches of the least time over the pool.

This is the facility-location problem. Greedy choice and exchange of single members (Cornuejols,
Fisher and Nemhauser, Management Science 23, 1977) come close to its optimum, and
here there are a few dozen strategies only.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["pool_times", "select"]

FloatArray = npt.NDArray[np.float64]

_ROUNDING = 1e-9


def pool_times(times: FloatArray, pool: Sequence[int]) -> FloatArray:
    """Least time of every batch over a pool, shape (num_batches,); inf where none holds it.

    times: shape (num_strategies, num_batches), inf where a strategy does not hold a batch.
    """
    least: FloatArray = times[list(pool)].min(axis=0, initial=np.inf)
    return least


def select(
    times: FloatArray, size: int, start: Sequence[int] = (), *, exchanges: bool = True
) -> tuple[int, ...]:
    """Strategies of a good pool, at most size of them, begun with start.

    times: shape (num_strategies, num_columns), inf where a strategy does not hold a batch. To hold
    more columns comes before being fast. Strategies that change nothing are left out. Without
    exchanges start stays in the pool.
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
    """Make the one exchange of a member that helps most; whether there is one."""
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
