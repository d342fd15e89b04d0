"""What the groups of a replica cost and hold that splits its width anew for every micro-batch.

A replica of width W (``cpW~``) runs **waves**: micro-batches whose W columns are cut into groups of
1, 2, 4, … columns, each with sequences of its own. Columns are counted, not ranks: a column is the
tp·pp ranks of one cp coordinate.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.hydraulis.cost_model.interface import Coefficients
from megatron.hydraulis.scheme import Scheme

__all__ = ["GroupCost", "WaveCosts"]


@dataclass(frozen=True, slots=True)
class GroupCost:
    """A group of so many columns; raises ValueError for a size that is no power of two."""

    size: int
    coefficients: Coefficients
    """Of the scheme with this cp, on one stage."""
    max_tokens: int
    """Most tokens of the group's row, padding included; 0 where not even the weights fit."""
    tp: int = 1
    """The row is padded to a multiple of tp·2·size where size > 1: see Scheme.row_tokens."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.size & (self.size - 1):
            raise ValueError(f"a group has 1, 2, 4, … columns, not {self.size}")

    @property
    def multiple(self) -> int:
        """What each sequence is padded to a multiple of inside the row."""
        return 2 * self.size if self.size > 1 else 1

    @property
    def room_tokens(self) -> int:
        """Most padded tokens of the sequences, so that the padded row keeps the limit."""
        quantum = Scheme(self.tp, self.size).token_quantum
        return self.max_tokens - self.max_tokens % quantum if self.size > 1 else self.max_tokens

    def padded(self, length: int) -> int:
        """Tokens that a sequence takes up in the row."""
        return -(-length // self.multiple) * self.multiple

    def time_ms(self, lengths: Iterable[int]) -> float:
        """Time of sequences of these lengths, on one stage."""
        return self.coefficients.time_ms(lengths)


@dataclass(frozen=True, slots=True)
class WaveCosts:
    """The groups that a replica's width may be cut into.

    Raises ValueError unless the sizes are 1, 2, 4, … up to the width.
    """

    groups: tuple[GroupCost, ...]
    """By rising size, the last one of the full width."""
    num_stages: int = 1
    most_doublings: int | None = None
    """How often a group's size may be doubled beyond what its longest sequence needs; None for
    as often as it helps."""

    def __post_init__(self) -> None:
        if [group.size for group in self.groups] != [2**i for i in range(len(self.groups))]:
            raise ValueError("the sizes of groups are 1, 2, 4, … up to the width")

    @property
    def usable(self) -> tuple[GroupCost, ...]:
        """The groups that hold anything."""
        return tuple(group for group in self.groups if group.room_tokens >= group.multiple)

    @property
    def width(self) -> int:
        """Columns of the replica."""
        return self.groups[-1].size

    @property
    def longest(self) -> int:
        """The longest sequence that some group holds."""
        return max(group.room_tokens - group.room_tokens % group.multiple for group in self.groups)

    @property
    def most_tokens(self) -> int:
        """No wave holds more tokens, whatever its groups."""
        return max(self.width // group.size * group.room_tokens for group in self.groups)

    @property
    def mean_coefficients(self) -> Coefficients:
        """Of a micro-batch that no wave with the same sequences is faster than.

        The time of a wave is at least the mean over its columns, and a sequence takes at least
        ``min_c (a_c·c·s² + b_c·c·s) / W`` of it; a group without sequences takes its c_c.
        """
        usable = self.usable or self.groups
        return Coefficients(
            a_ms_per_token2=min(g.size * g.coefficients.a_ms_per_token2 for g in usable)
            / self.width,
            b_ms_per_token=min(g.size * g.coefficients.b_ms_per_token for g in usable) / self.width,
            c_ms=min(group.coefficients.c_ms for group in usable),
        )

    def size_needed(self, length: int) -> int | None:
        """The least size whose group holds a sequence; None where none does."""
        for group in self.groups:
            if group.padded(length) <= group.room_tokens:
                return group.size
        return None

    def wave_time_ms(self, groups: Iterable[tuple[int, Sequence[int]]]) -> float:
        """Time of a wave on one stage; groups: size and lengths of each."""
        by_size = {group.size: group for group in self.groups}
        return max(by_size[size].time_ms(lengths) for size, lengths in groups)
