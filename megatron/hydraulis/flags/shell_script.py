"""Follows a shell script, without running it, to the commands that call Megatron's program.

Assignments, functions, loops and sourced files are followed from top to bottom. A condition on
strings or whole numbers that are known decides its branches. Of any other condition all branches
count, and the last known value wins. A command that is not followed makes the variables that it
sets unknown. What only the job knows, such as ``$(...)`` and Slurm's variables, stays as the script
writes it.
"""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from megatron.hydraulis.errors import ConfigurationError
from megatron.hydraulis.flags.shell_words import (
    MARK,
    NONE,
    NUMBER,
    TO_SPLIT,
    Call,
    Shell,
    Unknown,
    Unknowns,
    decided,
    endings,
    shortened,
    tested,
)

if TYPE_CHECKING:
    from tree_sitter import Node

_ENTRY = re.compile(r"(?:^|/)\w*pretrain\w*\.py$")
"""The program among the words of a command."""
_NO_LAUNCHER = ("cp", "mv", "ln", "ls", "cat", "echo", "printf", "rsync", "scp", "test", "[", "[[")
"""Commands that name the program without calling it."""
_SET_BY_JOB = re.compile(
    r"(SLURM|PBS|OMPI)_\w+|(LOCAL_|NODE_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|"
    r"HOME|USER|PWD|HOSTNAME|RANDOM|UID|\W|0"
)
"""Variables that the shell, the scheduler or the launcher sets when the job runs."""
_SETTERS = ("read", "let", "mapfile", "readarray", "getopts")
"""Commands that set the variables in their arguments, in ways that are not followed."""
_SET_BY_ARITHMETIC = re.compile(
    r"(?:\+\+|--)\s*([A-Za-z_]\w*)|"
    r"([A-Za-z_]\w*)(?:\[[^]]*\])?\s*(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))"
)
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
}
_EXPANSIONS = (
    "simple_expansion",
    "expansion",
    "arithmetic_expansion",
    "command_substitution",
    "process_substitution",
)
_STRINGS = ("string", "raw_string", "ansi_c_string")
_MOST_NESTED = 20
"""Sourced files and texts handed to other shells within each other."""


class Script:
    """Follows a script from top to bottom."""

    def __init__(self, variables: Mapping[str, str], of_job: Mapping[str, str], folder: Path):
        """variables: those that the script does not change; of_job: Slurm's; folder: of files that
        the script reads."""
        self._fixed = frozenset(variables)
        self._values = {name: [value] for name, value in {**of_job, **variables}.items()}
        self._histories: dict[str, list[str]] = {}
        self._changed: dict[str, str] = {}
        self._may_hold_options: set[str] = set()
        self._functions: dict[str, tuple[Node, int]] = {}
        self._followed: set[str] = set()
        self._here_documents: list[tuple[str, str]] = []
        self._folder = folder
        self.calls: list[Call] = []
        self.unknowns = Unknowns()
        self.cut_off: list[str] = []
        """Lines that begin with an option, which no command continues."""
        self.not_found: list[str] = []
        """Files that the script reads and that are not here."""
        self._num_shifted = 0
        self._left_by = ""
        self._num_loops = 0
        """That are being followed, one inside the other."""
        self._num_loops_to_leave = 1
        self._may_be_left_by: frozenset[str] = frozenset()
        # What follows holds for the text or function that is being followed, see _within.
        self._arguments: list[str] | None = None
        self._outer: dict[str, tuple[list[str] | None, list[str]]] = {}
        self._leaving = frozenset({"exit"})
        self._is_decided = True
        self._depth = self._nesting = 0
        self._text = b""
        self._file = self._place = ""
        self._span: tuple[int, int] | None = None

    def read_all(self, text: str) -> None:
        """Follow a script; without a call, also functions and here-documents that nobody reads."""
        self._read(MARK.sub("?", text))
        for name, (body, _) in tuple(self._functions.items()):
            if not self.calls and name not in self._followed:
                with self._process():
                    self._follow(body)
        for here, place in () if self.calls else tuple(self._here_documents):
            with self._process(), self._within(_place=place):
                self._read(here, is_lenient=True)

    @property
    def changed(self) -> tuple[str, ...]:
        """The variables that were used and are not certain, with their values."""
        return tuple(f"{name} = {values}" for name, values in self._changed.items())

    @property
    def _is_certain(self) -> bool:
        return self._is_decided and not self._may_be_left_by

    @contextmanager
    def _within(self, **state: object) -> Iterator[None]:
        """Give attributes other values for a while."""
        before = {name: getattr(self, name) for name in state}
        for name, value in state.items():
            setattr(self, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self, name, value)

    def _process(self) -> AbstractContextManager[None]:
        """Follow another process, which changes none of the values here and does not end this."""
        return self._within(
            _values=dict(self._values),
            _histories=dict(self._histories),
            _functions=dict(self._functions),
            _arguments=None if self._arguments is None else [*self._arguments],
            _num_shifted=self._num_shifted,
            _outer=dict(self._outer),
            _left_by="",
            _num_loops_to_leave=1,
            _may_be_left_by=frozenset(),
        )

    @contextmanager
    def _scope(self) -> Iterator[None]:
        """Local variables, and those set for one command, get their values back at the end."""
        with self._within(_outer={}):
            yield
            for name, (values, history) in self._outer.items():
                self._histories[name] = history
                self._values.pop(name, None)
                if values is not None:
                    self._values[name] = values

    def _make_local(self, name: str) -> None:
        before = self._values.get(name), self._histories.get(name, [])
        self._outer.setdefault(name, before)

    @contextmanager
    def _until(self, *commands: str) -> Iterator[None]:
        """Follow up to one of these commands; after one that is not certain nothing is."""
        before = self._may_be_left_by
        num_loops = self._num_loops + ("break" in commands)
        with self._within(_leaving=self._leaving.union(commands), _num_loops=num_loops):
            yield
        self._may_be_left_by = before | self._may_be_left_by.difference(commands)
        if self._num_loops_to_leave > 1:
            self._num_loops_to_leave -= "break" in commands
        elif self._left_by in commands:
            self._left_by = ""

    def _read(self, text: str, *, is_lenient: bool = False) -> None:
        if self._nesting == _MOST_NESTED:
            return
        root = _parsed(text)
        if root.has_error and not is_lenient:
            wrong = root
            while children := [child for child in wrong.children if child.has_error]:
                wrong = children[0]
            line = [*text.splitlines(), ""][wrong.start_point.row]
            raise ConfigurationError(
                f"a launch script is one that bash can read, but {self._at(wrong)} is "
                f"{shortened(self.unknowns.shown(line))!r}; correct it: is a quote or bracket not "
                "closed?"
            )
        with self._within(_text=text.encode(), _nesting=self._nesting + 1):
            self._follow(root)

    def _at(self, node: Node) -> str:
        return self._place or f"{self._file}line {node.start_point.row + 1}"

    def _mark(self, source: str, name: str, node: Node, *, is_set_by_job: bool = False) -> str:
        is_set_by_job |= _SET_BY_JOB.fullmatch(name) is not None
        where = f"used in {self._at(node)}"
        return self.unknowns.mark(Unknown(source, name, self._depth, is_set_by_job, where))

    # --- commands ---

    def _follow(self, node: Node) -> None:
        """Follow what the node of a syntax tree does."""
        if self._left_by:
            return
        after = node.next_sibling
        in_background = after is not None and after.type == "&"
        with self._process() if in_background else nullcontext():
            self._follow_here(node)

    def _follow_here(self, node: Node) -> None:
        match node.type:
            case "command":
                self._follow_command(node)
            case "variable_assignment":
                self._follow_assignment(node)
            case "declaration_command":
                self._follow_declaration(node)
            case "unset_command":
                self._forget(map(self._one_word, node.named_children), node)
            case "compound_statement" if _text_of(node).startswith("(("):
                self._forget_calculated(node)
            case "subshell":
                with self._process():
                    for child in node.named_children:
                        self._follow(child)
            case "pipeline":
                for child in node.named_children:
                    with self._process():
                        self._follow(child)
            case "function_definition":
                name, body = node.child_by_field_name("name"), node.child_by_field_name("body")
                if name is not None and body is not None:
                    self._functions[_text_of(name)] = (body, self._depth)
            case "if_statement" | "case_statement":
                self._may_hold_options.update(_assigned_options(node))
                is_if = node.type == "if_statement"
                self._follow_first(self._branches(node) if is_if else self._cases(node))
            case "list":
                self._outcome(node)
            case "for_statement":
                self._follow_loop(node)
            case "while_statement" | "c_style_for_statement":
                with self._until("break", "continue"):
                    self._follow_first([(None, node.named_children)])
            case "heredoc_body":
                start = node.prev_named_sibling
                is_quoted = start is not None and _text_of(start)[:1] in ("'", '"', "\\")
                text = _text_of(node) if is_quoted else self._joined(node, 0)
                self._here_documents.append((text, self._at(node)))
            case kind if kind not in (*_EXPANSIONS, *_STRINGS):
                for child in node.named_children:
                    self._follow(child)

    def _follow_first(self, branches: Iterable[tuple[bool | None, Sequence[Node]]]) -> None:
        """Follow all branches that may be taken, up to one that is taken for certain."""
        is_decided = self._is_decided
        for outcome, body in branches:
            if outcome is not False:
                with self._within(_is_decided=is_decided and outcome is True):
                    for node in body:
                        self._follow(node)
            if outcome:
                return
            is_decided &= outcome is False

    def _branches(self, node: Node) -> Iterator[tuple[bool | None, list[Node]]]:
        """The outcomes and bodies of an ``if``."""
        others = ("elif_clause", "else_clause")
        for clause in (node, *(child for child in node.children if child.type in others)):
            kinds = [child.type for child in clause.children]
            begin = kinds.index("then") if "then" in kinds else 0
            tests = [child for child in clause.children[1:begin] if child.is_named]
            outcome: bool | None = True
            for test in tests:
                outcome = self._outcome(test)
            body = [child for child in clause.children[begin + 1 :] if child.type not in others]
            yield outcome, body

    def _cases(self, node: Node) -> Iterator[tuple[bool | None, list[Node]]]:
        """The outcomes and bodies of a ``case``."""
        subject = self._one_word(node.child_by_field_name("value"))
        for item in node.named_children:
            values = item.children_by_field_name("value")
            patterns = [self._one_word(value) for value in values]
            outcome: bool | None = any(fnmatch.fnmatchcase(subject, each) for each in patterns)
            if "*" not in patterns and MARK.search(subject + "".join(patterns)):
                outcome = None
            if item.type == "case_item":
                yield outcome, [child for child in item.named_children if child not in values]

    def _follow_loop(self, node: Node) -> None:
        variable, body = node.child_by_field_name("variable"), node.child_by_field_name("body")
        if variable is None or body is None:
            return
        given = node.children_by_field_name("value")
        values = [text for value in given for text in self._words(value)]
        with self._until("break"):
            for value in values:
                if not self._left_by:
                    self._assign(_text_of(variable), [value], variable)
                    with self._until("continue"):
                        self._follow(body)

    def _outcome(self, node: Node) -> bool | None:
        """Follow a condition and say what it finds; None if not all of it is known."""
        match node.type:
            case "negated_command":
                outcome = self._outcome(node.named_children[0])
                return None if outcome is None else not outcome
            case "list":
                first, sign, then = node.children[0], node.children[1].type, node.children[-1]
                outcome = self._outcome(first)
                if outcome is (sign == "||"):
                    return outcome
                with self._within(_is_decided=self._is_decided and outcome is not None):
                    return decided({outcome, self._outcome(then)}, sign)
        self._follow(node)
        match node.type:
            case "variable_assignment" | "variable_assignments":
                return None if re.search(r"\$\(|`", _text_of(node)) else True
            case "test_command" | "command":
                return tested([*self._tested_words(node)])
        return None

    def _tested_words(self, node: Node) -> Iterator[str]:
        for child in node.children:
            is_negative = child.type == "unary_expression" and child.children[0].type == "-"
            if child.type in ("unary_expression", "binary_expression") and not is_negative:
                yield from self._tested_words(child)
            else:
                yield self._one_word(child) if child.is_named else _text_of(child)

    def _follow_assignment(self, node: Node) -> None:
        name, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        if name is None or name.type != "variable_name":
            self._forget([_text_of(node)], node)
            return
        is_array = value is not None and value.type == "array"
        values = [self._one_word(value)]
        if value is not None and is_array:
            values = [word for child in value.named_children for word in self._words(child)]
        added = ""
        if node.children[1].type == "+=":
            added = " ".join(values)
            before = self._values.get(_text_of(name), [])
            values = before + values if is_array else ["".join((*before[:1], added))]
        self._assign(_text_of(name), values, node, added=added)

    def _follow_declaration(self, node: Node) -> None:
        may_be_local = _text_of(node.children[0]) in ("local", "declare", "typeset")
        is_reference = False
        for child in node.named_children:
            text = _text_of(child)
            is_reference |= may_be_local and re.fullmatch(r"-\w*n\w*", text) is not None
            name = re.match(r"\w+", text)
            if may_be_local and name is not None and self._arguments is not None:
                self._make_local(name[0])
                if child.type == "variable_name" and name[0] not in self._fixed:
                    self._values.pop(name[0], None)
            self._follow(child)
            if is_reference and name is not None:
                self._forget((name[0], *self._values.get(name[0], ())), node)

    def _forget(self, words: Iterable[str], node: Node) -> None:
        """Make the variables that words begin with unknown."""
        where = f"{self._at(node)} sets it in a way that is not followed"
        for word in words:
            name = re.match(r"[A-Za-z_]\w*", word)
            if name is not None:
                unknown = Unknown(f"${name[0]}", name[0], self._depth, False, where)
                self._assign(name[0], [self.unknowns.mark(unknown)], node)

    def _forget_calculated(self, node: Node) -> None:
        """Make the variables unknown that an arithmetic expression sets."""
        names = _SET_BY_ARITHMETIC.findall(_text_of(node))
        self._forget(("".join(each) for each in names), node)

    def _assign(self, name: str, values: list[str], node: Node, *, added: str = "") -> None:
        """Give a variable a value, of which added is what its old one lacks."""
        if name in self._fixed:
            return
        shown = self.unknowns.shown(" ".join(" ".join(values).split()))
        history = self._histories.get(name, [])
        if not self._is_certain:
            history = [*history, shown] if history else [NONE, shown]
            history = history[1:] if history[0] == NONE and len(history) > 2 else history
        elif added:
            history = [f"{each} {self.unknowns.shown(added)}" for each in history]
        else:
            history = [shown]
        self._histories[name] = history
        before, unknowns = self._values.get(name), self.unknowns.of("".join(values))
        if not self._is_certain and unknowns and before and not MARK.search("".join(before)):
            return
        is_set_by_job = all(unknown.is_set_by_job for unknown in unknowns)
        if unknowns and is_set_by_job and len(values) == 1 and not re.search(r"\s", values[0]):
            # The script runs the command, or asks Slurm, once.
            where = f"{self._at(node)} sets it to {shortened(shown)}"
            unknown = Unknown(f"${{{name}}}", name, self._depth, True, where)
            values = [self.unknowns.mark(unknown)]
        self._values[name] = values

    def _follow_command(self, node: Node) -> None:
        name = node.child_by_field_name("name")
        assignments = [child for child in node.children if child.type == "variable_assignment"]
        if name is None:
            for assignment in assignments:
                self._follow_assignment(assignment)
            return
        prefix: list[Node] = []
        begin = name.start_byte
        while assignments:
            gap = _bytes_of(node)[assignments[-1].end_byte - node.start_byte :]
            if b"\n" in gap[: begin - assignments[-1].end_byte].replace(b"\\\n", b""):
                break  # The grammar adds assignments of an earlier line.
            prefix.insert(0, assignments.pop())
            begin = prefix[0].start_byte
        for assignment in assignments:
            self._follow_assignment(assignment)
        arguments = [*name.children, *node.children_by_field_name("argument")]
        for redirect in node.parent.children_by_field_name("redirect") if node.parent else ():
            arguments += redirect.children_by_field_name("destination")[1:]
        words = [word for argument in arguments for word in self._words(argument)]
        if not words:
            return
        if not prefix:
            self._run(words, prefix, node, name)
            return
        with self._scope():
            for assignment in prefix:
                self._make_local(self._one_word(assignment.child_by_field_name("name")))
                self._follow_assignment(assignment)
            self._run(words, prefix, node, name)

    def _run(self, words: list[str], prefix: list[Node], node: Node, name: Node) -> None:
        """Follow what a command of these words does; prefix: the assignments before it."""
        program, function = words[0], self._functions.get(words[0])
        if program in ("eval", "source", "."):
            span = self._span or (name.start_byte, node.end_byte)
            with self._within(_span=span, _place=self._at(node)):
                self._read(" ".join(words[1:])) if program == "eval" else self._source(words[1:])
        elif program in self._leaving:
            num_loops = 1
            if program in ("break", "continue") and words[1:] and words[1].isdecimal():
                num_loops = min(int(words[1]), self._num_loops)
            if self._is_certain:
                self._left_by, self._num_loops_to_leave = program, num_loops
            elif program != "exit":  # no loop's end makes sure that an outer one goes on
                self._may_be_left_by |= {program if num_loops == 1 else "break 2"}
        elif program == "shift":
            num_shifted = int(words[1]) if words[1:] and words[1].isdecimal() else 1
            if self._arguments is not None:
                del self._arguments[:num_shifted]
            elif self._is_certain:
                self._num_shifted += num_shifted
        elif words[:2] == ["set", "--"]:
            self._arguments = words[2:]
            if not self._is_certain:
                self._changed["$@"] = (
                    f"{NONE}, {shortened(self.unknowns.shown(' '.join(words[2:])))}"
                )
        elif program in _SETTERS or words[:2] == ["printf", "-v"]:
            self._forget(words[1:], node)
        elif function is not None and function[1] == self._depth:
            self._followed.add(program)
            del self._functions[program]  # no recursion
            with self._within(_arguments=words[1:]), self._scope(), self._until("return"):
                self._follow(function[0])
            self._functions.setdefault(program, function)
        elif program.startswith("-"):
            shown = shortened(self.unknowns.shown(" ".join(words)))
            self.cut_off.append(f"{self._at(node)}, {shown}")
        elif PurePath(program).name not in _NO_LAUNCHER:
            self._call(words, prefix, node, name)

    def _call(self, words: list[str], prefix: list[Node], node: Node, name: Node) -> None:
        """Record a command that calls the program, or that hands a text which does to a shell."""
        begin, end = self._span or (name.start_byte, node.end_byte)
        for assignment in reversed(prefix if self._span is None else ()):
            begin = assignment.start_byte
            parts = (assignment.child_by_field_name(part) for part in ("name", "value"))
            words.insert(0, "=".join(self._one_word(part) for part in parts))
        around = ("", "")
        if self._depth:
            around = (self._text[:begin].decode(), self._text[end:].decode())
        for at, word in enumerate(words):
            if _ENTRY.search(word):
                launcher, options = tuple(words[:at]), tuple(words[at + 1 :])
                self.calls.append(Call(launcher, options, self._at(node), around))
                return
            if re.search(r"pretrain\w*\.py\s", f"{word} ") and re.search(r"\s", word):
                num_before = len(self.calls)
                here = self._within(_depth=self._depth + 1, _place=self._at(node), _span=None)
                with self._process(), here:
                    self._read(word)
                for index, call in enumerate(self.calls[num_before:], num_before):
                    shell = Shell(tuple(words[:at]), call.around, tuple(words[at + 1 :]))
                    self.calls[index] = replace(call, around=around, shells=(shell, *call.shells))
                return

    def _source(self, words: Sequence[str]) -> None:
        """Follow a file; one in an unknown folder is looked for in that of the script."""
        name = MARK.split(words[0])[-1] if words else ""
        path = self._folder / (name if words and name == words[0] else name.lstrip("/"))
        if not path.is_file():
            shown = self.unknowns.shown(" ".join(words[:1]))
            self.not_found.append(f"{self._place} reads {shown}, which is not here")
            return
        with self._within(_place="", _file=f"{path.name} "), self._until("return"):
            text = path.read_text(encoding="utf-8", errors="replace")
            self._read(MARK.sub("?", text), is_lenient=True)

    # --- words ---

    def _one_word(self, node: Node | None) -> str:
        """What a word stands for, not split at blanks."""
        if node is None or node.type in ("extglob_pattern", "regex"):
            return "" if node is None else _text_of(node)
        return " ".join(self._words(node, splits=False))

    def _words(self, node: Node, *, splits: bool = True) -> list[str]:
        """The words that one word of the script stands for."""
        words, is_quoted = [""], False
        for piece in node.children if node.type == "concatenation" else (node,):
            texts: list[str] = []
            if piece.type in _STRINGS:
                texts = self._string(piece)
                is_quoted |= bool(texts)
            elif piece.type in _EXPANSIONS:
                texts = self._expand(piece, splits=splits)
                texts = texts if splits else [" ".join(texts)]
            elif piece.type != "comment":
                text = re.sub(r"\\(\n|(.))", r"\2", _text_of(piece)).translate(TO_SPLIT)
                if re.match(r"~(/|$)", text) and words == [""]:
                    text = self._mark("$HOME", "HOME", piece) + text[1:]
                texts = [text]
            if texts:
                words[-1] += texts[0]
                words += texts[1:]
        return words if is_quoted else [word for word in words if word]

    def _string(self, node: Node) -> list[str]:
        """What a quoted text stands for: one word, or those of a whole array."""
        text = _text_of(node)
        if node.type != "string":
            return [text.lstrip("$")[1:-1]]
        expands = [child for child in node.children if child.type in _EXPANSIONS]
        if expands and text == f'"{_text_of(expands[0]).lstrip()}"':
            return self._expand(expands[0])
        return [self._joined(node, 1)]

    def _joined(self, node: Node, num_quotes: int) -> str:
        """A text with its expansions replaced, without the quotes at either end."""
        raw, at, joined = _bytes_of(node), num_quotes, ""
        for child in node.children:
            if child.type in _EXPANSIONS:
                # The grammar puts blanks before an expansion into its node.
                blanks = len(_bytes_of(child)) - len(_bytes_of(child).lstrip())
                joined += _unescaped(raw[at : child.start_byte - node.start_byte + blanks])
                joined += " ".join(self._expand(child))
                at = child.end_byte - node.start_byte
        return joined + _unescaped(raw[at : len(raw) - num_quotes])

    def _expand(self, node: Node, *, splits: bool = False) -> list[str]:
        """What ``$…`` stands for: one word or those of a whole array, or those it is split into."""
        source = _text_of(node).lstrip()
        kinds = ("variable_name", "special_variable_name", "subscript")
        subject = next((child for child in node.children if child.type in kinds), None)
        operators = node.children_by_field_name("operator")
        sign = _text_of(operators[0]) if operators else ""
        if subject is None:
            words = [self._computed(node, source)]
        else:
            name, _, index = _text_of(subject).rstrip("]").partition("[")
            if name.isdecimal() and name != "0" and self._arguments is None:
                name = str(int(name) + self._num_shifted)
            values = self._elements(name, index)
            words = values or []
            is_set = values is not None and (any(values) or not sign.startswith(":"))
            if sign in ("-", ":-", "=", ":=", "+", ":+"):
                if is_set != (sign[-1] != "+"):
                    rest = [
                        each for each in node.children if each.start_byte >= operators[0].end_byte
                    ]
                    words = [
                        word for each in rest[:-1] for word in self._words(each, splits=splits)
                    ]
                    if sign[-1] == "=":
                        self._assign(name, words, node)
                    if any(
                        each.type in _STRINGS for part in rest for each in (part, *part.children)
                    ):
                        return words
            elif values is None or sign not in ("", "?", ":?") or node.children[1] != subject:
                words = [self._mark(source, name, node, is_set_by_job=values is not None)]
        return " ".join(words).translate(TO_SPLIT).split() if splits else words

    def _computed(self, node: Node, source: str) -> str:
        """The value of ``$((…))``, or what stands for that of a command."""
        if node.type == "arithmetic_expansion" and len(node.named_children) == 1:
            value = self._calculated(node.named_children[0])
            if isinstance(value, int):
                return str(value)
            for unknown in self.unknowns.of(value):
                if not unknown.is_set_by_job:
                    return self._mark(source, unknown.name, node)
            self._forget_calculated(node)
        source = f"$({source.strip('`')})" if source.startswith("`") else source
        return self._mark(source, "", node, is_set_by_job=True)

    def _calculated(self, node: Node) -> int | str:
        """The value of an arithmetic expression, or a text with the unknowns in it."""
        children, text = node.children, ""
        match node.type:
            case "parenthesized_expression":
                return self._calculated(children[1])
            case "binary_expression":
                left, right = self._calculated(children[0]), self._calculated(children[2])
                sign = children[1].type
                if not (isinstance(left, int) and isinstance(right, int)):
                    return f"{left} {right}"
                # Python rounds down and bash towards 0.
                if sign in _ARITHMETIC and (left >= 0 < right or sign not in "/%"):
                    return _ARITHMETIC[sign](left, right)
            case "variable_name":
                name = _text_of(node)
                text = "".join(self._elements(name, "") or [self._mark(f"${name}", name, node)])
            case _:
                text = self._one_word(node)
        return int(text) if NUMBER.fullmatch(text) else text

    def _elements(self, name: str, index: str) -> list[str] | None:
        """The value of a variable, of one element of an array or of all; None if it has none."""
        history = dict.fromkeys(self._histories.get(name, ()))
        if len(history) > 1:
            self._changed[name] = ", ".join(endings(history))
        values = self._values.get(name, [""] if name in self._may_hold_options else None)
        if name in ("@", "*"):
            values, index = self._arguments or [], name
        elif self._arguments is not None and name.isdecimal() and name != "0":
            values = self._arguments[int(name) - 1 : int(name)]
        if values is None or index == "@":
            return values
        if index == "*":
            return [" ".join(values)]
        if not (index or "0").isdecimal():
            return None
        return values[int(index or 0) :][:1] or [""]


def _parsed(text: str) -> Node:
    """The root of the syntax tree of a script."""
    import tree_sitter  # used by no other command
    import tree_sitter_bash

    language = tree_sitter.Language(tree_sitter_bash.language())
    return tree_sitter.Parser(language).parse(text.encode()).root_node


def _assigned_options(node: Node) -> Iterator[str]:
    """The variables to which a part of a script may assign options."""
    assigned = re.match(r"(\w+)\+?=[\s\"'(\\]*-", _text_of(node))
    if node.type == "variable_assignment" and assigned is not None:
        yield assigned[1]
    for child in node.named_children:
        yield from _assigned_options(child)


def _bytes_of(node: Node) -> bytes:
    return node.text or b""


def _text_of(node: Node) -> str:
    return _bytes_of(node).decode()


def _unescaped(text: bytes) -> str:
    """What stands between double quotes, without the backslashes that quote something."""
    return re.sub(r'\\(\n|([\\"$`]))', r"\2", text.decode(errors="replace"))
