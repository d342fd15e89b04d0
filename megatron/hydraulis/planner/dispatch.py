"""Dispatch: the sequences of a batch to the replicas of a strategy, longest first.

Replicas of one scheme are a class. Each sequence goes to the replica that would finish it first,
by an estimate of the replica's time; in a class only the replica with the least load is asked, so
the effort grows with classes, not with replicas.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.planner.packing import SchemeCost, useful_num_micro_batches

__all__ = ["dispatch"]


@dataclass(slots=True)
class _Load:
    """What a replica has been given so far."""

    work_ms: float = 0.0
    num_tokens: int = 0
    num_sequences: int = 0
    longest_ms: float = 0.0
    """Work of the longest sequence: no micro-batch of it is shorter."""

    def with_sequence(self, length: int, time_ms: float) -> "_Load":
        return _Load(
            self.work_ms + time_ms,
            self.num_tokens + length,
            self.num_sequences + 1,
            max(self.longest_ms, time_ms),
        )

    def estimated_time_ms(self, cost: SchemeCost) -> float:
        """``W + v·c + (pp-1)·(t + c)`` with a good v, t being the work of its largest micro-batch
        if the others share out evenly."""
        num_fewest = -(-self.num_tokens // cost.max_tokens)
        c_ms = cost.coefficients.c_ms
        if cost.num_stages == 1:
            return self.work_ms + num_fewest * c_ms
        num_useful = min(self.num_sequences, useful_num_micro_batches(self.work_ms, cost))
        num_micro_batches = max(num_fewest, math.floor(num_useful), 1)
        largest_ms = max(self.longest_ms, self.work_ms / num_micro_batches)
        fill_ms = (cost.num_stages - 1) * (largest_ms + c_ms)
        return self.work_ms + num_micro_batches * c_ms + fill_ms


class _Class:
    """The replicas of one scheme, the least loaded at hand."""

    def __init__(self, cost: SchemeCost, replicas: Sequence[int]) -> None:
        self.cost = cost
        self._loads = {replica: _Load() for replica in replicas}
        # (estimated time in ms, replica), a heap.
        self._times = [(0.0, replica) for replica in replicas]

    def offer_ms(self, length: int) -> float:
        """Estimated time of the least loaded replica with one more sequence."""
        return self._grown(length).estimated_time_ms(self.cost)

    def take(self, length: int) -> int:
        """Give the sequence to the least loaded replica, which is returned."""
        replica = self._times[0][1]
        grown = self._grown(length)
        self._loads[replica] = grown
        heapq.heapreplace(self._times, (grown.estimated_time_ms(self.cost), replica))
        return replica

    def _grown(self, length: int) -> _Load:
        time_ms = self.cost.sequence_time_ms(length)
        return self._loads[self._times[0][1]].with_sequence(length, time_ms)


def dispatch(
    sequences: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[SchemeCost],
) -> list[list[int]]:
    """Share out sequences over replicas.

    sequences: indices into lengths, by falling length; costs: shape (num_replicas,), equal for
    replicas of one scheme. Returns each replica's sequences, in the given order.

    Raises ValueError when a sequence fits no replica: the caller has sorted such strategies out.
    """
    members: dict[SchemeCost, list[int]] = {}
    for replica, cost in enumerate(costs):
        members.setdefault(cost, []).append(replica)
    classes = [_Class(cost, replicas) for cost, replicas in members.items()]
    shares: list[list[int]] = [[] for _ in costs]
    for sequence in sequences:
        length = lengths[sequence]
        able = [class_ for class_ in classes if length <= class_.cost.longest]
        if not able:
            raise ValueError(f"sequence {sequence} of {length} tokens fits no replica")
        best = able[0] if len(able) == 1 else min(able, key=lambda c: c.offer_ms(length))
        shares[best.take(length)].append(sequence)
    return shares
