"""Writes docs/configuration-errors.md from the code: every error of a configuration, and its fix.

    python scripts/configuration_errors.py            # writes the file
    python scripts/configuration_errors.py --check    # fails if it is not up to date

The messages are read, not run: a raised `ConfigurationError` or `StrategyError` whose text cannot
be found in the source stops this script, so that none is missing from the page.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration-errors.md"
PACKAGES = ("megatron/hydraulis", "hydraulis_patches")
ERRORS = ("ConfigurationError", "StrategyError")
PASSED_ON = ("refusals[0]", "str(error)")
"""Texts of an error that are those of refused options or of another error."""
OF_THE_MOMENT = "…"
"""Stands in the page for what is known only when the error is raised."""

INTRODUCTION = """\
# Errors of a configuration

<!-- Written by scripts/configuration_errors.py: change messages in the code, words in there. -->

Every message that a wrong flag, file or machine leads to, with its cause and its fix. A message
states the rule, then the numbers that break it, and after the last semicolon what to do. `⟨name⟩`
stands for a value of the run, `…` for words chosen when the error is raised. Search this page for
some words of the message that you got.

An error ends the program with status 2 and one line on standard error, before ranks wait for each
other where that is possible. Under torchrun the line stands above torchrun's own report, which says
only that a process failed. `pretrain_gpt.py … --dry-run` finds most of them without starting a
rank. What goes wrong while a run is under way is in
[operations.md](operations.md#what-failures-look-like).
"""


@dataclass(frozen=True)
class Topic:
    """A part of the page: modules by the beginning of their path, narrow ones first."""

    title: str
    says: str
    modules: tuple[str, ...]


TOPICS = (
    Topic(
        "Flags of training",
        "Raised on every rank and told by rank 0 while the command line is read. The command line "
        "that counts is the one in `config.json` of the run folder or, under Slurm, the line "
        "`step` at the top of the job's log.",
        (
            "cost_model/context_ways",
            "flags",
            "loop/planning",
        ),
    ),
    Topic(
        "Strategies and pools",
        "A strategy that cannot be read, does not use the ranks of the job, or does not fit the "
        "model. `--dry-run --num-ranks N` shows how a strategy is read, on any machine.",
        (
            "cluster",
            "model_shape",
            "strategy",
        ),
    ),
    Topic(
        "Data and tokenizer",
        "Flags about the corpus. What is wrong inside a file of the corpus is a `DataError`, whose "
        "message names file and place.",
        ("data",),
    ),
    Topic(
        "Launcher, machine and run folder",
        "Ranks that were not started by torchrun, nodes that differ, folders that cannot be "
        "written. The first rank of each node tells its own.",
        ("loop/devices", "loop/entry", "loop/preflight", "loop/run_folder", "observability"),
    ),
    Topic(
        "Checkpoints",
        "A checkpoint that is not there or belongs to another model, and flags about checkpoints. "
        "A damaged checkpoint is another kind of error, told with the file that is damaged.",
        ("checkpoint", "loop/checkpointing"),
    ),
    Topic(
        "Model, attention and memory",
        "What the model's parts refuse, and schemes that memory does not hold.",
        ("optimizer", "runtime", "transfer"),
    ),
    Topic(
        "Cost model and cost profiles",
        "Files of measured times, and devices and layouts that the analytic model does not know.",
        ("cost_model",),
    ),
    Topic(
        "Measuring and refitting",
        "`python -m megatron.hydraulis profile`, and `--refit-cost-profile` and `--emulate-device` "
        "of training.",
        ("loop/emulated_run", "loop/refitting", "profiler"),
    ),
    Topic(
        "The other commands",
        "`lengths`, `propose`, `plan`, `simulate` and the like.",
        ("lengths", "plan_check", "planner", "proposal", "simulator"),
    ),
    Topic("Patches of megatron-core", "An upstream that this package does not fit.", ("patches",)),
)


class UnreadableError(Exception):
    """An error is raised whose message this script cannot find."""


@dataclass(frozen=True)
class Message:
    """A message in the code, with marks in the place of values."""

    module: str
    line: int
    text: str

    @property
    def halves(self) -> tuple[str, str]:
        """Rule with numbers, and fix."""
        cause, mark, fix = self.text.rpartition("; ")
        return (cause, fix) if mark else (self.text, "as the message says")


def _mark(expression: ast.expr) -> str:
    """What stands for a value: its name where it has one."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return f"⟨{name.strip('_').replace('_', ' ')}⟩"
        case ast.Call(func=ast.Attribute(value=ast.Name() as changed, attr="replace")):
            return _mark(changed)
        case ast.Call(func=ast.Name(id="option_of"), args=[ast.Name() as named]):
            return f"--{_mark(named)}"
        case _:
            return OF_THE_MOMENT


Known = dict[str, list[str]]
"""Texts that a name stands for, inside one function."""


def texts_of(expression: ast.expr, known: Known) -> list[str]:
    """Every text that an expression may be, values replaced by marks; none if it is no text."""
    match expression:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.Name(id=name) if name in known:
            return known[name]
        case ast.JoinedStr(values=values):
            parts = [
                texts_of(value.value, known) or [_mark(value.value)]
                if isinstance(value, ast.FormattedValue)
                else texts_of(value, known)
                for value in values
            ]
            return _joined(parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            # Of what is added to a text, a choice that is not known may be nothing at all.
            added = texts_of(right, known) or [_mark(right).replace(OF_THE_MOMENT, "")]
            return _joined([texts_of(left, known) or [_mark(left)], added])
        case ast.IfExp(body=body, orelse=other):
            either = texts_of(body, known), texts_of(other, known)
            return [*either[0], *either[1]] if all(either) else []
        case ast.Call(func=ast.Name(id="str"), args=[ast.Name()]):
            return []
        case _:
            return []


def _joined(parts: Sequence[Sequence[str]]) -> list[str]:
    """All combinations, as long as they are few; else the first of each."""
    if len(parts) and _product(len(part) for part in parts) <= 4:
        return ["".join(words) for words in itertools.product(*parts)]
    return ["".join(part[0] if len(part) == 1 else OF_THE_MOMENT for part in parts)]


def _product(numbers: Iterable[int]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


def _called(call: ast.Call) -> str:
    """Name of the function or method that is called."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _names_in(function: ast.AST) -> Known:
    """Texts that are assigned to names inside a function."""
    known: Known = defaultdict(list)
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] += texts_of(node.value, {})
    return {name: texts for name, texts in known.items() if texts}


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function or module that no function inside it holds."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _own_nodes(node)


def messages_of(source: str, module: str) -> list[Message]:
    """Every message of our errors in a module.

    Where a function makes errors out of a text that it is given, its calls are followed, in the
    same module.

    Raises:
        UnreadableError: the text of an error is not in the source.
    """
    tree = ast.parse(source)
    constants = {
        node.targets[0].id: [str(node.value.value)]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    functions = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]
    found: list[Message] = []
    for function in functions:
        known = constants | (_names_in(function) if function is not tree else {})
        parameters = (
            [each.arg for each in (*function.args.args, *function.args.kwonlyargs)]
            if isinstance(function, ast.FunctionDef)
            else []
        )
        for node in _own_nodes(function):
            if not (isinstance(node, ast.Call) and _called(node) in ERRORS and node.args):
                continue
            message = node.args[0]
            used = [
                each.id
                for each in ast.walk(message)
                if isinstance(each, ast.Name) and each.id in parameters
            ]
            followed = []
            for name in used:
                followed += _through_calls(tree, function, parameters, name, message, known)
            texts = followed or [(node.lineno, text) for text in texts_of(message, known)]
            if not texts and not _passes_on(message):
                raise UnreadableError(
                    f"{module}, line {node.lineno}: {ast.unparse(message)} is no text that can be "
                    "read; write the message where the error is raised"
                )
            found += [Message(module, line, text) for line, text in texts]
    return found


def _passes_on(message: ast.expr) -> bool:
    """Whether the words were made elsewhere, where they are listed, and are only handed on here."""
    return ast.unparse(message) in PASSED_ON


def _through_calls(
    tree: ast.AST,
    function: ast.AST,
    parameters: list[str],
    name: str,
    message: ast.expr,
    known: Known,
) -> list[tuple[int, str]]:
    """Messages by the texts with which a function that makes errors is called."""
    assert isinstance(function, ast.FunctionDef)
    found = []
    takes_self = parameters[:1] == ["self"]
    for caller in ast.walk(tree):
        if not isinstance(caller, ast.FunctionDef):
            continue
        theirs = _names_in(caller)
        for call in _own_nodes(caller):
            if not (isinstance(call, ast.Call) and _called(call) == function.name):
                continue
            names = parameters[1:] if takes_self else parameters
            given = dict(zip(names, call.args, strict=False)) | {
                keyword.arg: keyword.value for keyword in call.keywords if keyword.arg
            }
            if name not in given:
                continue
            texts = texts_of(given[name], theirs)
            if not texts or len(texts[0].split()) < 3:
                continue  # an option or a label, not the words of the message
            found += [(call.lineno, text) for text in texts_of(message, known | {name: texts})]
    return found


def all_messages(root: Path = ROOT) -> list[Message]:
    """Messages of the whole package, in the order of modules and lines."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(
                root / "megatron/hydraulis" if "megatron" in package else root
            )
            found += messages_of(path.read_text(encoding="utf-8"), relative.as_posix())
    return found


def topic_of(module: str) -> Topic | None:
    """Where a module's errors stand in the page; None for one that no topic names."""
    name = "patches" if module.startswith("hydraulis_patches/") else module.removesuffix(".py")
    for topic in TOPICS:
        for start in topic.modules:
            if name == start or name.startswith((start + "/", start + "_")):
                return topic
    return None


def _cell(text: str) -> str:
    """A text as a cell of a Markdown table."""
    return re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("<", "&lt;")


def _refused_options() -> list[str]:
    """The table of upstream's options that are refused, by family."""
    sys.path.insert(0, str(ROOT))
    from megatron.hydraulis.flags.options import families

    lines = [
        "## Refused options of Megatron",
        "",
        "An option of upstream's that this program does not act on is refused by its name, as "
        "ignoring it would",
        "train another model than the one asked for: `--num-experts is not honoured: …`. What is "
        "honoured, and where",
        "it takes effect, is in [flags/options.py](../megatron/hydraulis/flags/options.py).",
        "",
        "| options about | why they are refused | do this |",
        "|---|---|---|",
    ]
    lines += [
        f"| {_cell(family.name)} | {_cell(family.why)} | {_cell(family.instead)} |"
        for family in families()
    ]
    return lines


def page(messages: Sequence[Message]) -> str:
    """The whole file.

    Raises UnreadableError for a module that no topic names.
    """
    by_topic: dict[str, list[Message]] = defaultdict(list)
    for message in messages:
        topic = topic_of(message.module)
        if topic is None:
            raise UnreadableError(
                f"{message.module} raises errors but no topic of {Path(__file__).name} names it; "
                "add it to one"
            )
        by_topic[topic.title].append(message)
    lines = [INTRODUCTION]
    for topic in TOPICS:
        if not by_topic[topic.title]:
            continue
        lines += [f"## {topic.title}", "", topic.says, "", "| message | fix |", "|---|---|"]
        rows = [tuple(map(_cell, message.halves)) for message in by_topic[topic.title]]
        lines += [f"| {cause} | {fix} |" for cause, fix in dict.fromkeys(rows)]
        lines.append("")
    return "\n".join([*lines, *_refused_options()]) + "\n"


def main() -> int:
    """Write or compare the file; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="compare only")
    try:
        text = page(all_messages())
    except UnreadableError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not parser.parse_args().check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
        print(f"error: {PAGE} is not up to date; run {Path(__file__).name}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
