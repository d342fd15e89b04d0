"""What the benchmarks' command lines share: console, progress, the CPU backend, checked numbers."""

from __future__ import annotations

import argparse
import logging
import warnings

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

WIDTH = 100
"""Columns of the output where it is no terminal."""


def wide_console(width: int = WIDTH) -> Console:
    """A console as wide as its terminal; of ``width`` columns where the output goes elsewhere."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def import_on_cpu(console: Console) -> None:
    """Import torch and Megatron for ranks of one thread on the CPU, without their warnings.

    Upstream's modules import one another by value: what imports them comes after this.
    """
    # Of upstream and torch, from every rank: deprecations, experimental modules.
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with console.status("importing torch and Megatron"):
        import torch

        from hydraulis_patches.cpu_backend import apply_cpu_backend

        torch.set_num_threads(1)
        apply_cpu_backend()


def counted_progress(console: Console, unit: str) -> Progress:
    """Bars that count ``unit``, with the time that remains."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
        console=console,
    )


def positive(text: str) -> int:
    """A whole number from 1 on; argparse tells of any other."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1 but is {value}")
    return value
