"""What native code prints, kept out of a command's own output."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

__all__ = ["native_prints_to_stderr"]

_STDOUT, _STDERR = 1, 2
"""File descriptors of every process."""


@contextlib.contextmanager
def native_prints_to_stderr() -> Iterator[None]:
    """HiGHS prints some lines whatever it is told; they must not get into JSON on our output."""
    native = ctypes.CDLL(None)
    sys.stdout.flush()
    native.fflush(None)
    output = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    try:
        yield
    finally:
        native.fflush(None)
        os.dup2(output, _STDOUT)
        os.close(output)
