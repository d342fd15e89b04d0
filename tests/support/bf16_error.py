"""Rounding errors with bf16 parameters, compared with those of a single process."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np

from tests.support.gloo_pool import Device, pool_of
from tests.support.law import law_job, law_reference
from tests.support.models import Job, RankRun, SmallModel, assemble, run_job

MOST_OF_ONE_PROCESS = 2.0
"""Error of a gradient over that of the one-process run."""
LEAST_ERROR = 2**-9
"""Half a unit in the last place of bf16: a smaller error would mean that nothing was rounded."""

Tensors = Mapping[str, np.ndarray]
Gradients = Sequence[Tensors]


def of_all_layers(name: str) -> str:
    """The kind of a parameter: that of one layer may have 32 elements, whose error depends on
    chance, and an expert may have no token."""
    return re.sub(r"(layers|local_experts)\.\d+", r"\1", name)


def differences(
    found: Tensors, exact: Tensors, kind_of: Callable[[str], str] = of_all_layers
) -> dict[str, float]:
    """2-norms relative to the exact tensors': of everything, and of each kind of parameter."""
    squares: dict[str, list[float]] = {}
    for name, value in exact.items():
        error = found[name][: value.shape[0]] - value
        for kind in ("everything", kind_of(name)):
            sums = squares.setdefault(kind, [0.0, 0.0])
            sums[0] += float(np.square(error).sum())
            sums[1] += float(np.square(value).sum())
    return {kind: (error / size) ** 0.5 for kind, (error, size) in squares.items()}


def errors(model: SmallModel, found: Tensors, iteration: int) -> dict[str, float]:
    """Differences from the exact gradients of an iteration."""
    return differences(found, law_reference(model).gradients[iteration])


def gradients_of(job: Job, num_ranks: int, device: Device = "cpu") -> Gradients:
    """Whole gradients of each iteration."""
    runs: list[RankRun] = pool_of(num_ranks, device).run(run_job, job)
    return [assemble(runs, [run.gradients[i] for run in runs]) for i in range(len(job.batches))]


@cache
def one_process(model: SmallModel) -> list[dict[str, float]]:
    """Errors of the same engine on one rank of a CPU, with the same batches."""
    gradients = gradients_of(law_job(1, "tp1", model), 1)
    return [errors(model, gradient, i) for i, gradient in enumerate(gradients)]


def worst_ratio(model: SmallModel, gradients: Gradients, alone: SmallModel) -> float:
    """The largest error, of any kind and iteration, over that of one process.

    Args:
        model: what gave the gradients.
        gradients: of each iteration.
        alone: what the process runs: the model, with a core attention that a CPU has.
    """
    ratios = []
    for i, gradient in enumerate(gradients):
        found = errors(model, gradient, i)
        assert found["everything"] > LEAST_ERROR
        ratios += [found[kind] / error for kind, error in one_process(alone)[i].items()]
    return max(ratios)


def assert_little_is_added(model: SmallModel, gradients: Gradients) -> None:
    """No error is more than twice that of one process."""
    assert worst_ratio(model, gradients, model) <= MOST_OF_ONE_PROCESS
