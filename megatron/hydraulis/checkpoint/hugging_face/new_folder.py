"""A folder that is there as a whole or not at all, and how far its writing is."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megatron.hydraulis.errors import CheckpointError

__all__ = ["ByteProgress", "new_folder", "size_text"]

_BYTES_PER_MB = 1e6
_BYTES_PER_GB = 1e9
_LINE_INTERVAL_S = 10.0


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


class ByteProgress:
    """Of long work, on standard error: a bar on a terminal, elsewhere a line every ten seconds.

    Args:
        what: is done.
        num_bytes: of all of it.
    """

    def __init__(self, what: str, num_bytes: int) -> None:
        console = Console(stderr=True)
        self._what = what
        self._num_bytes = num_bytes
        self._num_done = 0
        self._is_terminal = console.is_terminal
        self._last_line_s = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task(what, total=num_bytes)

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """So many more are done."""
        self._num_done += num_bytes
        self._bar.update(self._task, advance=num_bytes)
        now_s = time.monotonic()
        if not self._is_terminal and now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            print(
                f"{self._what}: {size_text(self._num_done)} of {size_text(self._num_bytes)}",
                file=sys.stderr,
                flush=True,
            )


def size_text(num_bytes: int) -> str:
    """For people, in MB or GB."""
    if num_bytes < _BYTES_PER_GB:
        return f"{num_bytes / _BYTES_PER_MB:.1f} MB"
    return f"{num_bytes / _BYTES_PER_GB:.2f} GB"


def _check_room(folder: Path, num_bytes: int) -> None:
    num_free = shutil.disk_usage(folder).free
    if num_free < num_bytes:
        raise CheckpointError(
            f"{folder.parent}: {size_text(num_bytes)} are to be written but "
            f"{size_text(num_free)} are free; make room or name a folder on another "
            "disk"
        )
