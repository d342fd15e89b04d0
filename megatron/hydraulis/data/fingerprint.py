"""What a checkpoint records of the training data, by which a run notices other data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DatasetFingerprint:
    """One dataset of a corpus."""

    prefix: str
    """Where it was; the same data may lie elsewhere."""
    share: float
    """Share of the draws, at most 1."""
    num_sequences: int
    num_tokens: int
    """The sum of their lengths."""
    lengths: str
    """SHA-256 of the lengths of its sequences, of large datasets of a sample."""
    tokens: str
    """SHA-256 of its tokens, of large datasets of a sample."""
    weights: str | None = None
    """SHA-256 of their weights, of large datasets of a sample; None without weights."""

    def has_share_of(self, other: DatasetFingerprint) -> bool:
        """Whether both have the same share: weights 3 and 7 are weights 0.3 and 0.7."""
        return math.isclose(self.share, other.share, rel_tol=1e-9)


def data_differences(
    saved: Sequence[DatasetFingerprint], here: Sequence[DatasetFingerprint]
) -> list[str]:
    """In what the datasets of a checkpoint and of this run differ; empty if they are equal."""
    if len(saved) != len(here):
        return [f"{len(saved)} datasets there and {len(here)} here"]
    differences = []
    for there, now in zip(saved, here, strict=True):
        dataset = f"dataset '{now.prefix}'"
        if not there.has_share_of(now):
            differences.append(
                f"{dataset} has a share of {there.share:.6g} there and {now.share:.6g} here"
            )
        if (there.num_sequences, there.num_tokens) != (now.num_sequences, now.num_tokens):
            differences.append(
                f"{dataset} has {there.num_sequences:,} sequences of {there.num_tokens:,} tokens "
                f"there and {now.num_sequences:,} of {now.num_tokens:,} here"
            )
        elif there.lengths != now.lengths:
            differences.append(f"the sequences of {dataset} have other lengths")
        elif there.tokens != now.tokens:
            differences.append(f"{dataset} has other tokens")
        if there.weights != now.weights:
            differences.append(f"{dataset} has other weights of tokens")
    return differences


def keeps_place(saved: Sequence[DatasetFingerprint], here: Sequence[DatasetFingerprint]) -> bool:
    """Whether the place in the saved data is one in these: datasets of equal sizes and shares."""
    return len(saved) == len(here) and all(
        there.num_sequences == now.num_sequences and there.has_share_of(now)
        for there, now in zip(saved, here, strict=True)
    )
