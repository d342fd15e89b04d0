"""Packing of one replica with its true time: best fit for one stage, to the best shape for more.

For one stage and one form only the number of micro-batches counts. For a pipeline the sequences are
assigned, longest first, to the micro-batch that lacks most of its share of the work, for the most
promising numbers of micro-batches and shapes; the exact 1F1B time decides. Then a packing is
improved in steps: each tries to move every sequence to every other micro-batch and to swap every
pair of sequences, and takes the best by exact 1F1B time.

With several forms the works are those of the decisive form: that with the most work for the share.
For one stage ``Σ max`` of the forms is least where no micro-batch is bound by another form than
the rest, so short sequences go to where long ones are (`greedy.mix`). Times are exact, and so are
steps; estimates are the largest over the views of the cost.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron.hydraulis.planner.bounds import (
    MAX_EXACT,
    LongOrder,
    Shape,
    best_works_ms,
    choose_long_micro_batches,
    fill_bound_ms,
    long_micro_batch_lines,
    long_micro_batch_orders,
    shapes,
)
from megatron.hydraulis.planner.costs import Pipeline, SchemeCost
from megatron.hydraulis.planner.greedy import best_fit, deal, mix
from megatron.hydraulis.planner.plan import Packing
from megatron.hydraulis.planner.solver import Solver

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


# Besides the most promising number of micro-batches so many more and fewer are tried. With few
# sequences it is tried down to half: it is that of the bound, which divides sequences at will, and
# fewer micro-batches come closer to their shape.
_NUM_MORE_PACKED = 2
_FEW_SEQUENCES = 64
# With many sequences only that one is tried, in its best shape: the others differ little.
_MANY_SEQUENCES = 256
# The estimate stops after so many numbers of micro-batches without improvement.
_MAX_FRUITLESS = 2
# Orders of long micro-batches that a thorough packing tries.
_NUM_ORDERS = 4
# Cost of assigning one sequence in all shapes tried for a pipeline, in the unit of Effort.
_DEALING_EFFORT = 1000.0
# Cost of setting up one improvement.
_STEP_EFFORT = 4e4
_LEAST_IMPROVEMENT = 1e-7
# Number of longest sequences of a replica that are swapped with one another.
_MAX_SWAPPED = 32
# Number of sequences of a replica that are moved, evenly over its lengths.
_MAX_MOVED = 128
# With more micro-batches a packing is not improved: fill and drain are a small part of the time.
_MAX_IMPROVED = 64


class Effort:
    """A budget of work, which unlike time is the same on every machine.

    The unit is a step of a pipeline's recurrence: about 10 ns if many are computed at once.
    """

    def __init__(self, budget: float) -> None:
        self.left = budget

    def spend(self, amount: float) -> None:
        """Take from the budget."""
        self.left -= amount

    @property
    def is_spent(self) -> bool:
        """True if nothing is left."""
        return self.left <= 0.0


class ViewWorks:
    """A view of a cost with the work of every sequence of a batch in it."""

    def __init__(self, view: SchemeCost, lengths: IntArray) -> None:
        """lengths: shape (num_sequences,), the whole batch."""
        self.cost = view
        works_ms = view.coefficients.sequence_time_ms(lengths.astype(np.float64))
        self.works_ms: list[float] = works_ms.tolist()
        self.works_array_ms: FloatArray = np.append(works_ms, 0.0)
        """Work of each sequence; the last entry, index -1, is of no sequence."""
        self._long_lines = long_micro_batch_lines(view.pipeline)
        self.largest_ms = view.largest_time_ms(int(lengths.max()))

    def work_ms(self, sequences: Iterable[int]) -> float:
        """Work of some sequences, exactly rounded."""
        return math.fsum(map(self.works_ms.__getitem__, sequences))

    def estimates_ms(
        self,
        work_ms: FloatArray,
        fewest: IntArray,
        longest_ms: FloatArray,
        num_near: int,
        least_ms: FloatArray,
    ) -> FloatArray:
        """See ReplicaPacker.estimates_ms; not below least_ms, which other views take.

        fewest: micro-batches that the tokens need.
        """
        c_ms = self.cost.coefficients.c_ms
        if self.cost.num_stages == 1:
            times_ms: FloatArray = np.maximum(least_ms, work_ms + fewest * c_ms)
            return times_ms
        best_ms = np.full(work_ms.shape, np.inf)
        first, last = max(1, int(fewest.min())), int(fewest.max())
        start = max(first, min(num_near, MAX_EXACT))
        # The first line is the total work itself.
        long_lines = [(by, by_long * (longest_ms + c_ms)) for by, by_long in self._long_lines[1:]]
        for nums in (range(start, max(last, MAX_EXACT + 1) + 1), range(start - 1, first - 1, -1)):
            for num in nums:
                total_ms = work_ms + num * c_ms
                time_ms = total_ms.copy()
                for by_total, long_ms in long_lines:
                    np.maximum(time_ms, by_total * total_ms + long_ms, out=time_ms)
                for shape in self.shapes(num):
                    if shape.slope > 1.0:
                        np.maximum(time_ms, shape.bound_ms(total_ms, self.largest_ms), out=time_ms)
                is_better = (time_ms < best_ms) & (num >= fewest)
                best_ms = np.where(is_better, time_ms, best_ms)
                if (best_ms <= least_ms).all():
                    times_ms = np.maximum(least_ms, best_ms)
                    return times_ms
                if not is_better.any() and not start <= num < last:
                    break
        times_ms = np.maximum(least_ms, np.where(fewest == 0, 0.0, best_ms))
        return times_ms

    def best_num(self, work_ms: float, num_tokens: int, num_sequences: int, longest: int) -> int:
        """The number of micro-batches with the least bound."""
        c_ms = self.cost.coefficients.c_ms
        num = max(1, -(-num_tokens // self.cost.max_tokens))
        long_ms = self.works_ms[longest] + c_ms
        best_ms, best_num, num_fruitless = math.inf, num, 0
        while num_fruitless < _MAX_FRUITLESS and (num <= num_sequences or best_ms == math.inf):
            total_ms = work_ms + num * c_ms
            time_ms = max(
                by_total * total_ms + by_long * long_ms for by_total, by_long in self._long_lines
            )
            for shape in self.shapes(num):
                time_ms = max(time_ms, shape.bound_ms(total_ms, self.largest_ms))
            if time_ms < best_ms:
                best_ms, best_num, num_fruitless = time_ms, num, 0
            else:
                num_fruitless += 1
            if num > MAX_EXACT:
                break
            num += 1
        return best_num

    def shapes(self, num: int) -> Sequence[Shape]:
        """Shapes of this number of micro-batches."""
        if num <= MAX_EXACT:
            return shapes(self.cost.pipeline, num)
        # The ends of the largest shape with a flat middle; the fill shrinks in proportion.
        scale = MAX_EXACT / num
        return tuple(
            Shape(
                _widened(shape.shares, num),
                slope=1.0 + (shape.slope - 1.0) * scale,
                relief=shape.relief * scale,
            )
            for shape in shapes(self.cost.pipeline, MAX_EXACT)
        )


class ReplicaPacker:
    """Packs shares of one batch for replicas of one cost."""

    def __init__(self, cost: SchemeCost, lengths: Sequence[int], solver: Solver) -> None:
        """lengths: shape (num_sequences,), the whole batch, in any order."""
        self.cost = cost
        self.lengths = lengths
        self.tokens = cost.tokens(lengths)
        """Tokens of each sequence, padding included."""
        self.lengths_array = np.array([*lengths, 0], dtype=np.int64)
        """The last entry, index -1, is of no sequence."""
        self.views = [ViewWorks(view, self.lengths_array[:-1]) for view in cost.views]
        self.work_arrays_ms = [view.works_array_ms for view in self.views]
        forms = cost.coefficients.forms
        self._forms = self.views[: len(forms)]
        some = self.lengths_array[:-1].astype(np.float64)
        self._works_of_forms_ms = np.array([form.sequence_time_ms(some) for form in forms])
        self._squared = list(map(cost.coefficients.squared, lengths))
        self._solver = solver
        self._best_packings: dict[tuple[int, ...], Packing] = {}
        self._tokens_array = np.array(self.tokens, dtype=np.int64)

    def decisive(self, sequences: Sequence[int]) -> ViewWorks:
        """The form with the most work for some sequences."""
        if len(self._forms) == 1:
            return self._forms[0]
        num_fewest = -(-sum(map(self.lengths.__getitem__, sequences)) // self.cost.max_tokens)

        def total_ms(form: ViewWorks) -> float:
            return form.work_ms(sequences) + num_fewest * form.cost.coefficients.c_ms

        return max(self._forms, key=total_ms)

    def pack(self, sequences: Sequence[int], effort: Effort, *, target_ms: float = 0.0) -> Packing:
        """The best packing found, or the first that takes at most target_ms.

        sequences: by falling length, each within the limit.
        """
        if not sequences:
            return Packing((), 0.0)
        if self.cost.only_number_counts:
            return self.packed(best_fit(sequences, self.tokens, self.cost.max_tokens))
        effort.spend(len(sequences) * _DEALING_EFFORT)
        key = tuple(sequences)
        if key in self._best_packings:
            return self._best_packings[key]
        if self.cost.num_stages == 1:
            best = self._mixed(sequences)
            self._best_packings[key] = best
            return best
        view = self.decisive(sequences)
        work_ms = view.work_ms(sequences)
        num_tokens = sum(self.lengths[sequence] for sequence in sequences)
        center = view.best_num(work_ms, num_tokens, len(sequences), sequences[0])
        fewest = -(-num_tokens // self.cost.max_tokens)
        first, last = center, min(center + _NUM_MORE_PACKED, len(sequences))
        if len(sequences) > _MANY_SEQUENCES:
            last = center
        elif len(sequences) > _FEW_SEQUENCES:
            first = max(fewest, center - _NUM_MORE_PACKED)
        else:
            first = max(fewest, center // 2)
        nearest = sorted(range(first, last + 1), key=lambda num: abs(num - center))
        more = ([num] for num in _growing(last + 1, len(sequences)))
        for nums in itertools.chain([nearest], more):
            found = []
            for dealt, time_ms in self._in_shapes(sequences, view, nums):
                if time_ms <= target_ms:
                    return _packing(dealt, time_ms)
                found.append((dealt, time_ms))
            if found:
                best = _packing(*min(found, key=lambda timed: timed[1]))
                self._best_packings[key] = best
                return best
        # It never needs more micro-batches than there are sequences.
        return self.packed(best_fit(sequences, self.tokens, self.cost.max_tokens))

    def _mixed(self, sequences: Sequence[int]) -> Packing:
        """The better of the densest packing for one stage and one as dense that mixes forms."""
        densest = best_fit(sequences, self.tokens, self.cost.max_tokens)
        mixed = mix(
            sequences, self._works_of_forms_ms, self.tokens, self.cost.max_tokens, len(densest)
        )
        found = [self.packed(each) for each in (mixed, densest) if each is not None]
        return min(found, key=lambda packed: packed.time_ms)

    def exchanged(self, packed: Packing, gone: int | None, come: int | None) -> Packing:
        """A packing without one of its sequences and with another one.

        The new one replaces the old one, or goes where there is most room. Empty if there is no
        room, and where only the number of micro-batches counts: a new packing is as quick.
        """
        nothing = Packing((), 0.0)
        if self.cost.only_number_counts:
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

    def pack_thoroughly(self, sequences: Sequence[int], num_steps: int, effort: Effort) -> Packing:
        """The best of several packings, after at most num_steps improvements."""
        best = self.pack(sequences, effort)
        if self.cost.only_number_counts or len(sequences) < 2:
            return best
        if self.cost.num_stages > 1:
            view = self.decisive(sequences)
            for order, num in self._promising_orders(sequences, view):
                dealt = self._deal_around_long(sequences, view, order, num)
                if dealt is not None:
                    best = min(best, self.packed(dealt), key=lambda packed: packed.time_ms)
        return self.improve(best, num_steps, effort)

    def _promising_orders(
        self, sequences: Sequence[int], view: ViewWorks
    ) -> list[tuple[LongOrder, int]]:
        """Orders of the long micro-batches, those with the lowest bounds first, and their number.

        All other micro-batches run before or after them.
        """
        work_ms = view.work_ms(sequences)
        lengths = [self.lengths[sequence] for sequence in sequences]
        num_tokens = sum(lengths)
        long = choose_long_micro_batches(lengths, self.cost.max_tokens)
        orders = long_micro_batch_orders(long, view.cost)
        rated: list[tuple[float, int]] = []
        fewest = -(-num_tokens // self.cost.max_tokens)
        nums = np.array([len(long) + each.num_before + each.num_after for each in orders.apart])
        for num in range(max(fewest, nums.min()), min(len(sequences), nums.max()) + 1):
            total_ms = work_ms + num * view.cost.coefficients.c_ms
            fill_ms = fill_bound_ms(view.cost.pipeline, num, total_ms, view.largest_ms)
            times_ms = np.maximum(orders.times_apart_ms(total_ms), fill_ms)
            rated += [(float(times_ms[place]), int(place)) for place in np.nonzero(nums == num)[0]]
        rated.sort()
        return [(orders.apart[place], len(long)) for _, place in rated[:_NUM_ORDERS]]

    def _deal_around_long(
        self, sequences: Sequence[int], view: ViewWorks, order: LongOrder, num_long: int
    ) -> list[list[int]] | None:
        c_ms = view.cost.coefficients.c_ms
        first: list[list[int]] = [
            *([] for _ in range(order.num_before)),
            *([sequences[i]] for i in (*order.before, 0, *order.after)),
            *([] for _ in range(order.num_after)),
        ]
        least_ms = [c_ms + sum(view.works_ms[s] for s in share) for share in first]
        total_ms = view.work_ms(sequences) + len(first) * c_ms
        if total_ms == 0.0:
            return None  # Only the host takes time.
        works_ms = best_works_ms(
            view.cost.pipeline, least_ms, total_ms, view.largest_ms, self._solver
        )
        if works_ms is None:
            return None
        loads_ms = [least - work for work, least in zip(works_ms, least_ms, strict=True)]
        rooms = [self.cost.max_tokens - sum(self.tokens[s] for s in share) for share in first]
        return deal(sequences[num_long:], view.works_ms, self.tokens, first, loads_ms, rooms)

    def improve(
        self, packed: Packing, num_steps: int, effort: Effort, *, target_ms: float = 0.0
    ) -> Packing:
        """The packing after at most num_steps improvements, which end below target_ms."""
        if self.cost.only_number_counts or not 2 <= len(packed.micro_batches) <= _MAX_IMPROVED:
            return packed
        better = improve_pipeline(
            packed.micro_batches,
            self._works_of_forms_ms,
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
        works_ms: Sequence[tuple[FloatArray, FloatArray]],
        num_tokens: IntArray,
        num_near: int,
    ) -> FloatArray:
        """Times of many shares, close to those of good packings: the bound, at a local minimum over
        the number of micro-batches, of the view where it is largest.

        works_ms: in each view, the work of each share and of its longest sequence; all arrays have
        one shape. num_near: number of micro-batches, from which the best one is sought. Exact for
        one stage and form if no room is left. A share without tokens takes no time.
        """
        fewest = -(-num_tokens // self.cost.max_tokens)
        times_ms: FloatArray = np.zeros(())
        for view, (work_ms, longest_ms) in zip(self.views, works_ms, strict=True):
            times_ms = view.estimates_ms(work_ms, fewest, longest_ms, num_near, times_ms)
        return times_ms

    def packed(self, micro_batches: Sequence[Sequence[int]]) -> Packing:
        """Micro-batches in this order, with their exact time: infinite where one has no room."""
        limit = self.cost.max_tokens
        if any(sum(self.tokens[sequence] for sequence in share) > limit for share in micro_batches):
            return Packing(tuple(map(tuple, micro_batches)), math.inf)
        return _packing(micro_batches, self._time_ms(micro_batches))

    def _time_ms(self, micro_batches: Sequence[Sequence[int]]) -> float:
        length_of, squared_of = self.lengths.__getitem__, self._squared.__getitem__
        rows, time_ms = self.cost.rows, self.cost.coefficients.time_of_sums_ms
        times_ms = []
        for share in micro_batches:
            lengths = map(length_of, share)
            num_tokens = sum(lengths) if rows is None else rows.row_tokens(lengths)
            times_ms.append(time_ms(sum(map(squared_of, share)), num_tokens))
        return self.cost.replica_time_ms(times_ms)

    def _in_shapes(
        self, sequences: Sequence[int], view: ViewWorks, nums: Sequence[int]
    ) -> Iterator[tuple[list[list[int]], float]]:
        """Yields micro-batches to the shapes of these numbers of them, with their time.

        Those that lack room are left out.
        """
        work_ms, c_ms = view.work_ms(sequences), view.cost.coefficients.c_ms
        for num in nums:
            total_ms = work_ms + num * c_ms
            some = view.shapes(num)
            if len(sequences) > _MANY_SEQUENCES:
                # The best one for micro-batches that are full at most.
                num_tokens = sum(self.tokens[sequence] for sequence in sequences)
                full_ms = work_ms * self.cost.max_tokens / num_tokens
                largest_ms = max(view.works_ms[sequences[0]], full_ms) + c_ms
                some = [max(some, key=lambda shape: shape.bound_ms(total_ms, largest_ms))]
            for shape in some:
                # Load 0 is what the shape gives each.
                loads_ms = [min(c_ms - x * total_ms, 0.0) for x in shape.shares]
                rooms = [self.cost.max_tokens] * num
                first: list[list[int]] = [[] for _ in range(num)]
                dealt = deal(sequences, view.works_ms, self.tokens, first, loads_ms, rooms)
                if dealt is not None:
                    yield dealt, self._time_ms(dealt)


def _packing(micro_batches: Sequence[Sequence[int]], time_ms: float) -> Packing:
    return Packing(tuple(tuple(sorted(share)) for share in micro_batches), time_ms)


def _growing(first: int, end: int) -> Iterator[int]:
    """Whole numbers from first to before end, by about 2 % or 1."""
    while first < end:
        yield first
        first += max(1, first // 50)


def _widened(shares: Sequence[float], num: int) -> tuple[float, ...]:
    """Shares of more micro-batches: the middle one is repeated, and all are scaled to sum 1."""
    middle = len(shares) // 2
    wider = [*shares[:middle], *([shares[middle]] * (num - len(shares))), *shares[middle:]]
    total = math.fsum(wider)
    return tuple(share / total for share in wider)


def pipeline_times_ms(times_ms: FloatArray, pipeline: Pipeline) -> FloatArray:
    """pipeline_time_ms of many replicas at once: (num_replicas, num_micro_batches) to
    (num_replicas,)."""
    num_stages, forward_share = pipeline
    num_micro_batches = times_ms.shape[1]
    if num_stages == 1:
        return np.asarray(times_ms.sum(axis=1))
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


def improve_pipeline(
    micro_batches: Sequence[Sequence[int]],
    works_ms: FloatArray,
    lengths: IntArray,
    cost: SchemeCost,
    num_steps: int,
    *,
    target_ms: float = 0.0,
    effort: Effort,
) -> list[list[int]]:
    """The micro-batches after at most num_steps steps, which end below target_ms.

    No micro-batch becomes empty or too large. works_ms: shape (num_forms, num_sequences), of the
    whole batch; lengths: shape (num_sequences,).
    """
    num = len(micro_batches)
    if num == 1:
        return [list(share) for share in micro_batches]
    members = np.array([sequence for share in micro_batches for sequence in share], dtype=np.int64)
    place = np.array([k for k, share in enumerate(micro_batches) for _ in share], dtype=np.int64)
    works, tokens = works_ms[:, members], lengths[members]
    for _ in range(num_steps):
        rooms = cost.max_tokens - np.bincount(place, weights=tokens, minlength=num).astype(np.int64)
        trial = _Trial(rooms, works, tokens, place, cost)
        times_ms = trial.times_ms
        effort.spend(_STEP_EFFORT + len(times_ms) * num * cost.num_stages)
        best = int(np.argmin(times_ms))
        if times_ms[-1] < target_ms or times_ms[best] >= times_ms[-1] * (1.0 - _LEAST_IMPROVEMENT):
            break
        place = trial.place_after(best)
        if effort.is_spent:
            break
    return [[int(s) for s in members[place == k]] for k in range(num)]


class _Trial:
    """Times of a replica after every possible step; the last one is without a step."""

    def __init__(
        self,
        rooms: IntArray,
        works: FloatArray,
        tokens: IntArray,
        place: IntArray,
        cost: SchemeCost,
    ) -> None:
        num = len(rooms)
        counts = np.bincount(place, minlength=num)
        self._place = place
        by_length = np.argsort(-tokens, kind="stable")
        # Moves: sequence i to micro-batch k.
        moved = by_length[:: -(-len(by_length) // _MAX_MOVED)]
        i, self._k = np.nonzero(
            (place[moved][:, None] != np.arange(num)[None, :])
            & (tokens[moved][:, None] <= rooms[None, :])
            & (counts[place[moved]] > 1)[:, None]
        )
        self._i = moved[i]
        # Swaps: sequence x with y of a later micro-batch. Short ones are moved instead.
        longest = by_length[:_MAX_SWAPPED]
        gain = tokens[longest][:, None] - tokens[longest][None, :]
        room = rooms[place[longest]]
        x, y = np.nonzero(
            (place[longest][:, None] < place[longest][None, :])
            & (gain <= room[None, :])
            & (-gain <= room[:, None])
            & (gain != 0)
        )
        self._x, self._y = longest[x], longest[y]
        padding = None
        if cost.rows is not None:
            num_tokens = self._changed(cost.max_tokens - rooms, tokens)
            padding = [cost.rows.rounded(each) - each for each in num_tokens]
        of_forms = []
        times = cost.coefficients
        for form, work in zip((times, *times.others), works, strict=True):
            loads = np.bincount(place, weights=work, minlength=num) + form.c_ms
            changed = self._changed(loads, work)
            if padding is not None:
                each_ms = form.b_ms_per_token
                changed = [
                    load + each_ms * more for load, more in zip(changed, padding, strict=True)
                ]
            of_forms.append(changed)
        before, *after = (
            functools.reduce(np.maximum, each) for each in zip(*of_forms, strict=True)
        )
        self.times_ms = (
            self._sums(before, after)
            if cost.num_stages == 1
            else pipeline_times_ms(self._all(before, after), cost.pipeline)
        )

    def _changed[Number: (np.float64, np.int64)](
        self, loads: NDArray[Number], work: NDArray[Number]
    ) -> list[NDArray[Number]]:
        """Loads before any step, and those that steps change: where a sequence is moved from and
        to, and of both micro-batches of a swap; work: what each sequence adds to its load."""
        i, x, y, place = self._i, self._x, self._y, self._place
        return [
            loads,
            loads[place[i]] - work[i],
            loads[self._k] + work[i],
            loads[place[x]] + (work[y] - work[x]),
            loads[place[y]] + (work[x] - work[y]),
        ]

    def _sums(self, loads: FloatArray, changed: Sequence[FloatArray]) -> FloatArray:
        """Sums of the loads after every step, from what _changed lists."""
        giver, taker, one, other = changed
        place, total = self._place, loads.sum()
        moved = giver - loads[place[self._i]] + (taker - loads[self._k])
        swapped = one - loads[place[self._x]] + (other - loads[place[self._y]])
        return total + np.concatenate((moved, swapped, (0.0,)))

    def _all(self, loads: FloatArray, changed: Sequence[FloatArray]) -> FloatArray:
        """Loads after every step, from what _changed lists."""
        i, k, x, y = self._i, self._k, self._x, self._y
        place = self._place
        trial = np.empty((len(i) + len(x) + 1, len(loads)))
        trial[:] = loads
        rows = np.arange(len(i))
        trial[rows, place[i]], trial[rows, k] = changed[:2]
        rows = len(i) + np.arange(len(x))
        trial[rows, place[x]], trial[rows, place[y]] = changed[2:]
        return trial

    def place_after(self, row: int) -> IntArray:
        """Micro-batch of each sequence after the step of a row."""
        after = self._place.copy()
        num_moves = len(self._i)
        if row < num_moves:
            after[self._i[row]] = self._k[row]
        else:
            one, other = self._x[row - num_moves], self._y[row - num_moves]
            after[one], after[other] = after[other], after[one]
        return after
