"""A simulated iteration as spans of a trace, by the names of a measured one.

They are no planned spans: the simulation takes the run's place, so that the table and the picture
of a trace, and any viewer, show it as they show a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.hydraulis.observability.trace import Span
from megatron.hydraulis.simulator.replica_tasks import OperationTasks
from megatron.hydraulis.simulator.simulation import IterationTasks

__all__ = ["iteration_spans", "stage_leaders", "stage_names"]

_US_PER_MS = 1e3


def stage_leaders(iteration: IterationTasks) -> tuple[int, ...]:
    """The first rank of every stage of every replica: all others of a stage do the same."""
    return tuple(
        replica.replica.rank_at(stage, 0, 0)
        for replica in iteration.replicas
        for stage in range(replica.replica.scheme.pp)
    )


def stage_names(iteration: IterationTasks) -> dict[int, str]:
    """What the ranks of a stage are called, by their first: scheme, stage of several, ranks."""
    names: dict[int, str] = {}
    for replica in iteration.replicas:
        scheme, ranks = replica.replica.scheme, replica.replica.ranks
        of_stage = scheme.tp * scheme.cp
        for stage in range(scheme.pp):
            own = ranks[stage * of_stage : (stage + 1) * of_stage]
            name = f"{scheme}, stage {stage}" if scheme.pp > 1 else str(scheme)
            names[replica.replica.rank_at(stage, 0, 0)] = f"{name}, {_rank_text(own)}"
    return names


def _rank_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return f"rank {ranks[0]} and {len(ranks) - 1} more"


def iteration_spans(iteration: IterationTasks, *, started_ms: float) -> list[Span]:
    """What every rank does in an iteration, by start.

    started_ms: end of the iteration before it.
    """
    spans: list[Span] = []
    for rank in range(iteration.work.strategy.num_ranks):
        spans += _common(iteration, rank, started_ms)
    for replica in iteration.replicas:
        scheme = replica.replica.scheme
        for stage, operations in enumerate(replica.by_stage):
            own = list(_stage_spans(iteration, operations))
            for cp in range(scheme.cp):
                for tp in range(scheme.tp):
                    rank = replica.replica.rank_at(stage, cp, tp)
                    spans += [span.on(rank) for span in own]
    return sorted(spans, key=lambda span: (span.start_us, -span.end_us))


class _RanklessSpan:
    """A span of every rank of a stage."""

    def __init__(
        self, track: str, name: str, start_ms: float, end_ms: float, **detail: int | str
    ) -> None:
        self._what = (track, name, start_ms * _US_PER_MS, end_ms * _US_PER_MS, detail)

    def on(self, rank: int) -> Span:
        track, name, start_us, end_us, detail = self._what
        return Span(
            rank=rank, track=track, name=name, start_us=start_us, end_us=end_us, detail=detail
        )


def _stage_spans(
    iteration: IterationTasks, operations: list[OperationTasks]
) -> Iterator[_RanklessSpan]:
    number = iteration.number
    free_ms = iteration.begin_ms
    for operation in operations:
        stage = operation.stage
        if operation.start_ms > free_ms:
            yield _RanklessSpan(
                "compute",
                "pipeline wait",
                free_ms,
                operation.start_ms,
                iteration=number,
                stage=stage,
            )
        yield _RanklessSpan(
            "compute",
            "forward" if operation.is_forward else "backward",
            operation.start_ms,
            operation.end_ms,
            iteration=number,
            micro_batch=operation.micro_batch,
            stage=stage,
            num_tokens=operation.num_tokens,
        )
        for earlier, later in zip(operation.tasks, operation.tasks[1:], strict=False):
            if later.start_ms > earlier.end_ms:
                yield _RanklessSpan(
                    "host", "gather wait", earlier.end_ms, later.start_ms, iteration=number
                )
        free_ms = operation.end_ms


def _common(iteration: IterationTasks, rank: int, started_ms: float) -> Iterator[Span]:
    """What all ranks do alike."""
    number, strategy = iteration.number, iteration.work.strategy.name
    begin_ms, end_ms = iteration.begin_ms, iteration.end_ms
    if begin_ms > started_ms:
        wait = _RanklessSpan("host", "planning wait", started_ms, begin_ms, iteration=number)
        yield wait.on(rank)
    whole = _RanklessSpan(
        "iteration", "iteration", begin_ms, end_ms, iteration=number, strategy=strategy
    )
    yield whole.on(rank)
    for name in ("gather", "scatter"):
        for bucket in iteration.buckets:
            task = bucket.gather if name == "gather" else bucket.scatter
            yield _RanklessSpan(
                "regroup",
                name,
                task.start_ms,
                task.end_ms,
                iteration=number,
                bucket=bucket.index,
            ).on(rank)
    if iteration.buckets:
        updates = [bucket.update for bucket in iteration.buckets]
        first_ms = min(task.start_ms for task in updates)
        last_ms = max(task.end_ms for task in updates)
        yield _RanklessSpan("compute", "optimizer", first_ms, last_ms, iteration=number).on(rank)
    if iteration.overhead is not None:
        task = iteration.overhead
        yield _RanklessSpan("regroup", "overhead", task.start_ms, task.end_ms, iteration=number).on(
            rank
        )
