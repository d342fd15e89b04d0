"""What is in a checkpoint's folder, told without building a model or reading its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.core import CONFIG_FNAME

from megatron.hydraulis.checkpoint.folder import CheckpointFolder, is_unfinished
from megatron.hydraulis.checkpoint.manifest import MANIFEST_NAME, Manifest
from megatron.hydraulis.checkpoint.reader import METADATA_NAME, StoredTensor, stored_tensors
from megatron.hydraulis.checkpoint.takeover import upstream_state
from megatron.hydraulis.errors import CheckpointError

__all__ = ["Inspection", "inspect_checkpoint", "inspect_folder"]

OPTIMIZER_PREFIX = "optimizer."


@dataclass(frozen=True)
class Inspection:
    """One checkpoint."""

    path: Path
    written_by: str
    """``hydraulis`` or ``megatron``."""
    problems: tuple[str, ...]
    iteration: int | None = None
    num_ranks: int | None = None
    num_bytes: int | None = None
    checks_content: bool = False
    """Whether every byte was read and compared with its checksum."""
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing and nothing, as far as was looked, is damaged."""
        return not self.problems

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters."""
        return sum(
            math.prod(tensor.shape)
            for key, tensor in self.tensors.items()
            if not key.startswith(OPTIMIZER_PREFIX)
        )

    @property
    def has_optimizer(self) -> bool:
        """Whether there is optimizer state."""
        return any(key.startswith(OPTIMIZER_PREFIX) for key in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Fit for JSON."""
        return {
            "path": str(self.path),
            "written_by": self.written_by,
            "complete": self.is_complete,
            "problems": list(self.problems),
            "checksums_compared": self.checks_content,
            "iteration": self.iteration,
            "num_ranks": self.num_ranks,
            "bytes": self.num_bytes,
            "num_parameters": self.num_parameters,
            "has_optimizer_state": self.has_optimizer,
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


def inspect_folder(path: Path, *, checks_content: bool = True) -> tuple[list[Inspection], str]:
    """The checkpoints of a folder as ``--save`` has it, or the one that it is itself.

    Returns:
        Oldest first; and what the folder names as the latest, empty for a single checkpoint.

    Raises:
        CheckpointError: there is neither.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: there is no such folder; give one of checkpoints")
    if any((path / name).exists() for name in (METADATA_NAME, CONFIG_FNAME)):
        return [inspect_checkpoint(path, checks_content=checks_content)], ""
    folder = CheckpointFolder(path)
    found = [folder.path_of(iteration) for iteration in folder.iterations]
    found += sorted(each for each in path.iterdir() if is_unfinished(each) and each.is_dir())
    if not found:
        raise CheckpointError(
            f"{path}: holds no checkpoint; give a folder with iter_… in it, or one of these"
        )
    try:
        latest = str(folder.latest() or "none")
    except CheckpointError as error:
        latest = str(error)
    return [inspect_checkpoint(each, checks_content=checks_content) for each in found], latest


def inspect_checkpoint(path: Path, *, checks_content: bool = True) -> Inspection:
    """One checkpoint; what is wrong with it is part of the answer."""
    if is_unfinished(path):
        return Inspection(path, "hydraulis", ("its save was not finished",))
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
    problems += manifest.problems(path, checks_content=checks_content)
    return Inspection(
        path,
        "hydraulis",
        tuple(problems),
        iteration=manifest.iteration,
        num_ranks=manifest.num_ranks,
        num_bytes=manifest.num_bytes,
        checks_content=checks_content,
        tensors=tensors,
        model=manifest.model,
        state=manifest.state,
    )


def _of_megatron(
    path: Path, problems: list[str], tensors: Mapping[str, StoredTensor]
) -> Inspection:
    if not (path / CONFIG_FNAME).is_file():
        problems.append(f"{CONFIG_FNAME} is missing, which upstream writes last")
    iteration, model = None, {}
    try:
        state = upstream_state(path)
        iteration, model = state.iteration, dict(state.model)
        if state.written_here:
            problems.append(f"{MANIFEST_NAME} is missing")
    except CheckpointError as error:
        problems.append(str(error))
    num_bytes = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    return Inspection(
        path,
        "megatron",
        tuple(problems),
        iteration=iteration,
        num_bytes=num_bytes,
        tensors=tensors,
        model=model,
    )
