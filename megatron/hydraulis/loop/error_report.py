"""Who says what is wrong: every error is told, and told by as few ranks as possible."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from typing import NoReturn

from megatron.hydraulis.errors import (
    ConfigurationError,
    HydraulisError,
    NonFiniteLossError,
    PlanError,
)

__all__ = ["end_process", "report", "report_unforeseen", "seconds_before_speaking"]

SECONDS_TO_KEEP_STILL = 3.0
"""Time for whoever speaks first to end, and for its launcher to end the others."""

SHARED_ONCE_RANKS_MET = (ConfigurationError, NonFiniteLossError, PlanError)
"""What normally reaches every rank by a collective or with the plan. All else is met by one rank:
its data, its disk, its installation."""


def seconds_before_speaking(
    error: HydraulisError, *, rank: int, local_rank: int, ranks_have_met: bool
) -> float:
    """How long a rank keeps still before it tells an error; 0 for whoever speaks first.

    Rank 0 speaks at once. Until the ranks have met, so does the first rank of every node, which may
    miss a file that other nodes have; from then on, so does any rank with an error of its own. Who
    keeps still is normally ended by its launcher. Who is not was the only one to meet the error,
    and speaks.
    """
    if ranks_have_met:
        speaks_first = not isinstance(error, SHARED_ONCE_RANKS_MET)
    else:
        speaks_first = local_rank == 0
    if rank == 0 or speaks_first:
        return 0.0
    # The first rank of a node before the others, as its launcher ends only its own node at once.
    return SECONDS_TO_KEEP_STILL if local_rank == 0 else 2 * SECONDS_TO_KEEP_STILL


def report(error: HydraulisError, *, ranks_have_met: bool) -> None:
    """Print the error as one line, with host and rank unless it is rank 0 that speaks."""
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    seconds = seconds_before_speaking(
        error, rank=rank, local_rank=local_rank, ranks_have_met=ranks_have_met
    )
    if seconds > 0:
        # Upstream's --exit-signal-handler would swallow the signal by which launchers end ranks.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(seconds)
    where = f"{socket.gethostname()}, rank {rank}: " if rank else ""
    # Notes say in which part of an iteration an error was met.
    notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    print(f"error: {where}{error}{notes}", file=sys.stderr, flush=True)


def report_unforeseen(error: Exception) -> None:
    """Print the traceback of an error that is not one of ours, with host and rank."""
    error.add_note(f"met on {socket.gethostname()}, rank {os.environ.get('RANK', '0')}")
    traceback.print_exception(error)


def end_process(status: int) -> NoReturn:
    """End at once, without the interpreter's way out.

    That way joins threads and destroys process groups, which wait for collectives that other ranks
    will never complete: launchers, who end the others, would hear of the error that much later.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    os._exit(status)
