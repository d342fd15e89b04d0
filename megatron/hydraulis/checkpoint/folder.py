"""The folder of a run's checkpoints: Megatron's names, and when a checkpoint is complete.

A checkpoint is written into a folder with another name and renamed when it is complete, so that a
folder ``iter_0000100`` is never incomplete. The file that names the latest is replaced by a rename
as well.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.hydraulis.errors import CheckpointError

LATEST_FILE_NAME = "latest_checkpointed_iteration.txt"
"""Megatron's name."""
RELEASE = "release"
"""Megatron's name for weights without an iteration, in that file and as a folder."""

_SAVING, _DELETING, _REPLACED = ".saving-", ".deleting-", ".replaced-"
_ITERATION = re.compile(r"iter_(\d{7,18})")
_MAX_LATEST_BYTES = 64


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder that ``--save`` and ``--load`` name."""

    root: Path

    def path_of(self, iteration: int | str) -> Path:
        """Folder of the complete checkpoint of an iteration, or `RELEASE`."""
        name = iteration if isinstance(iteration, str) else f"iter_{iteration:07d}"
        return self.root / name

    def path_while_saving(self, iteration: int | str) -> Path:
        """Folder of the same checkpoint until it is complete."""
        return self.root / f"{_SAVING}{self.path_of(iteration).name}"

    @property
    def iterations(self) -> tuple[int, ...]:
        """Iterations that have a folder, in ascending order."""
        if not self.root.is_dir():
            return ()
        found = (_ITERATION.fullmatch(path.name) for path in self.root.iterdir() if path.is_dir())
        return tuple(sorted(int(match[1]) for match in found if match))

    @property
    def paths(self) -> tuple[Path, ...]:
        """Folders of all checkpoints: `RELEASE`, then those of iterations in ascending order."""
        release = self.path_of(RELEASE)
        first = (release,) if release.is_dir() else ()
        return (*first, *map(self.path_of, self.iterations))

    def latest(self) -> int | str | None:
        """The latest according to its file: an iteration or `RELEASE`; None without a file.

        Raises CheckpointError for a file that says anything else.
        """
        path = self.root / LATEST_FILE_NAME
        try:
            with path.open("rb") as file:
                text = file.read(_MAX_LATEST_BYTES + 1).decode(errors="replace").strip()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CheckpointError(
                f"{path}: cannot be read ({error.strerror}); correct its permissions, or name an "
                "iteration by --ckpt-step"
            ) from error
        if text == RELEASE:
            return RELEASE
        if not text.isascii() or not text.isdigit() or len(text) > _MAX_LATEST_BYTES // 4:
            raise CheckpointError(
                f"{path}: must hold the number of an iteration but holds {text[:32]!r}; write the "
                f"right one of {_named(self.iterations)}, or name it by --ckpt-step"
            )
        return int(text)

    def publish(self, iteration: int | str) -> Path:
        """Name what was written the checkpoint of the iteration, and the latest.

        It replaces an earlier one of the same iteration. Raises OSError.
        """
        path = self.path_of(iteration)
        replaced = self.root / f"{_REPLACED}{path.name}"
        if replaced.exists():
            shutil.rmtree(replaced)
        if path.exists():
            path.rename(replaced)
        self.path_while_saving(iteration).rename(path)
        _sync(self.root)
        self.write_latest(iteration)
        if replaced.exists():
            shutil.rmtree(replaced, ignore_errors=True)
        return path

    def write_latest(self, iteration: int | str) -> None:
        """Name the latest checkpoint, or `RELEASE`, completely or not at all. Raises OSError."""
        unfinished = self.root / f"{_SAVING}{LATEST_FILE_NAME}"
        replace_file(self.root / LATEST_FILE_NAME, unfinished, f"{iteration}")

    def surplus(self, num_kept: int) -> tuple[int, ...]:
        """Iterations up to the latest but the ``num_kept`` newest of them, oldest first."""
        latest = self.latest()
        if not isinstance(latest, int):
            return ()
        return tuple(i for i in self.iterations if i <= latest)[:-num_kept]

    def delete(self, iteration: int) -> None:
        """Delete a checkpoint; its name disappears first."""
        doomed = self.root / f"{_DELETING}{self.path_of(iteration).name}"
        shutil.rmtree(doomed, ignore_errors=True)
        self.path_of(iteration).rename(doomed)
        shutil.rmtree(doomed)

    def remove_leftovers(self) -> None:
        """Delete what interrupted saves and deletions left; no save may be running here.

        A checkpoint that was just being replaced gets its name back.
        """
        if not self.root.is_dir():
            return
        for path in self.root.iterdir():
            if not path.is_dir() or not path.name.startswith((_SAVING, _DELETING, _REPLACED)):
                continue
            replaced = self.root / path.name.removeprefix(_REPLACED)
            if replaced != path and not replaced.exists():
                path.rename(replaced)
            else:
                shutil.rmtree(path, ignore_errors=True)


def is_unfinished(path: Path) -> bool:
    """True if a save into the folder is running or was interrupted, by its name."""
    return path.name.startswith(_SAVING)


def replace_file(path: Path, unfinished: Path, text: str) -> None:
    """Write a file, then give it its name, so that a crash cannot cut it. Raises OSError."""
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    _sync(path.parent)


def _named(iterations: Sequence[int]) -> str:
    return ", ".join(map(str, iterations[-8:])) or "which there are none"


def _sync(folder: Path) -> None:
    """Make names in a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
