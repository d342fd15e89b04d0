"""Moves and swaps between the micro-batches of one pipeline, all of a step judged at once.

Every step tries each sequence in each other micro-batch, each pair of sequences exchanged and each
pair of micro-batches exchanged in the order, by the exact 1F1B time, and takes the best.
"""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.cost_model.pipeline import FORWARD_SHARE
from megatron.hydraulis.planner.packing import SchemeCost

__all__ = ["Effort", "pipeline_times_ms", "polish"]

_LEAST_IMPROVEMENT = 1e-7
# Longest sequences of a replica that are exchanged with one another.
_MAX_SWAPPED = 32
# Numbers of micro-batches whose pairs are kept.
_MAX_CACHED = 256
# Of setting up one step, in the unit of Effort.
_STEP_EFFORT = 4e4

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Effort:
    """A budget of work, which unlike time is the same on every machine.

    The unit is a step of a pipeline's recurrence: about 10 ns where many are made at once.
    """

    def __init__(self, budget: float) -> None:
        self._left = budget

    def spend(self, amount: float) -> None:
        """Take from the budget; a negative amount adds to it."""
        self._left -= amount

    @property
    def is_spent(self) -> bool:
        """Whether nothing is left."""
        return self._left <= 0.0


def pipeline_times_ms(
    times_ms: FloatArray, num_stages: int, *, forward_share: float = FORWARD_SHARE
) -> FloatArray:
    """cost_model.pipeline_time_ms of many replicas at once.

    times_ms: shape (num_replicas, num_micro_batches). Returns shape (num_replicas,).
    """
    num_micro_batches = times_ms.shape[1]
    # Micro-batches first: a row is then contiguous.
    forward_ms = np.ascontiguousarray((times_ms * forward_share).T)
    backward_ms = np.ascontiguousarray(times_ms.T) - forward_ms
    zero = np.zeros(times_ms.shape[0])
    free_ms = [zero] * num_stages
    backward_end_ms = [zero] * (num_stages + 1)
    for round_ in range(num_micro_batches + num_stages):
        forward_end_ms = zero
        for stage in range(num_stages):
            done_ms = free_ms[stage]
            finished = round_ - num_stages + stage
            if 0 <= finished < num_micro_batches:
                done_ms = np.maximum(done_ms, backward_end_ms[stage + 1]) + backward_ms[finished]
                backward_end_ms[stage] = done_ms
            if round_ < num_micro_batches:
                done_ms = np.maximum(done_ms, forward_end_ms) + forward_ms[round_]
                forward_end_ms = done_ms
            free_ms[stage] = done_ms
    return backward_end_ms[0]


def polish(
    micro_batches: Sequence[Sequence[int]],
    works_ms: FloatArray,
    lengths: IntArray,
    cost: SchemeCost,
    num_steps: int,
    *,
    target_ms: float = 0.0,
    effort: Effort,
) -> list[list[int]]:
    """The micro-batches after at most num_steps steps; none becomes empty or too large.

    works_ms, lengths: shape (num_sequences,), of the whole batch; target_ms: a time below which no
    step is needed any more.
    """
    num = len(micro_batches)
    if num == 1:
        return [list(share) for share in micro_batches]
    members = np.array([sequence for share in micro_batches for sequence in share], dtype=np.int64)
    place = np.array([k for k, share in enumerate(micro_batches) for _ in share], dtype=np.int64)
    work, tokens = works_ms[members], lengths[members]
    for _ in range(num_steps):
        loads = np.bincount(place, weights=work, minlength=num) + cost.coefficients.c_ms
        rooms = cost.max_tokens - np.bincount(place, weights=tokens, minlength=num).astype(np.int64)
        trial = _Trial(loads, rooms, work, tokens, place)
        effort.spend(_STEP_EFFORT + trial.loads.size * cost.num_stages)
        times_ms = pipeline_times_ms(trial.loads, cost.num_stages)
        best = int(np.argmin(times_ms))
        if times_ms[-1] < target_ms or times_ms[best] >= times_ms[-1] * (1.0 - _LEAST_IMPROVEMENT):
            break
        place = trial.place_after(best)
        if effort.is_spent:
            break
    return [[int(s) for s in members[place == k]] for k in range(num)]


@functools.lru_cache(maxsize=_MAX_CACHED)
def _pairs(num: int) -> tuple[IntArray, IntArray]:
    """All pairs of places, the first below the second."""
    return np.triu_indices(num, 1)


class _Trial:
    """Works of the micro-batches after every possible step; in the last row, after none."""

    def __init__(
        self,
        loads: FloatArray,
        rooms: IntArray,
        work: FloatArray,
        tokens: IntArray,
        place: IntArray,
    ) -> None:
        num = len(loads)
        counts = np.bincount(place, minlength=num)
        self._place = place
        # Moves: sequence i to micro-batch k.
        self._i, self._k = np.nonzero(
            (place[:, None] != np.arange(num)[None, :])
            & (tokens[:, None] <= rooms[None, :])
            & (counts[place] > 1)[:, None]
        )
        # Swaps: sequence x with y of a later micro-batch. Short ones can as well move.
        longest = np.argsort(-tokens, kind="stable")[:_MAX_SWAPPED]
        gain = tokens[longest][:, None] - tokens[longest][None, :]
        room = rooms[place[longest]]
        x, y = np.nonzero(
            (place[longest][:, None] < place[longest][None, :])
            & (gain <= room[None, :])
            & (-gain <= room[:, None])
            & (gain != 0)
        )
        self._x, self._y = longest[x], longest[y]
        # Exchanges: micro-batch p with q in the order.
        self._p, self._q = _pairs(num)
        self.loads = self._all_loads(loads, work)

    def _all_loads(self, loads: FloatArray, work: FloatArray) -> FloatArray:
        i, k, x, y, p, q = self._i, self._k, self._x, self._y, self._p, self._q
        place = self._place
        trial = np.empty((len(i) + len(x) + len(p) + 1, len(loads)))
        trial[:] = loads
        rows = np.arange(len(i))
        trial[rows, place[i]] -= work[i]
        trial[rows, k] += work[i]
        rows = len(i) + np.arange(len(x))
        trial[rows, place[x]] += work[y] - work[x]
        trial[rows, place[y]] += work[x] - work[y]
        rows = len(i) + len(x) + np.arange(len(p))
        trial[rows, p], trial[rows, q] = loads[q], loads[p]
        return trial

    def place_after(self, row: int) -> IntArray:
        """Where the sequences are after the step of a row."""
        after = self._place.copy()
        num_moves, num_swaps = len(self._i), len(self._x)
        if row < num_moves:
            after[self._i[row]] = self._k[row]
        elif row < num_moves + num_swaps:
            one, other = self._x[row - num_moves], self._y[row - num_moves]
            after[one], after[other] = after[other], after[one]
        else:
            one, other = (side[row - num_moves - num_swaps] for side in (self._p, self._q))
            after[self._place == one], after[self._place == other] = other, one
        return after
