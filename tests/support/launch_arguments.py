"""Argument sets of others' launch scripts, in ``tests/data/launch_arguments``."""

from __future__ import annotations

import shlex
from pathlib import Path

SETS = {
    path.stem: path
    for path in sorted((Path(__file__).parents[1] / "data" / "launch_arguments").glob("*.txt"))
}
"""Name -> file with an option a line."""


def header_of(name: str) -> list[str]:
    """The lines that say where a set is from and what it lacks."""
    return [line for line in SETS[name].read_text().splitlines() if line.startswith("#")]


def options_of(name: str) -> list[list[str]]:
    """Each option with its values."""
    lines = SETS[name].read_text().splitlines()
    return [shlex.split(line) for line in lines if line and not line.startswith("#")]
