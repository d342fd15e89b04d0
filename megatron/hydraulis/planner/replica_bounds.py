"""Times that no packing of a replica's share can be below."""

import math
from collections.abc import Sequence

from megatron.hydraulis.planner.lumps import choose_lumps, lump_orders
from megatron.hydraulis.planner.modes import largest_micro_batch_ms
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.pipeline_shape import MAX_SHAPED_MICRO_BATCHES, fill_bound_ms

__all__ = ["fewest_micro_batches", "replica_bound_ms"]


def fewest_micro_batches(lengths: Sequence[int], max_tokens: int) -> int:
    """A number of micro-batches that no packing is below: bound L2 of Martello and Toth (1990).

    For a threshold up to half the limit: sequences above limit - threshold leave no room for any
    from the threshold on, those above half the limit are alone among themselves, and what the
    latter leave free holds the rest down to the threshold only in part.
    """
    best = -(-sum(lengths) // max_tokens)
    for threshold in sorted({0, *(length for length in lengths if 2 * length <= max_tokens)}):
        alone = [length for length in lengths if length > max_tokens - threshold]
        large = [length for length in lengths if max_tokens - threshold >= length > max_tokens / 2]
        small = [length for length in lengths if max_tokens / 2 >= length >= threshold]
        beyond = sum(small) - (len(large) * max_tokens - sum(large))
        best = max(best, len(alone) + len(large) + max(0, -(-beyond // max_tokens)))
    return best


def replica_bound_ms(lengths: Sequence[int], cost: SchemeCost) -> float:
    """A time that a replica needs for sequences of these lengths, whatever the packing.

    The least over all numbers of micro-batches of the bounds for that number: total work with the
    best shape, and the long sequences' way through the pipeline.
    """
    if not lengths:
        return 0.0
    c_ms, num_stages = cost.coefficients.c_ms, cost.num_stages
    work_ms = math.fsum(cost.sequence_time_ms(length) for length in lengths)
    fewest = fewest_micro_batches(lengths, cost.max_tokens)
    if num_stages == 1:
        return work_ms + fewest * c_ms
    falling = sorted(lengths, reverse=True)
    orders = lump_orders(choose_lumps(falling, cost.max_tokens), cost)
    largest_ms = largest_micro_batch_ms(cost, falling[0])
    best_ms = math.inf
    for num in range(fewest, len(lengths) + 1):
        total_ms = work_ms + num * c_ms
        # No larger number is below this: more micro-batches only add constant costs.
        least_ms = max(
            total_ms + (num_stages - 1) * c_ms,
            orders.least_time_ms(len(lengths), total_ms),
        )
        if num > MAX_SHAPED_MICRO_BATCHES or least_ms >= best_ms:
            return min(best_ms, least_ms)
        best_ms = min(
            best_ms,
            max(
                fill_bound_ms(num_stages, num, total_ms, largest_ms),
                orders.least_time_ms(num, total_ms),
            ),
        )
    return best_ms
