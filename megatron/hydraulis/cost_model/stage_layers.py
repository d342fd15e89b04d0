"""Layers of the stages of a pipeline such that its slowest stage is as fast as can be."""

from bisect import bisect_right
from collections.abc import Callable

from megatron.hydraulis.errors import StrategyError

__all__ = ["split_layers"]

OfStage = Callable[[int, int], float]
"""Of a stage, counted from 0, and its number of layers, at least 1."""


def split_layers(
    num_layers: int, num_stages: int, *, time: OfStage, tokens: OfStage, min_tokens: float
) -> tuple[int, ...]:
    """Layers of each stage, shape (num_stages,): the least time of the slowest stage.

    time: of a stage, in any unit; must not fall when layers are added. tokens: most tokens that a
    stage holds; must not rise. The split holds min_tokens, or as many as any split does where none
    holds so many. Of the splits with the least time it is the one that holds most tokens.

    That is exact: both functions are monotone, so a bound on time and one on tokens are each a
    most number of layers of every stage; the least bounds that leave room for all layers are found
    by bisection, and adding layers one by one to the stage that then holds most tokens gives the
    largest least number of tokens.

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
        if _has_room(num_layers, _most_layers(times, bounds[middle])):
            high = middle
        else:
            low = middle + 1
    return _fill(num_layers, _most_layers(times, bounds[low]), time, tokens)


def _most_layers(times: list[list[float]], bound: float) -> list[int]:
    return [bisect_right(of_stage, bound) for of_stage in times]


def _has_room(num_layers: int, most: list[int]) -> bool:
    return min(most) >= 1 and sum(most) >= num_layers


def _fill(num_layers: int, most: list[int], time: OfStage, tokens: OfStage) -> tuple[int, ...]:
    """All layers within a most number of each stage, one by one where most tokens are left."""
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
