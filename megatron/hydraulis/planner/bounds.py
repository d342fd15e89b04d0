"""Times that no dispatch and no packing can be below.

Sums are exactly rounded (math.fsum), so that bounds are the same on every machine.
"""

import math
import operator
from collections import Counter
from collections.abc import Sequence

from megatron.hydraulis.planner.packing import SchemeCost

__all__ = ["dispatch_bound_ms", "packing_bound_ms"]


def dispatch_bound_ms(lengths: Sequence[int], costs: Sequence[SchemeCost]) -> float:
    """A lower bound on the makespan of any dispatch of lengths to replicas with these costs.

    A replica r with tokens S_r needs at least S_r / limit_r micro-batches, so it takes at least
    the sum over its sequences of ``e_r(s) = a·s² + b·s + c·s/limit_r``. Hence for any weights
    λ_r ≥ 0 with Σ λ_r = 1 the makespan is at least ``Σ_r λ_r·Σ_{i in r} e_r(s_i)``, and so at
    least ``Σ_i min_r λ_r·e_r(s_i)`` over the replicas that can hold s_i (weak duality). The
    weights here are those that would share out the work if all replicas could hold everything.
    Besides, a sequence has to pass all stages of some replica: ``min_r pp_r·(a·s² + b·s + c)``.
    """
    counts = Counter(lengths)
    num_replicas = Counter(costs)
    effective_ms = {cost: [_effective_ms(cost, s) for s in counts] for cost in num_replicas}
    whole_batch_ms = {
        cost: math.fsum(map(operator.mul, of_cost_ms, counts.values()))
        for cost, of_cost_ms in effective_ms.items()
    }
    if min(whole_batch_ms.values()) == 0.0:
        return 0.0
    norm = math.fsum(num / whole_batch_ms[cost] for cost, num in num_replicas.items())
    weighted = [
        (cost.max_tokens, 1.0 / (norm * whole_batch_ms[cost]), of_cost_ms)
        for cost, of_cost_ms in effective_ms.items()
    ]
    shared_ms = math.fsum(
        num * min(weight * each_ms[i] for limit, weight, each_ms in weighted if s <= limit)
        for i, (s, num) in enumerate(counts.items())
    )
    # No shorter sequence takes longer: each replica is faster with it, and no fewer can hold it.
    longest = max(counts)
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


def _effective_ms(cost: SchemeCost, length: int) -> float:
    share_ms = cost.coefficients.c_ms * length / cost.max_tokens
    return cost.sequence_time_ms(length) + share_ms
