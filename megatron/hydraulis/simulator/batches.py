"""Global batches to simulate: drawn from a corpus's lengths by the training program's sampler."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.blend import SequenceGroup
from megatron.hydraulis.data.sampler import LengthSampler
from megatron.hydraulis.lengths.counts import read_length_counts

__all__ = ["read_corpus_lengths", "sample_batches"]


def read_corpus_lengths(path: str | Path) -> npt.NDArray[np.int64]:
    """Shape (num_sequences,): tokens of each sequence, of any file of lengths.counts.

    Raises DataError as read_length_counts does.
    """
    counts = read_length_counts(path)
    return np.repeat(counts.lengths, counts.counts)


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
