"""Which micro-batches are measured: sizes from small to large, each packed in several ways."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.hydraulis.errors import ConfigurationError

__all__ = ["MANY_SHORT", "MIXTURE", "SAMPLED", "SINGLE_LONG", "GridPoint", "grid"]

SINGLE_LONG = "single long"
"""As few sequences as the longest length allows."""
MANY_SHORT = "many short"
MIXTURE = "mixture"
"""Half of the tokens long, half short."""
SAMPLED = "sampled"
"""Drawn from given lengths."""


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One micro-batch to measure."""

    packing: str
    lengths: tuple[int, ...]
    """Tokens of each sequence."""

    @property
    def num_tokens(self) -> int:
        """Σ s_i."""
        return sum(self.lengths)

    @property
    def sum_of_squares(self) -> int:
        """Σ s_i²."""
        return sum(length * length for length in self.lengths)


def grid(
    max_tokens: int,
    *,
    longest: int,
    short: int,
    num_sizes: int,
    sample_from: Sequence[int] = (),
    seed: int = 0,
) -> tuple[GridPoint, ...]:
    """The points of a scheme, by rising size; of one size the easiest on memory and time first.

    Sizes are max_tokens and its halves, num_sizes of them or as many as hold a short sequence.
    Lengths and sizes spread the three terms of the time model apart: Σs² between packings of one
    size, Σs and the constant between sizes.

    Args:
        max_tokens: of the largest micro-batch.
        longest: tokens of the longest sequence, ``--seq-length``.
        short: tokens of a short sequence.
        num_sizes: how many sizes.
        sample_from: lengths of a corpus in tokens; with some each size is also packed from them.
        seed: of that sample.

    Raises ConfigurationError for a number below 1 and a short sequence longer than max_tokens.
    """
    for what, value in (
        ("the most tokens", max_tokens),
        ("the longest sequence", longest),
        ("a short sequence", short),
        ("the number of sizes", num_sizes),
    ):
        if value < 1:
            raise ConfigurationError(
                f"grid of a profile: {what} must be at least 1 but is {value}; give more"
            )
    if short > min(max_tokens, longest):
        raise ConfigurationError(
            f"grid of a profile: a short sequence fits the smallest micro-batch but has {short} "
            f"tokens where a micro-batch has at most {max_tokens} and a sequence {longest}; lower "
            f"--short-tokens or raise --max-tokens"
        )
    sizes = [max_tokens >> halvings for halvings in range(num_sizes)]
    draw = random.Random(seed)
    points: dict[tuple[int, ...], GridPoint] = {}
    for size in sorted(size for size in sizes if size >= short):
        half = size // 2
        packings = [
            (MANY_SHORT, _pieces(size, short)),
            (MIXTURE, _pieces(half, longest) + _pieces(size - half, short)),
            (SINGLE_LONG, _pieces(size, longest)),
        ]
        if sample_from:
            packings.append((SAMPLED, _sampled(size, longest, sample_from, draw)))
        for packing, lengths in packings:
            ordered = tuple(sorted(lengths, reverse=True))
            points.setdefault(ordered, GridPoint(packing, ordered))
    return tuple(sorted(points.values(), key=lambda p: (p.num_tokens, p.sum_of_squares)))


def _pieces(num_tokens: int, length: int) -> list[int]:
    """Sequences of a length, and what is left as a last one."""
    num_whole, rest = divmod(num_tokens, length)
    return [length] * num_whole + ([rest] if rest else [])


def _sampled(
    num_tokens: int, longest: int, sample_from: Sequence[int], draw: random.Random
) -> list[int]:
    """Random lengths that fill a micro-batch; the last one is cut to fit."""
    lengths: list[int] = []
    left = num_tokens
    while left:
        lengths.append(min(draw.choice(sample_from), longest, left))
        left -= lengths[-1]
    return lengths
