"""How commands show their results: tables that fit the terminal, or JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

__all__ = ["print_json", "results_console"]

_WIDTH_WITHOUT_TERMINAL = 100


def results_console(width: int = _WIDTH_WITHOUT_TERMINAL) -> Console:
    """A console on stdout, as wide as the terminal, or ``width`` columns if it is none."""
    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_json(content: Any) -> None:
    """Prints content as indented JSON with a final newline."""
    json.dump(content, sys.stdout, indent=1)
    print()
