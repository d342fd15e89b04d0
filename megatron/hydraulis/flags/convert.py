"""``hydraulis convert``: from a launch script of Megatron to the command to run here.

A script is read, not run: assignments of variables and arrays are followed from top to bottom. A
test of strings or whole numbers that are known decides its branches. Of any other condition all
branches count, so that the last value wins; variables with several values are listed. Commands in
``$(...)`` are left as they are and listed as unset.
"""

import argparse
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from megatron.hydraulis.errors import ConfigurationError

_ENTRY = re.compile(r"(?:^|/)\w*pretrain\w*\.py$")
"""The program among the words of a command."""
_NO_LAUNCHER = ("cp", "mv", "ln", "ls", "cat", "echo", "printf", "rsync", "scp", "test", "[", "[[")
"""Commands that name the program without calling it."""
_PREFIXES = ("export", "local", "declare", "readonly", "then", "do", "{", "time")
"""Words that may stand before an assignment or a command."""
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=", re.DOTALL)
_VARIABLE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*|[0-9])"
    r"|\{(?P<braced>[A-Za-z_]\w*|[0-9]+)(?:\[[@*]\])?(?:(?P<colon>:?)[-=](?P<default>[^{}]*))?\})"
)
_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}
_REDIRECTION = re.compile(r"[0-9]*[<>]")
_GIVEN_LATER = ("tokenizer_type", "data_path")
"""Attributes that a file of options may leave to the command line."""
_ALL_ARGUMENTS = ("$@", "$*")
_LITERAL_DOLLAR = "\ue000"
"""Stands for a $ that is quoted, until all variables are replaced."""


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """What a script runs."""

    launcher: tuple[str, ...]
    """The words before the program; none for a file of options."""
    options: tuple[str, ...]
    """The words after the program."""
    unset: tuple[str, ...]
    """Words of the command with variables that the script does not set."""
    changed: tuple[str, ...]
    """Variables of the command with several values, as in branches: ``N = 1, 2``."""

    @property
    def num_ranks(self) -> int | None:
        """Processes that torchrun starts, on all nodes; None if its words do not say."""
        per_node = self._number("nproc-per-node")
        num_nodes = self._number("nnodes") if "nnodes" in self._names else 1
        return per_node * num_nodes if per_node and num_nodes else None

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(word.lstrip("-").partition("=")[0].replace("_", "-") for word in self.launcher)

    def _number(self, name: str) -> int | None:
        if name not in self._names:
            return None
        at = self._names.index(name)
        value = self.launcher[at].partition("=")[2] or "".join(self.launcher[at + 1 : at + 2])
        return int(value) if value.isdigit() else None


@dataclass(frozen=True, slots=True)
class _Text:
    """A word of an expanded command."""

    text: str
    is_bare: bool
    """Whether no part of it was quoted."""


@dataclass(slots=True)
class _Word:
    """One word of the shell, in pieces: (text, whether it stands in single quotes, in double)."""

    pieces: list[tuple[str, bool, bool]] = field(default_factory=list)

    @property
    def is_bare(self) -> bool:
        """Whether no part of it is quoted."""
        return not any(single or double for _, single, double in self.pieces)

    @property
    def text(self) -> str:
        """As written, without quotes."""
        return "".join(text for text, _, _ in self.pieces)

    @property
    def before_quotes(self) -> str:
        """The text up to the first quote."""
        bare = ""
        for text, single, double in self.pieces:
            if single or double:
                break
            bare += text
        return bare

    def without_start(self, length: int) -> "_Word":
        """The word without its first characters, which are not quoted."""
        pieces = []
        for text, single, double in self.pieces:
            cut = min(length, len(text))
            length -= cut
            if text[cut:] or single or double:
                pieces.append((text[cut:], single, double))
        return _Word(pieces)


_SEPARATORS = ("\n", ";", "&", "|", "(", ")")
_ENDS_BARE = (*_SEPARATORS, " ", "\t", "'", '"', "`", "\\", "$")


def _words(text: str) -> Iterator[_Word | str]:
    """The words and separators of a shell script, without comments."""
    word: _Word | None = None
    position = 0
    while position < len(text):
        char = text[position]
        if char in " \t" or char in _SEPARATORS:
            if word is not None:
                yield word
                word = None
            if char in _SEPARATORS:
                yield char
            position += 1
        elif char == "#" and word is None:
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif char == "\\":
            following = text[position + 1 : position + 2]
            if following != "\n":
                word = word or _Word()
                word.pieces.append((following.replace("$", _LITERAL_DOLLAR), True, False))
            position += 2
        else:
            word = word or _Word()
            piece, position = _piece(text, position)
            word.pieces.append(piece)
    if word is not None:
        yield word


def _piece(text: str, start: int) -> tuple[tuple[str, bool, bool], int]:
    """The piece of a word that begins at start, and where it ends."""
    char, following = text[start], text[start + 1 : start + 2]
    if char in "'\"`":
        end = _closing_quote(text, start)
        inside = text[start + 1 : end]
        if char == "'":
            inside = inside.replace("$", _LITERAL_DOLLAR)
        elif char == '"':
            inside = inside.replace("\\\n", "").replace("\\$", _LITERAL_DOLLAR)
            inside = re.sub(r'\\(["\\])', r"\1", inside)
        else:
            inside = f"$({inside})"
        return (inside, char == "'", char == '"'), end + 1
    if char == "$" and following in ("(", "{"):
        end = _closing_bracket(text, start + 1) + 1
        return (text[start:end], False, False), end
    end = start + 1
    while end < len(text) and text[end] not in _ENDS_BARE:
        end += 1
    return (text[start:end], False, False), end


def _closing_quote(text: str, start: int) -> int:
    position = start + 1
    while position < len(text) and text[position] != text[start]:
        position += 2 if text[position] == "\\" and text[start] == '"' else 1
    if position >= len(text):
        line = text.count("\n", 0, start) + 1
        raise ConfigurationError(
            f"quotes of a launch script come in pairs but {text[start]} in line {line} is not "
            "closed; close it"
        )
    return position


def _closing_bracket(text: str, start: int) -> int:
    closing = {"(": ")", "{": "}"}[text[start]]
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == text[start]) - (text[position] == closing)
        if depth == 0:
            return position
    return len(text) - 1


def _outcome(words: Sequence[str]) -> bool | None:
    """What a test like ``[ A = B ]`` finds; None if it is no test or not all of it is known."""
    match words:
        case ["!", *others]:
            outcome = _outcome(others)
            return None if outcome is None else not outcome
        case ["[", *inside, "]"] | ["[[", *inside, "]]"] | ["test", *inside]:
            pass
        case _:
            return None
    if any("$" in word for word in inside):
        return None
    match inside:
        case ["!", *others]:
            return _outcome(["!", "test", *others])
        case ["-z", text]:
            return not text
        case ["-n", text]:
            return bool(text)
        case [left, "=" | "==", right] if not re.search(r"[*?\[]", right):
            return left == right
        case [left, "!=", right] if not re.search(r"[*?\[]", right):
            return left != right
        case [left, sign, right] if sign in _COMPARISONS and (left + right).isdigit():
            return _COMPARISONS[sign](int(left), int(right))
    return None


@dataclass(slots=True)
class _Condition:
    """An ``if`` whose ``fi`` has not come."""

    is_skipped: bool
    """Whether a branch that is not taken contains it."""
    is_decided: bool = False
    """Whether a branch is taken for certain: the following ones are not."""
    is_taken: bool = True
    """Whether the branch at hand may be taken."""

    def enter(self, outcome: bool | None) -> None:
        """Begin the branch of a condition; None if its outcome is not known."""
        self.is_taken = not (self.is_skipped or self.is_decided or outcome is False)
        self.is_decided |= outcome is True


class _Script:
    """Follows a script from top to bottom."""

    def __init__(self, fixed: Mapping[str, str]) -> None:
        """fixed: variables whose values the script does not change."""
        self._fixed = frozenset(fixed)
        self._values: dict[str, list[str]] = {name: [value] for name, value in fixed.items()}
        self._all_values: dict[str, list[str]] = {}
        self._used: set[str] = set()
        self._conditions: list[_Condition] = []
        self.commands: list[tuple[_Text, ...]] = []

    @property
    def changed(self) -> tuple[str, ...]:
        """The variables that were used and had several values: ``N = 1, 2``."""
        return tuple(
            f"{name} = {', '.join(values)}"
            for name, values in self._all_values.items()
            if name in self._used and len(set(values)) > 1
        )

    def read(self, text: str) -> None:
        """Follow the assignments and collect the commands, expanded."""
        command: list[_Word] = []
        array: tuple[str, bool, list[str]] | None = None
        for token in (*_words(text), "\n"):
            if isinstance(token, _Word):
                if array is not None:
                    array[2].extend(self._expand(token))
                elif not command and token.is_bare and token.text in ("else", "fi"):
                    self._leave_branch(token.text)
                else:
                    command.append(token)
            elif token == "(" and command and re.fullmatch(r"\w+\+?=", command[-1].text):
                name = command.pop().text
                array = (name.rstrip("+="), name.endswith("+="), [])
            elif token == ")" and array is not None:
                if self._is_followed:
                    self._assign(*array)
                array = None
            elif array is None:
                self._end(command, token)
                command = []

    @property
    def _is_followed(self) -> bool:
        """Whether commands at this place may run."""
        return all(condition.is_taken for condition in self._conditions)

    def _leave_branch(self, keyword: str) -> None:
        """Follow ``else`` or ``fi``."""
        if keyword == "else" and self._conditions:
            self._conditions[-1].enter(None)
        elif self._conditions:
            self._conditions.pop()

    def _enter_branch(self, words: list[_Word], separator: str) -> None:
        """Follow the first command after ``if`` or ``elif``, which separator ends."""
        if words[0].text == "if":
            self._conditions.append(_Condition(is_skipped=not self._is_followed))
        if self._conditions:
            tested = [text for word in words[1:] for text in self._expand(word)]
            # Of "A && B" one half does not decide.
            self._conditions[-1].enter(None if separator in ("&", "|") else _outcome(tested))

    def _assign(self, name: str, appends: bool, values: list[str]) -> None:
        if name in self._fixed:
            return
        if appends:
            self._values[name] = self._values.get(name, []) + values
            return
        self._values[name] = values
        self._all_values.setdefault(name, []).append(" ".join(" ".join(values).split()))

    def _end(self, words: list[_Word], separator: str) -> None:
        """Follow a command.

        separator: what ends it.
        """
        words = list(words)
        if words and words[0].is_bare and words[0].text in ("if", "elif"):
            self._enter_branch(words, separator)
            return
        if not self._is_followed:
            return
        while words:
            word = words[0]
            assigned = _ASSIGNMENT.match(word.before_quotes)
            if word.is_bare and (word.text in _PREFIXES or re.fullmatch(r"-\w", word.text)):
                words.pop(0)
            elif assigned is not None:
                value = words.pop(0).without_start(assigned.end())
                expanded = " ".join(self._expand(value, splits=False))
                self._assign(assigned["name"], bool(assigned["append"]), [expanded])
            else:
                break
        texts = [_Text(text, word.is_bare) for word in words for text in self._expand(word)]
        if texts and texts[0].text == "eval":
            self.read(" ".join(each.text for each in texts[1:]))
            return
        for each in texts if texts and texts[0].text not in _NO_LAUNCHER else ():
            if "pretrain" in each.text and re.search(r"\s", each.text):
                self.read(each.text)  # handed to another shell as one word
                return
        if texts:
            self.commands.append(tuple(texts))

    def _expand(self, word: _Word, *, splits: bool = True) -> list[str]:
        """The words that one word stands for."""
        texts = [""]
        for text, is_single, is_double in word.pieces:
            if is_single or "$" not in text:
                texts[-1] += text
                continue
            whole_array = re.fullmatch(r"\$\{(\w+)\[@\]\}", text)
            if whole_array and is_double and whole_array[1] in self._values and splits:
                self._used.add(whole_array[1])
                first, *others = self._values[whole_array[1]] or [""]
                texts[-1] += first
                texts += others
                continue
            expanded = _VARIABLE.sub(self._value_of, text)
            if is_double or not splits:
                texts[-1] += expanded
                continue
            # An unquoted variable is split at blanks.
            first, *others = expanded.split() or [""]
            texts[-1] += first
            texts += others
        return [text for text in texts if text] if word.is_bare else texts

    def _value_of(self, match: re.Match[str]) -> str:
        name, default = match["plain"] or match["braced"], match["default"]
        self._used.add(name)
        value = " ".join(self._values.get(name, []))
        if value or (name in self._values and not (default is not None and match["colon"])):
            return value
        return match[0] if default is None else _VARIABLE.sub(self._value_of, default.strip("'\""))


def read_launch_command(text: str, variables: Mapping[str, str] | None = None) -> LaunchCommand:
    """The command of a launch script, or of a file of options alone.

    variables: values that the script expects from its environment or its arguments.

    Raises:
        ConfigurationError: the script calls no program named pretrain….py, or calls it several
            times with other options, or has an open quote.
    """
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    if lines and lines[0].lstrip().startswith("--"):
        joined = " ".join(line.rstrip().removesuffix("\\") for line in lines)
        text = f"torchrun pretrain_gpt.py {joined}"
    script = _Script(variables or {})
    script.read(text)
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for words in script.commands:
        at = next((i for i, word in enumerate(words) if _ENTRY.search(word.text)), None)
        if not at or PurePath(words[0].text).name in _NO_LAUNCHER:
            continue
        end = next(
            (i for i, word in enumerate(words) if word.is_bare and _REDIRECTION.match(word.text)),
            len(words),
        )
        options = tuple(word.text for word in words[at + 1 : end])
        found[options] = tuple(word.text for word in words[:at])
    if not found:
        raise ConfigurationError(
            "a launch script calls pretrain_gpt.py, or another pretrain….py, but this one calls "
            "none; give the file that does, or a file with the options alone"
        )
    if len(found) > 1:
        raise ConfigurationError(
            f"a launch script has one command to convert but this one calls pretrain….py with "
            f"{len(found)} different lists of options; leave one of them in the file"
        )
    (options, launcher) = next(iter(found.items()))
    return LaunchCommand(
        launcher=tuple(word.replace(_LITERAL_DOLLAR, "$") for word in launcher),
        options=tuple(
            word.replace(_LITERAL_DOLLAR, "$") for word in options if word not in _ALL_ARGUMENTS
        ),
        unset=tuple(dict.fromkeys(word for word in (*launcher, *options) if "$" in word)),
        changed=script.changed,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument(
        "script",
        type=Path,
        metavar="SCRIPT",
        help="launch script that calls pretrain_gpt.py, or a file of its options",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable that the script takes from its environment, or from its arguments (1=…), "
        "or sets differently in branches; may be repeated",
    )
    parser.add_argument(
        "--num-ranks",
        type=int,
        metavar="N",
        help="ranks of the job (ranks). Default: those that the script's torchrun starts",
    )
    parser.add_argument(
        "--ignore-unknown-options",
        action="store_true",
        help="convert without options that Megatron does not know",
    )


def run(namespace: argparse.Namespace) -> int:
    """Print what becomes of each option, the strategy and the command to run.

    Returns 1, and prints no command, if options are refused or variables are not set.
    """
    # These import Megatron, which the help of the command does not need.
    from megatron.hydraulis.flags import checks
    from megatron.hydraulis.flags.config import default_run_dir
    from megatron.hydraulis.flags.defaults import differences, set_defaults
    from megatron.hydraulis.flags.describe import block_lines, option_lines, option_texts
    from megatron.hydraulis.flags.parser import FlagParser
    from megatron.hydraulis.flags.problems import Problems

    launch = read_launch_command(_read(namespace.script), _variables(namespace.set))
    options = [*launch.options]
    if namespace.ignore_unknown_options:
        options.append("--ignore-unknown-options")
    problems = Problems()
    parser = FlagParser()
    flags = parser.parse(options, problems)
    attempted = {*flags.attempted, *_GIVEN_LATER}
    with problems.collected():
        checks.check_required(checks.missing_flags(flags.args, attempted=attempted))
    sizes = {
        "tp": flags.args.tensor_model_parallel_size,
        "cp": flags.args.context_parallel_size,
        "pp": flags.args.pipeline_model_parallel_size,
    }
    kept = [
        " ".join((given.option, *map(shlex.quote, given.values)))
        for given in flags.given
        if given.dest != "ignore_unknown_options"
    ]
    before = dict(vars(flags.args))
    set_defaults(flags, before, default_run_dir(), has_cuda=True)

    texts = option_texts(
        flags.taken, flags.unknown, differences(parser, flags, before, uses_tp=sizes["tp"] > 1)
    )
    for line in (
        *block_lines("refused", "change or remove these first", problems.lines),
        *block_lines("unset", "variables that --set NAME=VALUE gives", launch.unset),
        *block_lines("changed", "variables with several values; the last is used", launch.changed),
        *option_lines(texts),
    ):
        print(line)
    num_ranks = namespace.num_ranks or launch.num_ranks
    print(_strategy_text(sizes, num_ranks), end="\n\n")
    if problems.lines or launch.unset:
        print("command      printed once nothing is refused or unset")
        return 1
    print(" \\\n    ".join((*_launcher_lines(launch), *kept)))
    dry_run = f"--num-ranks {num_ranks or 'N'} --dry-run"
    print(f"\nnext: hydraulis train FLAGS {dry_run}; without a GPU also --cost-profile FILE")
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: a launch script is a text file but reading it fails: {error}; correct the "
            "path"
        ) from error


def _variables(assignments: Sequence[str]) -> dict[str, str]:
    for each in assignments:
        if "=" not in each:
            raise ConfigurationError(
                f"--set takes NAME=VALUE but is {each!r}; write for example --set NNODES=2"
            )
    return dict(each.split("=", 1) for each in assignments)


def _launcher_lines(launch: LaunchCommand) -> tuple[str, ...]:
    """The script's own torchrun with its options, or a place to put a launcher."""
    words = launch.launcher
    if "torchrun" in [PurePath(word).name for word in words] or any(
        word.startswith("torch.distributed.") for word in words
    ):
        return (f"{shlex.join(words)} --no-python hydraulis train",)
    return ("torchrun [TORCHRUN OPTIONS] --no-python hydraulis train",)


def _strategy_text(sizes: Mapping[str, int], num_ranks: int | None) -> str:
    scheme = "".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "tp1"
    num_of_replica = sizes["tp"] * sizes["cp"] * sizes["pp"]
    if num_ranks is None:
        return (
            f"\nstrategy     replicas of {scheme}, {num_of_replica} ranks each; how many ranks the "
            "script starts is not clear: give --num-ranks N"
        )
    if num_ranks % num_of_replica:
        return (
            f"\nstrategy     none: replicas of {scheme} take {num_of_replica} ranks each, which "
            f"does not divide {num_ranks} ranks"
        )
    num_replicas = num_ranks // num_of_replica
    same = f"{num_replicas}*{scheme}" if num_replicas > 1 else scheme
    return (
        f"\nstrategy     --strategy '{same}' on {num_ranks} ranks equals its sizes of tp, cp and "
        "pp, with equal stages"
    )
