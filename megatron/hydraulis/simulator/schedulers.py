"""Megatron's schedulers of packed sequences, by their published rules, as functions of lengths.

Both are part of Megatron Core (https://github.com/NVIDIA/Megatron-LM): `packed_rows` follows
``DpBalancedScheduler`` (core/datasets/data_schedule.py of its development branch, 2025), chosen by
``--sequence-packing-scheduler dp_balanced``; `context_waves` follows ``BalancedCPScheduler``
(core/pipeline_parallel/hybrid_cp_schedule.py, release 0.19), of ``--hybrid-context-parallel``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_MOST_OVER_MEAN = 1.1
"""Work of a bucket over the mean of all, beyond which it gets no further sequence."""
_SLACK = 0.05
"""Difference of the loads of two ranks, over the largest load, up to which a wave is balanced."""

Wave = list[tuple[int, list[int]]]
"""Number of ranks, and indices of the sequences, of each group."""


def packed_rows(
    lengths: Sequence[int], row_tokens: int, num_replicas: int
) -> list[list[list[int]]]:
    """Indices of the sequences of each row of each replica, the same number of rows on each.

    Rows are filled in the order of the batch. If their number is not a multiple of num_replicas,
    the last sequence of the last row that has several becomes a row, again and again; a batch of
    fewer sequences than that leaves replicas without rows. Raises ValueError if a sequence is
    longer than a row.
    """
    if max(lengths, default=0) > row_tokens:
        raise ValueError(f"a row of {row_tokens} tokens cannot hold one of {max(lengths)}")
    rows: list[list[int]] = []
    free = 0
    for index, length in enumerate(lengths):
        if not rows or length > free:
            rows.append([])
            free = row_tokens
        rows[-1].append(index)
        free -= length
    place = len(rows) - 1
    while len(rows) % num_replicas and place >= 0:
        if len(rows[place]) > 1:
            rows.append([rows[place].pop()])
        else:
            place -= 1
    return [rows[replica::num_replicas] for replica in range(num_replicas)]


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
