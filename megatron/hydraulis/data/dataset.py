"""The files of a dataset besides its tokens: index and weights.

Layout of ``PREFIX.idx`` (Megatron's ``IndexedDatasetBuilder`` writes it, little-endian)::

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

Layout of ``PREFIX.weights`` (little-endian)::

    bytes 0..8     magic b"HYDWGHT\\0"
    bytes 8..16    version, uint64, always 1
    bytes 16..24   number of weights, uint64: that of the tokens of the .bin
    then           a float32 for each token, in the order of the .bin

The weight of a token is that of *predicting* it: 0 leaves it untrained. Nothing predicts the first
token of a document, so its weight is ignored. A dataset without the file trains every token with
weight 1.
"""

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.errors import DataError

LongSequences = Literal["split", "truncate", "drop", "error"]
"""Policies for a document that has more tokens than ``--seq-length`` can train.

``split`` cuts it into pieces of ``seq_length``, of which neighbours share a token, so that no
transition is lost; ``truncate`` keeps the first ``seq_length``; ``drop`` skips the document;
``error`` refuses it."""

LONG_SEQUENCES: tuple[LongSequences, ...] = get_args(LongSequences)

Weights = npt.NDArray[np.float32]

LossNormalization = Literal["token", "sequence"]
"""Whether tokens have the weights of the data, or these divided by their sum over the document, so
that all documents with any weight have the same; the parts of a split document share its sum."""

_VERSION = 1
_REBUILD = "write the dataset again, e.g. with `hydraulis preprocess`"

_IDX_MAGIC = b"MMIDIDX\x00\x00"
_IDX_HEADER = struct.Struct("<9sQBQQ")
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

_WEIGHTS_MAGIC = b"HYDWGHT\x00"
_WEIGHTS_HEADER = struct.Struct("<8sQQ")
_WEIGHT_TYPE = np.dtype("<f4")


def idx_path(prefix: str) -> str:
    """Path of the index file of the dataset ``prefix``."""
    return prefix + ".idx"


def bin_path(prefix: str) -> str:
    """Path of the token file of the dataset ``prefix``."""
    return prefix + ".bin"


def weights_path(prefix: str) -> str:
    """Path of the weights file of the dataset ``prefix``."""
    return prefix + ".weights"


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
            problem = "is a folder" if os.path.isdir(path) else "does not exist"
            raise DataError(
                f"dataset '{prefix}': a dataset is a .bin and an .idx file but {path} {problem}; "
                f"give the prefix of both files, without .bin or .idx"
            )
    with _reading(prefix, idx):
        num_bin_bytes = os.path.getsize(bin_) if checks_bin else None
        code, num_sequences, num_boundaries = _header(prefix, idx, _IDX_HEADER, _IDX_MAGIC)
        if code not in _TOKEN_TYPES:
            raise DataError(
                f"dataset '{prefix}': token types are {sorted(_TOKEN_TYPES)} (integers) but the "
                f".idx names type {code}; {_REBUILD}"
            )
        if num_sequences == 0 or num_boundaries < 2:
            raise DataError(
                f"dataset '{prefix}': a corpus needs at least one document but the .idx lists "
                f"{num_sequences} sequences in {max(0, num_boundaries - 1)} documents; check the "
                f"input it was made of"
            )
        what = f"{num_sequences} sequences and {num_boundaries} document boundaries"
        num_expected = _IDX_HEADER.size + 12 * num_sequences + 8 * num_boundaries
        # Multimodal datasets have a byte more for every sequence.
        longer = "a multimodal dataset, which holds more than text, or too long"
        _check_size(prefix, what, ".idx", num_expected, os.path.getsize(idx), longer)
        content = np.memmap(idx, mode="r")

    start = _IDX_HEADER.size
    sequence_lengths = np.frombuffer(content, "<i4", num_sequences, start)
    start += 4 * num_sequences
    offsets_bytes = np.frombuffer(content, "<i8", num_sequences, start)
    start += 8 * num_sequences
    boundaries = np.frombuffer(content, "<i8", num_boundaries, start)

    token_type = np.dtype(_TOKEN_TYPES[code]).newbyteorder("<")
    token_bytes = token_type.itemsize
    num_tokens = _checked_sequences(prefix, sequence_lengths, offsets_bytes, token_bytes)
    _check_boundaries(prefix, boundaries, num_sequences)
    if num_tokens == 0:
        raise DataError(
            f"dataset '{prefix}': a corpus needs at least one token but its "
            f"{len(boundaries) - 1} documents hold none; check the input it was made of"
        )
    if num_bin_bytes is not None:
        what = f"{num_tokens} tokens of {token_bytes} bytes"
        num_expected = num_tokens * token_bytes
        _check_size(prefix, what, ".bin", num_expected, num_bin_bytes, "of another .idx")
    return DatasetIndex(
        prefix=prefix,
        token_type=token_type,
        document_lengths=_document_lengths(sequence_lengths, boundaries),
        first_sequences=boundaries[:-1],
    )


@contextlib.contextmanager
def _reading(prefix: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"dataset '{prefix}': cannot read {path}: {error.strerror}; make it readable"
        ) from error


def _header(prefix: str, path: str, form: struct.Struct, magic: bytes) -> list[int]:
    """The numbers in the header of a file after its magic and version."""
    suffix = os.path.splitext(path)[1]
    with open(path, "rb") as stream:
        header = stream.read(form.size)
    if header[: len(magic)] != magic[: len(header)]:
        raise DataError(
            f"dataset '{prefix}': a {suffix} file begins with {magic!r} but this one with "
            f"{header[: len(magic)]!r}, so it was not finished or is another format; {_REBUILD}"
        )
    if len(header) < form.size:
        raise DataError(
            f"dataset '{prefix}': the header of a {suffix} file has {form.size} bytes but the file "
            f"ends after {len(header)} (cut short); copy it again or {_REBUILD}"
        )
    _, version, *numbers = form.unpack(header)
    if version != _VERSION:
        raise DataError(
            f"dataset '{prefix}': {suffix} version {_VERSION} can be read but this one is of "
            f"version {version}; {_REBUILD}"
        )
    return numbers


def _check_size(
    prefix: str, what: str, suffix: str, num_expected: int, num_bytes: int, longer: str
) -> None:
    """Raise DataError unless a file has the size that what it holds takes.

    longer: what a longer file is.
    """
    if num_bytes != num_expected:
        raise DataError(
            f"dataset '{prefix}': {what} take a {suffix} file of {num_expected} bytes but it has "
            f"{num_bytes} ({'cut short' if num_bytes < num_expected else longer}); copy the "
            f"dataset again or {_REBUILD}"
        )


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


def checked_weights(values: npt.ArrayLike, num_tokens: int, where: str) -> Weights:
    """The weights of a sequence of tokens, as float32.

    Args:
        values: (num_tokens,) weights.
        num_tokens: of the sequence, its first token included.
        where: what they belong to, for messages.

    Raises:
        DataError: another number than tokens, or one that is negative or not finite.
    """
    with np.errstate(over="ignore"):  # too large for float32: refused below
        weights = np.asarray(values, dtype=np.float32)
    if weights.shape != (num_tokens,):
        raise DataError(
            f"{where}: a sequence has one weight a token but {num_tokens} tokens have weights of "
            f"shape {weights.shape}; give the first token one, too, which is ignored"
        )
    is_wrong = ~((weights >= 0) & np.isfinite(weights))
    if is_wrong.any():
        place = int(np.argmax(is_wrong))
        raise DataError(
            f"{where}: weights are finite and at least 0 but that of token {place} is "
            f"{weights[place]:g}; correct what makes them"
        )
    return weights


def read_weights(index: DatasetIndex) -> npt.NDArray[Any] | None:
    """Map the weights of a dataset, if it has any.

    Only the header is read here. ``Corpus`` checks the weights that it reads.

    Returns:
        (num_tokens,) float32, read-only, in the order of the ``.bin``.

    Raises:
        DataError: a damaged file, another version, or not one weight a token.
    """
    prefix, path = index.prefix, weights_path(index.prefix)
    with _reading(prefix, path):
        if not os.path.exists(path):
            return None
        (num_weights,) = _header(prefix, path, _WEIGHTS_HEADER, _WEIGHTS_MAGIC)
        num_expected = _WEIGHTS_HEADER.size + _WEIGHT_TYPE.itemsize * num_weights
        what, num_bytes = f"{num_weights} weights", os.path.getsize(path)
        _check_size(prefix, what, ".weights", num_expected, num_bytes, "too long")
        if num_weights != index.num_tokens:
            raise DataError(
                f"dataset '{prefix}': a .weights file has one weight a token but this one has "
                f"{num_weights} for {index.num_tokens} tokens, so it belongs to other data; "
                f"{_REBUILD}, or remove the file to train every token"
            )
        return np.memmap(path, _WEIGHT_TYPE, "r", _WEIGHTS_HEADER.size, (num_weights,))


class WeightsWriter:
    """Writes a weights file document by document; without `finish` no reader accepts it."""

    def __init__(self, path: str) -> None:
        self.file: IO[bytes] = open(path, "wb")  # noqa: SIM115
        self._num_weights = 0
        self.file.write(bytes(_WEIGHTS_HEADER.size))

    def add(self, weights: Weights) -> None:
        """Append weights that `checked_weights` has accepted."""
        self.file.write(weights.astype(_WEIGHT_TYPE, copy=False).tobytes())
        self._num_weights += len(weights)

    def finish(self) -> None:
        """Write the header."""
        self.file.seek(0)
        self.file.write(_WEIGHTS_HEADER.pack(_WEIGHTS_MAGIC, _VERSION, self._num_weights))
        self.file.close()
