"""The work of the ranks in one iteration: micro-batches as they are computed, with padding.

Some ways dispatch without a cost model, by lengths alone: rows of fixed length, and Megatron's
dynamic cp. `context_waves` follows ``BalancedCPScheduler`` of Megatron Core 0.19
(core/pipeline_parallel/hybrid_cp_schedule.py), which ``--hybrid-context-parallel`` uses.
"""

from __future__ import annotations

import heapq
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from megatron.hydraulis.cost_model.interface import Coefficients, CostModel
from megatron.hydraulis.cost_model.pipeline import StageCosts, pipeline_time_ms
from megatron.hydraulis.errors import PlanError
from megatron.hydraulis.planner.greedy import longest_first
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import MicroBatch
from megatron.hydraulis.strategy import Scheme, Strategy

_MOST_OVER_MEAN = 1.1
"""Work of a bucket over the mean of all, beyond which it gets no further sequence."""
_SLACK = 0.05
"""Difference of the loads of two ranks, over the largest load, up to which a wave is balanced."""

Wave = list[tuple[int, list[int]]]
"""Number of ranks, and indices of the sequences, of each group."""


@dataclass(frozen=True)
class CeilingCosts:
    """CostModel in which all ranks share every token and all attention evenly."""

    all_ranks: Coefficients

    @classmethod
    def of(cls, costs: StageCosts, schemes: Iterable[Scheme], num_ranks: int) -> CeilingCosts:
        """The least rank time per token, and per squared token, of any of the schemes."""
        a_ms, b_ms, window = [], [], None
        for scheme in schemes:
            # The time is at least that of the first form.
            stages = costs.coefficients(scheme)
            share = scheme.tp * scheme.cp / num_ranks
            a_ms.append(share * sum(stage.a_ms_per_token2 for stage in stages))
            b_ms.append(share * sum(stage.b_ms_per_token for stage in stages))
            window = stages[0].window
        return cls(Coefficients(min(a_ms), min(b_ms), 0.0, window))

    def coefficients(self, scheme: Scheme) -> Coefficients:
        """The coefficients of all ranks together, whatever the scheme."""
        return self.all_ranks

    def max_tokens(self, scheme: Scheme) -> int:
        """Memory does not limit it."""
        return sys.maxsize

    def overhead_ms(self, strategy: Strategy) -> float:
        """The ceiling has no overhead."""
        return 0.0


@dataclass(frozen=True, slots=True)
class MicroBatchWork:
    """One micro-batch as a device computes it.

    Raises PlanError for negative padding and for a micro-batch without trained tokens.
    """

    num_tokens: int
    """Trained tokens."""
    segments: tuple[int, ...]
    """Lengths of the rows' segments as attention computes them, in tokens."""
    num_padding: int = 0
    """Computed tokens that are not trained."""
    groups: tuple[tuple[int, int, tuple[int, ...]], ...] = ()
    """cp, tokens and segments of each group of a wave, whose cp ranks run in groups; 0 and none for
    a group without sequences. A wave takes as long as its slowest group."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1 or not self.segments or self.num_padding < 0:
            raise PlanError(
                f"a micro-batch has at least 1 trained token and no negative padding but there are "
                f"{self.num_tokens} tokens, {len(self.segments)} segments and {self.num_padding} "
                f"tokens of padding; leave empty micro-batches out"
            )

    @classmethod
    def packed(cls, lengths: Sequence[int], *, num_padding: int = 0) -> MicroBatchWork:
        """Sequences without attention to each other, and padding without attention."""
        return cls(sum(lengths), tuple(lengths), num_padding)

    @classmethod
    def wave(cls, groups: Sequence[tuple[int, MicroBatchWork | None]]) -> MicroBatchWork:
        """Micro-batches of groups of cp ranks, which run at the same time; None for no sequence."""
        works = [work for _, work in groups if work is not None]
        return cls(
            sum(work.num_tokens for work in works),
            tuple(itertools.chain.from_iterable(work.segments for work in works)),
            sum(work.num_padding for work in works),
            tuple(
                (cp, 0, ()) if work is None else (cp, work.num_computed, work.segments)
                for cp, work in groups
            ),
        )

    @property
    def num_computed(self) -> int:
        """Trained tokens and padding."""
        return self.num_tokens + self.num_padding

    @classmethod
    def of_plan(cls, micro_batch: MicroBatch) -> MicroBatchWork:
        """A plan's micro-batch, with the padding of rows that are rounded up."""
        width = sum(group.size for group in micro_batch.groups)
        shares = micro_batch.shares(width) if micro_batch.groups else ()
        groups = (
            (
                share.group.size,
                share.num_tokens if share.row_tokens is None else share.row_tokens,
                share.lengths,
            )
            for share in shares
        )
        num_padding = sum(micro_batch.rows) - micro_batch.num_tokens if micro_batch.rows else 0
        packed = cls.packed(micro_batch.lengths, num_padding=num_padding)
        return replace(packed, groups=tuple(groups))

    def rows(self, scheme: Scheme) -> list[tuple[Scheme, int]]:
        """Tokens of each row, and the scheme that it runs as, on a replica of a scheme."""
        groups = [(cp, num_tokens) for cp, num_tokens, _ in self.groups]
        return [
            (scheme.of_context_group(cp), num_tokens)
            for cp, num_tokens in groups or [(scheme.cp, self.num_computed)]
        ]

    def times_ms(
        self, scheme: Scheme, stages: Callable[[Scheme], Sequence[Coefficients]]
    ) -> list[float]:
        """Forward and backward on every stage of a replica: shape (pp,).

        stages: the coefficients of each stage of a scheme.
        """
        if not self.groups:
            return [self.time_ms(coefficients) for coefficients in stages(scheme)]
        groups_ms = [
            [each.time_ms(segments, num_tokens) for each in stages(scheme.of_context_group(cp))]
            for cp, num_tokens, segments in self.groups
        ]
        return [max(of_stage) for of_stage in zip(*groups_ms, strict=True)]

    def time_ms(self, coefficients: Coefficients) -> float:
        """Forward and backward on a stage of these coefficients, without groups."""
        return coefficients.time_ms(self.segments, self.num_computed)


@dataclass(frozen=True, slots=True)
class IterationWork:
    """Strategy, dispatch and packing of one iteration, from whatever source.

    Raises PlanError unless there is a list of micro-batches for every replica.
    """

    strategy: Strategy
    replicas: tuple[tuple[MicroBatchWork, ...], ...]
    """Micro-batches of each replica of the strategy, in the order in which they run."""
    plan_time_s: float = 0.0
    """Time of planning; 0.0 if no planner is needed."""

    def __post_init__(self) -> None:
        if len(self.replicas) != len(self.strategy.replicas):
            raise PlanError(
                f"work for strategy {self.strategy.name!r}: every replica has a list of "
                f"micro-batches, which may be empty, but there are {len(self.replicas)} lists for "
                f"{len(self.strategy.replicas)} replicas; give one per replica"
            )

    @classmethod
    def of_plan(
        cls, plan: IterationPlan, strategy: Strategy, *, plan_time_s: float | None = None
    ) -> IterationWork:
        """A plan's micro-batches; plan_time_s replaces the plan's own."""
        replicas = tuple(
            tuple(map(MicroBatchWork.of_plan, replica.micro_batches)) for replica in plan.replicas
        )
        return cls(strategy, replicas, plan.plan_time_s if plan_time_s is None else plan_time_s)

    def makespan_ms(self, cost_model: CostModel) -> float:
        """Time of the slowest replica if all its stages are as slow as the slowest, as in plans."""

        def replica_ms(scheme: Scheme, rows: Sequence[MicroBatchWork]) -> float:
            of_rows_ms = [
                row.times_ms(scheme, lambda each: (cost_model.coefficients(each),))[0]
                for row in rows
            ]
            share = cost_model.coefficients(scheme).forward_share
            time_ms = pipeline_time_ms(of_rows_ms, scheme.pp, forward_share=share)
            return max(time_ms, len(rows) * cost_model.coefficients(scheme).host_ms)

        replicas = zip(self.strategy.replicas, self.replicas, strict=True)
        return max(replica_ms(replica.scheme, rows) for replica, rows in replicas)

    @property
    def num_tokens(self) -> int:
        """Trained tokens of all replicas."""
        return sum(batch.num_tokens for replica in self.replicas for batch in replica)

    @property
    def row_shapes(self) -> frozenset[tuple[Scheme, int]]:
        """The different rows, as a rank's kernels see them: scheme and tokens, padding included."""
        return frozenset(
            (scheme, scheme.row_tokens((num_tokens,)))
            for replica, micro_batches in zip(self.strategy.replicas, self.replicas, strict=True)
            for batch in micro_batches
            for scheme, num_tokens in batch.rows(replica.scheme)
        )

    @property
    def num_padding(self) -> int:
        """Padding of all replicas, in tokens."""
        return sum(batch.num_padding for replica in self.replicas for batch in replica)


def fixed_length_shares(
    lengths: Sequence[int],
    window_tokens: int,
    num_replicas: int,
    first_fit: list[list[int]] | None = None,
) -> list[list[list[int]]]:
    """Indices of the sequences of each row of each replica; a row may be empty.

    The rows of `equal_rows` are assigned in alternating order, so that replicas get about the same
    number of tokens. Raises ValueError if a sequence is longer than the window.
    """
    rows = equal_rows(lengths, window_tokens, num_replicas, first_fit)
    shares: list[list[list[int]]] = [[] for _ in range(num_replicas)]
    for turn, start in enumerate(range(0, len(rows), num_replicas)):
        order = range(num_replicas) if turn % 2 == 0 else reversed(range(num_replicas))
        for replica, row in zip(order, rows[start : start + num_replicas], strict=True):
            shares[replica].append(row)
    return shares


def equal_rows(
    lengths: Sequence[int],
    window_tokens: int,
    num_replicas: int,
    first_fit: list[list[int]] | None = None,
) -> list[list[int]]:
    """Indices of the sequences of each row: a multiple of num_replicas rows of about equal tokens.

    As many rows as first-fit decreasing needs, rounded up. Sequences, longest first, go to the row
    with the fewest tokens; if one has no room there, the rows are those of first-fit decreasing.
    The fullest rows come first, and some may be empty. Raises ValueError if a sequence is longer
    than the window.

    first_fit: the result of `first_fit_decreasing` if it is known.
    """
    rows = first_fit_decreasing(lengths, window_tokens) if first_fit is None else first_fit
    num_rows = num_replicas * math.ceil(len(rows) / num_replicas)
    rows = rows + [[] for _ in range(num_rows - len(rows))]
    balanced: list[list[int]] = [[] for _ in range(num_rows)]
    least = [(0, place) for place in range(num_rows)]  # a heap: tokens of each row
    for index in longest_first(lengths):
        tokens, place = least[0]
        balanced[place].append(index)
        heapq.heapreplace(least, (tokens + lengths[index], place))
    if max(least)[0] <= window_tokens:
        rows = balanced
    return sorted(rows, key=lambda row: -sum(lengths[i] for i in row))


def first_fit_decreasing(lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    """Indices of the sequences of each row; longest first, each in the first row with room.

    Raises ValueError if a sequence is longer than a row.
    """
    if max(lengths, default=0) > row_tokens:
        raise ValueError(f"a row of {row_tokens} tokens cannot hold one of {max(lengths)}")
    rows: list[list[int]] = []
    room: list[int] = []
    shortest, first, place, last = min(lengths, default=0), 0, 0, 0
    for index in longest_first(lengths):
        length = lengths[index]
        while first < len(rows) and room[first] < shortest:
            first += 1
        # A row without room for one of these tokens has none for the next.
        place = max(first, place) if length == last else first
        while place < len(rows) and room[place] < length:
            place += 1
        if place == len(rows):
            rows.append([])
            room.append(row_tokens)
        rows[place].append(index)
        room[place] -= length
        last = length
    return rows


def context_waves(lengths: Sequence[int], rank_tokens: int, num_ranks: int) -> list[Wave]:
    """Groups of ranks of several widths, in waves, each sequence on the fewest ranks that hold it.

    Ranks wait for each other between waves. Megatron's groups run their sequences one by one.

    Args:
        rank_tokens: most tokens of a sequence on one rank; on a group of c ranks c times as many.
        num_ranks: a power of two.

    Raises ValueError if a sequence does not fit on all ranks.
    """
    sizes = [1 << max(0, math.ceil(math.log2(length / rank_tokens))) for length in lengths]
    if max(sizes, default=1) > num_ranks:
        raise ValueError(
            f"{num_ranks} ranks of {rank_tokens} tokens cannot hold one of {max(lengths)}"
        )
    work = [length * length / size for length, size in zip(lengths, sizes, strict=True)]
    rest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    waves = []
    while rest:
        groups, rest = _fill_wave(_buckets(rest, sizes, work), sizes, work, num_ranks)
        _widen(groups, num_ranks)
        waves.append([(group.size, group.sequences) for group in groups])
    return waves


@dataclass(slots=True)
class _Group:
    size: int
    load: float = 0.0
    sequences: list[int] = field(default_factory=list)


def _buckets(order: Sequence[int], sizes: Sequence[int], work: Sequence[float]) -> list[list[int]]:
    """The sequences in order, divided into about as many parts of equal work as there are sizes."""
    num = len({sizes[i] for i in order})
    most = _MOST_OVER_MEAN * sum(work[i] for i in order) / num
    buckets: list[list[int]] = [[]]
    load = 0.0
    for place, index in enumerate(order):
        num_closed = len(buckets) - 1
        if buckets[-1] and (
            load + work[index] > most or len(order) - place <= num - 2 * num_closed
        ):
            buckets.append([])
            load = 0.0
        buckets[-1].append(index)
        load += work[index]
    return buckets


def _fill_wave(
    buckets: list[list[int]], sizes: Sequence[int], work: Sequence[float], num_ranks: int
) -> tuple[list[_Group], list[int]]:
    """The groups of a wave, and the sequences that are left.

    The first sequence of the first bucket that finds a place is next: a new group if enough ranks
    are free, else the least loaded group of its size. Once a sequence is placed that needs fewer
    ranks than the first one, a balanced wave is complete. Sequences then leave the most loaded
    group while that improves the balance.
    """
    groups: list[_Group] = []
    free, is_narrower = num_ranks, False
    first_size = sizes[buckets[0][0]]

    def slack(loads: Sequence[float]) -> float:
        return max(loads) - (0.0 if free else min(loads))

    def is_balanced() -> bool:
        loads = [group.load for group in groups]
        return slack(loads) <= _SLACK * max(loads)

    while not (is_narrower and any(buckets) and is_balanced()):
        bucket = next(
            (
                bucket
                for bucket in buckets
                if bucket
                and (free >= sizes[bucket[0]] or any(g.size == sizes[bucket[0]] for g in groups))
            ),
            None,
        )
        if bucket is None:
            break
        index = bucket.pop(0)
        size = sizes[index]
        if free >= size:
            free -= size
            groups.append(_Group(size))
            group = groups[-1]
        else:
            group = min((g for g in groups if g.size == size), key=lambda g: g.load)
        group.load += work[index]
        group.sequences.append(index)
        is_narrower = is_narrower or size < first_size
    left = [index for bucket in buckets for index in bucket]
    while not free and not is_balanced():
        group = max(groups, key=lambda g: g.load)
        if len(group.sequences) < 2:
            break
        removed = work[group.sequences[-1]]
        loads = [g.load - removed if g is group else g.load for g in groups]
        if slack(loads) >= slack([g.load for g in groups]):
            break
        left.append(group.sequences.pop())
        group.load -= removed
    return groups, left


def _widen(groups: Sequence[_Group], num_ranks: int) -> None:
    """Doubles the first of the narrowest groups until no rank is free."""
    while sum(group.size for group in groups) < num_ranks:
        min(groups, key=lambda group: group.size).size *= 2
