"""The progress of reading or writing many bytes."""

from __future__ import annotations

import sys
import time

from rich.progress import DownloadColumn, TimeRemainingColumn

from megatron.hydraulis.terminal import progress_bars

_BYTES_PER_MB = 1e6
_BYTES_PER_GB = 1e9
_LINE_INTERVAL_S = 10.0


class ByteProgress:
    """Progress on standard error: a bar on a terminal, elsewhere a line every ten seconds."""

    def __init__(self, what: str, num_bytes: int) -> None:
        self._bar = progress_bars(DownloadColumn(), TimeRemainingColumn())
        self._bar.add_task(what, total=num_bytes)
        self._last_line_s = time.monotonic()

    def __enter__(self) -> ByteProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done."""
        (task,) = self._bar.tasks
        self._bar.update(task.id, advance=num_bytes)
        now_s = time.monotonic()
        if self._bar.disable and now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            done, total = size_text(int(task.completed)), size_text(int(task.total or 0))
            print(f"{task.description}: {done} of {total}", file=sys.stderr, flush=True)


def size_text(num_bytes: int) -> str:
    """A size in MB or GB."""
    if num_bytes < _BYTES_PER_GB:
        return f"{num_bytes / _BYTES_PER_MB:.1f} MB"
    return f"{num_bytes / _BYTES_PER_GB:.2f} GB"
