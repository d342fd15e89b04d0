"""Errors, signals, hangs and upstream's messages: how a process reports and reacts to them.

A collective that some rank never enters ends after ``--distributed-timeout-minutes`` with an error
that names neither the iteration nor that rank. Therefore a thread of every rank regularly writes
the rank's phase, iteration and a timestamp to the job's store; a frozen process stops writing.
Shortly before collectives time out, the waiting ranks read what all have written, and the first of
them reports who is missing.

The store is in the process of rank 0, and torch waits without limit for the answer of a frozen
store, whatever its timeout. Therefore a second thread, which never uses the store, watches how long
an answer takes: it reports that, and ends a rank that waits for the store and for no collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NoReturn

import torch.distributed as dist

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
"""Words for a lost connection in messages of gloo, torch's store and NCCL (ncclRemoteError)."""


def seconds_before_report(
    error: HydraulisError, *, rank: int, local_rank: int, ranks_have_met: bool
) -> float:
    """Returns how long a rank waits before it reports an error, so that few report the same.

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


def lost_connection(error: Exception) -> str | None:
    """The part of its message, with gloo's address, that says that another rank, which has an error
    or was killed, is gone; None if it does not say so."""
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
        f"{lost_connection(error)}{notes}; that rank's error, or the launcher's report of how "
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


# --- hangs ---

SHARE_OF_TIMEOUT = 0.8
"""Share of the timeout after which a wait is reported: before the collective ends the process."""
BEATS_PER_TIMEOUT = 20
MAX_BEAT_S = 10.0
BEATS_UNTIL_SILENT = 4
"""Beats without a sign of life from a rank or the store; reading it takes one more."""
MAX_RANKS_NAMED = 8
EXIT_STATUS_OF_HANG = 1
"""A process that waits for a frozen store ends with it, as after a collective that timed out."""

_ORDER = (
    "start",
    "load",
    "planning",
    "gather",
    "forward-backward",
    "scatter",
    "loss",
    "optimizer",
    "evaluation",
    "save",
    "end",
)
_AFTER = {"scatter": "loss"}
"""Phases that follow another without being entered."""
_WITHOUT_WAIT = ("end",)
_NOTE = "phase '"
"""Beginning of the text of a place."""


@dataclass(frozen=True)
class RankPlace:
    """Iteration and phase that a rank has reached."""

    iteration: int
    phase: str
    plan: str
    """Strategy and digest; empty where there is none yet."""
    since_s: float
    """Time of day when it got there."""
    alive_s: float
    """Time of day when it last wrote its place."""

    def __post_init__(self) -> None:
        if self.phase not in _ORDER:
            raise ValueError(f"a phase is one of {', '.join(_ORDER)} but this is {self.phase!r}")

    @property
    def order(self) -> tuple[int, int]:
        """Key that is greater for later places of a run."""
        return self.iteration, _ORDER.index(self.phase)

    def __str__(self) -> str:
        of_plan = f" ({self.plan})" if self.plan else ""
        of_iteration = f" of iteration {self.iteration}" if self.iteration else ""
        return f"{_NOTE}{self.phase}'{of_iteration}{of_plan}"


def missing_ranks(places: Sequence[RankPlace | None], now_s: float, silent_s: float) -> list[int]:
    """Ranks that others wait for: those behind the furthest, and those that are silent.

    Args:
        places: of every rank; None where it has written none.
        now_s: time of day.
        silent_s: a rank that has written nothing for longer is silent.
    """
    alive = [p for p in places if p is not None and now_s - p.alive_s <= silent_s]
    furthest = max((p.order for p in alive), default=(0, 0))
    return [
        rank
        for rank, p in enumerate(places)
        if p is None or now_s - p.alive_s > silent_s or p.order < furthest
    ]


def report_of(
    rank: int, places: Sequence[RankPlace | None], now_s: float, silent_s: float, timeout_s: float
) -> str | None:
    """This rank's report of a wait; None if another rank reports it."""
    missing = missing_ranks(places, now_s, silent_s)
    waiting = [r for r in range(len(places)) if r not in missing]
    if rank != min(waiting, default=rank):
        return None
    own = places[rank]
    assert own is not None
    others = len(waiting) - 1
    who_waits = f"rank {rank} and {others} other rank{'s' * (others > 1)} have"
    if len(waiting) < 2:
        who_waits = f"rank {rank} has"
    if missing:
        named = "; ".join(_state(r, places[r], now_s, silent_s) for r in missing[:MAX_RANKS_NAMED])
        more = f"; and {len(missing) - MAX_RANKS_NAMED} more" * (len(missing) > MAX_RANKS_NAMED)
        who = f"missing: {named}{more}"
    else:
        who = (
            "no rank is missing: all are in this phase and alive, so that it may only be slow; "
            "raise --distributed-timeout-minutes if it is"
        )
    return (
        f"hang: {who_waits} been in {own} for {now_s - own.since_s:.0f} s "
        f"(--distributed-timeout-minutes ends the job after {timeout_s:.0f} s of waiting); {who}"
    )


def _state(rank: int, place: RankPlace | None, now_s: float, silent_s: float) -> str:
    if place is None:
        return f"rank {rank}, which has reported nothing yet"
    silence_s = now_s - place.alive_s
    if silence_s > silent_s:
        return f"rank {rank}, silent for {silence_s:.0f} s, since {place}"
    return f"rank {rank}, alive, for {now_s - place.since_s:.0f} s in {place}"


class HangGuard:
    """Publishes the place of this rank, and watches how long it stays there.

    Args:
        store: the job's; the guard opens another connection, as other threads wait in theirs.
        timeout_s: of collectives.
        say: takes a report; prints to standard error if None.
        end: ends a process whose main thread waits for a store that does not answer.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        *,
        say: Callable[[str], None] | None = None,
        end: Callable[[], None] | None = None,
    ) -> None:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._store = dist.PrefixStore("hydraulis_places", own)
        self._rank, self._num_ranks, self._timeout_s = rank, num_ranks, timeout_s
        self._beat_s = min(MAX_BEAT_S, timeout_s / BEATS_PER_TIMEOUT)
        self._silent_s = (BEATS_UNTIL_SILENT + 1) * self._beat_s
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._end = end or (lambda: end_process(EXIT_STATUS_OF_HANG))
        now_s = time.time()
        self._place = RankPlace(0, "start", "", now_s, now_s)
        self._asked_s: float | None = None
        """Time of day of a request that the store has not answered yet."""
        self._ends = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"hydraulis-hang-guard-{name}", daemon=True)
            for name, target in (("places", self._publish_places), ("store", self._watch_store))
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, phase: str, iteration: int | None = None, plan: str | None = None) -> None:
        """Begin another phase; iteration and plan stay the same if None."""
        before = self._place
        self._place = RankPlace(
            before.iteration if iteration is None else iteration,
            phase,
            before.plan if plan is None else plan,
            time.time(),
            before.alive_s,
        )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run a block as a phase; errors get a note with phase, iteration and plan.

        Before the first iteration ours do not: they name what they are about.
        """
        self.enter(name)
        try:
            yield
        except Exception as error:
            if self._place.iteration or not isinstance(error, HydraulisError):
                self._note(error, replace(self._place, phase=name))
            raise
        if name in _AFTER:
            self.enter(_AFTER[name])

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Errors of torch between the phases of a block get a note with the last phase."""
        try:
            yield
        except RuntimeError as error:
            self._note(error, self._place)
            raise

    def _note(self, error: Exception, place: RankPlace) -> None:
        if not any(note.startswith(_NOTE) for note in getattr(error, "__notes__", ())):
            error.add_note(str(place))

    def around(
        self, phase: Callable[[str], AbstractContextManager[Any]]
    ) -> Callable[[str], AbstractContextManager[Any]]:
        """An engine's `Phase` that the guard watches too."""

        @contextmanager
        def both(name: str) -> Iterator[None]:
            with self.phase(name), phase(name):
                yield

        return both

    def close(self) -> None:
        self.enter("end")
        self._ends.set()
        for thread in self._threads:
            thread.join(self._beat_s)

    def _publish_places(self) -> None:
        reported: RankPlace | None = None
        try:
            while True:
                place = self._place
                self._publish(place)
                if self._is_long(place) and place is not reported:
                    reported = place
                    self._ends.wait(self._beat_s)  # so that all others have written theirs
                    places = self._read_others(place)
                    if places is not None and self._place is place:
                        now_s = time.time()
                        text = report_of(self._rank, places, now_s, self._silent_s, self._timeout_s)
                        if text is not None:
                            self._say(text)
                if self._ends.wait(self._beat_s):
                    return
        except RuntimeError:  # of torch; the store has ended with its process, and so will this
            self._asked_s = None

    def _publish(self, place: RankPlace) -> None:
        self._asked_s = time.time()
        content = [place.iteration, place.phase, place.plan, place.since_s, self._asked_s]
        self._store.set(str(self._rank), json.dumps(content))
        self._store.check([str(self._rank)])  # waits for an answer, which setting does not
        self._asked_s = None

    def _read_others(self, own: RankPlace) -> list[RankPlace | None] | None:
        """The places of all ranks; None if rank 0 waits too, so that the report is not ours.

        All ranks ask at the same time: if each read all places, the store would answer N² requests.
        """
        self._asked_s = time.time()
        first = self._read(0)
        if self._rank and first is not None and first.order >= own.order:
            is_alive = time.time() - first.alive_s <= self._silent_s
            if is_alive:
                self._asked_s = None
                return None
        places = [self._read(rank) for rank in range(self._num_ranks)]
        self._asked_s = None
        return places

    def _read(self, rank: int) -> RankPlace | None:
        key = str(rank)
        return RankPlace(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _watch_store(self) -> None:
        """Watches the store without using it, as it might never answer."""
        reported: RankPlace | None = None
        while not self._ends.wait(self._beat_s):
            place, asked_s, now_s = self._place, self._asked_s, time.time()
            if asked_s is None or not self._is_long(place):
                continue
            owed_s = now_s - asked_s
            if owed_s > self._silent_s and place is not reported:
                reported = place
                # Only some of many ranks, as each of them sees the same.
                if self._rank < MAX_RANKS_NAMED:
                    self._say(
                        f"hang: rank {self._rank} has been in {place} for "
                        f"{now_s - place.since_s:.0f} s (--distributed-timeout-minutes ends the "
                        f"job after {self._timeout_s:.0f} s of waiting); the job's store has not "
                        f"answered for {owed_s:.0f} s: missing: rank 0, in whose process it is, "
                        "is frozen"
                    )
            # By then every collective has ended, but not a wait for the store.
            if min(owed_s, now_s - place.since_s) > self._timeout_s:
                self._say(f"error: rank {self._rank} ends, as rank 0 is frozen: see 'hang:' above")
                self._end()
                return

    def _is_long(self, place: RankPlace) -> bool:
        waited_s = time.time() - place.since_s
        return waited_s > SHARE_OF_TIMEOUT * self._timeout_s and place.phase not in _WITHOUT_WAIT
