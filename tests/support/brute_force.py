"""The best plan of a few sequences by enumeration of all plans.

Every dispatch, every packing under the limits of tokens and every order of micro-batches, each
timed by an event simulation of 1F1B. Nothing of the planner or of the cost model is used, so that
the two can be held against each other. Up to 8 sequences take a fraction of a second.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

# Ordered packings that are simulated at once.
_MAX_ROWS = 20_000


Form = tuple[float, float, float]
"""ms per token², per token, and of each micro-batch."""


@dataclass(frozen=True)
class ReplicaFigures:
    """The inputs of a replica's time and limit."""

    a_ms_per_token2: float
    b_ms_per_token: float
    c_ms: float
    max_tokens: int
    num_stages: int = 1
    window_tokens: int = 0
    windowed_share: float = 0.0
    """Of the layers, those whose tokens attend to window_tokens, their own included."""
    forward_share: float = 1.0 / 3.0
    others: tuple[Form, ...] = ()
    """Forms besides a, b, c: a micro-batch takes the longest of all."""
    host_ms: float = 0.0
    """Of each micro-batch; the host waits for nobody."""

    def time_ms(self, lengths: Sequence[int], row_tokens: int | None = None) -> float:
        """Time of a micro-batch on one stage; row_tokens: of its row if it is rounded up."""
        squares = sum(map(self.attended, lengths))
        num_tokens = sum(lengths) if row_tokens is None else row_tokens
        forms = ((self.a_ms_per_token2, self.b_ms_per_token, self.c_ms), *self.others)
        return max(a * squares + b * num_tokens + c for a, b, c in forms)

    def attended(self, length: int) -> float:
        """Twice the pairs that attention computes, mean over layers: s² without windows."""
        seen = min(length, self.window_tokens)
        in_window = seen * seen + 2 * seen * (length - seen)
        return (1 - self.windowed_share) * length * length + self.windowed_share * in_window


def figures_of(cost: Any) -> ReplicaFigures:
    """The figures in the planner's cost of a scheme."""
    each = cost.coefficients
    return ReplicaFigures(
        each.a_ms_per_token2,
        each.b_ms_per_token,
        each.c_ms,
        cost.max_tokens,
        cost.num_stages,
        forward_share=each.forward_share,
        others=tuple((f.a_ms_per_token2, f.b_ms_per_token, f.c_ms) for f in each.others),
        host_ms=each.host_ms,
    )


def best_makespan_ms(lengths: Sequence[int], replicas: Sequence[ReplicaFigures]) -> float:
    """Least makespan of all plans, infinite when there is none."""
    by_figures = {figures: best_replica_times_ms(lengths, figures) for figures in set(replicas)}
    owners = np.array(list(itertools.product(range(len(replicas)), repeat=len(lengths))))
    bits = 1 << np.arange(len(lengths))
    makespans = np.zeros(len(owners))
    for replica, figures in enumerate(replicas):
        shares = ((owners == replica) * bits).sum(axis=1)
        makespans = np.maximum(makespans, by_figures[figures][shares])
    return float(makespans.min())


def best_replica_time_ms(lengths: Sequence[int], figures: ReplicaFigures) -> float:
    """Least time of one replica with all of these sequences, infinite when they do not fit."""
    return float(best_replica_times_ms(lengths, figures)[-1])


def best_replica_times_ms(lengths: Sequence[int], figures: ReplicaFigures) -> FloatArray:
    """Least time of one replica for each share: bit i of an index is sequence i."""
    num_shares = 1 << len(lengths)
    tokens, works_ms = np.zeros(num_shares), np.zeros(num_shares)
    for share in range(1, num_shares):
        members = [length for i, length in enumerate(lengths) if share >> i & 1]
        tokens[share] = sum(members)
        works_ms[share] = figures.time_ms(members)
    best_ms = np.full(num_shares, np.inf)
    best_ms[0] = 0.0
    for packings in _packings(len(lengths)):
        fitting = packings[(tokens[packings] <= figures.max_tokens).all(axis=1)]
        orders = np.array(list(itertools.permutations(range(packings.shape[1]))))
        if figures.num_stages == 1:
            orders = orders[:1]
        for part in np.array_split(fitting, 1 + fitting.shape[0] * len(orders) // _MAX_ROWS):
            rows = works_ms[part][:, orders].reshape(-1, packings.shape[1])
            times_ms = simulated_ms(rows, figures).reshape(len(part), len(orders))
            np.minimum.at(best_ms, part.sum(axis=1), times_ms.min(axis=1))
    return best_ms


@functools.cache
def _packings(num_sequences: int) -> tuple[IntArray, ...]:
    """All partitions of all shares, as shares, by their number of micro-batches from 1 on."""
    found: list[list[tuple[int, ...]]] = [[] for _ in range(num_sequences + 1)]
    for packing in _partitions_of_subsets(num_sequences):
        found[len(packing)].append(packing)
    return tuple(np.array(rows, dtype=np.int64) for rows in found[1:])


def _partitions_of_subsets(num_sequences: int) -> Iterator[tuple[int, ...]]:
    if num_sequences == 0:
        yield ()
        return
    new = 1 << (num_sequences - 1)
    for packing in _partitions_of_subsets(num_sequences - 1):
        yield packing
        yield (*packing, new)
        for k, share in enumerate(packing):
            yield (*packing[:k], share | new, *packing[k + 1 :])


def simulated_ms(times_ms: FloatArray, figures: ReplicaFigures) -> FloatArray:
    """End of 1F1B for many rows of micro-batch times, shape (num_rows, num_micro_batches), and of
    the host."""
    num_stages, num_micro_batches = figures.num_stages, times_ms.shape[1]
    forward_ms = figures.forward_share * times_ms.T
    backward_ms = (1.0 - figures.forward_share) * times_ms.T
    free_ms = [np.zeros(len(times_ms)) for _ in range(num_stages)]
    end_ms: dict[tuple[str, int, int], FloatArray] = {}
    for kind, stage, k in _schedule(num_stages, num_micro_batches):
        neighbour = stage - 1 if kind == "forward" else stage + 1
        start_ms = free_ms[stage]
        if 0 <= neighbour < num_stages:
            start_ms = np.maximum(start_ms, end_ms[kind, neighbour, k])
        work_ms = forward_ms[k] if kind == "forward" else backward_ms[k]
        free_ms[stage] = end_ms[kind, stage, k] = start_ms + work_ms
    return np.maximum(free_ms[0], num_micro_batches * figures.host_ms)


def operations(num_stages: int, num: int, stage: int) -> list[tuple[str, int]]:
    """The operations of a stage in Megatron's 1F1B: min(p-1-stage, v) forwards, then one forward
    and one backward in turn, then the remaining backwards."""
    ahead = min(num_stages - 1 - stage, num)
    order = [("forward", k) for k in range(ahead)]
    for k in range(num):
        if ahead + k < num:
            order.append(("forward", ahead + k))
        order.append(("backward", k))
    return order


@functools.cache
def _schedule(num_stages: int, num_micro_batches: int) -> tuple[tuple[str, int, int], ...]:
    """All operations (kind, stage, micro-batch), each after those that it waits for."""
    queues = [operations(num_stages, num_micro_batches, stage) for stage in range(num_stages)]
    done: list[tuple[str, int, int]] = []
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, k = queue[0]
                neighbour = stage - 1 if kind == "forward" else stage + 1
                is_end = not 0 <= neighbour < num_stages
                if not is_end and (kind, neighbour, k) not in done:
                    break
                done.append((kind, stage, k))
                queue.pop(0)
    assert math.prod((2, num_stages, num_micro_batches)) == len(done)
    return tuple(done)
