"""What a trace adds to a report: the measured time of each replica, and how ranks spent theirs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.observability.report_run import Run
from megatron.hydraulis.observability.trace_shares import RankShares, rank_shares

__all__ = ["MeasuredReplica", "measured_replicas", "shares_of_ranks"]

_US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class MeasuredReplica:
    """A replica in one traced iteration."""

    iteration: int
    strategy: str
    replica: int
    """Its place in the strategy."""
    predicted_s: float
    measured_s: float
    """From the start of its first forward on any of its ranks to the end of its last backward."""


def measured_replicas(run: Run) -> tuple[MeasuredReplica, ...]:
    """By iteration and replica; none where the trace or the ranks of the replicas are missing.

    A replica without sequences in an iteration is left out of it.
    """
    bounds: dict[tuple[int, int], tuple[float, float]] = {}
    for span in run.spans.where(is_planned=False).named("forward", "backward"):
        key = (int(span.detail.get("iteration", 0)), span.rank)
        start_us, end_us = bounds.get(key, (span.start_us, span.end_us))
        bounds[key] = (min(start_us, span.start_us), max(end_us, span.end_us))
    shapes = {strategy.name: strategy for strategy in run.strategies}
    found = []
    for record in run.records:
        shape = shapes.get(record.strategy)
        if shape is None or len(shape.replicas) != len(record.replica_times_s):
            continue
        for number, replica in enumerate(shape.replicas):
            own = [
                bounds[record.iteration, rank]
                for rank in replica.ranks
                if (record.iteration, rank) in bounds
            ]
            if own and record.replica_times_s[number] > 0.0:
                start_us, end_us = min(start for start, _ in own), max(end for _, end in own)
                found.append(
                    MeasuredReplica(
                        iteration=record.iteration,
                        strategy=record.strategy,
                        replica=number,
                        predicted_s=record.replica_times_s[number],
                        measured_s=(end_us - start_us) / _US_PER_S,
                    )
                )
    return tuple(found)


def shares_of_ranks(run: Run) -> Sequence[RankShares]:
    """Of every traced rank, the first iterations of the processes left out if there are others."""
    iterations = {int(span.detail["iteration"]) for span in run.spans.where(name="iteration")}
    kept = (iterations - run.starts) or iterations
    by_iteration = [run.spans.where(iteration=iteration) for iteration in sorted(kept)]
    if not by_iteration:
        return []
    spans = type(run.spans).of(itertools.chain.from_iterable(by_iteration))
    return rank_shares(spans)
