"""Numbers as a report words them."""

from __future__ import annotations

__all__ = ["count", "factor", "num_bytes", "percent", "seconds"]

NOTHING = "–"
_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB")
_BYTES_PER_UNIT = 1000.0
_MIN_SECONDS_AS_S = 1.0
_MIN_SHARE_WITHOUT_DECIMALS = 0.995


def seconds(value_s: float | None) -> str:
    """'2.15 s' or '430 ms'."""
    if value_s is None:
        return NOTHING
    if value_s >= _MIN_SECONDS_AS_S:
        return f"{value_s:,.2f} s"
    return f"{value_s * 1e3:,.0f} ms" if value_s >= 0.0995 else f"{value_s * 1e3:,.1f} ms"


def percent(share: float | None) -> str:
    """'4.2%'."""
    if share is None:
        return NOTHING
    return f"{share:.0%}" if share >= _MIN_SHARE_WITHOUT_DECIMALS else f"{share:.1%}"


def count(value: float | None) -> str:
    """'12,288'."""
    return NOTHING if value is None else f"{value:,.0f}"


def factor(value: float | None) -> str:
    """'2.5×'."""
    return NOTHING if value is None else f"{value:.3g}×"


def num_bytes(value: float | None) -> str:
    """'14.2 MB', in units of 1000."""
    if value is None:
        return NOTHING
    for unit in _BYTE_UNITS:
        if value < _BYTES_PER_UNIT or unit == _BYTE_UNITS[-1]:
            break
        value /= _BYTES_PER_UNIT
    return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
