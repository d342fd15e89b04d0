"""Jobs with many strategies, and the one-process result that all of them must have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.strategy import Strategy
from tests.support.comparison import (
    assert_close,
    assert_same,
    share_of_tolerance,
    wrong_tensors,
)
from tests.support.gloo_pool import pool_of
from tests.support.models import (
    Assignment,
    Job,
    RankRun,
    SmallModel,
    assemble,
    run_job,
    sequences,
    spread,
)
from tests.support.reference import ReferenceRun, is_vocabulary, run_reference

LENGTHS = ([17, 5, 9, 30, 3, 12, 8], [4, 26, 1, 7, 15], [6, 19, 33, 2, 1])
"""Trained tokens of each sequence, for three iterations."""
WEIGHT_SUMS = (35.75, 21.5, 0.4)
"""Sums of the weights of the iterations' tokens: not whole numbers, and one that rounds to 0."""
NUM_ATOMS = 8
"""T: above every tp that four ranks can have."""
FP64_TOLERANCE = 1e-10
"""Relative to a tensor's largest value."""
FP32_RTOL, FP32_ATOL_OF_MAX = 1e-5, 1.5e-6
"""The largest errors of 36 draws, of six lists of strategies and six initial weights each, are 0.26
to 1.09 of what 1e-5 and 1e-6 allow: roundings that AdamW amplifies."""

FP64_SETTINGS = AdamWSettings(lr=1e-2, eps=1e-5, weight_decay=0.1, clip_grad=0.5)
"""Large steps, so that parameters move and clipping acts."""
FP32_SETTINGS = AdamWSettings(lr=3e-4, eps=1e-5, weight_decay=0.1, clip_grad=1.0)
"""An ordinary learning rate: AdamW turns a rounding error d of a small gradient into lr / eps * d
in the parameter, on one process as on many."""

MAIN_MODEL = SmallModel(num_heads=8, num_groups=4)
"""GQA, SwiGLU, RMSNorm, RoPE, untied, padded vocabulary, sequence parallel."""
SHORT_MODEL = replace(MAIN_MODEL, num_layers=2)
"""Two layers, one on each stage of a pipeline of two."""
BIASED_MODEL = replace(
    SHORT_MODEL,
    position_embedding="learned_absolute",
    normalization="LayerNorm",
    swiglu=False,
    bias=True,
)
"""Learned positions, LayerNorm, GeLU and biases."""
GPT2_LIKE = replace(BIASED_MODEL, tied=True)


def model_for(num_ranks: int, *texts: str) -> SmallModel:
    """The main model, or the short one for strategies without pipelines.

    In a pipeline of two, each stage of the main model has two layers: gradients of one are
    scattered while the other runs backward.
    """
    replicas = [each for text in texts for each in Strategy.parse(text, num_ranks).replicas]
    return SHORT_MODEL if all(each.scheme.pp == 1 for each in replicas) else MAIN_MODEL


def law_job(
    num_ranks: int,
    text: str,
    model: SmallModel | None = None,
    num_atoms: int | None = NUM_ATOMS,
) -> Job:
    """Three iterations of a strategy, with unequal numbers of micro-batches, of weighted tokens.

    Where there are several replicas, the first has no sequence in the second iteration. Without a
    model it is `model_for` the strategy.
    """
    model = model or model_for(num_ranks, text)
    num_replicas = len(Strategy.parse(text, num_ranks).replicas)
    settings = FP64_SETTINGS if model.dtype == torch.float64 else FP32_SETTINGS
    uneven = spread(len(LENGTHS[0]), num_replicas)
    starved = (
        Assignment(((), *spread(len(LENGTHS[1]), num_replicas - 1).replicas))
        if num_replicas > 1
        else spread(len(LENGTHS[1]), 1, per_micro_batch=3)
    )
    small = spread(len(LENGTHS[2]), num_replicas, per_micro_batch=1)
    rng = np.random.default_rng(11)
    batches = tuple(sequences(rng, lengths, model.vocab_size) for lengths in LENGTHS)
    return Job(
        model=model,
        strategies=(text,),
        schedule=(0, 0, 0),
        assignments=(uneven, starved, small),
        batches=batches,
        weights=tuple(
            random_weights(rng, lengths, total)
            for lengths, total in zip(LENGTHS, WEIGHT_SUMS, strict=True)
        ),
        num_atoms=num_atoms,
        settings=settings,
    )


def random_weights(
    rng: np.random.Generator, lengths: list[int], total: float
) -> tuple[np.ndarray, ...]:
    """(length + 1,) weights of each sequence; the second, and a third of the tokens, have none.

    The weights of first tokens are ignored: they are large, and not in the total.
    """
    weights = [rng.random(length + 1) * (rng.random(length + 1) > 1 / 3) for length in lengths]
    weights[1][:] = 0.0
    scale = total / sum(each[1:].sum() for each in weights)
    for each in weights:
        each *= scale
        each[0] = 7.0
    return tuple(each.astype(np.float32) for each in weights)


SPLITS = {
    "4": [(0, 4)],
    "2+2": [(0, 2), (2, 2)],
    "2+1+1": [(0, 2), (2, 1), (3, 1)],
    "1+1+2": [(0, 1), (1, 1), (2, 2)],
    "1+1+1+1": [(0, 1), (1, 1), (2, 1), (3, 1)],
}
"""All splits of a width of 4 into aligned groups: offsets and sizes."""


def waves(
    splits: list[list[tuple[int, int]]],
    model: SmallModel = SHORT_MODEL,
    *,
    ep: int = 1,
    pp: int = 1,
) -> Job:
    """The law's job on one replica, its micro-batches in groups of the given splits, in turn.

    Groups get unequal shares, some of them none: which ones changes from wave to wave.
    """
    width = sum(size for _, size in splits[0])
    assignments = []
    turn = 0
    for batch in LENGTHS:
        shares, groups = [], []
        for start in range(0, len(batch), 3):
            indices = tuple(range(start, min(start + 3, len(batch))))
            split = splits[turn % len(splits)]
            counts = [0] * len(split)
            for i in range(len(indices)):
                counts[(i + turn) % len(split)] += 1
            shares.append(indices)
            groups.append(
                tuple((*place, count) for place, count in zip(split, counts, strict=True))
            )
            turn += 1
        assignments.append(Assignment((tuple(shares),), (tuple(groups),)))
    return replace(
        law_job(width * pp, f"cp{width}pp{pp}", model),
        strategies=(f"cp{width}~ep{ep}pp{pp}",),
        assignments=tuple(assignments),
    )


def changing(texts: tuple[str, ...], model: SmallModel | None = None, num_ranks: int = 4) -> Job:
    """The law's job on another strategy in each of its iterations, of which there are three."""
    model = model or model_for(num_ranks, *texts)
    jobs = [law_job(num_ranks, text, model) for text in texts]
    return replace(
        jobs[0],
        strategies=texts,
        schedule=tuple(range(len(texts))),
        assignments=tuple(job.assignments[i] for i, job in enumerate(jobs)),
        batches=jobs[0].batches[: len(texts)],
    )


BY_DEFAULT = 4
"""One case of so many runs in the default suite."""


def law_cases(models: Iterable[str], lists: Iterable[tuple[str, ...]]) -> list[object]:
    """Parameters (model, strategies one for each iteration): each with each.

    A quarter runs by default, spread over models and lists.
    """
    return [
        pytest.param(
            name,
            strategies,
            marks=pytest.mark.nightly if (i + j) % BY_DEFAULT else (),
            id=f"{name}: {', '.join(strategies)}",
        )
        for i, name in enumerate(models)
        for j, strategies in enumerate(lists)
    ]


@cache
def law_reference(model: SmallModel) -> ReferenceRun:
    """The one-process run of `law_job`'s sequences, computed in fp64.

    An fp32 model has an fp64 reference with the same fp32 initial weights: an fp32 reference has
    rounding errors as large as those to be bounded, that are not the engine's.
    """
    reference: ReferenceRun = pool_of(1).run(
        run_reference, law_job(1, "tp1", model), torch.float64
    )[0]
    return reference


def assert_law(job: Job, runs: list[RankRun]) -> None:
    """Gradients, parameters and losses of every iteration equal the reference's."""
    reference = law_reference(job.model)
    is_fp64 = job.model.dtype == torch.float64
    for i in range(len(job.schedule)):
        pairs = {
            "gradient": (assemble(runs, [r.gradients[i] for r in runs]), reference.gradients[i]),
            "parameter": (assemble(runs, [r.parameters[i] for r in runs]), reference.parameters[i]),
        }
        for kind, (found, expected) in pairs.items():
            what = f"{job.strategies[0]}, iteration {i}: {kind}"
            if is_fp64:
                assert_same(found, expected, FP64_TOLERANCE, what)
            else:
                assert_close(
                    found, expected, rtol=FP32_RTOL, atol_of_max=FP32_ATOL_OF_MAX, what=what
                )
        for name, gradient in pairs["gradient"][0].items():
            if is_vocabulary(name):
                padding = gradient[job.model.vocab_size :]
                assert padding.size
                assert not padding.any(), f"{name}: padded rows have a gradient"
        for run in runs:
            np.testing.assert_allclose(
                run.losses[i], reference.losses[i], rtol=1e-12 if is_fp64 else 1e-6
            )
            np.testing.assert_allclose(
                run.prediction_losses[i],
                reference.prediction_losses[i],
                rtol=1e-12 if is_fp64 else 1e-6,
            )
            assert len(run.biases) == len(reference.biases)
            if reference.biases:
                np.testing.assert_array_equal(run.biases[i], reference.biases[i])


def law_share(job: Job, runs: list[RankRun]) -> float:
    """Largest error of a gradient or parameter of an fp32 model, over what `assert_law` allows."""
    reference = law_reference(job.model)
    return max(
        share_of_tolerance(
            assemble(runs, [getattr(run, kind)[i] for run in runs]),
            getattr(reference, kind)[i],
            rtol=FP32_RTOL,
            atol_of_max=FP32_ATOL_OF_MAX,
        )
        for i in range(len(job.schedule))
        for kind in ("gradients", "parameters")
    )


def wrong_gradients(job: Job, runs: list[RankRun]) -> dict[str, float]:
    """Relative errors beyond rounding in the first iteration's gradients, by name."""
    found = assemble(runs, [run.gradients[0] for run in runs])
    return wrong_tensors(found, law_reference(job.model).gradients[0], FP64_TOLERANCE)


def check_law(job: Job, num_ranks: int) -> list[RankRun]:
    """Run the job on as many ranks and compare."""
    runs: list[RankRun] = pool_of(num_ranks).run(run_job, job)
    assert_law(job, runs)
    return runs


def in_turns(
    model: SmallModel, num_ranks: int, texts: Sequence[str], turns: Sequence[tuple[int, int]]
) -> Job:
    """The law's iterations in other orders and strategies; waves split as all of `SPLITS`.

    turns: index of the strategy and of the law's iteration, for each iteration.
    """
    splits = list(SPLITS.values())
    jobs = [
        waves(splits, model) if "~" in text else law_job(num_ranks, text, model) for text in texts
    ]
    return replace(
        jobs[0],
        strategies=tuple(texts),
        schedule=tuple(which for which, _ in turns),
        assignments=tuple(jobs[which].assignments[batch] for which, batch in turns),
        batches=tuple(jobs[0].batches[batch] for _, batch in turns),
        weights=tuple(jobs[0].weights[batch] for _, batch in turns),
    )
