"""Parameters after steps of AdamW: strategies differ as much as two orders of summation do.

AdamW divides a gradient by its size. Where the exact gradient is zero, as that of a key's bias is
(softmax ignores what all keys share), the step is ±lr whatever the rounding error. So these
parameters differ by their own size, on one rank as on many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from tests.support.bf16_error import Tensors, differences
from tests.support.gloo_pool import pool_of
from tests.support.law import BIASED_MODEL, LENGTHS, law_job, law_reference
from tests.support.models import Assignment, Job, RankRun, SmallModel, assemble, run_job

pytestmark = pytest.mark.distributed

MOST_OF_CONTROL = 2.0
NUM_ROUNDS = 3
"""How often the three batches are trained on."""
SETTINGS = AdamWSettings(lr=1e-3, eps=1e-8, weight_decay=0.1, clip_grad=1.0)
BF16 = replace(BIASED_MODEL, dtype=torch.bfloat16)
FP32 = replace(BF16, dtype=torch.float32)
ROUNDING = {torch.bfloat16: 2**-9, torch.float32: 2**-24}
"""Half a unit in the last place."""


def kind_of(name: str) -> str:
    """The bias of keys is part of one parameter with those of queries and values."""
    return "qkv bias" if name.endswith("linear_qkv.bias") else "others"


def parameters_after(job: Job, num_ranks: int) -> Tensors:
    """Whole parameters after all iterations."""
    job = replace(
        job,
        settings=SETTINGS,
        schedule=job.schedule * NUM_ROUNDS,
        assignments=job.assignments * NUM_ROUNDS,
        batches=job.batches * NUM_ROUNDS,
        weights=job.weights * NUM_ROUNDS,
    )
    runs: list[RankRun] = pool_of(num_ranks).run(run_job, job)
    return assemble(runs, [run.parameters[-1] for run in runs])


@cache
def one_rank(model: SmallModel) -> Tensors:
    return parameters_after(law_job(1, "tp1", model), 1)


def in_order(model: SmallModel, ordered: Callable[[range], list[tuple[int, ...]]]) -> Tensors:
    """On one rank, with other micro-batches of the same batches."""
    assignments = tuple(Assignment((tuple(ordered(range(len(batch)))),)) for batch in LENGTHS)
    return parameters_after(replace(law_job(1, "tp1", model), assignments=assignments), 1)


def differences_from_one_rank(found: Tensors, model: SmallModel) -> dict[str, float]:
    return differences(found, one_rank(model), kind_of)


@cache
def control(model: SmallModel) -> dict[str, float]:
    """The larger difference of two other orders of summation."""
    others = (
        in_order(model, lambda batch: [(index,) for index in batch]),
        in_order(model, lambda batch: [tuple(reversed(batch[i : i + 3])) for i in batch[::3]]),
    )
    found = [differences_from_one_rank(other, model) for other in others]
    return {kind: max(each[kind] for each in found) for kind in found[0]}


@pytest.mark.parametrize(
    ("model", "num_ranks", "text"),
    [(BF16, 4, "tp4"), (BF16, 3, "tp2+tp1"), (BF16, 2, "cp2"), (FP32, 3, "tp2+tp1")],
    ids=lambda value: str(value.dtype) if isinstance(value, SmallModel) else str(value),
)
def test_strategies_differ_as_two_orders_of_summation_do(
    model: SmallModel, num_ranks: int, text: str
) -> None:
    parameters = parameters_after(law_job(num_ranks, text, model), num_ranks)
    found = differences_from_one_rank(parameters, model)
    assert found["qkv bias"] <= MOST_OF_CONTROL * control(model)["qkv bias"]
    assert found["others"] <= max(MOST_OF_CONTROL * control(model)["others"], ROUNDING[model.dtype])


@pytest.mark.parametrize(("model", "least"), [(BF16, 0.2), (FP32, 2e-3)])
def test_the_control_differs_where_the_gradient_is_zero(model: SmallModel, least: float) -> None:
    assert control(model)["qkv bias"] > least
    gradient = law_reference(model).gradients[0]["decoder.layers.0.self_attention.linear_qkv.bias"]
    heads = model.num_heads // model.num_groups
    # By group: queries, then its key, then its value.
    by_group = np.abs(gradient).reshape(model.num_groups, heads + 2, -1).max(axis=(0, 2))
    assert by_group[heads] < 1e-12 * by_group.max()
