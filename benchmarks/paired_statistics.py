"""Ratios of paired measurements, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 10_000
"""Of the bootstrap: enough that its own noise is far below the interval's width."""
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 20
"""So that equal measurements give an equal interval."""


_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RatioEstimate:
    """Median of the ratios of pairs, with its bootstrap interval."""

    median: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, confidence: float = CONFIDENCE
) -> RatioEstimate:
    """Median over pairs of ``numerator / denominator``, with a percentile bootstrap interval.

    A pair is resampled as one, so that what slowed both of its halves cancels out. The interval is
    Efron's percentile interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapter 13).

    Raises ValueError for no pair, unequal numbers, or a denominator that is not positive.
    """
    above, below = _pairs(numerators, denominators)
    ratios = above / below
    medians = np.median(_resampled(ratios), axis=1)
    return _estimate(float(np.median(ratios)), medians, len(ratios), confidence)


def ratio_of_totals(numerators: Sequence[float], denominators: Sequence[float]) -> RatioEstimate:
    """``Σ numerators / Σ denominators`` with the same interval; `median` is the ratio itself.

    For the times of two runs over the same batches: the interval says how much the ratio depends
    on which batches were drawn. Raises ValueError as `paired_ratio` does.
    """
    above, below = _pairs(numerators, denominators)
    ratios = _resampled(above).sum(axis=1) / _resampled(below).sum(axis=1)
    return _estimate(float(above.sum() / below.sum()), ratios, len(above))


def _pairs(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[_Floats, _Floats]:
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(
            f"pairs need equally many measurements of both sides, at least 1, but there are "
            f"{len(numerators)} and {len(denominators)}"
        )
    below = np.asarray(denominators, dtype=np.float64)
    if not (below > 0).all():
        raise ValueError(f"denominators must be positive but the least is {below.min()}")
    return np.asarray(numerators, dtype=np.float64), below


def _resampled(values: _Floats) -> _Floats:
    """A row of drawn values for each resample; equal draws for values of equal number."""
    drawn = np.random.default_rng(BOOTSTRAP_SEED).integers(
        0, len(values), size=(NUM_RESAMPLES, len(values))
    )
    return values[drawn]


def _estimate(
    value: float, resampled: _Floats, num_pairs: int, confidence: float = CONFIDENCE
) -> RatioEstimate:
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(resampled, [tail, 1.0 - tail])
    return RatioEstimate(value, float(low), float(high), num_pairs)
