"""Files of a checkpoint that would run code if they were unpickled: refused, and no code runs."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from megatron.hydraulis.checkpoint.loading import read_rng_state, upstream_state
from megatron.hydraulis.checkpoint.manifest import FileRecord
from megatron.hydraulis.checkpoint.torch_dist import (
    StoredCheckpoint,
    WrittenFile,
    write_metadata,
)
from megatron.hydraulis.errors import CheckpointError


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._folder),)


@pytest.fixture
def has_run(tmp_path: Path) -> Path:
    return tmp_path / "has_run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without a manifest, as plain Megatron writes it, of one tensor."""
    path = tmp_path / "iter_0000001"
    checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    assert StoredCheckpoint(path).tensors["weight"].shape == (2,)
    return path


def test_the_trap_works(has_run: Path) -> None:
    pickle.loads(pickle.dumps(Trap(has_run)))
    assert has_run.is_dir()


def test_metadata(folder: Path, has_run: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(has_run)))
    with pytest.raises(CheckpointError, match="mkdir is not allowed in it"):
        StoredCheckpoint(folder)
    assert not has_run.exists()


def test_state_next_to_the_tensors(folder: Path, has_run: Path) -> None:
    torch.save({"iteration": 1, "args": Trap(has_run)}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt: cannot be read"):
        upstream_state(StoredCheckpoint(folder))
    assert not has_run.exists()


def test_objects_among_the_tensors(tmp_path: Path, has_run: Path) -> None:
    path = tmp_path / "iter_0000002"
    state = {"rng_state/shard_0.0_1.1": Trap(has_run)}
    checkpoint.save(state, checkpoint_id=path, no_dist=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_rng_state(path)
    assert not has_run.exists()


@pytest.mark.parametrize(
    ("is_trap", "message"), [(True, "cannot be read"), (False, "weight must be a tensor")]
)
def test_objects_instead_of_tensors(
    is_trap: bool, message: str, tmp_path: Path, has_run: Path
) -> None:
    name = "__0_0.distcp"
    torch.save(Trap(has_run) if is_trap else [1.0, 1.0], tmp_path / name)
    record = FileRecord.of(tmp_path / name)
    pieces: Any = [((0,), (2,), (0, record.num_bytes))]
    written = WrittenFile(name, record, {}, {"weight": (torch.float32, (2,), pieces)})
    write_metadata(tmp_path, [written])
    with pytest.raises(CheckpointError, match=message):
        StoredCheckpoint(tmp_path).read("weight")
    assert not has_run.exists()
