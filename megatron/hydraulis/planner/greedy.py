"""Greedy dispatch and packing, without a solver.

Dispatch gives each sequence, longest first, to the replica that would finish it first by an
estimate of the replica's time. Replicas of one scheme are a class, of which only the one with the
least load is considered, so the effort grows with classes, not with replicas.

A cost of several views has an estimate in each; the largest counts. Packing takes exact times.

Packing: for one stage only the number of micro-batches counts, so best-fit decreasing packs as
densely as possible; if there are several forms, they are mixed. With more stages several numbers of
micro-batches are tried: more of them shorten the pipeline's fill but pay the constant cost more
often. For each number the sequences are assigned, longest first, to the micro-batch with the least
work that still has room.
"""

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.costs import ReplicaClass, SchemeCost
from megatron.hydraulis.planner.plan import Packing

# Numbers of micro-batches tried: each about a quarter larger than the one before. The time is
# flat around its minimum, so a finer search gains little.
_GROWTH = 1.25
# The longest sequences are dispatched one by one, the others in as many units: this number for few
# replicas.
_FEWEST_SINGLE = 1000
# For each of many replicas, as a unit must be a small part of its share: on 256 replicas, up to
# 40,000 log-normal lengths exceed the bound by up to 150 % with 4, by less than 1 % with 16.
_SINGLE_PER_REPLICA = 16
# Weight of the first form's time in estimates of several forms: where the host binds, its time is
# the same for all replicas, and the device's work should still be shared evenly.
_TIE_BREAK = 1e-3
# Tries without improvement after which larger numbers are not tried.
_MAX_FRUITLESS_TRIES = 3


def longest_first(lengths: Sequence[int], sequences: Iterable[int] | None = None) -> list[int]:
    """Sequences, by default all, by falling length; of equal ones the lower index is first."""
    some = range(len(lengths)) if sequences is None else sorted(sequences)
    # Stable, also in reverse.
    return sorted(some, key=lengths.__getitem__, reverse=True)


def dispatch(
    sequences: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[SchemeCost],
    *,
    slowness: Mapping[SchemeCost, float] = MappingProxyType({}),
) -> list[list[int]]:
    """Assign sequences to replicas.

    sequences: indices into lengths, by falling length; costs: shape (num_replicas,), equal for
    replicas of one scheme; slowness: see `slowness_of`, 1 for costs that are missing. Returns each
    replica's sequences, in the given order.

    Raises ValueError when a sequence fits no replica: the caller has excluded such strategies.
    """
    units = _units(sequences, len(costs))
    longest = np.array([lengths[unit[0]] for unit in units], dtype=np.int64)
    # By class, its slowness, its longest sequence, the work of each unit's longest one by view, and
    # a heap of (estimated time in ms, replica, load by view).
    classes = [
        (
            slowness.get(each.cost, 1.0),
            each.cost.longest,
            _works_of_views_ms(each.cost, longest),
            [
                (0.0, replica, [_Load(view) for view in each.cost.views])
                for replica in each.replicas
            ],
        )
        for each in ReplicaClass.of(costs)
    ]
    shares: list[list[int]] = [[] for _ in costs]
    # By class, its time with the next unit, which many units of equal length have in common.
    times_ms: list[float | None] = []
    before = (0, 0)
    for place, (unit, length) in enumerate(zip(units, longest.tolist(), strict=True)):
        num, num_tokens = len(unit), len(unit) * length
        if (num, length) != before:
            before, times_ms = (num, length), [None] * len(classes)
        best_ms = math.inf
        for index, (factor, class_longest, works_ms, heap) in enumerate(classes):
            if length <= class_longest:
                time_ms = times_ms[index]
                if time_ms is None:
                    of_views_ms = [
                        load.estimated_time_ms(work_ms, num_tokens, num)
                        for load, work_ms in zip(heap[0][2], works_ms[place], strict=True)
                    ]
                    time_ms = factor * max(of_views_ms)
                    if len(of_views_ms) > 1:
                        time_ms += _TIE_BREAK * of_views_ms[0]
                    times_ms[index] = time_ms
                if time_ms < best_ms:
                    best_ms, best = time_ms, index
        if best_ms == math.inf:
            raise ValueError(f"sequence {unit[0]} of {length} tokens fits no replica")
        _, _, works_ms, heap = classes[best]
        _, replica, loads = heap[0]
        for load, work_ms in zip(loads, works_ms[place], strict=True):
            load.add(work_ms, num_tokens, num)
        heapq.heapreplace(heap, (best_ms, replica, loads))
        times_ms[best] = None
        shares[replica] += unit
    return shares


def _works_of_views_ms(cost: SchemeCost, lengths: NDArray[np.int64]) -> list[tuple[float, ...]]:
    """Work of sequences of these lengths in each view of a cost."""
    some = lengths.astype(np.float64)
    works_ms = (view.coefficients.sequence_time_ms(some).tolist() for view in cost.views)
    return list(zip(*works_ms, strict=True))


def slowness_of(
    costs: Sequence[SchemeCost],
    shares: Sequence[Sequence[int]],
    lengths: Sequence[int],
    times_ms: Mapping[int, float],
) -> dict[SchemeCost, float]:
    """Returns by cost how much longer packed replicas take than `dispatch` estimated.

    costs, shares: shape (num_replicas,), each share by falling length; times_ms: by replica.
    """
    taken_ms: dict[SchemeCost, float] = {}
    estimated_ms: dict[SchemeCost, float] = {}
    for replica, time_ms in times_ms.items():
        cost, share = costs[replica], shares[replica]
        if share:
            num_tokens = sum(lengths[sequence] for sequence in share)
            estimates_ms = []
            for view in cost.views:
                works_ms = [view.sequence_time_ms(lengths[sequence]) for sequence in share]
                load = _Load(view, math.fsum(works_ms), num_tokens, len(share), works_ms[0])
                estimates_ms.append(load.estimated_time_ms(0.0, 0, 0))
            taken_ms[cost] = taken_ms.get(cost, 0.0) + time_ms
            estimated_ms[cost] = estimated_ms.get(cost, 0.0) + max(estimates_ms)
    return {cost: taken_ms[cost] / estimated_ms[cost] for cost in taken_ms}


def _units(sequences: Sequence[int], num_replicas: int) -> list[Sequence[int]]:
    """Sequences that are assigned together: one each, or several of the short ones of very many."""
    num_units = max(_FEWEST_SINGLE, _SINGLE_PER_REPLICA * num_replicas)
    num_single = min(len(sequences), num_units)
    size = -(-(len(sequences) - num_single) // num_units) or 1
    starts = [*range(num_single), *range(num_single, len(sequences), size)]
    return [sequences[first:end] for first, end in pairwise([*starts, len(sequences)])]


@dataclass(slots=True)
class _Load:
    """Work that a replica has been assigned so far, in one view of its cost."""

    cost: SchemeCost
    work_ms: float = 0.0
    num_tokens: int = 0
    num_sequences: int = 0
    longest_ms: float = 0.0
    """Work of the longest sequence."""

    def add(self, longest_ms: float, num_tokens: int, num: int) -> None:
        """Add sequences, none above any before; longest_ms: work of the longest of them."""
        self.work_ms += num * longest_ms
        self.num_tokens += num_tokens
        self.num_sequences += num
        self.longest_ms = max(self.longest_ms, longest_ms)

    def estimated_time_ms(self, longest_ms: float, num_tokens: int, num: int) -> float:
        """``W + v·c + (pp-1)·(t + c)`` for a good v, with so many more sequences; t is the largest
        micro-batch's work if the others are equal. Arguments as in add."""
        cost = self.cost
        work_ms = self.work_ms + num * longest_ms
        num_fewest = -(-(self.num_tokens + num_tokens) // cost.max_tokens)
        c_ms = cost.coefficients.c_ms
        if cost.num_stages == 1:
            return work_ms + num_fewest * c_ms
        num_useful = min(self.num_sequences + num, useful_num_micro_batches(work_ms, cost))
        num_micro_batches = max(num_fewest, math.floor(num_useful), 1)
        largest_ms = max(self.longest_ms, longest_ms, work_ms / num_micro_batches)
        fill_ms = (cost.num_stages - 1) * (largest_ms + c_ms)
        return work_ms + num_micro_batches * c_ms + fill_ms


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
    # Of these sequences only: each of many replicas gets a small part of the batch.
    own_lengths = [lengths[sequence] for sequence in sequences]
    tokens = cost.tokens(own_lengths)
    places = range(len(sequences))
    densest = best_fit(places, tokens, cost.max_tokens)
    best = _finish(densest, sequences, lengths, cost)
    if cost.only_number_counts:
        return best
    some = np.array(own_lengths, dtype=np.float64)
    forms_ms = np.array([form.sequence_time_ms(some) for form in cost.coefficients.forms])
    if cost.num_stages == 1:
        mixed = mix(places, forms_ms, tokens, cost.max_tokens, len(densest))
        if mixed is not None:
            best = min(best, _finish(mixed, sequences, lengths, cost), key=lambda one: one.time_ms)
        return best
    num_fruitless = 0
    works_ms = max(forms_ms.tolist(), key=math.fsum)
    for num in _candidates(len(densest), len(sequences), math.fsum(works_ms), cost):
        rooms = [cost.max_tokens] * num
        dealt = deal(places, works_ms, tokens, [[] for _ in range(num)], [0.0] * num, rooms)
        if dealt is None:
            continue
        candidate = _finish(dealt, sequences, lengths, cost)
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


def deal(
    sequences: Sequence[int],
    works_ms: Sequence[float] | Mapping[int, float],
    tokens: Sequence[int],
    first: list[list[int]],
    loads_ms: Sequence[float],
    rooms: list[int],
) -> list[list[int]] | None:
    """Each sequence to the micro-batch with the least load that has room; None if none has.

    sequences: by falling length; works_ms, tokens: of each sequence of the batch, or works of these
    only; first, loads_ms, rooms: what the micro-batches hold already, their loads and the tokens
    that still fit. first and rooms are changed. Returns the micro-batches that are not empty.
    """
    # (load in ms, index of the micro-batch), a heap.
    loads = sorted((load_ms, index) for index, load_ms in enumerate(loads_ms))
    # Those without room for now, (-room, load, index): they wait for shorter sequences.
    full: list[tuple[int, float, int]] = []
    for sequence in sequences:
        num_tokens = tokens[sequence]
        while full and -full[0][0] >= num_tokens:
            heapq.heappush(loads, heapq.heappop(full)[1:])
        while loads and rooms[loads[0][1]] < num_tokens:
            load_ms, index = heapq.heappop(loads)
            heapq.heappush(full, (-rooms[index], load_ms, index))
        if not loads:
            return None
        load_ms, index = loads[0]
        heapq.heapreplace(loads, (load_ms + works_ms[sequence], index))
        first[index].append(sequence)
        rooms[index] -= num_tokens
    return [share for share in first if share]


def mix(
    sequences: Sequence[int],
    works_ms: NDArray[np.float64],
    tokens: Sequence[int],
    max_tokens: int,
    num: int,
) -> list[list[int]] | None:
    """At most num micro-batches of one stage that are bound by the same form, as far as possible;
    None if the forms agree or there is no room.

    Of two forms a micro-batch takes the second one's time and what the first one's exceeds it by,
    if it does. So the sequences with an excess go, longest first, to where it is least, and those
    that reduce it to where it is largest. The two forms are that with the most work for all
    sequences and that which exceeds it most for some.

    sequences: by falling length; works_ms, tokens: of each sequence of the batch, works by form.
    """
    own_ms = works_ms[:, np.array(sequences)]
    lead = own_ms.sum(axis=1).argmax()
    rival = np.maximum(0.0, own_ms - own_ms[lead]).sum(axis=1).argmax()
    if rival == lead:
        return None
    sign = 1.0 if own_ms[lead, 0] >= own_ms[rival, 0] else -1.0
    excess_ms = dict(zip(sequences, (sign * (own_ms[lead] - own_ms[rival])).tolist(), strict=True))
    first: list[list[int]] = [[] for _ in range(num)]
    rooms = [max_tokens] * num
    exceeding = [s for s in sequences if excess_ms[s] >= 0.0]
    if deal(exceeding, excess_ms, tokens, first, [0.0] * num, rooms) is None:
        return None
    loads_ms = [-math.fsum(map(excess_ms.__getitem__, share)) for share in first]
    reducing = {s: -each_ms for s, each_ms in excess_ms.items() if each_ms < 0.0}
    return deal(list(reducing), reducing, tokens, first, loads_ms, rooms)


def _finish(
    packed: list[list[int]], sequences: Sequence[int], lengths: Sequence[int], cost: SchemeCost
) -> Packing:
    """Order the micro-batches, of indices into sequences, by falling work; take the exact time."""
    timed = []
    for places in packed:
        share = sorted(sequences[place] for place in places)
        time_ms = cost.time_ms([lengths[sequence] for sequence in share])
        timed.append((-time_ms, tuple(share)))
    timed.sort()
    return Packing(
        tuple(share for _, share in timed),
        cost.replica_time_ms([-negated_ms for negated_ms, _ in timed]),
    )
