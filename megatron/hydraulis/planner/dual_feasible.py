"""What indivisible things leave unused, as a number that can be added up.

Dual feasible functions (Fekete and Schepers, Mathematical Programming 91, 2001): with x the share
of a room that a thing takes and ``u_m(x) = x`` where ``(m+1)·x`` is whole, else
``⌊(m+1)·x⌋ / m``, things that fit one room together have ``Σ u_m(x) <= 1``.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["dual_feasible"]

# A rounding error must not make a thing larger than the fraction that it is.
_SHARE_SAFETY = 1e-9


def dual_feasible(shares: NDArray[np.float64], m: int) -> NDArray[np.float64]:
    """u_m of shares in [0, 1]; a share within rounding of a whole fraction counts as it."""
    scaled = (m + 1) * shares
    whole = np.rint(scaled)
    is_whole = np.abs(scaled - whole) <= _SHARE_SAFETY * (m + 1)
    return np.where(is_whole, whole / (m + 1), np.floor(scaled) / m)
