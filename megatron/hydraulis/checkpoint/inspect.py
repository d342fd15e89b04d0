"""``inspect-checkpoint``: what is in a folder of checkpoints, without building a model.

What needs torch is imported late, so that help is quick.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from megatron.hydraulis.checkpoint.byte_progress import ByteProgress, size_text
from megatron.hydraulis.checkpoint.folder import CheckpointFolder, is_unfinished
from megatron.hydraulis.checkpoint.manifest import (
    FORMAT_NAME,
    MANIFEST_NAME,
    METADATA_NAME,
    Manifest,
)
from megatron.hydraulis.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint, StoredTensor

__all__ = ["FolderInspection", "Inspection", "add_arguments", "inspect_folder", "run"]

EXIT_INCOMPLETE = 1
_WIDTH = 100
"""Columns if the output is not a terminal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
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
        print(json.dumps(found.to_json(), indent=1))
    else:
        _print(found, with_tensors=namespace.tensors)
    return 0 if found.is_complete else EXIT_INCOMPLETE


@dataclass(frozen=True)
class Inspection:
    """One checkpoint."""

    path: Path
    written_by: str
    """``hydraulis`` or ``megatron``."""
    problems: tuple[str, ...]
    """What is missing or damaged."""
    is_under_way: bool = False
    """Whether its save is running or was interrupted."""
    iteration: int | None = None
    num_ranks: int | None = None
    num_bytes: int | None = None
    checks_content: bool = False
    """Whether every byte was compared with its checksum."""
    num_consumed_sequences: int | None = None
    stored: StoredCheckpoint | None = None
    """None if its metadata cannot be read."""
    model: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """All tensors by key."""
        return {} if self.stored is None else self.stored.tensors

    @property
    def parameters(self) -> Mapping[str, StoredTensor]:
        """Tensors that are not the optimizer's."""
        return {} if self.stored is None else self.stored.parameters

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters."""
        return sum(math.prod(tensor.shape) for tensor in self.parameters.values())

    @property
    def pool(self) -> tuple[str, ...]:
        """Strategies of the run that wrote it, if it says so."""
        planner = self.state.get("planner")
        pool = planner.get("pool") if isinstance(planner, Mapping) else None
        return tuple(dict.fromkeys(map(str, pool.values()))) if isinstance(pool, Mapping) else ()

    def to_json(self) -> dict[str, Any]:
        """The checkpoint as it is printed by ``--json``."""
        return {
            "path": str(self.path),
            "written_by": self.written_by,
            "complete": not self.problems,
            "under_way": self.is_under_way,
            "problems": list(self.problems),
            "checksums_compared": self.checks_content,
            "iteration": self.iteration,
            "num_ranks": self.num_ranks,
            "bytes": self.num_bytes,
            "num_consumed_sequences": self.num_consumed_sequences,
            "num_parameters": self.num_parameters,
            "has_optimizer_state": self.stored is not None and self.stored.has_optimizer,
            "has_resumable_optimizer_state": (
                self.stored is not None and self.stored.has_resumable_optimizer
            ),
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
    """A folder of checkpoints as given to ``--save``, or a single checkpoint."""

    path: Path
    checkpoints: tuple[Inspection, ...]
    """Oldest first; those whose save is not finished at the end."""
    latest: str | None = None
    """Name of the folder that is named the latest, if any."""
    problems: tuple[str, ...] = ()
    """Problems of the folder as a whole."""
    is_single: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether all checkpoints are, but for those being saved, which do not stop a run."""
        counted = (each for each in self.checkpoints if self.is_single or not each.is_under_way)
        return not self.problems and not any(each.problems for each in counted)

    def to_json(self) -> dict[str, Any]:
        """The folder as it is printed by ``--json``."""
        return {
            "path": str(self.path),
            "complete": self.is_complete,
            "problems": list(self.problems),
            "latest": self.latest,
            "checkpoints": [each.to_json() for each in self.checkpoints],
        }


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
    from megatron.hydraulis.checkpoint.torch_dist import StoredCheckpoint

    if is_unfinished(path):
        what = "its save is running or was interrupted"
        return Inspection(path, "hydraulis", (what,), is_under_way=True)
    problems: list[str] = []
    stored = None
    try:
        stored = StoredCheckpoint(path)
    except CheckpointError as error:
        problems.append(str(error))
    try:
        manifest = Manifest.read(path)
    except FileNotFoundError:
        return _of_megatron(path, stored, problems)
    except CheckpointError as error:
        return Inspection(path, "hydraulis", (*problems, str(error)), stored=stored)
    what = f"{path.name}: {'checksums' if checks_content else 'sizes'}"
    with ByteProgress(what, manifest.num_bytes) as progress:
        damage = manifest.problems(path, checks_content=checks_content, advance=progress.advance)
    consumed = manifest.state.get("consumed_train_samples")
    return Inspection(
        path,
        "hydraulis",
        tuple(damage or problems),  # torch's errors about damaged files say less
        iteration=manifest.iteration,
        num_ranks=manifest.num_ranks,
        num_bytes=manifest.num_bytes,
        checks_content=checks_content,
        num_consumed_sequences=consumed if isinstance(consumed, int) else None,
        model=manifest.model,
        state=manifest.state,
        stored=stored,
    )


def _of_megatron(path: Path, stored: StoredCheckpoint | None, problems: list[str]) -> Inspection:
    """A checkpoint without manifest, whose files must be as long as its tensors need."""
    from megatron.hydraulis.checkpoint.loading import upstream_state

    known: dict[str, Any] = {}
    written_by = "megatron"
    if not (path / FORMAT_NAME).is_file():
        problems.append(f"{FORMAT_NAME} is missing, which Megatron writes last")
    try:
        if stored is not None:
            problems += _short_files(stored)
            state = upstream_state(stored)
            known = {
                "iteration": state.iteration,
                "num_consumed_sequences": state.num_consumed_sequences,
                "model": state.model,
            }
            if state.written_here:
                written_by = "hydraulis"
                problems.append(f"{MANIFEST_NAME} is missing, so the files cannot be checked")
    except CheckpointError as error:
        problems.append(str(error))
    num_bytes = sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    return Inspection(
        path, written_by, tuple(problems), num_bytes=num_bytes, stored=stored, **known
    )


def _short_files(stored: StoredCheckpoint) -> Iterator[str]:
    for name, least in sorted(stored.needed_bytes.items()):
        file = stored.folder / name
        if not file.is_file():
            yield f"{name} is missing"
        elif file.stat().st_size < least:
            yield f"{name} has {file.stat().st_size} bytes but its tensors need {least}"


# --- printing -----------------------------------------------------------------------------------


def _print(found: FolderInspection, *, with_tensors: bool) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, soft_wrap=True, width=_WIDTH)
    if found.is_single:
        console.print(f"{found.path}: {_verdict(found.checkpoints[0])}")
    else:
        what = _counted(len(found.checkpoints), "checkpoint")
        console.print(f"{found.path}: {what}, latest: {found.latest or 'none'}")
        console.print(_table(found), soft_wrap=False)
    for problem in found.problems:
        console.print(f"  {problem}")
    for each in found.checkpoints:
        for problem in each.problems if not each.is_under_way else ():
            # Without the folder's own path, which is printed already.
            text = problem.removeprefix(f"{each.path}: ").removeprefix(f"{each.path}/")
            console.print(f"  {text}" if found.is_single else f"  {each.path.name}: {text}")
    newest = next((each for each in reversed(found.checkpoints) if each.tensors), None)
    if newest is not None:
        if not found.is_single:
            console.print(f"{newest.path.name}:")
        facts = Table.grid(padding=(0, 2))
        facts.add_column()
        facts.add_column(overflow="fold")
        for name, value in _facts(newest):
            facts.add_row(f"  {name}", value)
        console.print(facts, soft_wrap=False)
    if with_tensors:
        for each in found.checkpoints:
            if each.tensors:
                console.print(_tensor_table(each), soft_wrap=False)


def _verdict(each: Inspection) -> str:
    if each.is_under_way:
        return "not finished: running or interrupted"
    if each.problems:
        return "DAMAGED OR INCOMPLETE"
    if each.written_by == "megatron":
        return "complete by Megatron's own metadata (it has no checksums)"
    return "complete, checksums right" if each.checks_content else "complete, sizes right"


def _table(found: FolderInspection) -> Table:
    table = Table()
    table.add_column("checkpoint")
    table.add_column("state")
    for column in ("sequences", "ranks", "size"):
        table.add_column(column, justify="right")
    for each in found.checkpoints:
        consumed = each.num_consumed_sequences
        table.add_row(
            each.path.name,
            _verdict(each),
            "" if consumed is None else f"{consumed:,}",
            "" if each.num_ranks is None else str(each.num_ranks),
            "" if each.num_bytes is None else size_text(each.num_bytes),
        )
    return table


def _facts(each: Inspection) -> Iterator[tuple[str, str]]:
    writer = "this program" if each.written_by == "hydraulis" else "plain Megatron"
    ranks = "" if each.num_ranks is None else f" on {_counted(each.num_ranks, 'rank')}"
    yield "written by", writer + ranks
    if each.iteration is not None:
        yield "iteration", f"{each.iteration:,}"
    if each.num_consumed_sequences is not None:
        yield "consumed", f"{each.num_consumed_sequences:,} sequences"
    if each.num_bytes is not None:
        yield "size", size_text(each.num_bytes)
    parameters = each.parameters
    dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in parameters.values()})
    in_tensors = f"in {len(parameters)} tensors, {' and '.join(dtypes)}"
    yield "parameters", f"{each.num_parameters:,} {in_tensors}"
    optimizer = "none"
    if each.stored is not None and each.stored.has_optimizer:
        optimizer = "in a form of its ranks' layout"
        if each.stored.has_resumable_optimizer:
            optimizer = "fp32 master and moments, for any layout of ranks"
    yield "optimizer", optimizer
    if each.pool:
        yield "pool", "; ".join(each.pool)
    model = ", ".join(f"{name} {value}" for name, value in each.model.items() if value is not None)
    if model:
        yield "model", model


def _tensor_table(each: Inspection) -> Table:
    table = Table(title=each.path.name, title_justify="left")
    table.add_column("tensor", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("chunks", justify="right")
    for key, tensor in sorted(each.tensors.items()):
        shape = " × ".join(map(str, tensor.shape))
        dtype = str(tensor.dtype).removeprefix("torch.")
        table.add_row(key, shape, dtype, str(tensor.num_chunks))
    return table


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
