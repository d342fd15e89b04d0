"""Pipelines: the exact time of 1F1B over unequal micro-batches, how layers are split, and the times
of stages."""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron.hydraulis.cost_model.interface import FORWARD_SHARE, Coefficients, CostModel
from megatron.hydraulis.errors import StrategyError
from megatron.hydraulis.model_shape import ModelShape
from megatron.hydraulis.strategy import Scheme
from megatron.hydraulis.transfer.canonical import Unit

_NUM_UNTIL_STEADY = 16
"""Micro-batches for each stage after which a pipeline is taken to repeat itself."""

OfStage = Callable[[int, int], float]
"""Takes a stage, counted from 0, and its number of layers, at least 1."""


def pipeline_time_ms(
    times_ms: Sequence[float], num_stages: int, *, forward_share: float = FORWARD_SHARE
) -> float:
    """Time from the first forward to the last backward of a replica.

    times_ms: shape (num_micro_batches,), forward + backward of each micro-batch on one stage, in
    execution order; every stage takes the same. They include the messages between stages. 0.0
    without micro-batches.

    Stage s of p runs ``w = p-1-s`` forwards ahead, then one forward and one backward in turn,
    then the remaining backwards (1F1B, arXiv 2006.09503 and 2104.04473). An operation starts when
    its stage is free and its input has arrived, so for micro-batch k on stage s::

        F(s, k) = max(F(s-1, k), end of the previous operation on s) + f_k
        B(s, k) = max(B(s+1, k), end of the previous operation on s) + b_k

    F(s, k) follows B(s, k-w-1), or F(s, k-1) while stage s is still filling; B(s, k) follows
    F(s, k+w), or B(s, k-1) when no forwards are left. Example: times 4, 1, 4 on 2 stages with a
    forward share of a third take 16, although Σt + (p-1)·max t = 13.

    Raises ValueError for a negative or non-finite time, fewer than one stage, or a forward share
    outside [0, 1].
    """
    _check(times_ms, num_stages, forward_share)
    if num_stages == 1:
        return math.fsum(times_ms)
    return last_backward_end_ms([_halves_ms(times_ms, forward_share)] * num_stages)


def equal_micro_batches_time_ms(
    stages_ms: Sequence[float], num_micro_batches: int, forward_share: float
) -> float:
    """`pipeline_time_ms` of equal micro-batches on unequal stages.

    stages_ms: shape (num_stages,), forward + backward of a micro-batch on each stage.
    """
    num_simulated = min(num_micro_batches, _NUM_UNTIL_STEADY * len(stages_ms))
    halves_ms = [_halves_ms([stage_ms] * num_simulated, forward_share) for stage_ms in stages_ms]
    rest_ms = (num_micro_batches - num_simulated) * max(stages_ms)
    return last_backward_end_ms(halves_ms) + rest_ms


@dataclass(frozen=True, slots=True)
class Operation:
    """Forward or backward of one micro-batch on one stage."""

    is_forward: bool
    stage: int
    micro_batch: int
    start_ms: float
    """Time since the first forward of the replica began."""
    end_ms: float


def pipeline_schedule(
    times_ms: Sequence[float], num_stages: int, *, forward_share: float = FORWARD_SHARE
) -> list[Operation]:
    """When each forward and backward of a replica runs; the operations of a stage are in order.

    Arguments, recurrence and errors are those of `pipeline_time_ms`.
    """
    _check(times_ms, num_stages, forward_share)
    operations: list[Operation] = []
    last_backward_end_ms([_halves_ms(times_ms, forward_share)] * num_stages, operations)
    return operations


def _check(times_ms: Sequence[float], num_stages: int, forward_share: float) -> None:
    if num_stages < 1:
        raise ValueError(f"a pipeline has at least 1 stage, not {num_stages}")
    if not 0.0 <= forward_share <= 1.0:
        raise ValueError(f"the forward share is between 0 and 1, not {forward_share}")
    for time_ms in times_ms:
        if not 0.0 <= time_ms < math.inf:
            raise ValueError(f"a micro-batch takes a finite time of at least 0, not {time_ms} ms")


def _halves_ms(times_ms: Sequence[float], forward_share: float) -> tuple[list[float], list[float]]:
    """Forwards and backwards of micro-batches."""
    forward_ms = [forward_share * time_ms for time_ms in times_ms]
    return forward_ms, [
        time_ms - forward for time_ms, forward in zip(times_ms, forward_ms, strict=True)
    ]


def last_backward_end_ms(
    halves_ms: Sequence[tuple[list[float], list[float]]],
    operations: list[Operation] | None = None,
) -> float:
    """The recurrence of `pipeline_time_ms`.

    halves_ms: forwards and backwards of the micro-batches on each stage. Appends to ``operations``
    if given.
    """
    num_stages, num_micro_batches = len(halves_ms), len(halves_ms[0][0])
    free_ms = [0.0] * num_stages
    # End of the latest backward of each stage, and 0 behind the last one: its backward follows its
    # own forward, whose end is in free_ms.
    backward_end_ms = [0.0] * (num_stages + 1)
    # In round r stage s runs backward r-1-w_s and then forward r. Stage s+1 has run that backward
    # in round r-1, and stage s-1 that forward in this round, so every input is known.
    for round_ in range(num_micro_batches + num_stages):
        forward_end_ms = 0.0
        for stage, (forward_ms, backward_ms) in enumerate(halves_ms):
            # Comparisons instead of max(): plans are searched by this function.
            done_ms = free_ms[stage]
            finished = round_ - num_stages + stage
            if 0 <= finished < num_micro_batches:
                input_ms = backward_end_ms[stage + 1]
                start_ms = done_ms if done_ms > input_ms else input_ms
                done_ms = start_ms + backward_ms[finished]
                backward_end_ms[stage] = done_ms
                if operations is not None:
                    operations.append(Operation(False, stage, finished, start_ms, done_ms))
            if round_ < num_micro_batches:
                start_ms = done_ms if done_ms > forward_end_ms else forward_end_ms
                done_ms = start_ms + forward_ms[round_]
                forward_end_ms = done_ms
                if operations is not None:
                    operations.append(Operation(True, stage, round_, start_ms, done_ms))
            free_ms[stage] = done_ms
    return backward_end_ms[0]


def split_layers(
    num_layers: int,
    num_stages: int,
    *,
    time: OfStage,
    tokens: OfStage,
    min_tokens: float,
) -> tuple[int, ...]:
    """Layers of each stage, shape (num_stages,), that minimise the time of the slowest stage.

    time: of a stage, in any unit; must not fall when layers are added. tokens: most tokens that a
    stage holds; must not rise. The split holds min_tokens, or as many as any split can. Of the
    splits with the least time it is the one that holds the most tokens.

    The result is exact: both functions are monotone, so a bound on time or tokens limits the layers
    of every stage. The tightest bounds that leave room for all layers are found by bisection, and
    adding layers one by one to the stage that then holds most tokens maximises the tokens.

    Raises StrategyError for more stages than layers.
    """
    if num_stages > num_layers:
        raise StrategyError(
            f"every stage needs at least 1 layer but {num_stages} stages share {num_layers}; use "
            f"at most pp{num_layers}"
        )
    most_of_one = num_layers - num_stages + 1
    unbounded = [most_of_one] * num_stages
    roomiest = _fill(num_layers, unbounded, time, tokens)
    held = min(tokens(stage, layers) for stage, layers in enumerate(roomiest))
    needed = min(min_tokens, held)
    by_memory = [
        max(n for n in range(1, most_of_one + 1) if tokens(stage, n) >= needed)
        for stage in range(num_stages)
    ]
    times = [[time(stage, n + 1) for n in range(most)] for stage, most in enumerate(by_memory)]
    bounds = sorted({one for of_stage in times for one in of_stage})
    low, high = 0, len(bounds) - 1
    while low < high:
        middle = (low + high) // 2
        most = _most_layers(times, bounds[middle])
        if min(most) >= 1 and sum(most) >= num_layers:
            high = middle
        else:
            low = middle + 1
    return _fill(num_layers, _most_layers(times, bounds[low]), time, tokens)


def _most_layers(times: list[list[float]], bound: float) -> list[int]:
    return [bisect_right(of_stage, bound) for of_stage in times]


def _fill(num_layers: int, most: list[int], time: OfStage, tokens: OfStage) -> tuple[int, ...]:
    """Layers of each stage, added one by one, at most ``most``, where most tokens then fit."""
    layers = [1] * len(most)
    for _ in range(num_layers - len(most)):
        open_stages = (stage for stage in range(len(most)) if layers[stage] < most[stage])
        chosen = min(
            open_stages,
            key=lambda stage: (
                -tokens(stage, layers[stage] + 1),
                time(stage, layers[stage] + 1),
                stage,
            ),
        )
        layers[chosen] += 1
    return tuple(layers)


@dataclass(frozen=True)
class StageCosts:
    """Coefficients of every stage of a scheme.

    A cost model has the time of the slowest stage. If the shape of the model is known, the other
    stages take a share of it: of a and c by their layers, of b by the entries of their matrices,
    including the output layer. The embedding is a look-up and costs nothing. Without the shape all
    stages take the same time, which is what the planner assumes.
    """

    cost_model: CostModel
    shape: ModelShape | None = None
    """None if all stages are to take the same time."""
    _known: dict[Scheme, tuple[Coefficients, ...]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def coefficients(self, scheme: Scheme) -> tuple[Coefficients, ...]:
        """Shape (pp,), by stage; raises StrategyError as cost model and scheme do."""
        if scheme not in self._known:
            self._known[scheme] = self._of(scheme)
        return self._known[scheme]

    def usual_times_ms(self, scheme: Scheme) -> list[tuple[float, float]]:
        """Forward and backward, on each stage, of a micro-batch that short sequences fill up to its
        limit."""
        num_tokens = self.cost_model.max_tokens(scheme)
        usual = [
            (each.time_of_sums_ms(0.0, num_tokens), each) for each in self.coefficients(scheme)
        ]
        return [(ms * of.forward_share, ms * (1.0 - of.forward_share)) for ms, of in usual]

    def _of(self, scheme: Scheme) -> tuple[Coefficients, ...]:
        slowest = self.cost_model.coefficients(scheme)
        if self.shape is None:
            return (slowest,) * scheme.pp
        layers = list(scheme.layers_per_stage(self.shape.num_layers))
        layers[-1] += self.shape.num_predictions
        entries = _stage_entries(self.shape, scheme)
        most_layers, most_entries = max(layers), max(entries)
        return tuple(
            slowest.scaled(
                a=num_layers / most_layers, b=num_entries / most_entries, c=num_layers / most_layers
            )
            for num_layers, num_entries in zip(layers, entries, strict=True)
        )


def stage_parts(shape: ModelShape, scheme: Scheme) -> tuple[tuple[tuple[Unit, float], ...], ...]:
    """Units of every stage in the order of its forward, each with its share of the stage's time:
    shape (pp, num_units).

    The embedding takes no time, layers take equal times.
    """
    layers = scheme.layers_per_stage(shape.num_layers)
    of_last, num_predictions = _stage_entries(shape, scheme)[-1], shape.num_predictions
    of_output = (1 + num_predictions) * shape.num_embedding_parameters / of_last
    of_prediction = _prediction_entries(shape) / of_last
    units = iter(range(shape.num_layers))
    parts = []
    for stage, num_layers in enumerate(layers):
        of_others = of_output + num_predictions * of_prediction
        of_layers = 1.0 - of_others if stage == scheme.pp - 1 else 1.0
        parts.append([(Unit.layer(next(units)), of_layers / num_layers) for _ in range(num_layers)])
    parts[0].insert(0, (Unit.embedding(), 0.0))
    parts[-1].append((Unit.output(), of_output))
    parts[-1] += [(Unit.prediction(index), of_prediction) for index in range(num_predictions)]
    return tuple(map(tuple, parts))


def _stage_entries(shape: ModelShape, scheme: Scheme) -> list[int]:
    """Number of entries of each stage's matrices: shape (pp,)."""
    layers = scheme.layers_per_stage(shape.num_layers)
    entries = [num_layers * shape.num_matrix_parameters_per_layer for num_layers in layers]
    entries[-1] += (1 + shape.num_predictions) * shape.num_embedding_parameters
    entries[-1] += shape.num_predictions * _prediction_entries(shape)
    return entries


def _prediction_entries(shape: ModelShape) -> int:
    """Entries of the matrices of a layer of multi-token prediction."""
    return shape.num_matrix_parameters_per_layer + shape.num_projection_entries
