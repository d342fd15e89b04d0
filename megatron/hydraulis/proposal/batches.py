"""The global batches that strategies are proposed for, sampled as in training."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.hydraulis.data.sampler import BatchSizes
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.lengths.counts import LengthCounts
from megatron.hydraulis.ranges import check_range

_DRAWN_AT_ONCE = 4096


def draw_batches(
    counts: LengthCounts, size: BatchSizes, num_batches: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    """Lengths in tokens of num_batches global batches, sequences sampled with replacement.

    With a budget of tokens, the first sequence that does not fit begins the next batch.

    Raises ConfigurationError if the longest sequence is longer than the budget, and as
    `BatchSizes.check_num_drawn`.
    """
    check_range("--num-batches", num_batches)
    budget = size.largest if size.in_tokens else None
    if budget is not None and counts.longest > budget:
        raise ConfigurationError(
            f"a global batch must hold the longest sequence: {counts.longest} tokens are more "
            f"than --global-batch-tokens {budget}; raise it or lower --seq-length"
        )
    size.check_num_drawn(num_batches, counts.num_tokens / counts.num_sequences)
    generator = np.random.default_rng(seed)
    shares = counts.counts / counts.counts.sum()
    batches: list[tuple[int, ...]] = []
    open_batch: list[int] = []
    num_tokens = 0
    while True:
        for length in generator.choice(counts.lengths, size=_DRAWN_AT_ONCE, p=shares).tolist():
            is_full = (
                len(open_batch) == size.largest if budget is None else num_tokens + length > budget
            )
            if is_full:
                batches.append(tuple(open_batch))
                if len(batches) == num_batches:
                    return tuple(batches)
                open_batch, num_tokens = [], 0
            open_batch.append(length)
            num_tokens += length


@dataclass(frozen=True, slots=True)
class Regime:
    """Batches whose longest sequence lies between two limits: the same schemes can hold it."""

    above: int
    """Longest sequences have more tokens than this; 0 for the first regime."""
    up_to: int
    """Longest sequences have at most this many tokens."""
    batches: tuple[int, ...]
    """Indices of the batches, ascending."""


def regimes_of(
    batches: Sequence[Sequence[int]], limits: Sequence[int], *, min_batches: int = 1
) -> tuple[Regime, ...]:
    """The regimes of batches, shortest first.

    limits: most tokens of a sequence on each scheme; the largest is at least that of the longest
    sequence. A regime of fewer than min_batches batches is merged into the next longer one, whose
    strategies can run its batches too.
    """
    edges = sorted(set(limits))
    longest = [max(batch) for batch in batches]
    regimes: list[Regime] = []
    above, held = 0, 0
    members: list[int] = []
    for edge in edges:
        inside = [place for place, length in enumerate(longest) if held < length <= edge]
        members += inside
        held = edge
        is_last = not any(length > edge for length in longest)
        if members and (len(members) >= min_batches or is_last):
            regimes.append(Regime(above, edge, tuple(sorted(members))))
            members, above = [], edge
        elif not members:
            above = edge
    return tuple(regimes)
