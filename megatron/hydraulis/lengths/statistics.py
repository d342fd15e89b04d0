"""Statistics of the lengths of a corpus: percentiles, shares of sequences, tokens and work."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.hydraulis.data.index import LongSequences
from megatron.hydraulis.lengths.counts import LengthCounts

__all__ = ["CutEffect", "LengthRange", "LengthStatistics", "percentile"]

PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9)

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRange:
    """Sequences of first to last tokens, both included, and their shares of the corpus."""

    first: int
    last: int
    num_sequences: int
    sequence_share: float
    token_share: float
    square_share: float
    """Share of Σs², to which the work of attention is proportional."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CutEffect:
    """Effect of --seq-length and --long-sequences on the corpus."""

    seq_length: int
    how: LongSequences
    num_longer: int
    """Number of sequences above seq_length."""
    num_longer_tokens: int
    """Tokens of these sequences."""
    num_sequences: int
    """Number of sequences after the cut."""
    num_tokens: int
    square_ratio: float
    """Σs² after over Σs² before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthStatistics:
    """Statistics of the sequences of a corpus, lengths in tokens."""

    num_sequences: int
    num_tokens: int
    shortest: int
    longest: int
    mean: float
    token_mean: float
    """Σs²/Σs: mean over tokens of the length of their sequences."""
    percentiles: tuple[tuple[float, int], ...]
    """(percent, length): percentage of the sequences with at most this length."""
    token_percentiles: tuple[tuple[float, int], ...]
    """(percent, length): percentage of the tokens in sequences of at most this length."""
    ranges: tuple[LengthRange, ...]
    """Powers of two: 1, 2–3, 4–7, …; from the shortest to the longest."""
    cut: CutEffect | None = None

    @classmethod
    def of(
        cls, counts: LengthCounts, *, seq_length: int | None = None, how: LongSequences = "split"
    ) -> "LengthStatistics":
        """Statistics of the corpus before a cut, and with seq_length the effect of the cut.

        Raises DataError if the cut leaves nothing, and with ``error`` for longer sequences.
        """
        squares = _squares(counts)
        tokens = counts.lengths.astype(np.float64) * counts.counts
        return cls(
            num_sequences=counts.num_sequences,
            num_tokens=counts.num_tokens,
            shortest=int(counts.lengths[0]),
            longest=counts.longest,
            mean=counts.num_tokens / counts.num_sequences,
            token_mean=float(squares.sum() / tokens.sum()),
            percentiles=_percentiles(counts.lengths, counts.counts.astype(np.float64)),
            token_percentiles=_percentiles(counts.lengths, tokens),
            ranges=_ranges(counts, tokens, squares),
            cut=None if seq_length is None else _cut(counts, seq_length, how),
        )

    def to_json(self) -> dict[str, Any]:
        """All statistics; percentiles as an object from percent to length."""
        content = asdict(self)
        for name in ("percentiles", "token_percentiles"):
            content[name] = {f"{percent:g}": length for percent, length in getattr(self, name)}
        return content


def percentile(lengths: npt.NDArray[np.int64], weights: FloatArray, percent: float) -> int:
    """The smallest length with at least percent of the weight at or below it.

    lengths: (num_lengths,) ascending; weights: (num_lengths,) positive.
    """
    below = np.cumsum(weights)
    # Rounded sums may fall below a share that exact ones reach.
    wanted = below[-1] * percent / 100.0 * (1.0 - 1e-12)
    return int(lengths[min(int(np.searchsorted(below, wanted)), len(lengths) - 1)])


def _percentiles(
    lengths: npt.NDArray[np.int64], weights: FloatArray
) -> tuple[tuple[float, int], ...]:
    return tuple((float(p), percentile(lengths, weights, p)) for p in PERCENTILES)


def _squares(counts: LengthCounts) -> FloatArray:
    # Floats, since a billion sequences of a million tokens overflow 64 bits.
    squares: FloatArray = np.square(counts.lengths.astype(np.float64)) * counts.counts
    return squares


def _ranges(
    counts: LengthCounts, tokens: FloatArray, squares: FloatArray
) -> tuple[LengthRange, ...]:
    # frexp, not log2: exact for every length below 2**53.
    exponents = np.frexp(counts.lengths.astype(np.float64))[1] - 1
    lowest, highest = int(exponents.min()), int(exponents.max())
    sequences = np.bincount(exponents - lowest, weights=counts.counts.astype(np.float64))
    of_tokens = np.bincount(exponents - lowest, weights=tokens)
    of_squares = np.bincount(exponents - lowest, weights=squares)
    return tuple(
        LengthRange(
            first=1 << exponent,
            last=(2 << exponent) - 1,
            num_sequences=int(sequences[exponent - lowest]),
            sequence_share=float(sequences[exponent - lowest] / sequences.sum()),
            token_share=float(of_tokens[exponent - lowest] / of_tokens.sum()),
            square_share=float(of_squares[exponent - lowest] / of_squares.sum()),
        )
        for exponent in range(lowest, highest + 1)
    )


def _cut(counts: LengthCounts, seq_length: int, how: LongSequences) -> CutEffect:
    after = counts.cut(seq_length, how)
    is_longer = counts.lengths > seq_length
    return CutEffect(
        seq_length=seq_length,
        how=how,
        num_longer=int(counts.counts[is_longer].sum()),
        num_longer_tokens=int(counts.lengths[is_longer] @ counts.counts[is_longer]),
        num_sequences=after.num_sequences,
        num_tokens=after.num_tokens,
        square_ratio=float(_squares(after).sum() / _squares(counts).sum()),
    )
