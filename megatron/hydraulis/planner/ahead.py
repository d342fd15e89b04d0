"""Plans made ahead of training in a separate process, and what happens when that process is lost.

The process is a fresh interpreter that imports neither torch nor Megatron. It communicates by
length-prefixed pickles over its standard input and output. The answer to a request is a `PlanText`
or a `PlanError`. Another planner replaces the current one for the requests after it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import IO, Any

from megatron.hydraulis.errors import HydraulisError, PlanError
from megatron.hydraulis.planner.plan import Planner, PlanText

logger = logging.getLogger(__name__)

MAX_RESTARTS = 1
"""Number of times that a planner process that dies or hangs is restarted."""
GRACE_S = 60.0
"""Time beyond its own time limit after which a plan's process counts as hung.

A plan takes seconds at most. The rest allows for reading interpreter and solver from a slow disk,
and for a machine under load.
"""
_MOST_OF_TIMEOUT = 3 / 8
"""Share of the job's timeout for which a process may be silent: the one that replaces it is lost,
too, before other ranks stop waiting for the plan."""
NICENESS = 10
"""Priority of the process: plans are made ahead, so a rank that needs the core gets it."""
SECONDS_TO_STOP = 5.0
"""Time that a planner process may take to end after its input is closed."""
_SIZE_BYTES = 8


class LookAheadPlanner:
    """Passes requests to a planner process and takes its plans in order.

    A process that dies or hangs is restarted once, with the requests that are still open. If that
    one is lost too, each plan is made inline, when it is taken. Training continues in any case.

    Args:
        planner: the planner, in the process and inline.
        in_process: False for planning inline from the start.
        stand_in: plans inline after the process was lost, as what killed or hung the planner there
            would do the same to training here. None for the planner itself, which is right for
            one without a native solver.
        time_limit_s: the planner's own limit for a plan, ``--plan-time-limit``; None for no limit.
        timeout_s: how long other ranks wait for a plan, ``--distributed-timeout-minutes``.
        grace_s: how much longer to wait for a plan than its limit, as far as ``timeout_s`` allows.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        in_process: bool = True,
        stand_in: Planner | None = None,
        time_limit_s: float | None = None,
        timeout_s: float = math.inf,
        grace_s: float = GRACE_S,
    ) -> None:
        self._planner = planner
        self._stand_in = planner if stand_in is None else stand_in
        self._answer_limit_s = min((time_limit_s or 0.0) + grace_s, _MOST_OF_TIMEOUT * timeout_s)
        self._open: dict[int, tuple[int, ...]] = {}
        self.num_restarts = 0
        """Number of times that the process was restarted."""
        self.is_lost = False
        """Whether the process died or hung too often, so that the stand-in plans inline."""
        self._process = self._started() if in_process else None

    def submit(self, iteration: int, lengths: Sequence[int]) -> None:
        """Request a plan to `take` later; never waits for the process."""
        self._open[iteration] = tuple(lengths)
        if self._process is not None:
            try:
                self._process.request(iteration, lengths)
            except PlannerProcessDied as error:
                self._recover(error)

    def replace(self, planner: Planner, *, stand_in: Planner | None = None) -> None:
        """Use another planner for requests from now on; never waits for the process.

        After a restart it also plans the requests that were still open.
        """
        self._planner = planner
        self._stand_in = planner if stand_in is None else stand_in
        if self._process is not None:
            self._process.replace(planner)

    def is_ready(self, iteration: int) -> bool:
        """True if `take` would return or raise what the process answered, without waiting."""
        return self._process is not None and self._process.has_result(iteration)

    def take(self, iteration: int) -> tuple[PlanText, float]:
        """The plan of a submitted iteration, and the seconds waited; raises the planner's error."""
        start_s = time.perf_counter()
        while self._process is not None:
            try:
                plan = self._process.result(iteration)
            except (PlannerProcessDied, PlannerProcessHung) as error:
                self._recover(error)
            except PlanError:
                del self._open[iteration]
                raise
            else:
                del self._open[iteration]
                return plan, time.perf_counter() - start_s
        planner = self._stand_in if self.is_lost else self._planner
        plan = PlanText.of(planner.plan(self._open.pop(iteration), iteration=iteration))
        return plan, time.perf_counter() - start_s

    def close(self) -> None:
        """End the process; `take` plans inline from then on."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _started(self) -> PlannerProcess:
        return PlannerProcess(self._planner, answer_limit_s=self._answer_limit_s)

    def _recover(self, error: PlannerProcessDied | PlannerProcessHung) -> None:
        """Restart the process with all open requests, or continue inline."""
        assert self._process is not None  # the one that was lost
        self._process.kill()
        self._process = None
        if self.num_restarts >= MAX_RESTARTS:
            self.is_lost = True
            logger.warning(
                "%s, again: planning continues in the training process with %s",
                error,
                type(self._stand_in).__name__,
            )
            return
        self.num_restarts += 1
        logger.warning("%s: it is restarted", error)
        self._process = self._started()
        for iteration, lengths in self._open.items():
            try:
                self._process.request(iteration, lengths)
            except PlannerProcessDied as second:
                self._recover(second)
                return


class PlannerProcessDied(HydraulisError):
    """The process ended without an answer."""


class PlannerProcessHung(HydraulisError):
    """The process is alive but has not answered for longer than planning can take."""


class PlannerProcess:
    """Runs ``planner`` in a process; requests are answered in their order.

    Requests are written by a thread, so no call blocks if the process has stopped reading.

    Args:
        planner: any planner that can be pickled; pools and cost models can.
        answer_limit_s: how long `result` waits without any answer before the process counts as
            hung; the first answer includes the start of the interpreter. None for no limit.

    Raises:
        PlannerProcessDied: from `request` or `result`, once the process has ended.
    """

    def __init__(self, planner: Planner, *, answer_limit_s: float | None = None) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron.hydraulis.planner.ahead"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            # Launchers and terminals signal the rank's group; only the rank ends this process.
            start_new_session=True,
        )
        self._answer_limit_s = answer_limit_s
        # Pickled; None is the last one.
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: dict[int, PlanText | PlanError] = {}
        self._num_answers = 0
        self._changed = threading.Condition()
        self._has_ended = False
        self._messages.put(pickle.dumps(planner))
        threading.Thread(target=self._send, name="planner-requests", daemon=True).start()
        threading.Thread(target=self._collect, name="planner-answers", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def request(self, iteration: int, lengths: Sequence[int]) -> None:
        """Ask for a plan; returns at once."""
        if self._has_ended:
            raise PlannerProcessDied(f"the planner process ended with status {self._status()}")
        self._messages.put(pickle.dumps((iteration, tuple(lengths))))

    def replace(self, planner: Planner) -> None:
        """Use another planner for requests from now on; returns at once."""
        self._messages.put(pickle.dumps(planner))

    def has_result(self, iteration: int) -> bool:
        """True if `result` would return or raise without waiting."""
        with self._changed:
            return iteration in self._answers

    def result(self, iteration: int) -> PlanText:
        """Wait for the plan of a request.

        Raises:
            PlanError: what the planner raised.
            PlannerProcessDied: there will be no answer.
            PlannerProcessHung: there was no answer to any request for answer_limit_s.
        """
        with self._changed:
            while iteration not in self._answers and not self._has_ended:
                num_answers = self._num_answers
                is_changed = self._changed.wait(self._answer_limit_s)
                if not is_changed and self._num_answers == num_answers:
                    raise PlannerProcessHung(
                        f"the planner process has not answered for {self._answer_limit_s:g} s and "
                        f"iteration {iteration + 1} waits for its plan"
                    )
            if iteration not in self._answers:
                raise PlannerProcessDied(
                    f"the planner process ended with status {self._status()} before it "
                    f"planned iteration {iteration + 1}"
                )
            answer = self._answers.pop(iteration)
        if isinstance(answer, PlanError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process."""
        self._messages.put(None)
        try:
            self._process.wait(timeout=SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once, even if it is stopped or hangs in native code."""
        self._process.kill()
        self._process.wait()
        self._messages.put(None)

    def _status(self) -> int | None:
        """Exit status; its output may end a moment before the process does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=SECONDS_TO_STOP)
        return None

    def _send(self) -> None:
        """Write messages until the last one, or until nobody reads them: `_collect` notices."""
        assert self._process.stdin is not None
        # Closing writes what is still buffered.
        with contextlib.suppress(BrokenPipeError), self._process.stdin as requests:
            while (message := self._messages.get()) is not None:
                _write(requests, message)

    def _collect(self) -> None:
        assert self._process.stdout is not None
        try:
            with self._process.stdout as answers:
                while (message := _read(answers)) is not None:
                    iteration, answer = message
                    with self._changed:
                        self._answers[iteration] = answer
                        self._num_answers += 1
                        self._changed.notify_all()
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()


def _write(stream: IO[bytes], data: bytes) -> None:
    stream.write(len(data).to_bytes(_SIZE_BYTES, "big") + data)
    stream.flush()


def _read(stream: IO[bytes]) -> Any:
    """The next message; None at the end of the stream, even inside a message."""
    head = stream.read(_SIZE_BYTES)
    if len(head) < _SIZE_BYTES:
        return None
    size = int.from_bytes(head, "big")
    data = stream.read(size)
    return pickle.loads(data) if len(data) == size else None


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, received), daemon=True).start()
    planner: Planner = received.get()
    while True:
        message = received.get()
        if not isinstance(message, tuple):
            planner = message
            continue
        iteration, lengths = message
        answer: PlanText | PlanError
        try:
            answer = PlanText.of(planner.plan(lengths, iteration=iteration))
        except PlanError as error:
            answer = PlanError(str(error))
        _write(answers, pickle.dumps((iteration, answer)))


def _receive(requests: IO[bytes], received: queue.SimpleQueue[Any]) -> None:
    """Pass messages on; when the parent is gone, end the process whatever its planner does."""
    status = 1
    try:
        while (message := _read(requests)) is not None:
            received.put(message)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def main() -> None:
    """Serve the parent until it closes our input or dies."""
    os.nice(NICENESS)
    # Output of the solver must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Not sys.stdin, which cannot be closed at exit while a thread reads it.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    # The parent is gone, so nobody waits for an answer.
    with contextlib.suppress(BrokenPipeError):
        _serve(requests, answers)
    os._exit(0)


if __name__ == "__main__":
    main()
