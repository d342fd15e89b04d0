"""Document lengths of a Megatron dataset, read from its ``.idx`` file alone.

Layout of the file (Megatron's ``IndexedDatasetBuilder`` writes it, little-endian)::

    bytes 0..9     magic b"MMIDIDX\\0\\0"
    bytes 9..17    version, uint64, always 1
    byte  17       code of the token type, uint8
    bytes 18..26   number of stored sequences S, uint64
    bytes 26..34   number of document boundaries B, uint64 (documents + 1)
    4·S bytes      tokens per stored sequence, int32
    8·S bytes      byte offset of each stored sequence in the .bin, int64
    8·B bytes      first stored sequence of each document, then S, int64

A document may consist of several stored sequences (sentence splitting); they are contiguous in the
``.bin``, so the document is one run of tokens.
"""

import os
import struct
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.errors import DataError

LongSequences = Literal["split", "truncate", "drop", "error"]
"""What to do with a document that has more tokens than ``--seq-length`` can train.

``split`` cuts it into pieces of ``seq_length``, of which neighbours share a token, so that no
transition is lost; ``truncate`` keeps the first ``seq_length``; ``drop`` skips the document;
``error`` refuses it."""

LONG_SEQUENCES: tuple[LongSequences, ...] = get_args(LongSequences)

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES: dict[int, type[np.integer]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
"""Codes of the integer types; codes 6 and 7 are floats, which no token id is."""

_BLOCK = 1 << 20
"""Stored sequences checked at a time, so that no rank holds copies of whole arrays."""

_REBUILD = "write the dataset again, e.g. with `hydraulis preprocess`"


def idx_path(prefix: str) -> str:
    """Path of the index file of the dataset ``prefix``."""
    return prefix + ".idx"


def bin_path(prefix: str) -> str:
    """Path of the token file of the dataset ``prefix``."""
    return prefix + ".bin"


@dataclass(frozen=True, eq=False)
class DatasetIndex:
    """The documents of one dataset, from its ``.idx``."""

    prefix: str
    token_type: np.dtype[Any]
    """Type of a token in the ``.bin``, little-endian."""
    document_lengths: npt.NDArray[np.integer[Any]]
    """(num_documents,) number of tokens of each document."""
    first_sequences: npt.NDArray[np.int64]
    """(num_documents,) stored sequence in which each document begins.

    This array is the mapped file itself, as is the other one if every document is one stored
    sequence: the ranks of a node share one copy."""

    @property
    def num_documents(self) -> int:
        return len(self.document_lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.document_lengths.sum(dtype=np.int64))


def read_index(prefix: str, *, checks_bin: bool = True) -> DatasetIndex:
    """Read the document lengths of the dataset ``prefix`` without reading a token.

    Args:
        checks_bin: whether the ``.bin`` must exist and have the size that the index requires.

    Raises:
        DataError: a file is missing, the ``.idx`` is damaged, cut short or of another version, the
            ``.bin`` has not the size the index demands, or there is no token at all.
    """
    idx, bin_ = idx_path(prefix), bin_path(prefix)
    for path in (idx, bin_) if checks_bin else (idx,):
        if not os.path.isfile(path):
            raise DataError(
                f"dataset '{prefix}': a dataset is a .bin and an .idx file but {path} does not "
                f"exist; give the prefix of both files, without .bin or .idx"
            )
    try:
        num_idx_bytes = os.path.getsize(idx)
        num_bin_bytes = os.path.getsize(bin_) if checks_bin else None
        with open(idx, "rb") as stream:
            header = stream.read(_HEADER.size)
        num_sequences, num_boundaries, token_type = _parse_header(prefix, header)
        num_expected = _HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if num_idx_bytes != num_expected:
            raise DataError(
                f"dataset '{prefix}': {num_sequences} sequences and {num_boundaries} document "
                f"boundaries take an .idx of {num_expected} bytes but it has {num_idx_bytes} "
                f"({_cause(num_idx_bytes - num_expected, num_sequences)}); copy it again or "
                f"{_REBUILD}"
            )
        content = np.memmap(idx, mode="r")
    except OSError as error:
        raise DataError(f"dataset '{prefix}': cannot read {idx}: {error.strerror}") from error

    start = _HEADER.size
    sequence_lengths = np.frombuffer(content, "<i4", num_sequences, start)
    start += 4 * num_sequences
    offsets_bytes = np.frombuffer(content, "<i8", num_sequences, start)
    start += 8 * num_sequences
    boundaries = np.frombuffer(content, "<i8", num_boundaries, start)

    token_bytes = token_type.itemsize
    num_tokens = _checked_sequences(prefix, sequence_lengths, offsets_bytes, token_bytes)
    _check_boundaries(prefix, boundaries, num_sequences)
    if num_tokens == 0:
        raise DataError(
            f"dataset '{prefix}': a corpus needs at least one token but its "
            f"{len(boundaries) - 1} documents hold none; check the input it was made of"
        )
    if num_bin_bytes is not None and num_bin_bytes != num_tokens * token_bytes:
        raise DataError(
            f"dataset '{prefix}': {num_tokens} tokens of {token_bytes} bytes take a .bin of "
            f"{num_tokens * token_bytes} bytes but it has {num_bin_bytes} "
            f"({'cut short' if num_bin_bytes < num_tokens * token_bytes else 'of another .idx'}); "
            f"copy both files again or {_REBUILD}"
        )
    return DatasetIndex(
        prefix=prefix,
        token_type=token_type,
        document_lengths=_document_lengths(sequence_lengths, boundaries),
        first_sequences=boundaries[:-1],
    )


def _parse_header(prefix: str, header: bytes) -> tuple[int, int, np.dtype[Any]]:
    """Number of stored sequences, number of document boundaries, token type."""
    if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise DataError(
            f"dataset '{prefix}': an .idx begins with {_MAGIC!r} but this one with "
            f"{header[: len(_MAGIC)]!r}: not an index of Megatron's; {_REBUILD}"
        )
    if len(header) < _HEADER.size:
        raise DataError(
            f"dataset '{prefix}': the header of an .idx has {_HEADER.size} bytes but the file ends "
            f"after {len(header)} (cut short); copy it again or {_REBUILD}"
        )
    _, version, code, num_sequences, num_boundaries = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(
            f"dataset '{prefix}': .idx version {_VERSION} can be read but this one is of version "
            f"{version}; {_REBUILD}"
        )
    if code not in _TOKEN_TYPES:
        raise DataError(
            f"dataset '{prefix}': token types are {sorted(_TOKEN_TYPES)} (integers) but the .idx "
            f"names type {code}; {_REBUILD}"
        )
    if num_sequences == 0 or num_boundaries < 2:
        raise DataError(
            f"dataset '{prefix}': a corpus needs at least one document but the .idx lists "
            f"{num_sequences} sequences in {max(0, num_boundaries - 1)} documents; check the "
            f"input it was made of"
        )
    return num_sequences, num_boundaries, np.dtype(_TOKEN_TYPES[code]).newbyteorder("<")


def _cause(num_excess_bytes: int, num_sequences: int) -> str:
    if num_excess_bytes < 0:
        return "cut short"
    if num_excess_bytes == num_sequences:
        return "it carries the modes of a multimodal dataset, which holds more than text"
    return "too long"


def _checked_sequences(
    prefix: str,
    sequence_lengths: npt.NDArray[np.int32],
    offsets_bytes: npt.NDArray[np.int64],
    token_bytes: int,
) -> int:
    """The number of tokens, after checking that lengths and offsets agree."""
    num_tokens = 0
    for first in range(0, len(sequence_lengths), _BLOCK):
        lengths = sequence_lengths[first : first + _BLOCK].astype(np.int64)
        if (lengths < 0).any():
            wrong = int(np.argmax(lengths < 0))
            raise DataError(
                f"dataset '{prefix}': lengths are at least 0 but the .idx gives sequence "
                f"{first + wrong} {int(lengths[wrong])} tokens: it is damaged; {_REBUILD}"
            )
        ends = num_tokens + np.cumsum(lengths)
        places = (ends - lengths) * token_bytes
        stored = offsets_bytes[first : first + _BLOCK]
        misplaced = stored != places
        if misplaced.any():
            wrong = int(np.argmax(misplaced))
            raise DataError(
                f"dataset '{prefix}': sequence {first + wrong} must begin at byte "
                f"{int(places[wrong])} of the .bin, after its predecessors, but the .idx says "
                f"{int(stored[wrong])}: it is damaged; {_REBUILD}"
            )
        num_tokens = int(ends[-1])
    return num_tokens


def _check_boundaries(prefix: str, boundaries: npt.NDArray[np.int64], num_sequences: int) -> None:
    if (
        boundaries[0] != 0
        or boundaries[-1] != num_sequences
        or (boundaries[1:] < boundaries[:-1]).any()
    ):
        raise DataError(
            f"dataset '{prefix}': document boundaries must rise from 0 to {num_sequences}, the "
            f"number of sequences, but the .idx has {int(boundaries[0])} … {int(boundaries[-1])}: "
            f"it is damaged; {_REBUILD}"
        )
    if len(boundaries) == num_sequences + 1 and (boundaries[1:] == boundaries[:-1]).any():
        # Each document one sequence, as nearly every dataset has it, with a bit flipped.
        empty = int(np.argmax(boundaries[1:] == boundaries[:-1]))
        raise DataError(
            f"dataset '{prefix}': as many sequences as documents ({num_sequences}) are one each "
            f"but document {empty} has none and another several: the .idx is damaged; {_REBUILD}"
        )


def _document_lengths(
    sequence_lengths: npt.NDArray[np.int32], boundaries: npt.NDArray[np.int64]
) -> npt.NDArray[np.integer[Any]]:
    """(num_documents,) the stored lengths themselves where each document is one sequence."""
    if len(boundaries) == len(sequence_lengths) + 1:
        return sequence_lengths
    ends = np.zeros(len(sequence_lengths) + 1, dtype=np.int64)
    np.cumsum(sequence_lengths, dtype=np.int64, out=ends[1:])
    lengths = ends[boundaries[1:]] - ends[boundaries[:-1]]
    return lengths.astype(np.int32) if lengths.max() <= np.iinfo(np.int32).max else lengths
