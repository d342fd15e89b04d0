"""1F1B played through event by event, to see how long a replica takes."""

import heapq
from collections.abc import Sequence

__all__ = ["simulated_time_ms"]

# The forward of a matrix product is one product, its backward two.
_FORWARD_SHARE = 1 / 3

_Operation = tuple[str, int]
"""Kind, F or B, and micro-batch."""


def simulated_time_ms(times_ms: Sequence[float], num_stages: int) -> float:
    """When the last operation ends.

    times_ms: forward + backward of each micro-batch on one stage, in the order in which they run.
    A stage begins its next operation once the stage is free and the operation's input has been
    computed: the same forward on the stage before, the same backward on the stage after, and for
    the last stage's backward its own forward.
    """
    orders = [_order(len(times_ms), num_stages - 1 - stage) for stage in range(num_stages)]
    next_operation = [0] * num_stages
    is_busy = [False] * num_stages
    done: set[tuple[int, _Operation]] = set()
    running: list[tuple[float, int]] = []
    now_ms = 0.0

    def start(stage: int) -> None:
        if is_busy[stage] or next_operation[stage] == len(orders[stage]):
            return
        kind, micro_batch = orders[stage][next_operation[stage]]
        if not _has_input(stage, kind, micro_batch, num_stages, done):
            return
        share = _FORWARD_SHARE if kind == "F" else 1 - _FORWARD_SHARE
        is_busy[stage] = True
        heapq.heappush(running, (now_ms + share * times_ms[micro_batch], stage))

    start(0)
    while running:
        now_ms, stage = heapq.heappop(running)
        done.add((stage, orders[stage][next_operation[stage]]))
        is_busy[stage] = False
        next_operation[stage] += 1
        for neighbour in (stage, stage - 1, stage + 1):
            if 0 <= neighbour < num_stages:
                start(neighbour)
    return now_ms


def _order(num_micro_batches: int, num_ahead: int) -> list[_Operation]:
    """The operations of a stage: so many forwards ahead, one of each in turn, the backwards."""
    forwards = [("F", k) for k in range(num_micro_batches)]
    backwards = [("B", k) for k in range(num_micro_batches)]
    operations = forwards[:num_ahead]
    rest = forwards[num_ahead:]
    for forward, backward in zip(rest, backwards, strict=False):
        operations += [forward, backward]
    return operations + backwards[len(rest) :]


def _has_input(
    stage: int, kind: str, micro_batch: int, num_stages: int, done: set[tuple[int, _Operation]]
) -> bool:
    if kind == "F":
        return stage == 0 or (stage - 1, ("F", micro_batch)) in done
    if stage == num_stages - 1:
        return (stage, ("F", micro_batch)) in done
    return (stage + 1, ("B", micro_batch)) in done
