"""Checkpoints in tests: written by a separate engine, read without the code that wrote them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, TensorStorageMetadata, load

from megatron.hydraulis.checkpoint.folder import CheckpointFolder
from megatron.hydraulis.checkpoint.loading import load_checkpoint
from megatron.hydraulis.checkpoint.saving import CheckpointSaver, SavedState, optimizer_entry
from megatron.hydraulis.checkpoint.torch_dist import (
    COMMON_STATE,
    FilePiece,
    write_file,
    write_metadata,
)
from megatron.hydraulis.optimizer.sharded_adamw import AdamWSettings
from megatron.hydraulis.runtime.engine import RuntimeEngine
from megatron.hydraulis.runtime.model_building import ModelDefinition
from megatron.hydraulis.strategy import Pool, Strategy
from tests.support.gloo_pool import worker_groups
from tests.support.models import SmallModel

SETTINGS = AdamWSettings(lr=1e-3, eps=1e-8, weight_decay=0.1, clip_grad=1.0)
NUM_STEPS = 5


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a `torch_dist` checkpoint by key, read by torch alone."""
    reader = FileSystemReader(folder)
    wanted = {
        key: torch.full(tuple(entry.size), torch.nan, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(dict(wanted), storage_reader=reader, no_dist=True)
    return wanted


def write_tensors(
    folder: Path, tensors: Mapping[str, torch.Tensor], common: Mapping[str, Any]
) -> None:
    """A checkpoint without manifest, as plain Megatron's."""
    folder.mkdir(parents=True)
    pieces = [
        FilePiece(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor, tensor.dtype)
        for key, tensor in tensors.items()
    ]
    write_metadata(folder, [write_file(folder, 0, pieces, {COMMON_STATE: dict(common)})])


def differing_keys(
    expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
) -> dict[str, str]:
    """Keys of the first that are missing or different in the second, and the difference."""
    differences = {}
    for key, tensor in expected.items():
        if key not in found:
            differences[key] = "missing"
        elif found[key].shape != tensor.shape or not torch.equal(found[key], tensor):
            differences[key] = f"{tuple(tensor.shape)} and {tuple(found[key].shape)} differ"
    return differences


def make_engine(
    definition: ModelDefinition, strategies: Sequence[str], *, seed: int = 7, **options: Any
) -> RuntimeEngine:
    """Every rank makes its engine."""
    pool = Pool.of(*(Strategy.parse(text, dist.get_world_size(), name=text) for text in strategies))
    return RuntimeEngine(definition, pool, SETTINGS, seed=seed, groups=worker_groups(), **options)


def save_engine(
    engine: RuntimeEngine, root: Path, iteration: int = 3, **options: Any
) -> CheckpointSaver:
    """Every rank saves, and completes it unless ``asynchronous``."""
    saver = CheckpointSaver(CheckpointFolder(root), engine, **options)
    saver.save(saved_state(engine, iteration))
    return saver


def saved_state(engine: RuntimeEngine, iteration: int) -> SavedState:
    return SavedState(
        iteration=iteration,
        model={"vocab_size": engine.definition.vocab_size},
        state={"sampler": {"position": iteration}},
        configuration={},
        upstream={
            "iteration": iteration,
            "checkpoint_version": 3.0,
            "optimizer": optimizer_entry(engine.optimizer, engine.pool),
            "opt_param_scheduler": {"num_steps": iteration},
        },
    )


def fill_moments(engine: RuntimeEngine) -> None:
    """Every rank sets moments, and biases of routers, that differ for every element."""
    generator = torch.Generator().manual_seed(engine.rank)
    for flat in (engine.optimizer.exp_avg, engine.optimizer.exp_avg_sq):
        flat.copy_(torch.rand(flat.shape, generator=generator))
    engine.optimizer.num_steps.fill_(NUM_STEPS)
    if engine.routers is not None and engine.routers.biases is not None:
        biases = engine.routers.biases  # the same on every rank
        biases.copy_(torch.arange(biases.numel()).view_as(biases) + 1)


def save_new(model: SmallModel, strategies: Sequence[str], root: str, **options: Any) -> None:
    """Every rank saves an engine with its initial weights and made-up moments."""
    engine = make_engine(model.definition(), strategies)
    fill_moments(engine)
    save_engine(engine, Path(root), **options).finish()


def load_and_save(
    model: SmallModel, strategies: Sequence[str], source: str, root: str, **options: Any
) -> int:
    """Every rank loads a checkpoint into an engine of other weights and saves it again.

    Returns:
        Steps of its optimizer.
    """
    engine = make_engine(model.definition(), strategies, seed=123, **options)
    load_checkpoint(Path(source), engine, {"vocab_size": model.vocab_size})
    save_engine(engine, Path(root))
    return int(engine.optimizer.num_steps)
