"""Bounds proved without a solver: any weights on the replicas prove one, so none has to be trusted.

For a replica r with work W_r, tokens S_r, limit l_r and shortest micro-batch t_r, in any order of
its micro-batches, ``T_r ≥ W_r + c_r·max(1, S_r/l_r) + (pp_r-1)·t_r`` when it has sequences. With
weights λ_r ≥ 0 that add up to 1 the makespan is at least ``Σ λ_r·T_r``, hence at least

    Σ_i min_r λ_r·e_r(s_i) + Σ_r λ_r·f_r,    e_r(s) = a·s² + b·s + c·s/l,   f_r = (pp-1)·t_min

over the replicas that can hold s_i. The same holds with ``e_r(s) = a·s² + b·s`` and
``f_r = c + (pp-1)·t_min``. Replicas without sequences have no f: either no replica is empty, or one
of some scheme is, and then the others do the work. The smallest of these cases counts.

A sequence that would take longer than the plan on some replica is not there: see
proved_strategy_bound_ms.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.plan_check.files import SchemeFigures

__all__ = ["proved_packing_bound_ms", "proved_strategy_bound_ms"]

FloatArray = NDArray[np.float64]

_NUM_STEPS = 150
"""Steps of the search for good weights; more of them prove little more."""
_FIRST_STEP = 0.5
_NUM_REFINEMENTS = 40
"""Cuts of the interval in which two weights are traded, each to two thirds of its length."""


def proved_strategy_bound_ms(lengths: Sequence[int], replicas: Sequence[SchemeFigures]) -> float:
    """What no plan on these replicas can be below, in ms; infinity when one sequence fits none.

    A plan of time T has every sequence on a replica whose stages it passes within T. So no plan is
    shorter than the least T that is not below the bound for such plans.
    """
    counts = Counter(replicas)
    passes_ms = sorted(
        {
            _pass_ms(figures, length)
            for figures in counts
            for length in set(lengths)
            if length <= figures.longest
        }
    )
    bounds_ms: dict[int, float] = {}

    def is_reached(place: int) -> bool:
        bounds_ms[place] = _bound_within_ms(lengths, counts, passes_ms[place])
        return bounds_ms[place] <= passes_ms[place]

    # Where more is allowed the bound is lower: the first pass that reaches it can be bisected.
    place = bisect_left(range(len(passes_ms)), True, key=is_reached)
    before_ms = bounds_ms[place - 1] if place > 0 else math.inf
    return min(before_ms, passes_ms[place] if place < len(passes_ms) else math.inf)


def _pass_ms(figures: SchemeFigures, length: int) -> float:
    """Time of a sequence through all stages."""
    return figures.num_stages * figures.time_ms([length])


def _bound_within_ms(
    lengths: Sequence[int], counts: Counter[SchemeFigures], time_ms: float
) -> float:
    """The bound for plans in which no sequence takes longer than a time through all stages."""
    longest = {
        figures: max(
            (
                length
                for length in set(lengths)
                if length <= figures.longest and _pass_ms(figures, length) <= time_ms
            ),
            default=0,
        )
        for figures in counts
    }
    cases = [
        _shared_bound_ms(lengths, without_one, longest, all_work=False)
        for without_one in (counts - Counter([figures]) for figures in counts)
        if max((longest[figures] for figures in without_one), default=0) >= max(lengths)
    ]
    if max(longest.values()) >= max(lengths) and len(lengths) >= counts.total():
        cases.append(_shared_bound_ms(lengths, counts, longest, all_work=True))
    return min(cases, default=math.inf)


def _shared_bound_ms(
    lengths: Sequence[int],
    counts: Counter[SchemeFigures],
    longest: Mapping[SchemeFigures, int],
    *,
    all_work: bool,
) -> float:
    """The bound by weights; with all_work no replica is empty.

    longest: the longest sequence that may go to replicas of a scheme, 0 for none.
    """
    schemes = list(counts)
    distinct = Counter(lengths)
    sizes = np.array(list(distinct), dtype=np.float64)
    copies = np.array(list(distinct.values()), dtype=np.float64)
    num_replicas = np.array([counts[figures] for figures in schemes], dtype=np.float64)
    work_ms = np.array(
        [
            np.where(
                sizes <= longest[figures],
                figures.a_ms_per_token2 * sizes**2 + figures.b_ms_per_token * sizes,
                np.inf,
            )
            for figures in schemes
        ]
    )
    share_ms = np.array([figures.c_ms * sizes / max(figures.max_tokens, 1) for figures in schemes])
    if not all_work:
        return _best_ms(work_ms + share_ms, copies, num_replicas, np.zeros(len(schemes)))
    fill_ms = np.array(
        [(figures.num_stages - 1) * figures.time_ms([min(lengths)]) for figures in schemes]
    )
    constant_ms = np.array([figures.c_ms for figures in schemes])
    return max(
        _best_ms(work_ms + share_ms, copies, num_replicas, fill_ms),
        _best_ms(work_ms, copies, num_replicas, fill_ms + constant_ms),
    )


def _best_ms(
    work_ms: FloatArray, copies: FloatArray, num_replicas: FloatArray, fixed_ms: FloatArray
) -> float:
    """The bound for the best weights that a short search finds.

    work_ms: shape (num_schemes, num_lengths), infinite where a length does not fit; copies: shape
    (num_lengths,); num_replicas, fixed_ms: shape (num_schemes,). The bound is concave in the
    weights, so following its slope, and then trading weights in pairs, leads upwards.
    """
    fits = np.isfinite(work_ms)
    finite_ms = np.where(fits, work_ms, 0.0)
    columns = np.arange(len(copies))

    def loads_ms(shares: FloatArray) -> FloatArray:
        """What a replica of each scheme is given when every length goes where it weighs least.

        shares: weight of all replicas of each scheme together, which add up to 1.
        """
        weighted = np.where(fits, (shares / num_replicas)[:, None] * finite_ms, np.inf)
        chosen = weighted.argmin(axis=0)
        taken_ms = copies * finite_ms[chosen, columns]
        return fixed_ms + np.bincount(chosen, taken_ms, len(num_replicas)) / num_replicas

    def bound_ms(shares: FloatArray) -> float:
        return float(shares @ loads_ms(shares))

    best = shares = num_replicas / num_replicas.sum()
    # Trading alone finds the best weights of two schemes.
    for step in range(_NUM_STEPS if len(shares) > 2 else 0):
        loads = loads_ms(shares)
        slope = loads / max(float(loads.max()), np.finfo(np.float64).tiny)
        shares = shares * np.exp(_FIRST_STEP / math.sqrt(1 + step) * slope)
        shares /= shares.sum()
        best = max(best, shares, key=bound_ms)
    for first in range(len(best)):
        for second in range(first):
            best = _traded(bound_ms, best, first, second)
    return bound_ms(best)


def _traded(
    bound_ms: Callable[[FloatArray], float], shares: FloatArray, first: int, second: int
) -> FloatArray:
    """The best way to share out the weight of two schemes among them."""
    low, high = 0.0, float(shares[first] + shares[second])

    def with_first(share: float) -> FloatArray:
        traded = shares.copy()
        traded[first], traded[second] = share, shares[first] + shares[second] - share
        return traded

    for _ in range(_NUM_REFINEMENTS):
        third = (high - low) / 3.0
        if bound_ms(with_first(low + third)) < bound_ms(with_first(high - third)):
            low += third
        else:
            high -= third
    return max(shares, with_first((low + high) / 2.0), key=bound_ms)


def proved_packing_bound_ms(lengths: Sequence[int], figures: SchemeFigures) -> float:
    """What a replica with these sequences cannot be below, however they are packed, in ms."""
    if not lengths:
        return 0.0
    num_fewest = _fewest_micro_batches(lengths, figures.max_tokens)
    work_ms = math.fsum(figures.time_ms([length]) - figures.c_ms for length in lengths)
    fill_ms = (figures.num_stages - 1) * figures.time_ms([min(lengths)])
    return max(
        work_ms + num_fewest * figures.c_ms + fill_ms,
        figures.num_stages * figures.time_ms([max(lengths)]),
    )


def _fewest_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """Micro-batches that any packing needs: bound L2 of Martello and Toth (1990).

    For a threshold: sequences that leave less room than it have a micro-batch each, those above
    half the limit too, and those from the threshold to half the limit fill up what room is left.
    """
    fewest = -(-sum(lengths) // max(max_tokens, 1))
    half = max_tokens / 2
    for threshold in {length for length in lengths if length <= half} | {0}:
        alone = sum(length > max_tokens - threshold for length in lengths)
        large = [length for length in lengths if half < length <= max_tokens - threshold]
        small = sum(length for length in lengths if threshold <= length <= half)
        excess = small - (len(large) * max_tokens - sum(large))
        fewest = max(fewest, alone + len(large) + max(0, -(-excess // max(max_tokens, 1))))
    return fewest
