"""Functions of the stand-in beyond those of CUDA, for processes that run on it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode


@cache
def driver() -> ctypes.CDLL:
    """The preloaded library."""
    library = ctypes.CDLL("libcuda.so.1")
    for name in ("stand_in_used_bytes", "stand_in_peak_bytes"):
        getattr(library, name).restype = ctypes.c_size_t
    library.stand_in_kernel.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    return library


def log_to(path: Path | None) -> None:
    """Write the lines of further calls to a new file; None: do not log."""
    driver().stand_in_log(None if path is None else str(path).encode())


def flush_log() -> None:
    """Write the log to its file."""
    driver().stand_in_flush()


def mark(text: str) -> None:
    """Write a line of text to the log."""
    driver().stand_in_mark(text.encode())


def used_bytes(device: int) -> int:
    """Memory in use on a device, by this and by other processes."""
    return int(driver().stand_in_used_bytes(device))


def peak_bytes(device: int) -> int:
    """Largest memory in use since the last `reset_peak`."""
    return int(driver().stand_in_peak_bytes(device))


def others_use(device: int, num_bytes: int) -> None:
    """Set how much of the device's memory another process uses."""
    driver().stand_in_others_use(device, ctypes.c_size_t(num_bytes))


def reset_peak(device: int) -> None:
    """Set the peak to what is in use now."""
    driver().stand_in_reset_peak(device)


@contextmanager
def events_never_ready() -> Iterator[None]:
    """Let every query of an event return "not ready": torch's allocator then never reuses memory of
    another stream, and only explicit waits order operations."""
    driver().stand_in_never_ready(1)
    try:
        yield
    finally:
        driver().stand_in_never_ready(0)


class PlainDispatchMode(TorchDispatchMode):
    """Does not import torch's compiler, which takes seconds in every fork."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, for torch (2.15): skipping the compiler would import it, and none is running."""
        return False
