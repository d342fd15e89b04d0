"""``inspect-checkpoint``: what is in a folder of checkpoints, without building a model.

What needs torch is imported late, so that help is quick.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from megatron.hydraulis.checkpoint.folder import CheckpointFolder, is_unfinished
from megatron.hydraulis.checkpoint.manifest import (
    FORMAT_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
)
from megatron.hydraulis.errors import CheckpointError, counted
from megatron.hydraulis.terminal import ByteProgress, figures_table, size_text

if TYPE_CHECKING:
    from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint, StoredTensor

EXIT_INCOMPLETE = 1
_WIDTH = 100
"""Columns if the output is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=Path,
        metavar="DIR",
        help="folder of checkpoints, as given to --save, or a single checkpoint (iter_…, release); "
        "of this program or of plain Megatron",
    )
    parser.add_argument(
        "--quick", action="store_true", help="compare sizes only, instead of reading every byte"
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.epilog = "The exit status is 1 if anything is damaged or incomplete."


def run(namespace: argparse.Namespace) -> int:
    """Print what is there; 1 unless every checkpoint is complete. Raises CheckpointError."""
    found = inspect_folder(namespace.folder, checks_content=not namespace.quick)
    if namespace.json:
        print(json.dumps(dataclasses.asdict(found), indent=1, default=_dtype_name))
    else:
        _print(found, with_tensors=namespace.tensors)
    return 0 if found.complete else EXIT_INCOMPLETE


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """One checkpoint; the fields are those of ``--json``."""

    path: str
    written_by: str
    """``hydraulis`` or ``megatron``."""
    complete: bool
    under_way: bool = False
    """Whether its save is running or was interrupted."""
    problems: tuple[str, ...]
    """One text for each thing that is missing or damaged."""
    checksums_compared: bool = False
    iteration: int | None = None
    num_ranks: int | None = None
    bytes: int | None = None
    num_consumed_sequences: int | None = None
    num_parameters: int = 0
    """Number of elements of all parameters."""
    num_frozen_parameters: int = 0
    """Number of elements of those that were not trained; 0 without optimizer state."""
    has_optimizer_state: bool = False
    has_resumable_optimizer_state: bool = False
    model: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Empty if the metadata cannot be read."""


@dataclass(frozen=True)
class FolderInspection:
    """A folder of checkpoints as given to ``--save``, or a single checkpoint."""

    path: str
    complete: bool
    """Whether all checkpoints are complete; in a folder, unfinished saves do not count."""
    problems: tuple[str, ...]
    """Problems of the folder itself."""
    latest: str | None
    """Name of the folder that is named the latest, if any."""
    checkpoints: tuple[Inspection, ...]
    """Oldest first; those whose save is not finished at the end."""


def inspect_folder(path: Path, *, checks_content: bool = True) -> FolderInspection:
    """Look into a folder of checkpoints, or into one; damage is reported, not raised.

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
        names = (METADATA_NAME, FORMAT_NAME, MANIFEST_NAME)
        if is_unfinished(path) or any((path / name).exists() for name in names):
            single = _inspect(path, checks_content=checks_content)
            return FolderInspection(str(path), single.complete, (), None, (single,))
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
    is_complete = not problems and all(each.complete or each.under_way for each in checkpoints)
    return FolderInspection(str(folder.root), is_complete, tuple(problems), latest, checkpoints)


def _inspect(path: Path, *, checks_content: bool) -> Inspection:
    from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint

    facts: dict[str, Any] = {"written_by": "hydraulis"}
    problems: list[str] = []
    if is_unfinished(path):
        problem = "its save is running or was interrupted"
        return Inspection(
            path=str(path), complete=False, under_way=True, problems=(problem,), **facts
        )
    stored = None
    try:
        stored = StoredCheckpoint(path)
        facts |= {
            "num_parameters": sum(math.prod(t.shape) for t in stored.parameters.values()),
            "num_frozen_parameters": sum(math.prod(t.shape) for t in stored.frozen.values()),
            "has_optimizer_state": stored.has_optimizer,
            "has_resumable_optimizer_state": stored.has_resumable_optimizer,
            "tensors": dict(sorted(stored.tensors.items())),
        }
    except CheckpointError as error:
        problems.append(str(error))
    try:
        manifest = Manifest.read(path)
        what = f"{path.name}: {'checksums' if checks_content else 'sizes'}"
        with ByteProgress(what, manifest.num_bytes) as bar:
            damage = manifest.problems(path, checks_content=checks_content, advance=bar.advance)
        problems = damage or problems  # torch's errors about damaged files say less
        consumed = manifest.state.get("consumed_train_samples")
        facts |= {
            "iteration": manifest.iteration,
            "num_ranks": manifest.num_ranks,
            "bytes": manifest.num_bytes,
            "checksums_compared": checks_content,
            "num_consumed_sequences": consumed if isinstance(consumed, int) else None,
            "model": manifest.model,
            "state": manifest.state,
        }
    except FileNotFoundError:
        facts |= _facts_of_megatron(path, stored, problems)
    except CheckpointError as error:
        problems.append(str(error))
    return Inspection(path=str(path), complete=not problems, problems=tuple(problems), **facts)


def _facts_of_megatron(
    path: Path, stored: StoredCheckpoint | None, problems: list[str]
) -> dict[str, Any]:
    """Facts of a checkpoint without manifest, whose files must be as long as its tensors need."""
    from megatron.hydraulis.checkpoint.loading import upstream_state

    num_bytes = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    facts: dict[str, Any] = {"written_by": "megatron", "bytes": num_bytes}
    if not (path / FORMAT_NAME).is_file():
        problems.append(f"{FORMAT_NAME} is missing, which Megatron writes last")
    if stored is None:
        return facts
    for name, least in sorted(stored.needed_bytes.items()):
        file = path / name
        if not file.is_file():
            problems.append(f"{name} is missing")
        elif file.stat().st_size < least:
            problems.append(f"{name} has {file.stat().st_size} bytes but its tensors need {least}")
    try:
        state = upstream_state(stored)
    except CheckpointError as error:
        problems.append(str(error))
        return facts
    if state.written_here:
        facts["written_by"] = "hydraulis"
        problems.append(f"{MANIFEST_NAME} is missing, so the files cannot be checked")
    return facts | {
        "iteration": state.iteration,
        "num_consumed_sequences": state.num_consumed_sequences,
        "model": state.model,
    }


# --- printing -----------------------------------------------------------------------------------


def _print(found: FolderInspection, *, with_tensors: bool) -> None:
    width = None if sys.stdout.isatty() else _WIDTH
    console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
    latest = "" if found.latest is None else f", latest: {found.latest}"
    console.print(f"{found.path}: {counted(len(found.checkpoints), 'checkpoint')}{latest}")
    table = figures_table("", ("checkpoint", "state"), ("sequences", "ranks", "size"))
    for each in found.checkpoints:
        sequences, ranks = each.num_consumed_sequences, each.num_ranks
        table.add_row(
            _name(each),
            _verdict(each),
            "" if sequences is None else f"{sequences:,}",
            "" if ranks is None else str(ranks),
            "" if each.bytes is None else size_text(each.bytes),
        )
    console.print(table, soft_wrap=False)
    for problem in found.problems:
        console.print(f"  {problem}")
    for each in found.checkpoints:
        for problem in each.problems if not each.under_way else ():
            # Without the folder's own path, which is printed already.
            text = problem.removeprefix(f"{each.path}: ").removeprefix(f"{each.path}/")
            console.print(f"  {_name(each)}: {text}")
    with_content = [each for each in found.checkpoints if each.tensors]
    for each in with_content[-1:]:
        console.print(f"{_name(each)}:")
        for name, value in _facts(each):
            console.print(f"  {name:<12}{value}")
    for each in with_content if with_tensors else ():
        table = figures_table(_name(each), ("tensor", "shape", "dtype"), ("chunks",))
        for key, tensor in each.tensors.items():
            shape = " × ".join(map(str, tensor.shape))
            table.add_row(key, shape, _dtype_name(tensor.dtype), str(tensor.num_chunks))
        console.print(table, soft_wrap=False)


def _verdict(each: Inspection) -> str:
    if each.under_way:
        return "not finished: running or interrupted"
    if each.problems:
        return "DAMAGED OR INCOMPLETE"
    if each.written_by == "megatron":
        return "complete by Megatron's own metadata (it has no checksums)"
    return "complete, checksums right" if each.checksums_compared else "complete, sizes right"


def _facts(each: Inspection) -> Iterator[tuple[str, str]]:
    """Names and values that the table of all checkpoints does not show."""
    yield "written by", "this program" if each.written_by == "hydraulis" else "plain Megatron"
    if each.iteration is not None:
        yield "iteration", f"{each.iteration:,}"
    parameters = [t for key, t in each.tensors.items() if not key.startswith("optimizer.")]
    dtypes = " and ".join(sorted({_dtype_name(tensor.dtype) for tensor in parameters}))
    frozen = f", {each.num_frozen_parameters:,} frozen" if each.num_frozen_parameters else ""
    yield "parameters", f"{each.num_parameters:,} in {len(parameters)} tensors, {dtypes}{frozen}"
    optimizer = "none"
    if each.has_resumable_optimizer_state:
        optimizer = "fp32 master and moments, for any layout of ranks"
    elif each.has_optimizer_state:
        optimizer = "in a form of its ranks' layout"
    yield "optimizer", optimizer
    planner = each.state.get("planner")
    pool = planner.get("pool") if isinstance(planner, Mapping) else None
    if pool and isinstance(pool, Mapping):
        yield "pool", "; ".join(dict.fromkeys(map(str, pool.values())))
    model = ", ".join(f"{name} {value}" for name, value in each.model.items() if value is not None)
    if model:
        yield "model", model


def _name(each: Inspection) -> str:
    return Path(each.path).name


def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
