"""No rank holds more than its shards and a bucket, neither while it saves nor while it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.hydraulis.checkpoint.loading import load_checkpoint
from megatron.hydraulis.runtime.engine import Engine
from tests.support.checkpoints import make_engine, save_engine
from tests.support.gloo_pool import pool_of
from tests.support.models import SmallModel

pytestmark = pytest.mark.distributed

NUM_RANKS = 8
MODEL = SmallModel(
    num_layers=6, hidden_size=512, ffn_hidden_size=1408, dtype=torch.float32, tied=True
)
NOISE_BYTES = 5_000_000
"""Of an interpreter that allocates and imports: pages of Python's own objects."""


def peak_above(start: bool) -> int:
    """Highest resident memory of this process since it was last asked to start (bytes)."""
    if start:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def largest_bucket_bytes(engine: Engine) -> int:
    return 4 * max(bucket.num_elements for bucket in engine.layout.buckets)


def save_and_load(root: str) -> tuple[int, int, int, int]:
    """On every rank: bytes above the state while saving and loading; of a bucket; of the state."""
    engine = make_engine(MODEL.definition(), ("8*tp1",))
    for flat in (engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq, engine.shards.gradients):
        flat.fill_(1.0)  # memory that is not touched is not there
    save_engine(engine, Path(root), 1)  # imports what saving imports
    before = peak_above(start=True)
    save_engine(engine, Path(root), 2)
    saving = peak_above(start=False) - before
    before = peak_above(start=True)
    load_checkpoint(Path(root) / "iter_0000002", engine, {})
    loading = peak_above(start=False) - before
    return saving, loading, largest_bucket_bytes(engine), 3 * 4 * engine.shards.parameters.numel()


def test_peak_memory_of_eight_ranks(tmp_path: Path) -> None:
    found = pool_of(NUM_RANKS).run(save_and_load, str(tmp_path), timeout_s=100)
    for saving, loading, bucket, state in found:
        allowed = bucket + NOISE_BYTES
        assert allowed < state  # else this test would allow a copy of all that is saved
        assert saving < allowed
        assert loading < allowed
