"""What an emulated cluster measured, as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.paired_statistics import BOOTSTRAP_SEED, CONFIDENCE, NUM_RESAMPLES, RatioEstimate

PREDICTION_GOAL = 0.05
"""Largest relative difference between predicted and measured time of an iteration."""


@dataclass(frozen=True)
class Iteration:
    """One iteration of one side."""

    strategy: str
    predicted_s: float
    measured_s: float
    """Of the slowest rank."""
    cpu_s: float
    """Of all ranks."""
    num_operations: int
    """Forwards and backwards of micro-batches, on all ranks."""
    num_overruns: int
    """Those whose tiny tensors took longer than the modelled time."""
    overrun_s: float

    @property
    def measured_over_predicted(self) -> float:
        """1 where the prediction is exact."""
        return self.measured_s / self.predicted_s


@dataclass(frozen=True)
class SideRun:
    """All iterations of one side; iteration i of every side trains the same batch."""

    name: str
    what: str
    """In words: strategies and packing."""
    iterations: tuple[Iteration, ...]

    @property
    def measured_s(self) -> list[float]:
        """Of every iteration."""
        return [iteration.measured_s for iteration in self.iterations]

    @property
    def predicted_s(self) -> list[float]:
        """Of every iteration."""
        return [iteration.predicted_s for iteration in self.iterations]

    @property
    def prediction(self) -> RatioEstimate:
        """Measured over predicted time of the whole run."""
        return ratio_of_totals(self.measured_s, self.predicted_s)

    @property
    def worst_prediction(self) -> float:
        """Largest relative difference of an iteration."""
        return max(abs(i.measured_over_predicted - 1.0) for i in self.iterations)

    @property
    def num_well_predicted(self) -> int:
        """Iterations that keep to the goal."""
        return sum(abs(i.measured_over_predicted - 1.0) <= PREDICTION_GOAL for i in self.iterations)

    @property
    def num_overruns(self) -> int:
        """Operations that took longer than modelled."""
        return sum(i.num_overruns for i in self.iterations)

    @property
    def num_operations(self) -> int:
        """All operations."""
        return sum(i.num_operations for i in self.iterations)

    def to_json(self) -> dict[str, Any]:
        """Summary and every iteration."""
        estimate = self.prediction
        return {
            "name": self.name,
            "what": self.what,
            "mean_predicted_s": math.fsum(self.predicted_s) / len(self.iterations),
            "mean_measured_s": math.fsum(self.measured_s) / len(self.iterations),
            "measured_over_predicted": [estimate.median, estimate.low, estimate.high],
            "iterations": [
                {
                    "strategy": i.strategy,
                    "predicted_s": i.predicted_s,
                    "measured_s": i.measured_s,
                    "cpu_s": i.cpu_s,
                    "num_operations": i.num_operations,
                    "num_overruns": i.num_overruns,
                    "overrun_s": i.overrun_s,
                }
                for i in self.iterations
            ],
        }


def ratio_of_totals(numerators: Sequence[float], denominators: Sequence[float]) -> RatioEstimate:
    """``Σ numerators / Σ denominators`` with a percentile bootstrap interval over the pairs.

    The ratio of the times of two runs over the same batches. Its interval says how much it depends
    on which batches were drawn. The estimate's ``median`` is the ratio itself.

    Raises ValueError for no pair, unequal numbers, or a denominator that is not positive.
    """
    if len(numerators) != len(denominators) or not numerators or min(denominators) <= 0.0:
        raise ValueError(
            f"pairs need equally many measurements of both sides, at least 1, and positive "
            f"denominators, but there are {len(numerators)} and {len(denominators)}"
        )
    above, below = np.asarray(numerators), np.asarray(denominators)
    rng = np.random.default_rng(BOOTSTRAP_SEED)
    drawn = rng.integers(0, len(above), size=(NUM_RESAMPLES, len(above)))
    ratios = above[drawn].sum(axis=1) / below[drawn].sum(axis=1)
    tail = (1.0 - CONFIDENCE) / 2.0
    low, high = np.quantile(ratios, [tail, 1.0 - tail])
    return RatioEstimate(float(above.sum() / below.sum()), float(low), float(high), len(numerators))
