"""A planner in a process of its own, so that planning runs while the ranks train.

The process is a fresh interpreter that imports neither torch nor Megatron; it is talked to by
length-prefixed pickles over its standard input and output. A request is answered by a plan as JSON,
or by the text of a `PlanError`. Another planner takes the place of the one before for the requests
that follow it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import IO, Any

from megatron.hydraulis.errors import HydraulisError, PlanError
from megatron.hydraulis.planner.interface import Planner
from megatron.hydraulis.planner.plan import IterationPlan

__all__ = ["PlannerProcess", "PlannerProcessDied", "PlannerProcessHung"]

_SIZE_BYTES = 8
NICENESS = 10
"""How far the process steps back: plans are made ahead, so a rank that wants the core has it."""
SECONDS_TO_STOP = 5.0
"""How long a planner process may take to end once its input is closed."""


class PlannerProcessDied(HydraulisError):
    """The process ended without an answer."""


class PlannerProcessHung(HydraulisError):
    """The process lives but has not answered for longer than planning can take."""


class PlannerProcess:
    """Runs ``planner`` in a process; requests are answered in their order.

    No call waits for a process that has stopped reading: requests are written by a thread.

    Args:
        planner: any planner that can be pickled; pools and cost models can.
        answer_limit_s: how long `result` waits without any answer before the process counts as
            hung; the first answer includes the start of the interpreter. None waits for ever.

    Raises:
        PlannerProcessDied: from `request` or `result`, once the process has ended.
    """

    def __init__(self, planner: Planner, *, answer_limit_s: float | None = None) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron.hydraulis.planner.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._answer_limit_s = answer_limit_s
        # Pickled; None when no more will come.
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._num_answers = 0
        self._changed = threading.Condition()
        self._has_ended = False
        self._messages.put(pickle.dumps(planner))
        threading.Thread(target=self._send, name="planner-requests", daemon=True).start()
        threading.Thread(target=self._collect, name="planner-answers", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def request(self, iteration: int, lengths: Sequence[int]) -> None:
        """Ask for a plan; returns at once."""
        if self._has_ended:
            raise PlannerProcessDied(f"the planner process ended with status {self._status()}")
        self._messages.put(pickle.dumps((iteration, tuple(lengths))))

    def replace(self, planner: Planner) -> None:
        """Plan requests from now on with another planner; returns at once."""
        self._messages.put(pickle.dumps(planner))

    def has_result(self, iteration: int) -> bool:
        """Whether `result` would return or raise PlanError at once."""
        with self._changed:
            return iteration in self._answers

    def result(self, iteration: int) -> IterationPlan:
        """Wait for the plan of a request.

        Raises:
            PlanError: what the planner raised.
            PlannerProcessDied: there will be no answer.
            PlannerProcessHung: there has been no answer, to this request or an earlier one, for
                answer_limit_s of waiting.
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
            is_plan, content = self._answers.pop(iteration)
        if not is_plan:
            raise PlanError(content)
        return IterationPlan.from_json(content)

    def close(self) -> None:
        """End the process."""
        self._messages.put(None)
        try:
            self._process.wait(timeout=SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the process at once, also one that is stopped or hangs in native code."""
        self._process.kill()
        self._process.wait()
        self._messages.put(None)

    def _status(self) -> int | None:
        """Exit status; its output may end a moment before the process does."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout=SECONDS_TO_STOP)
        return None

    def _send(self) -> None:
        """Write messages until there are no more, or nobody reads them: `_collect` notices."""
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
                    iteration, is_plan, content = message
                    with self._changed:
                        self._answers[iteration] = (is_plan, content)
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
    """The next message; None at the end of the stream, also in the middle of a message."""
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
        content: dict[str, Any] | str
        try:
            content = planner.plan(lengths, iteration=iteration).to_json()
        except PlanError as error:
            content = str(error)
        _write(answers, pickle.dumps((iteration, not isinstance(content, str), content)))


def _receive(requests: IO[bytes], received: queue.SimpleQueue[Any]) -> None:
    """Pass messages on; without a parent end the process, whatever its planner is lost in."""
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
    # Whatever a solver prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Not sys.stdin, which a thread that reads it keeps from being closed at exit.
    requests = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    # The parent is gone, or everything is being stopped: nobody waits for an answer.
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _serve(requests, answers)
    os._exit(0)


if __name__ == "__main__":
    main()
