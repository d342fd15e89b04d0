"""Packing into waves: micro-batches whose columns are divided into groups separately for each.

One wave is filled for a given time, the longest sequences first, each on as few columns as
possible. Sequences of equal length are interchangeable, so lengths are counted. A length goes to
the open group whose room it fills best, otherwise to a new group of the least size that runs it
within the time. Where costs have several forms, a sequence fits if it does in each, and the room of
a group is that of its slowest form.

A replica's sequences are divided into waves by beam search: one wave after the other from the
longest sequence on, filled for several times and then made as short as its own sequences allow; the
beginnings with the least estimates are continued. For a pipeline the order is searched as well, and
exact 1F1B decides.
"""

from __future__ import annotations

import itertools
import math
import operator
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from megatron.hydraulis.planner.costs import Pipeline, SchemeCost, WaveCosts
from megatron.hydraulis.planner.greedy import best_fit
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.plan import Packing
from megatron.hydraulis.planner.replica_plan import ContextGroup
from megatron.hydraulis.planner.solver import Solver
from megatron.hydraulis.planner.wave_bounds import wave_bound_ms

# Budget for packing one share without a solver.
_GREEDY_EFFORT = 2e7
# Bisections between a wave's bound and its time, down to this share.
_NUM_HALVINGS = 5
_TIGHT = 1e-3
# Times up to this multiple of the bound are tried to fit sequences into one wave.
_MOST_OVER_BOUND = 2.5
# Times of waves are tried up to this multiple of what the columns need for all sequences.
_MOST_OVER_MEAN = 1.1
# About how much longer columns are busy than they need to be.
_BUSY_OVER_LEAST = 1.05
_LEAST_IMPROVEMENT = 1e-7
# Cost of filling one wave, in the unit of Effort: per length of the table and group considered.
_FILL_EFFORT = 15.0
# Maximum number of waves for which all swaps of two in a pipeline's order are tried.
_MAX_SWAPPED = 24
# Times are sums of floats: a group that is full to the last digit is full.
_ROUNDING = 1e-12


@dataclass(slots=True)
class OpenGroup:
    """A group of a wave."""

    size_index: int
    """Its size is 2**size_index columns."""
    times_ms: list[float]
    """In each form of the size's costs."""
    time_ms: float
    """The largest of them."""
    slowest: int
    """Place of that form in LengthTable.works_ms."""
    num_tokens: int = 0
    """Padded."""
    counts: dict[int, int] = field(default_factory=dict)
    """Number of sequences by index of their length in the table."""


@dataclass(slots=True)
class Wave:
    """Groups that cover all columns, and the time of the slowest."""

    groups: list[OpenGroup]
    time_ms: float

    @property
    def counts(self) -> Mapping[int, int]:
        """Number of sequences of all groups, by index of their length in the table."""
        found: dict[int, int] = {}
        for group in self.groups:
            for place, num in group.counts.items():
                found[place] = found.get(place, 0) + num
        return found


class Totals(NamedTuple):
    """Sums over sequences. They are whole numbers, so that subtracting a wave is exact."""

    num_tokens: int
    key: int
    """A sum of random numbers, one for each length: other sequences have another one, except with
    a probability of about 2^-64."""
    column_units: tuple[int, ...]
    """The least column time that the sequences take in each form, in the unit of the table."""

    def without(self, other: Totals) -> Totals:
        """The sums over what is left."""
        units = map(operator.sub, self.column_units, other.column_units)
        return Totals(self.num_tokens - other.num_tokens, self.key - other.key, tuple(units))


class Counts(NamedTuple):
    """Sequences by length. Lengths that do not occur are left out: with very many of them each
    wave would take time for all."""

    places: list[int]
    """Indices of the lengths in a LengthTable, rising."""
    nums: list[int]
    """Number of sequences of each, at least 1."""
    totals: Totals

    def without(self, other: Counts) -> Counts:
        """Returns these sequences without the other ones."""
        nums = self.nums.copy()
        for place, num in zip(other.places, other.nums, strict=True):
            nums[bisect_left(self.places, place)] -= num
        places = itertools.compress(self.places, nums)
        return Counts(list(places), list(filter(None, nums)), self.totals.without(other.totals))


class LengthTable:
    """The different lengths of a batch, falling, with work and tokens on groups of every size."""

    def __init__(self, costs: WaveCosts, lengths: Sequence[int]) -> None:
        self.costs = costs
        self.lengths = sorted(set(lengths), reverse=True)
        self.place = {length: place for place, length in enumerate(self.lengths)}
        array = np.array(self.lengths, dtype=np.float64)
        whole = np.array(self.lengths, dtype=np.int64)
        groups = costs.groups
        self.num_sizes = len(groups)
        self.rooms = [g.room_tokens for g in groups]
        # Shape (num_sizes, num_lengths), transposed below.
        tokens = np.array([-(-whole // g.multiple) * g.multiple for g in groups])
        # Shape (num_forms, num_sizes, num_lengths).
        works_ms = np.array([[form.sequence_time_ms(array) for form in of] for of in costs.forms])
        works_ms[:, tokens > np.array(self.rooms)[:, None]] = np.inf
        # Shape (num_forms, num_sizes).
        constants_ms = np.array([[form.c_ms for form in of_sizes] for of_sizes in costs.forms])
        alone_ms = (works_ms + constants_ms[:, :, None]).max(axis=0)
        # Of each length, the least column time that a sequence takes; 0 if no size holds it.
        column_ms = (works_ms * np.exp2(np.arange(self.num_sizes))[:, None]).min(axis=1)
        column_ms[np.isinf(column_ms)] = 0.0
        works_ms = works_ms.reshape(-1, array.size)
        self.works_ms: list[list[float]] = works_ms.T.tolist()
        """By length, on every size in the first form, then in the second, and so on."""
        self.tokens: list[list[int]] = tokens.T.tolist()
        self.idle_ms = [group.time_ms(()) for group in groups]
        """Time of a group of each size without sequences, in a row that is rounded up."""
        self.most_tokens = costs.most_tokens
        self.usable = [i for i, group in enumerate(groups) if group in costs.usable]
        """Indices of the sizes that can hold a sequence, rising."""
        self.least_constants_ms: list[float] = constants_ms[:, self.usable].min(axis=1).tolist()
        """By form."""
        self.least_constant_ms = float(constants_ms.max(axis=0)[self.usable].min())
        self.least_size = [
            next((i for i, room in enumerate(self.rooms) if of_length[i] <= room), self.num_sizes)
            for of_length in self.tokens
        ]
        """Index of the least size that holds each length; num_sizes if none does."""
        self.alone_ms: list[list[float]] = alone_ms.T.tolist()
        """Time of a group of each size with each length."""
        self.least_ms: list[float] = alone_ms.min(axis=0).tolist()
        """Least time of a wave with each length."""
        ratios = [[each.as_integer_ratio() for each in of_form] for of_form in column_ms.tolist()]
        self.units_per_ms: int = max(each for of_form in ratios for _, each in of_form)
        column_units = (
            [num * (self.units_per_ms // each) for num, each in of_form] for of_form in ratios
        )
        generator = random.Random(0)
        keys = [generator.getrandbits(64) for _ in self.lengths]
        self._totals = (self.lengths, keys, *column_units)
        # Negative ones rise, for bisection.
        negative_works_ms: list[list[float]] = (-works_ms).tolist()
        self.forms: list[list[tuple[int, int, list[float]]]] = []
        """By size, of each of its forms: its number, its place in works_ms, and negative works."""
        self._empty: list[tuple[list[float], float, int]] = []
        for size, group in enumerate(groups):
            num_forms = len(group.coefficients.forms)
            places = range(size, num_forms * self.num_sizes, self.num_sizes)
            self.forms.append([(k, i, negative_works_ms[i]) for k, i in enumerate(places)])
            slowest = places[constants_ms[:, size].argmax()]
            times_ms = constants_ms[:num_forms, size].tolist()
            self._empty.append((times_ms, max(times_ms), slowest))
        self.negative_tokens: list[list[int]] = (-tokens).tolist()
        self.negative_alone_ms: list[list[float]] = (-alone_ms).tolist()

    def opened(self, size_index: int) -> OpenGroup:
        """A group without sequences."""
        times_ms, time_ms, slowest = self._empty[size_index]
        return OpenGroup(size_index, times_ms.copy(), time_ms, slowest)

    def counts(self, lengths: Sequence[int]) -> Counts:
        """Number of sequences of each length."""
        return self._counted(Counter(map(self.place.__getitem__, lengths)))

    def held(self, wave: Wave) -> Counts:
        """Sequences that a wave holds."""
        return self._counted(wave.counts)

    def _counted(self, num_by_place: Mapping[int, int]) -> Counts:
        places = sorted(num_by_place)
        nums = [num_by_place[place] for place in places]
        num_tokens, key, *column_units = (
            sum(map(operator.mul, nums, map(each.__getitem__, places))) for each in self._totals
        )
        return Counts(places, nums, Totals(num_tokens, key, tuple(column_units)))


def fill_wave(
    table: LengthTable, counts: Counts, time_ms: float, *, takes_all: bool = False
) -> Wave | None:
    """A wave of at most time_ms with some of the counted sequences.

    None if no sequence fits; with takes_all, as soon as one does not fit.
    """
    most_ms = time_ms * (1.0 + _ROUNDING)
    rooms, forms = table.rooms, table.forms
    groups: list[OpenGroup] = []
    # The first place of the table that each group has room for: it has for all after it.
    firsts: list[int] = []
    # Likewise for a new group of each size, and for one that free columns of each bit length allow.
    firsts_of_new = [bisect_left(of_size, -most_ms) for of_size in table.negative_alone_ms]
    firsts_on_free = list(itertools.accumulate([len(table.lengths), *firsts_of_new], min))
    free = table.costs.width
    first = firsts_on_free[free.bit_length()]
    places, nums = counts.places, counts.nums
    index, end = 0, len(places)
    while index < end:
        place, num = places[index], nums[index]
        if place < first:
            # Nothing has room for it.
            if takes_all:
                return None
            index = bisect_left(places, first, index)
            continue
        works, tokens = table.works_ms[place], table.tokens[place]
        # The least size that runs it within the time.
        size_of_new = table.least_size[place]
        while size_of_new < table.num_sizes and firsts_of_new[size_of_new] > place:
            size_of_new += 1
        while num:
            best = -1
            best_room_ms = most_ms
            for member, group in enumerate(groups):
                if firsts[member] <= place:
                    room_ms = most_ms - group.time_ms - works[group.slowest]
                    if room_ms < best_room_ms:
                        best, best_room_ms = member, room_ms
            if best < 0:
                if size_of_new >= table.num_sizes or free < 1 << size_of_new:
                    break
                free -= 1 << size_of_new
                best = len(groups)
                groups.append(table.opened(size_of_new))
                firsts.append(place)
            group = groups[best]
            size, times_ms = group.size_index, group.times_ms
            fitting = 1
            if num > 1:
                fitting = min(num, (rooms[size] - group.num_tokens) // tokens[size])
                for k, form, _ in forms[size]:
                    if works[form] > 0.0:
                        fitting = max(1, min(fitting, int((most_ms - times_ms[k]) / works[form])))
            num -= fitting
            group.num_tokens += fitting * tokens[size]
            group.counts[place] = group.counts.get(place, 0) + fitting
            first_of_group = bisect_left(
                table.negative_tokens[size], group.num_tokens - rooms[size]
            )
            for k, form, negative_works_ms in forms[size]:
                times_ms[k] = time_ms = times_ms[k] + fitting * works[form]
                if time_ms > group.time_ms:
                    group.time_ms, group.slowest = time_ms, form
                # Comparisons instead of max(): most of the search is spent here.
                first_of_form = bisect_left(negative_works_ms, time_ms - most_ms)
                if first_of_form > first_of_group:
                    first_of_group = first_of_form
            firsts[best] = first_of_group
        if num and takes_all:
            return None
        if num or not free:
            first = min(firsts_on_free[free.bit_length()], *firsts)
        index += 1
    if not groups:
        return None
    busy_ms = max(group.time_ms for group in groups)
    while free:
        # Columns without sequences run a row of padding: in wide groups if that does not take
        # longer than the others.
        able = [index for index in table.usable if free >= 1 << index]
        quick = [index for index in able if table.idle_ms[index] <= busy_ms]
        index = quick[-1] if quick else min(able, key=table.idle_ms.__getitem__)
        free -= 1 << index
        groups.append(table.opened(index))
    return Wave(groups, max(group.time_ms for group in groups))


class Beam(NamedTuple):
    """Width of the search for waves."""

    num_beginnings: int
    """Number of beginnings that are continued."""
    growth: float
    """Ratio of the times that are tried."""


_QUICK = Beam(2, 1.3)
_GREEDY = Beam(4, 1.2)
_THOROUGH = Beam(16, 1.06)
_SPENT_GROWTH = 2.0
"""Ratio of the times that are tried once the effort is spent."""


class _Beginning(NamedTuple):
    """The first waves of a packing."""

    left: Counts
    """The sequences that are in none of them."""
    taken_ms: float
    """Sum of their times."""
    waves: tuple[Wave, ...]


class _Continuation(NamedTuple):
    """A beginning with one more wave."""

    beginning: _Beginning
    wave: Wave
    held: Counts
    """Sequences that the wave holds."""
    left: Totals

    @property
    def taken_ms(self) -> float:
        """Sum of the times of all waves."""
        return self.beginning.taken_ms + self.wave.time_ms


class WaveSearch:
    """Searches waves for shares of one batch."""

    def __init__(self, table: LengthTable) -> None:
        self.table = table
        self._pipeline = table.costs.pipeline
        self._width = table.costs.width
        self._host_ms = table.costs.host_ms

    def best(
        self, counts: Counts, effort: Effort, beams: Sequence[Beam], *, target_ms: float = 0.0
    ) -> list[Wave]:
        """The best of waves of one group and those that beams find, one after the other until
        target_ms is reached or the effort is spent.

        counts: of a share that has sequences.
        """
        best = self._undivided(counts)
        for beam in beams:
            found = self._with_beam(beam, counts, effort)
            if not best or self.time_ms(found) < self.time_ms(best):
                best = found
            if effort.is_spent or self.time_ms(best) <= target_ms:
                break
        return best

    def _undivided(self, counts: Counts) -> list[Wave]:
        """Waves of a single group each, by best fit; none if a sequence does not fit."""
        table, index = self.table, self.table.num_sizes - 1
        coefficients = table.costs.groups[-1].coefficients
        places = [
            place for place, num in zip(counts.places, counts.nums, strict=True) for _ in range(num)
        ]
        if any(table.tokens[place][index] > table.rooms[index] for place in places):
            return []
        tokens = [of_length[index] for of_length in table.tokens]
        waves = []
        for members in best_fit(places, tokens, table.rooms[index]):
            group = table.opened(index)
            group.counts = Counter(members)
            waves.append(Wave([group], coefficients.time_ms(table.lengths[i] for i in members)))
        return waves

    def _with_beam(self, beam: Beam, counts: Counts, effort: Effort) -> list[Wave]:
        """The best waves found with one beam."""
        beginnings = [_Beginning(counts, 0.0, ())]
        found: list[list[Wave]] = []
        least_ms = math.inf
        while beginnings:
            continued: dict[int, _Continuation] = {}
            for beginning in beginnings:
                growth = _SPENT_GROWTH if effort.is_spent else beam.growth
                for time_ms in self._times_ms(beginning.left, growth):
                    wave = self._filled(beginning.left, time_ms, effort)
                    if wave is None:
                        continue
                    held = self.table.held(wave)
                    left = beginning.left.totals.without(held.totals)
                    found_now = _Continuation(beginning, wave, held, left)
                    known = continued.get(left.key)
                    if known is None or found_now.taken_ms < known.taken_ms:
                        continued[left.key] = found_now
            best = sorted(continued.values(), key=self._estimate_ms)
            beginnings = []
            for continuation in best[: 1 if effort.is_spent else beam.num_beginnings]:
                shorter = self._with_shortest(continuation, effort)
                if shorter.left.places:
                    beginnings.append(shorter)
                else:
                    found.append(list(shorter.waves))
                    least_ms = min(least_ms, self.time_ms(shorter.waves))
            # The time of all waves is at least the sum of some.
            beginnings = [each for each in beginnings if each.taken_ms < least_ms]
        return min(found, key=self.time_ms)

    def _times_ms(self, counts: Counts, growth: float) -> list[float]:
        """Times of the next wave to try, rising.

        They are those of its longest sequence on every size, as on fewer columns it may leave room
        for others that run as long, and even ones up to the mean of all columns.
        """
        table = self.table
        longest = counts.places[0]
        times_ms = {*table.alone_ms[longest]} - {math.inf}
        most_ms = self._mean_ms(counts.totals, 1, _MOST_OVER_MEAN)
        time_ms = max(table.least_ms[longest], table.least_constant_ms)
        while time_ms < most_ms * growth:
            times_ms.add(time_ms)
            time_ms *= growth
        return sorted(times_ms)

    def _estimate_ms(self, continuation: _Continuation) -> float:
        """Time of all waves: those that are known, about what the rest takes, and in a pipeline the
        longest once more for each further stage, as it fills and drains; or the host's."""
        left = continuation.left
        num_left = -(-left.num_tokens // self.table.most_tokens)
        left_ms = self._mean_ms(left, num_left, _BUSY_OVER_LEAST)
        known = (*continuation.beginning.waves, continuation.wave)
        filling_ms = max(wave.time_ms for wave in known) * (self._pipeline.num_stages - 1)
        host_ms = (len(known) + num_left) * self._host_ms
        return max(continuation.taken_ms + left_ms + filling_ms, host_ms)

    def _with_shortest(self, continuation: _Continuation, effort: Effort) -> _Beginning:
        """The waves with the last one as short as its sequences allow."""
        beginning, last, held, _ = continuation
        shortest = self.shortest(held, effort, within=last)
        assert shortest is not None  # there is one to start from
        taken_ms = continuation.taken_ms - last.time_ms + shortest.time_ms
        return _Beginning(beginning.left.without(held), taken_ms, (*beginning.waves, shortest))

    def time_ms(self, waves: Sequence[Wave]) -> float:
        """Time of the replica, in the best of the simple orders."""
        times_ms = [wave.time_ms for wave in waves]
        host_ms = len(waves) * self._host_ms
        if self._pipeline.num_stages == 1:
            return max(math.fsum(times_ms), host_ms)
        in_orders_ms = (
            self._pipeline.time_ms([times_ms[i] for i in order])
            for order in _simple_orders(times_ms)
        )
        return max(min(in_orders_ms), host_ms)

    def shortest(self, counts: Counts, effort: Effort, within: Wave | None = None) -> Wave | None:
        """One wave of exactly these sequences, as short as bisection finds; None if it finds none.

        within: such a wave to start from.
        """
        low_ms = self._least_ms(counts)
        best = within
        time_ms = low_ms * (1.0 + 10 * _TIGHT)
        while best is None:
            best = self._filled(counts, time_ms, effort, takes_all=True)
            if best is None and time_ms > low_ms * _MOST_OVER_BOUND:
                return None
            time_ms *= 1.1
        for _ in range(_NUM_HALVINGS):
            if best.time_ms <= low_ms * (1.0 + _TIGHT):
                break
            middle_ms = (low_ms + best.time_ms) / 2.0
            found = self._filled(counts, middle_ms, effort, takes_all=True)
            if found is not None and found.time_ms < best.time_ms:
                best = found
            else:
                low_ms = middle_ms
        return best

    def _mean_ms(self, totals: Totals, num_waves: int, factor: float = 1.0) -> float:
        """Time of so many waves of these sequences if all columns are busy, in the slowest form.

        factor: of the column time that the sequences take at least.
        """
        units_per_ms = self.table.units_per_ms
        of_forms = zip(totals.column_units, self.table.least_constants_ms, strict=True)
        return max(
            factor * (units / units_per_ms) / self._width + num_waves * constant_ms
            for units, constant_ms in of_forms
        )

    def _least_ms(self, counts: Counts) -> float:
        """Lower limit for one wave of sequences, of which there are some."""
        return max(self.table.least_ms[counts.places[0]], self._mean_ms(counts.totals, 1))

    def _filled(
        self, counts: Counts, time_ms: float, effort: Effort, *, takes_all: bool = False
    ) -> Wave | None:
        wave = fill_wave(self.table, counts, time_ms, takes_all=takes_all)
        num_groups = 1 if wave is None else len(wave.groups)
        effort.spend(_FILL_EFFORT * len(self.table.lengths) * (1 + num_groups / 4))
        return wave


def wave_order(times_ms: Sequence[float], pipeline: Pipeline) -> list[int]:
    """A good order of waves for 1F1B: one of the simple ones, improved by swaps."""
    orders = list(_simple_orders(times_ms))
    if pipeline.num_stages == 1 or len(times_ms) < 2:
        return orders[0]

    def in_order_ms(order: Sequence[int]) -> float:
        return pipeline.time_ms([times_ms[i] for i in order])

    best = min(orders, key=in_order_ms)
    best_ms = in_order_ms(best)
    is_better = len(times_ms) <= _MAX_SWAPPED
    while is_better:
        is_better = False
        for first, second in itertools.combinations(range(len(best)), 2):
            swapped = list(best)
            swapped[first], swapped[second] = best[second], best[first]
            swapped_ms = in_order_ms(swapped)
            if swapped_ms < best_ms * (1.0 - _LEAST_IMPROVEMENT):
                best, best_ms, is_better = swapped, swapped_ms, True
    return best


def _simple_orders(times_ms: Sequence[float]) -> Iterator[list[int]]:
    """Falling, rising, and the shortest at both ends, where pipelines fill and drain."""
    falling = sorted(range(len(times_ms)), key=lambda i: (-times_ms[i], i))
    yield falling
    yield falling[::-1]
    yield falling[1::2][::-1] + falling[::2]


class WavePacker(ReplicaPacker):
    """Packs shares of one batch into waves, for replicas of one cost."""

    def __init__(self, cost: SchemeCost, lengths: Sequence[int], solver: Solver) -> None:
        """lengths: shape (num_sequences,), the whole batch; ValueError for a cost without waves."""
        super().__init__(cost, lengths, solver)
        if cost.waves is None:
            raise ValueError("waves need a scheme that splits its cp ranks")
        self._waves = cost.waves
        self._table = LengthTable(cost.waves, lengths)
        self._search = WaveSearch(self._table)

    def pack(self, sequences: Sequence[int], effort: Effort, *, target_ms: float = 0.0) -> Packing:
        """The best of several packings; an infinite time if a sequence does not fit."""
        return self._packed(sequences, effort, [_QUICK])

    def pack_thoroughly(self, sequences: Sequence[int], num_steps: int, effort: Effort) -> Packing:
        """The best of several packings of wider searches."""
        return self._packed(sequences, effort, [_QUICK, _GREEDY, _THOROUGH])

    def exchanged(self, packed: Packing, gone: int | None, come: int | None) -> Packing:
        """Empty: a new packing is as quick."""
        return Packing((), 0.0)

    def improve(
        self, packed: Packing, num_steps: int, effort: Effort, *, target_ms: float = 0.0
    ) -> Packing:
        """Returns the packing: there is nothing to improve."""
        return packed

    def packed(self, micro_batches: Sequence[Sequence[int]]) -> Packing:
        """One wave per micro-batch, in this order; an infinite time if one does not fit."""
        effort = Effort(math.inf)
        waves = []
        for share in micro_batches:
            counts = self._counts(share)
            wave = None if counts is None else self._search.shortest(counts, effort)
            if wave is None:
                return Packing(tuple(map(tuple, micro_batches)), math.inf)
            waves += _members(self._table, [wave], share, self.lengths)
        return _finished(self._waves, waves, self.lengths, keeps_order=True)

    def bound_ms(self, sequences: Sequence[int], found_ms: float, *, is_thorough: bool) -> float:
        """Lower bound on the time of these sequences; the arguments are those of wave_bound_ms."""
        lengths = [self.lengths[sequence] for sequence in sequences]
        return wave_bound_ms(self._waves, lengths, found_ms, self._solver, is_thorough=is_thorough)

    def _packed(self, sequences: Sequence[int], effort: Effort, beams: Sequence[Beam]) -> Packing:
        if not sequences:
            return Packing((), 0.0)
        counts = self._counts(sequences)
        if counts is None:
            return Packing((tuple(sequences),), math.inf)
        waves = self._search.best(counts, effort, beams)
        members = _members(self._table, waves, sequences, self.lengths)
        return _finished(self._waves, members, self.lengths, keeps_order=False)

    def _counts(self, sequences: Sequence[int]) -> Counts | None:
        """The sequences by length; None if one fits no group."""
        lengths = [self.lengths[sequence] for sequence in sequences]
        if max(lengths) > self._waves.longest:
            return None
        return self._table.counts(lengths)


def packer_for(cost: SchemeCost, lengths: Sequence[int], solver: Solver) -> ReplicaPacker:
    """The packer of a scheme."""
    return (ReplicaPacker if cost.waves is None else WavePacker)(cost, lengths, solver)


def pack_waves(
    sequences: Sequence[int],
    lengths: Sequence[int],
    cost: SchemeCost,
    *,
    is_thorough: bool = True,
    target_ms: float = 0.0,
) -> Packing:
    """Pack the sequences of one replica into waves without a solver.

    sequences: indices into lengths, each of which some group holds; is_thorough: search more widely
    unless target_ms is reached.
    """
    if not sequences or cost.waves is None:
        return Packing((), 0.0)
    table = LengthTable(cost.waves, [lengths[sequence] for sequence in sequences])
    counts = table.counts([lengths[sequence] for sequence in sequences])
    beams = [_QUICK, _GREEDY] if is_thorough else [_QUICK]
    waves = WaveSearch(table).best(counts, Effort(_GREEDY_EFFORT), beams, target_ms=target_ms)
    members = _members(table, waves, sequences, lengths)
    return _finished(cost.waves, members, lengths, keeps_order=False)


def _members(
    table: LengthTable, waves: Sequence[Wave], sequences: Sequence[int], lengths: Sequence[int]
) -> list[list[tuple[int, list[int]]]]:
    """Size and real sequences of each group of each wave, the widest first.

    Of equal lengths, lower indices are assigned first.
    """
    by_place: dict[int, list[int]] = {}
    for sequence in sorted(sequences, reverse=True):
        by_place.setdefault(table.place[lengths[sequence]], []).append(sequence)
    found = []
    for wave in waves:
        groups = []
        for group in wave.groups:
            share = [
                by_place[place].pop() for place, num in group.counts.items() for _ in range(num)
            ]
            groups.append((1 << group.size_index, sorted(share)))
        groups.sort(key=lambda member: (-member[0], not member[1], member[1]))
        found.append(groups)
    return found


def _finished(
    costs: WaveCosts,
    waves: Sequence[Sequence[tuple[int, list[int]]]],
    lengths: Sequence[int],
    *,
    keeps_order: bool,
) -> Packing:
    """Waves of adjacent groups with these members, and their exact time."""
    micro_batches: list[tuple[int, ...]] = []
    all_groups: list[tuple[ContextGroup, ...]] = []
    times_ms: list[float] = []
    for members in waves:
        ends = itertools.accumulate(size for size, _ in members)
        groups = tuple(
            ContextGroup(end - size, size, len(share))
            for end, (size, share) in zip(ends, members, strict=True)
        )
        micro_batches.append(tuple(s for _, share in members for s in share))
        all_groups.append(() if len(groups) == 1 else groups)
        times_ms.append(
            costs.wave_time_ms((size, [lengths[s] for s in share]) for size, share in members)
        )
    order = list(range(len(times_ms)))
    if not keeps_order:
        order = wave_order(times_ms, costs.pipeline)
    return Packing(
        micro_batches=tuple(micro_batches[i] for i in order),
        time_ms=costs.replica_time_ms([times_ms[i] for i in order]),
        groups=tuple(all_groups[i] for i in order),
    )
