"""Mixes to begin the search with: one scheme alone, and a program over length ranges and ranks.

For a time T the program cuts the lengths into ranges, gives each range to one scheme and counts the
ranks that do the range's work within T. The least ranks for the first j buckets follow from those
for fewer buckets (a dynamic program); the least T for which the job has the ranks is halved for,
once for each scheme that may serve the longest sequences.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.proposal.fluid import FluidModel
from megatron.hydraulis.proposal.menu import Menu, Mix

__all__ = ["range_mixes", "single_scheme_mixes"]

_NUM_HALVINGS = 14

FloatArray = npt.NDArray[np.float64]


def single_scheme_mixes(menu: Menu) -> tuple[Mix, ...]:
    """As many replicas of one scheme as the job has ranks for, the rest put to use."""
    empty = (0,) * len(menu.schemes)
    return tuple(dict.fromkeys(menu.filled(empty, (i,)) for i in range(len(menu.schemes))))


def range_mixes(menu: Menu, fluid: FluidModel, batches: Sequence[int]) -> tuple[Mix, ...]:
    """Mixes for the mean of batches, by the dynamic program."""
    work_ms = fluid.mean_work_ms(batches)
    pass_ms = fluid.longest_pass_ms(batches)
    # Buckets without work have no say.
    has_work = work_ms.max(axis=1) > 0.0
    work_ms, pass_ms = work_ms[has_work], pass_ms[has_work]
    found = []
    for last in range(len(menu.schemes)):
        if not np.isfinite(pass_ms[-1, last]):
            continue
        mix = _least_time(menu, fluid, work_ms, pass_ms, last)
        if mix is not None:
            order = sorted((i for i, n in enumerate(mix) if n), key=lambda i: menu.sizes[i])
            found.append(menu.filled(mix, order))
    return tuple(dict.fromkeys(found))


def _least_time(
    menu: Menu, fluid: FluidModel, work_ms: FloatArray, pass_ms: FloatArray, last: int
) -> Mix | None:
    low_ms = float(pass_ms[-1, last])
    high_ms = max(low_ms, float(work_ms.sum(axis=0).max()) * 4.0)
    best = None
    for _ in range(_NUM_HALVINGS):
        middle_ms = math.sqrt(max(low_ms, 1e-6) * high_ms)
        mix = _fewest_ranks(menu, fluid.work_shares(middle_ms), work_ms, pass_ms, last, middle_ms)
        if mix is not None and menu.num_idle(mix) >= 0:
            best, high_ms = mix, middle_ms
        else:
            low_ms = middle_ms
    return best


def _fewest_ranks(
    menu: Menu,
    shares: FloatArray,
    work_ms: FloatArray,
    pass_ms: FloatArray,
    last: int,
    time_ms: float,
) -> Mix | None:
    """The mix of fewest ranks within a time; None when some bucket has no scheme."""
    num_buckets, num_schemes = work_ms.shape
    sizes = np.array(menu.sizes, dtype=np.float64)
    before = np.vstack((np.zeros(num_schemes), work_ms.cumsum(axis=0)))
    # Of the range from bucket i up to j, exclusive; axes i, j, schemes.
    num = np.ceil((before[None, :, :] - before[:, None, :]) / (shares * time_ms) - 1e-9)
    num = np.maximum(num, 1.0)
    ranks = num * sizes
    for j in range(1, num_buckets + 1):
        ranks[:, j, pass_ms[j - 1] > time_ms * (1.0 + 1e-9)] = np.inf
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
