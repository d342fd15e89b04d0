"""Errors of the times of kernels that cost_model/kernels.py predicts, against measured tables.

    python -m benchmarks.kernels --tables FOLDER [--fit SHARE]

FOLDER has gemm.csv, attention.csv and collectives.csv, or some of them, with a column device and
latency_ms. README.md names the columns. With --fit the constants are fitted to a random share of
the rows, printed, and judged by the other rows.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from benchmarks.command import make_parser, write_figures
from megatron.hydraulis.cost_model.device import DeviceConstants, Precision, described_device
from megatron.hydraulis.cost_model.kernels import FittedKernels
from megatron.hydraulis.terminal import figures_table, results_console

MS_PER_S = 1e3
LEAST_S = 1e-4
"""Shorter products and calls of attention are dominated by starts, and are not judged."""
LEAST_BYTES = 2**20
SHORT_RESIDUAL = 0.05
"""Relative errors above it count linearly in the fit: some rows of the tables are outliers."""
STEP = 1e-2
"""Of the derivatives, as tiles make the times of products piecewise constant."""
FIT_SEED = 0

Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class Kind:
    """One table: how a row is predicted, which rows count, and the goals for their errors."""

    table: str
    constants: str
    """Field of `FittedKernels`."""
    predicted_s: Callable[[FittedKernels, DeviceConstants, Row], float]
    counts: Callable[[Row], bool]
    goals: tuple[float, float]
    """Median and 90th percentile."""


def _product_s(kernels: FittedKernels, device: DeviceConstants, row: Row) -> float:
    m, n, k = (int(row[name]) for name in "mnk")
    return kernels.product_s(device.rates(Precision.BF16), m, n, k)


def _attention_s(kernels: FittedKernels, device: DeviceConstants, row: Row) -> float:
    """Of the calls that were measured, which write a cache."""
    names = "num_sequences", "sequence_tokens", "num_heads", "num_key_value_heads", "head_size"
    sequences, tokens, heads, groups, size = (int(row[name]) for name in names)
    rates, window = device.rates(Precision.BF16), int(row["window_tokens"])
    computed_s = kernels.attention_s(rates, sequences, tokens, heads, groups, size, window)
    return computed_s + kernels.cache_write_s(sequences * tokens, groups, size)


def _collective_s(kernels: FittedKernels, device: DeviceConstants, row: Row) -> float:
    num_ranks, num_bytes = int(row["num_ranks"]), int(row["message_bytes"])
    operation: Any = row["operation"]
    return kernels.collective_s(device.rates(Precision.BF16), operation, num_ranks, num_bytes)


def _is_long(row: Row) -> bool:
    return measured_s(row) > LEAST_S


KINDS = (
    Kind("gemm", "product", _product_s, _is_long, (0.08, 0.20)),
    Kind("attention", "attention", _attention_s, _is_long, (0.08, 0.20)),
    Kind(
        "collectives",
        "collective",
        _collective_s,
        lambda row: int(row["message_bytes"]) >= LEAST_BYTES,
        (0.10, 0.25),
    ),
)
WITHOUT_TABLES = {"h200": (0.12, 1.0)}
"""Goals of devices with the constants of another one."""


def measured_s(row: Row) -> float:
    return float(row["latency_ms"]) / MS_PER_S


def read_rows(folder: Path) -> Iterator[tuple[DeviceConstants, Kind, list[Row]]]:
    """The rows that count, by device and kind; a device without constants is left out."""
    for kind in KINDS:
        path = folder / f"{kind.table}.csv"
        if not path.exists():
            continue
        with path.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if kind.counts(row)]
        for name in sorted({row["device"] for row in rows}):
            device = described_device(name)
            if device is None or device.kernels is None:
                print(f"{kind.table}: no constants for {name}", file=sys.stderr)
                continue
            yield device, kind, [row for row in rows if row["device"] == name]


def fitted(device: DeviceConstants, kind: Kind, rows: Sequence[Row]) -> FittedKernels:
    """The kernels with constants of this kind by robust least squares; those of 0 stay."""
    kernels = device.kernels
    assert kernels is not None
    before = asdict(getattr(kernels, kind.constants))
    free = [name for name, value in before.items() if value and not isinstance(value, bool)]

    def trial(logarithms: Sequence[float]) -> FittedKernels:
        found = before | dict(zip(free, np.exp(logarithms).tolist(), strict=True))
        return replace(kernels, **{kind.constants: type(getattr(kernels, kind.constants))(**found)})

    def residuals(logarithms: Sequence[float]) -> list[float]:
        tried = trial(logarithms)
        return [np.log(kind.predicted_s(tried, device, row) / measured_s(row)) for row in rows]

    found = least_squares(
        residuals,
        np.log([before[n] for n in free]),
        loss="soft_l1",
        f_scale=SHORT_RESIDUAL,
        diff_step=STEP,
    )
    return trial(found.x)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict every row, print errors by device and kind."""
    parser = make_parser("kernels", "Errors of predicted times of kernels.")
    parser.add_argument("--tables", type=Path, required=True, help="folder of measured times")
    parser.add_argument("--fit", type=float, metavar="SHARE", help="fit to this share of the rows")
    options = parser.parse_args(argv)
    console = results_console()
    table = figures_table(
        "|predicted / measured - 1|",
        ("device", "kernels"),
        ("rows", "median", "90th percentile", "goals"),
    )
    figures, missed = [], []
    for device, kind, rows in read_rows(options.tables):
        kernels = device.kernels
        assert kernels is not None
        if options.fit is not None:
            random.Random(FIT_SEED).shuffle(rows)
            num_fitted = round(options.fit * len(rows))
            kernels = fitted(device, kind, rows[:num_fitted])
            rows = rows[num_fitted:] or rows
            console.print(f"{device.name}: {getattr(kernels, kind.constants)}", highlight=False)
        errors = [abs(kind.predicted_s(kernels, device, r) / measured_s(r) - 1.0) for r in rows]
        found = float(np.median(errors)), float(np.quantile(errors, 0.9))
        goals = WITHOUT_TABLES.get(device.name, kind.goals)
        what = f"{device.name} {kind.table}"
        figures.append({"name": what, "rows": len(rows), "median": found[0], "p90": found[1]})
        if any(error > goal for error, goal in zip(found, goals, strict=True)):
            missed.append(what)
        texts = (f"{value:.1%}" for value in found)
        goal_texts = " / ".join(f"{goal:.0%}" for goal in goals)
        table.add_row(device.name, kind.table, str(len(rows)), *texts, goal_texts)
    console.print(table)
    write_figures(console, options.json, figures)
    console.print(
        f"{len(figures) - len(missed)} of {len(figures)} within their goals"
        + (f"; missed: {', '.join(missed)}" if missed else "")
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
