"""How commands show progress and results: bars, tables that fit the terminal, or JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

__all__ = ["print_json", "progress_bars", "results_console"]

_WIDTH_WITHOUT_TERMINAL = 100


def results_console(width: int = _WIDTH_WITHOUT_TERMINAL) -> Console:
    """A console on stdout, as wide as the terminal, or ``width`` columns if it is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def progress_bars(*columns: ProgressColumn, is_shown: bool = True) -> Progress:
    """Bars on stderr, so that stdout has only the results; disabled if stderr is no terminal.

    columns: after the description and the bar.
    """
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        console=console,
        transient=True,
        disable=not (is_shown and console.is_terminal),
    )


def print_json(content: Any) -> None:
    """Prints content as indented JSON with a final newline."""
    json.dump(content, sys.stdout, indent=1)
    print()
