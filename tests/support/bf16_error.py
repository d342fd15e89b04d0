"""Rounding errors with bf16 parameters, compared with those of a single process."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from unittest.mock import patch

import numpy as np
import torch

from megatron.hydraulis.data.packed_batch import part_places
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.experts import SequenceRouter
from tests.support.gloo_pool import Device, pool_of
from tests.support.law import law_job, law_reference
from tests.support.models import (
    Job,
    RankRun,
    SmallModel,
    assemble,
    build_engine,
    packs_of_rank,
    run_job,
)

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


Choices = dict[tuple[int, int, int], frozenset[int]]
"""(layer, sequence, place in it) -> the experts that the token passes."""


def changed_choices(job: Job, num_ranks: int) -> tuple[float, float]:
    """Of the first batch with the initial weights: the share of tokens, over the layers, that pass
    other experts than on one process, and the relative difference of the loss."""
    alone, loss_alone = _choices_of(law_job(1, "tp1", job.model), 1)
    found, loss = _choices_of(job, num_ranks)
    assert found.keys() == alone.keys()
    num_changed = sum(found[token] != experts for token, experts in alone.items())
    return num_changed / len(alone), abs(loss / loss_alone - 1.0)


def _choices_of(job: Job, num_ranks: int) -> tuple[Choices, float]:
    of_ranks = pool_of(num_ranks).run(_run_first_batch, job)
    return {token: chosen for part, _ in of_ranks for token, chosen in part.items()}, of_ranks[0][1]


def _run_first_batch(job: Job) -> tuple[Choices, float]:
    engine = build_engine(job)
    (strategy,) = engine.pool.strategies
    assignment, batch = job.assignments[0], job.batches[0]
    mine = packs_of_rank(strategy, assignment, batch, engine.rank, weights=job.weights_of(0))
    replica = next(i for i, each in enumerate(strategy.replicas) if engine.rank in each.ranks)
    num_seen: Counter[int] = Counter()
    choices: Choices = {}

    def note(router: SequenceRouter, chosen: torch.Tensor, padding_mask: object = None) -> None:
        row, layer = router._row, router.layer
        group, begin = row.cp_group, router.tp_group.rank() * len(chosen)
        part = (1, 0) if group is None else (group.size(), group.rank())
        sequences = assignment.replicas[replica][num_seen[layer]]
        num_seen[layer] += 1
        for place, number, position in zip(
            *part_places(row.sequence_lengths, row.segment_lengths, *part), strict=True
        ):
            if begin <= place < begin + len(chosen):
                experts = chosen[place - begin].nonzero().flatten().tolist()
                choices[layer, sequences[number], int(position)] = frozenset(experts)

    with patch.object(SequenceRouter, "_apply_expert_bias", note):
        engine.forward_backward(strategy.name, mine, make_forward_step())
    loss = engine.loss_of_last(1).mean
    engine.discard_gradients()
    return choices, loss


def assert_little_is_added(model: SmallModel, gradients: Gradients) -> None:
    """No error is more than twice that of one process."""
    assert worst_ratio(model, gradients, model) <= MOST_OF_ONE_PROCESS
