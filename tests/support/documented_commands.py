"""Commands that Markdown files show, as far as a test can tell whether they could be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_PROGRAMS = (
    r"(?:python|\.venv/bin/python|(?:\.venv/bin/)?hydraulis|bash|torchrun|sbatch|make|docker|pip)"
)
_COMMAND = re.compile(rf"(?:\w+=\S* +)*{_PROGRAMS} +\S")
_FENCE = re.compile(r"```(?P<language>\w*)")
_SPAN = re.compile(r"`([^`]+)`")
_OPTIONAL = re.compile(r"\[(--[^\]]*)\]")


@dataclass(frozen=True)
class DocumentedCommand:
    """One command, in a block of its own or inside a sentence."""

    where: str
    """File and line."""
    text: str
    in_block: bool

    @cached_property
    def words(self) -> tuple[str, ...]:
        """As a shell takes it apart; what may be left out is there."""
        return tuple(shlex.split(_OPTIONAL.sub(r"\1", self.text), comments=True))

    @property
    def program_arguments(self) -> tuple[str, ...] | None:
        """What follows ``hydraulis`` or ``-m megatron.hydraulis``; None for other commands."""
        for index, word in enumerate(self.words):
            is_program = "=" not in word and (index == 0 or self.words[index - 1] == "--no-python")
            if word == "megatron.hydraulis" or (is_program and word.endswith("hydraulis")):
                return self.words[index + 1 :]
        return None

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is left to the reader."""
        return not any(
            word in ("…", "--help") or word.isupper() or word.startswith("$") for word in self.words
        ) and not _OPTIONAL.search(self.text)


def _paragraphs(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text): kind is the language of a fence, ``indented`` or ``prose``."""
    lines = path.read_text(encoding="utf-8").splitlines()
    kind, start, held = "prose", 1, list[str]()
    for number, line in enumerate([*lines, ""], start=1):
        fence = _FENCE.match(line)
        if fence:
            yield start, kind, "\n".join(held)
            is_end = kind not in ("prose", "indented")
            kind, start, held = ("prose" if is_end else fence["language"] or "text"), number + 1, []
            continue
        if kind in ("prose", "indented"):
            now = "indented" if line.startswith("    ") else "prose"
            if now != kind or not line.strip():
                yield start, kind, "\n".join(held)
                kind, start, held = now, number, []
        held.append(line)
    yield start, kind, "\n".join(held)


def documented_commands(path: Path, root: Path) -> list[DocumentedCommand]:
    """Every command that a file shows."""
    found = []
    for start, kind, text in _paragraphs(path):
        where = f"{path.relative_to(root)}:{start}"
        if kind == "prose":
            joined = " ".join(line.strip() for line in text.splitlines())
            found += [
                DocumentedCommand(where, span, in_block=False)
                for span in _SPAN.findall(joined)
                if _COMMAND.match(span)
            ]
        elif kind in ("bash", "console", "indented"):
            for line in re.sub(r"\\\n\s*", "", text).splitlines():
                found += [
                    DocumentedCommand(where, command.strip(), in_block=True)
                    for command in line.strip().removeprefix("$ ").split(" && ")
                    if _COMMAND.match(command.strip())
                ]
    return found


def documented_options(path: Path) -> set[str]:
    """Options that stand by themselves inside sentences and tables, without their values."""
    return {
        option
        for _, kind, text in _paragraphs(path)
        if kind == "prose"
        for span in _SPAN.findall(" ".join(text.split()))
        for option in re.findall(r"(?:^| )(--[a-z][\w-]*)", span)
        if not _COMMAND.match(span) and "…" not in span
    }
