"""Which iterations of a run are traced."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron.hydraulis.errors import ConfigurationError

__all__ = ["DEFAULT_NUM_TRACED", "TraceWindow"]

DEFAULT_NUM_TRACED = 20
"""Iterations traced unless others are asked for: enough to see a pattern, a few MB a rank."""


@dataclass(frozen=True, slots=True)
class TraceWindow:
    """The iterations from ``first`` to ``last``, both included."""

    first: int
    last: int

    def __post_init__(self) -> None:
        if not 1 <= self.first <= self.last:
            raise ConfigurationError(
                f"--trace-iterations are counted from 1 in ascending order but are "
                f"{self.first}..{self.last}; give for example 1..{DEFAULT_NUM_TRACED}"
            )

    @classmethod
    def parse(cls, text: str) -> TraceWindow:
        """'5..12', or '7' for one iteration. Raises ConfigurationError."""
        found = re.fullmatch(r"\s*(\d+)\s*(?:\.\.\s*(\d+)\s*)?", text)
        if found is None:
            raise ConfigurationError(
                f"--trace-iterations is FIRST..LAST but is '{text}'; give for example "
                f"1..{DEFAULT_NUM_TRACED}"
            )
        first = int(found[1])
        return cls(first, int(found[2] or first))

    @classmethod
    def starting_at(cls, iteration: int) -> TraceWindow:
        """The default: the first iterations of a run that starts, or goes on, with this one."""
        return cls(iteration, iteration + DEFAULT_NUM_TRACED - 1)

    def __contains__(self, iteration: int) -> bool:
        return self.first <= iteration <= self.last
