"""Constants that are assumed, with the ends between which they may be.

A field of a dataclass is assumed if its type is ``Annotated`` with an `Assumed`. All of them
together are moved to a **corner**: where a pool gains least, or most.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, get_type_hints


class Corner(Enum):
    """Which end every assumed constant takes."""

    LOW = "low"
    """A pool gains least."""
    HIGH = "high"
    """A pool gains most."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """The ends of a constant, as factors of its value."""

    low: float
    """Where a pool gains least."""
    high: float
    """Where a pool gains most."""
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
