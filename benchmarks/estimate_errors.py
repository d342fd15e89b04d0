"""The analytic cost model beside a measured cost profile: Llama 32B on 64 A800.

    python -m benchmarks.estimate_errors [--cost-profile FILE]

For every scheme of the profile the ratio of estimate to measurement: of a, b and c, and of the time
of a micro-batch of 4,096 tokens, as one sequence and as eight.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.command import figures_table, wide_console
from megatron.hydraulis.cost_model import AnalyticCostModel, ModelShape, ProfileCostModel
from megatron.hydraulis.cost_model.device import device_constants

DEFAULT_PROFILE = Path("examples/cost_profile_llama32b_a800.json")
NUM_RANKS, RANKS_PER_NODE = 64, 8
NUM_TOKENS = 4096
LLAMA_32B = ModelShape(
    num_layers=60,
    hidden_size=6656,
    ffn_hidden_size=17920,
    num_attention_heads=64,
    num_query_groups=64,
    kv_channels=104,
    vocab_size=30592,
    gated_mlp=True,
    tied_embeddings=False,
)
COLUMNS = ("a", "b", "c", "one sequence", "eight sequences")


def ratios(profile: ProfileCostModel) -> dict[str, tuple[float | None, ...]]:
    """Estimate over measurement by scheme, in the order of COLUMNS; None where 0 was measured."""
    device = device_constants("a800-80g")
    model = AnalyticCostModel(
        shape=LLAMA_32B, device=device, cluster=device.cluster(NUM_RANKS, RANKS_PER_NODE)
    )
    found: dict[str, tuple[float | None, ...]] = {}
    for row in profile.schemes:
        estimate, measured = model.coefficients(row.scheme), row.coefficients
        pairs = (
            (estimate.a_ms_per_token2, measured.a_ms_per_token2),
            (estimate.b_ms_per_token, measured.b_ms_per_token),
            (estimate.c_ms, measured.c_ms),
            *(
                (estimate.time_ms(lengths), measured.time_ms(lengths))
                for lengths in ([NUM_TOKENS], [NUM_TOKENS // 8] * 8)
            ),
        )
        found[str(row.scheme)] = tuple(e / m if m else None for e, m in pairs)
    return found


def median_error_percent(values: Sequence[float | None]) -> float:
    """Median distance from 1 of the ratios that there are."""
    return 100.0 * median(abs(value - 1.0) for value in values if value is not None)


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimate_errors")
    parser.add_argument("--cost-profile", default=str(DEFAULT_PROFILE), metavar="FILE")
    found = ratios(ProfileCostModel.read(parser.parse_args(argv).cost_profile))
    table = figures_table("estimate over measurement", ("scheme",), COLUMNS)
    for scheme, row in found.items():
        table.add_row(scheme, *("–" if value is None else f"{value:.2f}" for value in row))
    columns = zip(*found.values(), strict=True)
    table.add_section()
    table.add_row("median error %", *(f"{median_error_percent(column):.1f}" for column in columns))
    wide_console().print(table)


if __name__ == "__main__":
    main()
