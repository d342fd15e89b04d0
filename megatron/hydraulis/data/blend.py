"""Blends: several datasets mixed by weight, as in Megatron's ``--data-path w1 p1 w2 p2``."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.errors import ConfigurationError

__all__ = ["Blend", "SequenceGroup", "largest_deficit"]


@dataclass(frozen=True)
class Blend:
    """Datasets and how often to draw from each.

    Raises:
        ConfigurationError: no dataset, or weights that are not one positive number a dataset.
    """

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    """Share of the *sequences* that each dataset gives, in any unit; None: in proportion to the
    datasets' numbers of sequences, so that an epoch visits every sequence once."""

    def __post_init__(self) -> None:
        if not self.prefixes:
            raise ConfigurationError("a blend needs at least one dataset but has 0; give a prefix")
        if self.weights is None:
            return
        if len(self.weights) != len(self.prefixes):
            raise ConfigurationError(
                f"a blend needs one weight a dataset but has {len(self.weights)} weights for "
                f"{len(self.prefixes)} datasets; write --data-path W1 PREFIX1 W2 PREFIX2"
            )
        for prefix, weight in zip(self.prefixes, self.weights, strict=True):
            if not (math.isfinite(weight) and weight > 0):
                raise ConfigurationError(
                    f"blend: weights are positive but that of '{prefix}' is {weight}; remove the "
                    f"dataset or give it a positive weight"
                )


@dataclass(frozen=True)
class SequenceGroup:
    """A run of sequence ids that are shuffled among themselves: one dataset of a corpus."""

    first_sequence: int
    num_sequences: int
    weight: float
    """Share of the draws, in any unit, the same for all groups. Whole numbers are counted exactly,
    fractions to float64's precision."""

    def __post_init__(self) -> None:
        if self.num_sequences < 1 or not self.weight > 0:
            raise ConfigurationError(
                f"a group needs sequences and a positive weight but has {self.num_sequences} "
                f"sequences and weight {self.weight}; leave it out"
            )


def largest_deficit(weights: Sequence[float], num_drawn: Sequence[int]) -> int:
    """The group that is furthest behind its share; of equals, the first.

    After every draw each group has been drawn more than ``share·total − 1`` times, so that the
    mix holds over any stretch, not just on average. Same rule as Megatron's ``BlendedDataset``
    (``build_blending_indices`` in megatron/core/datasets/helpers.cpp), multiplied by the sum of the
    weights, which keeps whole-number weights exact.
    """
    total_weight = sum(weights)
    total_drawn = max(1, sum(num_drawn))
    deficits = [
        weight * total_drawn - drawn * total_weight
        for weight, drawn in zip(weights, num_drawn, strict=True)
    ]
    return deficits.index(max(deficits))
