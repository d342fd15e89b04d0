"""``hydraulis preprocess``: text to a Megatron dataset, one stored sequence per document."""

import argparse
import multiprocessing
import os
import random
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from rich.console import Console

from megatron.hydraulis.data import chat
from megatron.hydraulis.data.chat import ChatCounts, ConversationEncoder, WeightedTokens
from megatron.hydraulis.data.dataset import (
    Weights,
    WeightsWriter,
    bin_path,
    checked_weights,
    idx_path,
    weights_path,
)
from megatron.hydraulis.data.documents import RawDocument, find_files, read_documents
from megatron.hydraulis.data.tokenizer import (
    TEXT_TOKENIZER_TYPES,
    DocumentEncoder,
    TokenizerFingerprint,
    TokenizerSettings,
    build_tokenizer,
    tokenizer_path,
)
from megatron.hydraulis.errors import ConfigurationError, DataError, counted
from megatron.hydraulis.json_object import write_json
from megatron.hydraulis.terminal import ByteProgress, print_next

_CHUNK_BYTES = 1 << 18
"""Text sent to a worker at a time: about 0.1 s of work, far above the cost of sending it."""
_CHUNK_DOCUMENTS = 512
_CHUNKS_PER_WORKER = 2
"""Inputs sent to a worker ahead: one that it works on and one that waits."""
_MODEL_SUFFIXES = (".bin", ".idx")
_SHOWN_TOKENS = 1000
"""Tokens shown of each conversation, half of them from its end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("input and output")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files and folders (recursively, by name): text files, one document each; .jsonl, "
        ".json and .jsonl.gz with one JSON object a line; .parquet",
    )
    group.add_argument("--output-prefix", required=True, metavar="P", help="write P.bin and P.idx")
    group.add_argument(
        "--json-key",
        metavar="KEY",
        help="key of JSON lines, or column of Parquet files, that holds the text (default: text), "
        "or the turns of a conversation (default: messages or conversations)",
    )
    group.add_argument(
        "--pattern",
        default="*",
        metavar="GLOB",
        help="files of folders to use, by name, e.g. '*.py' (default: all that are not hidden)",
    )
    group.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="processes that tokenize, at most one a core and one for "
        f"{_CHUNK_DOCUMENTS} documents or {_CHUNK_BYTES // 1024} KiB of input; the output does not "
        "depend on it (default: the %(default)s cores of this machine)",
    )
    group.add_argument(
        "--no-append-eod",
        dest="append_eod",
        action="store_false",
        help="do not end documents with the end-of-document token",
    )
    chat.add_arguments(parser)
    group = parser.add_argument_group("tokenizer", "as in Megatron")
    group.add_argument(
        "--tokenizer-type",
        required=True,
        metavar="TYPE",
        choices=TEXT_TOKENIZER_TYPES,
        help=", ".join(TEXT_TOKENIZER_TYPES),
    )
    group.add_argument(
        "--tokenizer-model", metavar="PATH", help="tokenizer file, or Hugging Face folder"
    )
    group.add_argument(
        "--tokenizer-metadata",
        dest="metadata_path",
        metavar="FILE",
        help="metadata of the tokenizer, JSON",
    )
    group.add_argument("--vocab-file", metavar="FILE", help="vocabulary of GPT2BPETokenizer")
    group.add_argument("--merge-file", metavar="FILE", help="merges of GPT2BPETokenizer")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of tokens, for NullTokenizer and TikTokenizer",
    )
    group.add_argument(
        "--tokenizer-special-tokens",
        dest="special_tokens",
        nargs="+",
        metavar="TOKEN",
        help="special tokens to add",
    )
    group.add_argument(
        "--tiktoken-pattern", choices=("v1", "v2"), help="how TikTokenizer splits text"
    )
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        default=1000,
        metavar="N",
        help="special tokens of TikTokenizer (default: %(default)s)",
    )
    group.add_argument(
        "--tokenizer-sentencepiece-legacy",
        action="store_true",
        help="treat special tokens of SentencePiece as its legacy version does",
    )
    group.add_argument(
        "--tokenizer-hf-no-use-fast",
        action="store_true",
        help="use the Python tokenizer of Hugging Face, not the fast one",
    )
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="let the Hugging Face tokenizer add no special tokens to a text",
    )
    group.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run code that a Hugging Face tokenizer brings along",
    )
    group.add_argument(
        "--null-tokenizer-eod-id",
        type=int,
        metavar="ID",
        help="end-of-document token of NullTokenizer",
    )


def run(namespace: argparse.Namespace) -> int:
    """Preprocess as the flags say and print the counts.

    Raises:
        ConfigurationError: invalid flags.
        DataError: as ``preprocess``.
    """
    if namespace.output_prefix.endswith(_MODEL_SUFFIXES):
        raise ConfigurationError(
            f"--output-prefix is a path without .bin or .idx but is '{namespace.output_prefix}'; "
            f"remove the suffix"
        )
    chat.check_arguments(namespace)
    # Importing Megatron takes seconds: quick checks come first.
    given = vars(namespace)
    names = TokenizerSettings.__dataclass_fields__.keys() & given.keys() - {"chat_template"}
    settings = TokenizerSettings(**{name: given[name] for name in names})
    files = find_files(namespace.input, pattern=namespace.pattern)
    encoder: DocumentEncoder | ConversationEncoder
    if namespace.chat:
        # The template decides how a conversation ends.
        documents = DocumentEncoder(build_tokenizer(settings), append_eod=False)
        encoder = chat.encoder_from_arguments(namespace, documents)
        if namespace.show is not None:
            seed = chat.DEFAULT_SEED if namespace.seed is None else namespace.seed
            show_conversations(files, encoder, num_shown=namespace.show, seed=seed)
    else:
        encoder = DocumentEncoder(build_tokenizer(settings), append_eod=namespace.append_eod)
    report_run(
        files,
        namespace.output_prefix,
        encoder,
        json_key=namespace.json_key,
        num_workers=min(namespace.workers, len(os.sched_getaffinity(0))),
    )
    print_next("hydraulis lengths --lengths", idx_path(namespace.output_prefix))
    return 0


def show_conversations(
    files: Sequence[Path], encoder: ConversationEncoder, *, num_shown: int, seed: int
) -> None:
    """Print conversations that are chosen at random, their trained spans in ⟦brackets⟧.

    Reads all files for it, but tokenizes only what it prints.
    """
    console, draw = Console(), random.Random(seed)
    chosen: list[tuple[int, RawDocument]] = []
    number = 0
    for number, document in enumerate(chain.from_iterable(_chunks(files, None)), start=1):
        # Algorithm R (Vitter, 1985): each of the documents so far is chosen equally likely.
        if number <= num_shown:
            chosen.append((number, document))
        elif (place := draw.randrange(number)) < num_shown:
            chosen[place] = number, document
    console.print(
        f"{len(chosen):,} of {number:,} conversations, chosen at random (--seed {seed}):",
        highlight=False,
    )
    for _, document in sorted(chosen, key=lambda pair: pair[0]):
        example, counts = encoder.encode(document)
        if example is None:
            console.rule(f"{document.origin}: {counts}", align="left")
            continue
        console.rule(f"{document.origin}: {len(example.tokens):,} tokens", align="left")
        num_left_out = len(example.tokens) - _SHOWN_TOKENS
        if num_left_out <= 0:
            console.print(encoder.marked(example))
            continue
        for part in (slice(_SHOWN_TOKENS // 2), slice(-_SHOWN_TOKENS // 2, None)):
            if part.start:
                console.print(f"[… {num_left_out:,} tokens are left out …]", markup=False)
            cut = WeightedTokens(example.tokens[part], example.weights[part])
            console.print(encoder.marked(cut))
    console.rule()


def report_run(
    files: list[Path],
    output_prefix: str | Path,
    encoder: DocumentEncoder | ConversationEncoder,
    *,
    json_key: str | None = None,
    num_workers: int = 1,
) -> None:
    """Preprocess with a report of progress, then print counts.

    Arguments and errors as ``preprocess``.
    """
    num_bytes = sum(file.stat().st_size for file in files)
    with ByteProgress("tokenizing", num_bytes) as progress:
        report = preprocess(
            files,
            output_prefix,
            encoder,
            json_key=json_key,
            num_workers=num_workers,
            on_progress=progress.advance,
        )
    console, lengths = Console(), report.document_lengths
    console.print(
        f"{counted(report.num_files, 'file')}, {counted(len(lengths), 'document')} "
        f"({report.num_empty:,} empty skipped), {lengths.sum():,} tokens; "
        f"length min {lengths.min():,}, median "
        f"{np.median(lengths):,.0f}, mean {lengths.mean():,.0f}, max {lengths.max():,}"
        + (f"\n{report.chat}" if report.chat else ""),
        highlight=False,
        soft_wrap=True,
    )
    record = tokenizer_path(os.fspath(output_prefix))
    console.print(
        f"wrote {output_prefix}.bin{', .weights' if report.chat else ''} and .idx"
        + (
            f", and {os.path.basename(record)}, with which training compares its tokenizer"
            if os.path.exists(record)
            else "; the tokenizer lists no tokens, so training cannot compare its own with it"
        ),
        highlight=False,
        soft_wrap=True,
    )


@dataclass(frozen=True, eq=False)
class PreprocessReport:
    """Summary of what was written."""

    num_files: int
    num_empty: int
    """Number of documents without text, which are skipped."""
    document_lengths: npt.NDArray[np.int64]
    """(num_documents,) number of tokens of each document, end-of-document token included."""
    chat: ChatCounts | None = None
    """Counts of what became of conversations; None for other documents."""


class _EncodedChunk(NamedTuple):
    tokens: npt.NDArray[np.integer]
    lengths: list[int]
    num_empty: int
    read_bytes: int
    weights: Weights | None = None
    chat: ChatCounts | None = None


def preprocess(
    files: Sequence[Path],
    output_prefix: str | Path,
    encoder: DocumentEncoder | ConversationEncoder,
    *,
    json_key: str | None = None,
    num_workers: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> PreprocessReport:
    """Tokenize every document of ``files`` into the dataset ``output_prefix``.

    The result depends on the files and their order, not on the number of workers.

    Args:
        files: text, JSON lines and Parquet files.
        output_prefix: where ``.bin`` and ``.idx`` go, and ``.weights`` of conversations; replaced
            if they exist.
        encoder: the tokenizer; what it encodes are whole documents or conversations.
        json_key: key, or column, that holds the text of documents, by default ``text``.
        num_workers: processes that tokenize.
        on_progress: called with the number of bytes read since the last call.

    Raises:
        DataError: input that cannot be read, input without text, output that cannot be written.
            Nothing is left under the output's names then, except what was there before.
    """
    num_documents = num_empty = 0
    if isinstance(encoder, ConversationEncoder):
        documents, encode = encoder.documents, partial(_encode_conversations, encoder)
        counts, json_key = ChatCounts(), None
    else:
        documents, encode = encoder, partial(_encode_chunk, encoder)
        counts, json_key = None, json_key or "text"
    # Workers are forked before the first result, at which the caller's progress display starts its
    # thread.
    with (
        closing(map_in_order(encode, _chunks(files, json_key), num_workers)) as results,
        DatasetWriter(
            output_prefix,
            documents.token_type,
            documents.fingerprint,
            has_weights=counts is not None,
        ) as writer,
    ):
        for encoded in results:
            writer.add_documents(encoded.tokens, encoded.lengths, encoded.weights)
            num_documents += len(encoded.lengths)
            num_empty += encoded.num_empty
            if counts is not None and encoded.chat is not None:
                counts += encoded.chat
            if on_progress is not None:
                on_progress(encoded.read_bytes)
        if num_documents == 0 and counts is not None:
            raise DataError(
                f"a corpus needs at least one conversation with a trained token but {len(files)} "
                f"files have none ({counts}); check --input, --json-key, --train-on, "
                "--seq-length, weight and train of turns, and the marks of the chat template"
            )
        if num_documents == 0:
            raise DataError(
                f"a corpus needs at least one document with text but the {num_empty} documents in "
                f"{len(files)} files have none; check --input and --json-key"
            )
        lengths = writer.commit()
    return PreprocessReport(len(files), num_empty, lengths, counts)


def _chunks(files: Sequence[Path], json_key: str | None) -> Iterator[list[RawDocument]]:
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


def _encode_conversations(encoder: ConversationEncoder, chunk: list[RawDocument]) -> _EncodedChunk:
    encoded = [encoder.encode(document) for document in chunk]
    examples = [example for example, _ in encoded if example is not None]
    token_type = encoder.documents.token_type
    return _EncodedChunk(
        tokens=np.concatenate([np.empty(0, token_type), *(part.tokens for part in examples)]),
        lengths=[len(example.tokens) for example in examples],
        num_empty=0,
        read_bytes=sum(document.read_bytes for document in chunk),
        weights=np.concatenate([np.empty(0, np.float32), *(part.weights for part in examples)]),
        chat=sum((counts for _, counts in encoded), start=ChatCounts()),
    )


class DatasetWriter:
    """Writes ``prefix.bin``, ``prefix.idx`` and, where documents have weights, ``prefix.weights``.

    The files get these names when all are complete; the weights of an earlier dataset are removed.

    A context manager: leaving it before ``commit`` removes what was written.

    Args:
        prefix: path of the dataset without suffix; folders are made.
        token_type: type the ids are stored in.
        tokenizer: what the ids mean, if known.
        has_weights: whether documents come with weights.

    Raises:
        DataError: the files cannot be written.
    """

    def __init__(
        self,
        prefix: str | Path,
        token_type: type[np.integer],
        tokenizer: TokenizerFingerprint | None = None,
        *,
        has_weights: bool = False,
    ) -> None:
        self._prefix = str(prefix)
        # In the target's folder, because a rename does not cross file systems.
        self._partial = f"{self._prefix}.{os.getpid()}.partial"
        self._paths = (bin_path, *((weights_path,) if has_weights else ()), idx_path)
        self._weights: WeightsWriter | None = None
        self._token_type = token_type
        self._tokenizer = tokenizer
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
            self._builder = IndexedDatasetBuilder(bin_path(self._partial), dtype=self._token_type)
            if weights_path in self._paths:
                self._weights = WeightsWriter(weights_path(self._partial))
        return self

    def add_documents(
        self,
        tokens: npt.NDArray[np.integer],
        lengths: Iterable[int],
        weights: npt.NDArray[np.floating] | None = None,
    ) -> None:
        """Append documents, which are concatenated in ``tokens``.

        Args:
            tokens: (sum of lengths,) token ids.
            lengths: tokens of each document.
            weights: (sum of lengths,) weight of predicting each token, if the dataset has weights.

        Raises:
            DataError: weights of another number than the tokens, negative or not finite.
            ValueError: weights for a dataset without.
        """
        if weights is not None and self._weights is None:
            raise ValueError(
                f"dataset '{self._prefix}' has no weights but documents come with {len(weights)}; "
                f"make the writer with has_weights=True"
            )
        if self._weights is not None:
            where = f"dataset '{self._prefix}'"
            checked = checked_weights([] if weights is None else weights, len(tokens), where)
            with self._reporting_failure():
                self._weights.add(checked)
        with self._reporting_failure():
            start = 0
            for length in lengths:
                self._builder.add_document(tokens[start : start + length], [length])
                start += length

    def commit(self) -> npt.NDArray[np.int64]:
        """Put the files in place.

        Returns:
            (num_documents,) tokens of each document.
        """
        lengths = np.array(self._builder.sequence_lengths, dtype=np.int64)
        with self._reporting_failure():
            self._builder.finalize(idx_path(self._partial))
            if self._weights is not None:
                self._weights.finish()
            for path in self._paths:
                _flush_to_disk(path(self._partial))
            # Without an index there is no dataset, so a crash in between cannot pair a new .bin
            # with an old .idx or old weights.
            for path in (idx_path, tokenizer_path, weights_path):
                Path(path(self._prefix)).unlink(missing_ok=True)
            if self._tokenizer is not None:
                write_json(tokenizer_path(self._prefix), asdict(self._tokenizer))
            for path in self._paths:
                os.replace(path(self._partial), path(self._prefix))
        return lengths

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Closing flushes, which fails again on a full disk; the first failure is the one to report.
        with suppress(OSError):
            self._builder.data_file.close()
        with suppress(OSError):
            if self._weights is not None:
                self._weights.file.close()
        for path in self._paths:
            Path(path(self._partial)).unlink(missing_ok=True)

    @contextmanager
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


def map_in_order[Input, Output](
    function: Callable[[Input], Output], inputs: Iterable[Input], num_workers: int
) -> Generator[Output, None, None]:
    """Results of one function in the order of ``inputs``, which are taken a few at a time.

    One worker means this process itself. More are forked with the first input and before the first
    result, because the function may hold an object that takes seconds to build (a tokenizer): start
    no thread before that.

    Args:
        function: applied to every input; its result must pickle.

    Raises:
        DataError: a worker died. Whatever ``function`` raises is raised here.
    """
    inputs = iter(inputs)
    first = list(islice(inputs, num_workers))
    if num_workers == 1 or not first:
        yield from map(function, chain(first, inputs))
        return
    with warnings.catch_warnings():
        # Python warns about forking a process with threads. Those here are idle threads of
        # numeric libraries, which a child neither needs nor waits for.
        warnings.simplefilter("ignore", DeprecationWarning)
        # Forked, not pickled: a fork's initializer gets the function itself.
        fork = multiprocessing.get_context("fork")
        workers = ProcessPoolExecutor(len(first), fork, _begin_work, (function,))
        results = deque(workers.submit(_apply, item) for item in first)
    try:
        for item in inputs:
            if len(results) == _CHUNKS_PER_WORKER * len(first):
                yield results.popleft().result()
            results.append(workers.submit(_apply, item))
        while results:
            yield results.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            f"one of {len(first)} workers ended before its work was done, often for lack of "
            "memory; use fewer --workers"
        ) from error
    finally:
        workers.shutdown(cancel_futures=True)


_FUNCTION: ContextVar[Callable[[Any], Any]] = ContextVar("_FUNCTION")
"""Function that a worker applies; set only in workers."""


def _begin_work(function: Callable[[Any], Any]) -> None:
    _FUNCTION.set(function)
    # The parent ends us, also when it is interrupted from the keyboard, or is killed.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _apply(item: Any) -> Any:
    return _FUNCTION.get()(item)
