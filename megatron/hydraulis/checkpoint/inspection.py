"""What is in a checkpoint's folder, told without building a model or reading its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CONFIG_FNAME

from megatron.hydraulis.checkpoint.byte_progress import ByteProgress
from megatron.hydraulis.checkpoint.folder import CheckpointFolder, is_unfinished
from megatron.hydraulis.checkpoint.manifest import MANIFEST_NAME, Manifest
from megatron.hydraulis.checkpoint.reader import (
    METADATA_NAME,
    StoredTensor,
    needed_bytes,
    stored_tensors,
)
from megatron.hydraulis.checkpoint.takeover import upstream_state
from megatron.hydraulis.checkpoint.tensors import MASTER
from megatron.hydraulis.errors import CheckpointError

__all__ = ["FolderInspection", "Inspection", "inspect_folder"]

OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class Inspection:
    """One checkpoint."""

    path: Path
    written_by: str
    """``hydraulis`` or ``megatron``."""
    problems: tuple[str, ...]
    is_under_way: bool = False
    """Whether its save is not finished: it goes on at the moment, or was interrupted."""
    iteration: int | None = None
    num_ranks: int | None = None
    num_bytes: int | None = None
    checks_content: bool = False
    """Whether every byte was read and compared with its checksum."""
    num_consumed_sequences: int | None = None
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing and nothing, as far as was looked, is damaged."""
        return not self.problems

    @property
    def parameters(self) -> dict[str, StoredTensor]:
        """Tensors that are not the optimizer's."""
        return {k: t for k, t in self.tensors.items() if not k.startswith(OPTIMIZER_PREFIX)}

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(math.prod(tensor.shape) for tensor in self.parameters.values())

    @property
    def has_optimizer(self) -> bool:
        """Whether there is optimizer state."""
        return any(key.startswith(OPTIMIZER_PREFIX) for key in self.tensors)

    @property
    def has_resumable_optimizer(self) -> bool:
        """Whether that is in global coordinates, which any layout of ranks can read."""
        return any(key.startswith(MASTER) for key in self.tensors)

    @property
    def pool(self) -> tuple[str, ...]:
        """Strategies of the run that wrote it, as far as it tells."""
        planner = self.state.get("planner")
        pool = planner.get("pool") if isinstance(planner, Mapping) else None
        return tuple(dict.fromkeys(map(str, pool.values()))) if isinstance(pool, Mapping) else ()

    def to_json(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {
            "path": str(self.path),
            "written_by": self.written_by,
            "complete": self.is_complete,
            "under_way": self.is_under_way,
            "problems": list(self.problems),
            "checksums_compared": self.checks_content,
            "iteration": self.iteration,
            "num_ranks": self.num_ranks,
            "bytes": self.num_bytes,
            "num_consumed_sequences": self.num_consumed_sequences,
            "num_parameters": self.num_parameters,
            "has_optimizer_state": self.has_optimizer,
            "has_resumable_optimizer_state": self.has_resumable_optimizer,
            "model": dict(self.model),
            "state": dict(self.state),
            "tensors": {
                key: {
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "num_chunks": tensor.num_chunks,
                }
                for key, tensor in sorted(self.tensors.items())
            },
        }


@dataclass(frozen=True)
class FolderInspection:
    """A folder of checkpoints as ``--save`` has it, or a single checkpoint."""

    path: Path
    checkpoints: tuple[Inspection, ...]
    """Oldest first; those whose save is not finished at the end."""
    latest: str | None = None
    """Name of the folder that is named the latest; None where none is, or for a single one."""
    problems: tuple[str, ...] = ()
    """Of the folder as a whole."""
    is_single: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all is, but for saves under way, beside which a run can go on."""
        counted = (each for each in self.checkpoints if self.is_single or not each.is_under_way)
        return not self.problems and all(each.is_complete for each in counted)

    def to_json(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {
            "path": str(self.path),
            "complete": self.is_complete,
            "problems": list(self.problems),
            "latest": self.latest,
            "checkpoints": [each.to_json() for each in self.checkpoints],
        }


def inspect_folder(path: Path, *, checks_content: bool = True) -> FolderInspection:
    """Look into a folder of checkpoints, or into one; what is wrong is part of the answer.

    Raises:
        CheckpointError: it is neither, or cannot be read.
    """
    try:
        if not path.exists():
            raise CheckpointError(f"{path}: there is no such folder; correct the path")
        if not path.is_dir():
            raise CheckpointError(
                f"{path}: must be a folder but is a file; give the folder that it is in"
            )
        names = (METADATA_NAME, CONFIG_FNAME, MANIFEST_NAME)
        if is_unfinished(path) or any((path / name).exists() for name in names):
            single = _inspect(path, checks_content=checks_content)
            return FolderInspection(path, (single,), is_single=True)
        return _inspect_all(CheckpointFolder(path), checks_content=checks_content)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror or error}; correct its permissions"
        ) from error


def _inspect_all(folder: CheckpointFolder, *, checks_content: bool) -> FolderInspection:
    unfinished = sorted(each for each in folder.root.iterdir() if is_unfinished(each))
    found = [*folder.paths, *(each for each in unfinished if each.is_dir())]
    if not found:
        raise CheckpointError(
            f"{folder.root}: holds no checkpoint; give a folder with iter_… in it, or one of these"
        )
    problems, latest = [], None
    try:
        named = folder.latest()
        if named is not None:
            latest = folder.path_of(named).name
            if not (folder.root / latest).is_dir():
                problems.append(f"{latest} is named the latest but is not there")
        elif folder.paths:
            problems.append("no file names the latest")
    except CheckpointError as error:
        problems.append(str(error))
    checkpoints = tuple(_inspect(each, checks_content=checks_content) for each in found)
    return FolderInspection(folder.root, checkpoints, latest, tuple(problems))


def _inspect(path: Path, *, checks_content: bool) -> Inspection:
    """One checkpoint."""
    if is_unfinished(path):
        what = "its save is under way or was interrupted"
        return Inspection(path, "hydraulis", (what,), is_under_way=True)
    problems: list[str] = []
    tensors: Mapping[str, StoredTensor] = {}
    try:
        tensors = stored_tensors(path)
    except CheckpointError as error:
        problems.append(str(error))
    try:
        manifest = Manifest.read(path)
    except FileNotFoundError:
        return _of_megatron(path, problems, tensors)
    except CheckpointError as error:
        return Inspection(path, "hydraulis", (*problems, str(error)), tensors=tensors)
    what = f"{path.name}: {'checksums' if checks_content else 'sizes'}"
    with ByteProgress(what, manifest.num_bytes) as progress:
        damage = manifest.problems(path, checks_content=checks_content, advance=progress.advance)
    if damage:
        problems = damage  # what torch makes of damaged files says less
    consumed = manifest.state.get("consumed_train_samples")
    return Inspection(
        path,
        "hydraulis",
        tuple(problems),
        iteration=manifest.iteration,
        num_ranks=manifest.num_ranks,
        num_bytes=manifest.num_bytes,
        checks_content=checks_content,
        num_consumed_sequences=consumed if isinstance(consumed, int) else None,
        tensors=tensors,
        model=manifest.model,
        state=manifest.state,
    )


def _of_megatron(
    path: Path, problems: list[str], tensors: Mapping[str, StoredTensor]
) -> Inspection:
    """A checkpoint without manifest; files are compared with what upstream's metadata say."""
    if not (path / CONFIG_FNAME).is_file():
        problems.append(f"{CONFIG_FNAME} is missing, which upstream writes last")
    iteration, num_consumed, model, written_by = None, None, {}, "megatron"
    try:
        problems += _short_files(path)
        state = upstream_state(path)
        iteration, model = state.iteration, dict(state.model)
        num_consumed = state.num_consumed_sequences
        if state.written_here:
            written_by = "hydraulis"
            problems.append(f"{MANIFEST_NAME} is missing, by which the files could be checked")
    except CheckpointError as error:
        problems.append(str(error))
    num_bytes = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    return Inspection(
        path,
        written_by,
        tuple(dict.fromkeys(problems)),
        iteration=iteration,
        num_bytes=num_bytes,
        num_consumed_sequences=num_consumed,
        tensors=tensors,
        model=model,
    )


def _short_files(path: Path) -> list[str]:
    """Files that are missing, or end before the last of their tensors does."""
    problems = []
    for name, least in sorted(needed_bytes(path).items()):
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size < least:
            problems.append(f"{name} has {file.stat().st_size} bytes but its tensors need {least}")
    return problems
