"""Coefficients of the time model, fitted to measured times.

``t = a·Σs² + b·Σs + c`` with a, b, c ≥ 0: non-negative least squares (Lawson and Hanson, *Solving
Least Squares Problems*, ch. 23; ``scipy.optimize.nnls``) on relative errors. Each point has the
weight 1/t², so that small micro-batches, of which an iteration has many, count as much as large
ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.model_shape import AttentionWindow


@dataclass(frozen=True, slots=True)
class Sample:
    """A measured micro-batch. Raises ConfigurationError for numbers that are not positive."""

    sum_of_squares: float
    """Σ s_i², of which windows leave a part, in tokens²."""
    num_tokens: float
    """Σ s_i, or tokens of the row where padding counts."""
    time_ms: float
    """Forward and backward on the slowest stage."""

    def __post_init__(self) -> None:
        values = (self.sum_of_squares, self.num_tokens, self.time_ms)
        if not all(np.isfinite(values)) or min(values) <= 0.0:
            raise ConfigurationError(
                f"a measured micro-batch has positive and finite numbers but this one has "
                f"{self.num_tokens} tokens, Σs² = {self.sum_of_squares} and {self.time_ms} ms; "
                f"measure it again"
            )

    @classmethod
    def of(
        cls,
        lengths: Iterable[int],
        time_ms: float,
        row_tokens: int | None = None,
        window: AttentionWindow | None = None,
    ) -> Sample:
        """A micro-batch of sequences of these lengths, in tokens; row_tokens if its padding counts,
        the window of the model's layers."""
        lengths = tuple(lengths)
        num_tokens = sum(lengths) if row_tokens is None else row_tokens
        squares = sum(n * n if window is None else window.squared(n) for n in lengths)
        return cls(float(squares), float(num_tokens), time_ms)


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients and how well they describe the samples."""

    coefficients: Coefficients
    residuals: tuple[float, ...]
    """predicted/measured - 1 of each sample, in their order."""
    r_squared: float
    """Share of the variance of the measured times that is described; 1 is perfect. For times that
    are all equal, 1 if the fit meets them and 0 if not."""

    @property
    def median_residual(self) -> float:
        """Median of the absolute relative residuals."""
        return statistics.median(map(abs, self.residuals))

    @property
    def worst_residual(self) -> float:
        """Largest of the absolute relative residuals."""
        return max(map(abs, self.residuals))

    def to_json(self) -> dict[str, Any]:
        """What a profile's ``measurement`` says of the fit."""
        return {
            "num_points": len(self.residuals),
            "r_squared": self.r_squared,
            "median_residual": self.median_residual,
            "worst_residual": self.worst_residual,
        }


def fit_coefficients(samples: Sequence[Sample]) -> Fit:
    """The coefficients of least squared relative error.

    Raises ConfigurationError without a sample.
    """
    if not samples:
        raise ConfigurationError(
            "coefficients are fitted to measured micro-batches but there is none; measure at "
            "least one that fits in memory"
        )
    features = np.array([(s.sum_of_squares, s.num_tokens, 1.0) for s in samples])
    times_ms = np.array([s.time_ms for s in samples])
    rows = features / times_ms[:, None]
    # Columns get a mean of 1, because the coefficients differ by ten orders of magnitude.
    scales = rows.mean(axis=0)
    rows, wanted = rows / scales, np.ones(len(samples))
    # Not above: it takes half a second of every start, and few commands fit anything.
    from scipy.optimize import nnls

    solution, _ = nnls(rows, wanted)
    a, b, c = (solution / scales).tolist()
    predicted_ms = features @ (solution / scales)
    spread = float(((times_ms - times_ms.mean()) ** 2).sum())
    missed = float(((times_ms - predicted_ms) ** 2).sum())
    if spread > 0.0:
        r_squared = 1.0 - missed / spread
    else:
        r_squared = float(np.allclose(predicted_ms, times_ms))
    return Fit(
        Coefficients(a_ms_per_token2=a, b_ms_per_token=b, c_ms=c),
        tuple((predicted_ms / times_ms - 1.0).tolist()),
        r_squared,
    )
