"""A lower bound on waves, by a linear program over counts of waves and groups.

Waves are counted by class of time, groups by class and size: how many waves a class has, how long
they are together, how many groups of a size they have, and how long these are together. Groups are
counted and not named, so none can be exchanged for another. For waves of class k, between
τ_{k-1} and τ_k ms:

    Σ_c c·y_ck = W·z_k       Σ_c c·D_ck = W·D_k       τ_{k-1}·z_k ≤ D_k ≤ τ_k·z_k   (also y, D_ck)

    Σ_b (a_c·low_b + b_c)·x_bck + c_c·y_ck ≤ D_ck     work within the time
    Σ_b x_bck ≤ room_c·y_ck                           memory
    Σ_ck x_bck = tokens of bucket b                   every sequence once

z_k waves and y_ck groups of c columns, D their total time, x_bck tokens. A bucket's sequences count
as long as its shortest, ``low``; it cannot be in groups that cannot hold that within τ_k. Sequences
of more than half a group's room or time are alone in their group (dual feasible functions), and
some wave is as long as the longest sequence needs. The least ``Σ D_k`` is a bound on the sum over
waves and hence, with the fill of a pipeline, on the time of the replica.

Where the gap is wide, z_k has to be an integer: half a wave costs only half its constant.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.bounds import dual_feasible
from megatron.hydraulis.planner.costs import WaveCosts
from megatron.hydraulis.planner.relaxation import Bucket, make_buckets
from megatron.hydraulis.planner.solver import LinearModel, Outcome, Solver, SolverLimits

__all__ = ["simple_bound_ms", "wave_bound_ms"]


FloatArray = NDArray[np.float64]

_NUM_BUCKETS = 12
_NUM_CLASSES = 8
_DUAL_FEASIBLE_FUNCTIONS = (1, 2)
# Least ratio of the borders of a class.
_NARROWEST_CLASS = 1.02
# Number of longest sequences whose times are borders of classes.
_NUM_BORDER_LENGTHS = 4
_LIMITS = SolverLimits(num_nodes=60, relative_gap=1e-3)
# Gap above which the integer program is solved, which takes a few tenths of a second.
_INTEGER_GAP = 0.01
# Bounds and times are sums of floats in different orders.
_ROUNDING = 1e-9


def simple_bound_ms(costs: WaveCosts, lengths: Sequence[int]) -> float:
    """Bound by the columns' work, with as few waves as memory allows, and the longest sequence.

    Valid in every order: ``Σ t + (pp-1)·min t``, and pp passes of the longest.
    """
    if not lengths:
        return 0.0
    mean = costs.mean_coefficients
    num_waves = -(-sum(lengths) // costs.most_tokens)
    work_ms = math.fsum(map(mean.sequence_time_ms, lengths))
    fill_ms = (costs.num_stages - 1) * mean.time_ms((min(lengths),))
    longest_ms = costs.num_stages * _longest_ms(costs, lengths)
    return max(work_ms + num_waves * mean.c_ms + fill_ms, longest_ms)


def wave_bound_ms(
    costs: WaveCosts,
    lengths: Sequence[int],
    found_ms: float,
    solver: Solver,
    *,
    with_integers: bool = True,
) -> float:
    """A lower bound for waves of these sequences; found_ms: time of the best packing so far.

    with_integers: solve the integer program if the linear one leaves a gap, which takes some tenths
    of a second.
    """
    bound_ms = simple_bound_ms(costs, lengths)
    if not lengths or bound_ms >= found_ms * (1.0 - _ROUNDING):
        return min(bound_ms, found_ms)
    program = _Program(costs, lengths, found_ms)
    # Fill of a pipeline, in addition to the sum over waves.
    fill_ms = (costs.num_stages - 1) * costs.mean_coefficients.time_ms((min(lengths),))
    for is_integral in (False, True) if with_integers else (False,):
        solution = solver.solve(program.model(is_integral=is_integral), _LIMITS)
        if solution.outcome in (Outcome.OPTIMAL, Outcome.LIMIT):
            bound_ms = max(bound_ms, (solution.bound + fill_ms) * (1.0 - _ROUNDING))
        if bound_ms >= found_ms * (1.0 - _INTEGER_GAP):
            break
    return min(bound_ms, found_ms)


def _longest_ms(costs: WaveCosts, lengths: Sequence[int]) -> float:
    """The least time of a wave with the sequence that needs most."""
    return max(
        min(
            (
                group.time_ms((length,))
                for group in costs.groups
                if group.padded(length) <= group.room_tokens
            ),
            default=math.inf,
        )
        for length in {*lengths}
    )


@dataclass(frozen=True, slots=True)
class _Cell:
    """Groups of one size in waves of one class."""

    size_index: int
    wave_class: int


class _Program:
    """The linear program, scaled to shares of found_ms and of all tokens."""

    def __init__(self, costs: WaveCosts, lengths: Sequence[int], found_ms: float) -> None:
        self._costs = costs
        self._found_ms = found_ms
        self._longest_ms = _longest_ms(costs, lengths)
        self._num_tokens = sum(lengths)
        rooms = [group.room_tokens for group in costs.groups if group.room_tokens > 0]
        borders = {room // 2 for room in rooms} | set(rooms)
        self._buckets: tuple[Bucket, ...] = make_buckets(
            lengths, _NUM_BUCKETS, borders=[b for b in borders if b < max(lengths)]
        )
        self._low = np.array([bucket.low for bucket in self._buckets], dtype=np.float64)
        self._high = np.array([bucket.high for bucket in self._buckets], dtype=np.float64)
        self._borders_ms = self._class_borders_ms(lengths)
        self._num_classes = len(self._borders_ms) - 1
        self._cells = [
            _Cell(index, wave_class)
            for wave_class in range(self._num_classes)
            for index, group in enumerate(costs.groups)
            if group in costs.usable and group.coefficients.c_ms <= self._borders_ms[wave_class + 1]
        ]
        # Columns: z_k, D_k, then y and D of every cell, then x of every pair that may be.
        self._first_cell = 2 * self._num_classes
        self._first_pair = self._first_cell + 2 * len(self._cells)
        self._pairs = [
            (cell_index, bucket_index)
            for cell_index, cell in enumerate(self._cells)
            for bucket_index, bucket in enumerate(self._buckets)
            if self._holds(cell, bucket.low)
        ]

    def model(self, *, is_integral: bool) -> LinearModel:
        """The program; with is_integral the numbers of waves are integers."""
        fewest = -(-self._num_tokens // self._costs.most_tokens)
        num_columns = self._first_pair + len(self._pairs) + len(self._buckets)
        rows: list[FloatArray] = []
        lower: list[float] = []
        upper: list[float] = []

        def add(entries: dict[int, float], least: float, most: float) -> None:
            row = np.zeros(num_columns)
            for column, value in entries.items():
                row[column] = value
            rows.append(row)
            lower.append(least)
            upper.append(most)

        width, unit_ms = float(self._costs.width), self._found_ms
        z, total = self._z, self._total
        for k in range(self._num_classes):
            low, high = self._borders_ms[k] / unit_ms, self._borders_ms[k + 1] / unit_ms
            add({total(k): 1.0, z(k): -low}, 0.0, np.inf)
            add({total(k): 1.0, z(k): -high}, -np.inf, 0.0)
            cells = [i for i, cell in enumerate(self._cells) if cell.wave_class == k]
            sizes = {i: float(self._costs.groups[self._cells[i].size_index].size) for i in cells}
            add({z(k): -width} | {self._y(i): sizes[i] for i in cells}, 0.0, 0.0)
            add({total(k): -width} | {self._d(i): sizes[i] for i in cells}, 0.0, 0.0)
            for i in cells:
                add({self._d(i): 1.0, self._y(i): -low}, 0.0, np.inf)
                add({self._d(i): 1.0, self._y(i): -high}, -np.inf, 0.0)
        long_classes = range(
            next(
                k
                for k in range(self._num_classes)
                if self._borders_ms[k + 1] > self._longest_ms * (1.0 + _ROUNDING)
                or k == self._num_classes - 1
            ),
            self._num_classes,
        )
        add({z(k): 1.0 for k in long_classes}, 1.0, np.inf)
        add({z(k): 1.0 for k in range(self._num_classes)}, float(fewest), np.inf)
        for i, cell in enumerate(self._cells):
            for entries in self._group_rows(i, cell):
                add(entries, -np.inf, 0.0)
        slack = self._first_pair + len(self._pairs)
        for b, bucket in enumerate(self._buckets):
            entries = {
                self._first_pair + p: 1.0 for p, (_, other) in enumerate(self._pairs) if other == b
            }
            share = bucket.num_tokens / self._num_tokens
            # Tokens left over cost more than everything else, so the program always has an answer.
            add(entries | {slack + b: 1.0}, share, share)
        cost = np.zeros(num_columns)
        cost[self._num_classes : 2 * self._num_classes] = unit_ms
        cost[slack:] = 10.0 * unit_ms * self._num_tokens / np.maximum(self._low, 1.0)
        return LinearModel(
            cost=cost,
            lower=np.zeros(num_columns),
            upper=np.full(num_columns, np.inf),
            matrix=np.vstack(rows),
            row_lower=np.array(lower),
            row_upper=np.array(upper),
            is_integral=np.arange(num_columns) < self._num_classes if is_integral else None,
        )

    def _group_rows(self, i: int, cell: _Cell) -> list[dict[int, float]]:
        """Limits of the groups of a cell: work, memory, and both for whole sequences."""
        group = self._costs.groups[cell.size_index]
        high_ms = self._borders_ms[cell.wave_class + 1]
        mine = [(self._first_pair + p, b) for p, (c, b) in enumerate(self._pairs) if c == i]
        if not mine:
            return [{self._y(i): 0.0}]
        columns = [column for column, _ in mine]
        buckets = [b for _, b in mine]
        low, high = self._low[buckets], self._high[buckets]
        a, b_ms = group.coefficients.a_ms_per_token2, group.coefficients.b_ms_per_token
        per_token_ms = a * low + b_ms
        tokens = float(self._num_tokens)
        work = dict(zip(columns, per_token_ms * tokens / self._found_ms, strict=True))
        work[self._y(i)] = group.coefficients.c_ms / self._found_ms
        work[self._d(i)] = -1.0
        room = dict(zip(columns, np.full(len(columns), tokens / group.room_tokens), strict=True))
        room[self._y(i)] = -1.0
        found = [work, room]
        work_room_ms = high_ms - group.coefficients.c_ms
        shares = [low / group.room_tokens]
        if work_room_ms > 0.0:
            shares.append(per_token_ms * low / work_room_ms)
        for m in _DUAL_FEASIBLE_FUNCTIONS:
            for share in shares:
                counted = dual_feasible(np.minimum(share, 1.0), m) * tokens / high
                if counted.any():
                    found.append(
                        {
                            column: float(value)
                            for column, value in zip(columns, counted, strict=True)
                            if value
                        }
                        | {self._y(i): -1.0}
                    )
        return found

    def _class_borders_ms(self, lengths: Sequence[int]) -> list[float]:
        """Borders from 0 to just above found_ms.

        Some are where a long sequence begins to fit on fewer columns, the others are even.
        """
        highest = self._found_ms
        longest = sorted(set(lengths), reverse=True)[:_NUM_BORDER_LENGTHS]
        of_lengths = [
            group.time_ms((length,)) * (1.0 - _ROUNDING)
            for length in longest
            for group in self._costs.groups
            if group.padded(length) <= group.room_tokens
        ]
        lowest = max(highest / 16.0, min(group.coefficients.c_ms for group in self._costs.groups))
        ratio = max((highest / lowest) ** (1.0 / _NUM_CLASSES), _NARROWEST_CLASS)
        even = [lowest * ratio**step for step in range(_NUM_CLASSES)]
        borders: list[float] = []
        needed = [self._longest_ms * (1.0 - _ROUNDING)]
        # Alternately, so that neither kind takes all places.
        for border in [*needed, *itertools.chain(*itertools.zip_longest(even[::-1], of_lengths))]:
            if border is None:
                continue
            is_apart = all(
                max(border, other) > _NARROWEST_CLASS * min(border, other) for other in borders
            )
            if 0.0 < border < highest * (1.0 - _ROUNDING) and is_apart:
                borders.append(border)
        return [0.0, *sorted(borders[:_NUM_CLASSES]), highest * (1.0 + _ROUNDING)]

    def _holds(self, cell: _Cell, length: int) -> bool:
        group = self._costs.groups[cell.size_index]
        limit_ms = self._borders_ms[cell.wave_class + 1] * (1.0 + _ROUNDING)
        return length <= group.room_tokens and group.time_ms((length,)) <= limit_ms

    def _z(self, k: int) -> int:
        return k

    def _total(self, k: int) -> int:
        return self._num_classes + k

    def _y(self, i: int) -> int:
        return self._first_cell + 2 * i

    def _d(self, i: int) -> int:
        return self._first_cell + 2 * i + 1
