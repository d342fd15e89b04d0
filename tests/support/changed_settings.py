"""Settings that no command line can give a test, such as a timeout of seconds."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megatron.hydraulis.flags.arguments import Resolved
from megatron.hydraulis.loop import entry

Program = Callable[[Sequence[str]], None]


def with_settings(program: Program, **values: Any) -> Program:
    """The program, in a forked process, with other values of upstream's arguments."""
    parse_arguments = entry.parse_arguments

    def parse(*args: Any, **kwargs: Any) -> Resolved:
        resolved = parse_arguments(*args, **kwargs)
        return replace(resolved, args=Namespace(**(vars(resolved.args) | values)))

    def run(argv: Sequence[str]) -> None:
        entry.parse_arguments = parse
        program(argv)

    return run
