"""Python blocks of a Markdown file and the ``text`` blocks that claim to be their output."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCKS = re.compile(r"```python\n(?P<code>.*?)```\n\n```text\n(?P<output>.*?)```\n", re.DOTALL)


@dataclass(frozen=True)
class DocumentedOutput:
    """One block of code, what the file says it prints, and what it does print."""

    code: str
    documented: str
    printed: str


def documented_outputs(path: Path) -> list[DocumentedOutput]:
    """Runs the file's Python blocks that a text block follows, in order, in one namespace."""
    namespace: dict[str, Any] = {}
    found = []
    for match in _BLOCKS.finditer(path.read_text(encoding="utf-8")):
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(match["code"], str(path), "exec"), namespace)
        found.append(DocumentedOutput(match["code"], match["output"], output.getvalue()))
    return found
