"""Dispatch from a program's answer: what goes to which class, then to which replica.

The program of a time (relaxation.py) says how much of each bucket goes to each class. Real
sequences are put back longest first, each to the class to which most is still owed; in a class
each goes to the replica that would finish it first.
"""

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.long_sequences import LongSequences
from megatron.hydraulis.planner.relaxation import Program, Relaxation
from megatron.hydraulis.planner.replica_packing import ReplicaPacker
from megatron.hydraulis.planner.solver import SolverLimits

__all__ = ["dispatch_by_program", "dispatch_long", "put_back", "without_short"]


def dispatch_by_program(
    relaxation: Relaxation,
    time_ms: float,
    lengths: Sequence[int],
    packers: Sequence[ReplicaPacker],
    *,
    longest_fill: float = math.inf,
) -> list[list[int]] | None:
    """A dispatch from the linear program of a time; None when the solver fails.

    lengths: shape (num_sequences,); packers: shape (num_replicas,); longest_fill: see
    Relaxation.program. Returns each replica's sequences, longest first.
    """
    program = relaxation.program(time_ms, longest_fill=longest_fill)
    if program is None:
        return None
    solution = relaxation.solver.solve(program.model, SolverLimits())
    if not solution.is_usable or solution.values is None:
        return None
    return put_back(relaxation, program, program.spread(solution.values), lengths, packers)


def put_back(
    relaxation: Relaxation,
    program: Program,
    owed_tokens: NDArray[np.float64],
    lengths: Sequence[int],
    packers: Sequence[ReplicaPacker],
) -> list[list[int]]:
    """Each replica's sequences, longest first, for what is owed to each mode.

    owed_tokens: shape (num_buckets, num_modes), in tokens. What no mode is owed goes to the class
    that is owed most, or least overdrawn, among those that can hold it.
    """
    limits = [c.cost.longest for c in relaxation.classes]
    by_class = np.zeros((len(relaxation.buckets), len(limits)))
    for column, mode in enumerate(program.modes):
        by_class[:, mode.replica_class] += owed_tokens[:, column]
    order = sorted(range(len(lengths)), key=lambda sequence: (-lengths[sequence], sequence))
    taken: list[list[int]] = [[] for _ in limits]
    balance = [0.0] * len(limits)
    place = 0
    for bucket in range(len(relaxation.buckets) - 1, -1, -1):
        for index in range(len(limits)):
            balance[index] += float(by_class[bucket, index])
        for sequence in order[place : place + relaxation.buckets[bucket].num_sequences]:
            able = [index for index, limit in enumerate(limits) if lengths[sequence] <= limit]
            index = max(able, key=lambda index: (balance[index], -index))
            taken[index].append(sequence)
            balance[index] -= lengths[sequence]
        place += relaxation.buckets[bucket].num_sequences
    shares: list[list[int]] = [[] for _ in packers]
    for replica_class, sequences in zip(relaxation.classes, taken, strict=True):
        _share_out(sequences, lengths, packers, replica_class.replicas, shares)
    return shares


def dispatch_long(
    program: LongSequences,
    time_ms: float,
    lengths: Sequence[int],
    packers: Sequence[ReplicaPacker],
    shares: Sequence[Sequence[int]],
) -> list[list[int]] | None:
    """Another dispatch of the long sequences only, from their program of a time.

    lengths: shape (num_sequences,); packers: shape (num_replicas,); shares: a dispatch, where all
    other sequences stay. None when the time is impossible or the solver fails.
    """
    owed = program.owed(time_ms)
    if owed is None:
        return None
    shortest = program.lengths[0]
    order = sorted(
        (s for s in range(len(lengths)) if lengths[s] >= shortest), key=lambda s: (-lengths[s], s)
    )
    taken: list[list[int]] = [[] for _ in program.classes]
    balance = [0.0] * len(program.classes)
    place = 0
    for bucket in range(len(program.buckets) - 1, -1, -1):
        for index in range(len(balance)):
            balance[index] += float(owed[bucket, index])
        for sequence in order[place : place + program.buckets[bucket].num_sequences]:
            able = [
                index
                for index, replica_class in enumerate(program.classes)
                if lengths[sequence] <= replica_class.cost.longest
            ]
            index = max(able, key=lambda index: (balance[index], -index))
            taken[index].append(sequence)
            balance[index] -= 1.0
        place += program.buckets[bucket].num_sequences
    changed = [[s for s in share if lengths[s] < shortest] for share in shares]
    for replica_class, sequences in zip(program.classes, taken, strict=True):
        _share_out(sequences, lengths, packers, replica_class.replicas, changed)
    return changed


def without_short(
    shares: Sequence[Sequence[int]],
    replicas: Sequence[int],
    shortest: int,
    lengths: Sequence[int],
    packers: Sequence[ReplicaPacker],
) -> list[list[int]]:
    """A dispatch in which these replicas hold no sequence below a length any more.

    Longest first to the other replica with the least work among those that can hold it; some can.
    """
    moved = [list(share) for share in shares]
    others = sorted(set(range(len(shares))) - set(replicas))
    loads_ms = {r: math.fsum(packers[r].works_ms[s] for s in shares[r]) for r in others}
    short = [s for r in replicas for s in shares[r] if lengths[s] < shortest]
    for sequence in sorted(short, key=lambda s: (-lengths[s], s)):
        able = (r for r in others if packers[r].cost.longest >= lengths[sequence])
        taker = min(able, key=lambda r: (loads_ms[r], r))
        moved[taker].append(sequence)
        loads_ms[taker] += packers[taker].works_ms[sequence]
    for replica in replicas:
        moved[replica] = [s for s in moved[replica] if lengths[s] >= shortest]
    return moved


def _share_out(
    sequences: Sequence[int],
    lengths: Sequence[int],
    packers: Sequence[ReplicaPacker],
    replicas: Sequence[int],
    shares: list[list[int]],
) -> None:
    """Longest first to the replica of a class with the least work.

    Work without the constant costs: these come in steps, which would pile sequences up just below
    one.
    """
    loads = [(0.0, replica) for replica in replicas]
    works_ms = packers[replicas[0]].works_ms
    for sequence in sequences:
        load_ms, replica = loads[0]
        heapq.heapreplace(loads, (load_ms + works_ms[sequence], replica))
        shares[replica].append(sequence)
