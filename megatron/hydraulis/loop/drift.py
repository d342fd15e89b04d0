"""Schemes whose micro-batches take longer or shorter than predicted, and slow ranks.

`DriftReport` compares times; `RunDrift` measures them while training runs.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megatron.hydraulis.cost_model.interface import CostModel
from megatron.hydraulis.planner.plan import IterationPlan
from megatron.hydraulis.planner.replica_plan import ContextGroup, ReplicaPlan
from megatron.hydraulis.runtime.spans import (
    COMPUTE,
    HOST,
    NO_TRACKS,
    CudaClock,
    MemoryRecorder,
    RecordedSpan,
)
from megatron.hydraulis.strategy import Scheme

_NUM_ITERATIONS = 20
"""Newest iterations of a scheme or a rank that are compared."""
_MIN_ITERATIONS = 3
"""Iterations of a scheme or a rank before it is reported."""
_NUM_SLOTS = 4
"""Keys of a rank in the store, used in turn. No rank is more than an iteration ahead of another, so
nothing is overwritten that rank 0 still has to read."""
_NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class _Part:
    """A stage of a scheme: all its ranks do the same work."""

    scheme: Scheme
    stage: int

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.scheme}" if self.scheme.pp > 1 else f"{self.scheme}"


class DriftReport:
    """Names drift and slow ranks when they begin, change or end; reads no clock.

    The first iteration of a strategy is ignored, because it also builds models.

    Args:
        cost_model: whose times measured ones are compared with.
        limit: share by which the times of a scheme must differ from the predicted ones, or those
            of a rank exceed those of other ranks with the same part, to be reported.
    """

    def __init__(self, cost_model: CostModel, limit: float) -> None:
        self._coefficients = functools.cache(cost_model.coefficients)
        self._limit = limit
        self._strategies: set[str] = set()
        """Strategies that have run."""
        self._schemes: dict[Scheme, deque[list[float]]] = defaultdict(_window)
        """Measured over predicted time of the micro-batches of each iteration, by scheme."""
        self._ranks: dict[int, deque[tuple[_Part, float]]] = defaultdict(_window)
        """Measured over predicted time of the micro-batches of an iteration, by rank. Predictions
        are for the slowest stage, so the ratio is below 1 on others."""
        self._replica_mates: dict[tuple[_Part, int], frozenset[int]] = {}
        self._reported_drift: dict[Scheme, float] = {}
        self._reported_slow: dict[int, float] = {}

    def add(self, plan: IterationPlan, rank_times_ms: Mapping[int, Sequence[float]]) -> list[str]:
        """Add an iteration; returns a line for each change.

        rank_times_ms: by rank, forward and backward of each micro-batch of its replica.
        """
        if plan.strategy not in self._strategies:
            self._strategies.add(plan.strategy)
            return []
        ratios: dict[Scheme, list[float]] = defaultdict(list)
        for replica in plan.replicas:
            predicted_ms = [0.0] * replica.scheme.cp
            compared: list[tuple[Scheme, float]] = []
            for place, micro_batch in enumerate(replica.micro_batches):
                for scheme, share in replica.shares(micro_batch):
                    time_ms = self._coefficients(scheme).time_ms(share.lengths, share.row_tokens)
                    for column in share.group.columns:
                        predicted_ms[column] += time_ms
                    if share.lengths and time_ms > 0.0:
                        slowest_ms = _slowest_stage_ms(replica, share.group, place, rank_times_ms)
                        compared.append((scheme, slowest_ms / time_ms))
            host_ms = len(replica.micro_batches) * self._coefficients(replica.scheme).host_ms
            if host_ms > max(predicted_ms):
                continue  # Devices wait for the host, in micro-batches that are not predicted.
            for scheme, ratio in compared:
                ratios[scheme].append(ratio)
            for rank in replica.ranks:
                position = replica.replica.position_of(rank)
                assert position is not None
                if predicted_ms[position.cp] > 0.0:
                    part = _Part(replica.scheme, position.stage)
                    ratio = sum(rank_times_ms[rank]) / predicted_ms[position.cp]
                    self._ranks[rank].append((part, ratio))
                    self._replica_mates[part, rank] = frozenset(replica.ranks)
        for scheme, found in ratios.items():
            self._schemes[scheme].append(found)
        return [*self._news_of_drift(), *self._news_of_ranks()]

    def _news_of_drift(self) -> Iterator[str]:
        for scheme, iterations in self._schemes.items():
            if len(iterations) < _MIN_ITERATIONS:
                continue
            ratios = [ratio for found in iterations for ratio in found]
            ratio = statistics.median(ratios)
            if abs(ratio / self._reported_drift.get(scheme, 1.0) - 1.0) <= self._limit:
                continue
            # A ratio of 0 could not be compared with.
            self._reported_drift[scheme] = max(ratio, 1e-9)
            if abs(ratio - 1.0) > self._limit:
                yield (
                    f"cost profile: {scheme} takes {ratio:.2f} times the predicted time, by the "
                    f"median of {len(ratios)} micro-batches: a drift of {ratio - 1.0:+.0%}, more "
                    f"than {self._limit:.0%}; measure a new profile by hydraulis profile"
                )
            else:
                yield (
                    f"cost profile: {scheme} is back at {ratio:.2f} times the predicted time, "
                    f"within {self._limit:.0%}"
                )

    def _news_of_ranks(self) -> Iterator[str]:
        for rank, (part, ratio) in sorted(self._compared().items()):
            reported = self._reported_slow.get(rank)
            if ratio > 1.0 + self._limit:
                if reported is not None and abs(ratio / reported - 1.0) <= self._limit:
                    continue
                self._reported_slow[rank] = ratio
                yield (
                    f"slow rank: rank {rank} takes {ratio:.2f} times as long as the other ranks "
                    f"that run {part}; look at its device, clock and neighbours"
                )
            elif reported is not None:
                del self._reported_slow[rank]
                yield f"slow rank: rank {rank} is as fast as the others again"

    def _compared(self) -> dict[int, tuple[_Part, float]]:
        """Each rank's time relative to that of ranks which do the same in other replicas.

        Ranks of one replica wait for each other, so one slow rank slows them all, and all are
        reported. Without another replica of the scheme there is nothing to compare with.
        """
        medians: dict[_Part, dict[int, float]] = defaultdict(dict)
        for rank, window in self._ranks.items():
            of_part: dict[_Part, list[float]] = defaultdict(list)
            for part, ratio in window:
                of_part[part].append(ratio)
            for part, ratios in of_part.items():
                if len(ratios) >= _MIN_ITERATIONS:
                    medians[part][rank] = statistics.median(ratios)
        found: dict[int, tuple[_Part, float]] = {}
        for part, ranks in medians.items():
            for rank, ratio in ranks.items():
                mates = self._replica_mates[part, rank]
                others = [other for mate, other in ranks.items() if mate not in mates]
                if not others or statistics.median(others) <= 0.0:
                    continue
                relative = ratio / statistics.median(others)
                if rank not in found or relative > found[rank][1]:
                    found[rank] = (part, relative)
        return found


def _window[Item]() -> deque[Item]:
    return deque(maxlen=_NUM_ITERATIONS)


def _slowest_stage_ms(
    replica: ReplicaPlan,
    group: ContextGroup,
    place: int,
    rank_times_ms: Mapping[int, Sequence[float]],
) -> float:
    """The longest of the stages of a context group; a stage takes the mean over its ranks."""
    scheme = replica.scheme
    return max(
        statistics.fmean(
            rank_times_ms[replica.replica.rank_at(stage, cp, tp)][place]
            for cp in group.columns
            for tp in range(scheme.tp)
        )
        for stage in range(scheme.pp)
    )


class RunDrift:
    """``--report-drift``: every rank measures its micro-batches, rank 0 prints what changes.

    Times travel through the job's store, one key per rank, without a collective: rank 0 reads those
    of the previous iteration, which every rank has written before it could begin this one.

    Args:
        cost_model, limit: as for `DriftReport`.
    """

    def __init__(
        self, cost_model: CostModel, limit: float, store: dist.Store, *, has_cuda: bool
    ) -> None:
        self._store = dist.PrefixStore("hydraulis_drift", store)
        self._rank = dist.get_rank()
        self._report = DriftReport(cost_model, limit) if self._rank == 0 else None
        self.spans = MemoryRecorder(CudaClock() if has_cuda else None)
        """Records the engine's work on this rank."""
        self.spans.tracks = NO_TRACKS
        self._before: tuple[int, IterationPlan] | None = None
        """Number and plan of an iteration whose times have not been read yet."""

    def begin(self) -> None:
        """Measure the iteration that begins."""
        self.spans.tracks = frozenset({COMPUTE, HOST})

    def end(self, iteration: int, plan: IterationPlan, num_micro_batches: int) -> None:
        """Publish the times of an iteration; on rank 0, compare those of the previous one.

        num_micro_batches: of this rank.
        """
        self.spans.tracks = NO_TRACKS
        times_ms = micro_batch_times_ms(self.spans.take(), num_micro_batches)
        message = json.dumps({"iteration": iteration, "times_ms": times_ms})
        self._store.set(_key(iteration, self._rank), message)
        if self._report is None:
            return
        if self._before is not None:
            number, planned = self._before
            for line in self._report.add(planned, self._times_ms(number)):
                print(f"iteration {number}: {line}", flush=True)
        self._before = iteration, plan

    def _times_ms(self, iteration: int) -> dict[int, list[float]]:
        keys = [_key(iteration, rank) for rank in range(dist.get_world_size())]
        messages = [json.loads(value) for value in self._store.multi_get(keys)]
        assert {message["iteration"] for message in messages} == {iteration}
        return {rank: message["times_ms"] for rank, message in enumerate(messages)}


def micro_batch_times_ms(spans: Sequence[RecordedSpan], num_micro_batches: int) -> list[float]:
    """Forward and backward of each micro-batch of a rank, without waits for parameters."""
    times_ms = [0.0] * num_micro_batches
    waits = [span for span in spans if span.name == "gather wait"]
    for span in spans:
        if span.name in ("forward", "backward"):
            waited_ns = sum(
                max(0, min(span.end_ns, wait.end_ns) - max(span.start_ns, wait.start_ns))
                for wait in waits
            )
            own_ns = span.end_ns - span.start_ns - waited_ns
            times_ms[int(span.detail["micro_batch"])] += own_ns / _NS_PER_MS
    return times_ms


def _key(iteration: int, rank: int) -> str:
    return f"{iteration % _NUM_SLOTS}/{rank}"
