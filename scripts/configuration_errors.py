"""Writes docs/configuration-errors.md: every error of a configuration that the code raises.

    python scripts/configuration_errors.py            # writes the page
    python scripts/configuration_errors.py --check    # fails if the page is out of date

Messages are read from the source. A raised `ConfigurationError` or `StrategyError` whose text
cannot be read stops the script, so that no message is missing from the page.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration-errors.md"
PACKAGE = "megatron/hydraulis"
PACKAGES = (PACKAGE, "hydraulis_patches")
ERRORS = ("ConfigurationError", "StrategyError")
PASSED_ON = ("collected", "of_argparse", "out_of_range", "result['error']", "str(error)")
"""Expressions for texts that are made, and listed, elsewhere."""
UNKNOWN = "…"
MIN_WORDS = 4
"""A text with fewer words cannot be found by them."""
MAX_WORDS = 10
"""Enough to find a text; the message itself has the rest."""

INTRODUCTION = """\
# Errors of a configuration

<!-- Written by scripts/configuration_errors.py: edit the messages in the code. -->

This page says which module checks what: search it for a few words of your message. A message
states the rule, then the numbers that break it (`but …`) and, after a semicolon, what to do; the
page has the first words of the rules. `⟨name⟩` stands for a value, `⟨a / b⟩` for one of several
texts, `…` for other text. Numbers out of range are refused as `⟨option⟩ must be ⟨rule⟩ but is
⟨value⟩`; several errors are listed together.

Such an error ends the program with status 2 and one line on standard error, above torchrun's own
report. `hydraulis train … --dry-run` finds most of them without starting ranks. Errors during a run
are in [operations.md](operations.md#what-failures-look-like), refused options of Megatron in
[coming-from-megatron.md](coming-from-megatron.md#refused).

| message | raised in |
|---|---|"""


class UnreadableError(Exception):
    """An error is raised whose message this script cannot read."""


@dataclass(frozen=True)
class Message:
    """A message in the code, with marks for values."""

    module: str
    """Path from the root of the package."""
    line: int
    text: str

    @property
    def shown(self) -> str:
        """The beginning of the rule, or more if the rule has too few words; empty without words."""
        shown = self.text
        for before in ("; ", " but "):
            rule, separator, _ = shown.rpartition(before)
            if separator and _num_words(rule) >= MIN_WORDS:
                shown = rule.removesuffix(",")
        words = re.findall(r"(?:⟨[^⟩]*⟩|\S)+", shown)
        if len(words) > MAX_WORDS + 1:  # the mark stands for more than one word
            shown = " ".join([*words[:MAX_WORDS], UNKNOWN])
        return shown if _num_words(shown) else ""


def _num_words(text: str) -> int:
    return len(re.findall(r"\w+", re.sub(r"⟨[^⟩]*⟩", " ", text)))


def _mark(expression: ast.expr) -> str:
    """What stands for a value: its name if it has one."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"⟨{name.strip('_')}⟩"
        case ast.Call(func=ast.Attribute(value=ast.Name() as changed, attr="replace")):
            return _mark(changed)
        case ast.Call(func=ast.Name(id="option_of"), args=[ast.Name() as named]):
            return f"--{_mark(named)}"
        case _:
            return UNKNOWN


@dataclass(frozen=True)
class Reader:
    """Turns the expressions of one function into texts."""

    known: dict[str, list[str]] = field(default_factory=dict)
    """Texts that a name stands for."""

    def texts(self, expression: ast.expr) -> list[str]:
        """Every text that the expression may be; empty if it is not a readable text."""
        match expression:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Name(id=name) if name in self.known:
                return self.known[name]
            case ast.JoinedStr(values=parts):
                return ["".join(map(self._part, parts))]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                is_text = self.texts(left) or self.texts(right)
                return [self._part(left) + self._part(right)] if is_text else []
            case ast.IfExp(body=body, orelse=other):
                both = self.texts(body), self.texts(other)
                return both[0] + both[1] if all(both) else []
            case _:
                return []

    def _part(self, expression: ast.expr) -> str:
        """An expression as a part of a longer text."""
        if isinstance(expression, ast.FormattedValue):
            expression = expression.value
        texts = list(dict.fromkeys(self.texts(expression)))
        match texts:
            case []:
                return _mark(expression)
            case [text]:
                return text
            case _ if any("⟨" in text for text in texts):
                return UNKNOWN
            case _:
                return f"⟨{' / '.join(texts)}⟩"

    def within(self, function: ast.AST) -> Reader:
        """With what is assigned to names inside a function."""
        found: dict[str, list[str]] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                found.setdefault(node.targets[0].id, []).extend(Reader().texts(node.value))
        return Reader(self.known | {name: texts for name, texts in found.items() if texts})


def _calls(function: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Names and calls in a function or module, without those in functions inside it."""
    for node in ast.iter_child_nodes(function):
        match node:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                yield name, node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _calls(node)


def messages_of(source: str, module: str) -> list[Message]:
    """Every message of our errors in a module.

    A function that makes errors from a text it is given is followed to its calls in the module.

    Raises:
        UnreadableError: the text of an error is not in the source.
    """
    if not any(name in source for name in ERRORS):
        return []
    tree = ast.parse(source)
    constants = Reader(
        {
            node.targets[0].id: [str(node.value.value)]
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
    )
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    calls: dict[ast.AST, list[tuple[str, ast.Call]]] = {
        function: list(_calls(function)) for function in (tree, *functions)
    }
    found: list[Message] = []
    for function, named in calls.items():
        errors = [call for name, call in named if name in ERRORS]
        if not errors:
            continue
        reader = constants if isinstance(function, ast.Module) else constants.within(function)
        for error in errors:
            if not error.args or ast.unparse(error.args[0]) in PASSED_ON:
                continue
            texts = [(error.lineno, text) for text in reader.texts(error.args[0])]
            if isinstance(function, ast.FunctionDef):
                texts = list(_from_calls(calls, function, error.args[0], reader)) or texts
            if not texts:
                raise UnreadableError(
                    f"{module}, line {error.lineno}: {ast.unparse(error.args[0])} is no text that "
                    "can be read; write the message where the error is raised"
                )
            found += [Message(module, line, text) for line, text in texts]
    return found


def _from_calls(
    calls: Mapping[ast.AST, Sequence[tuple[str, ast.Call]]],
    function: ast.FunctionDef,
    message: ast.expr,
    reader: Reader,
) -> Iterator[tuple[int, str]]:
    """(line, text) of a message for every text that callers give to the function."""
    parameters = [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
    positional = parameters[parameters[:1] == ["self"] :]
    used = {each.id for each in ast.walk(message) if isinstance(each, ast.Name)}
    for caller, of_caller in calls.items():
        mine = [call for name, call in of_caller if name == function.name]
        theirs = Reader().within(caller) if mine else Reader()
        for call in mine:
            given = dict(zip(positional, call.args, strict=False))
            given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            for name in sorted(used & set(given)):
                for text in theirs.texts(given[name]):
                    if len(text.split()) >= MIN_WORDS - 1:  # not an option or a label
                        with_text = Reader(reader.known | {name: [text]})
                        yield from ((call.lineno, whole) for whole in with_text.texts(message))


def all_messages(root: Path = ROOT) -> list[Message]:
    """Messages of the packages, in the order of modules and lines."""
    found: list[Message] = []
    for package in PACKAGES:
        base = root / package if package == PACKAGE else root
        for path in sorted((root / package).rglob("*.py")):
            found += messages_of(path.read_text("utf-8"), path.relative_to(base).as_posix())
    return found


def _cell(text: str) -> str:
    """A text as a cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


def page(messages: Sequence[Message]) -> str:
    """The text of the page: a table of all messages."""
    modules: dict[str, dict[str, None]] = {}
    for each in messages:
        if each.shown:
            modules.setdefault(_cell(each.shown), {})[f"`{each.module}`"] = None
    rows = [f"|{text}|{', '.join(raised_in)}|" for text, raised_in in modules.items()]
    return "\n".join([INTRODUCTION, *rows, ""])


def main() -> int:
    """Writes or compares the page; returns the exit status."""
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    check = parser.parse_args().check
    try:
        text = page(all_messages())
    except UnreadableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not check:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        print(f"error: {PAGE} is out of date; run {Path(__file__).name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
