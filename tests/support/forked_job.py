"""A job of `pretrain_gpt.py` in forked processes: 1 or 2 seconds instead of a launcher's 15.

The parent imports torch, Megatron and the program once; every rank is a fresh fork that sees the
environment which torchrun would give it and runs the program's `main`. As a launcher would, the
parent ends the other ranks as soon as one fails.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.training.argument_utils import ArgumentGroupFactory
from PIL import Image

from hydraulis_patches import training_loop
from megatron.hydraulis.flags.parser import FlagParser
from megatron.hydraulis.loop import entry
from megatron.hydraulis.observability import report_figures
from megatron.hydraulis.observability.records import SUMMARY_FILE_NAME
from megatron.hydraulis.observability.report_data import Run
from tests.support.gloo_device import share_gloo_device

DEFAULT_TIMEOUT_S = 60.0
POLL_S = 0.02
SECONDS_TO_END = 5.0
"""From SIGTERM to SIGKILL."""

_IMPORTED_LATE = (
    "encodings.idna",
    "matplotlib.backends.backend_agg",
    "megatron.core.datasets.blended_megatron_dataset_config",
    "megatron.core.tokenizers.text",
    "megatron.hydraulis.terminal",
    "megatron.training.training",
    "torch._dynamo",  # by optimizers of plain runs
    "torch.utils.serialization.config",
    "torch.utils.tensorboard",
)

Program = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Kill:
    """A fault: one rank gets a signal, by default SIGKILL."""

    rank: int
    after: str
    """Text in any rank's output that triggers it."""
    number: signal.Signals = signal.SIGKILL


@dataclass(frozen=True)
class RankOutcome:
    """Exit status and output of one process."""

    status: int
    """Exit status; the negative number of the signal that ended it."""
    ended_by_launcher: bool
    stdout: str
    stderr: str


@dataclass(frozen=True)
class JobOutcome:
    """The end of a job: status and output of every rank."""

    ranks: Mapping[int, RankOutcome]
    timed_out: bool

    @property
    def statuses(self) -> tuple[int, ...]:
        """Exit statuses by rank."""
        return tuple(outcome.status for outcome in self.ranks.values())

    @property
    def stdout(self) -> str:
        """The standard output of all ranks, in the order of the ranks."""
        return "".join(outcome.stdout for outcome in self.ranks.values())

    @property
    def stderr(self) -> str:
        """The standard error of all ranks, in the order of the ranks."""
        return "".join(outcome.stderr for outcome in self.ranks.values())

    def assert_succeeded(self) -> None:
        """Fails with the end of every rank's output."""
        assert not self.timed_out, f"the job hung: {self._ends_of_output()}"
        assert set(self.statuses) == {0}, self._ends_of_output()

    def _ends_of_output(self, num_characters: int = 3000) -> str:
        return "\n".join(
            f"--- rank {rank}, status {outcome.status}\n{outcome.stdout[-num_characters:]}\n"
            f"{outcome.stderr[-num_characters:]}"
            for rank, outcome in self.ranks.items()
        )


def run_job(
    argv: Sequence[str],
    num_ranks: int,
    folder: Path,
    *,
    program: Program = entry.main,
    started: Sequence[int] | None = None,
    kill: Kill | None = None,
    ends_others: bool = True,
    draws_summary: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> JobOutcome:
    """Run ``program(argv)`` on every rank of a job.

    Args:
        argv: the flags.
        num_ranks: of the job (WORLD_SIZE).
        folder: where each rank's output is kept.
        program: called on every rank; may be a closure, as processes are forked.
        started: ranks that are started; the others never join.
        kill: a rank that is killed during the job.
        ends_others: whether the others are ended when one fails, as launchers do.
        draws_summary: see `enter_rank`.
        timeout_s: for the whole job; then every rank is killed.
    """
    _prepare_once()
    folder.mkdir(parents=True, exist_ok=True)
    ranks = range(num_ranks) if started is None else started
    port = free_port()
    context = multiprocessing.get_context("fork")
    processes = {
        rank: context.Process(
            target=_rank_main,
            args=(program, list(argv), rank, num_ranks, port, folder, draws_summary),
        )
        for rank in ranks
    }
    for process in processes.values():
        process.start()
    try:
        timed_out, ended = _wait(processes, folder, kill, ends_others, timeout_s)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    outcomes = {}
    for rank, process in processes.items():
        assert process.exitcode is not None
        outcomes[rank] = RankOutcome(
            process.exitcode, rank in ended, *(_read(folder, rank, name) for name in _STREAMS)
        )
    return JobOutcome(outcomes, timed_out)


def _wait(
    processes: Mapping[int, Any],
    folder: Path,
    kill: Kill | None,
    ends_others: bool,
    timeout_s: float,
) -> tuple[bool, set[int]]:
    """Wait for all ranks: whether time ran out, and the ranks that were signalled to end."""
    deadline = time.monotonic() + timeout_s
    ended: set[int] = set()
    kill_at = None
    while any(process.is_alive() for process in processes.values()):
        now = time.monotonic()
        if now > deadline:
            return True, ended
        if kill is not None and _was_printed(kill.after, processes, folder):
            os.kill(processes[kill.rank].pid, kill.number)
            kill = None
        has_failed = any(process.exitcode not in (None, 0) for process in processes.values())
        if has_failed and ends_others:
            if not ended:
                kill_at = now + SECONDS_TO_END
            for rank, process in processes.items():
                if process.is_alive() and (rank not in ended or now > (kill_at or now)):
                    (process.terminate if rank not in ended else process.kill)()
                    ended.add(rank)
        time.sleep(POLL_S)
    return False, ended


def _was_printed(text: str, ranks: Mapping[int, Any], folder: Path) -> bool:
    return any(text in _read(folder, rank, name) for rank in ranks for name in _STREAMS)


_STREAMS = ("stdout", "stderr")


def _read(folder: Path, rank: int, name: str) -> str:
    path = folder / f"rank{rank}.{name}"
    return path.read_text(errors="replace") if path.exists() else ""


def _rank_main(
    program: Program,
    argv: list[str],
    rank: int,
    num_ranks: int,
    port: int,
    folder: Path,
    draws_summary: bool,
) -> None:
    """Does in the fork what torchrun and the interpreter do around the program. Never returns."""
    enter_rank(argv, folder, f"rank{rank}", draws_summary=draws_summary)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    status = 0
    try:
        program(argv)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def enter_rank(
    argv: Sequence[str], folder: Path, name: str, *, draws_summary: bool = False
) -> None:
    """Makes a fork of the test run act as a fresh process, with files for its output.

    Args:
        argv: the flags.
        folder: of the files.
        name: their stem.
        draws_summary: whether a run draws its ``summary.png``, half of the CPU time of the rank
            that does so.
    """
    if not draws_summary:
        report_figures.write_summary = _leave_out_summary
    atexit._clear()  # of the test run
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for descriptor, stream in enumerate(_STREAMS, start=1):
        file = os.open(folder / f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        setattr(sys, stream, os.fdopen(descriptor, "w", buffering=1, closefd=False))
    # Upstream does so when it is imported, which has happened in the test run.
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, force=True)
    sys.argv = ["pretrain_gpt.py", *argv]


def _leave_out_summary(run: Run) -> Path:
    return run.folder / SUMMARY_FILE_NAME


@cache
def _prepare_once() -> None:
    """Prepares what forks inherit: also modules that the program imports late, and one thread."""
    for name in _IMPORTED_LATE:
        importlib.import_module(name)
    Image.init()  # imports Pillow's plugins
    for patch in training_loop.ALL:
        patch.check()  # the hashes of upstream's sources are kept
    torch.set_num_threads(1)
    share_gloo_device()
    _read_docstrings_once()


def _read_docstrings_once() -> None:
    """Upstream parses the source of 27 dataclasses, twice a rank, for the help of its options."""
    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def read_once(factory: ArgumentGroupFactory, config: type) -> dict[str, str]:
        if config not in known:
            known[config] = read(factory, config)
        return known[config]

    ArgumentGroupFactory._get_field_docstrings = read_once
    FlagParser()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
