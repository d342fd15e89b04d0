"""Constants that are assumed, with the ends between which they may be.

A field of a dataclass is assumed if its type is ``Annotated`` with an `Assumed`. All of them
together are moved to a **corner**: where pools gain least, or most.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_type_hints


class Corner(Enum):
    """Which end every assumed constant takes.

    A constant's ends are where most pools gain least and most. A single pool may gain more in the
    low corner than in the high one, or most between them: what it gains is a range from the least
    to the most of both corners and the expected value.
    """

    LOW = "low"
    """Most pools gain least."""
    HIGH = "high"
    """Most pools gain most."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """The ends of a constant, as factors of its value."""

    low: float
    """In the low corner."""
    high: float
    """In the high corner."""
    reason: str
    """Why the constant cannot be beyond either end, with sources."""
    most: float = float("inf")
    """What the constant itself never exceeds."""

    def value(self, constant: float, corner: Corner) -> float:
        """The constant in a corner."""
        return min(self.most, constant * (self.low if corner is Corner.LOW else self.high))


def at_corner[C](constants: C, corner: Corner) -> C:
    """The same dataclass with its own assumed fields in a corner; those that are None remain."""
    hints: dict[str, Any] = get_type_hints(type(constants), include_extras=True)
    values = {
        name: assumed.value(getattr(constants, name), corner)
        for name, hint in hints.items()
        for assumed in getattr(hint, "__metadata__", ())
        if isinstance(assumed, Assumed) and getattr(constants, name) is not None
    }
    changed: Any = constants
    moved: C = replace(changed, **values)
    return moved
