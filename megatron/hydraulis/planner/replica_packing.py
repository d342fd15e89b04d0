"""Packing with the true replica time: best fit for one stage, towards the best shape for more.

For one stage only the number of micro-batches counts. For a pipeline the sequences are dealt
longest first to the micro-batch that lacks most work of its share, for the numbers of micro-batches
and the shapes that promise most, and the exact 1F1B time decides.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.lumps import (
    LumpOrder,
    choose_lumps,
    lump_lines,
    lump_orders,
)
from megatron.hydraulis.planner.modes import largest_micro_batch_ms
from megatron.hydraulis.planner.packing import Packing, SchemeCost, best_fit
from megatron.hydraulis.planner.pipeline_shape import (
    MAX_SHAPED_MICRO_BATCHES,
    Shape,
    best_works_ms,
    fill_bound_ms,
    shapes,
)
from megatron.hydraulis.planner.polish import Effort, polish
from megatron.hydraulis.planner.replica_plan import MicroBatch
from megatron.hydraulis.planner.solver import Solver

__all__ = ["Packed", "ReplicaPacker"]

# Numbers of micro-batches around the most promising one whose packings are made.
_NUM_MORE_PACKED = 1
# Numbers of micro-batches without improvement after which the estimate stops looking.
_MAX_FRUITLESS = 2
# Orders of lumps that a thorough packing tries.
_NUM_ORDERS = 6
# Of its packings, those that are polished.
_NUM_POLISHED = 3
# Of dealing one sequence in all shapes tried for a pipeline, in the unit of Effort.
_DEALING_EFFORT = 1000.0


@dataclass(frozen=True, slots=True)
class Packed:
    """Micro-batches of one replica, as indices into the batch, in their order."""

    micro_batches: tuple[tuple[int, ...], ...]
    time_ms: float


class ReplicaPacker:
    """Packs shares of one batch for replicas of one cost."""

    def __init__(self, cost: SchemeCost, lengths: Sequence[int], solver: Solver) -> None:
        """lengths: shape (num_sequences,), the whole batch, in any order."""
        self.cost = cost
        self.lengths = lengths
        self.tokens = cost.tokens(lengths)
        """What each takes up in a micro-batch, padding included."""
        self.works_ms = [cost.sequence_time_ms(length) for length in lengths]
        self._solver = solver
        self._works_array_ms = np.array(self.works_ms)
        self._tokens_array = np.array(self.tokens, dtype=np.int64)
        self._lump_lines = lump_lines(cost.num_stages)
        self._largest_ms = largest_micro_batch_ms(cost, max(lengths))

    def pack(self, sequences: Sequence[int], effort: Effort) -> Packed:
        """The best packing found; sequences by falling length, each within the limit."""
        if not sequences:
            return Packed((), 0.0)
        if self.cost.num_stages == 1:
            return self.packed(best_fit(sequences, self.tokens, self.cost.max_tokens))
        effort.spend(len(sequences) * _DEALING_EFFORT)
        work_ms = math.fsum(self.works_ms[sequence] for sequence in sequences)
        num_tokens = sum(self.lengths[sequence] for sequence in sequences)
        center = self._best_num(work_ms, num_tokens, len(sequences), sequences[0])[1]
        best: Packed | None = None
        for num in range(max(1, center - _NUM_MORE_PACKED), center + _NUM_MORE_PACKED + 1):
            best = self._better(best, sequences, work_ms, num)
        while best is None:
            # Best fit never needs more micro-batches than sequences.
            center += 1
            if center >= len(sequences):
                return self.packed(best_fit(sequences, self.tokens, self.cost.max_tokens))
            best = self._better(best, sequences, work_ms, center)
        return best

    def exchanged(self, packed: Packed, gone: int | None, come: int | None) -> Packed:
        """A packing of a pipeline without one of its sequences and with another one.

        The new one goes where the old one was, or where there is most room. Empty for one stage,
        where packing anew is as quick, and when there is no room.
        """
        nothing = Packed((), 0.0)
        if self.cost.num_stages == 1:
            return nothing
        changed = [[s for s in share if s != gone] for share in packed.micro_batches]
        if come is not None:
            rooms = [self.cost.max_tokens - sum(self.tokens[s] for s in share) for share in changed]
            able = [k for k, room in enumerate(rooms) if room >= self.tokens[come]]
            if not able:
                return nothing
            place = max(able, key=lambda k: (gone in packed.micro_batches[k], rooms[k], -k))
            changed[place].append(come)
        return self.packed([share for share in changed if share])

    def pack_thoroughly(self, sequences: Sequence[int], num_steps: int, effort: Effort) -> Packed:
        """The best of several packings, polished by at most num_steps improvements."""
        candidates = [self.pack(sequences, effort)]
        if self.cost.num_stages == 1 or len(sequences) < 2:
            return candidates[0]
        for order, num in self._promising_orders(sequences):
            dealt = self._deal_around_lumps(sequences, order, num)
            if dealt is not None:
                candidates.append(self.packed(dealt))
        candidates.sort(key=lambda packed: packed.time_ms)
        polished = [self.polish(packed, num_steps, effort) for packed in candidates[:_NUM_POLISHED]]
        return min(polished, key=lambda packed: packed.time_ms)

    def _promising_orders(self, sequences: Sequence[int]) -> list[tuple[LumpOrder, int]]:
        """Orders of the longest sequences by the least time they allow, with the number of lumps.

        All micro-batches but those of the lumps come before or after them.
        """
        work_ms = math.fsum(self.works_ms[sequence] for sequence in sequences)
        lengths = [self.lengths[sequence] for sequence in sequences]
        num_tokens = sum(lengths)
        lumps = choose_lumps(lengths, self.cost.max_tokens)
        orders = lump_orders(lumps, self.cost)
        rated: list[tuple[float, int]] = []
        fewest = -(-num_tokens // self.cost.max_tokens)
        nums = [len(lumps) + order.num_before + order.num_after for order in orders.apart]
        for num in set(nums):
            if not fewest <= num <= len(sequences):
                continue
            total_ms = work_ms + num * self.cost.coefficients.c_ms
            fill_ms = fill_bound_ms(self.cost.num_stages, num, total_ms, self._largest_ms)
            times_ms = np.maximum(orders.times_apart_ms(total_ms), fill_ms)
            rated += [
                (float(times_ms[place]), place) for place, other in enumerate(nums) if other == num
            ]
        rated.sort()
        return [(orders.apart[place], len(lumps)) for _, place in rated[:_NUM_ORDERS]]

    def _deal_around_lumps(
        self, sequences: Sequence[int], order: LumpOrder, num_lumps: int
    ) -> list[list[int]] | None:
        c_ms = self.cost.coefficients.c_ms
        lumps: list[int | None] = [None] * order.num_before
        lumps += [sequences[i] for i in (*order.before, 0, *order.after)]
        lumps += [None] * order.num_after
        least_ms = [c_ms + (0.0 if lump is None else self.works_ms[lump]) for lump in lumps]
        total_ms = math.fsum(self.works_ms[s] for s in sequences) + len(lumps) * c_ms
        works_ms = best_works_ms(
            self.cost.num_stages, least_ms, total_ms, self._largest_ms, self._solver
        )
        if works_ms is None:
            return None
        lacking_ms = [work - least for work, least in zip(works_ms, least_ms, strict=True)]
        dealt: list[list[int]] = [[] if lump is None else [lump] for lump in lumps]
        rooms = [
            self.cost.max_tokens - (0 if lump is None else self.tokens[lump]) for lump in lumps
        ]
        return self._deal(sequences[num_lumps:], dealt, lacking_ms, rooms)

    def polish(
        self, packed: Packed, num_steps: int, effort: Effort, *, target_ms: float = 0.0
    ) -> Packed:
        """The packing after at most num_steps improvements of a pipeline's micro-batches.

        target_ms: a time below which no improvement is needed any more.
        """
        if self.cost.num_stages == 1 or len(packed.micro_batches) < 2:
            return packed
        better = polish(
            packed.micro_batches,
            self._works_array_ms,
            self._tokens_array,
            self.cost,
            num_steps,
            target_ms=target_ms,
            effort=effort,
        )
        candidate = self.packed(better)
        return candidate if candidate.time_ms < packed.time_ms else packed

    def estimates_ms(
        self,
        work_ms: NDArray[np.float64],
        num_tokens: NDArray[np.int64],
        longest_ms: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """About the times of many shares: lower bounds that good packings come close to.

        All of one shape. longest_ms: work of the longest sequence of each share. Exact for one
        stage when the sequences pack without loss. A share without tokens takes no time.
        """
        cost = self.cost
        c_ms, num_stages = cost.coefficients.c_ms, cost.num_stages
        fewest = -(-num_tokens // cost.max_tokens)
        if num_stages == 1:
            return work_ms + fewest * c_ms
        best_ms = np.full(work_ms.shape, np.inf)
        num, last = max(1, int(fewest.min())), int(fewest.max())
        while True:
            total_ms = work_ms + num * c_ms
            lump_ms = longest_ms + c_ms
            time_ms = total_ms.copy()
            for by_total, by_lump in self._lump_lines:
                np.maximum(time_ms, by_total * total_ms + by_lump * lump_ms, out=time_ms)
            for shape in self._shapes(num):
                np.maximum(time_ms, shape.bound_ms(total_ms, self._largest_ms), out=time_ms)
            is_better = (time_ms < best_ms) & (num >= fewest)
            best_ms = np.where(is_better, time_ms, best_ms)
            if num >= last and (num > MAX_SHAPED_MICRO_BATCHES or not is_better.any()):
                break
            num += 1
        return np.where(num_tokens == 0, 0.0, best_ms)

    def packed(self, micro_batches: Sequence[Sequence[int]]) -> Packed:
        """Micro-batches in this order, with their exact time: infinite where one has no room."""
        limit = self.cost.max_tokens
        if any(sum(self.tokens[sequence] for sequence in share) > limit for share in micro_batches):
            return Packed(tuple(map(tuple, micro_batches)), math.inf)
        times_ms = [
            self.cost.coefficients.time_ms(self.lengths[sequence] for sequence in share)
            for share in micro_batches
        ]
        return Packed(
            tuple(tuple(sorted(share)) for share in micro_batches),
            pipeline_time_ms(times_ms, self.cost.num_stages),
        )

    def to_packing(self, packed: Packed) -> Packing:
        """The micro-batches with their lengths, as a plan has them."""
        return Packing(
            tuple(
                MicroBatch(share, tuple(self.lengths[sequence] for sequence in share))
                for share in packed.micro_batches
            ),
            packed.time_ms,
        )

    def _best_num(
        self, work_ms: float, num_tokens: int, num_sequences: int, longest: int
    ) -> tuple[float, int]:
        """The least bound over numbers of micro-batches, and that number."""
        c_ms = self.cost.coefficients.c_ms
        num = max(1, -(-num_tokens // self.cost.max_tokens))
        lump_ms = self.works_ms[longest] + c_ms
        best_ms, best_num, num_fruitless = math.inf, num, 0
        while num_fruitless < _MAX_FRUITLESS and (num <= num_sequences or best_ms == math.inf):
            total_ms = work_ms + num * c_ms
            time_ms = max(
                by_total * total_ms + by_lump * lump_ms for by_total, by_lump in self._lump_lines
            )
            for shape in self._shapes(num):
                time_ms = max(time_ms, shape.bound_ms(total_ms, self._largest_ms))
            if time_ms < best_ms:
                best_ms, best_num, num_fruitless = time_ms, num, 0
            else:
                num_fruitless += 1
            if num > MAX_SHAPED_MICRO_BATCHES:
                break
            num += 1
        return best_ms, best_num

    def _better(
        self, best: Packed | None, sequences: Sequence[int], work_ms: float, num: int
    ) -> Packed | None:
        if num > len(sequences):
            return best
        for shape in self._shapes(num):
            dealt = self._deal_to_shape(sequences, shape, work_ms)
            if dealt is None:
                continue
            candidate = self.packed(dealt)
            if best is None or candidate.time_ms < best.time_ms:
                best = candidate
        return best

    def _shapes(self, num: int) -> Sequence[Shape]:
        if num <= MAX_SHAPED_MICRO_BATCHES:
            return shapes(self.cost.num_stages, num)
        # The ends of the largest shape with a flat middle; the fill shrinks in proportion.
        scale = MAX_SHAPED_MICRO_BATCHES / num
        return tuple(
            Shape(
                _widened(shape.shares, num),
                slope=1.0 + (shape.slope - 1.0) * scale,
                relief=shape.relief * scale,
            )
            for shape in shapes(self.cost.num_stages, MAX_SHAPED_MICRO_BATCHES)
        )

    def _deal_to_shape(
        self, sequences: Sequence[int], shape: Shape, work_ms: float
    ) -> list[list[int]] | None:
        num = len(shape.shares)
        c_ms = self.cost.coefficients.c_ms
        total_ms = work_ms + num * c_ms
        lacking_ms = [max(share * total_ms - c_ms, 0.0) for share in shape.shares]
        rooms = [self.cost.max_tokens] * num
        return self._deal(sequences, [[] for _ in range(num)], lacking_ms, rooms)

    def _deal(
        self,
        sequences: Sequence[int],
        dealt: list[list[int]],
        lacking_ms: list[float],
        rooms: list[int],
    ) -> list[list[int]] | None:
        """Longest first to whom most is lacking and has room; None when nobody has room."""
        for sequence in sequences:
            length = self.tokens[sequence]
            place = lacking_ms.index(max(lacking_ms))
            if rooms[place] < length:
                able = [k for k, room in enumerate(rooms) if room >= length]
                if not able:
                    return None
                place = max(able, key=lambda k: (lacking_ms[k], -k))
            dealt[place].append(sequence)
            lacking_ms[place] -= self.works_ms[sequence]
            rooms[place] -= length
        return [share for share in dealt if share]


def _widened(shares: Sequence[float], num: int) -> tuple[float, ...]:
    """Shares of more micro-batches: copies of the middle one put in, all scaled to add up to 1."""
    middle = len(shares) // 2
    wider = [*shares[:middle], *([shares[middle]] * (num - len(shares))), *shares[middle:]]
    total = math.fsum(wider)
    return tuple(share / total for share in wider)
