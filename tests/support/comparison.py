"""Comparing whole tensors by name; a NaN or a missing tensor is never equal."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

Tensors = Mapping[str, np.ndarray]


def relative_errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """Largest error of each tensor, relative to the expected tensor's largest absolute value.

    Args:
        found: may have more rows than expected, those of a padded vocabulary, left out here.
        expected: the truth.

    Returns:
        The error by name; NaN where something found is not finite or was never filled in.
    """
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    errors, num_unused = {}, 0
    for name, truth in expected.items():
        largest = np.abs(truth).max()
        if ".experts." in name and not largest and not found[name].any():
            num_unused += 1  # no token chose this expert
            continue
        assert largest > 0, f"{name} is all zero: the comparison would prove nothing"
        errors[name] = float(np.abs(found[name][: truth.shape[0]] - truth).max() / largest)
    num_used = sum(".experts." in name for name in errors)
    assert num_unused <= num_used, f"{num_unused} tensors of experts are zero, {num_used} are not"
    return errors


def wrong_tensors(found: Tensors, expected: Tensors, tolerance: float) -> dict[str, float]:
    """The tensors whose relative error is not within the tolerance."""
    errors = relative_errors(found, expected)
    return {name: error for name, error in errors.items() if not error <= tolerance}


def assert_same(found: Tensors, expected: Tensors, tolerance: float, what: str = "") -> None:
    """Every tensor equals the expected one, relative to its largest absolute value."""
    wrong = wrong_tensors(found, expected, tolerance)
    assert not wrong, f"{what}: relative errors above {tolerance}: {wrong}"


def assert_close(
    found: Tensors, expected: Tensors, *, rtol: float, atol_of_max: float, what: str = ""
) -> None:
    """``|found - expected| <= rtol * |expected| + atol_of_max * max|expected|``, by element."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    for name, truth in expected.items():
        np.testing.assert_allclose(
            found[name][: truth.shape[0]],
            truth,
            rtol=rtol,
            atol=atol_of_max * float(np.abs(truth).max()),
            equal_nan=False,
            err_msg=f"{what} {name}",
        )


def share_of_tolerance(
    found: Tensors, expected: Tensors, *, rtol: float, atol_of_max: float
) -> float:
    """The largest error of an element over the one that `assert_close` allows; NaN stays NaN."""
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    shares = []
    for name, truth in expected.items():
        allowed = rtol * np.abs(truth) + atol_of_max * np.abs(truth).max()
        error = np.abs(found[name][: truth.shape[0]] - truth)
        shares.append(float((error / allowed).max()))
    return float(np.max(shares))
