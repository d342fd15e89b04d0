"""Ratios of paired measurements with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import stats

NUM_RESAMPLES = 10_000
"""Enough that the noise of the bootstrap is far below the width of the interval."""
CONFIDENCE = 0.95
BOOTSTRAP_SEED = 20
"""Fixed, so that equal measurements give equal intervals."""

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RatioEstimate:
    """A ratio with its bootstrap interval."""

    value: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], *, confidence: float = CONFIDENCE
) -> RatioEstimate:
    """Median over pairs of ``numerator / denominator``, with a percentile bootstrap interval.

    A pair is resampled as one, so that a disturbance of both halves cancels out. The interval is
    Efron's percentile interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    chapter 13).

    Raises ValueError for no pair, unequal numbers, or a denominator that is not positive.
    """
    above, below = _pairs(numerators, denominators)
    return _estimate(np.median, (above / below,), confidence)


def ratio_of_totals(numerators: Sequence[float], denominators: Sequence[float]) -> RatioEstimate:
    """``Σ numerators / Σ denominators`` with the same interval.

    For the times of two runs over the same batches: the interval says how much the ratio depends
    on which batches were drawn. Raises ValueError as `paired_ratio` does.
    """

    def of_totals(above: _Floats, below: _Floats, axis: int) -> Any:
        return above.sum(axis=axis) / below.sum(axis=axis)

    return _estimate(of_totals, _pairs(numerators, denominators))


def difference_of_ratios(
    first: tuple[Sequence[float], Sequence[float]], second: tuple[Sequence[float], Sequence[float]]
) -> RatioEstimate:
    """`ratio_of_totals` of the first minus that of the second, with the same interval.

    Each has numerators and denominators; all four belong to the same pairs. Raises ValueError as
    `paired_ratio` does.
    """

    def of_totals(*samples: _Floats, axis: int) -> Any:
        above, below, above_2, below_2 = (sample.sum(axis=axis) for sample in samples)
        return above / below - above_2 / below_2

    return _estimate(of_totals, (*_pairs(*first), *_pairs(*second)))


def _pairs(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[_Floats, _Floats]:
    above, below = (np.asarray(side, dtype=np.float64) for side in (numerators, denominators))
    if len(above) != len(below) or not len(above):
        raise ValueError(
            f"pairs need equally many measurements of both sides, at least 1, but there are "
            f"{len(above)} and {len(below)}"
        )
    if not (below > 0).all():
        raise ValueError(f"denominators must be positive but the least is {below.min()}")
    return above, below


def _estimate(
    statistic: Callable[..., Any], samples: tuple[_Floats, ...], confidence: float = CONFIDENCE
) -> RatioEstimate:
    value = low = high = float(statistic(*samples, axis=0))
    num_pairs = len(samples[0])
    if num_pairs > 1:  # scipy refuses to resample a single pair
        low, high = stats.bootstrap(
            samples,
            statistic,
            paired=True,
            n_resamples=NUM_RESAMPLES,
            confidence_level=confidence,
            method="percentile",
            random_state=np.random.default_rng(BOOTSTRAP_SEED),
        ).confidence_interval
    return RatioEstimate(value, float(low), float(high), num_pairs)
