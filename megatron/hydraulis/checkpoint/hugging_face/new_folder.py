"""A folder that is there as a whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.hydraulis.checkpoint.byte_progress import size_text
from megatron.hydraulis.errors import CheckpointError

__all__ = ["new_folder"]


@contextmanager
def new_folder(path: Path, while_writing: Path, num_bytes: int) -> Iterator[Path]:
    """An empty folder to write into, which gets its name when the block ends without an error.

    Args:
        path: that is not there yet, or is empty.
        while_writing: its name until then, on the same disk; what an earlier attempt left there
            goes.
        num_bytes: that will be written, for which there must be room.

    Raises CheckpointError, also for an OSError inside the block.
    """
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(
                f"{path}: is written as a new folder but there is something; name another folder, "
                "or delete it first"
            )
        if while_writing.exists():
            shutil.rmtree(while_writing)
        while_writing.mkdir(parents=True)
        try:
            _check_room(while_writing, num_bytes)
            yield while_writing
            if path.exists():
                path.rmdir()
            while_writing.rename(path)
        except BaseException:
            shutil.rmtree(while_writing, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be written: {error.strerror or error}; nothing was left there: make "
            f"room for {size_text(num_bytes)} or name a folder on another disk"
        ) from error


def _check_room(folder: Path, num_bytes: int) -> None:
    num_free = shutil.disk_usage(folder).free
    if num_free < num_bytes:
        raise CheckpointError(
            f"{folder.parent}: {size_text(num_bytes)} are to be written but "
            f"{size_text(num_free)} are free; make room or name a folder on another "
            "disk"
        )
