"""Errors, signals and upstream's messages: how a process reports and reacts to them."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from typing import NoReturn

from megatron.hydraulis.errors import (
    ConfigurationError,
    HydraulisError,
    NonFiniteLossError,
    PlanError,
)

__all__ = [
    "end_process",
    "heed_both_signals",
    "quieten_upstream",
    "report_error",
    "report_unexpected_error",
    "seconds_before_report",
]

SECONDS_OF_SILENCE = 3.0
"""Time for the first rank that reports to end, and for its launcher to end the others."""

SHARED_ONCE_RANKS_MET = (ConfigurationError, NonFiniteLossError, PlanError)
"""Errors that normally reach every rank, by a collective or with the plan. All others occur on one
rank: in its data, its disk, its installation."""

_ONLY_ERRORS = (
    "megatron.core.models.gpt.gpt_model",  # announces every model that is built
    "megatron.core.datasets.indexed_dataset",
    "megatron.core.rerun_state_machine",  # announces a mode that is always the same here
)
_ONLY_WARNINGS = (
    "matplotlib",
    "megatron.core.num_microbatches_calculator",  # counts micro-batches of one data-parallel group
    "megatron.core.tokenizers.utils.build_tokenizer",  # the padded vocabulary, also in a dry run
)


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
        reports_first = not isinstance(error, SHARED_ONCE_RANKS_MET)
    else:
        reports_first = local_rank == 0
    if rank == 0 or reports_first:
        return 0.0
    # The first rank of a node before the others, as its launcher ends only its own node at once.
    return SECONDS_OF_SILENCE if local_rank == 0 else 2 * SECONDS_OF_SILENCE


def report_error(error: HydraulisError, *, ranks_have_met: bool) -> None:
    """Print the error as one line, on ranks other than 0 with host and rank."""
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
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


def report_unexpected_error(error: Exception) -> None:
    """Print the traceback of an error that is not a `HydraulisError`, with host and rank."""
    error.add_note(f"met on {socket.gethostname()}, rank {os.environ.get('RANK', '0')}")
    traceback.print_exception(error)


def end_process(status: int) -> NoReturn:
    """End at once, without the interpreter's cleanup.

    The cleanup joins threads and destroys process groups, which wait for collectives that other
    ranks will never complete; the launcher would notice the error that much later.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed stream
            stream.flush()
    os._exit(status)


def heed_both_signals(exit_signal: signal.Signals) -> None:
    """Let SIGUSR1 do what SIGTERM does, if upstream's handler is installed for SIGTERM.

    A batch system warns by one signal (Slurm: usually SIGUSR1) and ends a job by another (SIGTERM),
    and either may come first; upstream heeds only the one that ``--exit-signal`` names. If a user
    names another signal, it is the only one.
    """
    if exit_signal == signal.SIGTERM:
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGTERM))


def quieten_upstream(rank: int) -> None:
    """Silence upstream's messages before iteration 1 that are of no use to a user here.

    Raises the levels of single loggers; log lines, validation and errors are not affected.
    """
    for name in _ONLY_ERRORS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _ONLY_WARNINGS:
        logging.getLogger(name).setLevel(logging.WARNING)
    if rank != 0:
        # Every rank would report the same process groups.
        logging.getLogger("megatron.hydraulis").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|megatron)\b.*")
    # Upstream's barriers name no device; they use the current one, which is this rank's.
    warnings.filterwarnings("ignore", message=r"barrier\(\): using the device under")
