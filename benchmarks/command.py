"""The command lines of the benchmarks share parser, console, progress, tables and JSON output."""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TextColumn

from megatron.hydraulis.terminal import ProgressBars, TimeLeftColumn


def make_parser(module: str, description: str) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.MODULE``, with ``--json FILE``; help shows defaults."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    return parser


def use_cpu() -> None:
    """Run torch and Megatron on the CPU, one thread a rank, without their warnings."""
    import torch

    from hydraulis_patches.cpu_backend import apply_cpu_backend

    # Every rank would print deprecations and experimental modules of upstream and torch.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    apply_cpu_backend()


def torchrun(num_ranks: int, *words: str) -> None:
    """Run a program on every rank; its output goes to standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_ranks), *words]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    subprocess.run(command, check=True, stdout=sys.stderr, env=environment)


def counted_progress(unit: str) -> Progress:
    """Bars that count ``unit``, with the remaining time."""
    count = TextColumn(f"{{task.completed:.0f}} of {{task.total:.0f}} {unit}")
    return ProgressBars(count, TimeLeftColumn())


def write_figures(console: Console, path: Path | None, figures: Any) -> None:
    """Write the file of ``--json``, if it is given."""
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {path}")


def environment() -> dict[str, Any]:
    """Date, machine, its load and the version of torch, for the file of ``--json``."""
    import torch

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "num_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
    }


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 but is {value}")
    return value
