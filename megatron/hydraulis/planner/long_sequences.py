"""What the long sequences alone take: a program over the few replicas that can hold them.

Where most replicas hold short sequences only, the few others decide the time, and what a pipeline
can do with long sequences decides theirs. So the batch is cut down to the sequences above the
limit of some class, on the classes that hold them: leaving sequences out makes no plan slower, so
a time that is impossible for the rest is impossible.

For a single stage the program has modes as in relaxation.py. For a pipeline it has one mode for
each number k of **lumps**: sequences of more than half the limit, each in a micro-batch of its
own. In such a mode each lump has a position in the order, and t_1 … t_k being the lumps' works,
S_q what runs before position q, R_q what runs after it, φ the forward's share, p the stages,

    T >= Σ t + (p-1)·φ·t_q - (1-φ)·S_q + (p-1)·(1-φ)·t_r - φ·R_r     for all q <= r,

the way forward through all stages at one lump and back through all stages at another (see
lumps.py). Micro-batches without lumps only add to it. The inequalities are linear, so they hold for
the means over the replicas in a mode too, and that is what the program asks for.
"""

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.cost_model.pipeline import FORWARD_SHARE
from megatron.hydraulis.planner.buckets import make_buckets
from megatron.hydraulis.planner.dual_feasible import dual_feasible
from megatron.hydraulis.planner.modes import ReplicaClass
from megatron.hydraulis.planner.solver import LinearModel, Outcome, Solver, SolverLimits

__all__ = ["LongSequences", "long_sequences"]

FloatArray = NDArray[np.float64]

_DUAL_FEASIBLE_FUNCTIONS = (1, 2, 3, 4, 5, 6, 7, 8)
_LEFT_OVER_FRACTION = 1e-6
# Instead of no work at all, so that shares of it are finite.
_LEAST_WORK_MS = 1e-9
_ROUNDING = 1e-9
# Buckets, and sequences that are too many to be the few that decide.
_NUM_BUCKETS = 32
_MAX_SEQUENCES = 128
# Most lumps of a pipeline and most modes of a single stage: beyond, fill and rounding are small.
_MAX_LUMPS = 16
_MAX_MODES = 32


def long_sequences(
    classes: Sequence[ReplicaClass], lengths: Sequence[int], solver: Solver
) -> "list[LongSequences]":
    """The programs worth asking, one for each limit that leaves few sequences and a pipeline.

    lengths: of the batch, rising.
    """
    programs = []
    for border in sorted({c.cost.max_tokens for c in classes}):
        above = lengths[bisect_right(lengths, border) :]
        holding = [c for c in classes if c.cost.max_tokens > border]
        if 0 < len(above) <= _MAX_SEQUENCES and any(c.cost.num_stages > 1 for c in holding):
            programs.append(LongSequences(holding, above, solver))
    return programs


class _Columns:
    """A linear program under construction."""

    def __init__(self) -> None:
        self.upper: list[float] = []
        self.cost: list[float] = []
        self.rows: list[dict[int, float]] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []

    def column(self, upper: float = np.inf, cost: float = 0.0) -> int:
        self.upper.append(upper)
        self.cost.append(cost)
        return len(self.upper) - 1

    def row(self, entries: dict[int, float], lower: float, upper: float) -> None:
        self.rows.append(entries)
        self.row_lower.append(lower)
        self.row_upper.append(upper)

    def model(self) -> LinearModel:
        matrix = np.zeros((len(self.rows), len(self.upper)))
        for place, entries in enumerate(self.rows):
            matrix[place, list(entries)] = list(entries.values())
        return LinearModel(
            cost=np.array(self.cost),
            lower=np.zeros(len(self.upper)),
            upper=np.array(self.upper),
            matrix=matrix,
            row_lower=np.array(self.row_lower),
            row_upper=np.array(self.row_upper),
        )


class LongSequences:
    """The programs of a few long sequences, for any time.

    classes: those that hold them; lengths: rising, each above the limits of all other classes.
    """

    def __init__(
        self, classes: Sequence[ReplicaClass], lengths: Sequence[int], solver: Solver
    ) -> None:
        self.classes = tuple(classes)
        self.lengths = tuple(lengths)
        self.buckets = make_buckets(
            lengths,
            _NUM_BUCKETS,
            borders={b for c in classes for b in (c.cost.max_tokens, c.cost.max_tokens // 2)},
        )
        self._low = np.array([bucket.low for bucket in self.buckets], dtype=np.float64)
        self._solver = solver

    def is_impossible(self, time_ms: float) -> bool:
        """Whether it is proved that no plan takes time_ms or less; no is "not proved"."""
        model, _ = self._program(time_ms)
        solution = self._solver.solve(model, SolverLimits())
        return solution.outcome is Outcome.OPTIMAL and self._leaves_tokens(solution.bound)

    def owed(self, time_ms: float) -> FloatArray | None:
        """How many sequences of each bucket go to each class, shape (num_buckets, num_classes).

        In fractions; None when the time is impossible or the solver fails.
        """
        model, places = self._program(time_ms)
        solution = self._solver.solve(model, SolverLimits())
        if solution.values is None or not solution.is_usable:
            return None
        if self._leaves_tokens(solution.objective):
            return None
        owed = np.zeros((len(self.buckets), len(self.classes)))
        for bucket, column, index in places:
            owed[bucket, index] += solution.values[column]
        return owed

    def _leaves_tokens(self, num_tokens: float) -> bool:
        return num_tokens > _LEFT_OVER_FRACTION * sum(self.lengths)

    def _program(self, time_ms: float) -> tuple[LinearModel, list[tuple[int, int, int]]]:
        """The program, and of the columns that hold sequences: (bucket, column, class)."""
        program = _Columns()
        places: list[tuple[int, int, int]] = []
        for index, replica_class in enumerate(self.classes):
            if replica_class.cost.num_stages == 1:
                found = self._single_stage(program, replica_class, time_ms)
            else:
                found = self._pipeline(program, replica_class, time_ms)
            places += [(bucket, column, index) for bucket, column in found]
        for place, bucket in enumerate(self.buckets):
            entries = {column: 1.0 for other, column, _ in places if other == place}
            entries[program.column(cost=float(bucket.low))] = 1.0
            program.row(entries, bucket.num_sequences, bucket.num_sequences)
        return program.model(), places

    def _single_stage(
        self, program: _Columns, replica_class: ReplicaClass, time_ms: float
    ) -> list[tuple[int, int]]:
        cost = replica_class.cost
        works_ms = self._works_ms(replica_class)
        found: list[tuple[int, int]] = []
        modes: dict[int, float] = {}
        for num in range(1, _MAX_MODES + 1):
            room_ms = time_ms - num * cost.coefficients.c_ms
            # The last mode stands for all larger numbers, so nothing is counted per micro-batch.
            is_last = num == _MAX_MODES
            able = (self._low <= cost.max_tokens) & (works_ms <= room_ms)
            if not able.any():
                break
            mode = program.column(replica_class.num_replicas)
            modes[mode] = 1.0
            columns = [(int(bucket), program.column()) for bucket in np.nonzero(able)[0]]
            found += columns
            shares = [(works_ms / max(room_ms, _LEAST_WORK_MS), 1.0)]
            if not is_last:
                shares.append((self._low / cost.max_tokens, float(num)))
            for share, room in shares:
                for counted in (
                    share,
                    *(dual_feasible(share, m) for m in _DUAL_FEASIBLE_FUNCTIONS),
                ):
                    entries = {column: float(counted[bucket]) for bucket, column in columns}
                    program.row({**entries, mode: -room}, -np.inf, 0.0)
            # With half the room to spare, first fit packs whatever the work allows: all of it
            # where nothing is work.
            if works_ms[able].min() > 0.0:
                densest = float((self._low[able] / works_ms[able]).max())
                if num * cost.max_tokens >= 2.0 * room_ms * densest:
                    break
        program.row(modes, 0.0, replica_class.num_replicas)
        return found

    def _pipeline(
        self, program: _Columns, replica_class: ReplicaClass, time_ms: float
    ) -> list[tuple[int, int]]:
        cost = replica_class.cost
        works_ms = self._works_ms(replica_class)
        times_ms = works_ms + cost.coefficients.c_ms
        able = (self._low <= cost.max_tokens) & (cost.num_stages * times_ms <= time_ms)
        is_lump = able & (2 * self._low > cost.max_tokens)
        lumps = [int(bucket) for bucket in np.nonzero(is_lump)[0]]
        found = [(int(bucket), program.column()) for bucket in np.nonzero(able & ~is_lump)[0]]
        # All replicas of the class together, whatever their modes.
        total = {column: float(works_ms[bucket]) for bucket, column in found}
        modes: dict[int, float] = {}
        most = 0
        if lumps:
            most = len(self.lengths)
            shortest_ms = float(times_ms[lumps].min())
            if shortest_ms > _LEAST_WORK_MS:
                # As many of the shortest would fill the time; one lump fits, or none were able.
                num_full = int(time_ms / shortest_ms * (1.0 + _ROUNDING))
                most = min(most, max(num_full - cost.num_stages + 1, 1))
        for num in range(1, most + 1):
            if num > _MAX_LUMPS:
                # Their shape is left open.
                loose = [(bucket, program.column()) for bucket in lumps]
                found += loose
                total |= {column: float(times_ms[bucket]) for bucket, column in loose}
                break
            mode = program.column(replica_class.num_replicas)
            modes[mode] = 1.0
            positions = []
            for _ in range(num):
                columns = [(bucket, program.column()) for bucket in lumps]
                found += columns
                position = program.column()
                positions.append(position)
                program.row({**{column: 1.0 for _, column in columns}, mode: -1.0}, 0.0, 0.0)
                of_lumps = {column: float(times_ms[bucket]) for bucket, column in columns}
                program.row({**of_lumps, position: -1.0}, 0.0, 0.0)
            total |= dict.fromkeys(positions, 1.0)
            _add_passes(program, positions, mode, cost.num_stages, time_ms)
        program.row(modes, 0.0, replica_class.num_replicas)
        program.row(total, 0.0, replica_class.num_replicas * time_ms)
        return found

    def _works_ms(self, replica_class: ReplicaClass) -> FloatArray:
        coefficients = replica_class.cost.coefficients
        a, b = coefficients.a_ms_per_token2, coefficients.b_ms_per_token
        works_ms: FloatArray = (a * self._low + b) * self._low
        return works_ms


def _add_passes(
    program: _Columns, positions: Sequence[int], mode: int, num_stages: int, time_ms: float
) -> None:
    """The inequalities of one mode: the worst way forward up to each position, and back from it."""
    forward, backward = FORWARD_SHARE, 1.0 - FORWARD_SHARE
    ways_forward = [program.column() for _ in positions]
    ways_back = [program.column() for _ in positions]
    for place, position in enumerate(positions):
        before, after = positions[:place], positions[place + 1 :]
        entries = {ways_forward[place]: 1.0, position: -(num_stages - 1) * forward}
        program.row(entries | dict.fromkeys(before, backward), 0.0, np.inf)
        if place:
            program.row({ways_forward[place]: 1.0, ways_forward[place - 1]: -1.0}, 0.0, np.inf)
        entries = {ways_back[place]: 1.0, position: -(num_stages - 1) * backward}
        program.row(entries | dict.fromkeys(after, forward), 0.0, np.inf)
        if after:
            program.row({ways_back[place]: 1.0, ways_back[place + 1]: -1.0}, 0.0, np.inf)
        entries = dict.fromkeys(positions, -1.0) | {mode: time_ms}
        entries |= {ways_forward[place]: -1.0, ways_back[place]: -1.0}
        program.row(entries, 0.0, np.inf)
