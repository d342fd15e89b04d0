"""``hydraulis convert``: from a launch script of Megatron to the command to run here.

A script is read, not run: assignments of variables and arrays are followed from top to bottom, both
branches of a condition count, and commands in ``$(...)`` are left as they are.
"""

import argparse
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.hydraulis.errors import ConfigurationError

_ENTRY = re.compile(r"(^|/)\w*pretrain\w*\.py$")
"""The program among the words of a command."""
_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*|[0-9@*])"
    r"|\{(?P<braced>[A-Za-z_]\w*|[0-9@*])(?:\[[@*]\])?(?::?[-=](?P<default>[^{}]*))?\})"
)
_REDIRECTION = re.compile(r"[0-9]*[<>]")
_TORCHRUN_RANKS = ("nproc-per-node", "nproc_per_node")
_TORCHRUN_NODES = ("nnodes",)


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """What a script runs."""

    options: tuple[str, ...]
    """The words after the program."""
    num_ranks: int | None
    """Processes that torchrun starts, if the script gives numbers."""

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Words with variables that the script does not set."""
        return tuple(word for word in self.options if "$" in word)


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
        return "".join(text for text, _, _ in self.pieces)


_SEPARATORS = ("\n", ";", "&", "|", "(", ")")
_ENDS_BARE = (*_SEPARATORS, " ", "\t", "'", '"', "\\", "$")


def _words(text: str) -> Iterator[_Word | str]:
    """The words and separators of a shell script, without comments."""
    word: _Word | None = None
    position = 0
    while position < len(text):
        char = text[position]
        if char == "\\":
            if text[position + 1 : position + 2] != "\n":
                word = word or _Word()
                word.pieces.append((text[position + 1 : position + 2], True, False))
            position += 2
        elif char in "'\"":
            end = _closing_quote(text, position)
            word = word or _Word()
            inside = text[position + 1 : end]
            if char == '"':
                inside = inside.replace("\\\n", "").replace('\\"', '"')
            word.pieces.append((inside, char == "'", char == '"'))
            position = end + 1
        elif char == "$" and text[position + 1 : position + 2] in ("(", "{"):
            end = _closing_bracket(text, position + 1)
            word = word or _Word()
            word.pieces.append((text[position : end + 1], False, False))
            position = end + 1
        elif char == "#" and word is None:
            position = text.find("\n", position)
            if position < 0:
                return
        elif char in " \t" or char in _SEPARATORS:
            if word is not None:
                yield word
                word = None
            if char in _SEPARATORS:
                yield char
            position += 1
        else:
            end = position + 1
            while end < len(text) and text[end] not in _ENDS_BARE:
                end += 1
            word = word or _Word()
            word.pieces.append((text[position:end], False, False))
            position = end
    if word is not None:
        yield word


def _closing_quote(text: str, start: int) -> int:
    position = start + 1
    while position < len(text) and text[position] != text[start]:
        position += 2 if text[position] == "\\" and text[start] == '"' else 1
    return position


def _closing_bracket(text: str, start: int) -> int:
    closing = {"(": ")", "{": "}"}[text[start]]
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == text[start]) - (text[position] == closing)
        if depth == 0:
            return position
    return len(text) - 1


class _Script:
    """Follows a script from top to bottom."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._values: dict[str, list[str]] = {k: [v] for k, v in variables.items()}
        self.commands: list[list[str]] = []

    def read(self, text: str) -> None:
        """Follow the assignments and collect the commands, expanded."""
        command: list[_Word] = []
        array: tuple[str, bool, list[str]] | None = None
        for token in (*_words(text), "\n"):
            if isinstance(token, _Word):
                if array is not None:
                    array[2].extend(self._expand(token))
                else:
                    command.append(token)
            elif token == "(" and command and re.fullmatch(r"\w+\+?=", command[-1].text):
                name = command.pop().text
                array = (name.rstrip("+="), name.endswith("+="), [])
            elif token == ")" and array is not None:
                name, appends, values = array
                self._values[name] = (self._values.get(name, []) if appends else []) + values
                array = None
            elif array is None:
                self._end(command)
                command = []

    def _end(self, command: list[_Word]) -> None:
        words = [w for w in command if w.text not in ("export", "local", "declare", "-x", "then")]
        while words:
            assigned = _ASSIGNMENT.fullmatch(words[0].text)
            if assigned is None or not re.match(r"[A-Za-z_]\w*\+?=", _first_bare(words[0])):
                break
            name = assigned["name"]
            value = _without_name(words.pop(0), len(name) + len(assigned["append"]) + 1)
            expanded = " ".join(self._expand(value, splits=False))
            old = " ".join(self._values.get(name, [])) if assigned["append"] else ""
            self._values[name] = [old + expanded]
        if words:
            self.commands.append([text for word in words for text in self._expand(word)])

    def _expand(self, word: _Word, *, splits: bool = True) -> list[str]:
        """The words that one word stands for."""
        texts = [""]
        for text, is_single, is_double in word.pieces:
            if is_single or "$" not in text:
                texts[-1] += text
                continue
            whole_array = re.fullmatch(r"\$\{(\w+)\[@\]\}", text)
            if whole_array and is_double and whole_array[1] in self._values and splits:
                values = self._values[whole_array[1]]
                if values:
                    texts[-1] += values[0]
                    texts += values[1:]
                continue
            expanded = _VARIABLE.sub(self._value_of, text)
            if is_double or not splits:
                texts[-1] += expanded
                continue
            # An unquoted variable is split at blanks.
            parts = expanded.split()
            if parts:
                texts[-1] += parts[0]
                texts += parts[1:]
        return [text for text in texts if text] if word.is_bare else texts

    def _value_of(self, match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        if name in self._values:
            return " ".join(self._values[name])
        default = match["default"]
        return match[0] if default is None else _VARIABLE.sub(self._value_of, default.strip("'\""))


def _first_bare(word: _Word) -> str:
    """The text of a word up to its first quote."""
    bare = ""
    for text, single, double in word.pieces:
        if single or double:
            break
        bare += text
    return bare


def _without_name(word: _Word, length: int) -> _Word:
    """A word without its first characters, which are not quoted."""
    pieces = []
    for text, single, double in word.pieces:
        cut = min(length, len(text))
        length -= cut
        if text[cut:] or single or double:
            pieces.append((text[cut:], single, double))
    return _Word(pieces)


def read_launch_command(text: str, variables: Mapping[str, str] | None = None) -> LaunchCommand:
    """The command of a launch script, or of a file of options alone.

    variables: values that the script expects from its environment or its arguments.

    Raises:
        ConfigurationError: the script calls no program named pretrain….py.
    """
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    if lines and lines[0].lstrip().startswith("--"):
        return LaunchCommand(tuple(shlex.split(text, comments=True)), None)
    script = _Script(variables or {})
    script.read(text)
    found = None
    for words in script.commands:
        # A command may be handed to another shell as one word: eval, bash -c, srun.
        flat = [part for word in words for part in (word.split() if " " in word else [word])]
        for words_ in (words, flat):
            at = next((i for i, word in enumerate(words_) if _ENTRY.search(word)), None)
            if at is not None:
                options = itertools.takewhile(
                    lambda word: not _REDIRECTION.match(word), words_[at + 1 :]
                )
                found = LaunchCommand(tuple(options), _num_ranks(words_[:at]))
                break
    if found is None:
        raise ConfigurationError(
            "a launch script calls pretrain_gpt.py, or another pretrain….py, but this one calls "
            "none; give the file that does, or a file with the options alone"
        )
    return found


def _num_ranks(launcher: Sequence[str]) -> int | None:
    """Processes on all nodes that the words of a torchrun command ask for."""
    numbers = {}
    for names in (_TORCHRUN_RANKS, _TORCHRUN_NODES):
        for at, word in enumerate(launcher):
            name, _, value = word.lstrip("-").partition("=")
            if name in names:
                value = value or (launcher[at + 1] if at + 1 < len(launcher) else "")
                numbers[names] = int(value) if value.isdigit() else None
    per_node = numbers.get(_TORCHRUN_RANKS)
    num_nodes = numbers.get(_TORCHRUN_NODES, 1)
    return per_node * num_nodes if per_node and num_nodes else None


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
        help="a variable that the script takes from its environment, or from its arguments (1=…); "
        "may be repeated",
    )
    parser.add_argument(
        "--num-ranks",
        type=int,
        metavar="N",
        help="ranks of the job (ranks). Default: those that the script's torchrun starts, else as "
        "many as its sizes of tp, cp and pp take",
    )
    parser.add_argument(
        "--ignore-unknown-options",
        action="store_true",
        help="convert without options that Megatron does not know",
    )


def run(namespace: argparse.Namespace) -> int:
    """Print the command, what becomes of each option, and the strategy; 1 if some are refused."""
    # These import Megatron, which the help of the command does not need.
    from megatron.hydraulis.flags.config import default_run_dir
    from megatron.hydraulis.flags.defaults import differences, set_defaults
    from megatron.hydraulis.flags.parser import FlagParser, Problems

    try:
        text = namespace.script.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{namespace.script}: a launch script is a text file but reading it fails: {error}; "
            "correct the path"
        ) from error
    variables = dict(each.split("=", 1) for each in namespace.set if "=" in each)
    launch = read_launch_command(text, variables)
    options = [*launch.options]
    if namespace.ignore_unknown_options:
        options.append("--ignore-unknown-options")
    problems = Problems()
    parser = FlagParser()
    flags = parser.parse(options, problems)
    before = dict(vars(flags.args))

    sizes = {
        name: getattr(flags.args, f"{dest}_parallel_size")
        for name, dest in (
            ("tp", "tensor_model"),
            ("cp", "context"),
            ("pp", "pipeline_model"),
        )
    }
    num_ranks_of_replica = sizes["tp"] * sizes["cp"] * sizes["pp"]
    num_ranks = namespace.num_ranks or launch.num_ranks or num_ranks_of_replica
    kept = [
        " ".join((given.option, *map(shlex.quote, given.values)))
        for given in flags.given
        if given.dest != "ignore_unknown_options"
    ]
    lines = [f"torchrun --nproc-per-node {num_ranks} --no-python hydraulis train", *kept]
    if num_ranks > num_ranks_of_replica and launch.num_ranks is None:
        lines[0] = lines[0].replace(f"--nproc-per-node {num_ranks}", "[TORCHRUN OPTIONS]")
    print(" \\\n    ".join(lines))
    _print_block("refused", "to be removed or changed first", problems.lines)
    _print_block(
        "unknown",
        "options that Megatron does not know, left out",
        [f"{typed}{f' (Megatron has {same})' if same else ''}" for typed, same in flags.unknown],
    )
    _print_block(
        "taken",
        "options without effect here, or with the same effect, left out",
        [": ".join(line) for line in flags.taken],
    )
    set_defaults(flags, default_run_dir(), has_cuda=True)
    _print_block(
        "differs",
        "from Megatron, as no option says otherwise",
        [str(difference) for difference in differences(parser, flags, before)],
    )
    _print_block("unset", "variables that --set NAME=VALUE can give", launch.unresolved)
    scheme = "".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "tp1"
    replicas = num_ranks // num_ranks_of_replica
    same = f"{replicas}*{scheme}" if replicas > 1 else scheme
    print(
        f"\nstrategy     --strategy '{same}' on {num_ranks} ranks equals this layout\n"
        "next         add --dry-run to the command, then `hydraulis propose --help` for a pool"
    )
    return 1 if problems.lines else 0


def _print_block(name: str, what: str, lines: Sequence[str]) -> None:
    if lines:
        print(f"\n{name:<12} {what}", *(f"  {line}" for line in lines), sep="\n")
