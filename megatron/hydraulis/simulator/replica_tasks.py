"""1F1B of one replica as tasks of the event loop: a lane a stage, in the order of its program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.hydraulis.cost_model.pipeline import FORWARD_SHARE
from megatron.hydraulis.simulator.event_loop import EventLoop, Task
from megatron.hydraulis.simulator.stage_costs import StageCosts
from megatron.hydraulis.simulator.work import MicroBatchWork
from megatron.hydraulis.strategy import Replica
from megatron.hydraulis.transfer.canonical import Unit

__all__ = ["OperationTasks", "ReplicaTasks", "StagePart", "stage_parts", "stage_program"]


@dataclass(frozen=True, slots=True)
class StagePart:
    """What of a stage's forward runs between the arrivals of two units of parameters."""

    unit: Unit
    share: float
    """Of the stage's time."""


def stage_program(
    stage: int, num_stages: int, num_micro_batches: int
) -> Iterator[tuple[bool, int]]:
    """(whether it is a forward, micro-batch) of every operation of a stage, in 1F1B's order.

    ``num_stages - 1 - stage`` forwards ahead, then a forward and a backward in turn, then the rest
    of the backwards (arXiv 2006.09503; 2104.04473, §2.2).
    """
    num_ahead = min(num_stages - 1 - stage, num_micro_batches)
    for micro_batch in range(num_ahead):
        yield True, micro_batch
    for micro_batch in range(num_micro_batches):
        if num_ahead + micro_batch < num_micro_batches:
            yield True, num_ahead + micro_batch
        yield False, micro_batch


def stage_parts(stage: int, layers: Sequence[int], output_share: float) -> tuple[StagePart, ...]:
    """A stage's forward, unit by unit: the embedding takes no time, layers take equal times.

    Args:
        stage: counted from 0.
        layers: of every stage.
        output_share: the output layer's share of this stage's time.
    """
    first = sum(layers[:stage])
    parts = [
        StagePart(Unit.layer(first + i), (1.0 - output_share) / layers[stage])
        for i in range(layers[stage])
    ]
    if stage == 0:
        parts.insert(0, StagePart(Unit.embedding(), 0.0))
    if stage == len(layers) - 1:
        parts.append(StagePart(Unit.output(), output_share))
    return tuple(parts)


@dataclass(frozen=True, slots=True, eq=False)
class OperationTasks:
    """Forward or backward of one micro-batch on one stage."""

    is_forward: bool
    stage: int
    micro_batch: int
    num_tokens: int
    tasks: tuple[Task, ...]
    """One, or one a part where parameters arrive or gradients leave in between."""

    @property
    def start_ms(self) -> float:
        return self.tasks[0].start_ms

    @property
    def end_ms(self) -> float:
        return self.tasks[-1].end_ms

    @property
    def work_ms(self) -> float:
        """Without what it waits for inside."""
        return sum(task.duration_ms for task in self.tasks)


class ReplicaTasks:
    """All operations of a replica in one iteration, added to an event loop.

    Args:
        lane: name of the replica, unlike that of any other replica of any iteration.
        begin: which ends when the iteration begins.
        gathered: by unit, what the first forward waits for before it enters it; empty where
            nothing is gathered meanwhile.
        splits_last_backward: whether the last backward is to be cut into parts, for `last_of`.
    """

    def __init__(
        self,
        loop: EventLoop,
        replica: Replica,
        micro_batches: Sequence[MicroBatchWork],
        costs: StageCosts,
        *,
        lane: str,
        begin: Task,
        gathered: Mapping[Unit, Task],
        splits_last_backward: bool,
    ) -> None:
        self.replica = replica
        scheme = replica.scheme
        self._num_stages, self._num_micro_batches = scheme.pp, len(micro_batches)
        self._parts: tuple[tuple[StagePart, ...], ...] = ()
        if (gathered or splits_last_backward) and costs.shape is not None:
            layers = scheme.layers_per_stage(costs.shape.num_layers)
            self._parts = tuple(
                stage_parts(stage, layers, costs.output_share(scheme, stage))
                for stage in range(scheme.pp)
            )
        self.by_stage: list[list[OperationTasks]] = []
        """Operations of every stage, in the order in which it runs them."""
        self._found: dict[tuple[bool, int, int], OperationTasks] = {}
        stage_times_ms = [batch.times_ms(scheme, costs.coefficients) for batch in micro_batches]
        for stage in range(scheme.pp):
            times_ms = [of_stages[stage] for of_stages in stage_times_ms]
            operations = []
            for is_forward, number in stage_program(stage, scheme.pp, len(micro_batches)):
                forward_ms = times_ms[number] * FORWARD_SHARE
                operation = self._add(
                    loop,
                    (lane, stage),
                    (is_forward, stage, number),
                    micro_batches[number].num_tokens,
                    forward_ms if is_forward else times_ms[number] - forward_ms,
                    gathered,
                    splits_last_backward,
                )
                operations.append(operation)
                self._found[is_forward, stage, number] = operation
            self.by_stage.append(operations)
            if operations:
                loop.wait(operations[0].tasks[0], [begin])
        for (is_forward, stage, number), operation in self._found.items():
            loop.wait(operation.tasks[0], [self._input_of(is_forward, stage, number)])

    def _add(
        self,
        loop: EventLoop,
        lane: tuple[str, int],
        key: tuple[bool, int, int],
        num_tokens: int,
        duration_ms: float,
        gathered: Mapping[Unit, Task],
        splits_last_backward: bool,
    ) -> OperationTasks:
        is_forward, stage, number = key
        if is_forward and number == 0 and gathered:
            tasks = tuple(
                loop.add(lane, part.share * duration_ms, [gathered.get(part.unit)])
                for part in self._parts[stage]
            )
        elif not is_forward and number == self._num_micro_batches - 1 and splits_last_backward:
            parts = reversed(self._parts[stage])
            tasks = tuple(loop.add(lane, part.share * duration_ms) for part in parts)
        else:
            tasks = (loop.add(lane, duration_ms),)
        return OperationTasks(is_forward, stage, number, num_tokens, tasks)

    def _input_of(self, is_forward: bool, stage: int, number: int) -> Task | None:
        """What gives an operation its input: of the stage before, or after it in a backward."""
        neighbour = stage - 1 if is_forward else stage + 1
        found = self._found.get((is_forward, neighbour, number))
        return None if found is None else found.tasks[-1]

    @property
    def ends(self) -> list[Task]:
        """The last task of every stage."""
        return [operations[-1].tasks[-1] for operations in self.by_stage if operations]

    @property
    def before_last_backward(self) -> list[Task]:
        """What ends when the last backward of each stage begins."""
        found: list[Task] = []
        for stage, operations in enumerate(self.by_stage):
            if operations:
                found.append(operations[-2].tasks[-1])
                gradient = self._input_of(False, stage, self._num_micro_batches - 1)
                if gradient is not None:
                    found.append(gradient)
        return found

    def gradients_done(self) -> Iterator[tuple[Unit, Task]]:
        """The part of the last backward after which gradients of a unit are complete."""
        for stage, operations in enumerate(self.by_stage):
            if operations:
                parts = reversed(self._parts[stage])
                for part, task in zip(parts, operations[-1].tasks, strict=True):
                    yield part.unit, task
