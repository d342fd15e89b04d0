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
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = BOOTSTRAP_SEED,
) -> RatioEstimate:
    """Median over pairs of ``numerator / denominator``, with a percentile bootstrap interval.

    Pairs are resampled as wholes, so what slowed both halves of a pair cancels out. The interval
    is Efron's percentile interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapter 13).

    Args:
        numerators: measurements of one side, in the order of the pairs.
        denominators: of the other side, positive.
        confidence: of the two-sided interval.
        num_resamples: of the bootstrap.
        seed: of the resampling.

    Raises:
        ValueError: no pair, unequal numbers, or a denominator that is not positive.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(
            f"pairs need equally many measurements of both sides, at least 1, but there are "
            f"{len(numerators)} and {len(denominators)}"
        )
    below = np.asarray(denominators, dtype=np.float64)
    if not (below > 0).all():
        raise ValueError(f"denominators must be positive but the least is {below.min()}")
    ratios: npt.NDArray[np.float64] = np.asarray(numerators, dtype=np.float64) / below
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(ratios), size=(num_resamples, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return RatioEstimate(float(np.median(ratios)), float(low), float(high), len(ratios))
