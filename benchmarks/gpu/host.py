"""Time in which the host issues a layer's forward and backward, for each kind of layers.

Micro-batches have so few tokens that the device waits for the host. A layer's time is a second
difference of elapsed times: between two numbers of micro-batches, and two of layers, so that loss,
optimizer and regrouping cancel.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import torch

from benchmarks.gpu.kernels import WAYS, environment_of
from benchmarks.gpu.rank import Place
from megatron.hydraulis.cost_model.trained_model import CoreAttentionName
from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.models import SmallModel

LAYERS = (2, 6)
MICRO_BATCHES = (1, 5)
NUM_WARM = 3
NUM_TOKENS = 64
MS_PER_S = 1e3


def run(place: Place) -> None:
    """The time of a layer of each kind and a micro-batch on one rank, in ms."""
    for way, (attention, model, has_te_layers) in WAYS.items():
        if why_not := environment_of(model).obstacle(attention):
            place.lacks(f"host {way}", why_not)
            continue
        few, many = (
            _of_micro_batch(
                dataclasses.replace(model, num_layers=number, has_te_layers=has_te_layers),
                attention,
                place.sizes.num_attention_repeats,
            )
            for number in LAYERS
        )
        place.measured(f"host {way}", MS_PER_S * (many - few) / (LAYERS[1] - LAYERS[0]))


def _of_micro_batch(model: SmallModel, attention: CoreAttentionName, num_repeats: int) -> float:
    """Seconds of one more micro-batch, the least of several."""
    definition = dataclasses.replace(model, dtype=torch.bfloat16).definition()
    engine = RuntimeEngine(
        dataclasses.replace(definition, core_attention=attention),
        Pool.of(Strategy.parse("tp1", 1)),
        AdamWSettings(lr=1e-3),
        seed=3,
    )
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, size=NUM_TOKENS + 1)
    batch = pack([tokens]).pinned().to("cuda", non_blocking=True)
    times: dict[int, list[float]] = {number: [] for number in MICRO_BATCHES}
    for _ in range(NUM_WARM + num_repeats):
        for number, found in times.items():
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            engine.train_step("tp1", [batch] * number, make_forward_step())
            torch.cuda.synchronize()
            found.append(time.perf_counter() - began_s)
    engine.close()
    few, many = (min(times[number][NUM_WARM:]) for number in MICRO_BATCHES)
    return (many - few) / (MICRO_BATCHES[1] - MICRO_BATCHES[0])
