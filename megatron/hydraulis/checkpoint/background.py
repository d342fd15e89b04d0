"""Writing beside training: a fork of the rank writes the state as it was when it was forked.

The fork shares memory with the rank until one of them changes it, so nothing is copied before
training goes on. It touches files and tensors of the host, never a device or a process group.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from typing import IO

import torch

from megatron.hydraulis.checkpoint.writer import Written

__all__ = ["BackgroundWrite"]

NICENESS = 5
"""Training goes first where cores are few."""
_SIGNALS_OF_THE_JOB = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
"""The rank answers them, and waits for this process before it ends."""
_EXIT_TOLD = 3
"""The process has failed and its answer is why."""


Write = Callable[[Callable[[], bool]], Written]


class BackgroundWrite:
    """One rank's write in a process of its own.

    Args:
        write: what is written, given what says whether to go on; of the host's memory, without
            any collective.
    """

    def __init__(self, write: Write) -> None:
        # A file, not a pipe: the process must be able to end before anybody reads its answer.
        self._answer: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        # What is buffered must not be written twice. Not by multiprocessing: its daemons, as ranks
        # may be, have no children.
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._process = os.fork()
        self._status: int | None = None
        if self._process == 0:
            status = 1
            try:
                status = _run(write, self._answer, parent)
            finally:
                os._exit(status)

    @property
    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        if self._status is None:
            ended, status = os.waitpid(self._process, os.WNOHANG)
            if ended:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status is not None

    def result(self) -> bytes:
        """What was written, once it is: a pickled `Written`, which training need not wait for.

        Raises OSError, RuntimeError for a process that died.
        """
        self._wait()
        self._answer.seek(0)
        raw = self._answer.read()
        self._answer.close()
        if self._status == _EXIT_TOLD and raw:
            error: Exception = pickle.loads(raw)  # of this very process's child
            raise error
        if self._status != 0 or not raw:
            raise RuntimeError(f"the process that writes ended with status {self._status}")
        return raw

    def abandon(self) -> None:
        """End it; nobody wants the result."""
        if not self.is_done:
            os.kill(self._process, signal.SIGKILL)
        self._wait()
        self._answer.close()

    def _wait(self) -> None:
        if self._status is None:
            _, status = os.waitpid(self._process, 0)
            self._status = os.waitstatus_to_exitcode(status)


def _run(write: Write, answer: IO[bytes], parent: int) -> int:
    """In the fork; its exit status."""
    for name in _SIGNALS_OF_THE_JOB:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # the rank speaks for it
    gc.disable()  # collecting would touch, and so copy, every page of the rank's objects
    torch.set_num_threads(1)  # the threads of the rank are not here
    os.nice(NICENESS)
    result: Written | Exception
    try:
        result = write(partial(_is_child_of, parent))
    except Exception as error:
        result = error if _is_told(error) else RuntimeError(f"{type(error).__name__}: {error}")
    pickle.dump(result, answer)
    answer.flush()
    return _EXIT_TOLD if isinstance(result, Exception) else 0


def _is_child_of(parent: int) -> bool:
    return os.getppid() == parent


def _is_told(error: Exception) -> bool:
    """Whether it survives pickling, which an exception with a constructor of its own may not."""
    return isinstance(error, OSError) and type(error).__module__ == "builtins"
