"""Dispatch: improvement by moves and swaps, and starting points from the programs' answers.

The slowest replica gives a sequence to another one, or swaps one with it, as long as the slower of
the two becomes faster than the slowest was. All moves and swaps with a partner are estimated at
once; the most promising ones are packed, and the exact time decides.

The program of a time (relaxation.py, long_sequences.py) says how much of each bucket each class
should get. Sequences are assigned longest first, each to the class with the largest balance; in a
class each goes to the replica with the least work.
"""

import heapq
import itertools
import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.greedy import longest_first
from megatron.hydraulis.planner.long_sequences import LongSequences
from megatron.hydraulis.planner.pipeline_packing import Effort, ReplicaPacker
from megatron.hydraulis.planner.plan import Packing
from megatron.hydraulis.planner.relaxation import Relaxation

# Smaller improvements, as a share of the time, do not count: rounding errors must not loop.
_LEAST_IMPROVEMENT = 1e-7
# Number of partners per class: the fastest replicas.
_NUM_PARTNERS_PER_CLASS = 6
# Number of moves and swaps that are packed, per partner and in all, before the search gives up.
_NUM_TRIED_PER_PARTNER = 3
_NUM_TRIED = 5
# Number of sequences of a replica that are candidates for a move or swap.
_NUM_OFFERED = 64
# Cost of estimating the moves and swaps with one partner, in the unit of Effort.
_PARTNER_EFFORT = 3e4
# Number of improvements inside a pipeline, for a candidate and for the slowest replica.
_NUM_PIPELINE_STEPS = 12
_NUM_THOROUGH_STEPS = 40


@dataclass(slots=True)
class _Share:
    """Sequences of a replica and their packing."""

    sequences: list[int]
    """Its sequences by falling length."""
    num_tokens: int
    works_ms: list[float]
    """In each view of the cost."""
    packed: Packing
    is_repacked: bool = False
    slowness: float | None = None
    """See Assignment._slowness; None if the packing has changed since."""


class Assignment:
    """A dispatch with its packings, changed by moves and swaps.

    packers: shape (num_replicas,), the same object for replicas of one class; effort: budget of
    all moves, swaps and packings; is_quick: pack only so well that the makespan is the same.
    """

    def __init__(
        self,
        packers: Sequence[ReplicaPacker],
        shares: Sequence[Sequence[int]],
        effort: Effort,
        *,
        is_quick: bool = False,
    ) -> None:
        self._packers = packers
        self.effort = effort
        self._lengths = packers[0].lengths_array
        self._shares: list[_Share] = [_Share([], 0, [], Packing((), 0.0)) for _ in packers]
        # Pipelines last: the others have one packing only.
        for replica in sorted(range(len(packers)), key=lambda r: packers[r].cost.num_stages):
            sequences = longest_first(packers[replica].lengths, shares[replica])
            target_ms = self.makespan_ms if is_quick else 0.0
            self._shares[replica] = self._packed_share(replica, sequences, target_ms)

    @property
    def times_ms(self) -> list[float]:
        """Exact time of every replica."""
        return [share.packed.time_ms for share in self._shares]

    @property
    def makespan_ms(self) -> float:
        """Time of the slowest replica."""
        return max(self.times_ms)

    @property
    def slowest(self) -> int:
        """The slowest replica, the first of several."""
        times_ms = self.times_ms
        return times_ms.index(max(times_ms))

    @property
    def packed(self) -> list[Packing]:
        """The micro-batches of every replica."""
        return [share.packed for share in self._shares]

    @property
    def shares(self) -> list[list[int]]:
        """The sequences of every replica, by falling length."""
        return [list(share.sequences) for share in self._shares]

    def take_packing(self, replica: int, packed: Packing) -> None:
        """Take another packing of the same sequences if it is faster."""
        share = self._shares[replica]
        share.packed = min(share.packed, packed, key=lambda each: each.time_ms)
        share.slowness = None

    def step(self) -> bool:
        """Make the slowest replica faster by one move or swap; False if none is found.

        Estimates are first corrected by what the packings so far take, then not if there are
        pipelines: their packings may become better.
        """
        slowest = self.slowest
        limit_ms = self._shares[slowest].packed.time_ms * (1.0 - _LEAST_IMPROVEMENT)
        if limit_ms == 0.0:
            return False
        has_pipelines = any(packer.cost.num_stages > 1 for packer in self._packers)
        return any(
            self._try(slowest, partner, moved, taken, limit_ms)
            for is_corrected in ((True, False) if has_pipelines else (True,))
            for _, _, partner, moved, taken in self._best_candidates(
                slowest, limit_ms, is_corrected=is_corrected
            )
        )

    def _best_candidates(
        self, slowest: int, limit_ms: float, *, is_corrected: bool
    ) -> list[tuple[float, float, int, int, int]]:
        given = self._offered(self._shares[slowest])
        candidates = itertools.chain.from_iterable(
            self._candidates(slowest, given, partner, limit_ms, is_corrected=is_corrected)
            for partner in self._partners(slowest)
        )
        return sorted(candidates)[:_NUM_TRIED]

    def _packed_share(self, replica: int, sequences: list[int], target_ms: float = 0.0) -> _Share:
        packer = self._packers[replica]
        return _Share(
            sequences,
            sum(map(packer.lengths.__getitem__, sequences)),
            [sum(map(view.works_ms.__getitem__, sequences)) for view in packer.views],
            packer.pack(sequences, self.effort, target_ms=target_ms),
        )

    def _packed_below(
        self, replica: int, gone: int | None, come: int | None, limit_ms: float
    ) -> _Share | None:
        """A replica's share after an exchange, if it can be packed in less than a time."""
        packer, before = self._packers[replica], self._shares[replica]
        sequences = [sequence for sequence in before.sequences if sequence != gone]
        if come is not None:
            insort(sequences, come, key=lambda s: (-packer.lengths[s], s))
        share = self._packed_share(replica, sequences)
        # First a new packing, then the old one with the exchange: each as it is, then improved.
        for is_new in (True, False):
            if not is_new:
                share.packed = packer.exchanged(before.packed, gone, come)
                if not share.packed.micro_batches:
                    continue
            if share.packed.time_ms >= limit_ms:
                share.packed = packer.improve(
                    share.packed, _NUM_PIPELINE_STEPS, self.effort, target_ms=limit_ms
                )
            if share.packed.time_ms < limit_ms:
                return share
        return None

    def repack_slowest(self) -> bool:
        """Pack the slowest replica thoroughly, once; returns whether that made it faster."""
        return self._repack(self.slowest)

    def repack_partner(self) -> bool:
        """Pack one more replica thoroughly, so that it can take more; False if none is faster."""
        replicas = [r for r, each in enumerate(self._packers) if not each.cost.only_number_counts]
        replicas.sort(key=self._slowness, reverse=True)
        return any(self._repack(replica) for replica in replicas)

    def _repack(self, replica: int) -> bool:
        share = self._shares[replica]
        if share.is_repacked or share.packed.time_ms == 0.0:
            return False
        repacked = self._packers[replica].pack_thoroughly(
            share.sequences, _NUM_THOROUGH_STEPS, self.effort
        )
        is_faster = repacked.time_ms < share.packed.time_ms * (1.0 - _LEAST_IMPROVEMENT)
        share.is_repacked = True
        if is_faster:
            share.packed = repacked
            share.slowness = None
        return is_faster

    def _partners(self, slowest: int) -> list[int]:
        times_ms = self.times_ms
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
        self,
        slowest: int,
        given: NDArray[np.int64],
        partner: int,
        limit_ms: float,
        *,
        is_corrected: bool,
    ) -> list[tuple[float, float, int, int, int]]:
        """The best moves and swaps of the given sequences by estimate, corrected or not.

        As (time of the slower, sum of both, partner, sequence given, sequence taken); -1 takes
        nothing.
        """
        giver, taker = self._packers[slowest], self._packers[partner]
        mine, theirs = self._shares[slowest], self._shares[partner]
        self.effort.spend(_PARTNER_EFFORT)
        # The last column is a move: nothing is taken.
        taken = np.append(self._offered(theirs), -1)
        given_tokens, taken_tokens = self._lengths[given][:, None], self._lengths[taken]
        mine_ms = giver.estimates_ms(
            [
                (
                    work_ms - of[given][:, None] + of[taken],
                    np.maximum(_longest_of_others(mine, given, of)[:, None], of[taken]),
                )
                for work_ms, of in zip(mine.works_ms, giver.work_arrays_ms, strict=True)
            ],
            mine.num_tokens - given_tokens + taken_tokens,
            len(mine.packed.micro_batches),
        )
        theirs_ms = taker.estimates_ms(
            [
                (
                    work_ms + of[given][:, None] - of[taken],
                    np.maximum(of[given][:, None], _longest_of_others(theirs, taken, of)),
                )
                for work_ms, of in zip(theirs.works_ms, taker.work_arrays_ms, strict=True)
            ],
            theirs.num_tokens + given_tokens - taken_tokens,
            len(theirs.packed.micro_batches),
        )
        if is_corrected:
            mine_ms *= self._slowness(slowest)
            theirs_ms *= self._slowness(partner)
        slower_ms = np.maximum(mine_ms, theirs_ms)
        fits = (given_tokens <= taker.cost.longest) & (taken_tokens <= giver.cost.longest)
        rows, columns = np.nonzero(fits & (slower_ms < limit_ms))
        slower_ms = slower_ms[rows, columns]
        found = []
        # Unlike argpartition, this defines the order of ties.
        for place in np.argsort(slower_ms, kind="stable")[:_NUM_TRIED_PER_PARTNER]:
            row, column = rows[place], columns[place]
            both_ms = float(mine_ms[row, column] + theirs_ms[row, column])
            found.append(
                (float(slower_ms[place]), both_ms, partner, int(given[row]), int(taken[column]))
            )
        return found

    def _slowness(self, replica: int) -> float:
        """Ratio of a replica's time to its estimate: indivisible sequences do not fill a pipeline's
        shape, of which only the longest one is estimated as a long micro-batch, nor do they mix
        forms."""
        packer, share = self._packers[replica], self._shares[replica]
        if packer.cost.only_number_counts or not share.sequences:
            return 1.0
        if share.slowness is None:
            longest = share.sequences[0]
            estimate_ms = packer.estimates_ms(
                [
                    (np.array([work_ms]), np.array([of[longest]]))
                    for work_ms, of in zip(share.works_ms, packer.work_arrays_ms, strict=True)
                ],
                np.array([share.num_tokens]),
                len(share.packed.micro_batches),
            )
            # Without any cost nothing takes time.
            share.slowness = max(1.0, share.packed.time_ms / (float(estimate_ms[0]) or math.inf))
        return share.slowness

    def _offered(self, share: _Share) -> NDArray[np.int64]:
        """Sequences of different lengths, by falling length, to be given or taken."""
        sequences = np.array(share.sequences, dtype=np.int64)
        lengths = self._lengths[sequences]
        distinct = sequences[np.append(True, lengths[1:] != lengths[:-1])[: len(sequences)]]
        num = min(len(distinct), _NUM_OFFERED)
        offered: NDArray[np.int64] = distinct[
            np.linspace(0, len(distinct) - 1, num).round().astype(np.int64)
        ]
        return offered

    def _try(self, slowest: int, partner: int, moved: int, taken: int, limit_ms: float) -> bool:
        back = None if taken < 0 else taken
        new_theirs = self._packed_below(partner, back, moved, limit_ms)
        if new_theirs is None:
            return False
        new_mine = self._packed_below(slowest, moved, back, limit_ms)
        if new_mine is None:
            return False
        self._shares[slowest], self._shares[partner] = new_mine, new_theirs
        return True


def improve_dispatch(
    assignment: Assignment,
    target_ms: float,
    num_steps: int,
    *,
    is_over: Callable[[], bool] = lambda: False,
) -> int:
    """Moves, swaps and packings until target_ms is reached, num_steps are done or none helps.

    is_over: called before every step, stops if true. Returns the number of steps.
    """
    for step in range(num_steps):
        if (
            assignment.makespan_ms <= target_ms
            or assignment.effort.is_spent
            or is_over()
            or not (assignment.step() or assignment.repack_slowest() or assignment.repack_partner())
        ):
            return step
    return num_steps


def _longest_of_others(
    share: _Share, sequences: NDArray[np.int64], works_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The work of the longest sequence of a share other than each of some sequences."""
    first, next_one = (*share.sequences[:2], -1, -1)[:2]  # -1 is no sequence
    others: NDArray[np.float64] = np.where(sequences == first, works_ms[next_one], works_ms[first])
    return others


# ---------------------------------------------------------------- dispatch from a program


def dispatch_by_program(
    relaxation: Relaxation,
    time_ms: float,
    packers: Sequence[ReplicaPacker],
    *,
    longest_fill: float,
) -> list[list[int]] | None:
    """A dispatch from the linear program of a time; None if the solver fails.

    packers: shape (num_replicas,); longest_fill: see Relaxation.owed. Returns each replica's
    sequences, longest first.
    """
    owed_tokens = relaxation.owed(time_ms, longest_fill=longest_fill)
    if owed_tokens is None:
        return None
    lengths = packers[0].lengths
    shares: list[list[int]] = [[] for _ in packers]
    assign_owed(relaxation, owed_tokens, longest_first(lengths), lengths, packers, shares)
    return shares


def dispatch_long(
    program: LongSequences,
    time_ms: float,
    packers: Sequence[ReplicaPacker],
    shares: Sequence[Sequence[int]],
) -> list[list[int]] | None:
    """Another dispatch of the long sequences only, from their program of a time.

    packers: shape (num_replicas,); shares: a dispatch, in which all other sequences stay. None if
    the time is impossible or the solver fails.
    """
    owed_sequences = program.owed(time_ms)
    if owed_sequences is None:
        return None
    lengths = packers[0].lengths
    shortest = program.lengths[0]
    changed = [[s for s in share if lengths[s] < shortest] for share in shares]
    long = longest_first(lengths, (s for s in range(len(lengths)) if lengths[s] >= shortest))
    assign_owed(program, owed_sequences, long, [1] * len(lengths), packers, changed)
    return changed


def assign_owed(
    program: Relaxation | LongSequences,
    owed: NDArray[np.float64],
    sequences: Sequence[int],
    amounts: Sequence[int],
    packers: Sequence[ReplicaPacker],
    shares: list[list[int]],
) -> None:
    """Add sequences to the shares of the replicas that a program assigns them to.

    owed: amount of each bucket for each class, shape (num_buckets, num_classes); sequences: all of
    the program's, by falling length; amounts: of each sequence, in the unit of owed. A sequence
    goes to the class with the largest balance, possibly negative, among those that can hold it.
    """
    taken: list[list[int]] = [[] for _ in program.classes]
    balance = [0.0] * len(program.classes)
    remaining = iter(sequences)
    for bucket, of_bucket in zip(program.buckets[::-1], owed[::-1].tolist(), strict=True):
        balance = [before + more for before, more in zip(balance, of_bucket, strict=True)]
        fitting = [
            index
            for index, replica_class in enumerate(program.classes)
            if bucket.high <= replica_class.cost.longest
        ]
        for sequence in itertools.islice(remaining, bucket.num_sequences):
            index = max(fitting, key=balance.__getitem__)
            taken[index].append(sequence)
            balance[index] -= amounts[sequence]
    for replica_class, of_class in zip(program.classes, taken, strict=True):
        # Constant costs are left out: they grow in steps, and sequences would pile up below a step.
        loads = [(0.0, replica) for replica in replica_class.replicas]
        works_ms = packers[replica_class.replicas[0]].decisive(of_class).works_ms
        for sequence in of_class:
            load_ms, replica = loads[0]
            heapq.heapreplace(loads, (load_ms + works_ms[sequence], replica))
            shares[replica].append(sequence)


def without_short(
    shares: Sequence[Sequence[int]],
    replicas: Sequence[int],
    shortest: int,
    packers: Sequence[ReplicaPacker],
) -> list[list[int]]:
    """A dispatch in which these replicas hold no sequence below a length.

    Each goes, longest first, to the other replica with the least work that can hold it.
    """
    lengths = packers[0].lengths
    moved = [list(share) for share in shares]
    others = sorted(set(range(len(shares))) - set(replicas))
    views = {r: packers[r].decisive(shares[r]) for r in others}
    loads_ms = {r: view.work_ms(shares[r]) for r, view in views.items()}
    short = (s for r in replicas for s in shares[r] if lengths[s] < shortest)
    for sequence in longest_first(lengths, short):
        fitting = (r for r in others if packers[r].cost.longest >= lengths[sequence])
        taker = min(fitting, key=lambda r: (loads_ms[r], r))
        moved[taker].append(sequence)
        loads_ms[taker] += views[taker].works_ms[sequence]
    for replica in replicas:
        moved[replica] = [s for s in moved[replica] if lengths[s] >= shortest]
    return moved
