"""What `profile` prints at its end."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from megatron.hydraulis.cost_model.profile import ProfileCostModel

__all__ = ["profile_tables"]

_WIDTH = 100


def profile_tables(profile: ProfileCostModel) -> str:
    """A row a scheme with its fit, a row a strategy with what it takes beside its makespan."""
    schemes = Table(title="Time of a micro-batch, a·Σs² + b·Σs + c", title_justify="left")
    for name in ("scheme", "a, ns/token²", "b, µs/token", "c, ms", "R²", "residual", "max tokens"):
        schemes.add_column(name, justify="left" if name == "scheme" else "right")
    schemes.add_column("peak, GB", justify="right")
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
    strategies = Table(title="Beside the makespan of an iteration", title_justify="left")
    for name in ("strategy", "regroup, ms", "optimizer, ms", "gather, GB/s", "scatter, GB/s"):
        strategies.add_column(name, justify="left" if name == "strategy" else "right")
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
    text = io.StringIO()
    console = Console(file=text, width=_WIDTH, force_terminal=False, highlight=False)
    console.print(schemes)
    console.print("residual: median (worst) of |predicted/measured - 1|")
    if profile.strategies:
        console.print(strategies)
    return text.getvalue()


def _gb_per_s(bytes_per_s: float | None) -> str:
    return "–" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3f}"
