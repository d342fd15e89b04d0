"""Schedulers without a cost model, as functions of lengths: rows of fixed length, and Megatron's.

`context_waves` follows ``BalancedCPScheduler`` of Megatron Core 0.19
(core/pipeline_parallel/hybrid_cp_schedule.py), which ``--hybrid-context-parallel`` uses.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.hydraulis.planner.greedy import longest_first

_MOST_OVER_MEAN = 1.1
"""Work of a bucket over the mean of all, beyond which it gets no further sequence."""
_SLACK = 0.05
"""Difference of the loads of two ranks, over the largest load, up to which a wave is balanced."""

Wave = list[tuple[int, list[int]]]
"""Number of ranks, and indices of the sequences, of each group."""


def fixed_length_shares(
    lengths: Sequence[int],
    window_tokens: int,
    num_replicas: int,
    first_fit: list[list[int]] | None = None,
) -> list[list[list[int]]]:
    """Indices of the sequences of each row of each replica; a row may be empty.

    The rows of `equal_rows` are assigned in alternating order, so that replicas get about the same
    number of tokens. Raises ValueError if a sequence is longer than the window.
    """
    rows = equal_rows(lengths, window_tokens, num_replicas, first_fit)
    shares: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    for turn, start in enumerate(range(0, len(rows), num_replicas)):
        order = range(num_replicas) if turn % 2 == 0 else reversed(range(num_replicas))
        for replica, row in zip(order, rows[start : start + num_replicas], strict=True):
            shares[replica].append(row)
    return shares


def equal_rows(
    lengths: Sequence[int],
    window_tokens: int,
    num_replicas: int,
    first_fit: list[list[int]] | None = None,
) -> list[list[int]]:
    """Indices of the sequences of each row: a multiple of num_replicas rows of about equal tokens.

    As many rows as first-fit decreasing needs, rounded up. Sequences, longest first, go to the row
    with the fewest tokens; if one has no room there, the rows are those of first-fit decreasing.
    The fullest rows come first, and some may be empty. Raises ValueError if a sequence is longer
    than the window.

    first_fit: the result of `first_fit_decreasing` if it is known.
    """
    rows = first_fit_decreasing(lengths, window_tokens) if first_fit is None else first_fit
    num_rows = num_replicas * math.ceil(len(rows) / num_replicas)
    rows = rows + [[] for _ in range(num_rows - len(rows))]
    balanced: list[list[int]] = [[] for _ in range(num_rows)]
    least = [(0, place) for place in range(num_rows)]  # a heap: tokens of each row
    for index in longest_first(lengths):
        tokens, place = least[0]
        balanced[place].append(index)
        heapq.heapreplace(least, (tokens + lengths[index], place))
    if max(least)[0] <= window_tokens:
        rows = balanced
    return sorted(rows, key=lambda row: -sum(lengths[i] for i in row))


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each row; longest first, each in the first row with room.

    Raises ValueError if a sequence is longer than a row.
    """
    if max(lengths, default=0) > row_tokens:
        raise ValueError(f"a row of {row_tokens} tokens cannot hold one of {max(lengths)}")
    rows: list[list[int]] = []
    room: list[int] = []
    shortest, first, place, last = min(lengths, default=0), 0, 0, 0
    for index in longest_first(lengths):
        length = lengths[index]
        while first < len(rows) and room[first] < shortest:
            first += 1
        # A row without room for one of these tokens has none for the next.
        place = max(first, place) if length == last else first
        while place < len(rows) and room[place] < length:
            place += 1
        if place == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[place].append(index)
        room[place] -= length
        last = length
    return rows


def context_waves(lengths: Sequence[int], rank_tokens: int, num_ranks: int) -> list[Wave]:
    """Groups of ranks of several widths, in waves, each sequence on the fewest ranks that hold it.

    Ranks wait for each other between waves. Megatron's groups run their sequences one by one.

    Args:
        rank_tokens: most tokens of a sequence on one rank; on a group of c ranks c times as many.
        num_ranks: a power of two.

    Raises ValueError if a sequence does not fit on all ranks.
    """
    sizes = [1 << max(0, math.ceil(math.log2(length / rank_tokens))) for length in lengths]
    if max(sizes, default=1) > num_ranks:
        raise ValueError(
            f"{num_ranks} ranks of {rank_tokens} tokens cannot hold one of {max(lengths)}"
        )
    work = [length * length / size for length, size in zip(lengths, sizes, strict=True)]
    rest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    waves = []
    while rest:
        groups, rest = _fill_wave(_buckets(rest, sizes, work), sizes, work, num_ranks)
        _widen(groups, num_ranks)
        waves.append([(group.size, group.sequences) for group in groups])
    return waves


@dataclass(slots=True)
class _Group:
    size: int
    load: float = 0.0
    sequences: list[int] = field(default_factory=list)


def _buckets(order: Sequence[int], sizes: Sequence[int], work: Sequence[float]) -> list[list[int]]:
    """The sequences in order, divided into about as many parts of equal work as there are sizes."""
    num = len({sizes[i] for i in order})
    most = _MOST_OVER_MEAN * sum(work[i] for i in order) / num
    buckets: list[list[int]] = [[]]
    load = 0.0
    for place, index in enumerate(order):
        num_closed = len(buckets) - 1
        if buckets[-1] and (
            load + work[index] > most or len(order) - place <= num - 2 * num_closed
        ):
            buckets.append([])
            load = 0.0
        buckets[-1].append(index)
        load += work[index]
    return buckets


def _fill_wave(
    buckets: list[list[int]], sizes: Sequence[int], work: Sequence[float], num_ranks: int
) -> tuple[list[_Group], list[int]]:
    """The groups of a wave, and the sequences that are left.

    The first sequence of the first bucket that finds a place is next: a new group if enough ranks
    are free, else the least loaded group of its size. Once a sequence is placed that needs fewer
    ranks than the first one, a balanced wave is complete. Sequences then leave the most loaded
    group while that improves the balance.
    """
    groups: list[_Group] = []
    free, is_narrower = num_ranks, False
    first_size = sizes[buckets[0][0]]

    def slack(loads: Sequence[float]) -> float:
        return max(loads) - (0.0 if free else min(loads))

    def is_balanced() -> bool:
        loads = [group.load for group in groups]
        return slack(loads) <= _SLACK * max(loads)

    while not (is_narrower and any(buckets) and is_balanced()):
        bucket = next(
            (
                bucket
                for bucket in buckets
                if bucket
                and (free >= sizes[bucket[0]] or any(g.size == sizes[bucket[0]] for g in groups))
            ),
            None,
        )
        if bucket is None:
            break
        index = bucket.pop(0)
        size = sizes[index]
        if free >= size:
            free -= size
            groups.append(_Group(size))
            group = groups[-1]
        else:
            group = min((g for g in groups if g.size == size), key=lambda g: g.load)
        group.load += work[index]
        group.sequences.append(index)
        is_narrower = is_narrower or size < first_size
    left = [index for bucket in buckets for index in bucket]
    while not free and not is_balanced():
        group = max(groups, key=lambda g: g.load)
        if len(group.sequences) < 2:
            break
        removed = work[group.sequences[-1]]
        loads = [g.load - removed if g is group else g.load for g in groups]
        if slack(loads) >= slack([g.load for g in groups]):
            break
        left.append(group.sequences.pop())
        group.load -= removed
    return groups, left


def _widen(groups: Sequence[_Group], num_ranks: int) -> None:
    """Doubles the first of the narrowest groups until no rank is free."""
    while sum(group.size for group in groups) < num_ranks:
        min(groups, key=lambda group: group.size).size *= 2
