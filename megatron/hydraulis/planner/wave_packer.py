"""Packing into waves, for replicas whose width is grouped anew for every micro-batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.planner.packing import Packing, SchemeCost
from megatron.hydraulis.planner.polish import Effort
from megatron.hydraulis.planner.replica_packing import Packed, ReplicaPacker
from megatron.hydraulis.planner.replica_plan import ContextGroup, MicroBatch
from megatron.hydraulis.planner.solver import Solver
from megatron.hydraulis.planner.wave_bounds import wave_bound_ms
from megatron.hydraulis.planner.wave_costs import WaveCosts
from megatron.hydraulis.planner.wave_fill import LengthTable, Wave
from megatron.hydraulis.planner.wave_search import WaveSearch, wave_order

__all__ = ["PackedWaves", "WavePacker", "pack_waves", "packer_for"]

# Of packing one share without a solver.
_GREEDY_EFFORT = 2e7


@dataclass(frozen=True, slots=True)
class PackedWaves(Packed):
    """Packed, and the groups of every micro-batch."""

    groups: tuple[tuple[ContextGroup, ...], ...] = ()


class WavePacker(ReplicaPacker):
    """Packs shares of one batch into waves, for replicas of one cost."""

    def __init__(self, cost: SchemeCost, lengths: Sequence[int], solver: Solver) -> None:
        """lengths: shape (num_sequences,), the whole batch; ValueError for a cost without waves."""
        super().__init__(cost, lengths, solver)
        if cost.waves is None:
            raise ValueError("waves need a scheme that splits its cp ranks")
        self._waves = cost.waves
        self._table = LengthTable(cost.waves, lengths)
        self._search = WaveSearch(self._table)

    def pack(self, sequences: Sequence[int], effort: Effort) -> Packed:
        """The best of several packings; an infinite time where a sequence does not fit."""
        return self._packed(sequences, effort, is_thorough=False)

    def pack_thoroughly(self, sequences: Sequence[int], num_steps: int, effort: Effort) -> Packed:
        """Pairs of waves are divided anew besides."""
        return self._packed(sequences, effort, is_thorough=True)

    def exchanged(self, packed: Packed, gone: int | None, come: int | None) -> Packed:
        """Empty: packing anew is as quick."""
        return Packed((), 0.0)

    def polish(
        self, packed: Packed, num_steps: int, effort: Effort, *, target_ms: float = 0.0
    ) -> Packed:
        """Nothing is left to polish."""
        return packed

    def packed(self, micro_batches: Sequence[Sequence[int]]) -> Packed:
        """One wave a micro-batch, in this order; an infinite time where one cannot be."""
        effort = Effort(inf)
        waves = []
        for share in micro_batches:
            counts = self._counts(share)
            wave = None if counts is None else self._search.shortest(counts, effort)
            if wave is None:
                return Packed(tuple(map(tuple, micro_batches)), inf)
            waves.append((wave, share))
        return _finished(self._waves, self._table, waves, self.lengths, keeps_order=True)

    def to_packing(self, packed: Packed) -> Packing:
        """The waves with their lengths, as a plan has them."""
        if not isinstance(packed, PackedWaves):
            return super().to_packing(packed)
        return Packing(
            tuple(
                MicroBatch(share, tuple(self.lengths[sequence] for sequence in share), groups)
                for share, groups in zip(packed.micro_batches, packed.groups, strict=True)
            ),
            packed.time_ms,
        )

    def bound_ms(self, sequences: Sequence[int], found_ms: float, *, with_integers: bool) -> float:
        """A time that no waves of these sequences are below; found_ms: what some take.

        with_integers: see wave_bound_ms.
        """
        lengths = [self.lengths[sequence] for sequence in sequences]
        return wave_bound_ms(
            self._waves, lengths, found_ms, self._solver, with_integers=with_integers
        )

    def _packed(self, sequences: Sequence[int], effort: Effort, *, is_thorough: bool) -> Packed:
        if not sequences:
            return Packed((), 0.0)
        counts = self._counts(sequences)
        if counts is None:
            return Packed((tuple(sequences),), inf)
        search = self._search.thorough if is_thorough else self._search.first
        waves = search(counts, effort)
        dealt = _dealt(self._table, waves, sequences, self.lengths)
        return _finished(self._waves, self._table, dealt, self.lengths, keeps_order=False)

    def _counts(self, sequences: Sequence[int]) -> list[int] | None:
        """By length; None where a sequence fits no group."""
        lengths = [self.lengths[sequence] for sequence in sequences]
        if max(lengths) > self._waves.longest:
            return None
        return self._table.counts(lengths)


def packer_for(cost: SchemeCost, lengths: Sequence[int], solver: Solver) -> ReplicaPacker:
    """The packer of a scheme."""
    return (ReplicaPacker if cost.waves is None else WavePacker)(cost, lengths, solver)


def pack_waves(sequences: Sequence[int], lengths: Sequence[int], cost: SchemeCost) -> Packing:
    """Pack the sequences of one replica into waves without a solver.

    sequences: indices into lengths, each of which some group holds.
    """
    if not sequences or cost.waves is None:
        return Packing((), 0.0)
    table = LengthTable(cost.waves, [lengths[sequence] for sequence in sequences])
    counts = table.counts([lengths[sequence] for sequence in sequences])
    waves = WaveSearch(table).thorough(counts, Effort(_GREEDY_EFFORT))
    packed = _finished(
        cost.waves, table, _dealt(table, waves, sequences, lengths), lengths, keeps_order=False
    )
    return Packing(
        tuple(
            MicroBatch(share, tuple(lengths[sequence] for sequence in share), groups)
            for share, groups in zip(packed.micro_batches, packed.groups, strict=True)
        ),
        packed.time_ms,
    )


def _dealt(
    table: LengthTable, waves: Sequence[Wave], sequences: Sequence[int], lengths: Sequence[int]
) -> list[tuple[Wave, list[int]]]:
    """Real sequences for each wave: equal lengths are alike, lower indices go first."""
    by_place: dict[int, list[int]] = {}
    for sequence in sorted(sequences, reverse=True):
        by_place.setdefault(table.place[lengths[sequence]], []).append(sequence)
    dealt = []
    for wave in waves:
        share = [
            by_place[place].pop()
            for group in wave.groups
            for place, num in group.counts.items()
            for _ in range(num)
        ]
        dealt.append((wave, share))
    return dealt


def _finished(
    costs: WaveCosts,
    table: LengthTable,
    dealt: Sequence[tuple[Wave, Sequence[int]]],
    lengths: Sequence[int],
    *,
    keeps_order: bool,
) -> PackedWaves:
    """Waves with real sequences in groups side by side, the widest first, and their exact time."""
    micro_batches: list[tuple[int, ...]] = []
    all_groups: list[tuple[ContextGroup, ...]] = []
    times_ms: list[float] = []
    for wave, share in dealt:
        by_place: dict[int, list[int]] = {}
        for sequence in sorted(share, reverse=True):
            by_place.setdefault(table.place[lengths[sequence]], []).append(sequence)
        members: list[tuple[int, list[int]]] = []
        for group in wave.groups:
            of_group = [
                by_place[place].pop() for place, num in group.counts.items() for _ in range(num)
            ]
            members.append((1 << group.size_index, sorted(of_group)))
        members.sort(key=lambda member: (-member[0], not member[1], member[1]))
        offset = 0
        groups = []
        for size, of_group in members:
            groups.append(ContextGroup(offset, size, len(of_group)))
            offset += size
        micro_batches.append(tuple(s for _, of_group in members for s in of_group))
        all_groups.append(() if len(groups) == 1 else tuple(groups))
        times_ms.append(
            costs.wave_time_ms((size, [lengths[s] for s in share]) for size, share in members)
        )
    order = list(range(len(times_ms)))
    if not keeps_order:
        order = wave_order(times_ms, costs.num_stages)
    return PackedWaves(
        micro_batches=tuple(micro_batches[i] for i in order),
        time_ms=pipeline_time_ms([times_ms[i] for i in order], costs.num_stages),
        groups=tuple(all_groups[i] for i in order),
    )
