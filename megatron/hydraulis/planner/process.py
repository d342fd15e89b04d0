"""A planner in a process of its own, so that planning runs while the ranks train.

The process is a fresh interpreter that imports neither torch nor Megatron; it is talked to by
length-prefixed pickles over its standard input and output. A request is answered by a plan as JSON,
or by the text of a `PlanError`.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from megatron.hydraulis.errors import HydraulisError, PlanError
from megatron.hydraulis.planner.interface import Planner
from megatron.hydraulis.planner.plan import IterationPlan

__all__ = ["PlannerProcess", "PlannerProcessDied"]

_SIZE_BYTES = 8
SECONDS_TO_STOP = 5.0
"""How long a planner process may take to end once its input is closed."""


class PlannerProcessDied(HydraulisError):
    """The process ended without an answer."""


class PlannerProcess:
    """Runs ``planner`` in a process; requests are answered in their order.

    Args:
        planner: any planner that can be pickled; pools and cost models can.

    Raises:
        PlannerProcessDied: from `request` or `result`, once the process has ended.
    """

    def __init__(self, planner: Planner) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "megatron.hydraulis.planner.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._changed = threading.Condition()
        self._has_ended = False
        self._send(planner)
        threading.Thread(target=self._collect, name="planner-answers", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def request(self, iteration: int, lengths: Sequence[int]) -> None:
        """Ask for a plan; returns at once."""
        self._send((iteration, tuple(lengths)))

    def result(self, iteration: int) -> IterationPlan:
        """Wait for the plan of a request.

        Raises:
            PlanError: what the planner raised.
            PlannerProcessDied: there will be no answer.
        """
        with self._changed:
            self._changed.wait_for(lambda: iteration in self._answers or self._has_ended)
            if iteration not in self._answers:
                raise PlannerProcessDied(
                    f"the planner process ended with status {self._process.poll()} before it "
                    f"planned iteration {iteration + 1}"
                )
            is_plan, content = self._answers.pop(iteration)
        if not is_plan:
            raise PlanError(content)
        return IterationPlan.from_json(content)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.close()
        try:
            self._process.wait(timeout=SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            _write(self._process.stdin, message)
        except (BrokenPipeError, ValueError) as error:
            raise PlannerProcessDied(
                f"the planner process ended with status {self._process.poll()}"
            ) from error

    def _collect(self) -> None:
        assert self._process.stdout is not None
        while (message := _read(self._process.stdout)) is not None:
            iteration, is_plan, content = message
            with self._changed:
                self._answers[iteration] = (is_plan, content)
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()


def _write(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message)
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
    planner: Planner | None = _read(requests)
    if planner is None:
        return
    while (request := _read(requests)) is not None:
        iteration, lengths = request
        content: dict[str, Any] | str
        try:
            content = planner.plan(lengths, iteration=iteration).to_json()
        except PlanError as error:
            content = str(error)
        _write(answers, (iteration, not isinstance(content, str), content))


def main() -> None:
    """Serve the parent until it closes our input or dies."""
    # Whatever a solver prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # The parent is gone, or everything is being stopped: nobody waits for an answer.
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        _serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
