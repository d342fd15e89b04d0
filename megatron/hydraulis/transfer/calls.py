"""Which buckets travel together in one call of all ranks, and in which order.

A call lasts until its busiest rank has sent and received its part. A layer enters only the ranks
of its stage, so that with one bucket per call the links of all other stages are idle. A **set**,
buckets of every stage in one call, uses the links of all ranks. Replicas of fewer stages, however,
have to wait for a set of layers where they would need only the first one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import accumulate

from megatron.hydraulis.strategy import Strategy
from megatron.hydraulis.transfer.amounts import RankAmounts, StrategyAmounts
from megatron.hydraulis.transfer.canonical import Bucket, CanonicalLayout
from megatron.hydraulis.transfer.collective import Collective, amounts_by_rank

Calls = tuple[tuple[int, ...], ...]
"""The indices of the buckets of each call, in the order of gathers; scatters reverse it."""
ACROSS_FACTOR = 10
"""Time of an element across nodes over that of one inside a node (see
`transfer.collective.LEAST_SAVING_ACROSS`)."""
MOST_CALLS_LATER = 2
"""Calls by which a set may delay a bucket: one, as buckets of a set arrive together, and one, as
parts of an embedding travel with layers of other stages."""


def call_amounts(
    kind: Collective, amounts: StrategyAmounts, call: Sequence[int]
) -> tuple[RankAmounts, RankAmounts]:
    """(gather, scatter) of a call: the sum of `amounts_by_rank` over its buckets."""
    buckets = amounts.layout.buckets
    first, *others = (amounts_by_rank(kind, amounts, buckets[index]) for index in call)
    gather, scatter = first
    for more_gathered, more_scattered in others:
        gather, scatter = gather + more_gathered, scatter + more_scattered
    return gather, scatter


def calls_of(kind: Collective, amounts: StrategyAmounts, strategy: Strategy) -> Calls:
    """The calls of a strategy, the same on all ranks and for every planner.

    Without pipelines every bucket has its own call, by rising index. Otherwise the stages of each
    scheme are divided into 2, 3, … *sections* of consecutive stages, and each division gives sets
    (`_sets`). Among them and rising buckets those calls are chosen that take the least time in sum,
    without sets with which some bucket would arrive more than `MOST_CALLS_LATER` calls later than
    with rising buckets. So gathers are exposed at most that much longer, however much compute hides
    of them, and so are scatters, which run in reverse.

    Args:
        kind: of gathers.
    """
    layout = amounts.layout
    rising: Calls = tuple((bucket.index,) for bucket in layout.buckets)
    if all(scheme.pp == 1 for scheme in strategy.schemes):
        return rising
    time_of = _timer(kind, amounts)
    arrivals = _arrivals(rising, time_of)
    best, least = rising, max(arrivals.values())
    for calls in dict.fromkeys(_candidates(layout, strategy)):
        later = _arrivals(calls, time_of)
        tolerated = MOST_CALLS_LATER * max(map(time_of, calls))
        total = max(later.values())
        if total < least and all(later[b] - arrivals[b] <= tolerated for b in arrivals):
            best, least = calls, total
    return best


def calls_without(calls: Calls, buckets: Container[int]) -> Calls:
    """The same calls without some buckets; none of them is empty."""
    left = (tuple(bucket for bucket in call if bucket not in buckets) for call in calls)
    return tuple(call for call in left if call)


def _timer(kind: Collective, amounts: StrategyAmounts) -> Callable[[Sequence[int]], int]:
    """The time of a gather's call, in that of one element inside a node."""
    same = {b.index: buckets[0].index for buckets in amounts.equal_buckets for b in buckets}
    known: dict[tuple[int, ...], int] = {}

    def time_of(call: Sequence[int]) -> int:
        key = tuple(sorted(same[index] for index in call))
        if key not in known:
            gather, _ = call_amounts(kind, amounts, key)
            inside = max(gather.received_inside.max(), gather.sent_inside.max())
            across = ACROSS_FACTOR * max(gather.received_across.max(), gather.sent_across.max())
            known[key] = int(
                inside + across if kind is Collective.TWO_STEP else max(inside, across)
            )
        return known[key]

    return time_of


def _arrivals(calls: Calls, time_of: Callable[[Sequence[int]], int]) -> dict[int, int]:
    """The time at which each bucket has arrived."""
    ends = accumulate(map(time_of, calls))
    return {bucket: end for call, end in zip(calls, ends, strict=True) for bucket in call}


def _candidates(layout: CanonicalLayout, strategy: Strategy) -> Iterator[Calls]:
    num_layers = len({b.unit.order for b in layout.buckets if b.unit.is_layer})
    for scheme in strategy.schemes:
        starts = [0, *accumulate(scheme.layers_per_stage(num_layers))][: scheme.pp]
        for number in range(2, scheme.pp + 1):
            yield _sets(layout, [starts[i * scheme.pp // number] for i in range(number)])


def _sets(layout: CanonicalLayout, starts: Sequence[int]) -> Calls:
    """Sets of about a layer of every section.

    The buckets of a section follow one another by rising index. Measured in sizes of the largest
    bucket, set i has of every section the buckets whose middle is in [i, i + 1).

    starts: the first layer of each section.
    """
    largest = max(bucket.num_elements for bucket in layout.buckets)
    sections: list[list[Bucket]] = [[] for _ in starts]
    for bucket in layout.buckets:
        sections[max(0, bisect_right(starts, bucket.unit.order) - 1)].append(bucket)
    sets: dict[int, list[int]] = {}
    for section in sections:
        before = 0
        for bucket in section:
            number = (2 * before + bucket.num_elements) // (2 * largest)
            sets.setdefault(number, []).append(bucket.index)
            before += bucket.num_elements
    return tuple(tuple(sorted(sets[number])) for number in sorted(sets))
