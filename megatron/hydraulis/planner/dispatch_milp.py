"""Dispatch as an integer program over counts per bucket, class and mode.

For a time between bound and best plan the program of relaxation.py is solved in whole sequences
and whole replicas, from the dispatch in hand. Tokens left over at its bound prove that no plan is
that fast. An answer that leaves none over is a dispatch to classes; the real sequences, longer
than they were rounded to, are put back and improved elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.class_dispatch import put_back
from megatron.hydraulis.planner.relaxation import Program, Relaxation
from megatron.hydraulis.planner.replica_packing import Packed, ReplicaPacker
from megatron.hydraulis.planner.solver import SolverLimits

__all__ = ["IntegerAnswer", "solve_dispatch"]

_LIMITS = SolverLimits(num_nodes=100, relative_gap=1e-3)


@dataclass(frozen=True, slots=True)
class IntegerAnswer:
    """What the program said of a time."""

    is_impossible: bool
    shares: list[list[int]] | None
    """Each replica's sequences, longest first; None without an answer."""


def solve_dispatch(
    relaxation: Relaxation,
    time_ms: float,
    lengths: Sequence[int],
    packers: Sequence[ReplicaPacker],
    packed: Sequence[Packed],
) -> IntegerAnswer:
    """Solve the integer program of a time, from a dispatch in hand.

    lengths: shape (num_sequences,), the batch; packers, packed: shape (num_replicas,).
    """
    program = relaxation.program(time_ms, is_integral=True)
    if program is None:
        return IntegerAnswer(True, None)
    start = _start(relaxation, program, lengths, packers, packed)
    solution = relaxation.solver.solve(program.model, _LIMITS, start=start)
    if relaxation.leaves_tokens(solution.bound):
        return IntegerAnswer(True, None)
    if not solution.is_usable or solution.values is None:
        return IntegerAnswer(False, None)
    low = np.array([bucket.low for bucket in relaxation.buckets], dtype=np.float64)
    owed_tokens = program.spread(solution.values) * low[:, None]
    shares = put_back(relaxation, program, owed_tokens, lengths, packers)
    return IntegerAnswer(False, shares)


def _start(
    relaxation: Relaxation,
    program: Program,
    lengths: Sequence[int],
    packers: Sequence[ReplicaPacker],
    packed: Sequence[Packed],
) -> NDArray[np.float64]:
    """The dispatch in hand as an answer: what does not fit the time is left over.

    Each replica takes the mode of its number of micro-batches, or the next larger one, and gives
    back its longest sequences until the rest fits.
    """
    num_buckets, num_modes = program.num_buckets, len(program.modes)
    lows = np.array([bucket.low for bucket in relaxation.buckets])
    spread = np.zeros((num_buckets, num_modes))
    num_replicas = np.zeros(num_modes)
    for index, replica_class in enumerate(relaxation.classes):
        for replica in replica_class.replicas:
            modes = [m for m, mode in enumerate(program.modes) if mode.replica_class == index]
            wanted = len(packed[replica].micro_batches)
            roomy = [m for m in modes if program.modes[m].num_micro_batches >= wanted]
            if not modes:
                continue
            column = (roomy or modes[-1:])[0]
            mode = program.modes[column]
            num_replicas[column] += 1.0
            work_ms, num_tokens = mode.work_ms, mode.num_tokens
            sequences = sorted(
                (s for share in packed[replica].micro_batches for s in share),
                key=lambda s: (lengths[s], s),
            )
            for sequence in sequences:
                bucket = int(np.searchsorted(lows, lengths[sequence], side="right")) - 1
                low = int(lows[bucket])
                work_ms -= packers[replica].cost.sequence_time_ms(low)
                num_tokens -= low
                if work_ms < 0.0 or num_tokens < 0:
                    break
                spread[bucket, column] += 1.0
    left_over = [
        bucket.num_sequences - float(spread[place].sum())
        for place, bucket in enumerate(relaxation.buckets)
    ]
    return np.concatenate((spread.ravel(), num_replicas, left_over))
