"""Lengths of sequences, read from files: of a corpus, counted by length, and of one batch."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.dataset import LongSequences, read_index
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.json_object import parse_json, read_text
from megatron.hydraulis.ranges import MAX_SHUFFLED_SEQUENCES

_IDX, _CSV = ".idx", ".csv"
_HEADER = "length_tokens,count"
_HISTOGRAM, _LENGTHS = "histogram of lengths", "lengths file"
# More digits are a typing error.
_NUMBER = re.compile(r"[0-9]{1,18}")
_MAX_NUMBER = 10**15
"""Larger numbers are taken for typing errors."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class LengthCounts:
    """Numbers of sequences by length.

    Raises DataError unless there is a sequence, lengths are ascending from 1 and counts positive.
    """

    lengths: IntArray
    """(num_lengths,) trained tokens of a sequence, ascending."""
    counts: IntArray
    """(num_lengths,) number of sequences of each length."""

    def __post_init__(self) -> None:
        if len(self.lengths) == 0 or len(self.lengths) != len(self.counts):
            raise DataError(
                f"lengths: a corpus has at least 1 sequence, each length with its count, but "
                f"there are {len(self.lengths)} lengths and {len(self.counts)} counts; give "
                f"another file"
            )
        if self.lengths[0] < 1 or (np.diff(self.lengths) <= 0).any() or self.counts.min() < 1:
            raise DataError(
                f"lengths: lengths ascend from 1 token and counts are positive but the shortest "
                f"is {self.lengths[0]} and the smallest count {self.counts.min()}; correct them"
            )

    @classmethod
    def of(cls, lengths: npt.ArrayLike, counts: npt.ArrayLike | None = None) -> "LengthCounts":
        """Counts lengths in any order, each given once or with its count; counts of 0 are dropped.

        lengths, counts: shape (num,), whole numbers.
        """
        values = np.asarray(lengths, dtype=np.int64)
        weights = np.ones_like(values) if counts is None else np.asarray(counts, dtype=np.int64)
        distinct, places = np.unique(values, return_inverse=True)
        sums = np.zeros(len(distinct), dtype=np.int64)
        np.add.at(sums, places, weights)
        return cls(distinct[sums > 0], sums[sums > 0])

    @property
    def num_sequences(self) -> int:
        return int(self.counts.sum())

    @property
    def num_tokens(self) -> int:
        """Trained tokens of all sequences."""
        return int(self.lengths @ self.counts)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths[-1])

    @property
    def sequences(self) -> IntArray:
        """Tokens of every sequence, ascending: shape (num_sequences,).

        Raises DataError for more sequences than a command holds in memory.
        """
        if self.num_sequences > MAX_SHUFFLED_SEQUENCES:
            raise DataError(
                f"lengths: at most {MAX_SHUFFLED_SEQUENCES:,} sequences are shuffled but there are "
                f"{self.num_sequences:,}; divide the counts by a common factor"
            )
        return np.repeat(self.lengths, self.counts)

    def cut(self, seq_length: int | None, how: LongSequences) -> "LengthCounts":
        """The sequences that training with --seq-length and --long-sequences would see.

        ``split`` makes pieces of seq_length tokens and a last one of the rest; None is no limit.

        Raises DataError if nothing is left and, with ``error``, for a longer sequence.
        """
        if seq_length is None:
            return self
        is_long = self.lengths > seq_length
        if not is_long.any():
            return self
        if how == "error":
            raise DataError(
                f"lengths: a sequence has at most --seq-length {seq_length} tokens but "
                f"{int(self.counts[is_long].sum())} have more, the longest {self.longest}; raise "
                f"it or give --long-sequences split, truncate or drop"
            )
        kept, counts = self.lengths[~is_long], self.counts[~is_long]
        if how == "drop":
            if len(kept) == 0:
                raise DataError(
                    f"lengths: all {self.num_sequences} sequences have more than --seq-length "
                    f"{seq_length} tokens and are dropped; raise it"
                )
            return LengthCounts(kept, counts)
        long, long_counts = self.lengths[is_long], self.counts[is_long]
        num_full = long // seq_length if how == "split" else np.ones_like(long)
        rest = long % seq_length if how == "split" else np.zeros_like(long)
        has_rest = rest > 0
        return LengthCounts.of(
            np.concatenate((kept, rest[has_rest], np.full_like(long, seq_length))),
            np.concatenate((counts, long_counts[has_rest], long_counts * num_full)),
        )


def read_length_counts(path: str | Path) -> LengthCounts:
    """Reads the lengths of a corpus in trained tokens from one of four kinds of files.

    A Megatron index by the suffix ``.idx`` (a document of D tokens trains D-1, one of fewer than 2
    none; the ``.bin`` is not needed), a histogram by the suffix ``.csv`` with the header
    ``length_tokens,count``, a JSON list, and text with a number per line. The prefix of an index,
    as --data-path takes it, names the index.

    Raises DataError for a file that cannot be read, invalid numbers, and a file without sequences.
    """
    if not Path(path).exists() and Path(f"{path}{_IDX}").is_file():
        path = f"{path}{_IDX}"
    suffix = Path(path).suffix
    if suffix == _CSV:
        return _from_histogram(path)
    if suffix != _IDX:
        return LengthCounts.of(read_lengths(path))
    num_documents, trained = _trained_lengths(path)
    if len(trained) == 0:
        raise DataError(
            f"{_LENGTHS} {path}: a document of D tokens trains D-1 but none of "
            f"{num_documents} has 2 tokens or more; give another file"
        )
    return LengthCounts.of(trained)


def read_lengths(path: str | Path) -> tuple[int, ...]:
    """The lengths of a batch in tokens: shape (num_sequences,), in the file's order.

    The file is a Megatron index as above, a JSON list, or text with a number per line. Raises
    DataError for a file that cannot be read, a length that is not a whole number from 1 on, and a
    file without lengths.
    """
    if Path(path).suffix == _IDX:
        return _some(path, (int(length) for length in _trained_lengths(path)[1]))
    text = read_text(path, _LENGTHS, DataError)
    if text.lstrip()[:1] in ("[", "{"):
        return _some(path, _from_list(path, parse_json(text, f"{_LENGTHS} {path}", DataError)))
    return _some(path, _from_lines(path, text))


def _trained_lengths(path: str | Path) -> tuple[int, npt.NDArray[np.integer[Any]]]:
    """Number of documents of an index, and the trained tokens of those that train any."""
    index = read_index(str(path).removesuffix(_IDX), checks_bin=False)
    trained: npt.NDArray[np.integer[Any]] = index.document_lengths - 1
    return index.num_documents, trained[trained > 0]


def _from_histogram(path: str | Path) -> LengthCounts:
    lines = read_text(path, _HISTOGRAM, DataError).splitlines()
    if not lines or lines[0].strip() != _HEADER:
        raise DataError(
            f"{_HISTOGRAM} {path}: its first line is {_HEADER!r} but is "
            f"{lines[0].strip() if lines else ''!r:.60}; add that line"
        )
    lengths, counts = [], []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        words = [word.strip() for word in line.split(",")]
        if not all(word.isascii() and word.isdigit() for word in words) or len(words) != 2:
            raise DataError(
                f"{_HISTOGRAM} {path}: a line is a length and a count, two integers, but "
                f"line {number} is {line.strip()!r:.60}; correct it"
            )
        length, count = int(words[0]), int(words[1])
        if not 1 <= length <= _MAX_NUMBER or count > _MAX_NUMBER:
            raise DataError(
                f"{_HISTOGRAM} {path}: lengths are at least 1, numbers at most {_MAX_NUMBER}, but "
                f"line {number} is {line.strip()!r:.60}; correct it"
            )
        lengths.append(length)
        counts.append(count)
    if math.fsum(counts) == 0:
        raise DataError(
            f"{_HISTOGRAM} {path}: it counts at least 1 sequence but has 0; give another file"
        )
    return LengthCounts.of(lengths, counts)


def _from_list(path: str | Path, content: object) -> Iterable[int]:
    if not isinstance(content, list):
        raise DataError(
            f"{_LENGTHS} {path}: must be a list of lengths but is an object; write it as [900, 20]"
        )
    for index, value in enumerate(content):
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or not 1 <= value <= _MAX_NUMBER:
            raise DataError(
                f"{_LENGTHS} {path}: a length is a whole number from 1 to {_MAX_NUMBER} but number "
                f"{index} of the list is {value!r:.60}; correct it"
            )
        yield value


def _from_lines(path: str | Path, text: str) -> Iterable[int]:
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not _NUMBER.fullmatch(word) or not 1 <= int(word) <= _MAX_NUMBER:
            raise DataError(
                f"{_LENGTHS} {path}: every line is a whole number from 1 to {_MAX_NUMBER} but line "
                f"{number} is {word!r:.60}; correct it"
            )
        yield int(word)


def _some(path: str | Path, lengths: Iterable[int]) -> tuple[int, ...]:
    found = tuple(lengths)
    if not found:
        raise DataError(
            f"{_LENGTHS} {path}: a batch has at least 1 sequence of 1 token but the file has 0; "
            f"give another file"
        )
    return found
