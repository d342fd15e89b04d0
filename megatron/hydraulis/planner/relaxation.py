"""Can any dispatch and packing finish within a given time? A program that can say no.

For a time T each class of equal replicas can run in several modes (see modes.py). The program
spreads the tokens of buckets over modes and minimises the tokens left over. If some are left over
at the optimum, no plan finishes within T. It takes milliseconds, and its answer says how much of
each bucket goes to which class.

Fractions would make large sequences too easy. Dual feasible functions of the share of a replica's
work (or of a micro-batch's tokens) that a sequence takes bring back what they cost: see
dual_feasible.py.

All lengths round down: the tokens of a bucket count as they are, ``s²`` as ``low·s``, and there are
as few sequences as if all were the longest of the bucket.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.buckets import make_buckets
from megatron.hydraulis.planner.dual_feasible import dual_feasible
from megatron.hydraulis.planner.lumps import choose_lumps, lump_orders
from megatron.hydraulis.planner.modes import Mode, ReplicaClass, Tier, class_modes
from megatron.hydraulis.planner.packing import SchemeCost
from megatron.hydraulis.planner.pipeline_shape import MAX_SHAPED_MICRO_BATCHES
from megatron.hydraulis.planner.solver import LinearModel, Outcome, Solver, SolverLimits

__all__ = ["Program", "Relaxation"]

_DUAL_FEASIBLE_FUNCTIONS = (1, 2, 3, 4)
LEFT_OVER_FRACTION = 1e-6
"""Share of the tokens that has to be left over before the answer is no: HiGHS is exact to 1e-7."""
# Cost of a token in a pipeline, in tokens left over, for programs that make dispatches.
_RELUCTANCE = 1e-3
# A pipeline has a tier of its own for sequences with which it does less than this share of the
# time in work, and at most so many tiers.
_SPOILED = 0.9
_MAX_TIERS = 10
# Long sequences that a pipeline may hold within the time are counted up to this number.
_MAX_COUNTED_LUMPS = 4
# Instead of no work at all, so that shares of it are finite.
_LEAST_WORK_MS = 1e-9

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """The program for one time.

    Columns: tokens of each bucket in each mode (bucket by bucket), replicas in each mode, tokens of
    each bucket that are left over.
    """

    model: LinearModel
    modes: tuple[Mode, ...]
    num_buckets: int

    def spread(self, values: FloatArray) -> FloatArray:
        """Of an answer, what goes where: shape (num_buckets, num_modes)."""
        num = self.num_buckets * len(self.modes)
        return values[:num].reshape(self.num_buckets, len(self.modes))


class Relaxation:
    """The programs of one batch on one strategy, for any time."""

    def __init__(
        self,
        classes: Sequence[ReplicaClass],
        lengths: Sequence[int],
        *,
        num_buckets: int,
        solver: Solver,
    ) -> None:
        """lengths: of the batch, rising; each fits some class."""
        self.classes = tuple(classes)
        self.lengths = lengths
        self.buckets = make_buckets(
            lengths, num_buckets, borders={c.cost.max_tokens for c in classes}
        )
        self.solver = solver
        self._num_tokens = sum(lengths)
        self._low = np.array([bucket.low for bucket in self.buckets], dtype=np.float64)
        self._high = np.array([bucket.high for bucket in self.buckets], dtype=np.float64)

    def is_impossible(self, time_ms: float) -> bool:
        """Whether it is proved that no plan takes time_ms or less; no is "not proved"."""
        program = self.program(time_ms)
        if program is None:
            return True
        solution = self.solver.solve(program.model, SolverLimits())
        return solution.outcome is Outcome.OPTIMAL and self._leaves_tokens(solution.bound)

    def _leaves_tokens(self, num_tokens: float) -> bool:
        """Whether a bound on the tokens left over is more than a rounding error."""
        return num_tokens > LEFT_OVER_FRACTION * self._num_tokens

    def program(self, time_ms: float, *, longest_fill: float = math.inf) -> Program | None:
        """The program for a time; None when a sequence has no place at all within it.

        longest_fill: share of the time that a sequence may take in a pipeline when it could go
        elsewhere as well. Below infinity the program bounds nothing, but it makes better
        dispatches: it keeps pipelines free of long sequences that spoil their shape, and gives
        them no more than it has to, as their capacity is an optimistic one.
        """
        longest_within = [self._longest_within(c.cost, time_ms) for c in self.classes]
        if self.lengths[-1] > max(longest_within):
            return None
        modes: list[Mode] = []
        for index, replica_class in enumerate(self.classes):
            others = longest_within[:index] + longest_within[index + 1 :]
            for tier in self._tiers(
                replica_class, longest_within[index], max(others, default=0), time_ms
            ):
                modes += class_modes(
                    index,
                    replica_class.cost,
                    tier,
                    time_ms,
                    lengths=self.lengths,
                    num_tokens=self._num_tokens,
                )
        if not modes:
            return None
        able = np.array(
            [[bucket.low <= mode.tier.longest for mode in modes] for bucket in self.buckets]
        )
        if not able.any(axis=1).all():
            return None
        if longest_fill < math.inf:
            able &= self._fills(modes, able, longest_fill * time_ms)
        model = self._model(modes, able)
        if longest_fill < math.inf:
            for column, mode in enumerate(modes):
                if self.classes[mode.replica_class].cost.num_stages > 1:
                    num_spread = able.size
                    model.cost[column : num_spread : len(modes)] = _RELUCTANCE
        return Program(model=model, modes=tuple(modes), num_buckets=len(self.buckets))

    def _fills(
        self, modes: Sequence[Mode], able: NDArray[np.bool_], most_ms: float
    ) -> NDArray[np.bool_]:
        """Which bucket is short enough for a mode, or has to go to a pipeline."""
        num_stages = [self.classes[mode.replica_class].cost.num_stages for mode in modes]
        is_single = np.array([num == 1 for num in num_stages])
        has_single = (able & is_single[None, :]).any(axis=1)
        is_short = np.array(
            [
                [
                    self.classes[mode.replica_class].cost.sequence_time_ms(bucket.high) <= most_ms
                    for mode in modes
                ]
                for bucket in self.buckets
            ]
        )
        fills: NDArray[np.bool_] = is_single[None, :] | is_short | ~has_single[:, None]
        return fills

    def _longest_within(self, cost: SchemeCost, time_ms: float) -> int:
        """The longest sequence of the batch that fits a class and passes all its stages in time."""
        longest = 0
        for length in reversed(self.lengths):
            if length > cost.max_tokens:
                continue
            if cost.num_stages * cost.coefficients.time_ms((length,)) <= time_ms:
                longest = length
                break
        return longest

    def _tiers(
        self, replica_class: ReplicaClass, longest: int, longest_elsewhere: int, time_ms: float
    ) -> list[Tier]:
        """The tiers of a class: sequences go to a tier of their length or of longer ones.

        longest, longest_elsewhere: what this class and any other one can hold within the time.
        """
        cost = replica_class.cost
        if longest == 0:
            return []
        if cost.num_stages == 1:
            return [Tier(longest)]
        lumps = self._only_here(cost, longest, longest_elsewhere)
        if lumps and replica_class.num_replicas == 1:
            return [Tier(longest, lumps, num_least=1)]
        # A tier for each bucket from the first whose sequences slow a pipeline down, joined from
        # the shorter ones on if there are many.
        num_able = bisect_right(self.buckets, longest, key=lambda bucket: bucket.low)
        first = bisect_left(
            self.buckets[:num_able],
            True,
            key=lambda bucket: self._spoils(cost, bucket.low, time_ms),
        )
        firsts = range(first, num_able, -(-(num_able - first) // _MAX_TIERS) or 1)
        tiers = []
        for start, end in pairwise([0, *firsts, num_able]):
            if end > start:
                low, high = self.buckets[start].low, self.buckets[end - 1].high
                tiers.append(
                    _tier_with_lump(cost, low, high, time_ms) if start in firsts else Tier(high)
                )
        if lumps:
            tiers[-1] = replace(tiers[-1], num_least=1)
        return tiers

    def _spoils(self, cost: SchemeCost, length: int, time_ms: float) -> bool:
        """Whether a pipeline that holds a sequence can do noticeably less work within a time."""
        most_ms = lump_orders((length,), cost).most_work_ms(MAX_SHAPED_MICRO_BATCHES, time_ms)
        return most_ms < _SPOILED * time_ms

    def _only_here(self, cost: SchemeCost, longest: int, longest_elsewhere: int) -> tuple[int, ...]:
        """Lengths of lumps that only this class holds, falling."""
        lengths = self.lengths[bisect_right(self.lengths, longest_elsewhere) :]
        if not lengths or lengths[-1] > longest:
            return ()
        return choose_lumps(lengths[::-1], cost.max_tokens)

    def _model(self, modes: Sequence[Mode], able: NDArray[np.bool_]) -> LinearModel:
        num_buckets, num_modes = able.shape
        num_spread = num_buckets * num_modes
        num_columns = num_spread + num_modes + num_buckets
        uses = [self._uses(mode) for mode in modes]
        num_uses = sum(len(of_mode) for of_mode in uses)
        num_rows = num_buckets + num_uses + 2 * len(self.classes)
        matrix = np.zeros((num_rows, num_columns))
        row_lower, row_upper = np.full(num_rows, -np.inf), np.zeros(num_rows)
        for place, bucket in enumerate(self.buckets):
            matrix[place, place * num_modes : (place + 1) * num_modes] = 1.0
            matrix[place, num_spread + num_modes + place] = 1.0
            row_lower[place] = row_upper[place] = bucket.num_tokens
        row = num_buckets
        for column, of_mode in enumerate(uses):
            for use, room in of_mode:
                matrix[row, column:num_spread:num_modes] = use
                matrix[row, num_spread + column] = -room
                row += 1
        for index, replica_class in enumerate(self.classes):
            row_upper[row : row + 2] = replica_class.num_replicas, np.inf
            for column, mode in enumerate(modes):
                if mode.replica_class == index:
                    matrix[row, num_spread + column] = 1.0
                    if mode.tier.num_least:
                        matrix[row + 1, num_spread + column] = 1.0
                        row_lower[row + 1] = mode.tier.num_least
            row += 2
        upper = np.full(num_columns, np.inf)
        upper[:num_spread] = np.where(able, np.inf, 0.0).ravel()
        cost = np.zeros(num_columns)
        cost[num_spread + num_modes :] = 1.0
        return LinearModel(
            cost=cost,
            lower=np.zeros(num_columns),
            upper=upper,
            matrix=matrix,
            row_lower=row_lower,
            row_upper=row_upper,
        )

    def _uses(self, mode: Mode) -> list[tuple[FloatArray, float]]:
        """What a token of each bucket uses up in a mode, and how much of it a replica has."""
        cost = self.classes[mode.replica_class].cost
        a, b = cost.coefficients.a_ms_per_token2, cost.coefficients.b_ms_per_token
        work_share = (a * self._low + b) * self._low / max(mode.work_ms, _LEAST_WORK_MS)
        token_share = self._low / cost.max_tokens
        # A sequence has at least and at most so many tokens.
        shortest, longest = self._low, self._high
        tier = mode.tier
        num_micro_batches = float(mode.num_micro_batches)
        uses = [(work_share / shortest, 1.0), (token_share / shortest, num_micro_batches)]
        if tier.most_lumps:
            uses.append(((self._low >= tier.shortest_lump) / longest, float(tier.most_lumps)))
        for m in _DUAL_FEASIBLE_FUNCTIONS:
            shares = [(work_share, 1.0)]
            if not mode.packs_all:
                shares.append((token_share, num_micro_batches))
            for share, room in shares:
                counted = dual_feasible(share, m) / longest
                if counted.any():
                    uses.append((counted, room))
        return uses


def _tier_with_lump(cost: SchemeCost, shortest: int, longest: int, time_ms: float) -> Tier:
    """The tier of replicas that hold a sequence between these lengths and none above."""
    most_lumps = 0
    if 2 * shortest > cost.max_tokens:
        # No two fit one micro-batch. The time grows with the work, so lumps alone take least.
        lump_ms = cost.coefficients.time_ms((shortest,))
        for num in range(1, _MAX_COUNTED_LUMPS + 1):
            orders = lump_orders((shortest,) * num, cost)
            if orders.least_time_ms(MAX_SHAPED_MICRO_BATCHES, num * lump_ms) > time_ms:
                most_lumps = max(num - 1, 1)
                break
    return Tier(longest, (shortest,), shortest if most_lumps else 0, most_lumps)
