"""A function applied by several processes, with results in the order of the inputs."""

import multiprocessing
import queue
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from megatron.hydraulis.errors import DataError

__all__ = ["OrderedWorkers"]

_CHUNKS_PER_WORKER = 2
"""Inputs handed to a worker ahead: one it works on, one that waits, so that it never idles."""
_JOIN_TIMEOUT_S = 5.0


class OrderedWorkers[Input, Output]:
    """Forked processes that apply one function; input i goes to worker i modulo their number.

    Forked, because the function may hold what takes seconds to build (a tokenizer). Enter the
    context before starting threads. One worker means this process itself.

    Args:
        function: applied to every input; its result must pickle.
        num_workers: number of processes, at least 1.
    """

    def __init__(self, function: Callable[[Input], Output], num_workers: int) -> None:
        self._function = function
        self._num_workers = num_workers
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection[Any, Any]] = []

    def __enter__(self) -> Self:
        if self._num_workers > 1:
            context = multiprocessing.get_context("fork")
            for _ in range(self._num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_work, args=(self._function, theirs, [*self._connections, ours])
                )
                with warnings.catch_warnings():
                    # Python warns of forking beside threads. Those here are idle ones of numeric
                    # libraries, which a child neither needs nor waits for.
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if error is not None:
                process.terminate()
            process.join(_JOIN_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()

    def map(self, inputs: Iterable[Input]) -> Iterator[Output]:
        """Results in the order of ``inputs``, which are taken a few at a time.

        Raises:
            DataError: a worker died. Whatever ``function`` raises is raised here.
        """
        if not self._connections:
            yield from map(self._function, inputs)
            return
        in_flight: deque[int] = deque()
        for number, item in enumerate(inputs):
            worker = number % self._num_workers
            if len(in_flight) == _CHUNKS_PER_WORKER * self._num_workers:
                yield self._receive(in_flight.popleft())
            try:
                self._connections[worker].send(item)
            except OSError:
                self._raise_dead(worker)
            in_flight.append(worker)
        while in_flight:
            yield self._receive(in_flight.popleft())

    def _receive(self, worker: int) -> Output:
        try:
            succeeded, result = self._connections[worker].recv()
        except (EOFError, OSError):
            self._raise_dead(worker)
        if not succeeded:
            raise result
        output: Output = result
        return output

    def _raise_dead(self, worker: int) -> None:
        self._processes[worker].join(_JOIN_TIMEOUT_S)
        raise DataError(
            f"worker {worker} of {self._num_workers} ended with exit code "
            f"{self._processes[worker].exitcode} before its work was done (a negative code is the "
            f"signal that killed it; 9 is often the lack of memory); use fewer --workers"
        ) from None


def _work(
    function: Callable[[Any], Any],
    connection: "Connection[Any, Any]",
    inherited: Sequence["Connection[Any, Any]"],
) -> None:
    """A worker's life: apply ``function`` to what arrives until the other end is closed."""
    # The parent ends us by closing its end, also when it is interrupted from the keyboard.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for other in inherited:
        # A copy of the parent's end, ours or a sibling's, would keep that pipe open for ever.
        other.close()
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Inputs are received while a result is being sent: else both ends could wait to send.
    threading.Thread(target=_fill, args=(connection, inbox), daemon=True).start()
    while (item := inbox.get()) is not None:
        try:
            reply = (True, function(item))
        except Exception as error:
            reply = (False, error)
        try:
            connection.send(reply)
        except OSError:
            return


def _fill(connection: "Connection[Any, Any]", inbox: "queue.SimpleQueue[Any]") -> None:
    """Hand on what arrives; None at the end."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(None)
