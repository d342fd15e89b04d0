"""From measurements to a cost profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.hydraulis.cost_model.profile import (
    ProfileCostModel,
    ProfiledScheme,
    ProfiledStrategy,
)
from megatron.hydraulis.profiler.fit import Fit, Sample, fit_coefficients
from megatron.hydraulis.profiler.measurements import MeasuredPoint, MeasuredStrategy
from megatron.hydraulis.strategy import Scheme

__all__ = ["fit_points", "profile_of"]


def fit_points(points: Sequence[MeasuredPoint]) -> Fit | None:
    """The fit of one scheme's points; None where none fits the memory."""
    samples = [Sample.of(p.point.lengths, p.time_ms) for p in points if p.fits]
    return fit_coefficients(samples) if samples else None


def profile_of(
    schemes: Mapping[Scheme, Sequence[MeasuredPoint]],
    strategies: Sequence[MeasuredStrategy],
    *,
    device: str,
    source: str,
    date: str,
    setup: Mapping[str, Any],
) -> ProfileCostModel:
    """The cost profile of what was measured.

    ``max_tokens`` of a scheme is the largest size that was run in every packing, and 0 where there
    is none. A scheme of which nothing fits is left out: there are no coefficients for it.

    setup: versions, settings; goes into the profile as it is.

    Raises ConfigurationError when no scheme is left.
    """
    rows: list[ProfiledScheme] = []
    notes: dict[str, Any] = {}
    for scheme, points in schemes.items():
        fit = fit_points(points)
        if fit is None:
            notes[str(scheme)] = {"fits": False, "why_not": points[0].why_not if points else ""}
            continue
        fitting = [point for point in points if point.fits]
        refused = {point.point.num_tokens for point in points if not point.fits}
        largest = max(point.point.num_tokens for point in fitting)
        whole = {point.point.num_tokens for point in fitting} - refused
        rows.append(
            ProfiledScheme(
                scheme=scheme,
                coefficients=fit.coefficients,
                max_tokens=scheme.rounded_down(max(whole, default=0)),
            )
        )
        slowest = [point for point in fitting if point.point.num_tokens == largest]
        notes[str(scheme)] = fit.to_json() | {
            "num_points_that_do_not_fit": len(points) - len(fitting),
            "peak_bytes": max(point.peak_bytes for point in slowest),
            "stage_ms": list(slowest[-1].stage_ms),
            "forward_share": slowest[-1].forward_ms / slowest[-1].time_ms,
        }
    return ProfileCostModel(
        device=device,
        source=source,
        date=date,
        schemes=tuple(rows),
        strategies=tuple(
            ProfiledStrategy(name=s.name, regroup_ms=s.regroup_ms, optimizer_ms=s.optimizer_ms)
            for s in strategies
        ),
        measurement={
            "setup": dict(setup),
            "schemes": notes,
            "regroup": {s.name: s.regroup.to_json() for s in strategies},
        },
    )
