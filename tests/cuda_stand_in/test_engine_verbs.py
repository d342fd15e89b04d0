"""The verbs of a Python program on `cuda`: values as on the CPU, one order of calls, no races, an
offload that frees the device's memory, and little memory for tensors in Hugging Face's form."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.hydraulis.checkpoint.hugging_face.model import HuggingFaceModel
from megatron.hydraulis.checkpoint.names import StoredModel
from megatron.hydraulis.library.engine import Engine
from megatron.hydraulis.library.hugging_face import hf_shards, hf_tensors
from tests.cuda_stand_in.device import events_never_ready
from tests.cuda_stand_in.lone_ranks import log_of
from tests.cuda_stand_in.order import check_order, read_log
from tests.cuda_stand_in.pool import run_logged
from tests.cuda_stand_in.races import AccessMarks, find_races
from tests.distributed.test_engine_verbs import gspo, in_strategy, make_engine, rollout
from tests.support.gloo_pool import pool_of
from tests.support.law import FP32_RTOL, SHORT_MODEL

pytestmark = pytest.mark.distributed

FP32_MODEL = replace(SHORT_MODEL, dtype=torch.float32)
STRATEGIES = ("cp4~fs", "tp2pp2")
"""One in which `segments.sum` adds over ranks, and one with messages between stages."""
HUGGING_FACE_MODEL = HuggingFaceModel(
    num_layers=FP32_MODEL.num_layers,
    hidden_size=FP32_MODEL.hidden_size,
    ffn_hidden_size=FP32_MODEL.ffn_hidden_size,
    num_attention_heads=FP32_MODEL.num_heads,
    num_query_groups=FP32_MODEL.num_groups,
    kv_channels=FP32_MODEL.hidden_size // FP32_MODEL.num_heads,
    vocab_size=FP32_MODEL.vocab_size,
    max_position_embeddings=256,
    layernorm_epsilon=1e-5,
    rotary_base=10000,
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
)


@dataclass(frozen=True)
class Seen:
    """The outcomes that a rank has seen."""

    log_probs: list[np.ndarray]
    norms: list[float]
    """Of an update in each strategy, the second after an offload."""
    allocated_bytes: list[int]
    """Before the offload, during it, and after the onload."""
    freed_bytes: int
    """Of shards, moments and arenas."""
    peak_bytes: int
    """Added by `hf_tensors`."""
    bucket_bytes: int
    """Of the largest bucket."""


def run_verbs(*, has_cuda: bool) -> Seen:
    marks: tuple[AbstractContextManager[None], ...] = ()
    if has_cuda:
        marks = (events_never_ready(), AccessMarks())
    with ExitStack() as stack:
        for mark in marks:
            stack.enter_context(mark)
        engine = make_engine(STRATEGIES, FP32_MODEL)
        of_first, of_second = (in_strategy(engine, name) for name in STRATEGIES)
        batch = of_first.plan(rollout())
        log_probs = of_first.forward(batch)["log_probs"]
        of_first.forward_backward(batch.with_inputs(old=log_probs), gspo)
        norms = [of_first.optim_step(lr=0.01)]
        allocated_bytes = [_allocated_bytes()]
        shards = engine.runtime.shards
        # Parameters and two moments; the gradients of the shards are in the arena's memory.
        freed_bytes = 3 * shards.parameters.untyped_storage().nbytes()
        freed_bytes += engine.runtime.memory.num_bytes
        engine.offload()
        allocated_bytes.append(_allocated_bytes())
        engine.onload()
        allocated_bytes.append(_allocated_bytes())
        of_second.forward_backward(of_second.plan(rollout()), gspo)
        norms.append(of_second.optim_step())
        peak_bytes = _peak_bytes_of_tensors(engine)
        buckets = engine.runtime.layout.buckets
        bucket_bytes = 4 * max(each.num_elements for each in buckets)
        engine.close()
    return Seen(
        [each.cpu().numpy() for each in log_probs],
        [norm or 0.0 for norm in norms],
        allocated_bytes,
        freed_bytes,
        peak_bytes,
        bucket_bytes,
    )


def run_on_cuda() -> Seen:
    return run_verbs(has_cuda=True)


def run_on_cpu() -> Seen:
    return run_verbs(has_cuda=False)


def _peak_bytes_of_tensors(engine: Engine) -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    places = StoredModel.of(engine.runtime.definition, separate_layers=True).parameters
    for _ in hf_tensors(engine.runtime, HUGGING_FACE_MODEL, places):
        pass
    peak_bytes = torch.cuda.max_memory_allocated() - before
    for shard in hf_shards(engine.runtime, HUGGING_FACE_MODEL, places):
        assert shard.places(torch.arange(len(shard.values), device="cuda")).is_cuda
    return peak_bytes


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def test_values_order_races_and_memory(tmp_path: Path) -> None:
    found = pool_of(4, "cuda").run(run_logged, tmp_path, run_on_cuda)
    expected = pool_of(4).run(run_on_cpu)
    for seen, wanted in zip(found, expected, strict=True):
        assert seen.norms == pytest.approx(wanted.norms, rel=FP32_RTOL)
        for log_probs, of_cpu in zip(seen.log_probs, wanted.log_probs, strict=True):
            np.testing.assert_allclose(log_probs, of_cpu, rtol=1e-5, atol=1e-6)
        before, during, after = seen.allocated_bytes
        assert before - during >= seen.freed_bytes > 0
        assert during < after < before  # without the arenas
        # A bucket, a share of it, and a tensor in both forms.
        assert seen.bucket_bytes < seen.peak_bytes < 2 * seen.bucket_bytes
    report = check_order([read_log(log_of(tmp_path, rank)) for rank in range(4)])
    assert not report.mismatches, str(report)
    assert not report.cycle, str(report)
    for rank in range(4):
        races = find_races(log_of(tmp_path, rank))
        assert not races, "\n".join(map(str, races))
