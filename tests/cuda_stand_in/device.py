"""What a process on the stand-in asks it beyond CUDA's own functions."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


@cache
def driver() -> ctypes.CDLL:
    """The preloaded library."""
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("stand_in_used_bytes", "stand_in_peak_bytes"):
        getattr(library, name).restype = ctypes.c_size_t
    return library


def log_to(path: Path | None) -> None:
    """Calls leave their lines in a new file from here on; None: nowhere."""
    driver().stand_in_log(None if path is None else str(path).encode())


def flush_log() -> None:
    """What was logged is in the file."""
    driver().stand_in_flush()


def mark(text: str) -> None:
    """A line of the caller's own in the log."""
    driver().stand_in_mark(text.encode())


def used_bytes(device: int) -> int:
    """Memory in use on a device, by torch's allocator and by all else."""
    return int(driver().stand_in_used_bytes(device))


def peak_bytes(device: int) -> int:
    """The most that was in use since the last `reset_peak`."""
    return int(driver().stand_in_peak_bytes(device))


def others_use(device: int, num_bytes: int) -> None:
    """Another process on the device has so much of its memory from here on."""
    driver().stand_in_others_use(device, ctypes.c_size_t(num_bytes))


def reset_peak(device: int) -> None:
    """The peak is what is in use now."""
    driver().stand_in_reset_peak(device)


@contextmanager
def events_never_ready() -> Iterator[None]:
    """Within, every query of an event answers "not ready": torch's allocator then gives memory that
    another stream uses to nobody else, and only explicit waits order anything."""
    driver().stand_in_never_ready(1)
    try:
        yield
    finally:
        driver().stand_in_never_ready(0)
