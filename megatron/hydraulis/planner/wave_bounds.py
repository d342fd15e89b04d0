"""A lower bound on waves, by a linear program over counts of waves and groups.

Waves are counted by class of time, groups by class and size: how many waves a class has, how long
they are together, how many groups of a size they have, and how long these are together. Groups are
counted and not named, so none can be exchanged for another. For waves of class k, between
τ_{k-1} and τ_k ms:

    Σ_c c·y_ck = W·z_k       Σ_c c·D_ck = W·D_k       τ_{k-1}·z_k ≤ D_k ≤ τ_k·z_k   (also y, D_ck)

    Σ_b (a_c·low_b + b_c)·x_bck + c_c·y_ck ≤ D_ck     work within the time, in every form
    Σ_b x_bck ≤ room_c·y_ck                           memory
    Σ_ck x_bck = tokens of bucket b                   every sequence once

z_k waves and y_ck groups of c columns, D their total time, x_bck tokens. A bucket's sequences count
as long as its shortest, ``low``; it cannot be in groups that cannot hold that within τ_k. Sequences
of more than half a group's room or time are alone in their group (dual feasible functions). The
least ``Σ D_k`` is a bound on the sum over waves and hence, with the fill of a pipeline, on the time
of the replica. If the host takes h ms for a wave, the replica takes ``h·Σ z_k`` at least.

Fractions of waves would make the longest sequences too easy: a third of a wave with three times
the sequence. So the waves of a class hold no more of a bucket than there is, and are as long as
their share of it needs, N_b being all tokens of the bucket and t_bc the time of its shortest
sequence on c columns:

    Σ_c x_bck ≤ N_b·z_k       D_k ≥ τ_{k-1}·z_k + Σ_c max(0, t_bc - τ_{k-1})·x_bck / N_b

Where the gap is wide, the classes that the answer uses are divided, and Σ z_k is at most the whole
number below the answer's or at least that above: half a wave costs only half its constant.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.bounds import dual_feasible
from megatron.hydraulis.planner.costs import GroupCost, WaveCosts
from megatron.hydraulis.planner.relaxation import make_buckets
from megatron.hydraulis.planner.solver import (
    LinearModel,
    ProgramBuilder,
    Solver,
)

FloatArray = NDArray[np.float64]

_NUM_BUCKETS = 20
_NUM_CLASSES = 8
# Ratio of the borders of all classes but the first: most and least.
_WIDEST, _NARROWEST = 16.0, 1.2
_DUAL_FEASIBLE_FUNCTIONS = (1, 2, 3)
# Gap above which classes are divided, which takes a few tenths of a second.
_WIDE_GAP = 0.01
# Waves that count as none, and the least part of a class that is cut off.
_FEW_WAVES = 1e-3
_LEAST_PART = 0.1
# Bounds and times are sums of floats in different orders.
_ROUNDING = 1e-9


def simple_bound_ms(costs: WaveCosts, lengths: Sequence[int]) -> float:
    """Bound by the work of columns or host for as few waves as memory allows, and by the longest
    sequence.

    Valid in every order: ``Σ t + (pp-1)·min t``, and pp passes of the longest.
    """
    if not lengths:
        return 0.0
    mean = costs.mean_coefficients
    num_waves = -(-sum(lengths) // costs.most_tokens)
    sum_ms = max(
        math.fsum(map(form.sequence_time_ms, lengths)) + num_waves * form.c_ms
        for form in mean.forms
    )
    fill_ms = (costs.pipeline.num_stages - 1) * mean.time_ms((min(lengths),))
    longest_ms = costs.pipeline.num_stages * _longest_ms(costs, lengths)
    return max(sum_ms + fill_ms, longest_ms, num_waves * costs.host_ms)


def wave_bound_ms(
    costs: WaveCosts,
    lengths: Sequence[int],
    found_ms: float,
    solver: Solver,
    *,
    is_thorough: bool = True,
) -> float:
    """A lower bound for waves of these sequences; found_ms: time of the best packing so far.

    is_thorough: divide classes if there is a gap, which takes some tenths of a second.
    """
    bound_ms = simple_bound_ms(costs, lengths)
    if not lengths or bound_ms >= found_ms * (1.0 - _ROUNDING):
        return min(bound_ms, found_ms)
    program = _Program(costs, lengths, found_ms)
    for sum_ms in _bounds_of_sum_ms(program, solver):
        bound_ms = max(bound_ms, (sum_ms + program.fill_ms) * (1.0 - _ROUNDING))
        if not is_thorough or bound_ms >= found_ms * (1.0 - _WIDE_GAP):
            break
    return min(bound_ms, found_ms)


def _bounds_of_sum_ms(program: "_Program", solver: Solver) -> Iterator[float]:
    """Bounds on the sum over waves, and what the device waits for the host; the later ones are
    tighter as a rule."""
    borders_ms = program.even_borders_ms()
    answer = solver.solve(program.model(borders_ms))
    yield answer.bound
    if answer.values is None:
        return
    num_waves = math.floor(answer.values[: len(borders_ms) - 1].sum() + _FEW_WAVES)
    borders_ms = program.divided(borders_ms, answer.values)
    fewer = solver.solve(program.model(borders_ms, most=num_waves))
    more = solver.solve(program.model(borders_ms, fewest=num_waves + 1))
    yield min(fewer.bound, more.bound)


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
    """Groups of one size in waves of one class, with their columns."""

    group: GroupCost
    wave_class: int
    most_ms: float
    """Longest time of the class."""
    num: int
    """Column of y."""
    total: int
    """Column of D."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Columns of x by bucket."""


class _Program:
    """The linear program, scaled to shares of found_ms and of all tokens."""

    def __init__(self, costs: WaveCosts, lengths: Sequence[int], found_ms: float) -> None:
        self._costs = costs
        self._found_ms = found_ms
        self._num_tokens = sum(lengths)
        num_further = costs.pipeline.num_stages - 1
        self.fill_ms = num_further * costs.mean_coefficients.time_ms((min(lengths),))
        """Fill of a pipeline, in addition to the sum over waves."""
        rooms = [group.room_tokens for group in costs.groups if group.room_tokens > 0]
        borders = {room // 2 for room in rooms} | set(rooms)
        self._buckets = make_buckets(
            lengths, _NUM_BUCKETS, borders=[b for b in borders if b < max(lengths)]
        )
        self._low = np.array([bucket.low for bucket in self._buckets], dtype=np.float64)
        self._high = np.array([bucket.high for bucket in self._buckets], dtype=np.float64)

    def model(
        self, borders_ms: Sequence[float], *, fewest: int = 0, most: float = math.inf
    ) -> LinearModel:
        """The program for classes between these borders and a number of waves.

        The first columns are the numbers of waves of the classes, the next ones their times.
        """
        program = ProgramBuilder()
        classes = range(len(borders_ms) - 1)
        nums = [program.column() for _ in classes]
        totals = [program.column(cost=self._found_ms) for _ in classes]
        cells = [
            _Cell(group, k, borders_ms[k + 1], program.column(), program.column())
            for k in classes
            for group in self._costs.usable
            if _constant_ms(group) <= borders_ms[k + 1]
        ]
        for cell in cells:
            for b, bucket in enumerate(self._buckets):
                if self._holds(cell, bucket.low):
                    cell.tokens[b] = program.column()
        width = float(self._costs.width)
        for k, num, total in zip(classes, nums, totals, strict=True):
            low, high = borders_ms[k] / self._found_ms, borders_ms[k + 1] / self._found_ms
            in_class = [cell for cell in cells if cell.wave_class == k]
            _add_between(program, total, num, low, high)
            program.row({num: -width} | {c.num: float(c.group.size) for c in in_class}, 0.0, 0.0)
            program.row(
                {total: -width} | {c.total: float(c.group.size) for c in in_class}, 0.0, 0.0
            )
            for cell in in_class:
                _add_between(program, cell.total, cell.num, low, high)
        fewest = max(fewest, -(-self._num_tokens // self._costs.most_tokens))
        program.row(dict.fromkeys(nums, 1.0), float(fewest), most)
        if self._costs.host_ms:
            idle = program.column(cost=self._found_ms)
            of_wave = -self._costs.host_ms / self._found_ms
            entries = {idle: 1.0} | dict.fromkeys(totals, 1.0) | dict.fromkeys(nums, of_wave)
            program.row(entries, -self.fill_ms / self._found_ms, math.inf)
        for cell in cells:
            self._add_limits(program, cell)
        for b, bucket in enumerate(self._buckets):
            # Tokens left over cost more than everything else, so the program always has an answer.
            per_token = 10.0 * self._found_ms * self._num_tokens / max(bucket.low, 1.0)
            placed = [cell.tokens[b] for cell in cells if b in cell.tokens]
            share = bucket.num_tokens / self._num_tokens
            entries = dict.fromkeys([*placed, program.column(cost=per_token)], 1.0)
            program.row(entries, share, share)
            for k, num, total in zip(classes, nums, totals, strict=True):
                in_class = [c for c in cells if c.wave_class == k and b in c.tokens]
                low = borders_ms[k] / self._found_ms
                times = [cell.group.time_ms((bucket.low,)) / self._found_ms for cell in in_class]
                columns = [cell.tokens[b] for cell in in_class]
                program.row(dict.fromkeys(columns, 1.0) | {num: -share}, -math.inf, 0.0)
                if max(times, default=0.0) > low:
                    more = [min(0.0, low - time) / share for time in times]
                    entries = dict(zip(columns, more, strict=True))
                    program.row({total: 1.0, num: -low} | entries, 0.0, math.inf)
        return program.model()

    def _add_limits(self, program: ProgramBuilder, cell: _Cell) -> None:
        """Limits of the groups of a cell: work, memory, and both for whole sequences."""
        if not cell.tokens:
            return
        room_tokens = cell.group.room_tokens
        buckets = list(cell.tokens)
        low, high = self._low[buckets], self._high[buckets]
        tokens = float(self._num_tokens)

        def add(counted: FloatArray, of_cell: dict[int, float]) -> None:
            entries = zip(cell.tokens.values(), map(float, counted), strict=True)
            program.row({**dict(entries), **of_cell}, -math.inf, 0.0)

        shares = [low / room_tokens]
        for form in cell.group.coefficients.forms:
            per_token_ms, constant = form.token_time_ms(low), form.c_ms / self._found_ms
            add(per_token_ms * tokens / self._found_ms, {cell.num: constant, cell.total: -1.0})
            work_room_ms = cell.most_ms - form.c_ms
            if work_room_ms > 0.0:
                shares.append(per_token_ms * low / work_room_ms)
        add(np.full(len(buckets), tokens / room_tokens), {cell.num: -1.0})
        for m in _DUAL_FEASIBLE_FUNCTIONS:
            for share in shares:
                counted = dual_feasible(np.minimum(share, 1.0), m) * tokens / high
                if counted.any():
                    add(counted, {cell.num: -1.0})

    def divided(self, borders_ms: Sequence[float], answer: FloatArray) -> list[float]:
        """Borders of the classes that an answer uses, each divided at the mean time of its waves,
        and of what is between them."""
        num_classes = len(borders_ms) - 1
        found = {borders_ms[0], borders_ms[-1]}
        for k, (low_ms, high_ms) in enumerate(pairwise(borders_ms)):
            num, total = answer[k], answer[num_classes + k]
            if num > _FEW_WAVES:
                part_ms = _LEAST_PART * (high_ms - low_ms)
                mean_ms = float(total * self._found_ms / num)
                found |= {low_ms, high_ms, min(max(mean_ms, low_ms + part_ms), high_ms - part_ms)}
        return sorted(found)

    def even_borders_ms(self) -> list[float]:
        """Borders from 0 to just above found_ms with equal ratios."""
        highest = self._found_ms * (1.0 + _ROUNDING)
        constant_ms = min(map(_constant_ms, self._costs.groups))
        lowest = max(highest / _WIDEST, min(constant_ms, highest / _NARROWEST))
        return [0.0, *np.geomspace(lowest, highest, _NUM_CLASSES + 1).tolist()]

    def _holds(self, cell: _Cell, length: int) -> bool:
        limit_ms = cell.most_ms * (1.0 + _ROUNDING)
        return length <= cell.group.room_tokens and cell.group.time_ms((length,)) <= limit_ms


def _constant_ms(group: GroupCost) -> float:
    """Time of a group without sequences."""
    return group.coefficients.time_ms(())


def _add_between(program: ProgramBuilder, total: int, num: int, low: float, high: float) -> None:
    """Rows ``low·num <= total <= high·num``."""
    program.row({total: 1.0, num: -low}, 0.0, math.inf)
    program.row({total: 1.0, num: -high}, -math.inf, 0.0)
