"""The analytic cost model against the measured cost profile of Llama 32B on 64 A800.

    python -m benchmarks.estimate_errors [--cost-profile FILE]

For every scheme of the profile: estimate over measurement of a, b and c, and of the time of a
micro-batch of 4,096 tokens, as one sequence and as eight.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

from benchmarks.inputs import COST_PROFILE, MODEL
from megatron.hydraulis.cost_model import AnalyticCostModel, ModelShape, ProfileCostModel
from megatron.hydraulis.cost_model.device import device_constants
from megatron.hydraulis.terminal import figures_table, results_console

NUM_RANKS, RANKS_PER_NODE = 64, 8
NUM_TOKENS = 4096
COLUMNS = ("a", "b", "c", "one sequence", "eight sequences")


def ratios(profile: ProfileCostModel) -> dict[str, tuple[float | None, ...]]:
    """Estimate over measurement by scheme, in the order of COLUMNS; None if 0 was measured."""
    device = device_constants("a800-80g")
    model = AnalyticCostModel(
        shape=ModelShape.read(MODEL),
        device=device,
        cluster=device.cluster(NUM_RANKS, RANKS_PER_NODE),
    )
    found: dict[str, tuple[float | None, ...]] = {}
    for row in profile.schemes:
        if row.is_assumed:
            continue
        estimated, measured = (
            (
                coefficients.a_ms_per_token2,
                coefficients.b_ms_per_token,
                coefficients.c_ms,
                coefficients.time_ms([NUM_TOKENS]),
                coefficients.time_ms([NUM_TOKENS // 8] * 8),
            )
            for coefficients in (model.coefficients(row.scheme), row.coefficients)
        )
        found[str(row.scheme)] = tuple(
            e / m if m else None for e, m in zip(estimated, measured, strict=True)
        )
    return found


def median_error_percent(values: Sequence[float | None]) -> float:
    """Median distance of the ratios from 1, without None."""
    return 100.0 * median(abs(value - 1.0) for value in values if value is not None)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimate_errors")
    parser.add_argument("--cost-profile", default=COST_PROFILE, metavar="FILE")
    found = ratios(ProfileCostModel.read(parser.parse_args(argv).cost_profile))
    table = figures_table("estimate over measurement", ("scheme",), COLUMNS)
    for scheme, row in found.items():
        table.add_row(scheme, *("–" if value is None else f"{value:.2f}" for value in row))
    columns = zip(*found.values(), strict=True)
    table.add_section()
    table.add_row("median error %", *(f"{median_error_percent(column):.1f}" for column in columns))
    results_console().print(table)


if __name__ == "__main__":
    main()
