"""Packing: a replica's sequences into micro-batches, greedily.

For one stage only the number of micro-batches counts, so the sequences are packed as densely as
best-fit decreasing packs them. With more stages a few numbers of micro-batches are tried: more of
them shorten the pipeline's fill and pay the constant cost more often. For each the sequences are
dealt longest first to the micro-batch with the least work that still has room.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.replica_plan import MicroBatch
from megatron.hydraulis.planner.wave_costs import WaveCosts

__all__ = ["Packing", "SchemeCost", "best_fit", "pack", "useful_num_micro_batches"]

# Numbers of micro-batches tried: each about a quarter larger than the one before. The time is
# flat around its minimum, so a finer search gains little.
_GROWTH = 1.25
# Tries without improvement after which larger numbers are given up.
_MAX_FRUITLESS_TRIES = 3


@dataclass(frozen=True, slots=True)
class SchemeCost:
    """What the planner knows of a scheme.

    With waves, coefficients and max_tokens are those of a micro-batch that no wave is faster than
    and none holds more than: enough for bounds and for dispatch. What waves take is asked of them.
    """

    coefficients: Coefficients
    max_tokens: int
    """Most tokens of one micro-batch."""
    num_stages: int
    multiple: int = 1
    """What each sequence is padded to a multiple of in a micro-batch, and what max_tokens is one
    of."""
    waves: WaveCosts | None = None
    """Where the columns are grouped anew for every micro-batch."""

    @property
    def longest(self) -> int:
        """The longest sequence that fits."""
        return self.max_tokens if self.waves is None else self.waves.longest

    def tokens(self, lengths: Sequence[int]) -> Sequence[int]:
        """What sequences of these lengths take up in a micro-batch."""
        if self.multiple == 1:
            return lengths
        return [-(-length // self.multiple) * self.multiple for length in lengths]

    def sequence_time_ms(self, length: int) -> float:
        """What one sequence adds to its micro-batch on one stage."""
        return self.coefficients.sequence_time_ms(length)


@dataclass(frozen=True, slots=True)
class Packing:
    """Micro-batches in the order in which they run, and the replica's exact time."""

    micro_batches: tuple[MicroBatch, ...]
    time_ms: float


def useful_num_micro_batches(work_ms: float, cost: SchemeCost) -> float:
    """The number v of equal micro-batches with the least ``W + v·c + (pp-1)·(W/v + c)``.

    That is ``sqrt((pp-1)·W / c)``; infinite without a constant cost c.
    """
    num_filling = cost.num_stages - 1
    if num_filling == 0 or work_ms == 0.0:
        return 1.0
    if cost.coefficients.c_ms == 0.0:
        return math.inf
    return math.sqrt(num_filling * work_ms / cost.coefficients.c_ms)


def pack(sequences: Sequence[int], lengths: Sequence[int], cost: SchemeCost) -> Packing:
    """Pack the sequences of one replica.

    sequences: indices into lengths, by falling length; each fits the limit. The micro-batches
    come in falling order of work, where ``Σ t + (pp-1)·max t`` bounds the time.
    """
    if not sequences:
        return Packing((), 0.0)
    tokens = cost.tokens(lengths)
    densest = best_fit(sequences, tokens, cost.max_tokens)
    best = _finish(densest, lengths, cost)
    if cost.num_stages == 1:
        return best
    num_fruitless = 0
    work_ms = math.fsum(cost.sequence_time_ms(lengths[sequence]) for sequence in sequences)
    for num_micro_batches in _candidates(len(densest), len(sequences), work_ms, cost):
        dealt = _deal(sequences, lengths, tokens, cost, num_micro_batches)
        if dealt is None:
            continue
        candidate = _finish(dealt, lengths, cost)
        if candidate.time_ms < best.time_ms:
            best, num_fruitless = candidate, 0
        else:
            num_fruitless += 1
            if num_fruitless > _MAX_FRUITLESS_TRIES:
                break
    return best


def _candidates(
    num_fewest: int, num_sequences: int, work_ms: float, cost: SchemeCost
) -> Iterator[int]:
    """Numbers of micro-batches worth a try, rising."""
    # Unequal work moves the optimum away from that of equal micro-batches, hardly beyond twice.
    largest = max(num_fewest + 1, min(num_sequences, 2.0 * useful_num_micro_batches(work_ms, cost)))
    num_micro_batches = num_fewest
    while num_micro_batches <= min(largest, num_sequences):
        yield num_micro_batches
        num_micro_batches = max(num_micro_batches + 1, int(num_micro_batches * _GROWTH))


def best_fit(sequences: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Best-fit decreasing: each sequence goes where the least room is left."""
    packed: list[list[int]] = []
    # (tokens that still fit, index into packed), rising.
    rooms: list[tuple[int, int]] = []
    for sequence in sequences:
        length = lengths[sequence]
        place = bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, index = rooms.pop(place)
            packed[index].append(sequence)
        else:
            room, index = max_tokens, len(packed)
            packed.append([sequence])
        insort(rooms, (room - length, index))
    return packed


def _deal(
    sequences: Sequence[int],
    lengths: Sequence[int],
    tokens: Sequence[int],
    cost: SchemeCost,
    num_micro_batches: int,
) -> list[list[int]] | None:
    """Each sequence to the micro-batch with the least work that has room; None when none has."""
    packed: list[list[int]] = [[] for _ in range(num_micro_batches)]
    num_tokens = [0] * num_micro_batches
    # (work in ms, index into packed), a heap.
    loads = [(0.0, index) for index in range(num_micro_batches)]
    for sequence in sequences:
        full: list[tuple[float, int]] = []
        while loads and num_tokens[loads[0][1]] + tokens[sequence] > cost.max_tokens:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        work_ms, index = loads[0]
        heapq.heapreplace(loads, (work_ms + cost.sequence_time_ms(lengths[sequence]), index))
        packed[index].append(sequence)
        num_tokens[index] += tokens[sequence]
        for entry in full:
            heapq.heappush(loads, entry)
    return [share for share in packed if share]


def _finish(packed: list[list[int]], lengths: Sequence[int], cost: SchemeCost) -> Packing:
    """Order the micro-batches by falling work and take the exact time."""
    timed = []
    for share in packed:
        share.sort()
        time_ms = cost.coefficients.time_ms(lengths[sequence] for sequence in share)
        timed.append((-time_ms, tuple(share)))
    timed.sort()
    return Packing(
        tuple(
            MicroBatch(share, tuple(lengths[sequence] for sequence in share)) for _, share in timed
        ),
        pipeline_time_ms([-negated_ms for negated_ms, _ in timed], cost.num_stages),
    )
