"""Errors, signals and upstream's messages: how a process reports and reacts to them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import NoReturn

from megatron.hydraulis.errors import (
    FULL_DISK,
    ConfigurationError,
    HydraulisError,
    NonFiniteLossError,
    PlanError,
)
from megatron.hydraulis.quiet_imports import silence_upstream

SECONDS_OF_SILENCE = 3.0
"""Time for the first rank that reports to end, and for its launcher to end the others."""

SECONDS_FOR_LAUNCHER = 1.0
"""Time for a launcher to end a rank that lost a connection. Shorter than `SECONDS_TO_NOTICE` of the
track, whose thread would then report the same."""

SHARED_ONCE_RANKS_MET = (ConfigurationError, NonFiniteLossError, PlanError)
"""Errors that normally reach every rank, by a collective or with the plan. All others occur on one
rank, in its data, its disk, its installation, unless they say that they are shared."""

_LOST_CONNECTION = re.compile(
    r"[Cc]onnection (closed|reset) by peer( \[[^\]]+\]:\d+)?|Broken pipe"
    r"|Connection was likely closed|remote process exit\w*"
)
"""In messages of gloo, of torch's store and of NCCL (ncclRemoteError)."""


def seconds_before_report(
    error: HydraulisError, *, rank: int, local_rank: int, ranks_have_met: bool
) -> float:
    """How long a rank waits before it reports an error, so that few ranks report the same.

    Rank 0 reports at once. Until the ranks have met, so does the first rank of every node, which
    may miss a file that other nodes have; from then on, so does any rank with an error that the
    others do not share. A rank that waits is normally ended by its launcher meanwhile; if it is
    not, it is the only one with the error, and reports it.
    """
    if ranks_have_met:
        reports_first = not (error.is_shared or isinstance(error, SHARED_ONCE_RANKS_MET))
    else:
        reports_first = local_rank == 0
    if rank == 0 or reports_first:
        return 0.0
    # The first rank of a node before the others, as its launcher ends only its own node at once.
    return SECONDS_OF_SILENCE if local_rank == 0 else 2 * SECONDS_OF_SILENCE


def report_error(error: HydraulisError, *, ranks_have_met: bool) -> None:
    """Print the error as one line, on ranks other than 0 with host and rank."""
    rank, local_rank = _launcher_number("RANK"), _launcher_number("LOCAL_RANK")
    seconds = seconds_before_report(
        error, rank=rank, local_rank=local_rank, ranks_have_met=ranks_have_met
    )
    if seconds > 0:
        # Upstream's --exit-signal-handler would swallow the signal by which launchers end ranks.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(seconds)
    where = f"{socket.gethostname()}, rank {rank}: " if rank else ""
    # Notes name the part of an iteration in which the error occurred.
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    print(f"error: {where}{error}{notes}", file=sys.stderr, flush=True)


def report_interrupt() -> None:
    """Rank 0 says that SIGINT ends the run without a checkpoint."""
    if os.environ.get("RANK", "0") == "0":
        print(
            "interrupted: what was trained since the last checkpoint is lost; --save DIR "
            "--exit-signal-handler saves it first",
            file=sys.stderr,
            flush=True,
        )


def is_lost_connection(error: Exception) -> bool:
    """Whether it says that another rank, which has an error or was killed, is gone."""
    return _lost_connection(error) is not None


def _lost_connection(error: Exception) -> str | None:
    """The part of the message that says so, with the address that gloo adds."""
    found = _LOST_CONNECTION.search(str(error)) if isinstance(error, RuntimeError) else None
    return None if found is None else found[0]


def report_lost_connection(error: Exception) -> None:
    """Print one line and give the launcher time to end this rank.

    Then the line does not bury the error of the rank that is gone, and the launcher reports that
    rank as the first that failed. The first rank of a node prints at once, as it may be the only
    one to know in which phase the connection was lost; the others if they are not ended.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # see `report_error`
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not is_first:
        time.sleep(SECONDS_FOR_LAUNCHER)
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    print(
        f"{socket.gethostname()}, rank {os.environ.get('RANK', '0')}: another rank is gone: "
        f"{_lost_connection(error)}{notes}; that rank's error, or the launcher's report of how "
        "it ended, is the cause",
        file=sys.stderr,
        flush=True,
    )
    if is_first:
        time.sleep(SECONDS_FOR_LAUNCHER)


def report_unexpected_error(error: Exception) -> None:
    """Print the traceback of an error that is not a `HydraulisError`, with host and rank."""
    error.add_note(f"met on {socket.gethostname()}, rank {os.environ.get('RANK', '0')}")
    traceback.print_exception(error)


def _launcher_number(name: str) -> int:
    """0 for what is no number, which is the error to report."""
    text = os.environ.get(name, "0")
    return int(text) if text.isdecimal() else 0


def end_process(status: int) -> NoReturn:
    """End at once, without the interpreter's cleanup.

    The cleanup joins threads and destroys process groups, which wait for collectives that other
    ranks will never complete; the launcher would notice the error that much later.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    os._exit(status)


def heed_signals(exit_signal: signal.Signals) -> None:
    """Let SIGUSR1 and SIGINT do what SIGTERM does, if upstream's handler is installed for SIGTERM.

    A batch system warns by one signal (Slurm: usually SIGUSR1) and ends a job by another (SIGTERM),
    a user by Ctrl-C, and any may come first; upstream heeds only the one that ``--exit-signal``
    names. If a user names another signal, it is the only one. A second SIGINT ends the process.
    """
    if exit_signal != signal.SIGTERM:
        return
    finish = signal.getsignal(signal.SIGTERM)
    assert callable(finish)
    signal.signal(signal.SIGUSR1, finish)

    def at_first_interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        finish(number, frame)
        if os.environ.get("RANK", "0") == "0":
            # The main thread may be printing at this moment.
            os.write(
                sys.stderr.fileno(), b"SIGINT: the run ends after this iteration; again: at once\n"
            )

    # Where a shell started the ranks in the background, they ignore it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, at_first_interrupt)


def _report_thread_error(args: threading.ExceptHookArgs) -> None:
    """Python's report, except of a full disk: TensorBoard raises that in the main thread too."""
    if not (isinstance(args.exc_value, OSError) and args.exc_value.errno in FULL_DISK):
        threading.__excepthook__(args)


def quieten_upstream(rank: int) -> None:
    """`silence_upstream`, and of a full disk only the main thread's error."""
    threading.excepthook = _report_thread_error
    silence_upstream(rank)
