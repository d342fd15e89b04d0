"""From measurements to a cost profile, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.hydraulis.cost_model.fit import Sample, fit_coefficients
from megatron.hydraulis.cost_model.profile import (
    ProfileCostModel,
    ProfiledModel,
    ProfiledScheme,
    ProfiledStrategy,
)
from megatron.hydraulis.profiler.measurements import MeasuredPoint, MeasuredStrategy
from megatron.hydraulis.strategy import Scheme
from megatron.hydraulis.terminal import figures_table, table_text

_WIDTH = 100


def profile_of(
    schemes: Mapping[Scheme, Sequence[MeasuredPoint]],
    strategies: Sequence[MeasuredStrategy],
    *,
    model: ProfiledModel,
    device: str,
    source: str,
    date: str,
    setup: Mapping[str, Any],
) -> ProfileCostModel:
    """The cost profile of measured points.

    ``max_tokens`` of a scheme is the largest size that ran in every packing, and 0 where there is
    none. A scheme is skipped if no point of it fits, since there is nothing to fit to.

    setup: versions and settings, recorded in the profile.

    Raises ConfigurationError when no scheme is left.
    """
    window = model.shape.window
    rows: list[ProfiledScheme] = []
    notes: dict[str, Any] = {}
    for scheme, points in schemes.items():
        fitting = [point for point in points if point.fits]
        if not fitting:
            notes[str(scheme)] = {"fits": False, "why_not": points[0].why_not if points else ""}
            continue
        samples = [Sample.of(p.point.lengths, p.time_ms, window=window) for p in fitting]
        fit = fit_coefficients(samples)
        forward_share = statistics.median(p.forward_ms / p.time_ms for p in fitting)
        sizes = {point.point.num_tokens for point in fitting}
        refused = {point.point.num_tokens for point in points if not point.fits}
        rows.append(
            ProfiledScheme(
                scheme=scheme,
                coefficients=replace(fit.coefficients, window=window, forward_share=forward_share),
                max_tokens=scheme.rounded_down(max(sizes - refused, default=0)),
            )
        )
        slowest = [point for point in fitting if point.point.num_tokens == max(sizes)]
        notes[str(scheme)] = fit.to_json() | {
            "num_points_that_do_not_fit": len(points) - len(fitting),
            "peak_bytes": max(point.peak_bytes for point in slowest),
            "stage_ms": list(slowest[-1].stage_ms),
            "forward_share": forward_share,
        }
    return ProfileCostModel(
        device=device,
        source=source,
        date=date,
        model=model,
        schemes=tuple(rows),
        strategies=tuple(
            ProfiledStrategy(
                name=s.name,
                replicas=s.replicas,
                regroup_ms=s.regroup_ms,
                optimizer_ms=s.optimizer_ms,
            )
            for s in strategies
        ),
        expert_load=max(
            (s.expert_load for s in strategies if s.expert_load is not None), default=None
        ),
        measurement={
            "setup": dict(setup),
            "schemes": notes,
            "regroup": {s.name: s.regroup.to_json() for s in strategies},
        },
    )


def profile_tables(profile: ProfileCostModel) -> str:
    """A row for each scheme with its fit, and one for each strategy with its overhead, as text."""
    schemes = figures_table(
        "Time of a micro-batch, a·Σs² + b·Σs + c",
        ("scheme",),
        ("a, ns/token²", "b, µs/token", "c, ms", "R²", "residual", "max tokens", "peak, GB"),
    )
    notes = profile.measurement.get("schemes", {})
    for row in profile.schemes:
        note, times = notes[str(row.scheme)], row.coefficients
        schemes.add_row(
            str(row.scheme),
            f"{times.a_ms_per_token2 * 1e6:.4g}",
            f"{times.b_ms_per_token * 1e3:.4g}",
            f"{times.c_ms:.4g}",
            f"{note['r_squared']:.4f}",
            f"{note['median_residual']:.1%} ({note['worst_residual']:.1%})",
            f"{row.max_tokens:,}",
            f"{note['peak_bytes'] / 1e9:.2f}",
        )
    for scheme, note in notes.items():
        if not note.get("fits", True):
            schemes.add_row(scheme, "–", "–", "–", "–", "–", "0", note["why_not"])
    strategies = figures_table(
        "Overhead of an iteration",
        ("strategy",),
        ("regroup, ms", "optimizer, ms", "gather, GB/s", "scatter, GB/s"),
    )
    speeds = profile.measurement.get("regroup", {})
    for strategy in profile.strategies:
        speed = speeds[strategy.name]
        strategies.add_row(
            strategy.name,
            f"{strategy.regroup_ms:.2f}",
            f"{strategy.optimizer_ms:.2f}",
            _gb_per_s(speed["gather_bytes_per_s"]),
            _gb_per_s(speed["scatter_bytes_per_s"]),
        )
    text = table_text(schemes, _WIDTH) + "residual: median (worst) of |predicted/measured - 1|\n"
    return text + table_text(strategies, _WIDTH) if profile.strategies else text


def _gb_per_s(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3f}"
