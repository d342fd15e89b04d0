"""Global batches to simulate: drawn from a corpus's lengths by the training program's sampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.blend import SequenceGroup
from megatron.hydraulis.data.sampler import LengthSampler
from megatron.hydraulis.errors import DataError
from megatron.hydraulis.planner.lengths_file import read_lengths

__all__ = ["read_corpus_lengths", "read_length_counts", "sample_batches"]

_COUNTS_SUFFIX = ".csv"


def read_length_counts(path: str | Path) -> npt.NDArray[np.int64]:
    """Shape (num_lengths, 2): length in tokens, and how many documents have it.

    Of a CSV file ``length_tokens,count`` with that line as its head. Raises DataError for any
    other.
    """
    try:
        counts = np.loadtxt(path, dtype=np.int64, delimiter=",", skiprows=1, ndmin=2)
    except (OSError, ValueError) as error:
        raise DataError(
            f"lengths file {path}: a .csv has the head length_tokens,count and two whole numbers a "
            f"line but cannot be read so: {error}; correct it"
        ) from None
    if counts.ndim != 2 or counts.shape[1] != 2 or not len(counts) or counts.min() < 1:
        raise DataError(
            f"lengths file {path}: a .csv has at least 1 line of two numbers from 1 on but its "
            f"numbers have the shape {counts.shape}; correct it"
        )
    return counts


def read_corpus_lengths(path: str | Path) -> npt.NDArray[np.int64]:
    """Shape (num_sequences,): tokens of each sequence, of a histogram (.csv) or a lengths file.

    Raises DataError as read_length_counts and read_lengths do.
    """
    if Path(path).suffix == _COUNTS_SUFFIX:
        counts = read_length_counts(path)
        return np.repeat(counts[:, 0], counts[:, 1])
    return np.array(read_lengths(path), dtype=np.int64)


def sample_batches(
    lengths: npt.NDArray[np.integer[Any]] | Sequence[int],
    *,
    longest: int,
    num_batches: int,
    seed: int,
    batch_tokens: int | None = None,
    batch_size: int | None = None,
) -> list[tuple[int, ...]]:
    """Global batches as the training program draws them, documents cut at longest tokens.

    lengths: shape (num_sequences,), the corpus. A batch has batch_size sequences, or up to
    batch_tokens tokens. Raises ConfigurationError as LengthSampler does.
    """
    cut = np.minimum(np.asarray(lengths), longest)
    sampler = LengthSampler(
        cut,
        [SequenceGroup(0, len(cut), 1.0)],
        seed=seed,
        global_batch_tokens=batch_tokens,
        global_batch_size=batch_size,
    )
    return [sampler.next_batch().lengths for _ in range(num_batches)]
