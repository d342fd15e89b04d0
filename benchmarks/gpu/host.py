"""Time in which the host issues a layer's forward and backward, for each kind of layers.

As on the stand-in (`tests.cuda_stand_in.host_time`), but of elapsed times: micro-batches have so
few tokens that the device waits for the host.
"""

from __future__ import annotations

import dataclasses
import time

import torch

from benchmarks.gpu.kernels import WAYS, engine_and_batch, environment_of
from benchmarks.gpu.rank import Place
from megatron.hydraulis.cost_model.trained_model import CoreAttentionName
from megatron.hydraulis.runtime.executor import make_forward_step
from tests.cuda_stand_in.host_time import LAYERS, of_one_more
from tests.support.models import SmallModel

LENGTHS = (64,)
MS_PER_S = 1e3


def run(place: Place) -> None:
    """The time of a layer of each kind and a micro-batch on one rank, in ms."""
    for way, (attention, model, has_te_layers) in WAYS.items():
        if why_not := environment_of(model).obstacle(attention):
            place.lacks(f"host {way}", why_not)
            continue
        few_s, many_s = (
            _of_micro_batch_s(
                dataclasses.replace(model, num_layers=number, has_te_layers=has_te_layers),
                attention,
                place.sizes.num_attention_repeats,
            )
            for number in LAYERS
        )
        place.measured(f"host {way}", MS_PER_S * (many_s - few_s) / (LAYERS[1] - LAYERS[0]))


def _of_micro_batch_s(model: SmallModel, attention: CoreAttentionName, num_repeats: int) -> float:
    engine, batch = engine_and_batch(model, torch.bfloat16, attention, LENGTHS)

    def step_s(num_micro_batches: int) -> tuple[float]:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        engine.train_step("tp1", [batch] * num_micro_batches, make_forward_step())
        torch.cuda.synchronize()
        return (time.perf_counter() - start_s,)

    (time_s,) = of_one_more(step_s, num_repeats)
    engine.close()
    return time_s
