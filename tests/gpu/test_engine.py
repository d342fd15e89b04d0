"""The engine on one GPU: every core attention and kind of layers gives the same gradients."""

from __future__ import annotations

import dataclasses
import functools
import socket
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.hydraulis.data.packed_batch import pack
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.core_attention import CoreAttentionName, current_environment
from megatron.hydraulis.runtime.engine import Engine
from megatron.hydraulis.runtime.executor import make_forward_step
from megatron.hydraulis.runtime.memory import CudaMemory
from megatron.hydraulis.runtime.memory_trial import run_memory_trial
from megatron.hydraulis.runtime.model_building import te_layer_spec
from megatron.hydraulis.runtime.spans import ALL_TRACKS, NO_SPANS, CudaClock, MemoryRecorder
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.models import SmallModel

MODEL = SmallModel(num_layers=2, hidden_size=256, ffn_hidden_size=512, num_heads=4, num_groups=2)
LENGTHS = (700, 17, 129, 1)
TIMES_SINGLE_DEVICE_ERROR = 2.0
WAYS: dict[str, tuple[CoreAttentionName, bool]] = {
    "sdpa": ("sdpa", False),
    "torch": ("torch", False),
    "te": ("te", False),
    "te, layers of Transformer Engine": ("te", True),
}


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    # Upstream keeps a state for random numbers that tp ranks do not share.
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    yield
    dist.destroy_process_group()


def engine_of(dtype: torch.dtype, way: str, recorder: MemoryRecorder | None = None) -> Engine:
    attention, has_te_layers = WAYS[way]
    model = dataclasses.replace(MODEL, dtype=dtype)
    definition = dataclasses.replace(model.definition(), core_attention=attention)
    if has_te_layers:
        spec = te_layer_spec(definition.transformer)
        definition = dataclasses.replace(definition, built_layer_spec=spec)
    return Engine(
        definition,
        Pool.of(Strategy.parse("tp1", 1)),
        AdamWSettings(lr=1e-3),
        seed=3,
        spans=NO_SPANS if recorder is None else recorder,
    )


@functools.cache
def gradients(dtype: torch.dtype, way: str) -> torch.Tensor:
    """Flat, on the shards, in fp32 or wider."""
    engine = engine_of(dtype, way)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, MODEL.vocab_size, size=length + 1) for length in LENGTHS]
    batch = pack(sequences).pinned().to("cuda", non_blocking=True)
    engine.forward_backward("tp1", [batch, batch], make_forward_step())
    engine.close()
    return engine.shards.gradients.double()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "sdpa"])
def test_gradients(way: str) -> None:
    why_not = current_environment(dtype=torch.bfloat16, head_size=64).obstacle(WAYS[way][0])
    if why_not is not None:
        pytest.skip(f"core attention '{WAYS[way][0]}' is not there: {why_not}")
    exact = gradients(torch.float32, "sdpa")
    single, found = (
        float((gradients(torch.bfloat16, each) - exact).norm() / exact.norm())
        for each in ("sdpa", way)
    )
    assert found <= TIMES_SINGLE_DEVICE_ERROR * single, (found, single)


def test_memory_trial_and_spans() -> None:
    recorder = MemoryRecorder(CudaClock())
    recorder.tracks = ALL_TRACKS
    engine = engine_of(torch.bfloat16, "sdpa", recorder)
    (result,) = run_memory_trial(
        engine,
        engine.pool.strategies[0],
        lambda scheme: 4096,
        make_forward_step(),
        CudaMemory(),
        longest_tokens=2048,
        vocab_size=MODEL.vocab_size,
    )
    assert result.allowed_tokens == 4096
    assert result.trial.idle_bytes < result.trial.peak_bytes < result.trial.capacity_bytes
    names = {span.name for span in recorder.take()}
    assert {"gather", "forward", "backward", "scatter"} <= names
    engine.close()
