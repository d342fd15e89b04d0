"""No rank holds more than its shards and a bucket, neither while it saves nor while it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.hydraulis.checkpoint.loading import load_checkpoint
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.memory import CpuMemory
from tests.support.checkpoints import make_engine, save_engine
from tests.support.gloo_pool import pool_of
from tests.support.models import SmallModel

pytestmark = pytest.mark.distributed

NUM_RANKS = 8
MODEL = SmallModel(
    num_layers=4, hidden_size=512, ffn_hidden_size=1408, dtype=torch.float32, tied=True
)


def largest_bucket_bytes(engine: RuntimeEngine) -> int:
    return 4 * max(bucket.num_elements for bucket in engine.layout.buckets)


def save_and_load(root: str, others: str) -> tuple[tuple[int, int, int], int, int]:
    """On every rank: bytes above the state while saving, loading the same, and loading
    the larger pieces of fewer ranks; of a bucket; of the state."""
    engine = make_engine(MODEL.definition(), ("8*tp1",))
    for flat in (engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq, engine.shards.gradients):
        flat.fill_(1.0)  # untouched memory is not resident
    save_engine(engine, Path(root), 1)  # imports the modules that saving imports
    meter = CpuMemory(NUM_RANKS)
    before = meter.restart()
    save_engine(engine, Path(root), 2)
    saving = meter.peak_bytes() - before
    loading = [peak_of_load(folder, engine, meter) for folder in (f"{root}/iter_0000002", others)]
    state = 3 * 4 * engine.shards.parameters.numel()
    return (saving, loading[0], loading[1]), largest_bucket_bytes(engine), state


def peak_of_load(folder: str, engine: RuntimeEngine, meter: CpuMemory) -> int:
    """Bytes above the use before."""
    before = meter.restart()
    load_checkpoint(Path(folder), engine, {})
    return meter.peak_bytes() - before


def save_by_few(root: str) -> None:
    save_engine(make_engine(MODEL.definition(), ("2*tp1",)), Path(root), 1)


def test_peak_memory_of_eight_ranks(tmp_path: Path) -> None:
    pool_of(2).run(save_by_few, str(tmp_path / "few"))
    others = str(tmp_path / "few" / "iter_0000001")
    found = pool_of(NUM_RANKS).run(save_and_load, str(tmp_path / "all"), others, timeout_s=100)
    for peaks, bucket, state in found:
        assert bucket < state  # otherwise this test would allow a copy of the state
        assert max(peaks) < bucket, peaks
