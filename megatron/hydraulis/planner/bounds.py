"""Lower bounds: times that no dispatch and no packing can be below.

Sums are exactly rounded (math.fsum), so that bounds are the same on every machine.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.costs import SchemeCost
from megatron.hydraulis.planner.pipeline_bounds import (
    MAX_SHAPED,
    choose_long_micro_batches,
    fill_bound_ms,
    long_micro_batch_orders,
    ranges_of_numbers,
)

# A rounding error must not make a share larger than the fraction that it is.
_SHARE_SAFETY = 1e-9


def dispatch_bound_ms(lengths: Sequence[int], costs: Sequence[SchemeCost]) -> float:
    """A lower bound on the makespan of any dispatch of lengths to replicas with these costs.

    A replica r with tokens S_r needs at least S_r / limit_r micro-batches, so it takes at least
    the sum over its sequences of ``e_r(s) = a·s² + b·s + c·s/limit_r``. Hence for any weights
    λ_r ≥ 0 with Σ λ_r = 1 the makespan is at least ``Σ_r λ_r·Σ_{i in r} e_r(s_i)``, and so at
    least ``Σ_i min_r λ_r·e_r(s_i)`` over the replicas that can hold s_i (weak duality). The
    weights here balance the work of replicas that could hold everything. Also, a sequence has to
    pass all stages of some replica: ``min_r pp_r·(a·s² + b·s + c)``.
    """
    distinct, counts = np.unique(np.array(lengths, dtype=np.int64), return_counts=True)
    num_replicas = Counter(costs)
    effective_ms = {cost: _effective_ms(cost, distinct.astype(np.float64)) for cost in num_replicas}
    whole_batch_ms = {
        cost: math.fsum(of_cost_ms * counts) for cost, of_cost_ms in effective_ms.items()
    }
    if min(whole_batch_ms.values()) == 0.0:
        return 0.0
    norm = math.fsum(num / whole_batch_ms[cost] for cost, num in num_replicas.items())
    weighted_ms = [
        np.where(distinct <= cost.max_tokens, of_cost_ms / (norm * whole_batch_ms[cost]), np.inf)
        for cost, of_cost_ms in effective_ms.items()
    ]
    shared_ms = math.fsum(counts * np.min(weighted_ms, axis=0))
    # Shorter sequences take less: each replica is faster with them, and no fewer can hold them.
    longest = max(lengths)
    single_ms = min(
        cost.num_stages * cost.coefficients.time_ms((longest,))
        for cost in num_replicas
        if longest <= cost.max_tokens
    )
    return max(shared_ms, single_ms)


def packing_bound_ms(lengths: Sequence[int], cost: SchemeCost) -> float:
    """A lower bound on the time of a replica with these sequences, whatever the packing.

    ``Σ t + (pp-1)·min t`` with at least ⌈tokens/limit⌉ micro-batches, and the pass of the longest
    sequence through all stages.
    """
    if not lengths:
        return 0.0
    c_ms = cost.coefficients.c_ms
    num_fewest = -(-sum(lengths) // cost.max_tokens)
    work_ms = math.fsum(cost.sequence_time_ms(s) for s in lengths)
    fill_ms = (cost.num_stages - 1) * (cost.sequence_time_ms(min(lengths)) + c_ms)
    longest_ms = cost.num_stages * (cost.sequence_time_ms(max(lengths)) + c_ms)
    return max(work_ms + num_fewest * c_ms + fill_ms, longest_ms)


def _effective_ms(cost: SchemeCost, lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    work_ms: NDArray[np.float64] = cost.coefficients.sequence_time_ms(lengths)
    return work_ms + cost.coefficients.c_ms * lengths / cost.max_tokens


def fewest_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """A lower bound on the number of micro-batches: L2 of Martello and Toth (1990).

    For a threshold up to half the limit: sequences above limit - threshold leave no room for any
    from the threshold on, no two above half the limit fit together, and the room that the latter
    leave holds only a part of the rest down to the threshold.
    """
    rising = np.sort(np.array(lengths, dtype=np.int64))
    tokens_below = np.concatenate(([0], np.cumsum(rising)))
    half = int(np.searchsorted(rising, max_tokens // 2, side="right"))
    thresholds = np.concatenate(([0], np.unique(rising[:half])))
    # Places in rising: from the threshold on, and of the sequences that leave less room than it.
    small = np.searchsorted(rising, thresholds)
    alone = np.searchsorted(rising, max_tokens - thresholds, side="right")
    room = (alone - half) * max_tokens - (tokens_below[alone] - tokens_below[half])
    beyond = tokens_below[half] - tokens_below[small] - room
    fewest = len(rising) - half + np.maximum(0, -(-beyond // max_tokens))
    return max(-(-sum(lengths) // max_tokens), int(fewest.max()))


def replica_bound_ms(lengths: Sequence[int], cost: SchemeCost) -> float:
    """A tighter lower bound on the time of a replica, whatever the packing.

    The minimum over numbers of micro-batches of the bounds for that number: total work with the
    best shape, and the path of the long sequences through the pipeline.
    """
    if not lengths:
        return 0.0
    c_ms, num_stages = cost.coefficients.c_ms, cost.num_stages
    work_ms = math.fsum(cost.sequence_time_ms(length) for length in lengths)
    fewest = fewest_micro_batches(lengths, cost.max_tokens)
    if num_stages == 1:
        return work_ms + fewest * c_ms
    falling = sorted(lengths, reverse=True)
    orders = long_micro_batch_orders(choose_long_micro_batches(falling, cost.max_tokens), cost)
    largest_ms = cost.largest_time_ms(falling[0])
    best_ms = math.inf
    for first, last in ranges_of_numbers():
        num = max(first, fewest)
        if num > last:
            continue
        total_ms = work_ms + num * c_ms
        # A lower bound for larger numbers too: more micro-batches only add constant costs.
        least_ms = max(
            total_ms + (num_stages - 1) * c_ms,
            orders.least_time_ms(len(lengths), total_ms),
        )
        if num > MAX_SHAPED or num > len(lengths) or least_ms >= best_ms:
            break
        best_ms = min(
            best_ms,
            max(
                fill_bound_ms(cost.pipeline, num, total_ms, largest_ms),
                orders.least_time_ms(last, total_ms),
            ),
        )
    return best_ms if num > len(lengths) else min(best_ms, least_ms)


def dual_feasible(shares: NDArray[np.float64], m: int) -> NDArray[np.float64]:
    """Counts what items leave unused because they cannot be divided, in numbers that can be summed.

    Dual feasible functions (Fekete and Schepers, Mathematical Programming 91, 2001): with x the
    share of a room that an item takes and ``u_m(x) = x`` where ``(m+1)·x`` is whole, otherwise
    ``⌊(m+1)·x⌋ / m``, items that fit one room together have ``Σ u_m(x) <= 1``. A share in [0, 1]
    within rounding of a whole fraction counts as that fraction.
    """
    scaled = (m + 1) * shares
    whole = np.rint(scaled)
    is_whole = np.abs(scaled - whole) <= _SHARE_SAFETY * (m + 1)
    return np.where(is_whole, whole / (m + 1), np.floor(scaled) / m)
