"""Moves and swaps between replicas, judged by the true replica time.

The slowest replica gives a sequence to another one, or exchanges one with it, as long as the
slower of the two ends up faster than the slowest was. All moves and swaps with a partner are
estimated at once; the most promising ones are packed, and the exact time decides.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.polish import Effort
from megatron.hydraulis.planner.replica_packing import Packed, ReplicaPacker

__all__ = ["Assignment", "improve"]

# An improvement smaller than this share of the time is none: rounding errors must not loop.
_LEAST_IMPROVEMENT = 1e-7
# Partners asked per class: those with the least to do.
_NUM_PARTNERS_PER_CLASS = 6
# Moves and swaps packed before the slowest replica is declared stuck, per partner and in all.
_NUM_TRIED_PER_PARTNER = 3
_NUM_TRIED = 5
# Of estimating the moves and swaps with one partner, in the unit of Effort.
_PARTNER_EFFORT = 3e4
# Improvements inside a pipeline, for a candidate and for the slowest replica.
_NUM_POLISH_STEPS = 12
_NUM_THOROUGH_POLISH_STEPS = 40


@dataclass(slots=True)
class _Share:
    """What a replica holds."""

    sequences: list[int]
    """By falling length."""
    num_tokens: int
    work_ms: float
    packed: Packed
    is_polished: bool = False


class Assignment:
    """Sequences on replicas, packed; changed by moves and swaps.

    packers: shape (num_replicas,), the same object for replicas of one class; effort: what moves,
    swaps and packings may take in all.
    """

    def __init__(
        self,
        packers: Sequence[ReplicaPacker],
        shares: Sequence[Sequence[int]],
        effort: Effort,
    ) -> None:
        self._packers = packers
        self.effort = effort
        self._lengths = np.array(packers[0].lengths, dtype=np.int64)
        self._works_ms = {packer: np.array(packer.works_ms) for packer in packers}
        self._shares = [
            self._packed_share(packer, sorted(share, key=self._longest_first))
            for packer, share in zip(packers, shares, strict=True)
        ]

    @property
    def times_ms(self) -> list[float]:
        """Exact time of every replica."""
        return [share.packed.time_ms for share in self._shares]

    @property
    def makespan_ms(self) -> float:
        """Time of the slowest replica."""
        return max(self.times_ms)

    @property
    def packed(self) -> list[Packed]:
        """The micro-batches of every replica."""
        return [share.packed for share in self._shares]

    @property
    def shares(self) -> list[list[int]]:
        """The sequences of every replica, by falling length."""
        return [list(share.sequences) for share in self._shares]

    def replace_packing(self, replica: int, packed: Packed) -> None:
        """Take another packing of the same sequences."""
        self._shares[replica].packed = packed

    def step(self) -> bool:
        """Make the slowest replica faster by one move or swap; False when none is found."""
        times_ms = self.times_ms
        slowest = max(range(len(times_ms)), key=lambda replica: (times_ms[replica], -replica))
        if times_ms[slowest] == 0.0:
            return False
        limit_ms = times_ms[slowest] * (1.0 - _LEAST_IMPROVEMENT)
        candidates: list[tuple[float, float, int, int, int]] = []
        for partner in self._partners(slowest, times_ms):
            candidates += self._candidates(slowest, partner, limit_ms)
        candidates.sort()
        return any(
            self._try(slowest, partner, given, taken, limit_ms)
            for _, _, partner, given, taken in candidates[:_NUM_TRIED]
        )

    def _longest_first(self, sequence: int) -> tuple[int, int]:
        return -int(self._lengths[sequence]), sequence

    def _packed_share(self, packer: ReplicaPacker, sequences: list[int]) -> _Share:
        return _Share(
            sequences,
            sum(packer.lengths[sequence] for sequence in sequences),
            sum(packer.works_ms[sequence] for sequence in sequences),
            packer.pack(sequences, self.effort),
        )

    def _packed_below(
        self, replica: int, gone: int | None, come: int | None, limit_ms: float
    ) -> _Share | None:
        """A replica's share after an exchange, packed in less than a time; None if that fails."""
        packer, before = self._packers[replica], self._shares[replica]
        sequences = [sequence for sequence in before.sequences if sequence != gone]
        if come is not None:
            insort(sequences, come, key=self._longest_first)
        share = _Share(
            sequences,
            sum(packer.lengths[sequence] for sequence in sequences),
            sum(packer.works_ms[sequence] for sequence in sequences),
            packer.pack(sequences, self.effort),
        )
        # First a new packing, then the one before with the exchange: as it is, then polished.
        for is_new in (True, False):
            if not is_new:
                share.packed = packer.exchanged(before.packed, gone, come)
                if not share.packed.micro_batches:
                    continue
            for num_steps in (0, _NUM_POLISH_STEPS):
                share.packed = packer.polish(
                    share.packed, num_steps, self.effort, target_ms=limit_ms
                )
                if share.packed.time_ms < limit_ms:
                    return share
        return None

    def polish_slowest(self) -> bool:
        """Pack the slowest replica thoroughly, once; whether that made it faster."""
        times_ms = self.times_ms
        slowest = max(range(len(times_ms)), key=lambda replica: (times_ms[replica], -replica))
        share = self._shares[slowest]
        if share.is_polished or times_ms[slowest] == 0.0:
            return False
        polished = self._packers[slowest].pack_thoroughly(
            share.sequences, _NUM_THOROUGH_POLISH_STEPS, self.effort
        )
        is_faster = polished.time_ms < share.packed.time_ms * (1.0 - _LEAST_IMPROVEMENT)
        share.is_polished = True
        if is_faster:
            share.packed = polished
        return is_faster

    def _partners(self, slowest: int, times_ms: Sequence[float]) -> list[int]:
        by_class: dict[ReplicaPacker, list[int]] = {}
        for replica, packer in enumerate(self._packers):
            if replica != slowest:
                by_class.setdefault(packer, []).append(replica)
        partners: list[int] = []
        for replicas in by_class.values():
            replicas.sort(key=lambda replica: (times_ms[replica], replica))
            partners += replicas[:_NUM_PARTNERS_PER_CLASS]
        return partners

    def _candidates(
        self, slowest: int, partner: int, limit_ms: float
    ) -> list[tuple[float, float, int, int, int]]:
        """The best moves and swaps by estimate.

        As (time of the slower, sum of both, partner, place given, place taken); -1 takes nothing.
        """
        giver, taker = self._packers[slowest], self._packers[partner]
        mine, theirs = self._shares[slowest], self._shares[partner]
        self.effort.spend(_PARTNER_EFFORT)
        given = np.array(mine.sequences, dtype=np.int64)
        taken = np.array(theirs.sequences, dtype=np.int64)
        given_tokens = self._lengths[given][:, None]
        # The last column is a move: nothing comes back.
        taken_tokens = np.append(self._lengths[taken], 0)[None, :]
        giver_works, taker_works = self._works_ms[giver], self._works_ms[taker]
        mine_ms = giver.estimates_ms(
            mine.work_ms
            - giver_works[given][:, None]
            + np.append(giver_works[taken], 0.0)[None, :],
            mine.num_tokens - given_tokens + taken_tokens,
            np.maximum(
                _longest_of_others(giver_works[given])[:, None],
                np.append(giver_works[taken], 0.0)[None, :],
            ),
        )
        theirs_ms = taker.estimates_ms(
            theirs.work_ms
            + taker_works[given][:, None]
            - np.append(taker_works[taken], 0.0)[None, :],
            theirs.num_tokens + given_tokens - taken_tokens,
            np.maximum(
                taker_works[given][:, None],
                np.append(
                    _longest_of_others(taker_works[taken]),
                    taker_works[taken[0]] if len(taken) else 0.0,
                )[None, :],
            ),
        )
        slower_ms = np.maximum(mine_ms, theirs_ms)
        fits = (given_tokens <= taker.cost.longest) & (taken_tokens <= giver.cost.longest)
        slower_ms = np.where(fits, slower_ms, np.inf)
        flat = slower_ms.ravel()
        num = min(_NUM_TRIED_PER_PARTNER, flat.size)
        # argpartition would leave the order of ties open.
        best = np.argsort(flat, kind="stable")[:num]
        found = []
        for place in best:
            if flat[place] >= limit_ms:
                break
            row, column = divmod(int(place), slower_ms.shape[1])
            both_ms = float(mine_ms[row, column] + theirs_ms[row, column])
            back = column if column < len(taken) else -1
            found.append((float(flat[place]), both_ms, partner, row, back))
        return found

    def _try(self, slowest: int, partner: int, given: int, taken: int, limit_ms: float) -> bool:
        moved = self._shares[slowest].sequences[given]
        back = None if taken < 0 else self._shares[partner].sequences[taken]
        new_theirs = self._packed_below(partner, back, moved, limit_ms)
        if new_theirs is None:
            return False
        new_mine = self._packed_below(slowest, moved, back, limit_ms)
        if new_mine is None:
            return False
        self._shares[slowest], self._shares[partner] = new_mine, new_theirs
        return True


def improve(
    assignment: Assignment,
    target_ms: float,
    num_steps: int,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> int:
    """Moves and swaps until the makespan is at most target_ms, num_steps are done or none helps.

    is_over: asked before every step whether to stop. Returns the number of steps made.
    """
    for step in range(num_steps):
        if assignment.makespan_ms <= target_ms:
            return step
        if (
            assignment.effort.is_spent
            or is_over()
            or not (assignment.step() or assignment.polish_slowest())
        ):
            return step
    return num_steps


def _longest_of_others(works_ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each sequence of a share by falling length, the work of the longest other one."""
    others = np.full(works_ms.shape, works_ms[0] if len(works_ms) else 0.0)
    if len(works_ms):
        others[0] = works_ms[1] if len(works_ms) > 1 else 0.0
    return others
