"""Buckets of lengths: few enough for a linear program, with edges that round as little as can be.

A bucket stands for its sequences by its shortest one. Rounding *down* keeps every bound a bound:
a batch of shorter sequences takes no longer.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bucket", "make_buckets"]


# The dynamic program takes time with the square of the different lengths. Above this number,
# lengths that agree in their leading bits (1/32 apart at most) are grouped beforehand.
_MAX_GROUPS = 256
_KEPT_BITS = 6


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar lengths."""

    low: int
    """The shortest, in tokens: what each of them counts as."""
    high: int
    """The longest."""
    num_sequences: int
    num_tokens: int
    """Of all of them, unrounded."""

    @property
    def rounding_tokens(self) -> int:
        """Tokens lost by rounding down."""
        return self.num_tokens - self.low * self.num_sequences


def make_buckets(
    lengths: Sequence[int], num_buckets: int, *, borders: Iterable[int] = ()
) -> tuple[Bucket, ...]:
    """Cut lengths into buckets of least total rounding, by dynamic programming.

    lengths: shape (num_sequences,), in tokens; borders: lengths (limits of schemes) that no bucket
    may straddle: it holds lengths up to one or above it. Returns at most num_buckets buckets, and
    one more per border, by rising length.
    """
    fixed = sorted(set(borders))
    groups = _groups(lengths, fixed)
    num_groups = len(groups)
    values = np.array([group.low for group in groups], dtype=np.int64)
    # Sums before each group.
    num_before = np.cumsum([0, *(group.num_sequences for group in groups)])
    tokens_before = np.cumsum([0, *(group.num_tokens for group in groups)])
    cuts = {int(np.searchsorted(values, border, side="right")) for border in fixed}
    cuts -= {0, num_groups}
    wanted = min(num_groups, num_buckets + len(cuts))
    edges = _best_edges(values, num_before, tokens_before, sorted(cuts), wanted)
    return tuple(
        Bucket(
            low=groups[first].low,
            high=groups[end - 1].high,
            num_sequences=int(num_before[end] - num_before[first]),
            num_tokens=int(tokens_before[end] - tokens_before[first]),
        )
        for first, end in pairwise(edges)
    )


def _groups(lengths: Sequence[int], borders: Sequence[int]) -> list[Bucket]:
    """Equal lengths together; with very many different ones, also those that hardly differ."""
    counts = sorted(Counter(lengths).items())
    groups: list[Bucket] = []
    if len(counts) <= _MAX_GROUPS:
        return [Bucket(length, length, num, length * num) for length, num in counts]
    last_key: tuple[int, int] | None = None
    for length, num in counts:
        quantum_bits = max(0, length.bit_length() - _KEPT_BITS)
        key = (length >> quantum_bits << quantum_bits, bisect_left(borders, length))
        if key == last_key:
            group = groups[-1]
            groups[-1] = Bucket(
                group.low, length, group.num_sequences + num, group.num_tokens + length * num
            )
        else:
            groups.append(Bucket(length, length, num, length * num))
        last_key = key
    return groups


def _best_edges(
    values: NDArray[np.int64],
    num_before: NDArray[np.int64],
    tokens_before: NDArray[np.int64],
    cuts: Sequence[int],
    num_buckets: int,
) -> list[int]:
    """Places where buckets begin and, at the end, the number of groups."""
    num_groups = len(values)
    if num_buckets >= num_groups:
        return list(range(num_groups + 1))
    # rounding[i, j]: of a bucket over the groups i to j - 1; infinite across a cut.
    num_inside = num_before[None, :] - num_before[:num_groups, None]
    tokens_inside = tokens_before[None, :] - tokens_before[:num_groups, None]
    rounding = (tokens_inside - values[:, None] * num_inside).astype(np.float64)
    rounding[np.tril_indices(num_groups, 0, num_groups + 1)] = np.inf
    for cut in cuts:
        rounding[:cut, cut + 1 :] = np.inf
    # best[j]: least rounding of the first j groups in exactly as many buckets as rounds.
    best = rounding[0]
    columns = np.arange(num_groups + 1)
    choices = []
    for _ in range(num_buckets - 1):
        totals = best[:num_groups, None] + rounding
        choice = np.argmin(totals, axis=0)
        best = totals[choice, columns]
        choices.append(choice)
    edges = [num_groups]
    for choice in reversed(choices):
        edges.append(int(choice[edges[-1]]))
    return [0, *reversed(edges)]
