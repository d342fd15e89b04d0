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

from megatron.hydraulis.checkpoint.reader import read_object, stored_tensors
from megatron.hydraulis.checkpoint.takeover import upstream_state
from megatron.hydraulis.errors import CheckpointError


class Trap:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self._folder),)


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    return tmp_path / "sprung"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint without a manifest, as plain Megatron writes it, of one tensor."""
    path = tmp_path / "iter_0000001"
    checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=path, no_dist=True)
    assert stored_tensors(path)["weight"].shape == (2,)
    return path


def test_the_trap_works(sprung: Path) -> None:
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.is_dir()


def test_metadata(folder: Path, sprung: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    with pytest.raises(CheckpointError, match="mkdir has no place in it"):
        stored_tensors(folder)
    assert not sprung.exists()


def test_state_beside_the_tensors(folder: Path, sprung: Path) -> None:
    torch.save({"iteration": 1, "args": Trap(sprung)}, folder / "common.pt")
    with pytest.raises(CheckpointError, match=r"common\.pt: cannot be read"):
        upstream_state(folder)
    assert not sprung.exists()


def test_objects_among_the_tensors(tmp_path: Path, sprung: Path) -> None:
    path = tmp_path / "iter_0000002"
    state = {"rng_state/shard_0.0_1.1": Trap(sprung)}
    checkpoint.save(state, checkpoint_id=path, no_dist=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_object(path, "rng_state", num_axes=2)
    assert not sprung.exists()
