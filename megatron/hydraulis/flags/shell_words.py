"""Words of a launch script, in which characters stand for values that reading does not give, and
what a test of such words finds."""

from __future__ import annotations

import operator
import re
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_MOST_SHOWN = 60
"""Characters of a value that is shown."""
NONE = "none"
"""Stands for no value where values are listed."""
NUMBER = re.compile(r"-?(0|[1-9]\d*)")
"""Whole numbers, but not 010, which is 8 where bash calculates."""
# Tangut: letters, which Python prints as they are.
_FIRST_MARK, _LAST_MARK = 0x17000, 0x187F7
MARK = re.compile(f"[{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}]")
TO_SPLIT = {mark: mark + 1 for mark in range(_FIRST_MARK, _LAST_MARK, 2)}


@dataclass(frozen=True, slots=True)
class Unknown:
    """An expansion whose value reading does not give."""

    source: str
    """As a shell reads it: ``$NAME``, ``$(date)``."""
    name: str
    """The variable; empty for a command."""
    depth: int
    """How many shells, one within the other, have read the text that it stands in."""
    is_set_by_job: bool
    """Whether the script, Slurm or the shell gives it a value when the job runs."""
    where: str
    """The line that uses it, or that sets the variable."""


class Unknowns:
    """Those of a script. A character stands for each in a text, another one where it is unquoted,
    so that a shell would split its value."""

    def __init__(self) -> None:
        self._all: list[Unknown] = []

    def mark(self, unknown: Unknown) -> str:
        """The character for a quoted one."""
        if unknown not in self._all:
            self._all.append(unknown)
        return chr(_FIRST_MARK + 2 * self._all.index(unknown))

    def of(self, text: str) -> list[Unknown]:
        """Those in a text."""
        return [self._all[(ord(mark) - _FIRST_MARK) // 2] for mark in MARK.findall(text)]

    def shown(self, text: str) -> str:
        """The text as the script writes it."""
        return MARK.sub(lambda mark: self.of(mark[0])[0].source, text)

    def typed(self, word: str, depth: int) -> str:
        """A word as one types it into the shell of a depth, which expands its own unknowns."""
        assigned = re.match(r"[A-Za-z_]\w*=(?=.)", word)
        if assigned is not None:
            return assigned[0] + self.typed(word[assigned.end() :], depth)
        live = {mark for mark in MARK.findall(word) if self.of(mark)[0].depth == depth}
        if MARK.fullmatch(word) and (ord(word) - _FIRST_MARK) % 2:
            return self.shown(word) if live else word
        if not live:
            return shlex.quote(word)
        escaped = re.sub(r'([\\"$`])', r"\\\1", word)
        return '"' + "".join(self.shown(c) if c in live else c for c in escaped) + '"'


@dataclass(frozen=True, slots=True)
class Shell:
    """A command that hands a text to another shell, as in ``srun bash -c '…'``."""

    before: tuple[str, ...]
    """Its words before the text."""
    around: tuple[str, str]
    """The text before and after the command in it that leads to the program."""
    after: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A command that calls the program; characters in its words stand for unknowns."""

    launcher: tuple[str, ...]
    """The words before the program."""
    options: tuple[str, ...]
    """The words after the program."""
    place: str
    """Its line."""
    around: tuple[str, str]
    """The text of the innermost shell before and after it."""
    shells: tuple[Shell, ...] = ()
    """Those that lead to it, outermost first."""

    @property
    def words_around(self) -> tuple[str, ...]:
        """All words but the program and its options."""
        outer = (word for shell in self.shells for word in (*shell.before, *shell.after))
        return (*outer, *self.launcher)


def decided(outcomes: set[bool | None], sign: str) -> bool | None:
    """What two conditions with && or || between them find."""
    decisive = sign == "||"
    if decisive in outcomes:
        return decisive
    return None if None in outcomes else not decisive


def tested(words: Sequence[str]) -> bool | None:
    """What a test like ``[ A = B ]`` finds; None if it is no test or not all of it is known."""
    match words:
        case ["!", *others]:
            outcome = tested(others)
            return None if outcome is None else not outcome
        case ["[", *inside, "]"] | ["[[", *inside, "]]"] | ["test", *inside]:
            pass
        case _:
            return None
    for sign in ("||", "&&"):
        if sign in inside:
            at = inside.index(sign)
            halves = (inside[:at], inside[at + 1 :])
            return decided({tested(["test", *half]) for half in halves}, sign)
    if any(MARK.search(word) for word in inside):
        return None
    match inside:
        case ["!", *others]:
            return tested(["!", "test", *others])
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [left, "=" | "==" | "!=" as sign, right] if not re.search(r"[*?\[]", right):
            return (left == right) == (sign != "!=")
        case [left, sign, right] if NUMBER.fullmatch(left) and NUMBER.fullmatch(right):
            if re.fullmatch("-(eq|ne|lt|le|gt|ge)", sign):
                return bool(getattr(operator, sign[1:])(int(left), int(right)))
    return None


def shortened(text: str) -> str:
    return textwrap.shorten(text, _MOST_SHOWN, placeholder=" …")


def endings(values: Iterable[str]) -> list[str]:
    """Texts to compare; if one is long, each without the words with which all begin."""
    texts = list(values)
    lists = [text.split() for text in texts]
    num_common = 0
    if max(map(len, texts)) > _MOST_SHOWN:
        columns = zip(*lists, strict=False)
        differing = (at for at, words in enumerate(columns) if len(set(words)) > 1)
        num_common = next(differing, min(map(len, lists)))
    start = ["…"] if num_common else []
    return [shortened(" ".join(start + words[num_common:])) or NONE for words in lists]
