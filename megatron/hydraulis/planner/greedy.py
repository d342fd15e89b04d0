"""Greedy dispatch and packing, without a solver.

Dispatch gives each sequence, longest first, to the replica that would finish it first by an
estimate of the replica's time. Replicas of one scheme are a class, of which only the one with the
least load is considered, so the effort grows with classes, not with replicas.

Packing: for one stage only the number of micro-batches counts, so best-fit decreasing packs as
densely as possible. With more stages several numbers of micro-batches are tried: more of them
shorten the pipeline's fill but pay the constant cost more often. For each number the sequences are
assigned, longest first, to the micro-batch with the least work that still has room.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron.hydraulis.planner.costs import ReplicaClass, SchemeCost
from megatron.hydraulis.planner.plan import Packing

# Numbers of micro-batches tried: each about a quarter larger than the one before. The time is
# flat around its minimum, so a finer search gains little.
_GROWTH = 1.25
# So many of the longest sequences are dispatched one by one, the others in as many units.
_NUM_SINGLE = 1000
# Tries without improvement after which larger numbers are not tried.
_MAX_FRUITLESS_TRIES = 3


def longest_first(lengths: Sequence[int], sequences: Iterable[int] | None = None) -> list[int]:
    """Sequences, by default all, by falling length; of equal ones the lower index is first."""
    some = range(len(lengths)) if sequences is None else sequences
    return sorted(some, key=lambda sequence: (-lengths[sequence], sequence))


def dispatch(
    sequences: Sequence[int], lengths: Sequence[int], costs: Sequence[SchemeCost]
) -> list[list[int]]:
    """Assign sequences to replicas.

    sequences: indices into lengths, by falling length; costs: shape (num_replicas,), equal for
    replicas of one scheme. Returns each replica's sequences, in the given order.

    Raises ValueError when a sequence fits no replica: the caller has excluded such strategies.
    """
    # By class, a heap of (estimated time in ms, replica, load).
    classes = {
        of_class.cost: [(0.0, replica, _Load(of_class.cost)) for replica in of_class.replicas]
        for of_class in ReplicaClass.of(costs)
    }
    shares: list[list[int]] = [[] for _ in costs]
    for unit in _units(sequences):
        length = lengths[unit[0]]
        fitting = [heap for cost, heap in classes.items() if length <= cost.longest]
        if not fitting:
            raise ValueError(f"sequence {unit[0]} of {length} tokens fits no replica")
        grown = [heap[0][2].with_sequences(length, len(unit)) for heap in fitting]
        times_ms = [load.estimated_time_ms() for load in grown]
        best = times_ms.index(min(times_ms))
        replica = fitting[best][0][1]
        heapq.heapreplace(fitting[best], (times_ms[best], replica, grown[best]))
        shares[replica] += unit
    return shares


def _units(sequences: Sequence[int]) -> list[Sequence[int]]:
    """Sequences that are assigned together: one each, or several of the short ones of very many."""
    num_single = min(len(sequences), _NUM_SINGLE)
    size = -(-(len(sequences) - num_single) // _NUM_SINGLE) or 1
    starts = [*range(num_single), *range(num_single, len(sequences), size)]
    return [sequences[first:end] for first, end in pairwise([*starts, len(sequences)])]


@dataclass(slots=True)
class _Load:
    """What a replica has been assigned so far."""

    cost: SchemeCost
    work_ms: float = 0.0
    num_tokens: int = 0
    num_sequences: int = 0
    longest_ms: float = 0.0
    """Work of the longest sequence."""

    def with_sequences(self, length: int, num: int) -> "_Load":
        """With num more sequences of at most this length."""
        time_ms = self.cost.sequence_time_ms(length)
        return _Load(
            self.cost,
            self.work_ms + num * time_ms,
            self.num_tokens + num * length,
            self.num_sequences + num,
            max(self.longest_ms, time_ms),
        )

    def estimated_time_ms(self) -> float:
        """``W + v·c + (pp-1)·(t + c)`` for a good v; t is the largest micro-batch's work if the
        others are equal."""
        num_fewest = -(-self.num_tokens // self.cost.max_tokens)
        c_ms = self.cost.coefficients.c_ms
        if self.cost.num_stages == 1:
            return self.work_ms + num_fewest * c_ms
        num_useful = min(self.num_sequences, useful_num_micro_batches(self.work_ms, self.cost))
        num_micro_batches = max(num_fewest, math.floor(num_useful), 1)
        largest_ms = max(self.longest_ms, self.work_ms / num_micro_batches)
        fill_ms = (self.cost.num_stages - 1) * (largest_ms + c_ms)
        return self.work_ms + num_micro_batches * c_ms + fill_ms


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
    """Numbers of micro-batches to try, rising."""
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
    """Each sequence to the micro-batch with the least work that has room; None if none has."""
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
        time_ms = cost.time_ms([lengths[sequence] for sequence in share])
        timed.append((-time_ms, tuple(share)))
    timed.sort()
    return Packing(
        tuple(share for _, share in timed),
        cost.pipeline.time_ms([-negated_ms for negated_ms, _ in timed]),
    )
