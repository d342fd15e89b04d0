"""A corpus: sequences of bounded length cut from the documents of one or several datasets."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.dataset import (
    DatasetIndex,
    LongSequences,
    LossNormalization,
    Weights,
    bin_path,
    checked_weights,
    read_weights,
    weights_path,
)
from megatron.hydraulis.data.sampler import SequenceGroup
from megatron.hydraulis.errors import DataError


@dataclass(frozen=True, kw_only=True)
class DatasetFingerprint:
    """One dataset of a corpus."""

    prefix: str
    """Path at that time; the same data may now lie elsewhere."""
    share: float
    """Share of the draws, at most 1."""
    num_sequences: int
    num_tokens: int
    """The sum of their lengths."""
    lengths: str
    """SHA-256 of the lengths of its sequences, of large datasets of a sample."""
    tokens: str
    """SHA-256 of its tokens, of large datasets of a sample."""
    weights: str | None = None
    """SHA-256 of their weights, of large datasets of a sample; None without weights."""

    def has_share_of(self, other: DatasetFingerprint) -> bool:
        """True if both have the same share: weights 3 and 7 are weights 0.3 and 0.7."""
        return math.isclose(self.share, other.share, rel_tol=1e-9)


def data_differences(
    saved: Sequence[DatasetFingerprint], here: Sequence[DatasetFingerprint]
) -> list[str]:
    """List what differs between the datasets of a checkpoint and of this run."""
    if len(saved) != len(here):
        return [f"{len(saved)} datasets there and {len(here)} here"]
    differences = []
    for there, now in zip(saved, here, strict=True):
        dataset = f"dataset '{now.prefix}'"
        if not there.has_share_of(now):
            differences.append(
                f"{dataset} has a share of {there.share:.6g} there and {now.share:.6g} here"
            )
        if (there.num_sequences, there.num_tokens) != (now.num_sequences, now.num_tokens):
            differences.append(
                f"{dataset} has {there.num_sequences:,} sequences of {there.num_tokens:,} tokens "
                f"there and {now.num_sequences:,} of {now.num_tokens:,} here"
            )
        elif there.lengths != now.lengths:
            differences.append(f"the sequences of {dataset} have other lengths")
        elif there.tokens != now.tokens:
            differences.append(f"{dataset} has other tokens")
        if there.weights != now.weights:
            differences.append(f"{dataset} has other weights of tokens")
    return differences


def keeps_place(saved: Sequence[DatasetFingerprint], here: Sequence[DatasetFingerprint]) -> bool:
    """True if the place in the saved data is one in these: datasets of equal sizes and shares."""
    return len(saved) == len(here) and all(
        there.num_sequences == now.num_sequences and there.has_share_of(now)
        for there, now in zip(saved, here, strict=True)
    )


VOCABULARY_CHECK_TOKENS = 1 << 24
"""Maximum number of tokens of a dataset that ``check_vocabulary`` reads, over all shares.

16 Mi int32 tokens (64 MiB in the page cache) took 25 to 29 ms on one core of a 2-core x86 virtual
machine, 2026-11-21.
"""

VOCABULARY_STRETCH_TOKENS = 1 << 18
"""Tokens read at once: enough for a disk, and few enough for a processor's cache."""

FINGERPRINT_TOKENS = 1 << 18
"""Maximum number of tokens of a dataset, and of its lengths, that a fingerprint is made from."""

FINGERPRINT_STRETCH_TOKENS = 1 << 12
"""Tokens read at once for a fingerprint: 64 reads of a dataset, spread over its file."""


@dataclass(frozen=True, eq=False)
class DocumentRange:
    """The documents ``[first_document, end_document)`` of one dataset."""

    index: DatasetIndex
    first_document: int
    end_document: int

    @classmethod
    def whole(cls, index: DatasetIndex) -> DocumentRange:
        return cls(index, 0, index.num_documents)

    @property
    def token_range(self) -> tuple[int, int]:
        """Positions in the ``.bin``: of the first token, and one after the last."""
        lengths = self.index.document_lengths
        first = int(lengths[: self.first_document].sum(dtype=np.int64))
        return first, first + int(
            lengths[self.first_document : self.end_document].sum(dtype=np.int64)
        )


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """Figures for logs: how documents were cut into sequences."""

    num_documents: int
    num_sequences: int
    num_tokens: int
    """The sum of the sequences' lengths."""
    num_weighted: int = 0
    """Documents of datasets with a weights file."""
    num_dropped_short: int
    """Documents of fewer than two tokens, which hold nothing to predict."""
    num_split: int = 0
    """Documents cut into several sequences."""
    num_truncated: int = 0
    num_truncated_tokens: int = 0
    """Tokens lost by truncation."""
    num_dropped_long: int = 0
    num_dropped_long_tokens: int = 0
    """Tokens lost with them."""

    def __add__(self, other: CorpusReport) -> CorpusReport:
        return CorpusReport(
            **{
                name: getattr(self, name) + getattr(other, name)
                for name in self.__dataclass_fields__
            }
        )

    def __str__(self) -> str:
        cuts = (
            (self.num_weighted, "documents with token weights"),
            (self.num_split, "documents split"),
            (self.num_truncated, f"truncated by {self.num_truncated_tokens:,} tokens"),
            (
                self.num_dropped_long,
                f"too long and dropped with {self.num_dropped_long_tokens:,} tokens",
            ),
            (self.num_dropped_short, "of fewer than 2 tokens dropped"),
        )
        return (
            f"{self.num_documents:,} documents, {self.num_sequences:,} sequences, "
            f"{self.num_tokens:,} tokens"
        ) + "".join(f", {number:,} {what}" for number, what in cuts if number)


class Corpus:
    """Sequences with their lengths, and the tokens and their weights on demand.

    The length of a sequence is the number of tokens it predicts: a document of D tokens predicts
    D − 1 of them. Building a corpus reads the indices and the headers of weights files alone.

    Args:
        ranges: the documents taken of each dataset.
        seq_length: maximum number of tokens that a sequence trains (``--seq-length``).
        long_sequences: what to do with longer documents.
        weights: share of the draws of each dataset; in proportion to its sequences if None.
        loss_normalization: of the weights of tokens.
        name: name in messages, e.g. ``train``.

    Raises:
        DataError: a document is too long and the policy is ``error``, or a damaged weights file.
    """

    def __init__(
        self,
        ranges: Sequence[DocumentRange],
        *,
        seq_length: int,
        long_sequences: LongSequences,
        weights: Sequence[float] | None = None,
        loss_normalization: LossNormalization = "token",
        name: str = "train",
    ) -> None:
        cuts = [_cut(documents, seq_length, long_sequences) for documents in ranges]
        documents, lengths, reports = zip(*cuts, strict=True) if cuts else ((), (), ())
        self._token_weights = [read_weights(part.index) for part in ranges]
        self._loss_normalization = loss_normalization
        self.name = name
        self.prefixes = tuple(part.index.prefix for part in ranges)
        self.lengths = _joined(lengths)
        """(num_sequences,) tokens that each sequence predicts, dataset after dataset; int64 only if
        int32 is too small."""
        self.lengths.setflags(write=False)
        self.reports = tuple(
            report if stored is None else replace(report, num_weighted=report.num_documents)
            for report, stored in zip(reports, self._token_weights, strict=True)
        )
        """One for each dataset."""
        self._documents = _joined(documents)
        self._ends = np.cumsum([report.num_sequences for report in reports], dtype=np.int64)
        self._ranges = tuple(ranges)
        self._seq_length = seq_length
        self._weights = None if weights is None else tuple(weights)
        self._readers: dict[int, Any] = {}
        self._vocab_size: int | None = None

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def report(self) -> CorpusReport:
        return sum(self.reports[1:], start=self.reports[0])

    @property
    def groups(self) -> tuple[SequenceGroup, ...]:
        """The datasets that hold sequences, with their weights, for a sampler."""
        groups = []
        for dataset, end in enumerate(self._ends.tolist()):
            size = self.reports[dataset].num_sequences
            weight = size if self._weights is None else self._weights[dataset]
            if size:
                groups.append(SequenceGroup(end - size, size, weight))
        return tuple(groups)

    @property
    def mean_length(self) -> float:
        """Expected length of a sampled sequence (tokens): datasets count by their weights."""
        groups = self.groups
        total = 0.0
        for group in groups:
            end = group.first_sequence + group.num_sequences
            total += group.weight * float(self.lengths[group.first_sequence : end].mean())
        return total / sum(group.weight for group in groups)

    def dataset_of(self, sequence_id: int) -> int:
        """Position, in ``prefixes``, of the dataset that a sequence comes from."""
        if not 0 <= sequence_id < self.num_sequences:
            raise IndexError(
                f"corpus '{self.name}' has sequences 0 to {self.num_sequences - 1}, not "
                f"{sequence_id}"
            )
        return int(np.searchsorted(self._ends, sequence_id, side="right"))

    def describe(self, sequence_id: int) -> str:
        """Origin of a sequence, for messages: dataset, document and tokens within it."""
        dataset = self.dataset_of(sequence_id)
        first = self._offset(dataset, sequence_id)
        return (
            f"dataset '{self.prefixes[dataset]}', document {int(self._documents[sequence_id])}, "
            f"tokens {first} to {first + int(self.lengths[sequence_id])}"
        )

    def tokens(self, sequence_id: int) -> npt.NDArray[np.int64]:
        """The tokens of a sequence: inputs are all but the last, labels all but the first.

        Returns:
            (length + 1,) token ids.

        Raises:
            DataError: a token id outside the vocabulary given to ``check_vocabulary``.
        """
        dataset = self.dataset_of(sequence_id)
        tokens = self._read(
            dataset,
            int(self._documents[sequence_id]),
            self._offset(dataset, sequence_id),
            int(self.lengths[sequence_id]) + 1,
        )
        lowest, highest = int(tokens.min()), int(tokens.max())
        if not self._fits(lowest, highest):
            self._refuse(sequence_id, lowest, highest)
        return tokens

    def token_weights(self, sequence_id: int) -> Weights:
        """The weight of predicting each token of a sequence; that of its first token is ignored.

        Returns:
            (length + 1,) float32, 1 for data without weights; normalised as the corpus is.

        Raises:
            DataError: a negative or non-finite weight.
        """
        dataset = self.dataset_of(sequence_id)
        offset = self._offset(dataset, sequence_id)
        part = slice(offset, offset + int(self.lengths[sequence_id]) + 1)
        if self._loss_normalization == "token":
            return self._stored_weights(dataset, sequence_id, part)
        pieces = self._pieces(dataset, sequence_id)
        whole = slice(0, int(self.lengths[pieces.start : pieces.stop].sum(dtype=np.int64)) + 1)
        weights = self._stored_weights(dataset, sequence_id, whole)
        total = weights[1:].sum(dtype=np.float64)
        return weights[part] if total == 0 else (weights[part] / total).astype(np.float32)

    def _stored_weights(self, dataset: int, sequence_id: int, part: slice) -> Weights:
        """Weights of tokens of a sequence's document."""
        num_tokens = part.stop - part.start
        stored = self._token_weights[dataset]
        if stored is None:
            return np.ones(num_tokens, dtype=np.float32)
        documents = self._ranges[dataset].index
        first_sequence = documents.first_sequences[self._documents[sequence_id]]
        offset_bytes = int(self._reader(dataset).index.sequence_pointers[first_sequence])
        first = offset_bytes // documents.token_type.itemsize + part.start
        where = self.describe(sequence_id)
        return checked_weights(stored[first : first + num_tokens], num_tokens, where)

    def check_vocabulary(self, vocab_size: int, *, share: int = 0, num_shares: int = 1) -> bool:
        """Refuse token ids from ``vocab_size`` on, now in a sample and later in ``tokens``.

        Reads up to ``VOCABULARY_CHECK_TOKENS`` of each dataset: all of a small one, and stretches
        spread evenly over a larger one. Ids that no sequence trains are ignored. All weights are
        read, as any program may have written them.

        Args:
            vocab_size: token ids must be below it.
            share: which stretches to read: every ``num_shares``-th, starting with this one. All
                later calls of ``tokens`` check, whatever the share.
            num_shares: number of callers that share the work.

        Returns:
            Whether a token in the share has a weight above 0 and is not the first of its document,
            which nothing predicts.

        Raises:
            DataError: names dataset, document, token id and vocabulary size; or a weight that is
                negative or not finite.
        """
        if not 0 <= share < num_shares:
            raise ValueError(f"share {share} is not among {num_shares} shares")
        self._vocab_size = vocab_size
        trains = any(weights is None for weights in self._token_weights)
        for dataset, documents in enumerate(self._ranges):
            stretches = spread_stretches(
                *documents.token_range,
                stretch_tokens=VOCABULARY_STRETCH_TOKENS,
                budget_tokens=VOCABULARY_CHECK_TOKENS,
            )
            mine = stretches[share::num_shares]
            for stretch, tokens in _read_stretches(documents.index, mine):
                if not self._fits(int(tokens.min()), int(tokens.max())):
                    self._check_sequences(dataset, stretch)
            weights = self._token_weights[dataset]
            if weights is not None:
                first, end = documents.token_range
                lengths = documents.index.document_lengths
                lengths = lengths[documents.first_document : documents.end_document]
                document_starts = first + np.cumsum(lengths, dtype=np.int64) - lengths
                for start in range(first, end, VOCABULARY_STRETCH_TOKENS)[share::num_shares]:
                    stretch = range(start, min(start + VOCABULARY_STRETCH_TOKENS, end))
                    where = f"{weights_path(documents.index.prefix)}, from token {stretch.start}"
                    found = checked_weights(
                        weights[stretch.start : stretch.stop], len(stretch), where
                    )
                    here = slice(*np.searchsorted(document_starts, [stretch.start, stretch.stop]))
                    firsts = document_starts[here] - stretch.start
                    trains = trains or bool(np.delete(found, firsts).any())
        return trains

    def fingerprints(self) -> tuple[DatasetFingerprint, ...]:
        """Identifies what each dataset holds and how often it is drawn from.

        Reads at most ``FINGERPRINT_TOKENS`` of each. Raises DataError for data that cannot be read.
        """
        groups = self.groups
        total_weight = sum(group.weight for group in groups)
        datasets = [d for d, report in enumerate(self.reports) if report.num_sequences]
        return tuple(
            DatasetFingerprint(
                prefix=str(self.prefixes[dataset]),
                share=group.weight / total_weight,
                num_sequences=group.num_sequences,
                num_tokens=self.reports[dataset].num_tokens,
                lengths=self._hash_of_lengths(group),
                tokens=self._hash_of_tokens(dataset),
                weights=self._hash_of_weights(dataset),
            )
            for dataset, group in zip(datasets, groups, strict=True)
        )

    def _hash_of_lengths(self, group: SequenceGroup) -> str:
        end = group.first_sequence + group.num_sequences
        stretches = _fingerprint_stretches(group.first_sequence, end)
        return _sha256(self.lengths[stretch.start : stretch.stop] for stretch in stretches)

    def _hash_of_tokens(self, dataset: int) -> str:
        documents = self._ranges[dataset]
        stretches = _fingerprint_stretches(*documents.token_range)
        return _sha256(tokens for _, tokens in _read_stretches(documents.index, stretches))

    def _hash_of_weights(self, dataset: int) -> str | None:
        weights = self._token_weights[dataset]
        if weights is None:
            return None
        stretches = _fingerprint_stretches(*self._ranges[dataset].token_range)
        return _sha256(weights[part.start : part.stop].view("<i4") for part in stretches)

    def _check_sequences(self, dataset: int, stretch: range) -> None:
        """Read all sequences of the documents that a stretch of the ``.bin`` touches."""
        ends = np.cumsum(self._ranges[dataset].index.document_lengths, dtype=np.int64)
        touched = np.searchsorted(ends, [stretch.start, stretch.stop - 1], side="right")
        first, documents = self._documents_of(dataset)
        begin = int(np.searchsorted(documents, touched[0], side="left"))
        end = int(np.searchsorted(documents, touched[1], side="right"))
        for sequence_id in range(first + begin, first + end):
            self.tokens(sequence_id)

    def _documents_of(self, dataset: int) -> tuple[int, npt.NDArray[np.integer[Any]]]:
        """The dataset's first sequence, and the document of each of its sequences, rising."""
        end = int(self._ends[dataset])
        first = end - self.reports[dataset].num_sequences
        return first, self._documents[first:end]

    def _offset(self, dataset: int, sequence_id: int) -> int:
        """Token of its document at which a sequence begins.

        Derived, not stored: pieces of one document follow each other, all but the last of them
        ``seq_length`` long.
        """
        return (sequence_id - self._pieces(dataset, sequence_id).start) * self._seq_length

    def _pieces(self, dataset: int, sequence_id: int) -> range:
        """The sequences of a sequence's document."""
        first, documents = self._documents_of(dataset)
        # A scalar of the array's own type: for another, NumPy would convert the whole array.
        document = documents[sequence_id - first]
        begin, end = (int(documents.searchsorted(document, side)) for side in ("left", "right"))
        return range(first + begin, first + end)

    def _fits(self, lowest: int, highest: int) -> bool:
        return lowest >= 0 and (self._vocab_size is None or highest < self._vocab_size)

    def _refuse(self, sequence_id: int, lowest: int, highest: int) -> NoReturn:
        where = self.describe(sequence_id)
        if lowest < 0:
            raise DataError(f"{where}: token ids are at least 0 but there is {lowest}")
        raise DataError(
            f"{where}: token ids must be below the model's vocabulary of {self._vocab_size} but "
            f"there is {highest}; train with the tokenizer that the data was made with, or raise "
            f"--vocab-size"
        )

    def _read(
        self, dataset: int, document: int, offset: int, num_tokens: int
    ) -> npt.NDArray[np.int64]:
        """(num_tokens,) tokens of a document from ``offset`` on."""
        first_sequence = int(self._ranges[dataset].index.first_sequences[document])
        # Stored sequences of a document are contiguous (the index was checked for it), so reading
        # on past the end of the first one gives the next.
        tokens = self._reader(dataset).get(first_sequence, offset=offset, length=num_tokens)
        # A copy: Megatron's reader unmaps the file when it is deleted.
        return np.array(tokens, dtype=np.int64)

    def _reader(self, dataset: int) -> Any:
        reader = self._readers.get(dataset)
        if reader is None:
            # Imported here: lengths, which are all a planner needs, take no torch.
            from megatron.core.datasets.indexed_dataset import IndexedDataset

            reader = self._readers[dataset] = IndexedDataset(self.prefixes[dataset])
        return reader


def _joined(parts: Sequence[npt.NDArray[np.integer[Any]]]) -> npt.NDArray[np.integer[Any]]:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts])


def _cut(
    documents: DocumentRange, seq_length: int, policy: LongSequences
) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]], CorpusReport]:
    """Document and length of every sequence of at most ``seq_length`` tokens, and the counts."""
    index = documents.index
    all_lengths = index.document_lengths[documents.first_document : documents.end_document] - 1
    trainable = all_lengths >= 1
    num_documents, num_short = len(all_lengths), int((~trainable).sum())
    fits = documents.end_document <= np.iinfo(np.int32).max
    id_type: type[np.integer[Any]] = np.int32 if fits else np.int64
    ids: npt.NDArray[np.integer[Any]] = np.arange(
        documents.first_document, documents.end_document, dtype=id_type
    )
    lengths = all_lengths
    if num_short:
        ids, lengths = ids[trainable], lengths[trainable]
    is_long = lengths > seq_length
    long_lengths = lengths[is_long].astype(np.int64)
    num_long = len(long_lengths)
    counts: dict[str, int] = {}

    if num_long and policy == "error":
        raise DataError(
            f"dataset '{index.prefix}': sequences train at most --seq-length {seq_length} tokens "
            f"but {num_long} documents are longer, the first being document "
            f"{int(ids[np.argmax(is_long)])} with {int(long_lengths[0])}; raise --seq-length or "
            f"set --long-sequences to split, truncate or drop"
        )
    if num_long and policy == "truncate":
        lengths[is_long] = seq_length
        num_lost = int((long_lengths - seq_length).sum())
        counts = {"num_truncated": num_long, "num_truncated_tokens": num_lost}
    elif num_long and policy == "drop":
        ids, lengths = ids[~is_long], lengths[~is_long]
        num_lost = int(long_lengths.sum())
        counts = {"num_dropped_long": num_long, "num_dropped_long_tokens": num_lost}
    elif num_long and policy == "split":
        num_pieces = np.ones(len(lengths), dtype=np.int32)
        num_pieces[is_long] = -(-long_lengths // seq_length)
        last_pieces = np.cumsum(num_pieces) - 1
        ids = np.repeat(ids, num_pieces)
        rests = lengths - (num_pieces - 1) * lengths.dtype.type(seq_length)
        lengths = np.full(len(ids), seq_length, dtype=lengths.dtype)
        lengths[last_pieces] = rests
        counts = {"num_split": num_long}
    report = CorpusReport(
        num_documents=num_documents,
        num_sequences=len(lengths),
        num_tokens=int(lengths.sum(dtype=np.int64)),
        num_dropped_short=num_short,
        **counts,
    )
    return ids, lengths, report


def spread_stretches(
    first_token: int, end_token: int, *, stretch_tokens: int, budget_tokens: int
) -> tuple[range, ...]:
    """Stretches of the positions ``[first_token, end_token)``, in order.

    All of them if the budget allows, else as many as it allows, at least one, spread evenly.
    """
    num_stretches = -(-(end_token - first_token) // stretch_tokens)
    num_read = min(num_stretches, max(1, budget_tokens // stretch_tokens))
    starts = [first_token + k * num_stretches // num_read * stretch_tokens for k in range(num_read)]
    return tuple(range(start, min(start + stretch_tokens, end_token)) for start in starts)


def _fingerprint_stretches(first: int, end: int) -> tuple[range, ...]:
    return spread_stretches(
        first, end, stretch_tokens=FINGERPRINT_STRETCH_TOKENS, budget_tokens=FINGERPRINT_TOKENS
    )


def _sha256(parts: Iterable[npt.NDArray[np.integer[Any]]]) -> str:
    """Hash of whole numbers, whatever the type that they are stored in."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.astype("<i8").tobytes())
    return digest.hexdigest()


def _read_stretches(
    index: DatasetIndex, stretches: tuple[range, ...]
) -> Iterator[tuple[range, npt.NDArray[np.integer[Any]]]]:
    """Each non-empty stretch of the ``.bin`` with its tokens.

    Reads rather than maps the file: a page fault per 4 KiB is slow on a network file system.

    Raises:
        DataError: the ``.bin`` cannot be read, or no longer reaches to the end of a stretch.
    """
    path = bin_path(index.prefix)
    try:
        with open(path, "rb", buffering=0) as file:
            for stretch in stretches:
                file.seek(stretch.start * index.token_type.itemsize)
                tokens = np.fromfile(file, index.token_type, len(stretch))
                if len(tokens) < len(stretch):
                    raise DataError(
                        f"dataset '{index.prefix}': the .bin held {index.num_tokens} tokens when "
                        f"its size was checked but ends after {stretch.start + len(tokens)} now; "
                        f"leave the files of a running job alone"
                    )
                yield stretch, tokens
    except OSError as error:
        raise DataError(
            f"dataset '{index.prefix}': cannot read {path}: {error.strerror}"
        ) from error
