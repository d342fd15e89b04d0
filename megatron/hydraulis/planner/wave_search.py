"""Sequences of one replica into waves: how many, how long, and what runs in each.

Waves are cut off one after the other, from the longest sequence on, each filled for a time that is
about the same for all (wave_fill.py) and then made as short as its own sequences allow. Of several
such times the best are taken, and pairs of their waves are divided anew. For a pipeline the order
is searched as well, and exact 1F1B decides.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.packing import best_fit
from megatron.hydraulis.planner.polish import Effort
from megatron.hydraulis.planner.wave_fill import Counts, LengthTable, OpenGroup, Wave, fill

__all__ = ["WaveSearch", "wave_order"]

# Times of waves tried: of so many waves at least, each as much longer than the one before.
_GROWTH = 1.22
_NUM_MORE_WAVES = 10
# Around the best of them.
_NEAR = (0.94, 0.97, 1.03, 1.06)
_MOST_FACTOR = 1.6
# A start whose time is above this multiple of the best one's is given up.
_STILL_WORTH = 1.15
# Starts, of different numbers of waves, whose pairs are divided anew.
_NUM_DIVIDED = 3
# Halvings of the stretch between a wave's bound and its time, and the share that is left alone.
_NUM_HALVINGS = 8
_TIGHT = 1e-3
# Times of the first of two waves that are divided anew, and rounds over all pairs.
_NUM_DIVISIONS = 6
_NUM_ROUNDS = 3
_LEAST_IMPROVEMENT = 1e-7
# Pairs are left alone whose columns idle for less than this share of the time of all waves.
_WORTH_DIVIDING = 5e-4
# Of filling one wave, in the unit of Effort: for each length and for each group that it looks at.
_FILL_EFFORT = 15.0
# Waves up to which all swaps of two in a pipeline's order are tried.
_MAX_SWAPPED = 24


class WaveSearch:
    """Searches waves for shares of one batch."""

    def __init__(self, table: LengthTable) -> None:
        self.table = table
        self._num_stages = table.costs.num_stages
        self._width = table.costs.width

    def first(self, counts: Counts, effort: Effort) -> list[Wave]:
        """The best waves out of several times; counts: of a share that has sequences."""
        return self._starts(counts, effort)[0]

    def thorough(self, counts: Counts, effort: Effort) -> list[Wave]:
        """The best of several starts, pairs of whose waves are divided anew."""
        starts = self._starts(counts, effort)[:_NUM_DIVIDED]
        found = [self.divide_pairs(waves, effort) for waves in starts]
        return min(found, key=self.time_ms)

    def _starts(self, counts: Counts, effort: Effort) -> list[list[Wave]]:
        """Waves of several times, the best ones first, one start for each number of waves."""
        column_ms = self._column_ms(counts)
        tried: list[tuple[float, int, float, list[Wave]]] = []

        def attempt(time_ms: float) -> None:
            if tried and effort.is_spent:
                return
            most_ms = _STILL_WORTH * min((found[0] for found in tried), default=math.inf)
            waves = self._cut_off(counts, time_ms, most_ms, effort)
            if waves is not None:
                tried.append((self.time_ms(waves), len(tried), time_ms, waves))

        for time_ms in self._times_ms(counts, column_ms):
            attempt(time_ms)
        if tried:
            best_time_ms = min(tried)[2]
            for factor in _NEAR:
                attempt(best_time_ms * factor)
        whole = self._undivided(counts)
        if whole:
            tried.append((self.time_ms(whole), len(tried), 0.0, whole))
        by_num: dict[int, list[Wave]] = {}
        for _, _, _, waves in sorted(tried, key=lambda found: found[:2]):
            by_num.setdefault(len(waves), waves)
        return list(by_num.values())

    def time_ms(self, waves: Sequence[Wave]) -> float:
        """Of the replica, in the best order found quickly."""
        times_ms = [wave.time_ms for wave in waves]
        if self._num_stages == 1:
            return math.fsum(times_ms)
        return min(
            pipeline_time_ms([times_ms[i] for i in order], self._num_stages)
            for order in _simple_orders(times_ms)
        )

    def shortest(self, counts: Counts, effort: Effort, within: Wave | None = None) -> Wave | None:
        """One wave of exactly these sequences, as short as bisection finds; None if it finds none.

        within: such a wave, to be made shorter.
        """
        table = self.table
        low_ms = max(
            max(table.least_ms[place] for place, num in enumerate(counts) if num),
            self._column_ms(counts) / self._width + min(table.constants_ms),
        )
        best = within
        time_ms = low_ms * (1.0 + 10 * _TIGHT)
        while best is None:
            best = self._whole(counts, time_ms, effort)
            if best is None and time_ms > low_ms * _MOST_FACTOR**2:
                return None
            time_ms *= 1.1
        for _ in range(_NUM_HALVINGS):
            if best.time_ms <= low_ms * (1.0 + _TIGHT):
                break
            middle_ms = (low_ms + best.time_ms) / 2.0
            found = self._whole(counts, middle_ms, effort)
            if found is not None and found.time_ms < best.time_ms:
                best = found
            else:
                low_ms = middle_ms
        return best

    def divide_pairs(self, waves: Sequence[Wave], effort: Effort) -> list[Wave]:
        """Pools the sequences of two waves and divides them anew, as long as that helps."""
        best = list(waves)
        if len(best) < 2:
            return best
        num_lengths = len(self.table.lengths)
        counts = [wave.counts(num_lengths) for wave in best]
        stuck: set[tuple[int, int]] = set()
        for _ in range(_NUM_ROUNDS):
            idle_ms = [self._idle_ms(wave, of) for wave, of in zip(best, counts, strict=True)]
            pairs = sorted(
                itertools.combinations(range(len(best)), 2),
                key=lambda pair: (-idle_ms[pair[0]] - idle_ms[pair[1]], pair),
            )
            changed: set[int] = set()
            total_ms = math.fsum(wave.time_ms for wave in best)
            for pair in pairs:
                if effort.is_spent:
                    return best
                first, second = pair
                idle = idle_ms[first] + idle_ms[second]
                if pair in stuck or changed.intersection(pair) or idle < _WORTH_DIVIDING * total_ms:
                    continue
                found = self._divided(
                    best[first], best[second], counts[first], counts[second], effort
                )
                better = None
                if found is not None:
                    better = list(best)
                    better[first], better[second] = found
                if better is not None and self.time_ms(better) < self.time_ms(best) * (
                    1.0 - _LEAST_IMPROVEMENT
                ):
                    best = better
                    for place in pair:
                        counts[place] = best[place].counts(num_lengths)
                    changed.update(pair)
                else:
                    stuck.add(pair)
            if not changed:
                break
            stuck = {pair for pair in stuck if not changed.intersection(pair)}
        return best

    def _divided(
        self, one: Wave, other: Wave, of_one: Counts, of_other: Counts, effort: Effort
    ) -> tuple[Wave, Wave] | None:
        """The best of several divisions of the sequences of two waves."""
        pooled = [num + more for num, more in zip(of_one, of_other, strict=True)]
        longest = next(place for place, num in enumerate(pooled) if num)
        low_ms = self.table.least_ms[longest]
        high_ms = max(max(one.time_ms, other.time_ms) * 1.05, low_ms)
        best: tuple[Wave, Wave] | None = None
        best_ms = math.inf
        for step in range(_NUM_DIVISIONS):
            time_ms = low_ms + (high_ms - low_ms) * step / (_NUM_DIVISIONS - 1)
            filled = self._filled(pooled, time_ms, effort)
            if filled is None or not any(filled[1]):
                continue
            rest = self.shortest(filled[1], effort)
            if rest is None:
                continue
            if filled[0].time_ms + rest.time_ms < best_ms:
                best, best_ms = (filled[0], rest), filled[0].time_ms + rest.time_ms
        return best

    def _cut_off(
        self, counts: Counts, time_ms: float, most_ms: float, effort: Effort
    ) -> list[Wave] | None:
        """Waves of about a time; None when they take as long as most_ms or a length fits none."""
        waves: list[Wave] = []
        left = counts
        taken_ms, column_ms = 0.0, self._column_ms(counts)
        longest = 0
        while any(left):
            while not left[longest]:
                longest += 1
            filled = self._filled(left, max(time_ms, self.table.least_ms[longest]), effort)
            if filled is None:
                return None
            wave, rest = filled
            members = [num - more for num, more in zip(left, rest, strict=True)]
            shorter = self.shortest(members, effort, within=wave)
            waves.append(wave if shorter is None else shorter)
            column_ms -= self._column_ms(members)
            taken_ms += waves[-1].time_ms
            if taken_ms + column_ms / self._width >= most_ms:
                return None
            left = rest
        return waves

    def _undivided(self, counts: Counts) -> list[Wave]:
        """Full waves of a single group each, by best fit; none if a sequence does not fit."""
        table, index = self.table, self.table.num_sizes - 1
        places = [place for place, num in enumerate(counts) for _ in range(num)]
        if any(table.tokens[place][index] > table.rooms[index] for place in places) or any(
            index > table.most_size[place] for place in places
        ):
            return []
        tokens = [of_length[index] for of_length in table.tokens]
        waves = []
        for members in best_fit(places, tokens, table.rooms[index]):
            group = OpenGroup(index, table.constants_ms[index], 0)
            for place in members:
                group.time_ms += table.works_ms[place][index]
                group.num_tokens += tokens[place]
                group.counts[place] = group.counts.get(place, 0) + 1
            waves.append(Wave([group], group.time_ms))
        return waves

    def _times_ms(self, counts: Counts, column_ms: float) -> Iterator[float]:
        """Times of waves worth a try, falling."""
        num_tokens = sum(self.table.lengths[place] * num for place, num in enumerate(counts) if num)
        fewest = max(1, -(-num_tokens // self.table.costs.most_tokens))
        constant_ms = min(self.table.constants_ms)
        mean_ms = column_ms / self._width
        num_waves = fewest / _MOST_FACTOR
        while num_waves <= 3 * fewest + _NUM_MORE_WAVES:
            yield mean_ms / num_waves + constant_ms
            num_waves *= _GROWTH

    def _column_ms(self, counts: Counts) -> float:
        return math.fsum(
            num * of_length
            for num, of_length in zip(counts, self.table.column_ms, strict=True)
            if num
        )

    def _idle_ms(self, wave: Wave, counts: Counts) -> float:
        return wave.time_ms - self._column_ms(counts) / self._width

    def _whole(self, counts: Counts, time_ms: float, effort: Effort) -> Wave | None:
        filled = self._filled(counts, time_ms, effort, most_unplaced=0)
        return None if filled is None else filled[0]

    def _filled(
        self,
        counts: Counts,
        time_ms: float,
        effort: Effort,
        *,
        most_unplaced: int | None = None,
    ) -> tuple[Wave, Counts] | None:
        filled = fill(self.table, counts, time_ms, most_unplaced=most_unplaced)
        num_groups = 1 if filled is None else len(filled[0].groups)
        effort.spend(_FILL_EFFORT * len(counts) * (1 + num_groups / 4))
        return filled


def wave_order(times_ms: Sequence[float], num_stages: int) -> list[int]:
    """A good order of waves for 1F1B: one of the simple ones, bettered by swaps of two."""
    orders = list(_simple_orders(times_ms))
    if num_stages == 1 or len(times_ms) < 2:
        return orders[0]

    def in_order_ms(order: Sequence[int]) -> float:
        return pipeline_time_ms([times_ms[i] for i in order], num_stages)

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
    """Falling, rising, and the shortest at both ends: pipelines fill and drain with them."""
    falling = sorted(range(len(times_ms)), key=lambda i: (-times_ms[i], i))
    yield falling
    yield falling[::-1]
    yield falling[1::2][::-1] + falling[::2]
