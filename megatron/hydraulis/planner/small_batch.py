"""The best plan of a few sequences, by looking at all of them.

Moves and swaps stop at plans that no single one of them improves, and bounds are weak where every
sequence is a large part of the work. With few sequences all plans can be looked at instead: every
share of the batch in every packing and order on every class of replicas, then every dispatch of
shares to replicas. What is found is the optimum and its own bound.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.modes import ReplicaClass
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.polish import pipeline_times_ms

__all__ = ["MAX_SMALL_BATCH", "SmallPlan", "best_small_plan", "is_small"]

MAX_SMALL_BATCH = 8
"""Sequences up to which all plans are looked at: a million packings and orders."""

# Steps of a pipeline's recurrence (see polish.Effort) up to which a class is searched: fewer
# sequences for very long pipelines.
_MAX_STEPS = 8e7
# Orders of packings that are timed at once: what fits a processor's cache.
_NUM_AT_ONCE = 16_384
# A packing is left out when it is proved no faster than the plan in hand; times within this are
# equal.
_ROUNDING = 1e-9

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SmallPlan:
    """Micro-batches of every replica, in their order, as indices into the batch."""

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]
    """Shape (num_replicas, num_micro_batches, num_sequences), the latter two uneven."""


def is_small(num_sequences: int, classes: Sequence[ReplicaClass]) -> bool:
    """Whether all plans of a batch on these classes can be looked at in a moment."""
    if num_sequences > MAX_SMALL_BATCH:
        return False
    num_stages = max(replica_class.cost.num_stages for replica_class in classes)
    num_orders = sum(
        len(packings) * math.factorial(num)
        for num, packings in enumerate(_packings(num_sequences), start=1)
    )
    return num_stages == 1 or num_orders * num_sequences * num_stages <= _MAX_STEPS


def best_small_plan(
    lengths: Sequence[int], classes: Sequence[ReplicaClass], found_ms: float
) -> SmallPlan | None:
    """The plan of least makespan; None when none is below found_ms, that of a plan in hand.

    lengths: shape (num_sequences,), of the batch; is_small must hold.
    """
    limit_ms = found_ms * (1.0 - _ROUNDING)
    options = [_Shares(lengths, replica_class.cost, limit_ms) for replica_class in classes]
    shares = _best_dispatch([option.times_ms for option in options], classes, limit_ms)
    if shares is None:
        return None
    replicas: list[tuple[tuple[int, ...], ...]] = [()] * sum(c.num_replicas for c in classes)
    for replica_class, option, of_class in zip(classes, options, shares, strict=True):
        for replica, share in zip(replica_class.replicas, of_class, strict=False):
            replicas[replica] = option.micro_batches(share)
    return SmallPlan(tuple(replicas))


class _Shares:
    """The best packing of every share on replicas of one cost.

    A share or a micro-batch is a number whose bit i stands for sequence i.
    """

    def __init__(self, lengths: Sequence[int], cost: SchemeCost, limit_ms: float) -> None:
        num_shares = 1 << len(lengths)
        self.times_ms = np.full(num_shares, np.inf)
        """Shape (2^num_sequences,): infinite unless below limit_ms."""
        self.times_ms[0] = 0.0
        self._best: dict[int, tuple[int, ...]] = {0: ()}
        is_member = (np.arange(num_shares)[:, None] >> np.arange(len(lengths))) & 1
        tokens = is_member @ np.array(lengths, dtype=np.int64)
        each_ms = np.array([cost.sequence_time_ms(length) for length in lengths], dtype=np.float64)
        works_ms = is_member @ each_ms
        works_ms += cost.coefficients.c_ms
        for packings in _packings(len(lengths)):
            works = works_ms[packings]
            # Work passes one stage after another, and the largest micro-batch all of them.
            least_ms = np.maximum(
                works.sum(axis=1) + (cost.num_stages - 1) * works.min(axis=1),
                cost.num_stages * works.max(axis=1),
            )
            is_fit = (tokens[packings] <= cost.max_tokens).all(axis=1)
            promising = packings[is_fit & (least_ms < limit_ms)]
            if len(promising):
                self._take_best(promising, works_ms, cost, limit_ms)

    def micro_batches(self, share: int) -> tuple[tuple[int, ...], ...]:
        """Of the best packing of a share."""
        return tuple(_members(micro_batch) for micro_batch in self._best[share])

    def _take_best(
        self, packings: IntArray, works_ms: FloatArray, cost: SchemeCost, limit_ms: float
    ) -> None:
        num_micro_batches = packings.shape[1]
        orders = _orders(num_micro_batches)
        if cost.num_stages == 1:
            orders = orders[:1]
        num_parts = 1 + len(packings) * len(orders) // _NUM_AT_ONCE
        for part in np.array_split(packings, num_parts):
            rows = works_ms[part][:, orders].reshape(-1, num_micro_batches)
            times_ms = pipeline_times_ms(rows, cost.num_stages).reshape(len(part), len(orders))
            best_orders = times_ms.argmin(axis=1)
            best_ms = times_ms.min(axis=1)
            shares = part.sum(axis=1)
            # The fastest packing of each share comes first, and of equal ones the first.
            places = np.lexsort((best_ms, shares))
            places = places[np.unique(shares[places], return_index=True)[1]]
            for place in places[
                best_ms[places] < np.minimum(self.times_ms[shares[places]], limit_ms)
            ]:
                share = int(shares[place])
                self.times_ms[share] = best_ms[place]
                self._best[share] = tuple(map(int, part[place][orders[best_orders[place]]]))


def _best_dispatch(
    times_ms: Sequence[FloatArray], classes: Sequence[ReplicaClass], limit_ms: float
) -> list[list[int]] | None:
    """The shares of each class's replicas with the least slowest time, if that is below a limit.

    times_ms: of every share on each class.
    """
    num_sequences = len(times_ms[0]).bit_length() - 1
    wholes, parts, starts = _parts_of_shares(num_sequences)
    makespans_ms = np.full(len(times_ms[0]), np.inf)
    makespans_ms[0] = 0.0
    taken: list[tuple[int, IntArray]] = []
    for index, replica_class in enumerate(classes):
        # More replicas than sequences stay empty.
        for _ in range(min(replica_class.num_replicas, num_sequences)):
            slower_ms = np.maximum(times_ms[index][parts], makespans_ms[wholes ^ parts])
            makespans_ms = np.minimum.reduceat(slower_ms, starts)
            is_best = slower_ms == makespans_ms[wholes]
            places = np.where(is_best, np.arange(len(parts)), len(parts))
            taken.append((index, parts[np.minimum.reduceat(places, starts)]))
    if not makespans_ms[-1] < limit_ms:
        return None
    shares: list[list[int]] = [[] for _ in classes]
    left = len(makespans_ms) - 1
    for index, of_replica in reversed(taken):
        shares[index].append(int(of_replica[left]))
        left ^= int(of_replica[left])
    return shares


@functools.lru_cache(maxsize=MAX_SMALL_BATCH + 1)
def _packings(num_sequences: int) -> tuple[IntArray, ...]:
    """Partitions of all shares that are not empty, by their number of micro-batches from 1 on."""
    found: list[list[tuple[int, ...]]] = [[] for _ in range(num_sequences + 1)]
    for packing in _partitions(num_sequences):
        found[len(packing)].append(packing)
    return tuple(np.array(rows, dtype=np.int64) for rows in found[1:])


def _partitions(num_sequences: int) -> Iterator[tuple[int, ...]]:
    """Of all shares: the last sequence is left out, alone, or joins a micro-batch."""
    if num_sequences == 0:
        yield ()
        return
    last = 1 << (num_sequences - 1)
    for packing in _partitions(num_sequences - 1):
        yield packing
        yield (*packing, last)
        for place, micro_batch in enumerate(packing):
            yield (*packing[:place], micro_batch | last, *packing[place + 1 :])


@functools.lru_cache(maxsize=MAX_SMALL_BATCH + 1)
def _orders(num: int) -> IntArray:
    return np.array(list(itertools.permutations(range(num))), dtype=np.int64)


@functools.lru_cache(maxsize=MAX_SMALL_BATCH + 1)
def _parts_of_shares(num_sequences: int) -> tuple[IntArray, IntArray, IntArray]:
    """Every share with each of its parts, share by share, and where a share begins."""
    shares = np.arange(1 << num_sequences, dtype=np.int64)
    wholes, parts = np.nonzero((shares[None, :] & ~shares[:, None]) == 0)
    return wholes, parts, np.searchsorted(wholes, shares)


def _members(share: int) -> tuple[int, ...]:
    return tuple(i for i in range(share.bit_length()) if share >> i & 1)
