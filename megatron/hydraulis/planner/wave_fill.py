"""One wave filled for a given time: the longest sequences first, each on as few columns as may be.

Sequences of equal length are alike, so lengths are counted. A length goes to the open group whose
room it fills best, else to a new group of the least size that runs it within the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.hydraulis.planner.wave_costs import WaveCosts

__all__ = ["Counts", "LengthTable", "OpenGroup", "Wave", "fill"]

Counts = list[int]
"""How many sequences there are of each length of a LengthTable."""

# Times are sums of floats: a group that is full to the last digit is full.
_ROUNDING = 1e-12


@dataclass(slots=True)
class OpenGroup:
    """A group of a wave."""

    size_index: int
    """Its size is 2**size_index columns."""
    time_ms: float
    num_tokens: int
    """Padded."""
    counts: dict[int, int] = field(default_factory=dict)
    """Sequences by place of their length in the table."""


@dataclass(slots=True)
class Wave:
    """Groups over all columns, side by side, and the time of the slowest."""

    groups: list[OpenGroup]
    time_ms: float

    def counts(self, num_lengths: int) -> Counts:
        """Sequences of all groups."""
        found = [0] * num_lengths
        for group in self.groups:
            for place, num in group.counts.items():
                found[place] += num
        return found


class LengthTable:
    """The distinct lengths of a batch, falling, with work and tokens on groups of every size."""

    def __init__(self, costs: WaveCosts, lengths: Sequence[int]) -> None:
        self.costs = costs
        self.lengths = sorted(set(lengths), reverse=True)
        self.place = {length: place for place, length in enumerate(self.lengths)}
        array = np.array(self.lengths, dtype=np.float64)
        whole = np.array(self.lengths, dtype=np.int64)
        # Shape (num_sizes, num_lengths); by length in the end, as one length is asked for at once.
        works_ms = [
            (g.coefficients.a_ms_per_token2 * array + g.coefficients.b_ms_per_token) * array
            for g in costs.groups
        ]
        tokens = [-(-whole // g.multiple) * g.multiple for g in costs.groups]
        for of_size, padded, group in zip(works_ms, tokens, costs.groups, strict=True):
            of_size[padded > group.room_tokens] = np.inf
        self.works_ms: list[list[float]] = np.array(works_ms).T.tolist()
        self.tokens: list[list[int]] = np.array(tokens).T.tolist()
        self.rooms = [g.room_tokens for g in costs.groups]
        self.constants_ms = [g.coefficients.c_ms for g in costs.groups]
        self.num_sizes = len(costs.groups)
        self.usable = [i for i, group in enumerate(costs.groups) if group in costs.usable]
        """Indices of the sizes that hold anything, rising."""
        self.least_size = [self._least_size(of_length) for of_length in self.tokens]
        """By place, the index of the least size that holds the length; num_sizes where none."""
        self.most_size = [
            self.num_sizes - 1
            if costs.most_doublings is None
            else min(self.num_sizes - 1, least + costs.most_doublings)
            for least in self.least_size
        ]
        """By place, the index of the largest size of a group whose longest sequence it is."""
        self.least_ms = [
            min(
                (
                    self.works_ms[place][index] + self.constants_ms[index]
                    for index in range(self.least_size[place], self.most_size[place] + 1)
                ),
                default=float("inf"),
            )
            for place in range(len(self.lengths))
        ]
        """By place, the least time of a wave with the length."""
        self.column_ms = [
            min(
                (works[index] * (1 << index) for index in range(least, self.num_sizes)),
                default=float("inf"),
            )
            for works, least in zip(self.works_ms, self.least_size, strict=True)
        ]
        """By place, the least that a sequence takes of its columns' time together."""

    def _least_size(self, tokens: list[int]) -> int:
        for index, room in enumerate(self.rooms):
            if tokens[index] <= room:
                return index
        return self.num_sizes

    def counts(self, lengths: Sequence[int]) -> Counts:
        """How many there are of each."""
        found = [0] * len(self.lengths)
        for length in lengths:
            found[self.place[length]] += 1
        return found


def fill(
    table: LengthTable, counts: Sequence[int], time_ms: float, *, most_unplaced: int | None = None
) -> tuple[Wave, Counts] | None:
    """A wave of at most time_ms out of the counted sequences, and what did not fit.

    most_unplaced: None is returned as soon as more sequences are left over.
    """
    most_ms = time_ms * (1.0 + _ROUNDING)
    num_sizes, rooms = table.num_sizes, table.rooms
    work_rooms_ms = [most_ms - c_ms for c_ms in table.constants_ms]
    groups: list[OpenGroup] = []
    left = [0] * len(counts)
    free = table.costs.width
    num_unplaced = 0
    for place, count in enumerate(counts):
        if not count:
            continue
        works, tokens = table.works_ms[place], table.tokens[place]
        num = count
        # The least size that runs it in time.
        size_index = table.least_size[place]
        while size_index < num_sizes and works[size_index] > work_rooms_ms[size_index]:
            size_index += 1
        while num:
            best: OpenGroup | None = None
            best_room_ms = most_ms
            for group in groups:
                index = group.size_index
                room_ms = most_ms - group.time_ms - works[index]
                if (
                    0.0 <= room_ms < best_room_ms
                    and group.num_tokens + tokens[index] <= rooms[index]
                ):
                    best, best_room_ms = group, room_ms
            if best is None:
                if size_index > table.most_size[place] or free < 1 << size_index:
                    break
                free -= 1 << size_index
                best = OpenGroup(size_index, table.constants_ms[size_index], 0)
                groups.append(best)
            index = best.size_index
            fitting = min(num, (rooms[index] - best.num_tokens) // tokens[index])
            if works[index] > 0.0 and fitting > 1:
                fitting = max(1, min(fitting, int((most_ms - best.time_ms) / works[index])))
            best.time_ms += fitting * works[index]
            best.num_tokens += fitting * tokens[index]
            best.counts[place] = best.counts.get(place, 0) + fitting
            num -= fitting
        if num:
            left[place] = num
            num_unplaced += num
            if most_unplaced is not None and num_unplaced > most_unplaced:
                return None
    if not groups:
        return None
    busy_ms = max(group.time_ms for group in groups)
    while free:
        # Columns without sequences run a row of padding: in wide groups, if these do not take long.
        able = [index for index in table.usable if free >= 1 << index]
        quick = [index for index in able if table.constants_ms[index] <= busy_ms]
        index = quick[-1] if quick else min(able, key=table.constants_ms.__getitem__)
        free -= 1 << index
        groups.append(OpenGroup(index, table.constants_ms[index], 0))
    return Wave(groups, max(group.time_ms for group in groups)), left
