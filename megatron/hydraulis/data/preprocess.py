"""Text to a Megatron dataset: one stored sequence a document."""

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.documents import RawDocument, read_documents
from megatron.hydraulis.data.index import bin_path, idx_path
from megatron.hydraulis.data.tokenizer import DocumentEncoder
from megatron.hydraulis.errors import DataError

__all__ = ["DatasetWriter", "OrderedWorkers", "PreprocessReport", "preprocess"]

_CHUNK_BYTES = 1 << 18
"""Text sent to a worker at a time: about 0.1 s of work, far above the cost of sending it."""
_CHUNK_DOCUMENTS = 512
_CHUNKS_PER_WORKER = 2
"""Inputs sent to a worker ahead: one that it works on and one that waits."""
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True, eq=False)
class PreprocessReport:
    """What was written."""

    num_files: int
    num_empty: int
    """Number of documents without text, which are skipped."""
    document_lengths: npt.NDArray[np.int64]
    """(num_documents,) number of tokens of each document, end-of-document token included."""

    @property
    def num_documents(self) -> int:
        return len(self.document_lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.document_lengths.sum())


@dataclass(frozen=True, eq=False)
class _EncodedChunk:
    tokens: npt.NDArray[np.integer]
    lengths: list[int]
    num_empty: int
    read_bytes: int


def preprocess(
    files: Sequence[Path],
    output_prefix: str | Path,
    encoder: DocumentEncoder,
    *,
    json_key: str = "text",
    num_workers: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> PreprocessReport:
    """Tokenize every document of ``files`` into the dataset ``output_prefix``.

    The result depends on the files and their order, not on the number of workers.

    Args:
        files: text, JSON lines and Parquet files.
        output_prefix: where ``.bin`` and ``.idx`` go; replaced if they exist.
        encoder: the tokenizer.
        json_key: key, or column, that holds the text.
        num_workers: processes that tokenize.
        on_progress: called with the number of bytes read since the last call.

    Raises:
        DataError: input that cannot be read, input without text, output that cannot be written.
            Nothing is left under the output's names then, except what was there before.
    """

    def encode(chunk: list[RawDocument]) -> _EncodedChunk:
        return _encode_chunk(encoder, chunk)

    num_empty = 0
    # Workers are forked before the caller's progress display starts its thread, which it does at
    # the first call of on_progress.
    with (
        OrderedWorkers(encode, num_workers) as workers,
        DatasetWriter(output_prefix, encoder.token_type) as writer,
    ):
        num_documents = 0
        for encoded in workers.map(_chunks(files, json_key)):
            writer.add_documents(encoded.tokens, encoded.lengths)
            num_documents += len(encoded.lengths)
            num_empty += encoded.num_empty
            if on_progress is not None:
                on_progress(encoded.read_bytes)
        if num_documents == 0:
            raise DataError(
                f"a corpus needs at least one document with text but the {num_empty} documents in "
                f"{len(files)} files have none; check --input and --json-key"
            )
        lengths = writer.commit()
    return PreprocessReport(len(files), num_empty, lengths)


def _chunks(files: Sequence[Path], json_key: str) -> Iterator[list[RawDocument]]:
    chunk: list[RawDocument] = []
    num_bytes = 0
    for file in files:
        for document in read_documents(file, json_key=json_key):
            chunk.append(document)
            num_bytes += len(document.content)
            if num_bytes >= _CHUNK_BYTES or len(chunk) >= _CHUNK_DOCUMENTS:
                yield chunk
                chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _encode_chunk(encoder: DocumentEncoder, chunk: list[RawDocument]) -> _EncodedChunk:
    encoded = [ids for document in chunk if (ids := encoder.encode(document)) is not None]
    return _EncodedChunk(
        tokens=np.concatenate([np.empty(0, dtype=encoder.token_type), *encoded]),
        lengths=[len(ids) for ids in encoded],
        num_empty=len(chunk) - len(encoded),
        read_bytes=sum(document.read_bytes for document in chunk),
    )


class DatasetWriter:
    """Writes ``prefix.bin`` and ``prefix.idx``, which get these names when they are complete.

    Use as a context: leaving it before ``commit`` removes what was written.

    Args:
        prefix: path of the dataset without suffix; folders are made.
        token_type: type the ids are stored in.

    Raises:
        DataError: the files cannot be written.
    """

    def __init__(self, prefix: str | Path, token_type: type[np.integer]) -> None:
        self._prefix = str(prefix)
        # In the target's folder, because a rename does not cross file systems.
        partial = f"{self._prefix}.{os.getpid()}.partial"
        self._partial_bin, self._partial_idx = bin_path(partial), idx_path(partial)
        self._token_type = token_type
        self._builder: Any = None

    def __enter__(self) -> Self:
        # Imported here: asking for help or naming a missing file takes no torch.
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        if os.path.basename(self._prefix) == "" or os.path.isdir(self._prefix):
            raise DataError(
                f"--output-prefix is the path of a dataset without .bin but '{self._prefix}' is a "
                f"folder; add a name, e.g. {os.path.join(self._prefix, 'corpus')}"
            )
        with self._reporting_failure():
            Path(self._prefix).parent.mkdir(parents=True, exist_ok=True)
            self._builder = IndexedDatasetBuilder(self._partial_bin, dtype=self._token_type)
        return self

    def add_documents(self, tokens: npt.NDArray[np.integer], lengths: Iterable[int]) -> None:
        """Append documents that lie one behind the other in ``tokens``."""
        with self._reporting_failure():
            start = 0
            for length in lengths:
                self._builder.add_document(tokens[start : start + length], [length])
                start += length

    def commit(self) -> npt.NDArray[np.int64]:
        """Put both files in place.

        Returns:
            (num_documents,) tokens of each document.
        """
        lengths = np.array(self._builder.sequence_lengths, dtype=np.int64)
        with self._reporting_failure():
            self._builder.finalize(self._partial_idx)
            for path in (self._partial_bin, self._partial_idx):
                _flush_to_disk(path)
            # Without an index there is no dataset, so a crash in between cannot pair a new .bin
            # with an old .idx.
            Path(idx_path(self._prefix)).unlink(missing_ok=True)
            os.replace(self._partial_bin, bin_path(self._prefix))
            os.replace(self._partial_idx, idx_path(self._prefix))
        return lengths

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Closing flushes, which fails again on a full disk; the first failure is the one to report.
        with contextlib.suppress(OSError):
            self._builder.data_file.close()
        for path in (self._partial_bin, self._partial_idx):
            Path(path).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DataError(
                f"cannot write {bin_path(self._prefix)} and .idx: {error.strerror or error}; free "
                f"space, or choose an --output-prefix in a folder you can write to"
            ) from error


def _flush_to_disk(path: str) -> None:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())


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
                    # Python warns about forking a process with threads. Those here are idle threads
                    # of numeric libraries, which a child neither needs nor waits for.
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
    """In a worker: apply ``function`` to what arrives until the other end is closed."""
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
    """Pass on what arrives; None at the end."""
    try:
        while True:
            inbox.put(connection.recv())
    except (EOFError, OSError):
        inbox.put(None)
