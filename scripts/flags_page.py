"""Writes what the docs say about flags from the code.

    python scripts/flags_page.py            # writes the files
    python scripts/flags_page.py --check    # fails if they are not up to date

docs/flags.md is every flag of training: ours come from the fields and docstrings of
`HydraulisConfig`, Megatron's from the options that are honoured. docs/coming-from-megatron.md gets
its tables of options that are taken and refused, below its last mark.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import sys
import textwrap
import typing
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.hydraulis.flags.config import FIELDS_BY_TOPIC, HydraulisConfig, option_of  # noqa: E402
from megatron.hydraulis.flags.honoured import HONOURED, HONOURED_BY_TOPIC, Honoured  # noqa: E402
from megatron.hydraulis.flags.options import Refused, Taken  # noqa: E402
from megatron.hydraulis.flags.parser import FlagParser  # noqa: E402

PAGE = ROOT / "docs" / "flags.md"
COMING_FROM = ROOT / "docs" / "coming-from-megatron.md"
MARK = "<!-- Written by scripts/flags_page.py from flags/options.py from here on. -->"

FAMILIES = "`--rl-…` (28) stands for all 28 options of Megatron that begin so."
LEAST_FAMILY = 3
"""Fewer options with the same beginning are listed one by one."""
ONLY_WITH = "it has an effect only with "
"""Beginning of what happens instead of an option whose other option is refused."""
REMOVE = "remove it"
"""What to do instead of most refused options."""

INTRODUCTION = """\
# Flags

<!-- Written by scripts/flags_page.py: edit the docstrings in flags/config.py, flags/options.py. -->

This page lists the flags of `hydraulis train`: those of this project, then the options of Megatron
that it honours.

- If a flag is repeated, the last value wins.
- Any other option of Megatron is [taken or refused](coming-from-megatron.md#all-other-options).
"""

DEFAULT = "Default: "
ALWAYS = ": always so"
"""Part of the effect of an option that changes nothing."""

UPSTREAM = """\
## Options of Megatron that are honoured

These take other values or mean something else here:
"""


@dataclass(frozen=True)
class Row:
    """One of our flags."""

    flag: str
    """Option with its value, as it is typed."""
    meaning: str
    default: str


def _docstrings() -> dict[str, str]:
    """Field -> its docstring in one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(HydraulisConfig))).body[0]
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def _typed(field: dataclasses.Field[object]) -> str:
    """The flag with a name, or the choices, for its value."""
    if field.type is bool:
        return option_of(field.name)
    choices = typing.get_args(typing.get_type_hints(HydraulisConfig)[field.name])
    value = field.metadata.get("argparse_meta", {}).get("metavar") or (
        "{" + ",".join(map(str, choices)) + "}"
    )
    return f"{option_of(field.name)} {value}"


def rows() -> dict[str, Row]:
    """Field of HydraulisConfig -> its row."""
    texts = _docstrings()
    found = {}
    for field in dataclasses.fields(HydraulisConfig):
        meaning, mark, default = texts[field.name].partition(DEFAULT)
        found[field.name] = Row(
            _typed(field), meaning.strip(), default.removesuffix(".") if mark else "off"
        )
    return found


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _effect(honoured: Honoured) -> str:
    """The effect of an option of Megatron here, with the values that it accepts."""
    text = honoured.here
    if honoured.only is not None:
        text += "; only " + ", ".join(f"`{value}`" for value in honoured.only)
    return text


def _upstream_rows() -> list[str]:
    """Options of Megatron whose effect is not quite Megatron's, as rows of a table."""
    return [
        f"| `{option}` | {_cell(_effect(how))} |"
        for option, how in HONOURED.items()
        if how.help_text and ALWAYS not in how.here
    ]


def page() -> str:
    """The whole file."""
    of_field = rows()
    lines = [INTRODUCTION, "## Flags of this project", ""]
    for topic, fields in FIELDS_BY_TOPIC.items():
        lines += [f"### {topic}", "", "| flag | meaning | default |", "|---|---|---|"]
        for name in fields:
            row = of_field[name]
            lines.append(f"| `{_cell(row.flag)}` | {_cell(row.meaning)} | {_cell(row.default)} |")
        lines.append("")
    lines += [UPSTREAM, "| option | effect here |", "|---|---|", *_upstream_rows(), ""]
    always = [f"`{option}`" for option, how in HONOURED.items() if ALWAYS in how.here]
    lines += [f"These ask for what is always so here: {', '.join(always)}.", ""]
    lines += ["As in Megatron:", "", "| topic | options |", "|---|---|"]
    for topic, options in HONOURED_BY_TOPIC.items():
        same = ", ".join(f"`{option}`" for option, how in options.items() if not how.help_text)
        lines.append(f"| {topic} | {same} |")
    return "\n".join(lines) + "\n"


class Families:
    """Options of Megatron by their beginnings, which end with a whole word: ``--moe-router-``."""

    def __init__(self, options: Iterable[str]) -> None:
        self._num_options = Counter(
            beginning for option in options for beginning in self._beginnings(option)
        )

    def shown(self, options: Sequence[str]) -> str:
        """The options of a row; the longest of the beginnings that stand for most of them replaces
        them, if the row has all of its options and enough of them."""
        num_here = Counter(
            beginning for option in options for beginning in self._beginnings(option)
        )

        def shown(option: str) -> str:
            num, best = 0, ""
            for beginning in self._beginnings(option):
                is_whole = num_here[beginning] == self._num_options[beginning] >= LEAST_FAMILY
                if is_whole and num_here[beginning] >= num:
                    num, best = num_here[beginning], beginning
            return f"`{best}…` ({num})" if best else f"`{option}`"

        return ", ".join(dict.fromkeys(map(shown, options)))

    @staticmethod
    def _beginnings(option: str) -> list[str]:
        """All beginnings, the shortest first; that of all negated options says nothing and is left
        out."""
        words = option.removeprefix("--").split("-")
        found = ["--" + "-".join(words[:num]) + "-" for num in range(1, len(words))]
        return [beginning for beginning in found if beginning != "--no-"]


def option_tables() -> str:
    """The options of Megatron that are not honoured: what happens instead, or why not."""
    taken: dict[str, list[str]] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    rows_of_options = FlagParser().rows
    families = Families(rows_of_options)
    for option, row in rows_of_options.items():
        if isinstance(row, Taken):
            only = "" if row.only is None else f"; only {', '.join(map(str, row.only))}"
            taken.setdefault(row.instead + only, []).append(option)
        elif isinstance(row, Refused):
            refused.setdefault((row.fix, row.why), []).append(option)
    lines = [MARK, "", FAMILIES, "", "### Taken", ""]
    lines += ["| options | what happens instead |", "|---|---|"]
    with_others = {why: options for why, options in taken.items() if why.startswith(ONLY_WITH)}
    lines += [
        f"| {families.shown(options)} | {_cell(why)} |"
        for why, options in taken.items()
        if why not in with_others
    ]
    lines += ["", "| options | have an effect only with |", "|---|---|"]
    lines += [
        f"| {families.shown(options)} | {_cell(why.removeprefix(ONLY_WITH))} |"
        for why, options in with_others.items()
    ]
    lines += ["", "### Refused: remove them", "", "| options | why |", "|---|---|"]
    lines += [
        f"| {families.shown(options)} | {_cell(why)} |"
        for (fix, why), options in refused.items()
        if fix == REMOVE
    ]
    lines += ["", "### Refused: use others", "", "| options | why | instead |", "|---|---|---|"]
    lines += [
        f"| {families.shown(options)} | {_cell(why)} | {_cell(fix)} |"
        for (fix, why), options in refused.items()
        if fix != REMOVE
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    """Write or compare the files; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    by_hand = COMING_FROM.read_text(encoding="utf-8").partition(MARK)[0]
    texts = {PAGE: page(), COMING_FROM: by_hand + option_tables()}
    if not parser.parse_args().check:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return 0
    for path, text in texts.items():
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"error: {path} is not up to date; run {Path(__file__).name}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
