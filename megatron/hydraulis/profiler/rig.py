"""Runs micro-batches and iterations through the training engine and measures their times.

Models, schedules, messages and regrouping are those of training, on random tokens. Only a
`SpanRecorder` is added, as for a trace.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron.hydraulis.cost_model.pipeline import pipeline_time_ms
from megatron.hydraulis.data.packed_batch import PackedBatch, pack
from megatron.hydraulis.errors import HydraulisError
from megatron.hydraulis.profiler.measurements import (
    GridPoint,
    MeasuredPoint,
    MeasuredStrategy,
    RegroupSpeed,
)
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.memory import MemoryMeter, is_out_of_memory, release_cached_memory
from megatron.hydraulis.runtime.process_groups import of_all_ranks
from megatron.hydraulis.runtime.spans import (
    COMPUTE,
    REGROUP,
    CudaClock,
    MemoryRecorder,
    RecordedSpan,
    SpanRecorder,
)
from megatron.hydraulis.strategy import Replica, Scheme, Strategy
from megatron.hydraulis.strategy.notation import parse_scheme

_NS_PER_MS = 1e6
_MS_PER_S = 1e3
_FEWEST_MICRO_BATCHES = 4
"""A measured iteration has two that do not overlap regrouping, and the first and the last one."""
_MOST_MICRO_BATCHES = 64
"""A measured iteration has no more, unless a pipeline needs them. The median of the inner ones is
then steady; next to a much slower scheme, more of them only lengthen the profile."""


@dataclass(frozen=True)
class _RankTimes:
    """The times of a point on one rank."""

    replica: int | None
    stage: int
    forward_ms: float
    total_ms: float
    """Forward and backward."""
    period_ms: float
    """From the end of one micro-batch to that of the next one."""
    peak_bytes: int


@dataclass(frozen=True)
class RankIteration:
    """The times of an iteration on one rank."""

    wall_ms: float
    optimizer_ms: float
    micro_batch_ms: float
    """Forward and backward of one that does not overlap regrouping; 0 if the rank is idle."""

    @classmethod
    def of(
        cls, spans: Sequence[RecordedSpan], wall_ms: float, *, num_micro_batches: int
    ) -> RankIteration:
        inner = range(1, num_micro_batches - 1)
        return cls(
            wall_ms=wall_ms,
            optimizer_ms=sum(map(_duration_ms, _named(spans, "optimizer"))),
            micro_batch_ms=_median_ms(spans, "forward", inner)
            + _median_ms(spans, "backward", inner)
            if inner
            else 0.0,
        )


class EngineRig:
    """Collective over all ranks of the job, as its engine.

    Args:
        make_engine: builds an engine that records its work; called again after memory has run
            out, because the state of the engine is then unknown.
        strategies: by scheme, the strategy that fills the job with its replicas.
        num_warmup: runs of a measurement that are not counted.
        num_measured: runs whose median is the result.
        vocab_size: random tokens are below it.
    """

    def __init__(
        self,
        make_engine: Callable[[SpanRecorder], RuntimeEngine],
        strategies: Mapping[str, Strategy],
        meter: MemoryMeter,
        *,
        num_warmup: int,
        num_measured: int,
        vocab_size: int,
        seed: int,
    ) -> None:
        self._make_engine = make_engine
        self._strategies = strategies
        self._num_warmup, self._num_measured = num_warmup, num_measured
        self._vocab_size = vocab_size
        self._seed = seed
        self._forward_step = make_forward_step()
        self._rank = dist.get_rank()
        self._meter = meter
        self._recorder = MemoryRecorder(CudaClock() if torch.cuda.is_available() else None)
        self._recorder.tracks = frozenset({COMPUTE, REGROUP})
        self._engine: RuntimeEngine | None = None

    @property
    def engine(self) -> RuntimeEngine:
        """Built when there is something to measure."""
        if self._engine is None:
            self._engine = self._make_engine(self._recorder)
        return self._engine

    def run_point(self, scheme: str, point: GridPoint) -> MeasuredPoint:
        """Measure a micro-batch on every replica of a scheme at once, several times.

        The time of a stage is the median over its micro-batches and the mean over its tp ranks,
        which work in step. The first micro-batches warm up; the last ones are not counted either,
        because the pipeline drains and gradients are already sent.

        Raises HydraulisError where memory runs out in a job of several ranks, because the others
        wait for this one. The attempt is recorded, and a rerun goes on.
        """
        strategy = self._strategies[scheme]
        try:
            own = self._times_of_rank(strategy, point, parse_scheme(scheme, label=scheme).cp)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if dist.get_world_size() > 1:
                raise HydraulisError(
                    f"rank {self._rank} ran out of memory in a micro-batch of "
                    f"{point.num_tokens} tokens on {scheme}; run the same command again, which "
                    f"goes on and skips it after a second attempt, or lower --max-tokens"
                ) from error
            self._engine = None
            release_cached_memory()
            return MeasuredPoint(scheme=scheme, point=point, why_not="out of memory")
        return _measured(scheme, point, of_all_ranks(own))

    def run_strategy(
        self, strategy: Strategy, points: Mapping[Scheme, MeasuredPoint]
    ) -> MeasuredStrategy:
        """Measure iterations, and regrouping alone.

        The makespan follows from micro-batches of the same iteration, as the machine may have been
        faster or slower when points were measured. The first micro-batch, which overlaps a gather,
        and the last one, which overlaps a scatter, do not count. The result is that of the
        iteration with the median overhead.

        points: for each scheme of the strategy, a measured micro-batch of which iterations are
        made. Cp ranks that may split run as one group.
        """
        engine = self.engine
        mine = strategy.replica_of(self._rank)
        used = {scheme: points[scheme.group_schemes[0]] for scheme in strategy.schemes}
        numbers = numbers_of_micro_batches(used)
        batches: list[PackedBatch] = []
        if mine is not None:
            packed = self._packed(used[mine.scheme].point, mine, mine.scheme.cp)
            batches = [packed] * numbers[mine.scheme]
        found: list[RankIteration] = []
        self._recorder.take()
        for number in range(self._num_warmup + 1 + self._num_measured):
            dist.barrier()
            start_s = time.perf_counter()
            outcome = engine.train_step(
                strategy.name, batches, self._forward_step, next_strategy=strategy.name
            )
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            wall_ms = (time.perf_counter() - start_s) * _MS_PER_S
            spans = self._recorder.take()
            # In later iterations the parameters are gathered already.
            if number > self._num_warmup:
                found.append(RankIteration.of(spans, wall_ms, num_micro_batches=len(batches)))
        regroup = self._regroup_speed(strategy)
        everyone, speeds = zip(*of_all_ranks((found, regroup)), strict=True)
        iterations = [
            MeasuredStrategy(
                name=strategy.name,
                replicas=str(strategy),
                iteration_ms=max(rank.wall_ms for rank in ranks),
                makespan_ms=makespan_ms(strategy, numbers, ranks),
                optimizer_ms=max(rank.optimizer_ms for rank in ranks),
                regroup=RegroupSpeed(
                    gather_bytes=max(speed.gather_bytes for speed in speeds),
                    gather_ms=max(speed.gather_ms for speed in speeds),
                    scatter_bytes=max(speed.scatter_bytes for speed in speeds),
                    scatter_ms=max(speed.scatter_ms for speed in speeds),
                ),
                expert_load=None if outcome.routing is None else outcome.routing.worst_load,
            )
            for ranks in zip(*everyone, strict=True)
        ]
        iterations.sort(key=lambda each: each.iteration_ms - each.makespan_ms)
        return iterations[len(iterations) // 2]

    def close(self) -> None:
        """End the engine; to be called before the process groups are destroyed."""
        if self._engine is not None:
            self._engine.close()

    def _times_of_rank(self, strategy: Strategy, point: GridPoint, context_size: int) -> _RankTimes:
        engine = self.engine
        mine = strategy.replica_of(self._rank)
        scheme = strategy.schemes[0]
        # One more than the pipeline is deep: the last ones are left out.
        num_micro_batches = self._num_warmup + self._num_measured + scheme.pp
        batches: list[PackedBatch] = []
        if mine is not None:
            batches = [self._packed(point, mine, context_size)] * num_micro_batches
        engine.gather(strategy.name)
        engine.finish_regrouping()
        self._recorder.take()
        self._meter.restart()
        dist.barrier()
        engine.forward_backward(strategy.name, batches, self._forward_step)
        engine.discard_gradients()
        spans = self._recorder.take()
        peak_bytes = self._meter.peak_bytes()
        if mine is None:
            return _RankTimes(None, 0, 0.0, 0.0, 0.0, peak_bytes)
        position = mine.position_of(self._rank)
        assert position is not None
        counted = range(self._num_warmup, self._num_warmup + self._num_measured)
        forward_ms = _median_ms(spans, "forward", counted)
        return _RankTimes(
            strategy.replicas.index(mine),
            position.stage,
            forward_ms,
            forward_ms + _median_ms(spans, "backward", counted),
            period_ms(spans, counted),
            peak_bytes,
        )

    def _regroup_speed(self, strategy: Strategy) -> RegroupSpeed:
        engine = self.engine
        gathers_ms, scatters_ms = [], []
        for _ in range(self._num_warmup + self._num_measured):
            engine.parameters_changed()
            self._recorder.take()
            dist.barrier()
            engine.gather(strategy.name)
            engine.finish_regrouping()
            gathers_ms.append(_extent_ms(_named(self._recorder.take(), "gather")))
            dist.barrier()
            # Without micro-batches only the scatter is left.
            engine.forward_backward(strategy.name, [], self._forward_step)
            engine.discard_gradients()
            scatters_ms.append(_extent_ms(_named(self._recorder.take(), "scatter")))
        traffic = engine.runtime_of(strategy.name).regrouper.traffic
        return RegroupSpeed(
            gather_bytes=traffic.gather_received_bytes,
            gather_ms=statistics.median(gathers_ms[self._num_warmup :]),
            scatter_bytes=traffic.scatter_sent_bytes,
            scatter_ms=statistics.median(scatters_ms[self._num_warmup :]),
        )

    def _packed(self, point: GridPoint, replica: Replica, context_size: int) -> PackedBatch:
        """Random tokens, the same in every context group of a replica; this rank's part of them."""
        rng = np.random.default_rng((self._seed, point.num_tokens))
        sequences = [rng.integers(0, self._vocab_size, size=n + 1) for n in point.lengths]
        position = replica.position_of(self._rank)
        assert position is not None
        part = pack(
            sequences,
            replica.scheme.tp,
            context_size=context_size,
            context_rank=position.cp % context_size,
            num_predictions=self.engine.definition.num_predictions,
        )
        return part.to(self.engine.device)


def numbers_of_micro_batches(points: Mapping[Scheme, MeasuredPoint]) -> dict[Scheme, int]:
    """Micro-batches of a replica in a measured iteration, by scheme: enough to fill a pipeline, and
    as many more as keep it at work until the slowest replica ends, up to a limit."""
    fewest = {scheme: max(_FEWEST_MICRO_BATCHES, 2 * scheme.pp) for scheme in points}
    longest_ms = max(
        (num + scheme.pp - 1) * points[scheme].time_ms for scheme, num in fewest.items()
    )
    filling = {
        scheme: int(longest_ms / points[scheme].time_ms) - scheme.pp + 1 for scheme in fewest
    }
    return {
        scheme: max(num, min(filling[scheme], _MOST_MICRO_BATCHES))
        for scheme, num in fewest.items()
    }


def makespan_ms(
    strategy: Strategy, numbers: Mapping[Scheme, int], ranks: Sequence[RankIteration]
) -> float:
    """Makespan of equal micro-batches, of which each scheme has its number."""

    def stage_ms(replica: Replica, stage: int) -> float:
        in_step = [r for cp in range(replica.scheme.cp) for r in replica.tp_ranks(stage, cp)]
        return statistics.fmean(ranks[rank].micro_batch_ms for rank in in_step)

    return max(
        pipeline_time_ms(
            [max(stage_ms(replica, stage) for stage in range(replica.scheme.pp))]
            * numbers[replica.scheme],
            replica.scheme.pp,
        )
        for replica in strategy.replicas
    )


def period_ms(spans: Sequence[RecordedSpan], counted: range) -> float:
    """Median time between the ends of successive backwards; 0 if there is only one."""
    ends_ns = [s.end_ns for s in _named(spans, "backward") if s.detail["micro_batch"] in counted]
    periods = [end - before for before, end in itertools.pairwise(sorted(ends_ns))]
    return statistics.median(periods) / _NS_PER_MS if periods else 0.0


def _measured(scheme: str, point: GridPoint, everyone: Sequence[_RankTimes]) -> MeasuredPoint:
    stages: dict[tuple[int, int], list[_RankTimes]] = {}
    for times in everyone:
        if times.replica is not None:
            stages.setdefault((times.replica, times.stage), []).append(times)
    num_stages = 1 + max(stage for _, stage in stages)
    replicas = sorted({replica for replica, _ in stages})
    forward_ms, total_ms = (
        [
            statistics.median(
                statistics.fmean(getattr(times, part) for times in stages[replica, stage])
                for replica in replicas
            )
            for stage in range(num_stages)
        ]
        for part in ("forward_ms", "total_ms")
    )
    slowest = max(range(num_stages), key=total_ms.__getitem__)
    return MeasuredPoint(
        scheme=scheme,
        point=point,
        stage_ms=tuple(total_ms),
        forward_ms=forward_ms[slowest],
        period_ms=max(times.period_ms for times in everyone),
        peak_bytes=max(times.peak_bytes for times in everyone),
    )


def _named(spans: Sequence[RecordedSpan], name: str) -> list[RecordedSpan]:
    return [span for span in spans if span.name == name]


def _duration_ms(span: RecordedSpan) -> float:
    return (span.end_ns - span.start_ns) / _NS_PER_MS


def _median_ms(spans: Sequence[RecordedSpan], name: str, counted: range) -> float:
    return statistics.median(
        _duration_ms(span) for span in _named(spans, name) if span.detail["micro_batch"] in counted
    )


def _extent_ms(spans: Sequence[RecordedSpan]) -> float:
    """Time from the first begin to the last end; 0 without spans."""
    if not spans:
        return 0.0
    return (max(s.end_ns for s in spans) - min(s.start_ns for s in spans)) / _NS_PER_MS
