"""Weights of a dataset's tokens, in a file next to its ``.bin`` and ``.idx``.

Layout of ``PREFIX.weights`` (little-endian)::

    bytes 0..8     magic b"HYDWGHT\\0"
    bytes 8..16    version, uint64, always 1
    bytes 16..24   number of weights, uint64: that of the tokens of the .bin
    then           a float32 for each token, in the order of the .bin

The weight of a token is that of *predicting* it: 0 leaves it untrained. Nothing predicts the first
token of a document, so its weight is ignored. A dataset without the file trains every token with
weight 1.
"""

import os
import struct
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.index import DatasetIndex
from megatron.hydraulis.errors import DataError

Weights = npt.NDArray[np.float32]

LossNormalization = Literal["token", "sequence"]
"""Whether tokens have the weights of the data, or these divided by their sum over the document, so
that all documents with any weight have the same; the parts of a split document share its sum."""

LOSS_NORMALIZATIONS: tuple[LossNormalization, ...] = get_args(LossNormalization)

_MAGIC = b"HYDWGHT\x00"
_VERSION = 1
_HEADER = struct.Struct("<8sQQ")
_TYPE = np.dtype("<f4")

_REBUILD = "write the dataset again, with one weight a token"


def weights_path(prefix: str) -> str:
    """Path of the weights file of the dataset ``prefix``."""
    return prefix + ".weights"


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


class WeightsWriter:
    """Writes a weights file document by document; complete after ``finish``.

    Args:
        path: of the file, which the caller renames once all files of the dataset are complete.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "wb")  # noqa: SIM115
        self._num_weights = 0
        self._file.write(bytes(_HEADER.size))

    def add(self, weights: Weights) -> None:
        """Append weights that `checked_weights` has accepted."""
        self._file.write(weights.astype(_TYPE, copy=False).tobytes())
        self._num_weights += len(weights)

    def finish(self) -> None:
        """Write the header, without which no reader accepts the file."""
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, _VERSION, self._num_weights))
        self._file.close()

    def close(self) -> None:
        self._file.close()


def read_weights(index: DatasetIndex) -> npt.NDArray[Any] | None:
    """Map the weights of a dataset, if it has any.

    Only the header is read here. ``Corpus`` checks the weights that it reads.

    Returns:
        (num_tokens,) float32, read-only, in the order of the ``.bin``.

    Raises:
        DataError: a damaged file, another version, or not one weight a token.
    """
    path = weights_path(index.prefix)
    try:
        if not os.path.exists(path):
            return None
        num_bytes = os.path.getsize(path)
        with open(path, "rb") as stream:
            header = stream.read(_HEADER.size)
        num_weights = _parse_header(index.prefix, header)
        num_expected = _HEADER.size + _TYPE.itemsize * num_weights
        if num_bytes != num_expected:
            raise DataError(
                f"dataset '{index.prefix}': {num_weights} weights take a .weights file of "
                f"{num_expected} bytes but it has {num_bytes} "
                f"({'cut short' if num_bytes < num_expected else 'too long'}); copy it again or "
                f"{_REBUILD}"
            )
        if num_weights != index.num_tokens:
            raise DataError(
                f"dataset '{index.prefix}': a .weights file has one weight a token but this one "
                f"has {num_weights} for {index.num_tokens} tokens, so it belongs to other data; "
                f"{_REBUILD}, or remove the file to train every token"
            )
        return np.memmap(path, _TYPE, "r", offset=_HEADER.size, shape=(num_weights,))
    except OSError as error:
        raise DataError(
            f"dataset '{index.prefix}': cannot read {path}: {error.strerror}; make it readable"
        ) from error


def _parse_header(prefix: str, header: bytes) -> int:
    """The number of weights."""
    if header[: len(_MAGIC)] != _MAGIC[: len(header)]:
        raise DataError(
            f"dataset '{prefix}': a .weights file begins with {_MAGIC!r} but this one with "
            f"{header[: len(_MAGIC)]!r}: it was not finished or is another format; {_REBUILD}"
        )
    if len(header) < _HEADER.size:
        raise DataError(
            f"dataset '{prefix}': the header of a .weights file has {_HEADER.size} bytes but the "
            f"file ends after {len(header)} (cut short); copy it again or {_REBUILD}"
        )
    _, version, num_weights = _HEADER.unpack(header)
    if version != _VERSION:
        raise DataError(
            f"dataset '{prefix}': .weights version {_VERSION} can be read but this one is of "
            f"version {version}; {_REBUILD}"
        )
    return int(num_weights)
